"""Planted builders put through the suite without vLLM and without a GPU, their lines, and a report of them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_async_spec.compat.cases import CASES, our_metadata
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.forward import attend
from vllm_async_spec.compat.report import Report
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.third_party import third_party_subject

NAMED = {case.name: case for case in CASES}


def subject(kind: Callable[[torch.device], Any], name: str = "planted") -> Subject:
    return Subject(name, lambda device: kind(device.device), our_metadata(), "vllm-async-spec")


def checked(kind: Callable[[torch.device], Any], *names: str, device: Device | None = None) -> BackendResult:
    return check(subject(kind), device or SimulatedDevice(), cases=[NAMED[name] for name in names or NAMED])


def attended(kind: type, *names: str, device: Device | None = None, **how: Any) -> BackendResult:
    """Built and attended with, for a backend named by its module and class."""
    device = device or SimulatedDevice()
    tried = third_party_subject(f"{kind.__module__}:{kind.__name__}", device)
    cases = [NAMED[name] for name in names or NAMED]
    return attend(tried, device, check(tried, device, cases=cases), cases=cases, **how)


def line_of(kind: type) -> str:
    """`file:line` of the line that ends in `# here`."""
    lines, first = inspect.getsourcelines(kind)
    at = first + next(at for at, line in enumerate(lines) if "# here" in line)
    return f"{Path(inspect.getfile(kind)).name}:{at}"


def report(*found: BackendResult) -> Report:
    return Report("0.1.0", None, torch.__version__, "cpu", None, "2026-11-24", "compat", (), found)
