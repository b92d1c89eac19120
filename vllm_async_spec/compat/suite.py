"""A run of the suite: the builders by name, on one device, with one vLLM."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path

import torch

from vllm_async_spec._version import __version__
from vllm_async_spec.compat.backends import BACKENDS, backend_subject
from vllm_async_spec.compat.branches.reached import Trace
from vllm_async_spec.compat.builder_inputs import AbsentError, SubjectError, stand_on
from vllm_async_spec.compat.check import check, failure_sentence
from vllm_async_spec.compat.device import CudaDevice, Device, is_lost
from vllm_async_spec.compat.forward import FORWARD_SECONDS, attend
from vllm_async_spec.compat.model_shapes import MODELS_OF, THIRD_PARTY, TINY, Model, models_named
from vllm_async_spec.compat.report import Report, command_line
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.stubs import install_flashinfer
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.third_party import is_third_party, third_party_subject
from vllm_async_spec.compat.vllm_source import VllmSource, load_vllm

_TWICE_LOST = "the GPU failed in an earlier builder's forward, and the new process for the other builders ended too"


@contextlib.contextmanager
def own_settings(own: dict[str, str]) -> Iterator[None]:
    """Give the caller's settings of vLLM back at the end: with the suite's, each later engine would be a stock one.

    `own` takes the suite's settings; they hold again in a later context with the same `own`.
    """
    before = _settings()
    os.environ.update(own)
    try:
        yield
    finally:
        own |= _settings()
        for name in own.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def _settings() -> dict[str, str]:
    # Not all variables: importing vLLM sets some, such as those of TorchInductor, that its engines need.
    return {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "CUDA_VISIBLE_DEVICES"))}


def prepare(source: Path | None, *, plugin: bool = False) -> VllmSource | None:
    """Choose the vLLM that this process imports, and silence its log. Call this before vLLM is imported.

    It sets variables for the whole process; a caller with other uses for vLLM calls it in `own_settings`.

    Args:
        source: The directory that contains the `vllm/` to load as on a machine with a GPU, which is then simulated:
            an unpacked release's, or the installed one's. None for the vLLM that is installed, as it is.
        plugin: Whether the caller will apply the plugin's patches.

    Returns:
        The release's handle; None for the installed vLLM.

    Raises:
        VllmSourceError: `source` holds no vLLM, or this process has one already.
    """
    level = logging.getLevelName(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper())
    if isinstance(level, int):  # vLLM complains of any other
        logging.getLogger("vllm").setLevel(level)  # some modules warn before vLLM sets up its log
    if source is None:
        if not plugin:
            os.environ["VLLM_ASYNC_SPEC"] = "off"  # vLLM loads the plugin by itself
        # Otherwise vLLM asks a network server for prebuilt kernels, and XQA, which is compiled here, has none.
        os.environ.setdefault("VLLM_HAS_FLASHINFER_CUBIN", "1")
        return None
    handle = load_vllm(source)
    os.environ["VLLM_PLUGINS"] = ""  # plugins found here belong to the installed vLLM
    install_flashinfer()  # before any backend's module or patch of the plugin looks for FlashInfer
    return handle


def open_device(name: str, source: VllmSource | None) -> Device:
    """The device `cpu` or `cuda`; the kernels of an unpacked release do not run there.

    Raises:
        SubjectError: There is no such device, or an unpacked release can't use it.
    """
    if name == "cpu":
        device = SimulatedDevice()
        if source is not None:
            source.on_kernel = device.kernel_did_not_run
        return device
    if name != "cuda":
        raise SubjectError(f"--device is {name!r}; it must be cpu or cuda")
    if source is not None:
        raise SubjectError(
            "--device cuda needs an installed vLLM, because an unpacked one has no kernels; leave out --vllm-source"
        )
    if not torch.cuda.is_available():
        raise SubjectError("--device cuda needs a CUDA device, and PyTorch finds none; --device cpu simulates one")
    return CudaDevice()


def run(
    names: Sequence[str],
    device: Device,
    *,
    models: Sequence[str] = (),
    source: VllmSource | None = None,
    patches: Callable[[], Mapping[str, str]] | None = None,
    progress: Callable[[str], None] = lambda name: None,
    elsewhere: Callable[[Sequence[str]], Sequence[BackendResult]] | None = None,
    keep: Callable[[Callable[[], Report]], None] = lambda so_far: None,
    forward_seconds: float = FORWARD_SECONDS,
    left_out: Collection[str] = (),
) -> Report:
    """Check builders one after another.

    Args:
        names: Names of vLLM's backends, and `module:name`; all of vLLM's if empty.
        device: Where they are made and run.
        models: Names of the models whose numbers the builders get. If empty, each builder gets those of the models that
            use it: `MODELS_OF`, or `THIRD_PARTY`.
        source: The unpacked release, if that is what is imported.
        patches: Returns the state of each of the plugin's patches; None for stock vLLM.
        progress: Called with each name before it is tried.
        elsewhere: Runs builders in another process: those left after a failed kernel made the GPU unusable here. If
            None, their attention is reported as not run.
        keep: Called after each batch with a function that makes the report of what was found so far.
        forward_seconds: Time for the forwards of each builder.
        left_out: Names that the caller tries elsewhere.

    Returns:
        The report. If `names` is empty, the report lists vLLM builders that this release lacks as absent.

    Raises:
        SubjectError: A given name can't be checked.
        UnknownModelError: A name of `models` is no model's.
    """
    wanted = models_named(models)
    patched = patches is not None
    device_name = torch.cuda.get_device_name() if device.device.type == "cuda" else "cpu"
    results: dict[str, BackendResult] = {}
    subjects: dict[str, Subject] = {}
    absent: dict[str, str] = {}
    pending = [name for name in names or BACKENDS if name not in left_out]

    def so_far() -> Report:
        vllm = sys.modules.get("vllm")
        return Report(
            version=__version__,
            release=None if vllm is None else vllm.__version__,
            torch=torch.__version__,
            device=device_name,
            patches=None if patches is None else patches(),
            date=datetime.date.today().isoformat(),
            command=command_line(sys.argv),
            stubs=() if source is None else tuple((stub.name, stub.why) for stub in source.stubbed),
            results=tuple(results.values()),
            absent=absent,
            not_tried=tuple(pending),
        )

    def found(name: str, result: BackendResult) -> None:
        results[name] = result
        keep(so_far)

    for name in tuple(pending):
        progress(name)
        try:
            shaped = _subjects(name, device, source, wanted)
            subjects[name] = shaped[0]
            each = functools.partial(found, name)
            results[name] = _check(shaped, device, patched=patched, device_name=device_name, keep=each)
        except AbsentError as error:
            if names:
                raise
            absent[name] = error.cell
        except SubjectError as error:
            if names:
                raise
            results[name] = BackendResult(name, name, "", patched, device_name, failure=str(error))
        except RuntimeError as error:
            if not is_lost(device):
                raise
            failure = f"the GPU is unusable: {failure_sentence(error)}"
            results[name] = BackendResult(name, name, "", patched, device_name, failure=failure)
        if name not in subjects or isinstance(subjects[name].layer, str):
            pending.remove(name)
        keep(so_far)
    # Attend after all builds, because a failed kernel makes the GPU unusable for all later builders.
    waiting = [name for name in results if name in subjects]
    while waiting:
        name = waiting.pop(0)
        progress(f"{name}, attention")
        each = functools.partial(found, name)
        tried_on = subjects[name].device or device
        results[name] = attend(subjects[name], tried_on, results[name], seconds=forward_seconds, keep=each)
        if waiting and elsewhere is not None and is_lost(device):
            progress(f"{waiting[0]} and later backends, in a new process")
            try:
                results |= {there.backend: there for there in elsewhere(waiting)}
            except BrokenExecutor:  # keep the results of their builds
                results |= {
                    name: replace(results[name], not_attended=_TWICE_LOST, unfinished=_TWICE_LOST) for name in waiting
                }
            break
        if name in pending:
            pending.remove(name)
    pending.clear()
    return so_far()


def _check(
    subjects: Sequence[Subject],
    device: Device,
    *,
    patched: bool,
    device_name: str,
    keep: Callable[[BackendResult], None],
) -> BackendResult:
    """Check a builder with the numbers of each model.

    Raises:
        AbsentError: This release lacks the builder for the first model.
    """
    tried_on = subjects[0].device or device
    trace = Trace()
    first = found = check(subjects[0], tried_on, patched=patched, device_name=device_name, keep=keep, trace=trace)
    for subject in subjects[1:] if first.failure is None else ():
        kept = functools.partial(_keep_joined, found, keep)
        try:
            other = check(
                subject, tried_on, known=first, patched=patched, device_name=device_name, keep=kept, trace=trace
            )
        except AbsentError as error:
            other = replace(first, failure=error.cell, cases=(), model=subject.model)
        found = found.joined(other)
    return found


def _keep_joined(found: BackendResult, keep: Callable[[BackendResult], None], part: BackendResult) -> None:
    keep(found.joined(part))


def _subjects(name: str, device: Device, source: VllmSource | None, models: Sequence[Model]) -> list[Subject]:
    """The builder with the numbers of each model; the tiny model first, if a layer can attend."""
    if is_third_party(name):
        stand_on(None, name)
        first, *others = models or models_named(THIRD_PARTY)
        subjects = [third_party_subject(name, device, first)]
        if subjects[0].model:  # else all models give the same builder
            subjects += [third_party_subject(name, device, model) for model in others]
    else:
        tiny = backend_subject(name, device, TINY)
        subjects = [] if models or isinstance(tiny.layer, str) else [tiny]
        subjects += [backend_subject(name, device, model) for model in models or models_named(MODELS_OF[name.upper()])]
    tried_on = subjects[0].device or device
    if source is not None and isinstance(tried_on, SimulatedDevice):
        source.on_kernel = tried_on.kernel_did_not_run
    return subjects
