"""A request as its caller sees it: its parameters, and the tokens generated so far.

The stepping thread runs no code of the request's readers. It asks their event loops to wake them, which never waits.
So a reader that is slow or raises harms only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

UNDRAWN = -1
"""What a step gives in place of a token where none can be drawn."""


class BatcherError(RuntimeError):
    """The batcher can't go on, or was called wrongly; the message says why."""


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
    """Seed of sampling: the same seed gives the same tokens, whatever else is in the batch."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far, the end of sequence included."""
    finish_reason: str | None = None
    """`eos`, `length`, `cancelled` or `error`; None until the request is finished."""
    error: RequestError | None = None
    owner: object = field(default=None, repr=False)
    """What only requests of the same batcher have."""
    _listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = field(default_factory=dict)
    """The event that each iterator waits for, and the iterator's event loop."""

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def result(self) -> list[int]:
        """The tokens of a finished request.

        Raises:
            RequestError: the request failed, or is not finished yet.
        """
        self._raise_error()
        if not self.finished:
            raise RequestError("the request is not finished; run the batcher, or iterate over the request")
        return self.tokens

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the tokens from the first on, each when it is known; several readers may iterate.

        The event loop must live as long as the iteration: closing the loop midway ends the request.

        Raises:
            RequestError: the request failed. Tokens generated before are yielded first.
        """
        changed, given = asyncio.Event(), 0
        self._listeners[changed] = asyncio.get_running_loop()
        try:
            while True:
                changed.clear()
                # Read this before the tokens: another thread appends the last token before it finishes the request.
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
        """Append tokens; called by the batcher.

        Returns:
            An error if an iterator's event loop takes no more tokens, else None.
        """
        self.tokens.extend(tokens)
        return self._tell()

    def finish(self, reason: str, error: RequestError | None = None) -> None:
        """End the request; called by the batcher."""
        self.error = error
        self.finish_reason = reason
        self._tell()

    def _raise_error(self) -> None:
        if self.error is not None:
            # A copy: each raise extends an error's traceback, which would keep one caller's frames alive for others.
            raise RequestError(*self.error.args)

    def _tell(self) -> RequestError | None:
        failure = None
        for changed, loop in self._listeners.copy().items():
            try:
                loop.call_soon_threadsafe(changed.set)
            except Exception as error:
                # If the listener is gone already, its iteration ended before the event loop did.
                if self._listeners.pop(changed, None) is not None:
                    failure = RequestError(
                        f"the event loop that iterates over this request takes no more tokens, because "
                        f"{type(error).__name__}: {error}; keep the loop running until the request is finished"
                    )
        return failure
