"""The suite's verdicts of builders with known faults."""

import contextlib
import inspect
import itertools
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import compat_planted as planted
import numpy as np
import pytest
import torch
from compat_checked import NAMED, checked, line_of, subject
from compat_cuda import PassesForCuda, without_cuda
from trtllm_shapes import OLD, SM90, SM100

from vllm_async_spec.attention import FlashAttentionAdapter, HostNeed, ReferenceAdapter, TrtllmAdapter
from vllm_async_spec.compat import check as checking
from vllm_async_spec.compat import compare, device
from vllm_async_spec.compat.builder_inputs import SubjectError
from vllm_async_spec.compat.cases import CASES, Host
from vllm_async_spec.compat.check import check, failure_sentence
from vllm_async_spec.compat.compare import Judgement
from vllm_async_spec.compat.device import CudaDevice
from vllm_async_spec.compat.results import Need
from vllm_async_spec.compat.simulated_device import HostDevice, SimulatedDevice


@pytest.mark.parametrize("kind", planted.CLEAN)
def test_a_clean_builder_passes_with_every_batch(kind: type[planted.Builder]):
    found = checked(kind)
    assert found.faults == {}
    assert found.passed
    assert (found.need, found.waits, len(found.ran)) == (kind.need, (), len(CASES))
    assert {note for case in found.cases for note in case.notes} == ({kind.note} if kind.note else set())
    assert all(case.unsteady == () for case in found.cases)
    assert checked(kind, kind.case).need is kind.need  # all that the test on a GPU checks


@pytest.mark.parametrize("kind", planted.PLANTED)
def test_a_planted_fault_is_caught(kind: type[planted.Builder]):
    found = checked(kind, kind.case)
    assert found.cases[0].need is kind.need
    assert kind.fault is not None
    faults = found.cases[0].faults
    assert any(kind.fault in fault for fault in faults), faults
    if "# here" in inspect.getsource(kind):
        assert any(line_of(kind) in fault for fault in faults), faults


@pytest.mark.parametrize("kind", [planted.OnlyDrafting, planted.OnlyManyRequests])
def test_a_fault_in_one_batch_is_reported_there_and_the_worst_is_the_verdict(kind: type[planted.Builder]):
    found = checked(kind)
    assert {case.need for case in found.cases} == {Need.NONE, Need.BLOCKING}
    assert kind.case in found.faults
    assert "decode" not in found.faults
    assert found.verdict == "blocks"


def test_what_waits_at_capture_only_is_told_and_holds_up_no_step():
    found = checked(planted.OnlyCapture)
    assert (found.passed, found.need, found.faults) == (True, Need.NONE, {})
    assert list(found.at_capture) == ["capture, one token", "capture, K + 1"]


