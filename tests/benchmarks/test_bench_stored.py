"""Results in an archive."""

import json
import lzma
from pathlib import Path

import pytest
from bench_command import bench
from bench_documents import STEADY, document

from benchmarks.cli.common import command_line
from benchmarks.results import RESULTS, read_result, result_files
from benchmarks.stored import ARCHIVE, exists, files, keep, read_json, rounded, write_archive
from vllm_async_spec.compat.json_text import unpacked


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command keeps."""
    monkeypatch.setattr("benchmarks.cli.results.RESULTS", tmp_path)
    return tmp_path


def written(folder: Path, **results: object) -> None:
    for name, found in results.items():
        (folder / f"{name}.json").write_text(json.dumps(found))


def test_a_kept_result_is_read_by_the_path_of_its_file(tmp_path: Path):
    made = rounded(document(STEADY), 4)
    written(tmp_path, made=made, other={"trace": "x"})
    before = read_result(tmp_path / "made.json")
    assert keep(tmp_path) == ["made", "other"]
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVE]
    assert read_result(tmp_path / "made.json") == before
    assert result_files(tmp_path) == [tmp_path / "made.json"]
    assert (exists(tmp_path / "made.json"), exists(tmp_path / "no.json")) == (True, False)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "no.json")


def test_floats_are_rounded_and_nothing_else():
    found = {"step_ms": [1.234567], "turns": [{"steps": 123456, "arm": "noop"}]}
    assert rounded(found, 5) == {"step_ms": [1.2346], "turns": [{"steps": 123456, "arm": "noop"}]}


def test_a_file_goes_before_the_archive_until_it_is_kept_and_the_others_stay(tmp_path: Path):
    written(tmp_path, a={"of": 1}, b={"of": 1})
    keep(tmp_path)
    written(tmp_path, b={"of": 2}, c={"of": 2})
    assert [read_json(path)["of"] for path in files(tmp_path)] == [1, 2, 2]
    assert keep(tmp_path) == ["b", "c"]
    assert [read_json(path)["of"] for path in files(tmp_path)] == [1, 2, 2]
    assert files(tmp_path, "[bc].json") == [tmp_path / "b.json", tmp_path / "c.json"]


def test_the_archive_has_four_digits_of_each_float_and_three_where_repeats_differ_more(tmp_path: Path):
    written(tmp_path, a={"rows": [2 / 3, 123456789, {"us": 98765.4321, "tokens_per_second": 1234.5}]})
    written(tmp_path, b={"measured": [{"tpot": {"p50": 2.3456}}], "audits": {"decode-1": {"step_ms": [98765.4321]}}})
    keep(tmp_path)
    assert read_json(tmp_path / "a.json") == {"rows": [0.6667, 123456789, {"us": 98770.0, "tokens_per_second": 1230.0}]}
    assert read_json(tmp_path / "b.json") == {
        "measured": [{"tpot": {"p50": 2.35}}],
        "audits": {"decode-1": {"step_ms": [98800.0]}},
    }


def test_the_archive_has_no_member_that_no_table_has(tmp_path: Path):
    written(tmp_path, a={"blocks": {"overlapped": [1]}, "audits": {"decode-1": {"waiting_ms": 0.5, "overlapped": [1]}}})
    keep(tmp_path)
    assert read_json(tmp_path / "a.json") == {"blocks": {"overlapped": [1]}, "audits": {"decode-1": {}}}


def test_what_a_caller_changes_is_not_read_again(tmp_path: Path):
    write_archive(tmp_path, {"a": {"rows": [1]}})
    read_json(tmp_path / "a.json")["rows"].append(2)
    assert read_json(tmp_path / "a.json") == {"rows": [1]}


def test_the_command_keeps_the_files_of_a_folder(results: Path):
    tokens = {"stock": {"greedy": {"requests": 2, "hashes": "ab"}}}
    written(results, a={"of": 1}, b={"served": 1, "tokens": tokens, "measured": [{"pass": 0, "seconds": 7.5}]})
    done = bench("keep")
    assert (done.exit_code, read_json(results / "a.json")) == (0, {"of": 1})
    assert read_json(results / "b.json") == {
        "served": 1,
        "tokens": {"stock": {"greedy": {"requests": 2}}},
        "measured": [{"pass": 0}],
    }
    done = bench("keep")
    assert "nothing was done" in done.output


@pytest.mark.parametrize("content", ["[]", "{", "1"])
def test_a_file_that_is_no_result_is_told_and_nothing_is_removed(content: str, results: Path):
    written(results, a={"of": 1})
    (results / "b.json").write_text(content)
    done = bench("keep")
    assert done.exit_code == 1
    assert "nothing was removed" in done.output
    assert "Traceback" not in done.output
    assert {path.name for path in results.iterdir()} == {"a.json", "b.json"}


@pytest.mark.parametrize("content", [b"", b"no archive", lzma.compress(b"{")])
def test_a_damaged_archive_is_told_and_not_replaced(content: bytes, results: Path):
    (results / ARCHIVE).write_bytes(content)
    written(results, a={"of": 1})
    done = bench("keep")
    assert done.exit_code == 1
    assert " ".join(done.output.split()).count("can't be read: ") == 1
    assert (results / ARCHIVE).read_bytes() == content
    assert (results / "a.json").exists()


def test_the_archive_is_as_this_version_writes_it(tmp_path: Path):
    write_archive(tmp_path, json.loads(unpacked(RESULTS / ARCHIVE)))
    assert unpacked(RESULTS / ARCHIVE) == unpacked(tmp_path / ARCHIVE)


def test_results_keep_the_command_without_what_is_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    asked = "run defaults-8b --out /res --budget-s 9 --env 0.32.0=/env.sh --cache=/tmp/c --seconds 1"
    monkeypatch.setattr("sys.argv", ["benchmarks", *asked.split()])
    assert command_line() == "python -m benchmarks run defaults-8b --seconds 1"
