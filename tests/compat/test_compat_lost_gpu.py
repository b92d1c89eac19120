"""A GPU that a builder or its kernels have lost."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND

from vllm_async_spec.compat import suite
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.subject import Subject

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_gpu_that_is_lost_while_something_is_built_ends_up_in_the_report(monkeypatch: pytest.MonkeyPatch):
    def illegal(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(suite, "check", illegal)
    with pytest.raises(RuntimeError, match="illegal memory"):
        suite.run(["compat_attention:Right"], SimulatedDevice())
    monkeypatch.setattr(suite, "is_lost", lambda device: True)
    found = suite.run(["compat_attention:Right"], SimulatedDevice())
    assert "the GPU is unusable: RuntimeError: CUDA error: an illegal" in str(found.results[0].failure)
    assert found.exit_code == 2


def test_after_a_gpu_is_lost_the_rest_is_tried_in_another_process(monkeypatch: pytest.MonkeyPatch):
    names = [f"compat_attention:{name}" for name in ("Astray", "Right", "HeadsFirst")]
    lost = []

    def astray(subject: Subject, device: Device, found: BackendResult, **how: Any) -> BackendResult:
        lost.append(subject.name)
        return replace(found, not_attended="the GPU is unusable")

    monkeypatch.setattr(suite, "attend", astray)
    monkeypatch.setattr(suite, "is_lost", lambda device: True)
    asked: list[str] = []

    def elsewhere(left: Sequence[str]) -> Sequence[BackendResult]:
        asked.extend(left)
        return [BackendResult(name, name, "", False, "cpu", not_attended=None) for name in left]

    found = suite.run(names, SimulatedDevice(), elsewhere=elsewhere)
    assert lost == names[:1]
    assert asked == names[1:]
    assert [each.backend for each in found.results] == names
    assert [each.not_attended for each in found.results] == ["the GPU is unusable", None, None]

    def dies(left: Sequence[str]) -> Sequence[BackendResult]:
        raise BrokenExecutor("a process in the process pool was terminated abruptly")

    found = suite.run(names, SimulatedDevice(), elsewhere=dies)
    assert [each.not_attended for each in found.results[1:]] == [suite._TWICE_LOST] * 2
    assert all(each.steps for each in found.results)
    assert [each.passed for each in found.results[1:]] == [False] * 2
    assert found.exit_code == 2


@pytest.mark.gpu
def test_a_kernel_that_goes_astray_costs_nobody_but_those_after_it():
    """In a process of its own, whose CUDA is of no use afterwards."""
    code = """
import torch
from vllm_async_spec.compat.suite import open_device, run
found = run(["compat_attention:Astray", "compat_attention:Right"], open_device("cuda", None))
for each in found.results:
    print(each.passed, each.not_attended)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=SUPPORT, capture_output=True, text=True)
    astray, right = done.stdout.splitlines()[-2:]
    assert "the GPU is unusable" in astray, done.stderr[-2000:]
    assert right == "False the GPU failed in an earlier builder's forward and is unusable"


@pytest.mark.gpu
def test_the_command_attends_with_the_rest_in_a_new_process(tmp_path: Path):
    named = [f"--backend=compat_attention:{name}" for name in ("Astray", "Right")]
    command = [*COMMAND, "compat", "--device=cuda", *named, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True)
    assert (tmp_path / "found.json").is_file(), done.stderr[-2000:]
    astray, right = json.loads((tmp_path / "found.json").read_text())["backends"]
    assert "the GPU is unusable" in astray["not_attended"]
    assert right["not_attended"] is None
    assert right["passed"]
