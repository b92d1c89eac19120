"""What fails in an engine is a fault everywhere, and what a declaration excludes is listed with that declaration."""

import json
import sys
import xml.etree.ElementTree as ET
from io import StringIO
from typing import Any

import compat_failing as planted
import pytest
from compat_checked import NAMED, attended, checked, line_of, report
from rich.console import Console

from vllm_async_spec.compat.cases import CASES, Case
from vllm_async_spec.compat.legend import EXCLUDED, LEGEND
from vllm_async_spec.compat.render import badge, junit, markdown, print_report, render_html
from vllm_async_spec.compat.report import Report, read_runs


def printed(of: Report) -> str:
    text = StringIO()
    print_report(of, Console(file=text, width=200))
    return text.getvalue()


def test_a_builder_that_raises_is_a_fault_in_every_report():
    found = checked(planted.OnlyOneToken)
    assert (found.passed, found.verdict, len(found.ran)) == (False, "fails", 5)
    full = report(found)
    where = f"ValueError: one token each at support/{line_of(planted.OnlyOneToken)}"
    run = full.published
    (row,) = run.rows
    assert (full.exit_code, row.verdict, row.ran, row.batches) == (1, "fails", 5, 18)
    assert run.line == "async-spec: fails"
    assert badge(run).partition("#9a3412")[1]
    assert "0 of 1 builders run without a wait, 1 fail" in full.summary
    assert f"spec K + 1: told exact lengths, it fails: {where}" in printed(full)
    assert where.removeprefix("ValueError: one token each at ") in row.sites
    assert f"- told exact lengths, it fails: {where} (spec K + 1; non-uniform spec; prefill; " in markdown(run)
    assert "it fails: ValueError: one token each" in render_html([run])
    assert 'class="chip fails"' in render_html([run])
    case = next(case for case in json.loads(json.dumps(full.to_dict()))["backends"][0]["cases"] if case["failed"])
    assert (case["case"], case["failure"], case["not_run"]) == ("spec K + 1", where, None)
    (suite,) = ET.fromstring(junit(full))
    assert (suite.get("failures"), suite.get("skipped")) == ("13", "0")
    messages = {failure.get("message") for failure in suite.iter("failure")}
    assert messages == {f"told exact lengths, it fails: {where}"}


def test_a_builder_that_raises_with_every_batch_is_a_fault_and_not_untried():
    found = checked(planted.OnlyOneToken, "spec K + 1", "prefill")
    assert found.steps == ()
    assert report(found).exit_code == 1
    assert "spec K + 1: told exact lengths, it fails: ValueError: one token each" in found.explain()


def test_a_builder_that_ends_python_is_a_fault():
    class Exits(planted.compat_planted.Builder):
        def extra(self, metadata: Any) -> Any:
            sys.exit(0)

    def stops(device: Any) -> Any:
        sys.exit(0)

    assert "it fails: SystemExit: 0 at compat/test_compat_failing.py:" in checked(Exits, "decode").explain()
    assert str(checked(stops).failure).startswith("can't be made: SystemExit: 0 at ")
    assert "its forward fails: SystemExit: 0 at " in attended(planted.ForwardExits, "decode").explain()


