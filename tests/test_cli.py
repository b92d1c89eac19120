"""The command line as a user meets it: exit codes, plain data, and one sentence for each mistake."""

import importlib.util
import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_async_spec import __version__
from vllm_async_spec.cli import app
from vllm_async_spec.cli.common import progress_on_stderr
from vllm_async_spec.cli.demo import _default_cache
from vllm_async_spec.vllm_plugin.server_status import ServerStatus

CLI = "from vllm_async_spec.command import main; main()"
# A vLLM that no ledger entry knows.
CHANGED_RELEASE = f"""
import sys, vllm, vllm.v1.attention.backend as backend
vllm.__version__ = "0.99.0"
from vllm_async_spec.vllm_plugin.ledger import applying
known = applying.fingerprints
applying.fingerprints = lambda source, names: dict.fromkeys(known(source, names), "0" * 16)
sys.argv[0] = "vllm-async-spec"
{CLI}
"""
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def status(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, "status", *arguments]
    settings = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)


@pytest.fixture(scope="module")
def statuses(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, subprocess.CompletedProcess[str]]:
    """All at once, since most of their time is vLLM's imports."""
    from vllm_async_spec.compat.builders import write_llama

    llama = str(write_llama(tmp_path_factory.mktemp("models") / "llama"))
    drafts = json.dumps({"method": "draft_model", "model": llama, "num_speculative_tokens": 3})
    # As after `vllm serve`, with an option of the front end too.
    model = ("--json", "--max-model-len", "64", llama, "--speculative-config", drafts, "--port", "18000")
    with ThreadPoolExecutor() as pool:
        wanted = {
            "data": pool.submit(status, CLI, *model),
            "user decided": pool.submit(status, CLI, *model, "--no-async-scheduling", VLLM_ASYNC_SPEC="strict"),
            "sample": pool.submit(status, CLI, llama, "--speculative-config", drafts, COLUMNS="100"),
            "changed release": pool.submit(status, CHANGED_RELEASE),
            "wrong path": pool.submit(status, CLI, "--model", "/nowhere/model"),
            "wrong setting": pool.submit(status, CLI, VLLM_ASYNC_SPEC="on"),
        }
        return {name: done.result() for name, done in wanted.items()}


@needs_vllm
def test_the_documentation_shows_what_status_prints(statuses):
    page = (Path(__file__).parents[1] / "docs" / "index.md").read_text(encoding="utf-8")
    sample = page.partition("```text\n")[2].partition("```")[0].splitlines()
    printed = [line.rstrip() for line in statuses["sample"].stdout.splitlines()]
    assert printed[: len(sample)] == sample, "docs/index.md: the sample of `status` is another"


@needs_vllm
def test_status_as_data(statuses):
    done = statuses["data"]
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"] is found["known"] is True
    assert found["scheduling"] == f"asynchronous scheduling is on, decided by vllm-async-spec: {found['reason']}"
    assert (found["async_scheduling"], found["decided_by"], found["remedy"]) == (True, "vllm-async-spec", None)
    assert done.stderr.splitlines()[0] == "Loading vLLM and the plugin."
    states = {patch["name"]: patch["state"] for patch in found["patches"]}
    assert {name for name, state in states.items() if state == "off"} == {name for name in states if "audit" in name}
    assert set(states.values()) == {"applied", "not needed", "off"}
    # The patches that only serve the audit are not counted.
    assert sum(found["counts"].values()) == len([state for state in states.values() if state != "off"])
    assert found["settings"]["VLLM_ASYNC_SPEC"] == {"value": "auto", "from": "default"}


@needs_vllm
def test_status_says_that_the_user_decided(statuses):
    found = json.loads(statuses["user decided"].stdout)
    assert found["scheduling"] == "asynchronous scheduling is off, decided by user: --no-async-scheduling was given"
    assert found["settings"]["VLLM_ASYNC_SPEC"] == {"value": "strict", "from": "environment"}


@needs_vllm
def test_status_of_a_release_with_a_changed_target_is_unhealthy(statuses):
    done = statuses["changed release"]
    assert done.returncode == 1, done.stderr
    assert "0.99.0 (unknown to vllm-async-spec" in done.stdout
    assert "matches no release that this patch supports" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "exit_code"), [("status", 2), ("demo", 1)])
