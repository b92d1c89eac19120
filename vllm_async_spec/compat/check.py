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
from vllm_async_spec.compat import compare
from vllm_async_spec.compat.builder_inputs import AbsentError, SubjectError, configured
from vllm_async_spec.compat.cases import BLOCK_SIZE, CASES, Call, Case, Host, MetadataFactory
from vllm_async_spec.compat.compare import Snapshot
from vllm_async_spec.compat.device import Device, Wait
from vllm_async_spec.compat.layer import Layer
from vllm_async_spec.compat.results import BackendResult, Build, CaseResult, Need
from vllm_async_spec.compat.thresholds import does_not_fit, threshold_cases

__all__ = [
    "Built",
    "Subject",
    "build_batch",
    "check",
    "failure_sentence",
    "least_need",
    "without_warnings",
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A builder to be checked.

    Attributes:
        name: What the tables call it.
        make: Makes a new builder on a device. May raise `SubjectError`.
        metadata: Makes the common metadata.
        source: Where the metadata's class comes from: `vLLM 0.32.0`, or `vllm-async-spec`.
        block_size: Tokens in a block of the KV cache.
        fields: Further fields of the common metadata for a batch.
        arguments: Further arguments of `build` for a batch; arguments that `build` does not take are left out.
        not_for: Why a batch does not apply; None if it does.
        common_prefix: Tokens of the common prefix that `build` is given for a batch.
        device: The device that the builder needs; None for any.
        layout: Parts of names of fields that say where data lies, not how long it is. Sized by a bound, such fields
            may differ and still be right.
        layer: Makes, from the builder, a layer that attends with its metadata; or a string that says why there is
            none. May raise `NoForwardError`.
        model: The model whose numbers the builder gets; empty if the builder asks for none.
    """

    name: str
    make: Callable[[Device], Any]
    metadata: MetadataFactory
    source: str
    block_size: int = BLOCK_SIZE
    fields: Callable[[Case, Device], Mapping[str, Any]] = field(default=lambda case, device: {})
    arguments: Callable[[Case, Device], Mapping[str, Any]] = field(default=lambda case, device: {})
    not_for: Callable[[Case], str | None] = field(default=lambda case: None)
    common_prefix: Callable[[Case], int] = field(default=lambda case: 0)
    device: Device | None = None
    layout: tuple[str, ...] = ()
    layer: Callable[[Any, Device], Layer] | str = "only the builder was given"
    model: str = ""


def check(
    subject: Subject,
    device: Device,
    *,
    cases: Sequence[Case] | None = None,
    known: BackendResult | None = None,
    patched: bool = False,
    device_name: str = "cpu",
) -> BackendResult:
    """Try a builder with every batch.

    Args:
        subject: The builder.
        device: Where it is made and run.
        cases: The batches; None for `CASES` and those of the builder's own thresholds.
        known: The result for another model. Then the builder is not given garbage that it need not know, and is not
            built twice to find the fields that two builds disagree on.
        patched: Whether the plugin's patches are applied; for the report.
        device_name: For the report.

    Returns:
        The result. It records what the builder raises.

    Raises:
        AbsentError: Making the builder shows that this release lacks it.
    """
    found = BackendResult(subject.name, subject.name, subject.source, patched, device_name, model=subject.model)
    try:
        builder = _make(subject, device)
    except AbsentError:
        raise
    except Exception as error:
        sentence = str(error) if isinstance(error, SubjectError) else f"can't be made: {failure_sentence(error)}"
        return replace(found, failure=sentence)
    if cases is None:
        cases = (*CASES, *threshold_cases(builder, subject.block_size))
    unsteady = {} if known is None else {each.case: frozenset(each.unsteady) for each in known.ran}
    results = tuple(_check_case(subject, case, device, unsteady.get(case.name)) for case in cases)
    return replace(found, builder=f"{type(builder).__module__}:{type(builder).__qualname__}", cases=results)


def failure_sentence(error: BaseException) -> str:
    """An exception in one line, with its innermost line outside PyTorch, Python's library and the suite."""
    frames = [
        (frame.filename, frame.lineno or 0, frame.name) for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    theirs = [frame for frame in readable(tuple(frames)) if not frame.file.startswith("vllm_async_spec/compat")]
    where = f" at {theirs[0].file}:{theirs[0].line}" if theirs else ""
    # PyTorch's C++ appends its own stack to a message.
    said = " ".join(str(error).partition("Exception raised from")[0].split())[:300]
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"


def _make(subject: Subject, device: Device) -> Any:
    """Clear the device and make a new builder, so that the device knows only this builder's buffers."""
    device.clear()
    with without_warnings(), device.watching():
        return subject.make(device)


def _check_case(subject: Subject, case: Case, device: Device, known: frozenset[str] | None) -> CaseResult:
    """Check one batch; with the unsteady fields `known`, build only what shows the least need."""
    realistic = subject.metadata.realistic
    result = CaseResult(case.name, None, realistic, case.call is Call.CAPTURE, model=subject.model)
    reason = subject.not_for(case) or does_not_fit(case, subject.block_size)
    if reason is None:
        builder = _make(subject, device)
        try:
            with configured(builder):
                reason = _has_no_such_call(builder, case)
        except Exception as error:
            reason = f"the check for CUDA graph support fails: {failure_sentence(error)}"
    if reason is not None:
        return replace(result, not_run=reason)
    exact, reference = _build(subject, case, Host.EXACT, device)
    if reference is None:
        return replace(result, not_run=f"fails with exact lengths too: {exact.failure}")
    unsteady = known
    if unsteady is None:
        _, again = _build(subject, case, Host.EXACT, device)
        unsteady = frozenset(each.field for each in (compare.differences(reference, again) if again else ()))
    builds = {Host.EXACT: exact}

    def built(host: Host) -> Build:
        if host not in builds:
            build, snapshot = _build(subject, case, host, device)
            if snapshot is not None:
                build = replace(build, differences=compare.differences(reference, snapshot, unsteady, subject.layout))
            builds[host] = build
        return builds[host]

    for host in subject.metadata.hosts if known is None else (realistic,):
        built(host)
    need = (
        Need.BLOCKING
        if exact.waits
        else least_need(lambda host: built(host).serves, has_bound=subject.metadata.has_bound)
    )
    return replace(result, need=need, builds=tuple(builds.values()), unsteady=tuple(sorted(unsteady)))


def least_need(serves: Callable[[Host], bool], *, has_bound: bool) -> Need:
    """The least that the host must know.

    Args:
        serves: Whether the builder is right and waits for nothing with a given host knowledge. Called as rarely as
            possible, only for `ABSENT`, `BOUND` and `GARBAGE_DECODES`.
        has_bound: Whether the common metadata has a field for the bound.

    Returns:
        The class of need, if the builder is right with exact lengths.
    """
    # Without a field for the bound, the bound was given as the lengths, which a builder may take for exact.
    if serves(Host.ABSENT) and (not has_bound or serves(Host.BOUND)):
        return Need.NONE
    if serves(Host.BOUND):
        return Need.PREFILL_ROWS if serves(Host.GARBAGE_DECODES) else Need.UPPER_BOUND
    return Need.EXACT


def _build(subject: Subject, case: Case, host: Host, device: Device) -> tuple[Build, Snapshot | None]:
    """Build once, where kernels run after a warm-up build; the snapshot is None if the build failed."""
    if device.validates_kernels:
        # Warm up, because compiling and tuning wait once for each size, and sizes depend on what the host knows.
        build_batch(subject, case, host, device, watched=False)
    made = build_batch(subject, case, host, device)
    if made.failure is not None:
        return Build(host, made.failure, made.waits, made.changed), None
    snapshot = compare.take({"": made.metadata, **device.kernel_calls()}, device, made.builder)
    skipped = tuple(f"{p} ({t})" for p, t in snapshot.skipped.items())
    return Build(host, None, made.waits, made.changed, (), snapshot.not_validated, skipped), snapshot


@dataclass(frozen=True, slots=True)
class Built:
    """One build.

    Attributes:
        builder: The builder.
        metadata: What the builder built; None if the build failed.
        failure: The exception and where it was raised; None if it finished.
        waits: Where the host would wait, in the order of time.
        changed: Fields of the common metadata that the builder changed.
    """

    builder: Any
    metadata: Any
    failure: str | None
    waits: tuple[Wait, ...]
    changed: tuple[str, ...]


def build_batch(subject: Subject, case: Case, host: Host, device: Device, *, watched: bool = True) -> Built:
    """Build a batch with a new builder, since a used one may remember other host lengths.

    Args:
        subject: The builder.
        case: The batch.
        host: What the host is told.
        device: Where the builder is made and run; the device is cleared before.
        watched: Whether to look for waits, which may disturb compilers.

    Returns:
        The build. It records what `build` raises.
    """
    builder = _make(subject, device)
    metadata = subject.metadata(
        case, host, block_size=subject.block_size, place=device.place, **subject.fields(case, device)
    )
    before = _tensors(metadata)
    arguments = dict(subject.arguments(case, device))
    built, failure = None, None
    watching = device.watching() if watched else contextlib.nullcontext(())
    with without_warnings(), torch.no_grad(), configured(builder), watching as waits:
        try:
            built = _call(builder, case, metadata, subject.common_prefix(case), arguments)
        except Exception as error:
            failure = failure_sentence(error)
    return Built(builder, built, failure, tuple(waits), _changed(metadata, before))


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


def _has_no_such_call(builder: Any, case: Case) -> str | None:
    """Why the builder can't be asked for this batch; None if it can."""
    if case.call is not Call.BUILD and not hasattr(builder, case.call.value):
        return f"the builder has no {case.call.value}"
    if case.call is not Call.CAPTURE:
        return None
    support = getattr(builder, "_cudagraph_support", None)
    ask = getattr(builder, "get_cudagraph_support", None)
    if ask is not None and hasattr(builder, "kv_cache_spec") and hasattr(builder, "vllm_config"):
        support = ask(builder.vllm_config, builder.kv_cache_spec)
    name = getattr(support, "name", "")
    if name == "NEVER":
        return "it is never captured"
    if name == "UNIFORM_SINGLE_TOKEN_DECODE" and max(case.query_lens) > 1:
        return "only one token a request is captured"
    return None


def _tensors(metadata: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The metadata's tensors by name, each with a copy."""
    return {name: (value, value.clone()) for name, value in _named(metadata) if isinstance(value, torch.Tensor)}


def _changed(metadata: Any, before: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> tuple[str, ...]:
    now = dict(_named(metadata))
    return tuple(
        name
        for name, (tensor, copy) in before.items()
        if now[name] is not tensor or tensor.shape != copy.shape or not torch.equal(tensor, copy)
    )


def _named(metadata: Any) -> list[tuple[str, Any]]:
    # A patch may make the last two properties, which vars() lacks; their names without underscore would copy.
    names = dict.fromkeys([*vars(metadata), "_seq_lens_cpu", "_num_computed_tokens_cpu"])
    return [(name, getattr(metadata, name, None)) for name in names]
