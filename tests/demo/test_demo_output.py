"""What the demo prints."""

import io
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from vllm_async_spec.cli import app
from vllm_async_spec.demo import train
from vllm_async_spec.demo.compare import WAYS, Comparison, Result
from vllm_async_spec.demo.progress import ProgressLines, shown_progress
from vllm_async_spec.demo.terminal import print_comparison

PAGE = Path(__file__).parents[2] / "docs" / "measured.md"


def result(place: int, speed: float, deviation: float, accepted: float | None, reads: tuple[float, float]) -> Result:
    way = WAYS[place]
    on = way.plugin if way.async_scheduling is None else way.async_scheduling
    return Result(way.name, on, "V1", speed, (speed, speed), deviation, accepted, *reads, None)


def comparison(speed: float, **changes: object) -> Comparison:
    results = tuple(result(place, speed, 0.19, 2.55 if place else None, (10.0, 11.95)) for place in range(4))
    found = Comparison("CPU", "0.32.0", 16, 128, 3, 5, 2, True, results, ())
    return replace(found, **changes)


def printed(found: Comparison, width: int = 80) -> str:
    file = io.StringIO()
    print_comparison(found, Console(file=file, width=width))
    return file.getvalue()


LONG = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.mark.parametrize("width", [80, 100, 250])
@pytest.mark.parametrize("speed", [320.0, 5517.0, 123456.0])
@pytest.mark.parametrize("steady", [True, False])
@pytest.mark.parametrize("device", ["CPU", LONG])
def test_no_line_is_longer_than_80_columns_and_no_number_is_broken(width: int, speed: float, steady: bool, device: str):
    text = printed(comparison(speed, steady=steady, device=device), width)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith(tuple(way.name for way in WAYS))]
    assert [[cell.strip() for cell in row.split("│")][2:] for row in rows] == [
        [f"{speed:.0f} ±19%" if steady else f"~{speed:.0f}", "2.55" if place else "-", "10.00 + 11.95", "identical"]
        for place in range(4)
    ]


def test_a_difference_fits_too():
    found = comparison(5517.0)
    other = replace(found.results[3], difference="prompt 15, token 127: 255 instead of 256")
    text = printed(replace(found, results=(*found.results[:3], other)))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("identical") == 3
    assert len(re.findall(r"│ differ *$", text, re.MULTILINE)) == 1


def test_the_rounds_are_told_and_speeds_that_vary_are_no_result():
    text = " ".join(printed(comparison(5517.0)).split())
    assert "median of the last 5 of 7 interleaved rounds, ± the furthest of these. The first 2 are warm-up" in text
    assert "no result" not in text
    text = " ".join(printed(comparison(5517.0, warm_up=17, steady=False)).split())
    assert "±" not in text
    assert "Tokens/s are no result: after 22 rounds they still vary" in text


ROW = re.compile(
    r"^(?P<way>[a-z, ]+?) +│ +(?:yes|no) │ +~?(?P<speed>\d+)( ±(?P<deviation>\d+)%)? │ +(?P<accepted>[\d.]+|-) │ +"
    r"(?P<now>[\d.]+) \+ (?P<late>[\d.]+) │ identical *$",
    re.MULTILINE,
)


def test_the_page_shows_what_the_demo_prints_now():
    (shown,) = re.findall(r"^```text\n(vLLM .*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    results = []
    for place, row in enumerate(ROW.finditer(shown)):
        accepted = None if row["accepted"] == "-" else float(row["accepted"])
        reads = (float(row["now"]), float(row["late"]))
        results.append(result(place, float(row["speed"]), int(row["deviation"] or 0) / 100, accepted, reads))
    counted = re.search(r"last (\d+) of (\d+) interleaved\s+rounds", shown)
    assert counted is not None
    rounds, run = int(counted[1]), int(counted[2])
    found = comparison(1.0, results=tuple(results), rounds=rounds, warm_up=run - rounds, steady="±" in shown)
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in printed(found).splitlines()]


def test_a_line_when_a_task_begins_and_every_few_seconds():
    progress, lines, now = Progress(disable=True), [], [0.0]
    told = ProgressLines(progress, lines.append, every_s=5.0, clock=lambda: now[0])
    told.look()
    first = progress.add_task("Training the target", total=600, unit="steps")
    for second in range(12):
        now[0] = 100.0 + second
        told.look()
        progress.advance(first, 10)
    second = progress.add_task("Starting vLLM four times", total=4, unit="engines")
    now[0] = 113.0
    told.look()
    told.look()
    progress.update(second, completed=4)
    now[0] = 119.0
    told.look()
    progress.update(first, completed=600)
    now[0] = 190.0
    told.look()
    assert lines == [
        "Training the target: 0 of 600 steps, 0 s",
        "Training the target: 50 of 600 steps, 5 s",
        "Training the target: 100 of 600 steps, 10 s",
        "Starting vLLM four times: 0 of 4 engines, 0 s",
        "Training the target: 120 of 600 steps, 0 s",
    ]


class Watched(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_without_a_terminal_lines_are_written_beside_the_work():
    file = Watched()
    with shown_progress(Console(file=file, width=40)) as progress:
        progress.add_task("Generating until the speeds are steady", total=28, unit="turns")
        assert file.written.wait(60), "no line"
    assert file.getvalue() == "Generating until the speeds are steady: 0 of 28 turns, 0 s\n"


def test_on_a_terminal_there_is_a_bar_and_no_lines():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with shown_progress(console) as progress:
        progress.add_task("Training the target", total=600, unit="steps")
    assert "Training the target" in file.getvalue()
    assert "of 600 steps" not in file.getvalue()


def test_an_interrupted_training_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "prepare_models", interrupt)
    done = CliRunner().invoke(app, ["demo", "--cache", str(tmp_path)])
    assert done.exit_code == 130
    kept = f"the same command goes on from the last checkpoint in {tmp_path}"
    assert done.stderr.splitlines()[-1] == f"vllm-async-spec: interrupted; {kept}"
