"""A step's output, made by whoever asks for it: in vLLM up to 0.20 a thread beside makes it.

With asynchronous scheduling and one process, vLLM hands each step's output to a thread, which waits for the device and
makes lists of tokens. The main thread launches the next step meanwhile, and the two hand Python's lock to each other
for it. Where a step takes the host longer than the device, that is the step's time. The main thread asks for the output
when it has launched that step, and by then the device has mostly finished: so it makes the output then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation

_THREAD = "async_output_thread"


class AskedOutput(Future[Any]):
    """An output that is made when its result is asked for the first time, by the thread that asks.

    Until then it is not done. vLLM therefore always launches a second step before it looks at the first one's output.

    Args:
        make: waits for the device and makes the output.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def result(self, timeout: float | None = None) -> Any:
        """The output; `timeout` is not heeded, as nobody else makes it."""
        self._ask()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What was raised instead of an output; `timeout` as of `result`."""
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


class WhenAsked:
    """Takes the place of the thread pool that makes outputs."""

    def submit(self, make: Callable[[], Any]) -> AskedOutput:
        """The output that `make` is going to make."""
        return AskedOutput(make)


def _unneeded(init_executor: Any) -> str | None:
    if _THREAD not in inspect.unwrap(init_executor).__code__.co_names:
        return "whoever asks makes a step's output here"
    return None


def _apply(transaction: Transaction, module: ModuleType) -> None:
    init = module.UniProcExecutor._init_executor

    @functools.wraps(init)
    def _init_executor(self: Any) -> None:
        init(self)
        pool = getattr(self, _THREAD)
        if pool is not None:  # with asynchronous scheduling
            pool.shutdown()  # it has had no work, and so no thread
            setattr(self, _THREAD, WhenAsked())

    transaction.set(module.UniProcExecutor, "_init_executor", _init_executor)


IMPLEMENTATIONS = {"outputs-when-asked": Implementation(_unneeded, _apply)}
