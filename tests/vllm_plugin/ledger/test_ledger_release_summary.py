"""`patches verify --pip`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_source import SOURCE, spec
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app
from vllm_async_spec.cli import patches as cli
from vllm_async_spec.compat.fetch import FetchError
from vllm_async_spec.vllm_plugin.ledger import PatchSpec, load_ledger, verify
from vllm_async_spec.vllm_plugin.ledger.release_summary import release_summary

CHANGED = SOURCE.replace("tokens + 1", "tokens + 2")


def entry(
    name: str, module: str, releases: str = ">=1.0", needs: tuple[str, ...] = (), known: tuple[str, ...] = ("1.0",)
) -> PatchSpec:
    made = spec(module, name=name)
    (target,) = made.targets
    targets = (dataclasses.replace(target, fingerprints=dict.fromkeys(known, target.fingerprints["1.0"])),)
    return dataclasses.replace(made, targets=targets, ranges=(SpecifierSet(releases),), needs=needs)


LEDGER = (
    entry("applies", "vllm.same"),
    entry("changed", "vllm.changed"),
    entry("gone", "vllm.gone"),
    entry("fixed", "vllm.same", ">=1.0,<2.0"),
    entry("older", "vllm.same", "<1.0", needs=("changed",), known=("0.9",)),
    entry("leans", "vllm.same", needs=("changed",)),
    entry("leans-on-it", "vllm.same", needs=("leans",)),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "vllm").mkdir()
    for name, text in (("__init__", ""), ("same", SOURCE), ("changed", CHANGED)):
        (tmp_path / "vllm" / f"{name}.py").write_text(text)
    (tmp_path / "vllm-2.0.dist-info").mkdir()
    return tmp_path


def test_it_says_what_applies_what_is_not_needed_and_what_changed(source: Path):
    assert release_summary(LEDGER, verify(LEDGER, source), "2.0") == [
        "vLLM 2.0; the ledger ends with 1.0.",
        "Still apply: 3 (applies, leans, leans-on-it)",
        "No longer needed, unlike in 1.0: 1 (fixed)",
        "For other releases only: 1",
        "Changed, so refused: 2 (changed, gone)",
        "  changed: vllm.changed:Runner.step differs",
        "  gone: vllm.gone:Runner.step is gone",
        "Refused with them: 2 (leans, leans-on-it)",
        "Next: CONTRIBUTING.md, 'Adding a release of vLLM to the ledger'.",
    ]


def test_for_a_known_release_nothing_is_left_to_do(source: Path):
    known = (entry("applies", "vllm.same", known=("1.0", "2.0")),)
    assert release_summary(known, verify(known, source), "2.0") == [
        "vLLM 2.0; the ledger has it.",
        "Still apply: 1 (applies)",
        "No longer needed, unlike in 1.0: 0",
        "For other releases only: 0",
        "Changed, so refused: 0",
        "Every patch for this release finds its target.",
    ]


@pytest.fixture
def downloads(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Path]]]:
    asked: list[tuple[str, Path]] = []

    def fetch(version: str, cache: Path) -> Path:
        asked.append((version, cache))
        assert cache.is_dir()
        return source

    monkeypatch.setattr(cli, "fetch_release", fetch)
    monkeypatch.setattr(cli, "load_ledger", lambda: LEDGER)
    yield asked
    assert load_ledger is not cli.load_ledger


def verified(*options: str) -> Result:
    return CliRunner().invoke(app, ["patches", "verify", *options])


def test_pip_downloads_compares_and_keeps_nothing(downloads: list[tuple[str, Path]], tmp_path: Path):
    done = verified("--pip", "latest")
    assert (done.exit_code, done.output.splitlines()[0]) == (1, "vLLM 2.0; the ledger ends with 1.0.")
    assert len(done.output.splitlines()) <= 12
    ((version, scratch),) = downloads
    assert version == "latest"
    assert not scratch.exists()
    kept = verified("--pip", "2.0", "--cache", str(tmp_path), "--json")
    assert (kept.exit_code, downloads[-1]) == (1, ("2.0", tmp_path))
    assert '"release": "2.0"' in kept.output


def test_a_release_with_no_change_ends_with_0(downloads: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "load_ledger", lambda: LEDGER[:1])
    assert verified("--pip", "2.0").exit_code == 0


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FetchError("vLLM 9.9 can't be downloaded: No match"), "--pip 9.9: vLLM 9.9 can't be downloaded: No match\n"),
        (PermissionError(13, "denied"), "--pip 9.9: its Python can't be kept in"),
    ],
)
def test_what_pip_can_not_get_is_one_sentence(error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch):
    def fetch(version: str, cache: Path) -> Path:
        raise error

    monkeypatch.setattr(cli, "fetch_release", fetch)
    done = verified("--pip", "9.9")
    assert done.exit_code == 2
    assert done.output.startswith(f"vllm-async-spec: {sentence}")
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give one of --vllm-source DIR and --pip VERSION, such as --pip latest"),
        (["--pip", "2.0", "--vllm-source", "."], "give one of --vllm-source DIR and --pip VERSION"),
        (
            ["--vllm-source", ".", "--cache", "."],
            "--cache keeps what --pip downloads; leave out --cache, or give --pip",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], sentence: str):
    done = verified(*options)
    assert done.exit_code == 2
    assert done.output.startswith(f"vllm-async-spec: {sentence}")
