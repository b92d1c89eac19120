"""One builder builds all batches in turn, so that what it keeps of earlier batches shows."""

import compat_fields as planted
import pytest
from compat_checked import checked, report

from vllm_async_spec.compat import check as checking

BATCHES = ("decode", "spec K + 1", "mixed", "long")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (
            planted.KeepsLengths,
            "after other batches, told upper bound, seq_lens is [30, 67, 104, 141], not [33, ",
        ),
        (planted.KeepsLengthsOfItsSize, "after other batches, told upper bound, seq_lens is [30, 67, 104, 141], not ["),
        (
            planted.WaitsForTheLastBatch,
            "after other batches, told upper bound, it waits: event (synchronize) at ",
        ),
        (planted.FailsTheSecondTime, "after other batches, told upper bound, it fails: ValueError: its buffer is full"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_builder_keeps_is_found(kind: type[planted.AllRight], fault: str, monkeypatch: pytest.MonkeyPatch):
    found = checked(kind, *BATCHES)
    assert next(iter(found.faults)) == "spec K + 1", "its first batch is right"
    (said,) = found.faults["spec K + 1"]
    assert said.startswith(fault)
    assert report(found).exit_code == 1
    assert report(found).published.line == "async-spec: none, keeps other batches"
    monkeypatch.setattr(checking, "in_turn", lambda subject, cases, results, snapshots, device: tuple(results))
    assert checked(kind, *BATCHES).passed, "nothing else finds it"


@pytest.mark.parametrize("kind", [planted.AllRight, planted.ReusesItsBuffer, planted.PlansAgain])
def test_a_buffer_and_a_shorter_plan_are_no_fault(kind: type[planted.AllRight]):
    found = checked(kind, *BATCHES, "padded rows", "one request", "draft step 2")
    assert found.passed, found.explain()
    assert all(case.in_turn is not None for case in found.cases)