class Boom(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\x1b[31mno\x00 \udc80\uffff\x9b heads"), r"ValueError: \x1b[31mno\x00 \udc80\uffff\x9b heads at "),
        (Boom(), "Boom: its message can't be read, because str() of it raises RuntimeError at "),
    ],
    ids=["unprintable", "unreadable"],
)
def test_whatever_an_exception_says_every_report_holds_it(error: Exception, said: str):
    class Raises(planted.compat_planted.Builder):
        def extra(self, metadata: Any) -> Any:
            raise error

    full = report(checked(Raises, "decode"))
    (failure,) = ET.fromstring(junit(full)).iter("failure")
    assert str(failure.get("message")).startswith(f"told exact lengths, it fails: {said}compat/test_compat_failing.py:")
    for text in (printed(full), markdown(full.published), render_html([full.published]), json.dumps(full.to_dict())):
        text.encode()
        assert "\x1b" not in text


def test_a_name_that_xml_can_not_hold_is_written_as_an_escape():
    class Names(planted.compat_planted.Builder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return {"\x00": common_attn_metadata.max_seq_len, "\udc80": common_attn_metadata._seq_lens_cpu is None}

    xml = junit(report(checked(Names, "decode")))
    assert r"\udc80" in xml
    ET.fromstring(xml)


def test_what_fails_while_a_graph_is_recorded_is_a_fault():
    found = checked(planted.FailsAtCapture, "decode", "capture, one token")
    assert list(found.faults) == ["capture, one token"]
    assert found.at_capture == {}
    assert (found.passed, report(found).exit_code, report(found).published.line) == (False, 1, "async-spec: fails")
    assert '<failure message="told exact lengths, it fails: ValueError: no graphs' in junit(report(found))


def test_what_a_declaration_excludes_is_listed_with_the_declaration():
    found = checked(planted.RefusesOneTokenGraphs)
    assert found.passed, found.explain()
    reason = "with drafts only 4 tokens a request are captured: get_cudagraph_support() is UNIFORM_BATCH"
    (case,) = (case for case in found.cases if case.not_run)
    assert case.case == "capture, one token"
    assert str(case.not_run).startswith(f"{reason}; the builder raises ValueError: graphs are for drafts at support/")
    text = printed(report(found))
    assert f"\n{EXCLUDED}\n  planted: capture, one token ({reason}; the builder raises" in text
    assert "17 of 18" in text


def test_what_is_counted_is_explained_below_the_table():
    text = printed(report(checked(planted.compat_planted.Clean)))
    assert "18 of 18" in text
    assert f"\n{LEGEND}\n" in text
    assert EXCLUDED not in text, "nothing is excluded"
    assert all(case.name in LEGEND for case in CASES)


@pytest.mark.parametrize(
    ("kind", "failing", "unpadded"),
    [
        (planted.RefusesRows, ["padded rows", "empty rows"], []),
        (planted.SingleRefusesRows, ["empty rows"], ["padded rows"]),
        (planted.NeverRefusesRows, [], ["padded rows", "empty rows"]),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_rows_are_padded_only_for_builders_with_full_graphs(kind: type, failing: list[str], unpadded: list[str]):
    found = checked(kind, "decode", "padded rows", "empty rows")
    assert list(found.faults) == failing
    assert [case.case for case in found.cases if case.unpadded] == unpadded
    assert found.passed is (not failing)
    for reason, cases in report(found).published.rows[0].unpadded.items():
        assert cases == unpadded
        assert reason.endswith(f"{kind.support}, so vLLM pads the layer's input and no rows")
        assert f"{'; '.join(cases)} without padding rows ({reason})" in printed(report(found))


def test_a_forward_that_fails_on_padded_rows_is_a_fault():
    found = attended(planted.ForwardRefusesRows, "decode", "padded rows")
    assert (found.passed, found.verdict, list(found.faults)) == (False, "fails", ["padded rows"])
    where = f"ValueError: a row without tokens at support/{line_of(planted.ForwardRefusesRows.impl)}"
    assert found.faults["padded rows"][0] == f"told upper bound, its forward fails: {where}"
    full = report(found)
    (row,) = full.published.rows
    assert full.exit_code == 1
    assert row.attention == "right, 1 of 2 batches, fails with 1"
    assert where.partition(" at ")[2] in row.sites
    assert f"padded rows: told upper bound, its forward fails: {where}" in printed(full)
    assert f'message="told upper bound, its forward fails: {where}"' in junit(full)


def test_where_vllm_pads_the_input_only_the_forward_is_given_that():
    found = attended(planted.ForwardNeverRefusesRows, "decode", "padded rows")
    assert found.passed, found.explain()
    assert report(found).published.rows[0].attention == "right, 2 of 2 batches"
    assert [case.unpadded is not None for case in found.cases] == [False, True]
    found = attended(planted.ForwardDoesNotSlice, "decode", "padded rows")
    assert list(found.faults) == ["padded rows"]
    assert "its forward fails: ValueError: the input is longer" in found.faults["padded rows"][0]


def test_a_backend_that_declares_no_such_heads_may_fail_with_them():
    found = attended(planted.SmallHeads, "decode")
    assert found.passed, found.explain()
    said = "the backend's supports_head_size(64) is False; the forward raises ValueError: no such head at support/"
    assert str(found.not_attended).startswith(said)
    assert report(found).published.rows[0].attention.startswith(f"not run: {said}")


def test_a_builder_is_given_its_own_order():
    ordered = Case("shuffled", (4, 2, 3, 1, 0), (40, 20, 30, 10, 0)).ordered(2)
    assert (ordered.query_lens, ordered.seq_lens) == ((2, 1, 4, 3, 0), (20, 10, 40, 30, 0))
    assert checked(planted.Reorders, "non-uniform spec").passed
    assert not checked(planted.DoesNotReorder, "non-uniform spec").passed


def test_a_batch_without_padded_rows_pads_the_input():
    padded = NAMED["padded rows"]
    case = padded.without_padded_rows()
    fields = case.fields()
    assert (fields["num_reqs"], fields["num_actual_tokens"], len(fields["slot_mapping"])) == (2, 8, 12)
    assert fields["slot_mapping"].tolist() == padded.fields()["slot_mapping"].tolist()
    assert not case.padded


def test_empty_rows_have_the_tokens_that_a_graph_pads():
    """vLLM asserts it: a batch of 2 tokens in 4 rows is none that it makes."""
    fields = NAMED["empty rows"].fields()
    assert fields["num_actual_tokens"] == fields["num_reqs"] == 4


def test_older_results_are_still_read(tmp_path):
    data = report(checked(planted.OnlyOneToken, "decode")).to_dict()
    del data["backends"][0]["unfinished"]
    for case in data["backends"][0]["cases"]:
        for name in ("failure", "failed", "unpadded", "against_model", "in_turn", "wrong_in_turn"):
            del case[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data))
    assert read_runs([path])[0].rows[0].passed
