"""What is published of runs."""

import json
import lzma
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import compat_planted as planted
import pytest
import torch
from compat_checked import subject

from vllm_async_spec.compat.archive import ARCHIVE, read_archive, write_archive
from vllm_async_spec.compat.backends import BACKENDS
from vllm_async_spec.compat.cases import CASES
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.fetch import RELEASES
from vllm_async_spec.compat.json_text import unpacked
from vllm_async_spec.compat.model_shapes import MODELS_OF
from vllm_async_spec.compat.publish import documents, main
from vllm_async_spec.compat.render import badge
from vllm_async_spec.compat.report import CLASSES, PublishedError, Report, Run, command_line, read_runs
from vllm_async_spec.compat.results import Need
from vllm_async_spec.compat.simulated_device import SimulatedDevice

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = read_archive(DOCS / "compat")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "compat").mkdir()
    return tmp_path


def publish(docs: Path, *data: dict[str, Any], name: str = "result.json") -> int:
    """The command's exit code for files with these results, which have numbers before their names if several."""
    files = [docs / (name if len(data) == 1 else f"{number}-{name}") for number in range(len(data))]
    for file, each in zip(files, data, strict=True):
        file.write_text(json.dumps(each))
    return main(["--docs", str(docs), *map(str, files)])


def report(*kinds: type[planted.Builder], device: str = "cpu", release: str = "0.32.0") -> Report:
    return Report(
        version="0.1.0",
        release=release,
        torch=torch.__version__,
        device=device,
        patches=None,
        date="2026-11-21",
        command="vllm-async-spec compat",
        stubs=(("a stub", "why " * 99),),
        results=tuple(check(subject(kind, kind.__name__), SimulatedDevice()) for kind in kinds),
        absent={"TREE_ATTN": "this release has none"},
    )


@pytest.fixture(scope="module")
def full() -> Report:
    return report(planted.Clean, planted.OnlyDrafting, planted.OnlyCapture, planted.NoLengths)


def test_every_verdict_has_its_class():
    assert {str(need) for need in Need} | {"fails", "not run", "not constructed"} == set(CLASSES)


def test_a_full_result_and_what_is_kept_of_it_are_the_same_run(full: Report, tmp_path: Path):
    path = tmp_path / "kept.json"
    path.write_text(full.published.to_json())
    assert read_runs([path]) == [full.published]
    assert len(path.read_text()) < len(json.dumps(full.to_dict())) / 10
    assert all(value not in ([], {}, None) for row in json.loads(path.read_text())["rows"] for value in row.values())


def test_a_row_says_what_was_found(full: Report):
    clean, drafting, capture, failing = full.published.rows
    assert (clean.verdict, clean.passed, clean.ran, clean.evidence) == ("none", True, len(CASES), [])
    assert (drafting.verdict, drafting.passed) == ("blocks", False)
    assert list(drafting.faults.values()) == [["draft step 2", "draft step 3"]]
    assert re.fullmatch(r"support/compat_planted.py:\d+", drafting.sites[0])
    assert (capture.verdict, capture.faults, capture.sites) == ("none", {}, [])
    assert list(capture.at_capture.values()) == [["capture, one token", "capture, K + 1"]]
    assert (clean.at_capture, drafting.at_capture) == ({}, {})
    assert (failing.verdict, len(failing.sites)) == ("exact", 1)
    assert re.fullmatch(r"support/compat_planted.py:\d+", failing.sites[0])


def test_its_name_says_release_way_and_machine(full: Report):
    assert full.published.name == "0.32.0-stock"
    assert report(device="NVIDIA H200").published.name == "0.32.0-stock-h200"
    data = full.to_dict() | {"plugin": {"min-tokens": "applied", "metadata-micro-batches": "refused"}}
    assert (Run.read(data).name, Run.read(data).plugin) == ("0.32.0-plugin", ["min-tokens"])


