"""Lines that could wait and that no batch reached, and the share of branches reached."""

import ast
import importlib
import inspect
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import compat_planted as planted
import compat_unreached as unreached
import compat_unreached_helper as helper
import coverage
import pytest
from compat_checked import checked, report, subject
from rich.console import Console
from typer.testing import CliRunner

import vllm_async_spec
from vllm_async_spec.cli import app
from vllm_async_spec.compat.branches import reached
from vllm_async_spec.compat.branches.could_wait import suspects
from vllm_async_spec.compat.branches.host_values import HostValues
from vllm_async_spec.compat.branches.source_lines import functions_of
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.render import badge, junit, markdown, print_report, render_html
from vllm_async_spec.compat.report import Run
from vllm_async_spec.compat.results import BackendResult
from vllm_async_spec.compat.simulated_device import HostDevice

BATCHES = ("decode", "spec K + 1", "mixed", "draft step 2", "capture, one token")
CASES = [*BATCHES, "one request"]


def told_in(*sources: object) -> set[str]:
    found = set()
    for source in sources:
        lines, first = inspect.getsourcelines(source)  # type: ignore[arg-type]
        file = Path(inspect.getfile(source)).name  # type: ignore[arg-type]
        found |= {f"{file}:{max(first, 1) + at}" for at, line in enumerate(lines) if line.rstrip().endswith("# told")}
    return found


def told(found: BackendResult) -> set[str]:
    return {f"{Path(each.file).name}:{each.line}" for each in found.unreached}


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        (unreached.Thresholds, (unreached.Thresholds,)),
        (unreached.Callee, (unreached.Callee, helper)),
        (unreached.OneLine, (unreached.OneLine,)),
        (unreached.OneLineReached, (unreached.OneLineReached,)),
        (unreached.SeveralLines, (unreached.SeveralLines,)),
        (unreached.NeverWaits, (unreached.NeverWaits,)),
        (unreached.Misnamed, (unreached.Misnamed,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_lines_that_could_wait_and_did_not_run_are_told(kind: type[planted.Builder], sources: tuple[object, ...]):
    found = checked(kind, *CASES)
    assert (found.passed, found.verdict) == (True, "none")
    assert told(found) == told_in(*sources)
    assert found.shown_clean is not bool(found.unreached)


def test_a_wait_behind_a_threshold_is_told_with_file_line_and_text():
    found = checked(unreached.Thresholds)
    heads, prompts = sorted(told_in(unreached.Thresholds))
    first, second = map(str, found.unreached)
    assert first == f"support/{heads} in Thresholds.extra: copy to host (cpu): metadata.seq_lens.cpu()"
    assert second == f"support/{prompts} in Thresholds.extra: read (item): metadata.seq_lens.max().item()"
    assert found.passed
    assert not found.shown_clean
    assert f"not shown clean, no batch reached {second}" in found.explain()


def test_a_function_that_only_a_line_not_reached_calls_is_told_with_that_line():
    found = checked(unreached.Callee, *CASES)
    lines, first = inspect.getsourcelines(unreached.Callee)
    call = first + next(at for at, line in enumerate(lines) if "self._by_host(metadata)," in line)
    assert {each.called_from for each in found.unreached} == {f"support/compat_unreached.py:{call}"}
    assert {each.what for each in found.unreached} == {
        "read of a host length (seq_lens_cpu)",
        "device (synchronize)",
        "read (item)",
    }


def test_a_method_of_the_step_that_no_batch_reached_is_told():
    found = checked(unreached.NoDrafts, "decode")
    assert told(found) == told_in(unreached.NoDrafts)


@pytest.mark.parametrize("kind", planted.CLEAN)
def test_a_builder_of_which_all_ran_is_shown_clean(kind: type[planted.Builder]):
    found = checked(kind)
    assert found.shown_clean
    assert found.unreached == ()


def test_a_line_that_waits_has_been_reached():
    found = checked(planted.OnlyManyRequests, "256 requests", "decode")
    assert found.unreached == ()
    assert not found.passed
    assert not found.shown_clean


def test_the_share_of_branches_and_the_lines_not_reached():
    found = checked(unreached.SomeBranches, "decode", "one request")
    assert found.reached is not None
    assert found.reached.branches == "3 of 6"
    lines, first = inspect.getsourcelines(unreached.SomeBranches)
    match = first + next(at for at, line in enumerate(lines) if "match metadata" in line)
    assert found.reached.lines == {"support/compat_unreached.py": (match, match + 2, match + 4)}


def test_where_all_memory_is_the_hosts_nothing_could_wait():
    found = check(subject(unreached.Thresholds), HostDevice())
    assert found.unreached == ()
    assert found.reached is not None
    assert found.reached.branches == "2 of 4"


def test_an_outer_measurement_goes_on():
    """An author's tests may run under coverage.py themselves."""
    outer = coverage.Coverage(data_file=None, include=[helper.__file__], config_file=False)
    with outer.collect():
        found = checked(unreached.Callee, "decode")
        helper.after_the_suite()
    assert told(found) == told_in(unreached.Callee, helper)
    first = inspect.getsourcelines(helper.after_the_suite)[1]
    assert outer.get_data().lines(helper.__file__) == [first + 1]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("x.to('cpu')", "copy to host (to)"),
        ("x.to(torch.device('cpu'))", "copy to host (to)"),
        ("x.to('cpu', non_blocking=True)", None),
        ("x.to(device)", None),
        ("buffer_cpu.copy_(x)", "copy to host (copy_)"),
        ("buffer_cpu[:n].copy_(x, non_blocking=True)", None),
        ("buffer.copy_(x)", None),
        ("torch.empty(3, device='cpu', pin_memory=True).copy_(x)", None),
        ("torch.tensor([1], device=device)", "copy to device (tensor)"),
        ("torch.tensor([1], device='cpu')", None),
        ("torch.where(x)", "read (where)"),
        ("torch.where(x, 0, 1)", None),
        ("torch.repeat_interleave(x, y)", "read (repeat_interleave)"),
        ("torch.repeat_interleave(x, y, output_size=4)", None),
        ("np.unique(x)", None),
        ("torch.unique(x)", "read (unique)"),
        ("event.synchronize()", "event (synchronize)"),
        ("self.stream.synchronize()", "stream (synchronize)"),
        ("m.num_computed_tokens_cpu", "read of a host length (num_computed_tokens_cpu)"),
        ("m.seq_lens_cpu_upper_bound.tolist()", None),
        ("m.query_start_loc_cpu[1:].diff().max().item()", None),
        ("m.query_start_loc_cpu.to(device).max().item()", "read (item)"),
        ("(m.query_start_loc_cpu[0] + x).item()", "read (item)"),
        ("torch.diff(m.query_start_loc_cpu).tolist()", None),
    ],
)
def test_what_could_wait_by_its_source(source: str, what: str | None):
    found = [each.what for each in suspects(ast.parse(source, mode="eval").body, HostValues(None))]
    assert found == ([] if what is None else [what])


