"""A server whose vLLM has changed under three patches."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalogue import COMMON, MIN_TOKENS
from changed_upstream import changed_vllm
from serving import Server, serve_environment, serving, speculating_command
from typer.testing import CliRunner

from vllm_async_spec.cli import app
from vllm_async_spec.demo.train import PROMPTS, DemoModels

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHANGED = {
    "min-tokens": "vllm.v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids",
    "metadata-restored-host-lengths": "vllm.v1.attention.backend:CommonAttentionMetadata",
    "fast-prefill-counts": "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata",
}
"""The first decides whether scheduling may be asynchronous, in a process that never imports it."""
REFUSED = {*CHANGED, "async-scheduling-cpu"}


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def server(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("changed")
    changed_vllm(vllm_folder(), folder, CHANGED.values())
    with serving(models.target, models.draft, folder, VLLM_ASYNC_SPEC_AUDIT="1") as server:
        yield server


def broken(server: Server) -> list[int]:
    completions = [server.complete(prompt, 48, min_tokens=MIN_TOKENS, stop_token_ids=COMMON) for prompt in PROMPTS[:8]]
    return [at for at, done in enumerate(completions) if set(done.token_ids[:MIN_TOKENS]) & set(COMMON)]


def test_each_refusal_is_one_line_of_the_log_whichever_process_it_is_in(server: Server):
    server.complete(PROMPTS[0], 8)
    found = re.findall(r"vllm-async-spec: running stock vLLM for (\S+): (.*)", server.log())
    assert sorted(name for name, _ in found) == sorted(REFUSED)
    why = dict(found)
    for name, target in CHANGED.items():
        assert why[name].startswith(f"{target} matches no release that this patch supports"), why[name]
    assert why["async-scheduling-cpu"].startswith("it needs min-tokens, which is refused: ")


def test_metrics_and_status_name_what_was_refused(server: Server):
    assert server.series("async_spec_patches")['state="refused"'] == len(REFUSED)
    refused = server.series("async_spec_refused_patch")
    assert {re.search(r'patch="([^"]+)"', labels)[1] for labels in refused} == REFUSED  # type: ignore[index]
    result = CliRunner().invoke(app, ["status", "--url", f"http://127.0.0.1:{server.port}", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, set(found["refused"]), found["healthy"]) == (1, REFUSED, False)
    assert found["patches"]["refused"] == len(REFUSED)


def test_the_engine_has_stocks_whole_configuration(server: Server):
    """Stock vLLM schedules synchronously on a CPU, where min_tokens is right without the patch."""
    assert broken(server) == []
    assert "asynchronous scheduling is on" not in server.log()


@pytest.mark.slow
def test_without_the_declared_need_min_tokens_would_be_broken(models: DemoModels, tmp_path: Path):
    """The control: the same change, and a ledger in which asynchronous scheduling needs nothing."""
    changed_vllm(vllm_folder(), tmp_path, [CHANGED["min-tokens"]])
    root = Path(__file__).parents[2]
    shutil.copytree(root / "vllm_async_spec", tmp_path / "vllm_async_spec")
    shutil.copytree(root / "patches", tmp_path / "patches")
    entry = tmp_path / "patches" / "async-scheduling-cpu.toml"
    entry.write_text(re.sub(r"^needs = .*\n", "", entry.read_text(), flags=re.MULTILINE))
    with serving(models.target, models.draft, tmp_path) as server:
        assert broken(server)


@pytest.mark.parametrize("name", ["min-tokens", "fast-prefill-counts"])
def test_in_strict_there_is_no_start(models: DemoModels, tmp_path: Path, name: str):
    """The first is known in the front end, the second in the worker only."""
    changed_vllm(vllm_folder(), tmp_path, [CHANGED[name]])
    done = subprocess.run(
        speculating_command(models.target, models.draft, 0),
        capture_output=True,
        text=True,
        timeout=300,
        env=serve_environment(tmp_path, VLLM_ASYNC_SPEC="strict"),
    )
    assert done.returncode == 1
    said = re.findall(r"vllm-async-spec: (\S+) was refused: .*", done.stdout + done.stderr)
    if name == "min-tokens":
        assert said == ["async-scheduling-cpu"]
        assert "Traceback" not in done.stderr
    else:
        assert said == [name]
