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

from vllm_async_spec.compat import declared
from vllm_async_spec.compat.builder_inputs import LAYER, configured
from vllm_async_spec.compat.cases import CASES, UPDATED, Call, Case, Host
from vllm_async_spec.compat.check import (
    build_batch,
    check_case,
    failure_sentence,
    least_need,
    make_builder,
    without_warnings,
)
from vllm_async_spec.compat.device import Device, is_lost
from vllm_async_spec.compat.layer import Batch, NoForwardError
from vllm_async_spec.compat.results import Attended, BackendResult, CaseResult, Need
from vllm_async_spec.compat.subject import Subject

FORWARD_SECONDS = 600.0
"""Time for all batches of one builder after the first, for which kernels may compile for minutes."""


def attend(
    subject: Subject,
    device: Device,
    found: BackendResult,
    *,
    cases: Sequence[Case] = CASES,
    seconds: float = FORWARD_SECONDS,
    keep: Callable[[BackendResult], None] = lambda found: None,
) -> BackendResult:
    """Attend over all batches that were built.

    Args:
        subject: The builder, and its layer.
        device: Where the builder was checked.
        found: What `check` found.
        cases: The batches that `check` was given.
        seconds: Seconds after the first batch during which further batches may start.
        keep: Called after each batch with the result so far.

    Returns:
        `found`, with the results of attention and the need that they show. It records what a layer raises.
    """
    if isinstance(subject.layer, str):
        return replace(found, not_attended=subject.layer)
    if not found.steps:
        return replace(found, not_attended="no batch of a step was built")
    if is_lost(device):
        lost = "the GPU failed in an earlier builder's forward and is unusable"
        return replace(found, not_attended=lost, unfinished=f"attention was not tried: {lost}")
    by_name = {case.name: case for case in (*cases, *UPDATED)}
    until = None
    attended: list[CaseResult] = []
    for number, each in enumerate(found.cases):
        case = by_name.get(each.case)
        if each.model != subject.model:
            attended.append(each)
            continue
        if case is None:
            told = () if each.need is None else (Attended(each.realistic, _THRESHOLD),)
            attended.append(replace(each, attended=told))
            continue
        try:
            attended.append(_attended_as_given(subject, case, each, device, until))
        except _LostError as error:
            failed = replace(each, attended=(Attended(error.host, failure=str(error)),))
            return replace(found, cases=(*attended, failed, *found.cases[number + 1 :]), not_attended=str(error))
        until = until or time.monotonic() + seconds
        keep(replace(found, cases=(*attended, *found.cases[number + 1 :])))
    results = tuple(attended)
    found = replace(found, unfinished=_left_out(results, seconds))
    if any(each.was_attended for each in results):
        return replace(found, cases=results, not_attended=None)
    reasons = Counter(
        each.not_run or f"its forward fails: {each.failure}"
        for case in results
        if not case.capture
        for each in case.attended
        if each.not_run or each.failure
    )
    return replace(found, cases=results, not_attended=reasons.most_common(1)[0][0] if reasons else "no batch was built")


_THRESHOLD = "a batch for the builder's thresholds is built only, because a reference for it takes too long"
_CAPTURE = "this batch only records a CUDA graph, which other batches replay"


def _left_out(results: Sequence[CaseResult], seconds: float) -> str | None:
    """The batches for which there was no time, in a sentence with the remedy; None if there are none."""
    names = [case.case for case in results if any(each.out_of_time for each in case.attended)]
    if not names:
        return None
    return (
        f"attention was not tried with {', '.join(names)}, because its forwards took {seconds:.0f} seconds; "
        "give --forward-seconds, or pytest's --async-spec-forward-seconds, a larger number"
    )


def _attended_as_given(
    subject: Subject, case: Case, found: CaseResult, device: Device, until: float | None
) -> CaseResult:
    """Attend one batch; if its padding rows make the forward fail and vLLM would not make them, without these."""
    if found.unpadded is not None:
        return _attended(subject, case.without_padded_rows(), found, device, until)
    tried = _attended(subject, case, found, device, until)
    if not tried.failed or not case.padded:
        return tried
    builder = build_batch(subject, case, Host.EXACT, device).builder
    with configured(builder):
        unpadded = declared.pads_no_rows(builder, case)
    if unpadded is None:
        return tried
    case = case.without_padded_rows()
    again, _ = check_case(subject, case, device)
    return _attended(subject, case, replace(again, unpadded=unpadded, in_turn=found.in_turn), device, until)


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
                done[host] = Attended(host, "the time limit for this builder's forwards was reached", out_of_time=True)
            else:
                done[host] = _attend(subject, case, host, device)
        return done[host]

    def serves(host: Host) -> bool:
        build = found.build(host)
        return build is not None and build.serves and told(host).right is not False and told(host).failure is None

    built = {each.host for each in found.builds if each.failure is None}
    for host in dict.fromkeys([Host.EXACT, found.realistic]):
        if host in built:
            told(host)
    need = found.need
    # If attention is wrong or fails even with exact lengths, that says nothing of what the host must know.
    exact = told(Host.EXACT)
    if need is not Need.BLOCKING and exact.right is not False and exact.failure is None:
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = failure_sentence(error)
        if is_lost(device):
            told = f"batch {case.name!r}, told {host.value}"
            raise _LostError(f"its forward fails: {failure}; {told}; the GPU is unusable", host) from error
        allowed = declared.unsupported(subject.backend, make_builder(subject, device), subject.block_size)
        if allowed is not None:
            return Attended(host, f"{allowed}; the forward raises {failure}")
        return Attended(host, failure=failure)


class _LostError(RuntimeError):
    """A kernel failed, after which every CUDA call of this process fails; `host` is what the host was told."""

    def __init__(self, message: str, host: Host) -> None:
        super().__init__(message)
        self.host = host


def _run(subject: Subject, case: Case, host: Host, device: Device, *, watched: bool = True) -> Attended:
    assert not isinstance(subject.layer, str)
    built = build_batch(subject, case, host, device, watched=watched)
    if built.failure is not None:
        raise NoForwardError(f"building the metadata again fails: {built.failure}")
    prefix = subject.common_prefix(case)
    context = _forward_context(built.builder, built.metadata)
    with torch.no_grad(), without_warnings(), configured(built.builder), context:
        batch = Batch.of(built.case, device, block_size=subject.block_size, common_prefix=prefix)
        layer = subject.layer(built.builder, device)
        layer.fill(batch)
        before = len(device.kernel_calls())
        with device.watching() if watched else contextlib.nullcontext(()) as waits:
            output = layer.attend(built.metadata)
        for launched in list(device.kernel_calls())[before:]:
            raise NoForwardError(
                f"its forward launches {launched.split()[-1]}, and no kernel runs on a simulated device"
            )
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
