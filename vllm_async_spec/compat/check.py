"""Try one builder with every batch and everything the host may be told, and find its class of need.

The class is found by experiment, not by reading code. The builder runs without host lengths, with an upper bound and
with garbage; each result is compared with the one from exact lengths.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_async_spec.audit.stack import readable
from vllm_async_spec.compat import compare, declared
from vllm_async_spec.compat.branches.reached import Trace, recorded
from vllm_async_spec.compat.build_result import Build
from vllm_async_spec.compat.builder_inputs import AbsentError, SubjectError, configured
from vllm_async_spec.compat.cases import CASES, Call, Case, Host
from vllm_async_spec.compat.compare import Snapshot
from vllm_async_spec.compat.device import Device, Wait
from vllm_async_spec.compat.error_text import message_of, printable
from vllm_async_spec.compat.lacking import lacking
from vllm_async_spec.compat.model import against_model
from vllm_async_spec.compat.results import BackendResult, CaseResult, Need
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.thresholds import does_not_fit, threshold_cases
from vllm_async_spec.compat.updates import advance, relaunched, update_cases

_RECORDED = (Host.EXACT, Host.ABSENT, Host.BOUND)
"""Builds whose lines are recorded: with what an engine knows or could know. Recording costs a quarter of a build."""


def check(
    subject: Subject,
    device: Device,
    *,
    cases: Sequence[Case] | None = None,
    known: BackendResult | None = None,
    patched: bool = False,
    device_name: str = "cpu",
    keep: Callable[[BackendResult], None] = lambda found: None,
    trace: Trace | None = None,
) -> BackendResult:
    """Try a builder with every batch; the result records what the builder raises.

    Args:
        subject: The builder.
        device: Where it is made and run.
        cases: The batches; None for `CASES`, and those of the builder's own thresholds and updates.
        known: The result for another model. Then the builder is not given garbage that it need not know. Nor is it
            built in turn, or twice to find the fields that two builds disagree on.
        patched: Whether the plugin's patches are applied; for the report.
        device_name: For the report.
        keep: Called after each batch with the result so far.
        trace: Records the lines that run, also those of an earlier check; None for a new one.

    Raises:
        AbsentError: Making the builder shows that this release lacks it.
    """
    found = BackendResult(subject.name, subject.name, subject.source, patched, device_name, model=subject.model)
    try:
        builder = make_builder(subject, device)
        cases = _own_cases(builder, subject.block_size) if cases is None else cases
    except (AbsentError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a `sys.exit(0)` of the builder must not end the suite as if all were right
        sentence = str(error) if isinstance(error, SubjectError) else f"can't be made: {failure_sentence(error)}"
        return replace(found, failure=sentence)
    unsteady = {} if known is None else {each.case: frozenset(each.unsteady) for each in known.ran}
    found = replace(found, builder=f"{type(builder).__module__}:{type(builder).__qualname__}")
    snapshots: dict[str, Snapshot | None] = {}
    trace = trace or Trace()
    with trace.active():
        for case in cases:
            result, snapshots[case.name] = check_case(subject, case, device, unsteady.get(case.name))
            found = replace(found, cases=(*found.cases, result))
            keep(found)
        if known is None:
            found = replace(found, cases=in_turn(subject, cases, found.cases, snapshots, device))
    return replace(found, reached=trace.result())


def _own_cases(builder: Any, block_size: int) -> tuple[Case, ...]:
    try:
        return (*CASES, *threshold_cases(builder, block_size), *update_cases(builder))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SubjectError(f"its thresholds can't be read: {failure_sentence(error)}") from error


def in_turn(
    subject: Subject,
    cases: Sequence[Case],
    results: Sequence[CaseResult],
    snapshots: Mapping[str, Snapshot | None],
    device: Device,
) -> tuple[CaseResult, ...]:
    """Build all batches of steps in turn with one builder, as an engine does, told what an engine knows.

    `results` and `snapshots` are of builders of their own. In the results returned, `CaseResult.in_turn` has what the
    builder does only after other batches.
    """
    builder = make_builder(subject, device)
    found = []
    for case, result in zip(cases, results, strict=True):
        fresh, alone = snapshots[case.name], result.build(result.realistic)
        if fresh is None or alone is None or result.capture:
            found.append(result)
            continue
        given = case.without_padded_rows() if result.unpadded else case
        build, snapshot = build_once(subject, given, result.realistic, device, builder)
        known = set(map(str, alone.waits))
        waits = tuple(wait for wait in build.waits if str(wait) not in known)
        changed = tuple(name for name in build.changed if name not in alone.changed)
        build = replace(build, waits=waits, changed=changed)
        if snapshot is not None:
            unsteady = frozenset(result.unsteady)
            kept = compare.kept_differences(fresh, snapshot, case.live, unsteady, subject.layout)
            build = replace(build, differences=kept)
        found.append(replace(result, in_turn=build))
    return tuple(found)


def failure_sentence(error: BaseException) -> str:
    """An exception in one printable line, with its innermost line outside PyTorch, Python's library and the suite.

    If an unpacked release needs what the stubs lack, the line says what instead.
    """
    if (lacks := lacking(error)) is not None:
        return printable(lacks)
    frames = [
        (frame.filename, frame.lineno or 0, frame.name) for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    theirs = [frame for frame in readable(tuple(frames)) if not frame.file.startswith("vllm_async_spec/compat")]
    where = f" at {theirs[0].file}:{theirs[0].line}" if theirs else ""
    # PyTorch's C++ appends its own stack to a message.
    said = " ".join(message_of(error).partition("Exception raised from")[0].split())[:300]
    if not said and theirs:  # as from an assert without a message
        said = theirs[0].source
    return printable(f"{type(error).__name__}{': ' if said else ''}{said}{where}")


def make_builder(subject: Subject, device: Device) -> Any:
    """Clear the device and make a new builder, so that the device knows only this builder's buffers."""
    device.clear()
    with without_warnings(), device.watching():
        return subject.make(device)


