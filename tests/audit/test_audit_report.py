"""An audit's data through JSON, in the terminal and as a page."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import audit_reports
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from vllm_async_spec.audit.engine import _overstated
from vllm_async_spec.audit.figures import SIMULATED, compared_figures, facts, number, paired_causes, percent, ratio
from vllm_async_spec.audit.html import render_html
from vllm_async_spec.audit.report import SCHEMA, Overhead, Phase, Place, Report, Spread, WaitKind
from vllm_async_spec.audit.terminal import print_report

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&[bold]{{ 7 * 7 }}"

# Not a number is not equal to itself, so no report that holds one is.
st.register_type_strategy(float, st.floats(allow_nan=False))

REPORTS = {
    "waiting": (audit_reports.waiting(), None),
    "compared": (audit_reports.flowing(), audit_reports.waiting()),
    "simulated": (audit_reports.simulated(), None),
    "one of each": (audit_reports.waiting(), audit_reports.simulated()),
}
each_report = pytest.mark.parametrize(("report", "before"), REPORTS.values(), ids=REPORTS)


def printed(report: Report, before: Report | None = None, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_report(report, console, before)
    return console.file.getvalue()  # type: ignore[attr-defined]


def words(text: str) -> str:
    return " ".join(text.split())


class Page(HTMLParser):
    """What a page holds: its elements, and what it says where no script runs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.text = words(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@settings(max_examples=50)
@given(st.from_type(Report).map(lambda report: replace(report, schema=SCHEMA)))
def test_json_keeps_a_report(report: Report):
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_of_before_there_were_sentences_can_be_read():
    data = json.loads(json.dumps(audit_reports.waiting().to_dict()))
    del data["sentence"]
    old = Report.from_dict(data)
    assert old.sentence == ""
    assert old.headline in printed(old)
    assert "sentence" not in [attributes.get("class") for _, attributes in Page(render_html(old)).elements]


def test_the_longest_step_of_each_phase_is_shown_where_a_report_has_it():
    new = audit_reports.waiting()
    data = json.loads(json.dumps(new.to_dict()))
    for phase in data["phases"]:
        del phase["longest_step_ms"]
    old = Report.from_dict(data)
    assert re.search(r"metadata building +worker +3\.92 +3\.16 +61\.40\n", printed(new))
    assert re.search(r"metadata building +worker +3\.92 +3\.16\n", printed(old))
    assert "longest step, ms" in Page(render_html(new)).text
    assert "longest step, ms" not in Page(render_html(old)).text


def recorded_at(step_ms: float) -> Report:
    """A report whose steps take a millisecond, and this long with CUPTI's records."""
    cost = Overhead(*(Spread(40, ms, ms, ms) for ms in (1.0, step_ms, 2.0)))
    return replace(audit_reports.waiting(), overhead=cost)


@pytest.mark.parametrize(
    ("step_ms", "idle"),
    [
        (12.31 / 12.18, 1 - 0.689 * 12.31 / 12.18),  # as recorded
        (1.4, 1 - 0.689 * 1.4),
        (1.5, 0),  # the device had more to do than a plain step has time for
        (0.9, 0.311),  # by chance; recording makes no step shorter
    ],
)
def test_what_recording_adds_to_a_step_is_not_counted_as_idle(step_ms: float, idle: float):
    assert recorded_at(step_ms).plain_idle == pytest.approx(idle)


@pytest.mark.parametrize(("step_ms", "said"), [(1.02, []), (1.4, ["1.40 times as long", "about 3.5%"])])
def test_a_note_says_so_where_recording_makes_steps_much_longer(step_ms: float, said: list[str]):
    notes = list(_overstated(recorded_at(step_ms)))
    assert len(notes) == bool(said)
    assert all(part in note for note in notes for part in said)


def test_idle_time_at_a_plain_step_needs_both_records():
    assert replace(audit_reports.waiting(), overhead=None).plain_idle is None
    assert audit_reports.simulated().plain_idle is None


def changed(path: str, value: Any) -> Any:
    """A sample as plain data, with one field replaced, or left out where the value is `...`."""
    data = json.loads(json.dumps(audit_reports.waiting().to_dict()))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at = data
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "not an audit report of schema 1 (its schema is None)"),
        ({}, "not an audit report of schema 1 (its schema is None)"),
        (changed("schema", 2), "not an audit report of schema 1 (its schema is 2)"),
        (changed("headline", ...), "report lacks headline"),
        (changed("engine.driver", ...), "report.engine lacks driver"),
        (changed("causes.1.stack.0.line", ...), "report.causes[1].stack[0] lacks line"),
        (changed("causes.1.place", "far away"), "report.causes[1].place is 'far away'; it must be one of critical, "),
        (changed("causes", 3), "report.causes is 3; it must be of type tuple"),
        (changed("gpu", "H200"), "report.gpu is 'H200'; it must be of type DeviceTime"),
        (changed("step_ms.median", "fast"), "report.step_ms.median is 'fast'; it must be of type float"),
    ],
)
def test_what_is_no_report_is_refused_in_one_sentence(data: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        Report.from_dict(data)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.004, "<0.01"), (0.005, "0.01"), (3.1, "3.10"), (-0.2, "-0.20")]
)
def test_only_zero_reads_as_zero(value: float, text: str):
    assert number(value) == text


