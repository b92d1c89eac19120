"""A request, as whoever submitted it sees it: what was asked for, and what has been generated so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field


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
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def result(self) -> list[int]:
        """The tokens of a finished request.

        Raises:
            RequestError: it could not be finished, or has not been yet.
        """
        if self.error is not None:
            raise self.error
        if not self.finished:
            raise RequestError("the request is not finished; run the batcher, or iterate over the request")
        return self.tokens

    async def __aiter__(self) -> AsyncIterator[int]:
        """The tokens from the first on, each when it is known; several may iterate.

        Raises:
            RequestError: it could not be finished. What was generated before is given first.
        """
        loop, changed, given = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._listeners.append(wake)
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
                if given == len(self.tokens):
                    await changed.wait()
        finally:
            self._listeners.remove(wake)
        if self.error is not None:
            raise self.error

    def emit(self, token: int) -> None:
        """Append a token; for the batcher."""
        self.tokens.append(token)
        self._tell()

    def finish(self, reason: str, error: RequestError | None = None) -> None:
        """Say that no more will come; for the batcher."""
        self.error = error
        self.finish_reason = reason
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
