"""The suite as tests, for a backend of anybody's: `pytest --pyargs vllm_async_spec.compat --backend module:Builder`."""

from __future__ import annotations

import pytest

from vllm_async_spec.compat.advice import advised
from vllm_async_spec.compat.cases import CASES
from vllm_async_spec.compat.results import BackendResult


def test_it_is_made_and_some_batch_runs(async_spec_backend: BackendResult) -> None:
    """The builder can be constructed, builds at least one batch of a step, and nothing was left out."""
    assert async_spec_backend.steps, async_spec_backend.explain()
    assert async_spec_backend.unfinished is None, async_spec_backend.unfinished


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_no_host_sync(async_spec_backend: BackendResult, case: str) -> None:
    """Without exact lengths the batch is built without a wait, and nothing in it is wrong."""
    found = next((each for each in async_spec_backend.cases if each.case == case), None)
    if found is None or found.not_run is not None:
        pytest.skip(async_spec_backend.explain() if found is None else str(found.not_run))
    if found.capture and found.faults and not found.failed:
        pytest.skip(f"only a CUDA graph capture is affected, which delays no step: {found.faults[0]}")
    assert not found.faults, "\n".join(map(advised, found.faults))


def test_every_line_that_could_wait_ran(async_spec_backend: BackendResult) -> None:
    """No line of the builder that could wait is left that no batch reached; skipped otherwise, with the lines."""
    if async_spec_backend.unreached:
        pytest.skip(f"no batch reached {'; '.join(map(str, async_spec_backend.unreached))}")
    assert async_spec_backend.reached is not None, async_spec_backend.explain()