def test_a_share_is_per_cent_and_a_ratio_needs_something_before():
    assert [percent(share) for share in (0.0, 0.0001, 0.658, 1.0)] == ["0", "<0.1", "65.8", "100.0"]
    assert [ratio(4.0, 3.0), ratio(4.0, 0.0), ratio(0.0, 3.0), ratio(0.0, 0.0)] == ["0.75", "0", "-", "-"]


def test_causes_are_paired_by_their_place_in_the_code():
    before, after = audit_reports.waiting(), audit_reports.flowing()
    pairs = paired_causes(before, after)
    assert [pair.before for pair in pairs] == list(before.causes)[:2] + sorted(
        before.causes[2:], key=lambda cause: list(Place).index(cause.place)
    )
    assert [pair.after for pair in pairs[:2]] == [None, None]
    assert {pair.after for pair in pairs[2:]} == set(after.causes)


def test_a_wait_that_moved_off_the_critical_path_is_another_cause():
    before = audit_reports.waiting()
    moved = replace(before.causes[0], place=Place.OVERLAPPED)
    pairs = paired_causes(before, replace(before, causes=(moved, *before.causes[1:])))
    assert (before.causes[0], None) in [(pair.before, pair.after) for pair in pairs]
    assert (None, moved) in [(pair.before, pair.after) for pair in pairs]


def test_waits_of_a_cpu_are_not_compared_with_those_of_a_gpu():
    assert compared_figures(audit_reports.simulated(), audit_reports.waiting()) == ()
    assert len(compared_figures(audit_reports.waiting(), audit_reports.flowing())) == 6


@each_report
@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_every_cause_within_its_width(report: Report, before: Report | None, width: int):
    text = printed(report, before, width)
    assert words(text).startswith(f"{report.headline} {report.sentence}")
    assert max(map(len, text.splitlines())) <= width
    for cause in report.causes + (before.causes if before else ()):
        # A line of 80 holds a whole path; beside other columns one may break after a slash.
        file = cause.site and (cause.site.file if width == 80 else cause.site.file.rpartition("/")[2])
        assert (f"{file}:{cause.site.line}" if cause.site else "no Python call seen") in text
        assert cause.thread in text
    for note in report.notes:
        assert note in words(text)


def test_the_terminal_shows_both_sides_and_their_ratio():
    text = printed(audit_reports.flowing(), audit_reports.waiting())
    assert re.search(r"critical waits +2\.00 +0 +0 ", text)
    assert re.search(r"step time +13\.02 +9\.51 +0\.73 ", text)
    assert re.search(r"device busy +65\.8 +92\.1 +1\.40 ", text)
    assert re.search(r"before +1\.00 +3\.10 +3\.84 .*flashinfer.py:1020.*\n.*after +- +- +- ", text)


@pytest.mark.parametrize("width", range(50, 81, 3))
def test_a_path_goes_to_the_next_line_as_a_whole(width: int):
    report = audit_reports.waiting()
    site = f"{audit_reports.PLAN.file}:{audit_reports.PLAN.line}"
    lines = printed(replace(report, causes=(), gpu=None), width=width).splitlines()
    assert [line for line in lines if site in line]


def test_a_path_longer_than_a_line_breaks_after_a_slash():
    report = audit_reports.waiting()
    first = report.causes[0]
    folders = "a_folder_of_26_characters/" * 5
    long = replace(first, stack=(replace(first.stack[0], file=f"{folders}a_file.py"),))
    lines = printed(replace(report, causes=(long,), sentence=f"Most waits are at {long.site}."), width=80).splitlines()
    at = [line.strip() for line in lines if "a_folder" in line]
    assert at
    assert all(line.removesuffix(" in build.").endswith(("/", "a_file.py:1020 in build")) for line in at), at


@each_report
@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_printed_twice_and_no_row_is_empty(report: Report, before: Report | None, width: int):
    report = replace(report, load=replace(report.load, tokens_per_second=None, acceptance_length=None))
    before = before and replace(before, notes=report.notes)
    text = printed(report, before, width)
    said = words(text)
    for once in (report.headline, report.sentence, *report.notes, "host-caused idle", "device busy"):
        assert said.count(once) <= 1, once
    assert not re.search(r"^(output|software|driver) *$", text, re.MULTILINE)
    assert not re.search(r"\n\s*\n\s*\n", text)