def test_what_two_exact_builds_disagree_on_is_not_judged():
    class Random(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            return torch.rand(3)

    found = checked(Random, "decode")
    assert found.passed
    assert found.cases[0].unsteady == ("extra",)


def test_what_a_kernel_would_have_computed_is_not_validated():
    simulated = SimulatedDevice()

    class Kernel(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            plan = torch.zeros(4, dtype=torch.int32, device=self.device)
            simulated.kernel_did_not_run("plan", {"out": plan, "lengths": metadata.seq_lens, "most": 7})
            return plan + 1

    found = checked(Kernel, "decode", device=simulated)
    assert found.not_validated == ("extra",)  # and not the lengths, which no kernel changes


def test_what_a_kernel_would_have_changed_is_not_judged():
    simulated = SimulatedDevice()

    class Kernel(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            plan = torch.zeros(4, dtype=torch.int32, device=self.device)
            simulated.kernel_did_not_run("plan", {"out": plan})
            return plan - metadata.max_seq_len

    found = checked(Kernel, "decode", device=simulated)
    build = found.cases[0].build(Host.BOUND)
    assert build is not None
    judged = {each.field: each.judgement for each in build.differences}
    assert judged == {"max_seq_len": Judgement.BOUNDED, "extra": Judgement.NOT_VALIDATED}
    assert (found.passed, found.not_validated) == (True, ("extra",))


def test_a_kernel_that_is_given_something_else_is_wrong():
    simulated = SimulatedDevice()

    class Kernel(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            simulated.kernel_did_not_run("plan", {"longest": -metadata.max_seq_len})

    found = checked(Kernel, "decode", device=simulated)
    assert "kernel 0 plan.longest is -144, not -141 (wrong)" in found.explain()


def test_larger_device_memory_is_not_judged_and_host_numbers_may_be_bounds():
    build = checked(planted.FromTheBound, "spec K + 1").cases[0].build(Host.BOUND)
    assert build is not None
    assert {d.field: d.judgement for d in build.differences} == {
        "max_seq_len": Judgement.BOUNDED,
        "extra.0": Judgement.BOUNDED,
        "extra.1": Judgement.BOUNDED,
        "extra.2": Judgement.LARGER,
        "extra.3": Judgement.BOUNDED,
    }


def test_a_builders_buffer_is_judged_by_the_part_in_use():
    class Buffered(planted.Builder):
        tail: int | None = None

        def extra(self, metadata: Any) -> Any:
            self.lengths[: metadata.num_reqs].copy_(metadata.seq_lens)
            self.lengths[100:].fill_(metadata.max_seq_len)
            return [self.lengths, self.lengths[: self.tail or metadata.num_reqs]]

    found = checked(Buffered, "decode")
    assert found.passed
    assert found.cases[0].builds[0].skipped == ("extra.0 (a buffer of which only extra.1 is used)",)

    class InUse(Buffered):
        tail = 101

    assert "extra.1 is" in checked(InUse, "decode").explain()


class Slotted:
    __slots__ = ("lengths", "unset")

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths


class Forwards:
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("holds", [Slotted, Forwards, lambda lengths: {lengths}])
def test_what_any_object_holds_is_compared(holds: Any):
    class Wrong(planted.Builder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return holds(torch.full_like(common_attn_metadata.seq_lens, common_attn_metadata.max_seq_len))

    assert checked(Wrong, "decode").need is Need.EXACT


def test_a_builder_that_builds_nothing_fails():
    class Nothing(planted.Builder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return None

    assert "it fails: TypeError: the builder returns None" in checked(Nothing, "decode").explain()


def test_a_builder_can_not_live_on_what_an_earlier_batch_told_it():
    class Remembers(planted.Builder):
        known: Any = None

        def extra(self, metadata: Any) -> Any:
            self.known = self.known if metadata._seq_lens_cpu is None else metadata._seq_lens_cpu
            return int(self.known.max())

    assert checked(Remembers, "decode").need is Need.EXACT


def test_a_builder_that_can_not_be_made_is_a_result():
    def fails(device: torch.device) -> Any:
        raise SubjectError("give it a factory")

    found = check(subject(fails), SimulatedDevice())
    assert (found.failure, found.verdict, found.passed) == ("give it a factory", "not constructed", False)

    def breaks(device: torch.device) -> Any:
        raise KeyError("heads")

    found = check(subject(breaks), SimulatedDevice())
    assert str(found.failure).startswith("can't be made: KeyError: 'heads' at ")
    assert "test_compat_check.py:" in str(found.failure)


def test_the_stack_of_pytorchs_own_code_is_no_part_of_what_an_exception_says():
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("no such size\nException raised from check at TensorImpl.cpp:289\nframe #0: c10::Error")
    assert failure_sentence(raised.value).startswith("RuntimeError: no such size at ")


def test_a_batch_that_fails_with_exact_lengths_is_a_fault_and_says_why():
    class Decodes(planted.Builder):
        def extra(self, metadata: Any) -> Any:
            if metadata.max_query_len > 1:
                raise ValueError("one token each")

    found = checked(Decodes, "decode", "mixed")
    assert [case.need for case in found.cases] == [Need.NONE, None]
    assert found.cases[1].not_run is None
    (fault,) = found.faults["mixed"]
    assert fault.startswith("told exact lengths, it fails: ValueError: one token each at ")
    assert "test_compat_check.py:" in fault
    assert (found.passed, found.untried, found.verdict) == (False, False, "fails")


def test_a_builder_is_told_of_the_common_prefix_of_its_batch():
    class Told(planted.Builder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_prefix_len, *vars(super().build(0, common_attn_metadata)).values()

    builder = subject(Told)
    found = []
    for prefix in (0, 32):
        told = replace(builder, common_prefix=lambda case, prefix=prefix: prefix)
        _, snapshot = checking.build_once(told, NAMED["decode"], Host.EXACT, SimulatedDevice())
        assert snapshot is not None
        found.append(snapshot.leaves["0"].value)
    assert found == [0, 32]


def test_where_the_device_is_the_host_nothing_waits_and_wrong_values_are_still_seen():
    assert checked(planted.CopiesToHost, "decode", device=HostDevice()).passed
    wrong = checked(planted.BoundForTruth, "spec K + 1", device=HostDevice())
    assert wrong.need is Need.EXACT, wrong.explain()
    assert wrong.faults


def test_capture_is_asked_of_those_only_that_support_it():
    class Never(planted.Clean):
        build_for_cudagraph_capture = None  # type: ignore[assignment]
        _cudagraph_support = type("Support", (), {"name": "NEVER"})()

    found = checked(Never, "capture, K + 1")
    assert found.cases[0].not_run == "it is never captured: get_cudagraph_support() is NEVER"


@pytest.mark.parametrize(
    ("adapter", "declared", "need"),
    [
        (FlashAttentionAdapter(), HostNeed.NONE, Need.NONE),
        (ReferenceAdapter(), HostNeed.NONE, Need.NONE),
        (TrtllmAdapter(SM100), HostNeed.NONE, Need.NONE),
        (TrtllmAdapter(replace(SM100, query_tokens=1, features=OLD)), HostNeed.NONE, Need.NONE),
        (TrtllmAdapter(SM90), HostNeed.UPPER_BOUND, Need.PREFILL_ROWS),  # of the prefills, which are planned
        (TrtllmAdapter(replace(SM90, features=OLD)), HostNeed.UPPER_BOUND, Need.UPPER_BOUND),
    ],
)
def test_our_own_adapters_need_what_they_declare(adapter: Any, declared: HostNeed, need: Need):
    assert adapter.host_need is declared
    found = checked(lambda device: adapter)
    assert found.need is need, found.explain()
    assert found.passed


@pytest.mark.parametrize(
    ("declared", "fault"),
    [
        (HostNeed.NONE, "its host_need declares none, and it needs more: upper bound"),
        (HostNeed.UPPER_BOUND, None),
        (HostNeed.EXACT, None),
        (None, None),
    ],
)
def test_an_adapter_that_needs_more_than_it_declares_fails(declared: HostNeed | None, fault: str | None):
    class Plans:
        def arguments(self, metadata: Any) -> Any:
            return metadata.seq_lens_cpu_upper_bound + 15

    if declared is not None:
        Plans.host_need = declared  # type: ignore[attr-defined]
    found = checked(lambda device: Plans())
    assert found.need is Need.UPPER_BOUND
    assert found.passed is (fault is None)
    assert found.cases[0].faults == (() if fault is None else (fault,))


def test_plain_data_carries_the_evidence():
    data = checked(planted.CopiesToHost, "decode").to_dict()
    assert (data["verdict"], data["passed"]) == ("blocks", False)
    realistic = next(build for build in data["cases"][0]["builds"] if build["realistic"])
    assert realistic["host"] == "upper bound"
    assert "return metadata.seq_lens.cpu()" in realistic["waits"][0]["stack"][0]


@pytest.mark.parametrize("zeroed", [True, False])
def test_on_a_gpu_what_lay_in_memory_before_makes_no_difference(zeroed: bool, monkeypatch: pytest.MonkeyPatch):
    class Scratch(planted.Clean):
        def extra(self, metadata: Any) -> Any:
            return torch.empty(8)

    without_cuda(monkeypatch)
    monkeypatch.setattr(torch, "empty", torch.rand)  # as full of other things as memory can be
    if not zeroed:
        monkeypatch.setattr(device, "MAKE_UNINITIALISED", ())
    found = checked(Scratch, "decode", device=PassesForCuda())
    assert (found.cases[0].unsteady == ()) is zeroed


def test_numpys_memory_is_zero_too(monkeypatch: pytest.MonkeyPatch):
    class Scratch(planted.Clean):
        def extra(self, metadata: Any) -> Any:
            return np.empty(8)

    garbage = itertools.count(1)
    monkeypatch.setattr(np, "empty", lambda size: np.full(size, next(garbage)))
    found = checked(Scratch, "decode")
    assert (found.passed, found.cases[0].unsteady) == (True, ())


def test_a_flashinfer_wrapper_is_what_its_plan_was_given():
    def wrapper(lengths: list[int]) -> Any:
        counts = torch.tensor([-(-length // 16) for length in lengths], dtype=torch.int32)
        return SimpleNamespace(
            _paged_kv_indptr_buf=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            _paged_kv_last_page_len_buf=torch.tensor([(length - 1) % 16 + 1 for length in lengths], dtype=torch.int32),
            _pin_memory_int_workspace_buffer=torch.rand(64),
            _int_workspace_buffer=torch.rand(64),
        )

    simulated = SimulatedDevice()
    one, same, other = (
        compare.take({"wrapper": wrapper(lengths)}, simulated) for lengths in ([33, 16], [33, 16], [36, 16])
    )
    assert set(one.leaves) == {"wrapper.lengths", "wrapper.page ends", "wrapper.last page"}
    assert one.leaves["wrapper.lengths"].value.tolist() == [33, 16]
    assert compare.differences(one, same) == ()
    assert [each.field for each in compare.differences(one, other)] == ["wrapper.lengths", "wrapper.last page"]


def test_what_pytorch_warns_of_is_heard_though_the_builders_own_warnings_are_not(monkeypatch: pytest.MonkeyPatch):
    class Warns(planted.Clean):
        def extra(self, metadata: Any) -> Any:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("deprecated", stacklevel=1)

    without_cuda(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checked(Warns, "decode", device=PassesForCuda())
    assert found.cases[0].need is Need.BLOCKING, found.explain()
    assert "test_compat_check.py" in found.cases[0].builds[0].waits[0].site


def test_on_a_gpu_waits_for_events_of_either_class_are_heard(monkeypatch: pytest.MonkeyPatch):
    class Waits(planted.Clean):
        def extra(self, metadata: Any) -> Any:
            with contextlib.suppress(RuntimeError):  # a CPU has no events
                torch.Event("cpu").synchronize()

    without_cuda(monkeypatch)
    before = torch.Event
    found = checked(Waits, "decode", device=PassesForCuda())
    assert torch.Event is before
    assert "it waits: event (event) at compat/test_compat_check.py:" in found.explain()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*planted.CLEAN, *planted.PLANTED])
def test_on_a_gpu_the_same_builders_are_found_to_be_the_same(kind: type[planted.Builder]):
    found = check(subject(kind), CudaDevice(), cases=[NAMED[kind.case]], device_name="cuda")
    if kind is planted.UnfencedCopy:
        pytest.skip("an unfenced copy waits for nothing on a GPU: it reads garbage, now and then")
    if kind is planted.Numpy:
        assert "can't convert cuda" in str(found.cases[0].failure)
        return
    assert found.cases[0].need is kind.need, found.explain()
    assert bool(found.cases[0].faults) is (kind.fault is not None)