def test_runs_are_in_the_order_of_their_releases(tmp_path: Path):
    runs = [report(release=release, device=device) for release in ("0.32.0", "0.9.0") for device in ("A H200", "cpu")]
    for number, run in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(run.published.to_json())
    names = [run.name for run in read_runs(tmp_path.glob("*.json"))]
    assert names == ["0.9.0-stock", "0.9.0-stock-h200", "0.32.0-stock", "0.32.0-stock-h200"]


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"schema": 2, "rows": []}', '{"schema": 1}', '{"schema": 1, "rows": [1]}']
)
def test_a_file_that_is_no_result_is_told_in_one_sentence(text: str, docs: Path, capsys: pytest.CaptureFixture[str]):
    path = docs / "wrong.json"
    path.write_text(text)
    with pytest.raises(PublishedError, match=r"wrong.json can't be read: "):
        read_runs([path])
    assert main(["--docs", str(docs), str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_publishing_somewhere_else_is_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--docs", str(tmp_path), "result.json"]) == 2
    assert "has no compat/; name the documentation's directory with --docs" in capsys.readouterr().err


def test_a_run_on_a_gpu_gets_its_column(docs: Path):
    for device in ("cpu", "NVIDIA H200"):
        assert publish(docs, report(planted.Clean, device=device).to_dict()) == 0
    made = documents(read_archive(docs / "compat"))
    assert made["compat/0.32.0-stock-h200.md"].startswith("# vLLM 0.32.0, stock, NVIDIA H200\n")
    page = made["assets/compatibility.html"]
    assert 'href="#clean-0-32-0-stock-h200"' in page
    assert page.count(">not run</span>") == 2 * 5  # of six wanted runs for each of two names, one is there


@pytest.mark.parametrize("name", ["compat-0.32.0-plugin.json", "0.32.0.plugin.json"])
def test_a_stock_run_does_not_pass_for_one_with_the_plugin(
    full: Report, name: str, docs: Path, capsys: pytest.CaptureFixture[str]
):
    assert publish(docs, full.to_dict(), name=name) == 2
    assert f"{name} was made without --plugin, so it is 0.32.0-stock; rename the file" in capsys.readouterr().err
    assert publish(docs, full.to_dict() | {"plugin": {}}, name="stock.json") == 2
    assert "was made with --plugin, so it is 0.32.0-plugin" in capsys.readouterr().err
    assert list((docs / "compat").iterdir()) == []


def test_two_files_of_one_run_are_refused(full: Report, docs: Path, capsys: pytest.CaptureFixture[str]):
    assert publish(docs, full.to_dict(), full.to_dict()) == 2
    assert "1-result.json is 0.32.0-stock, and so is an earlier file" in capsys.readouterr().err
    assert list((docs / "compat").iterdir()) == []


def test_a_badge_is_one_line_of_the_run(full: Report):
    assert full.published.line == "async-spec: 2 of 4 builders build from device seq_lens"
    assert report(planted.OnlyDrafting).published.line == "async-spec: blocks"
    image = ET.fromstring(badge(full.published))
    assert image.get("aria-label") == full.published.line
    assert [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")] == full.published.line.split(": ")
    assert badge(full.published).partition("#9a3412")[1]
    assert not badge(report(planted.Clean).published).partition("#9a3412")[1]


def test_the_published_runs_are_as_this_package_writes_them(tmp_path: Path):
    write_archive(tmp_path, PUBLISHED)
    assert unpacked(DOCS / "compat" / ARCHIVE) == unpacked(tmp_path / ARCHIVE)
    assert (DOCS / "compat" / ARCHIVE).stat().st_size < 30_000


def test_git_has_no_page_that_the_site_makes_and_no_run_outside_the_archive():
    assert [path.name for path in (DOCS / "compat").iterdir()] == [ARCHIVE]


def test_publishing_replaces_a_run_and_keeps_the_others(docs: Path):
    for release, kind in (("0.32.0", planted.Clean), ("0.26.0", planted.Clean), ("0.32.0", planted.OnlyDrafting)):
        assert publish(docs, report(kind, release=release).to_dict()) == 0
    found = read_archive(docs / "compat")
    assert [(run.name, run.rows[0].verdict) for run in found] == [("0.26.0-stock", "none"), ("0.32.0-stock", "blocks")]
    made = documents(found)
    assert Run.read(json.loads(made["compat/0.32.0-stock.json"])) == found[1]


@pytest.mark.parametrize("content", [b"", b"no archive", lzma.compress(b"{"), lzma.compress(b"[1]")])
def test_an_archive_that_cant_be_read_is_told_and_not_replaced(
    content: bytes, full: Report, docs: Path, capsys: pytest.CaptureFixture[str]
):
    (docs / "compat" / ARCHIVE).write_bytes(content)
    assert publish(docs, full.to_dict()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{ARCHIVE} can't be read: " in said
    assert (docs / "compat" / ARCHIVE).read_bytes() == content


def test_a_command_is_told_as_anybody_would_give_it():
    given = "/opt/bin/vllm-async-spec compat --device cuda --json /root/w0/found.json --html=/root/page.html"
    _, *words = given.split()
    told = "vllm-async-spec compat --device cuda --json found.json --html=page.html"
    assert command_line(given.split()) == command_line(["-c", *words]) == told
    kept = "vllm-async-spec compat --vllm-source .cache/releases/0.32.0 --backend my_backend:Builder"
    assert command_line(kept.split()) == kept


def test_every_release_is_published_stock_and_with_the_plugin():
    names = {run.name for run in PUBLISHED}
    assert {f"{release}-{way}" for release in RELEASES for way in ("stock", "plugin")} <= names


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_a_published_run_is_of_todays_suite(run: Run):
    """Otherwise `make compat` has not been run since a builder or a batch was added."""
    assert {row.backend for row in run.rows} | set(run.absent) == BACKENDS.keys()
    tried = [row for row in run.rows if row.failure is None]
    if run.machine == "cpu":  # each with the models that use it, and with further batches for its own thresholds
        assert all(row.batches >= len(CASES) for row in tried)
        assert all(row.branches for row in tried if row.passed), "older than the record of branches"
        assert all(set(row.models) <= set(MODELS_OF[row.backend]) for row in tried)
        assert all(row.models[:1] in ([], [MODELS_OF[row.backend][0]]) for row in tried)
        assert sum(bool(row.models) for row in tried) > len(tried) / 2
    else:  # older than both
        assert {row.batches for row in tried} == {len(CASES)}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date)
    where = ["--vllm-source", f".cache/releases/{run.vllm}"] if run.machine == "cpu" else ["--device", "cuda"]
    command = run.command.split()
    assert command[:2] == ["vllm-async-spec", "compat"]
    assert command[command.index(where[0]) + 1] == where[1]
    assert ("--plugin" in command) is (run.way == "plugin")
    assert not [word for word in command if word.startswith("/")]
    assert command_line(command) == run.command