def check_case(
    subject: Subject, case: Case, device: Device, known: frozenset[str] | None = None
) -> tuple[CaseResult, Snapshot | None]:
    """Try the builder with one batch, as vLLM would give the batch to it.

    With `known`, the fields that two builds of the batch disagree on, only what shows the least need is built.

    Returns:
        The result, and the snapshot of the build with the knowledge of an engine; None if that failed.
    """
    capture = case.call is Call.CAPTURE
    result = CaseResult(case.name, None, subject.metadata.realistic, capture, model=subject.model)
    reason = subject.not_for(case) or does_not_fit(case, subject.block_size)
    builder = make_builder(subject, device)
    case, failure = _reordered(builder, case)
    if failure is not None:
        return replace(result, failure=failure), None
    try:
        result = replace(result, declared=declared.host_need(builder))
        with configured(builder):
            reason = reason or declared.has_no_such_call(builder, case)
            refused = declared.refusal(builder, case) or subject.may_refuse(case)
            unpadded = declared.pads_no_rows(builder, case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return replace(result, failure=f"what it declares can't be read: {failure_sentence(error)}"), None
    if reason is not None:
        return replace(result, not_run=reason), None
    tried = _try_case(subject, case, result, device, known)
    if tried[0].failure is not None and refused is not None:
        return replace(result, not_run=f"{refused}; the builder raises {tried[0].failure}"), None
    if tried[0].failure is not None and unpadded is not None:
        return _try_case(subject, case.without_padded_rows(), replace(result, unpadded=unpadded), device, known)
    return tried


def _reordered(builder: Any, case: Case) -> tuple[Case, str | None]:
    """The batch in vLLM's order for the builder, and what asking the builder for its threshold raises."""
    try:
        return declared.reordered(builder, case), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return case, f"its reorder_batch_threshold can't be read: {failure_sentence(error)}"


def _try_case(
    subject: Subject, case: Case, result: CaseResult, device: Device, known: frozenset[str] | None
) -> tuple[CaseResult, Snapshot | None]:
    is_update = case.call is Call.UPDATE
    anew = replace(case, call=Call.BUILD) if is_update else case
    exact, reference = build_once(subject, anew, Host.EXACT, device)
    if reference is None:
        return replace(result, failure=exact.failure), None
    unsteady = known
    if unsteady is None:
        _, again = build_once(subject, anew, Host.EXACT, device)
        unsteady = frozenset(each.field for each in (compare.differences(reference, again) if again else ()))
    builds, snapshots = ({}, {}) if is_update else ({Host.EXACT: exact}, {Host.EXACT: reference})

    def built(host: Host) -> Build:
        if host not in builds:
            build, snapshot = build_once(subject, case, host, device)
            if snapshot is not None:
                build = replace(build, differences=compare.differences(reference, snapshot, unsteady, subject.layout))
                snapshots[host] = snapshot
            builds[host] = build
        return builds[host]

    for host in subject.metadata.hosts if known is None else (subject.metadata.realistic,):
        built(host)
    need = (
        Need.BLOCKING
        if built(Host.EXACT).waits
        else least_need(lambda host: built(host).serves, has_bound=subject.metadata.has_bound)
    )
    found = replace(
        result,
        need=need,
        builds=tuple(builds.values()),
        unsteady=tuple(sorted(unsteady)),
        against_model=against_model(reference, case, subject.block_size, subject.remakes),
    )
    return found, snapshots.get(subject.metadata.realistic)


def least_need(serves: Callable[[Host], bool], *, has_bound: bool) -> Need:
    """The least that the host must know, if the builder is right with exact lengths.

    Args:
        serves: Whether the builder is right and waits for nothing with a given host knowledge. Called as rarely as
            possible, only for `ABSENT`, `BOUND` and `GARBAGE_DECODES`.
        has_bound: Whether the common metadata has a field for the bound.
    """
    # Without a field for the bound, the bound was given as the lengths, which a builder may take for exact.
    if serves(Host.ABSENT) and (not has_bound or serves(Host.BOUND)):
        return Need.NONE
    if serves(Host.BOUND):
        return Need.PREFILL_ROWS if serves(Host.GARBAGE_DECODES) else Need.UPPER_BOUND
    return Need.EXACT


def build_once(
    subject: Subject, case: Case, host: Host, device: Device, builder: Any = None
) -> tuple[Build, Snapshot | None]:
    """Build once, where kernels run after a warm-up build; the snapshot is None if the build failed.

    Arguments are those of `build_batch`.
    """
    if device.validates_kernels:
        # Warm up, because compiling and tuning wait once for each size, and sizes depend on what the host knows.
        build_batch(subject, case, host, device, watched=False, builder=builder)
    made, updated = build_batch(subject, case, host, device, builder=builder), case.call is Call.UPDATE
    if made.failure is not None:
        return Build(host, made.failure, made.waits, made.changed, updated=updated), None
    snapshot = compare.take({"": made.metadata, **made.kernels}, device, made.builder)
    skipped = tuple(f"{p} ({t})" for p, t in snapshot.skipped.items())
    return Build(host, None, made.waits, made.changed, (), snapshot.not_validated, skipped, updated), snapshot


@dataclass(frozen=True, slots=True)
class Built:
    """One build.

    Attributes:
        case: The batch, in vLLM's order for the builder.
        metadata: What the builder built; None if the build failed.
        failure: The exception and where it was raised; None if it finished.
        waits: Where the host would wait, in the order of time.
        changed: Fields of the common metadata that the builder changed; in an update, that the update changed.
        kernels: Arguments of the kernels that did not run, by number and name.
    """

    case: Case
    builder: Any
    metadata: Any
    failure: str | None
    waits: tuple[Wait, ...]
    changed: tuple[str, ...]
    kernels: Mapping[str, Any] = field(default_factory=dict)


def build_batch(
    subject: Subject, case: Case, host: Host, device: Device, *, watched: bool = True, builder: Any = None
) -> Built:
    """Build a batch, and record what `build` raises.

    Args:
        subject: The builder.
        case: The batch.
        host: What the host is told.
        device: Where the builder is made and run; for a new builder the device is cleared before.
        watched: Whether to look for waits, which may disturb compilers.
        builder: A builder that has built other batches; None for a new one, which remembers no other host lengths.
    """
    is_new = builder is None
    if is_new:
        builder = make_builder(subject, device)
    device.begin_batch()
    case, failure = _reordered(builder, case)
    if failure is not None:
        return Built(case, builder, None, failure, (), ())
    metadata = later = _metadata(subject, case, host, device)
    if case.call is Call.UPDATE:
        # The host's bounds are as old as the build; the greatest length has room for all draft steps, as in vLLM.
        metadata = _metadata(subject, case.a_step_before(), host, device, max_seq_len=later.max_seq_len)
    before = _kept(metadata)
    arguments = dict(subject.arguments(case, device))
    built = launched = None
    watching = device.watching() if watched else contextlib.nullcontext(())
    recording = recorded(builder, device) if is_new and watched and host in _RECORDED else contextlib.nullcontext()
    with without_warnings(), torch.no_grad(), configured(builder), watching as waits, recording:
        try:
            built = _call(builder, case, metadata, subject.common_prefix(case), arguments)
            if built is None:
                raise TypeError("the builder returns None, which is no metadata")
            if case.call is Call.UPDATE:
                launched = len(device.kernel_calls())
                advance(metadata, later)
                before = _kept(metadata)
                builder.update_draft_decode_metadata(built)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = failure_sentence(error)
    kernels = relaunched(device.kernel_calls(), launched)
    return Built(case, builder, built, failure, tuple(waits), _changed(metadata, before), kernels)


def _metadata(subject: Subject, case: Case, host: Host, device: Device, **more: Any) -> Any:
    fields = {**subject.fields(case, device), **more}
    return subject.metadata(case, host, block_size=subject.block_size, place=device.place, **fields)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Hide warnings, such as those of lazy properties that wait; `Device.watching` still sees the waits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _call(builder: Any, case: Case, metadata: Any, common_prefix: int, arguments: dict[str, Any]) -> Any:
    if hasattr(builder, "arguments") and not hasattr(builder, "build"):  # an adapter of this package
        return builder.arguments(metadata)
    if case.call is Call.DRAFTING:
        return builder.build_for_drafting(common_attn_metadata=metadata, draft_index=case.draft_index)
    if case.call is Call.CAPTURE:
        return builder.build_for_cudagraph_capture(metadata)
    taken = inspect.signature(builder.build).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    extra = {name: value for name, value in arguments.items() if open_ended or name in taken}
    return builder.build(common_prefix_len=common_prefix, common_attn_metadata=metadata, **extra)


def _kept(metadata: Any) -> dict[str, tuple[Any, Any]]:
    """The metadata's tensors and plain values by name, each with a copy; other fields may be caches."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in _named(metadata):
        if isinstance(value, torch.Tensor):
            kept[name] = value, value.clone()
        elif isinstance(value, bool | int | float | str) and not name.startswith("_"):
            kept[name] = value, value
    return kept


def _changed(metadata: Any, before: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    now = dict(_named(metadata))
    return tuple(name for name, (value, copy) in before.items() if not _unchanged(now[name], value, copy))


def _unchanged(now: Any, value: Any, copy: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return type(now) is type(copy) and bool(now == copy)
    return now is value and value.shape == copy.shape and torch.equal(value, copy)


def _named(metadata: Any) -> list[tuple[str, Any]]:
    # A patch may make the last two properties, which vars() lacks; their names without underscore would copy.
    names = dict.fromkeys([*vars(metadata), "_seq_lens_cpu", "_num_computed_tokens_cpu"])
    return [(name, getattr(metadata, name, None)) for name in names]
