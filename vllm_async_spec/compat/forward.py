"""Attend with built metadata: find the waits in a layer's forward, and check its output.

Metadata can be right field by field and wrong for the kernel, and a forward may wait by itself. So, where kernels run,
the suite attends over each batch with metadata built from exact host lengths. Then it attends with what an engine with
asynchronous speculative decoding knows, and with the least that the builder seems to need. If attention with the last
is wrong, the builder needs more.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import LAYER, configured
from vllm_async_spec.compat.cases import CASES, Call, Case, Host
from vllm_async_spec.compat.check import Subject, build_batch, failure_sentence, least_need, without_warnings
from vllm_async_spec.compat.device import Device, is_lost
from vllm_async_spec.compat.layer import Batch, NoForwardError
from vllm_async_spec.compat.results import Attended, BackendResult, CaseResult, Need

__all__ = ["attend"]

_SECONDS = 90.0
"""Time for all batches of one builder after the first, for which kernels may compile for minutes."""


def attend(
    subject: Subject,
    device: Device,
    found: BackendResult,
    *,
    cases: Sequence[Case] = CASES,
    seconds: float = _SECONDS,
) -> BackendResult:
    """Attend over all batches that were built.

    Args:
        subject: The builder, and its layer.
        device: Where the builder was checked.
        found: What `check` found.
        cases: The batches that `check` was given.
        seconds: Seconds after the first batch during which further batches may start.

    Returns:
        `found`, with the results of attention and the need that they show. It records what a layer raises.
    """
    if isinstance(subject.layer, str):
        return replace(found, not_attended=subject.layer)
    if not found.steps:
        return replace(found, not_attended="no batch of a step was built")
    if is_lost(device):
        return replace(found, not_attended="the GPU failed in an earlier builder's forward and is unusable")
    by_name = {case.name: case for case in cases}
    until = None
    attended: list[CaseResult] = []
    for each in found.cases:
        case = by_name.get(each.case)
        if case is None or each.model != subject.model:
            attended.append(each)  # a batch of the builder's thresholds, or another model's
            continue
        try:
            attended.append(_attended(subject, case, each, device, until))
        except _LostError as error:
            return replace(found, not_attended=str(error))
        until = until or time.monotonic() + seconds
    results = tuple(attended)
    if any(each.was_attended for each in results):
        return replace(found, cases=results, not_attended=None)
    reasons = Counter(each.not_run for case in results if not case.capture for each in case.attended if each.not_run)
    return replace(found, cases=results, not_attended=reasons.most_common(1)[0][0] if reasons else "no batch was built")


_CAPTURE = "this batch only records a CUDA graph, which other batches replay"


def _attended(subject: Subject, case: Case, found: CaseResult, device: Device, until: float | None) -> CaseResult:
    """Attend one batch with exact lengths, realistic ones, the least that it needs, and garbage for unneeded ones."""
    if found.need is None:
        return found
    done: dict[Host, Attended] = {}

    def told(host: Host) -> Attended:
        if host not in done:
            if case.call is Call.CAPTURE:
                done[host] = Attended(host, _CAPTURE)
            elif until is not None and time.monotonic() > until:
                done[host] = Attended(host, "the time limit for this builder's forwards was reached")
            else:
                done[host] = _attend(subject, case, host, device)
        return done[host]

    def serves(host: Host) -> bool:
        build = found.build(host)
        return build is not None and build.serves and told(host).right is not False

    built = {each.host for each in found.builds if each.failure is None}
    for host in dict.fromkeys([Host.EXACT, found.realistic]):
        if host in built:
            told(host)
    need = found.need
    # If attention is wrong even with exact lengths, wrong output says nothing of what the host must know.
    if need is not Need.BLOCKING and told(Host.EXACT).right is not False:
        need = max(need, least_need(serves, has_bound=found.realistic is Host.BOUND))
    garbage = {Need.NONE: Host.GARBAGE, Need.PREFILL_ROWS: Host.STALE, Need.UPPER_BOUND: Host.STALE}.get(need)
    if garbage is not None:
        serves(garbage)
    return replace(found, need=need, attended=tuple(done.values()))


def _attend(subject: Subject, case: Case, host: Host, device: Device) -> Attended:
    try:
        if device.validates_kernels:
            # Warm up, because compiling and tuning wait once for each size, and sizes depend on what the host knows.
            _run(subject, case, host, device, watched=False)
        return _run(subject, case, host, device)
    except NoForwardError as error:
        return Attended(host, str(error))
    except Exception as error:
        failure = f"its forward fails: {failure_sentence(error)}"
        if is_lost(device):
            raise _LostError(f"{failure}; batch {case.name!r}, told {host.value}; the GPU is unusable") from error
        return Attended(host, failure)


class _LostError(RuntimeError):
    """A kernel failed, after which every CUDA call of this process fails."""


def _run(subject: Subject, case: Case, host: Host, device: Device, *, watched: bool = True) -> Attended:
    assert not isinstance(subject.layer, str)
    built = build_batch(subject, case, host, device, watched=watched)
    if built.failure is not None:
        raise NoForwardError(f"building the metadata again fails: {built.failure}")
    prefix = subject.common_prefix(case)
    context = _forward_context(built.builder, built.metadata)
    with torch.no_grad(), without_warnings(), configured(built.builder), context:
        batch = Batch.of(case, device, block_size=subject.block_size, common_prefix=prefix)
        layer = subject.layer(built.builder, device)
        layer.fill(batch)
        with device.watching() if watched else contextlib.nullcontext(()) as waits:
            output = layer.attend(built.metadata)
        difference = _difference(output, layer.expected())
    return Attended(host, None, tuple(waits), difference)


def _difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    assert output.shape == expected.shape, f"the output is {tuple(output.shape)}, not {tuple(expected.shape)}"
    off = (output.float() - expected).abs() / (1 + expected.abs())
    # max() may skip NaN.
    return math.nan if bool(off.isnan().any()) else float(off.max())


@contextlib.contextmanager
def _forward_context(builder: Any, metadata: Any) -> Iterator[None]:
    """Set vLLM's forward context, as in an engine; do nothing without vLLM."""
    config = getattr(builder, "vllm_config", None)
    if config is None or "vllm" not in sys.modules:
        yield
        return
    from vllm.forward_context import set_forward_context

    enter: Callable[..., contextlib.AbstractContextManager[Any]] = set_forward_context
    with enter({LAYER: metadata}, config):
        yield