def test_without_vllm_each_command_says_how_to_get_it(command: str, exit_code: int, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--target", str(tmp_path), "--draft", str(tmp_path), "--cache", str(tmp_path)]
    done = CliRunner().invoke(app, [command, *(arguments if command == "demo" else [])])
    assert done.exit_code == exit_code
    assert done.stderr.startswith("vllm-async-spec: vLLM is not installed in this environment; run `pip install vllm`")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--speculative-config", "{}"], "--speculative-config has no effect without a model; give"),
        (["status", "--max-model-len=8"], "--max-model-len=8 has no effect without a model; give the model first"),
        (["status", "--model", "m", "--speculative-config", "{"], "--speculative-config is '{', which is not JSON"),
        (["status", "--model", "m", "--speculative-config", "[]"], "is '[]'; it must be a JSON object"),
        (["demo", "--target", "/nowhere"], "--target and --draft go together"),
        (["demo", "--target", "/nowhere", "--draft", "/nowhere"], "--target is '/nowhere', which has no config.json"),
        (["patches", "verify", "--vllm-source", "/nowhere"], "/nowhere contains no vllm/"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


@needs_vllm
def test_a_wrong_model_path_gets_one_sentence(statuses):
    done = statuses["wrong path"]
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vllm-async-spec:")]
    assert "vLLM does not take these engine arguments" in line
    assert "/nowhere/model" in line
    assert "Traceback" not in done.stderr


@needs_vllm
def test_a_wrong_setting_gets_one_sentence(statuses):
    done = statuses["wrong setting"]
    assert done.returncode == 1
    assert "VLLM_ASYNC_SPEC is 'on'; it must be one of auto, strict, off" in done.stderr
    assert "Traceback" not in done.stderr


def test_work_in_progress_is_one_line_where_there_is_no_terminal(capsys):
    with progress_on_stderr("Loading."):
        pass
    assert capsys.readouterr().err == "", "no work, no line"
    with progress_on_stderr("Loading.") as progress:
        progress("first")
        progress("second")
    assert capsys.readouterr() == ("", "Loading.\n")


def test_work_in_progress_names_its_stage_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress_on_stderr("Loading.") as progress:
        progress("importing vLLM")
    out, err = capsys.readouterr()
    assert out == ""
    assert "importing vLLM ..." in err


def test_version_and_patches():
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"{__version__}\n"
    listed = json.loads(runner.invoke(app, ["patches", "list", "--json"]).output)
    assert all(patch["why"] and patch["upstream"] and patch["remove_when"] and patch["releases"] for patch in listed)
    assert "async-scheduling-default" in {patch["name"] for patch in listed}


def test_a_demo_without_a_home_directory_asks_for_the_option(monkeypatch: pytest.MonkeyPatch):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, done.stderr) == (2, "vllm-async-spec: there is no home directory; give --cache DIR\n")


@pytest.mark.parametrize(("given", "parent"), [("", "/home/me/.cache"), ("/caches", "/caches"), ("~/c", "/home/me/c")])
def test_the_demo_caches_where_other_programs_do(given: str, parent: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert _default_cache() == Path(parent, "vllm-async-spec")


def test_what_a_server_says_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch):
    found = ServerStatus("http://[fd00::1]:8000", "1.0", "[auto]", "[off]", refused={"[patch]": "[why]"})
    monkeypatch.setattr("vllm_async_spec.vllm_plugin.server_status.read_server", lambda url: found)
    done = CliRunner().invoke(app, ["status", "--url", found.url])
    for text in ("1.0, on at http://[fd00::1]:8000 ", "[auto]", "[off]", "[patch]: [why]"):
        assert text in done.stdout


def test_a_download_without_a_temporary_directory_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    done = CliRunner().invoke(app, ["patches", "verify", "--pip", "0.32.0"])
    assert done.exit_code == 2
    assert done.stderr == (
        "vllm-async-spec: --pip 0.32.0: its Python can't be kept in a temporary directory: [Errno 2] No usable "
        "temporary directory found; give --cache DIR that can be written\n"
    )


def test_the_help_of_audit_promises_no_arguments_of_the_http_server():
    said = " ".join(CliRunner().invoke(app, ["audit", "--help"], env={"COLUMNS": "300"}).output.split())
    assert "Start an engine with this model; engine arguments of `vllm serve` may follow." in said


AUDIT_MISTAKES = {
    "neither": ((), "an audit needs either --model, to start an engine, or --url, to ask a running server"),
    "both": (("--model", "m", "--url", "http://x"), "an audit needs either --model"),
    "compare": (("--model", "m", "--compare", "sync"), "--compare is 'sync'; it must be off"),
    "server arguments": (("--url", "http://x", "--max-model-len", "8"), "--max-model-len 8 has no effect on a running"),
    "log of a server": (("--url", "http://x", "--log", "l"), "--log has no effect on a running server; leave out"),
    "no load": (("--url", "http://x", "--batch", "8"), "--batch has no effect on a server's own traffic; leave out"),
    "seconds": (("--model", "m", "--seconds", "9"), "--seconds has no effect on an engine that the audit starts"),
    "compare a server": (("--url", "http://x", "--compare", "off"), "--compare has no effect on a running server"),
    "folder": (
        ("--model", "m", "--html", "/no/such/page.html"),
        "--html is '/no/such/page.html', whose directory does",
    ),
    "nobody there": (("--url", "http://127.0.0.1:9"), "http://127.0.0.1:9/async_spec/audit can't be reached: "),
    "load": (("--url", "http://127.0.0.1:9", "--load", "decode"), "http://127.0.0.1:9/v1/models can't be reached: "),
    "no port": (("--url", "http://x:abc"), "can't be reached: nonnumeric port: 'abc'; give the address of a running"),
    "no plugin": (("--model", "m"), "does not load the plugin, because VLLM_PLUGINS is set and does not name"),
    "no address": (("--url", "localhost"), "can't be reached: unknown url type"),
}
NO_AUDIT = {"nobody there", "load", "no port", "no plugin", "no address"}
"""Those that are no mistake of the command line alone."""


@pytest.mark.parametrize("mistake", AUDIT_MISTAKES)
def test_an_audit_that_can_not_be_made_says_why_in_one_sentence(mistake, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "x,y")
    arguments, message = AUDIT_MISTAKES[mistake]
    log = [] if "--url" in arguments else ["--log", str(tmp_path / "log")]
    done = CliRunner().invoke(app, ["audit", *arguments, *log])
    assert done.exit_code == (1 if mistake in NO_AUDIT else 2)
    assert done.stderr.startswith("vllm-async-spec: ")
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = status(CLI, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
