"""Stream helpers shared by plugin, generation and batching: counted waits for events, and CUDA graph capture."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from vllm_async_spec.sync_policy import ReadKind, host_read

Kept = TypeVar("Kept")
_WAITS = "called a synchronizing CUDA operation"
_INVALIDATED = "previous error during capture"
"""CUDA's words at the first call of a capture that is invalid already."""


class Arrival(Protocol):
    """Data on its way to the host, such as a CUDA event after a copy."""

    def query(self) -> bool:
        """Whether the data has arrived. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the data has arrived."""
        ...


def counted_wait(arrival: Arrival, what: str, nbytes: int) -> None:
    """Wait for an arrival of `nbytes` bytes. If it is not there yet, count the wait, under every sync policy."""
    if not arrival.query():
        with host_read(what, nbytes, ReadKind.EVENT):
            arrival.synchronize()


def captured(run: Callable[[], Kept], pool: Any, **capture: Any) -> Callable[[], Kept]:
    """Capture the kernels that `run` launches as a CUDA graph.

    Args:
        run: must have run before, so that the capture compiles nothing.
        pool: the graph's memory pool, a `torch.cuda.graph_pool_handle()`.
        capture: arguments of `torch.cuda.graph`, such as `stream`.

    Returns:
        A function that replays the graph on the current stream. Returns what `run` returned, valid after the replay.

    Raises:
        RuntimeError: `run` waits for the device, or does something else that can't be captured. The stream is then the
            one of before.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, **capture):
            kept = run()
    except BaseException:
        if torch.cuda.current_stream() != stream:
            _leave_capture(stream, pool)
        raise

    def replay() -> Kept:
        graph.replay()
        return kept

    return replay


def captured_beside_others(
    prepare: Callable[[], None], run: Callable[[], Kept], pool: Any, **capture: Any
) -> Callable[[], Kept]:
    """Capture as `captured` does, where other threads may use the device meanwhile; at most three times.

    Seen once on an H200, in `thread_local` mode: while another thread read tensors, the capture was invalid at its
    first kernel. What `run` launches in a capture does not run, so the capture can be made again.

    Args:
        prepare: called before each capture.
        run: as for `captured`.
        pool: as for `captured`.
        capture: as for `captured`.

    Raises:
        RuntimeError: as `captured`, or three captures were invalid.
    """
    for is_last in (False, False, True):
        prepare()
        try:
            return captured(run, pool, **capture)
        except RuntimeError as error:
            if is_last or not _began_invalid(error):
                raise
    raise AssertionError("the last attempt returns or raises")


def _began_invalid(error: BaseException) -> bool:
    """Whether the first error of a capture says that the capture was invalid before. `run`'s own would be another."""
    while error.__context__ is not None:
        error = error.__context__
    return _INVALIDATED in str(error)


def _leave_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Put back what `torch.cuda.graph` leaves in capture state if it can't end the capture."""
    torch.cuda.set_stream(stream)
    # The old state would refuse every random number outside a capture.
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(RuntimeError):  # the allocator may have left the pool already
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)


def refuse_waits(run: Callable[[], object]) -> None:
    """Run a function once, and raise `RuntimeError` if it waits for the device.

    Found during a capture, the wait would leave the allocator and the random generator in capture state.
    """
    with waits_refused():
        run()


@contextlib.contextmanager
def waits_refused() -> Iterator[None]:
    """Turn PyTorch's warning of a device wait into an error in this thread, and drop it in others.

    Raises:
        RuntimeError: the block waits for the device.
    """
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WAITS)
        show = warnings.showwarning

        def refuse(message: Warning | str, *where: Any, **more: Any) -> None:
            if _WAITS not in str(message):
                show(message, *where, **more)
            elif threading.get_ident() == here:
                raise RuntimeError(str(message))

        warnings.showwarning = refuse
        # The mode is process-wide: "error" would also make other threads' reads fail.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
