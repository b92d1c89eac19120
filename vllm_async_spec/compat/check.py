"""Trying one builder: every batch under all that the host may be told, and what follows from it.

The class of need is found by experiment, not by reading: what the builder does without host lengths, with a bound of
them, and with garbage for them, each compared with what it makes of exact ones.
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
        metadata: Makes what it is given.
        source: Whose metadata that is: `vLLM 0.32.0`, or `vllm-async-spec`.
        block_size: Tokens in a block of the KV cache.
        fields: Further fields of the common metadata for a batch.
        arguments: Further arguments of `build` for a batch; those that it does not take are left out.
        not_for: Why a batch does not apply; None if it does.
        common_prefix: How many tokens at the start of all requests `build` is told to be the same.
        device: Where it must be tried; None for anywhere.
        layout: Parts of field names that say where things lie, and not how long they are: sized by a bound, they
            differ and are right.
        layer: Makes a layer that attends with what a builder has built, from the builder; or why there is none. May
            raise `NoForwardError`.
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
    layer: Callable[[Any, Device], Layer] | str = "only its builder is known"


def check(
    subject: Subject,
    device: Device,
    *,
    cases: Sequence[Case] = CASES,
    patched: bool = False,
    device_name: str = "cpu",
) -> BackendResult:
    """Try a builder with every batch.

    Args:
        subject: The builder.
        device: Where it is made and run.
        cases: The batches.
        patched: Whether the plugin's patches are applied; for the report.
        device_name: For the report.

    Returns:
        What was found. What the builder raises is found too, not raised.

    Raises:
        AbsentError: It turns out that this release does not have the builder.
    """
    found = BackendResult(subject.name, subject.name, subject.source, patched, device_name)
    try:
        builder = _make(subject, device)
    except AbsentError:
        raise
    except Exception as error:
        sentence = str(error) if isinstance(error, SubjectError) else f"can't be made: {failure_sentence(error)}"
        return replace(found, failure=sentence)
    results = tuple(_check_case(subject, case, device) for case in cases)
    return replace(found, builder=f"{type(builder).__module__}:{type(builder).__qualname__}", cases=results)


def failure_sentence(error: BaseException) -> str:
    """An exception in one line, with the innermost line of somebody else's code that it went through."""
    frames = [
        (frame.filename, frame.lineno or 0, frame.name) for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    theirs = [frame for frame in readable(tuple(frames)) if not frame.file.startswith("vllm_async_spec/compat")]
    where = f" at {theirs[0].file}:{theirs[0].line}" if theirs else ""
    # What PyTorch's C++ adds to a message is its own stack.
    said = " ".join(str(error).partition("Exception raised from")[0].split())[:300]
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"


def _make(subject: Subject, device: Device) -> Any:
    """A new builder, whose buffers the device knows, on a device that knows nothing else."""
    device.clear()
    with without_warnings(), device.watching():
        return subject.make(device)


def _check_case(subject: Subject, case: Case, device: Device) -> CaseResult:
    result = CaseResult(case.name, None, subject.metadata.realistic, case.call is Call.CAPTURE)
    reason = subject.not_for(case)
    if reason is None:
        builder = _make(subject, device)
        try:
            with configured(builder):
                reason = _has_no_such_call(builder, case)
        except Exception as error:
            reason = f"asking whether it can be captured fails: {failure_sentence(error)}"
    if reason is not None:
        return replace(result, not_run=reason)
    exact, reference = _build(subject, case, Host.EXACT, device)
    if reference is None:
        return replace(result, not_run=f"fails with exact lengths too: {exact.failure}")
    _, again = _build(subject, case, Host.EXACT, device)
    unsteady = frozenset(each.field for each in (compare.differences(reference, again) if again else ()))
    builds = {Host.EXACT: exact}
    for host in subject.metadata.hosts[1:]:
        build, snapshot = _build(subject, case, host, device)
        if snapshot is not None:
            build = replace(build, differences=compare.differences(reference, snapshot, unsteady, subject.layout))
        builds[host] = build
    need = (
        Need.BLOCKING
        if exact.waits
        else least_need(lambda host: builds[host].serves, has_bound=subject.metadata.has_bound)
    )
    return replace(result, need=need, builds=tuple(builds.values()), unsteady=tuple(sorted(unsteady)))


def least_need(serves: Callable[[Host], bool], *, has_bound: bool) -> Need:
    """The least that the host must know.

    Args:
        serves: Whether a builder is right, and waits for nothing, with what the host is told. It is asked of as few as
            will do, and of what has a build.
        has_bound: Whether the common metadata has a field for the bound.

    Returns:
        The class, of a builder that is right with exact lengths.
    """
    # Where there is no field for the bound, it was given as the lengths, which a builder may take for exact.
    if serves(Host.ABSENT) and (not has_bound or serves(Host.BOUND)):
        return Need.NONE
    if serves(Host.BOUND):
        return Need.PREFILL_ROWS if serves(Host.GARBAGE_DECODES) else Need.UPPER_BOUND
    return Need.EXACT


def _build(subject: Subject, case: Case, host: Host, device: Device) -> tuple[Build, Snapshot | None]:
    """Build once, where kernels run after what they compile; no snapshot where that failed."""
    if device.validates_kernels:
        # What is compiled or tuned waits, once; and for sizes that another host does not know.
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
        builder: What built it.
        metadata: What it built; None where that failed.
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
    """Build a batch, with a new builder, lest it remembers what another host knew.

    Args:
        subject: The builder.
        case: The batch.
        host: What the host is told.
        device: Where it is made and run; it is cleared before.
        watched: Whether waits are looked for, which compilers may not like.

    Returns:
        What came of it. What `build` raises is told, not raised.
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
    """None are shown: lazy properties warn that they wait, which is what we are here for. Who watches hears first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _call(builder: Any, case: Case, metadata: Any, common_prefix: int, arguments: dict[str, Any]) -> Any:
    if hasattr(builder, "arguments") and not hasattr(builder, "build"):  # an adapter of ours
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
        return f"it has no {case.call.value}"
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
    # The last two are properties where a patch has grafted them; those without the underscore would copy.
    names = dict.fromkeys([*vars(metadata), "_seq_lens_cpu", "_num_computed_tokens_cpu"])
    return [(name, getattr(metadata, name, None)) for name in names]
