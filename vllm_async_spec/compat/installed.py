"""Which builders the installed vLLM tries as it is, and which as on a machine with a GPU.

vLLM's own builders are for GPUs. Without one the installed vLLM leaves out Triton and chooses other kernels. So on a
simulated device its Python is loaded as an unpacked release's is (`vllm_source`). Third-party builders, and a backend
that runs on the host with the kernels that are installed, get the installed vLLM as it is. One process imports vLLM
once only, so a run of both kinds takes two processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.builder_inputs import SubjectError
from vllm_async_spec.compat.report import Report
from vllm_async_spec.compat.third_party import is_third_party
from vllm_async_spec.compat.vllm_source import installed_vllm


@dataclass(frozen=True, slots=True)
class Division:
    """How a run is divided.

    Attributes:
        source: The directory that contains the installed `vllm/`, if this process loads it as on a machine with a GPU.
        beside: Names for a second process, which imports the installed vLLM as it is.
    """

    source: Path | None = None
    beside: tuple[str, ...] = ()


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Each builder once, and vLLM's as they are called in `BACKENDS`; the results are found by these names."""
    return tuple(dict.fromkeys(name if is_third_party(name) else name.upper() for name in names))


def divide(names: Sequence[str], device: str, source: Path | None) -> Division:
    """Divide a run into builders for this process and builders for a second one; takes what `suite.run` takes."""
    wanted = names or tuple(BACKENDS)
    known = all(is_third_party(name) or name.upper() in BACKENDS for name in wanted)
    if device != "cpu" or source is not None or not known or "vllm" in sys.modules:
        return Division()
    as_it_is = tuple(name for name in wanted if _runs_as_it_is(name))
    directory = installed_vllm()
    return Division() if directory is None or len(as_it_is) == len(wanted) else Division(directory, as_it_is)


def _runs_as_it_is(name: str) -> bool:
    # A build of PyTorch without CUDA means that vLLM's kernels, too, are those for the host.
    return is_third_party(name) or (BACKENDS[name.upper()].on_host and not torch.backends.cuda.is_built())


def joined(report: Report, beside: Report, names: Sequence[str]) -> Report:
    """One report of both processes, in the order of `names`, or of `BACKENDS` if there are none.

    Raises:
        SubjectError: One of `names` has no result in either.
    """
    found = {result.backend: result for result in (*report.results, *beside.results)}
    if missing := [name for name in names if name not in found]:
        raise SubjectError(f"{', '.join(missing)}: no result came back; run each in a command of its own")
    ordered = [found[name] for name in names or BACKENDS if name in found]
    return replace(report, results=tuple(ordered))
