"""Fields of vLLM's names against the batch in plain Python."""

import compat_fields as planted
import pytest
from compat_checked import NAMED, checked, report

from vllm_async_spec.compat import check as checking
from vllm_async_spec.compat.cases import CASES, Call
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.forward import attend
from vllm_async_spec.compat.model import FIELDS
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.third_party import third_party_subject

STEPS = [case.name for case in CASES if case.call is not Call.CAPTURE]
PLANTED = (
    *((name, 1) for name in ("seq_lens", "query_start_loc", "max_query_len", "num_actual_tokens", "num_reqs")),
    *((name, -1) for name in ("seq_lens", "query_start_loc", "max_query_len", "max_seq_len", "num_actual_tokens")),
    *((name, offset) for name in ("block_table", "slot_mapping") for offset in (1, -1)),
)


@pytest.mark.parametrize("kind", [planted.AllRight, planted.CutAndBounded])
def test_what_is_as_it_was_given_is_right(kind: type[planted.AllRight]):
    found = checked(kind)
    assert found.passed, found.explain()
    assert len(found.ran) == len(CASES)


@pytest.mark.parametrize(("name", "offset"), PLANTED)
def test_a_field_that_is_off_by_one_is_found_though_the_builder_agrees_with_itself(
    name: str, offset: int, monkeypatch: pytest.MonkeyPatch
):
    kind = planted.off_by_one(name, offset)
    found = checked(kind, "mixed", "decode")
    assert list(found.faults) == ["mixed", "decode"], found.explain()
    (fault,) = found.faults["mixed"]
    assert fault.startswith(f"told exact lengths, {name} is ")
    assert fault.endswith(" (wrong) against the batch in plain Python")
    run = report(found).published
    assert run.rows[0].limits == ["wrong fields"]
    assert run.line == "async-spec: none, wrong fields"
    assert report(found).exit_code == 1
    monkeypatch.setattr(checking, "against_model", lambda *arguments: ())
    assert checked(kind, "mixed", "decode").passed, "nothing else finds it"


def test_every_field_has_a_planted_builder():
    others = {"block_table_tensor": "block_table", "query_start_loc_cpu": "query_start_loc"}
    assert {others.get(name, name) for name in FIELDS} == {name for name, _ in PLANTED}


def test_in_every_step_a_length_that_is_off_by_one_is_found():
    assert list(checked(planted.off_by_one("seq_lens", 1)).faults) == STEPS


def test_right_attention_says_more_than_the_name_of_a_field():
    device, cases = SimulatedDevice(), [NAMED["mixed"]]
    subject = third_party_subject("compat_fields:AttendsOffByOne", device)
    built = check(subject, device, cases=cases)
    assert "seq_lens is " in built.explain()
    found = attend(subject, device, built, cases=cases)
    assert found.passed, found.explain()
    assert report(found).published.rows[0].limits == []
