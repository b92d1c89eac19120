"""Builders that update the metadata of a draft step for the next one, as vLLM's V2 runner asks inside a CUDA graph."""

from typing import Any

import compat_attention
import compat_fields as planted
import pytest
from compat_checked import report, subject

from vllm_async_spec.compat import advice
from vllm_async_spec.compat.cases import UPDATED
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.forward import attend
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.third_party import third_party_subject
from vllm_async_spec.compat.updates import relaunched

(UPDATE,) = (case.name for case in UPDATED)


def checked(kind: type[planted.AllRight]) -> BackendResult:
    """With the batches that the suite chooses for the builder."""
    return check(subject(kind), SimulatedDevice())


class Updates(planted.AllRight):
    """Right: what it builds are the tensors that vLLM writes between draft steps."""

    supports_draft_decode_metadata_update = True

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        pass


class KeepsLengths(Updates):
    """Lengths of the draft step that it was built for."""

    def change(self, built: planted.Fields) -> Any:
        built.seq_lens = built.seq_lens.clone()
        return built


class CopiesLengths(KeepsLengths):
    """Right: its own lengths, brought up to date."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.given = common_attn_metadata.seq_lens
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        metadata.seq_lens.copy_(self.given)


class Waits(CopiesLengths):
    def update_draft_decode_metadata(self, metadata: Any) -> None:
        if self.given.max().item() > 0:
            super().update_draft_decode_metadata(metadata)


class Fails(Updates):
    def update_draft_decode_metadata(self, metadata: Any) -> None:
        raise NotImplementedError


class ChangesLengths(Updates):
    def update_draft_decode_metadata(self, metadata: Any) -> None:
        metadata.seq_lens.add_(1)


@pytest.mark.parametrize("kind", [Updates, CopiesLengths])
def test_an_update_that_brings_all_up_to_date_is_right(kind: type[Updates]):
    found = checked(kind)
    assert found.passed, found.explain()
    assert UPDATE in {case.case for case in found.steps}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (
            KeepsLengths,
            "after its update, told upper bound, seq_lens is [34, 101, 18, 65], not [35, 102, 19, 66] (wrong)",
        ),
        (Waits, "after its update, told upper bound, it waits: read (item) at "),
        (Fails, "after its update, told upper bound, it fails: NotImplementedError: raise NotImplementedError at "),
        (
            ChangesLengths,
            "after its update, told upper bound, seq_lens is [36, 103, 20, 67], not [35, 102, 19, 66] (wrong)",
        ),
    ],
)
def test_what_an_update_does_wrong_is_a_fault(kind: type[Updates], fault: str):
    found = checked(kind)
    assert set(found.faults) == {UPDATE}
    assert any(said.startswith(fault) for said in found.faults[UPDATE]), found.faults
    assert ("wrong after updates" in report(found).published.line) is fault.endswith("(wrong)")


def test_the_advice_is_to_bring_it_up_to_date():
    assert f"(wrong); instead: {advice.UPDATED}" in checked(KeepsLengths).explain()
    assert checked(Waits).explain().endswith("; instead: build from device seq_lens or seq_lens_cpu_upper_bound")


class SaysNo(KeepsLengths):
    supports_draft_decode_metadata_update = False


@pytest.mark.parametrize("kind", [planted.AllRight, SaysNo])
def test_only_who_says_so_is_asked_for_updates(kind: type[planted.AllRight]):
    found = checked(kind)
    assert found.passed, found.explain()
    assert UPDATE not in {case.case for case in found.cases}


class KeepsASecret(compat_attention.Right):
    """Its kernel goes by lengths of the draft step before, in a way that nobody compares."""

    class builder(compat_attention.Builder):
        supports_draft_decode_metadata_update = True

        def secret(self, metadata: Any) -> Any:
            lengths = metadata.seq_lens.clone()
            return lambda: lengths

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            pass

    class impl(compat_attention.Impl):
        def arguments(self, built: Any) -> Any:
            return compat_attention.with_lengths(built)


def test_attention_shows_what_no_field_shows():
    device = SimulatedDevice()
    tried = third_party_subject(f"{KeepsASecret.__module__}:{KeepsASecret.__name__}", device)
    built = check(tried, device)
    assert built.passed, built.explain()
    found = attend(tried, device, built)
    assert set(found.faults) == {UPDATE}
    assert found.faults[UPDATE][0].startswith("told upper bound, attention is wrong: ")


def test_a_kernel_that_an_update_launches_again_is_in_the_place_of_the_builds():
    built = {"kernel 0 lengths": 1, "kernel 1 pages": 2, "kernel 2 lengths": 3}
    assert relaunched(built, None) == built
    assert relaunched(built | {"kernel 3 lengths": 4}, 3) == {
        "kernel 0 lengths": 4,
        "kernel 1 pages": 2,
        "kernel 2 lengths": 3,
    }
    assert relaunched(
        {"kernel 0 lengths": 1, "kernel 1 lengths": 4, "kernel 2 lengths": 5, "kernel 3 pages": 6}, 1
    ) == {
        "kernel 0 lengths": 4,
        "kernel 1 lengths": 5,
        "kernel 2 pages": 6,
    }
