"""What to use instead."""

import compat_planted as planted
import pytest
from compat_checked import checked

from vllm_async_spec.audit.remedies import BY_CALL, BY_KIND, remedy
from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.compat.advice import IN_PLACE, IN_TURN, WITHOUT_TRITON, WRONG, advised, instead

FAULTY = [kind for kind in planted.PLANTED if kind.fault is not None and kind is not planted.OnlyCapture]


@pytest.mark.parametrize("kind", FAULTY)
def test_every_fault_says_what_to_use_instead(kind: type[planted.Builder]):
    found = checked(kind, kind.case)
    faults = [fault for faults in found.faults.values() for fault in faults]
    assert faults
    for fault in faults:
        assert instead(fault) is not None, fault
        assert f"{fault}; instead: {instead(fault)}" in found.explain()


def test_the_advice_fits_the_wait():
    said = {kind.__name__: checked(kind, kind.case).explain() for kind in FAULTY}
    assert "it waits: read (item) " in said["Item"]
    assert said["Item"].endswith("; instead: build from device seq_lens or seq_lens_cpu_upper_bound")
    assert said["DynamicShape"].endswith("; instead: pass output_size, which the host knows from query_start_loc_cpu")
    assert f"; instead: {BY_CALL['boolean index']}" in said["Mask"]
    assert said["BlockingUpload"].endswith("; instead: stage the data in pinned memory and copy without blocking")
    assert said["WaitsForAnEvent"].endswith(BY_KIND[WaitKind.EVENT])
    assert said["BoundForTruth"].endswith(f"; instead: {WRONG}")
    assert f"in place; instead: {IN_PLACE}\n" in said["ChangesTheLengths"]


def test_each_wait_in_the_data_has_the_audits_remedy():
    data = checked(planted.DynamicShape, planted.DynamicShape.case).to_dict()
    waits = [wait for case in data["cases"] for build in case["builds"] for wait in build["waits"]]
    assert {(wait["what"], wait["instead"]) for wait in waits} == {
        ("repeat_interleave", remedy(WaitKind.READ, "repeat_interleave"))
    }


def test_a_failure_has_no_advice():
    fault = "told upper bound, it fails: ValueError: no heads at my_backend.py:3"
    assert instead(fault) is None
    assert advised(fault) == fault


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("after other batches, told upper bound, seq_lens is [4], not [3] (wrong)", IN_TURN),
        (
            "told no lengths, it fails: TypeError: 'NoneType' object is not subscriptable at it.py:3",
            BY_KIND[WaitKind.READ],
        ),
        ("fails with exact lengths too: TypeError: 'function' object is not subscriptable at it.py:3", WITHOUT_TRITON),
    ],
)
def test_advice_beyond_waits(fault: str, advice: str):
    assert instead(fault) == advice
