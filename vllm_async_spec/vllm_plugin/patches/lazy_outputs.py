"""Builds each step's output on the thread that asks for it; vLLM up to 0.20 uses a helper thread.

With asynchronous scheduling in one process, the helper thread waits for the device and converts tokens to lists. The
main thread launches the next step meanwhile. The two threads contend for the interpreter lock. Where a step takes the
host longer than the device, that lengthens the step. The main thread asks for the output after it has launched the next
step. By then the device has usually finished, so the main thread builds the output at that point.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

_THREAD = "async_output_thread"


class LazyOutput(Future[Any]):
    """A future whose output the first thread that reads it builds.

    Until then the future is not done. So vLLM always launches a second step before it reads the first step's output.

    Args:
        make: waits for the device and builds the output.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self._make = make

    def result(self, timeout: float | None = None) -> Any:
        """The output. `timeout` has no effect, because the calling thread builds it."""
        self._ask()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception that `make` raised, or None. `timeout` has no effect, as in `result`."""
        self._ask()
        return super().exception()

    def _ask(self) -> None:
        if not self.done():
            try:
                made = self._make()
            except Exception as error:
                self.set_exception(error)
            else:
                self.set_result(made)


class LazyPool:
    """Replaces the pool whose helper thread builds outputs."""

    def submit(self, make: Callable[[], object]) -> LazyOutput:
        """A future of the output that `make` builds."""
        return LazyOutput(make)


def _apply(transaction: Transaction, module: ModuleType) -> None:
    init = module.UniProcExecutor._init_executor

    @functools.wraps(init)
    def _init_executor(self: object) -> None:
        init(self)
        pool = getattr(self, _THREAD)
        if pool is not None:  # with asynchronous scheduling
            pool.shutdown()  # without work so far, the pool has no thread
            setattr(self, _THREAD, LazyPool())

    transaction.set(module.UniProcExecutor, "_init_executor", _init_executor)


IMPLEMENTATIONS = {"lazy-outputs": Implementation(_apply)}
