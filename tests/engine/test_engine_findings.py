"""Three findings that upstream has mended since, with vLLM's CPU build: it is right, and a planted mistake is seen."""

from pathlib import Path
from typing import Any

import pytest
from findings_engine import found, sliding
from scenario import environment

from vllm_async_spec.demo.train import DemoModels

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

FEWER_ACCEPTED = """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
copy = GPUModelRunner._copy_valid_sampled_token_count
GPUModelRunner._copy_valid_sampled_token_count = lambda self, tokens, counts: copy(
    self, tokens, (counts - 1).clamp(min=1)
)
"""
NOTHING_IN_FLIGHT = """
from vllm.v1.core.kv_cache_manager import KVCacheManager
allocate = KVCacheManager.allocate_slots
def allocate_slots(self, request, *args, **kwargs):
    in_flight, request.num_in_flight_tokens = request.num_in_flight_tokens, 0
    try:
        return allocate(self, request, *args, **kwargs)
    finally:
        request.num_in_flight_tokens = in_flight
KVCacheManager.allocate_slots = allocate_slots
"""
NOTHING_STALE = """
from vllm.v1.core.sched.scheduler import Scheduler
preempt = Scheduler._preempt_request
def _preempt_request(self, request, *args, **kwargs):
    preempt(self, request, *args, **kwargs)
    request.num_stale_output_tokens = 0
Scheduler._preempt_request = _preempt_request
"""


def asked(finding: str, models: tuple[Path, Path], first: str = "") -> Any:
    return found(finding, models, "async", environment=environment(), first=first)


def test_rejections_are_taken_off_once_after_a_pause(models: DemoModels):
    given = models.target, models.draft
    right = asked("pause", given)
    assert right["failed"] is None
    assert right["by_itself"] == 0
    assert sum(step["rejected"] > 0 for step in right["steps"]) > 10
    assert all(step["given"] == step["sent"] for step in right["steps"])
    assert right["disturbed"] == right["undisturbed"]
    wrong = asked("pause", given, FEWER_ACCEPTED)
    assert any(step["given"] < step["sent"] for step in wrong["steps"])


def test_the_scheduler_keeps_the_keys_of_a_window_that_are_still_seen(models: DemoModels, tmp_path: Path):
    given = sliding(models, tmp_path)
    right = asked("window", given)
    assert len(right["missing"]) > 500
    assert max(right["missing"]) == 0
    assert max(asked("window", given, NOTHING_IN_FLIGHT)["missing"]) > 0


def test_a_reset_of_the_prefix_cache_loses_no_tokens(models: DemoModels):
    given = models.target, models.draft
    right = asked("reset", given)
    assert min(right["in_flight"]) > 0
    assert right["failed"] is None
    assert right["disturbed"] == right["undisturbed"]
    wrong = asked("reset", given, NOTHING_STALE)
    assert wrong["failed"] or wrong["disturbed"] != wrong["undisturbed"]
