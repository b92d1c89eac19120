"""Builders of `compat_planted` put through the suite, without vLLM and without a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_async_spec.compat.cases import CASES, our_metadata
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.subject import Subject

NAMED = {case.name: case for case in CASES}


def subject(kind: Callable[[torch.device], Any], name: str = "planted") -> Subject:
    return Subject(name, lambda device: kind(device.device), our_metadata(), "vllm-async-spec")


def checked(kind: Callable[[torch.device], Any], *names: str) -> BackendResult:
    return check(subject(kind), SimulatedDevice(), cases=[NAMED[name] for name in names or NAMED])