@each_report
def test_the_page_says_nothing_twice_and_has_no_empty_row(report: Report, before: Report | None):
    report = replace(report, load=replace(report.load, tokens_per_second=None, acceptance_length=None))
    before = before and replace(before, notes=report.notes, command=report.command)
    shown = Page(render_html(report, before)).text.partition("Audit of host waits")[2]  # behind the tab's title
    for once in (report.headline, report.command, *report.notes, f"vLLM {report.engine.vllm}"):
        assert shown.count(once) == 1, once
    assert shown.count(report.engine.torch) == (2 if before and before.engine.driver != report.engine.driver else 1)
    assert shown.count(report.engine.model) == 1 + report.command.count(report.engine.model)
    assert "output" not in facts(report)
    assert all(facts(report).values())


def test_the_terminal_shows_no_times_of_a_cpu():
    text = printed(audit_reports.simulated())
    assert SIMULATED in words(text)
    assert not re.search(r"\bms\b", text)
    assert re.search(r"\bms\b", printed(audit_reports.waiting()))


def test_the_terminal_takes_source_for_text():
    report = audit_reports.waiting()
    first = report.causes[0]
    site = replace(first.stack[0], source="rows[/red] = x[0]")
    text = printed(replace(report, causes=(replace(first, stack=(site,)),)))
    assert "rows[/red] = x[0]" in text


@each_report
def test_the_page_says_everything_without_its_script(report: Report, before: Report | None):
    page = Page(render_html(report, before))
    for one in filter(None, (report, before)):
        assert one.headline in page.text
        assert one.sentence in page.text
        assert one.command in page.text
        assert one.engine.model in page.text
        assert one.date in page.text
        for note in one.notes:
            assert note in page.text
        for cause in one.causes:
            assert (str(cause.site) if cause.site else "no Python call seen") in page.text
            for frame in cause.stack:
                assert f"{frame}{frame.source}" in page.text
    roles = [attributes.get("role") for tag, attributes in page.elements if tag == "tr"]
    assert roles.count("row") >= len(paired_causes(before, report))


def test_the_page_shows_both_sides_and_their_ratio():
    page = Page(render_html(audit_reports.flowing(), audit_reports.waiting()))
    assert "critical waits before 2.00 → after 0 a stepratio 0 " in page.text
    assert "step time before 13.02 → after 9.51 ms, medianratio 0.73 " in page.text
    assert page.text.count(" gone ") == 2


def test_the_page_shows_no_times_of_a_cpu():
    page = Page(render_html(audit_reports.simulated()))
    assert SIMULATED in page.text
    assert not re.search(r"\bms\b", page.text)
    assert "timelines" not in [attributes.get("id") for _, attributes in page.elements]


@each_report
def test_the_page_needs_nothing_else(report: Report, before: Report | None):
    html = render_html(report, before)
    assert not re.search(r"https?:|@import|url\((?!#)|\bfetch\(|XMLHttpRequest", html)
    for tag, attributes in Page(html).elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not attributes.keys() & {"src", "href", "action"}, (tag, attributes)


def poisoned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [poisoned(item) for item in value]
    return HOSTILE if isinstance(value, str) and not isinstance(value, (WaitKind, Place, Phase)) else value


@pytest.mark.parametrize("compared", [False, True])
def test_the_page_takes_hostile_text_for_text(compared: bool):
    report = audit_reports.waiting()
    hostile = Report.from_dict(poisoned(report.to_dict()))
    plain = Page(render_html(report, report if compared else None))
    page = Page(render_html(hostile, hostile if compared else None))
    assert page.count("img") == 0
    assert page.count("script") == plain.count("script") == 2
    assert HOSTILE in page.text
    drawn = json.loads(page.scripts[0])
    assert drawn[0]["lanes"][0]["items"][0]["label"] == HOSTILE
    assert json.dumps(report.to_dict()["timeline"]["lanes"][0]["items"][1]["where"]) in plain.scripts[0]


def test_a_report_of_nothing_can_be_shown():
    report = replace(audit_reports.waiting(), causes=(), phases=(), gpu=None, timeline=None, overhead=None, notes=())
    page = Page(render_html(report, report))
    assert "No waits were found." in page.text
    assert "The cost of recording was not measured." in page.text
    assert "no waits were found" in printed(report, report)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OTHER])
def test_each_phase_has_a_colour_in_the_light_and_in_the_dark(phase: Phase):
    page = render_html(audit_reports.waiting())
    assert page.count(f".{phase.value.replace(' ', '-')} {{ --fill") == 2
