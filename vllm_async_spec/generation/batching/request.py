"""A request, as whoever submitted it sees it: what was asked for, and what has been generated so far.

The thread that steps runs no code of those who iterate. It asks their event loops to wake them, which never waits. So
an iterator that is slow or raises harms itself alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field


class BatcherError(RuntimeError):
    """The batcher can't go on, or was called in a way that can't be; the message says why."""


class RequestError(ValueError):
    """A request can't be served, or could not be finished; the message says why, and what to do."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate; `ContinuousBatcher.submit` makes it. `async for` gives its tokens as they arrive."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of sampling: the same seed gives the same tokens, whatever else is in the batch."""
    tokens: list[int] = field(default_factory=list)
    """What has been generated so far, the end of sequence included."""
    finish_reason: str | None = None
    """`eos`, `length`, `cancelled` or `error`; None while it goes on."""
    error: RequestError | None = None
    _listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = field(default_factory=dict)
    """What each iterator waits for, and the event loop that it does so in."""

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def result(self) -> list[int]:
        """The tokens of a finished request.

        Raises:
            RequestError: it could not be finished, or has not been yet.
        """
        self._raise_error()
        if not self.finished:
            raise RequestError("the request is not finished; run the batcher, or iterate over the request")
        return self.tokens

    async def __aiter__(self) -> AsyncIterator[int]:
        """The tokens from the first on, each when it is known; several may iterate.

        The event loop must live as long as the iteration: one that is closed in the middle ends the request.

        Raises:
            RequestError: it could not be finished. What was generated before is given first.
        """
        changed, given = asyncio.Event(), 0
        self._listeners[changed] = asyncio.get_running_loop()
        try:
            while True:
                changed.clear()
                # Read before the tokens: another thread appends the last one first, and finishes then.
                finished = self.finished
                for token in self.tokens[given:]:
                    given += 1
                    yield token
                if finished:
                    break
                if given >= len(self.tokens):
                    await changed.wait()
        finally:
            self._listeners.pop(changed, None)
        self._raise_error()

    def emit(self, tokens: Sequence[int]) -> RequestError | None:
        """Append tokens; for the batcher.

        Returns:
            Why an iterator can't be told of them, if so. It will never take another.
        """
        self.tokens.extend(tokens)
        return self._tell()

    def finish(self, reason: str, error: RequestError | None = None) -> None:
        """Say that no more will come; for the batcher."""
        self.error = error
        self.finish_reason = reason
        self._tell()

    def _raise_error(self) -> None:
        if self.error is not None:
            # A new one: each raise adds to an error's traceback, and so keeps the frames of a caller alive for others.
            raise RequestError(*self.error.args)

    def _tell(self) -> RequestError | None:
        failure = None
        for changed, loop in self._listeners.copy().items():
            try:
                loop.call_soon_threadsafe(changed.set)
            except Exception as error:
                # Where it is gone, the iteration had ended before the event loop did.
                if self._listeners.pop(changed, None) is not None:
                    failure = RequestError(
                        f"the event loop that iterates over this request takes no more tokens, because "
                        f"{type(error).__name__}: {error}; let it run until the request is finished"
                    )
        return failure