def test_each_form_of_the_result_tells_the_lines():
    found = checked(unreached.Thresholds, *CASES)
    made, lines = report(found), list(map(str, found.unreached))
    run = made.published
    assert run.line == "async-spec: none, not shown clean"
    assert "#7a5c00" in badge(run)
    assert "not shown clean" in badge(run)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(made, console)
    texts = {"terminal": console.export_text(), "markdown": markdown(run), "html": render_html([run])}
    texts["json"] = json.dumps(made.to_dict())
    for name, text in texts.items():
        assert "not shown clean" in text, name
        for line in lines:
            assert line in text.replace("<wbr>", ""), name
    assert "| 2 of 4 |" in texts["markdown"]
    assert "2 of 4" in texts["terminal"]
    assert "2 of 4 branches reached" in texts["html"]
    skipped = ET.fromstring(junit(made)).find("testsuite/testcase[@name='not shown clean']/skipped")
    assert skipped is not None
    assert skipped.text == "\n".join(f"no batch reached {line}" for line in lines)
    assert ET.fromstring(junit(made)).find("testsuite").attrib["failures"] == "0"  # type: ignore[union-attr]


def test_a_builder_that_is_not_shown_clean_is_counted_apart_and_is_no_failure():
    clean, unsure = (checked(kind, *CASES) for kind in (planted.Clean, unreached.Thresholds))
    made = report(clean, unsure)
    assert made.exit_code == 0
    assert made.summary == "1 of 2 builders run without a wait, 1 not shown clean"
    assert made.published.line == "async-spec: 1 of 2 builders build from device seq_lens, 1 not shown clean"
    assert "not shown clean" not in junit(report(clean))
    assert "#1f6f43" in badge(report(clean).published)


def test_a_published_file_keeps_the_lines_and_an_older_one_has_none():
    run = report(checked(unreached.Thresholds, *CASES)).published
    again = Run.read(json.loads(run.to_json()))
    assert again == run
    older = json.loads(run.to_json())
    for name in ("branches", "unreached", "limits"):
        del older["rows"][0][name]
    read = Run.read(older)
    assert (read.rows[0].branches, read.rows[0].unreached, read.line) == ("", [], "async-spec: none")
    assert "no batch reached" not in markdown(read) + render_html([read])


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_strict_makes_it_the_exit_code(options: tuple[str, ...], code: int):
    done = CliRunner().invoke(app, ["compat", "--backend", "compat_unreached:Thresholds", *options])
    assert done.exit_code == code, done.output
    assert "not shown clean, no batch reached support/compat_unreached.py:" in done.output.replace("\n", "")


def test_the_plugins_own_lines_are_recorded():
    importlib.import_module("vllm_async_spec.attention.flashinfer")  # only parts that are imported can run
    where = reached._places(planted.Clean)
    ours = Path(str(vllm_async_spec.__file__)).parent
    assert str(ours / "attention") + os.sep in where
    assert not any(str(ours / "metadata.py").startswith(each) for each in where)


def test_the_flashinfer_patches_read_only_what_is_on_the_host_by_name():
    folder = Path(vllm_async_spec.__file__).parent / "vllm_plugin" / "patches"
    statements = [
        each for path in folder.glob("flashinfer_*.py") for f in functions_of(str(path)) for each in f.statements
    ]
    assert statements
    assert [each for statement in statements for each in statement.suspects] == []
