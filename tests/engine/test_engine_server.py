"""`vllm serve` with the plugin, of which every process has its own copy."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from catalogue import MIN_TOKENS
from command_line import COMMAND
from comparison import Outcome, first_difference
from results import Mode
from serving import MAX_NUM_SEQS, Server, processes_with_plugin, serving
from typer.testing import CliRunner, Result

from vllm_async_spec import __version__
from vllm_async_spec.audit.report import Place, Report
from vllm_async_spec.cli import app
from vllm_async_spec.demo.train import PROMPTS, DemoModels
from vllm_async_spec.vllm_plugin.ledger import summary
from vllm_async_spec.vllm_plugin.metrics.publisher import INTERVAL
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MAX_TOKENS = 48
"""As in the scenario `served`."""

IS_ON = re.compile(r"vllm-async-spec \S+ is on: ")

served = pytest.mark.parametrize("outcome", ["served"], indirect=True)


@pytest.fixture(scope="module")
def server(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Under `strict`, so that it would not be there if any of its processes had refused a patch."""
    folder = tmp_path_factory.mktemp("server")
    settings = {"VLLM_ASYNC_SPEC": "strict", "VLLM_ASYNC_SPEC_AUDIT": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    with serving(models.target, models.draft, folder, **settings) as server:
        yield server


@served
def test_served_completions_are_those_of_stock_vllm(server: Server, outcome: Outcome):
    expected = outcome[Mode.SYNC].completions[:2]
    assert first_difference(expected, [server.complete(prompt, MAX_TOKENS) for prompt in PROMPTS[:2]]) is None


@served
def test_streamed_completions_are_those_of_stock_vllm(server: Server, outcome: Outcome):
    expected = outcome[Mode.SYNC].completions[:2]
    assert first_difference(expected, [server.complete_in_pieces(prompt, MAX_TOKENS) for prompt in PROMPTS[:2]]) is None


@served
def test_concurrent_clients_get_what_each_would_get_alone(server: Server, outcome: Outcome):
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        got = list(clients.map(lambda prompt: server.complete(prompt, MAX_TOKENS), PROMPTS))
    assert first_difference(outcome[Mode.SYNC].completions, got) is None


def until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.metric("num_requests_running"):
        assert time.monotonic() < deadline, "a request is still running"
        time.sleep(0.1)


@served
def test_client_that_hangs_up_leaves_the_others_alone(server: Server, outcome: Outcome):
    finished = 'request_success_total{engine="0",finished_reason="length"'
    expected = outcome[Mode.SYNC].completions[:2]
    ended = sum(done.finish_reason == "length" for done in expected)
    until_idle(server)
    before = server.metric(finished)
    clients = [server.ask(PROMPTS[3], 700, ignore_eos=True, stream=True) for _ in range(3 * MAX_NUM_SEQS)]
    assert clients[0].getresponse().readline().startswith(b"data: {")
    for client in clients:
        client.close()
    got = [server.complete(prompt, MAX_TOKENS) for prompt in PROMPTS[:2]]
    assert first_difference(expected, got) is None
    until_idle(server)
    assert server.metric(finished) - before < ended + len(clients), "nobody's hanging up was noticed"


def test_models_page_names_the_model(server: Server):
    assert [model["id"] for model in json.loads(server.get("/v1/models"))["data"]] == ["demo"]


def test_metrics_page_counts_drafts(server: Server):
    server.complete(PROMPTS[0], MAX_TOKENS)
    drafts = server.metric("spec_decode_num_drafts_total")
    drafted = server.metric("spec_decode_num_draft_tokens_total")
    accepted = server.metric("spec_decode_num_accepted_tokens_total")
    assert drafts > 0
    assert drafted == 3 * drafts
    assert 0.3 * drafts < accepted < drafted


def test_metrics_page_has_the_plugins_state(server: Server):
    """The patches of the runner are applied in the worker, and of those of the scheduler some in the engine core."""
    states = server.series("async_spec_patches")
    assert states['state="applied"'] > 0
    assert states['state="refused"'] == 0
    # Nothing imports sparse MLA's layer for a model without it, but what an import would decide is known.
    assert states['state="waiting"'] == 0
    assert sum(states.values()) == len(IMPLEMENTATIONS)
    assert server.series("async_spec_info") == {f'mode="strict",sync="allow",version="{__version__}"': 1}


def test_metrics_page_counts_the_waits_of_min_tokens_and_not_those_of_vllm_itself(server: Server):
    server.complete(PROMPTS[0], MAX_TOKENS)
    server.complete(PROMPTS[0], MAX_TOKENS, min_tokens=MIN_TOKENS, presence_penalty=0.5)
    time.sleep(2 * INTERVAL)
    assert server.series("async_spec_exact_fallbacks_total") == {}
    assert server.series("async_spec_host_waits_total") == {}
    drafts = server.metric("spec_decode_num_drafts_total")
    server.complete(PROMPTS[0], MAX_TOKENS, min_tokens=MIN_TOKENS)
    time.sleep(2 * INTERVAL)
    ((reason, fallbacks),) = server.series("async_spec_exact_fallbacks_total").items()
    ((cause, waits),) = server.series("async_spec_host_waits_total").items()
    ((same_cause, seconds),) = server.series("async_spec_host_wait_seconds_total").items()
    assert reason == 'reason="min_tokens"'
    assert re.fullmatch(
        r'cause="sampled_token_ids at vllm_async_spec/vllm_plugin/patches/min_tokens.py:\d+ synchronize",kind="event"',
        cause,
    )
    assert cause == same_cause
    assert seconds > 0
    # One a step while the request is below its minimum, and a step gives four tokens at most.
    steps = server.metric("spec_decode_num_drafts_total") - drafts
    assert MIN_TOKENS / 4 <= fallbacks == waits <= steps + 1


def test_engine_core_and_worker_have_the_plugin(server: Server):
    assert processes_with_plugin(server.log()) >= {"EngineCore", "VllmWorker"}


def test_server_says_once_that_the_plugin_is_on(server: Server):
    assert len(IS_ON.findall(server.log())) == 1


@served
def test_library_says_once_that_the_plugin_is_on(outcome: Outcome):
    assert len(IS_ON.findall(outcome.logs[Mode.PLUGIN])) == 1


@served
def test_plugin_that_is_off_says_nothing(outcome: Outcome):
    assert "vllm-async-spec" not in outcome.logs[Mode.SYNC]


def test_engine_schedules_asynchronously(server: Server):
    assert "Batch queue is enabled with size 2" in server.log()


def test_server_says_once_who_decided_about_its_scheduling(server: Server):
    why = "vLLM accepts asynchronous scheduling with the method draft_model, and the plugin keeps vLLM's CPU platform"
    assert server.log().count(f"asynchronous scheduling is on, decided by vllm-async-spec: {why}") == 1
    (series,) = server.series("async_spec_async_scheduling").items()
    assert series == ('backend="CPU_ATTN",decided_by="vllm-async-spec",runner="V1"', 1)
    done = CliRunner().invoke(app, ["status", "--url", f"http://127.0.0.1:{server.port}", "--json"])
    found = json.loads(done.stdout)
    assert (found["async_scheduling"], found["decided_by"]) == (True, "vllm-async-spec")


def test_log_metrics_audit_and_status_count_the_same_patches(server: Server, tmp_path: Path):
    (logged,) = re.findall(r"the engine has the V1 runner, attention CPU_ATTN; patches: (.*)", server.log())
    series = server.series("async_spec_patches")
    states = {label.removeprefix('state="').removesuffix('"'): int(count) for label, count in series.items()}
    assert logged == summary(states)
    file = tmp_path / "report.json"
    done = audit(server, "--load", "decode", "--batch", "2", "--steps", "4", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    engine = Report.from_dict(json.loads(file.read_text())["report"]).engine
    assert engine.plugin == f"on: patches {logged}"
    assert engine.decided_by == "decided by vllm-async-spec"
    command = [*COMMAND, "status", "--json"]
    for setting in ({}, {"VLLM_ASYNC_SPEC_AUDIT": "1"}):
        here = subprocess.run(command, capture_output=True, text=True, env=os.environ | setting)
        assert json.loads(here.stdout)["counts"] == states, here.stderr
    there = CliRunner().invoke(app, ["status", "--url", f"http://127.0.0.1:{server.port}", "--json"])
    assert json.loads(there.stdout)["patches"] == states


def audit(server: Server, *options: str) -> Result:
    return CliRunner().invoke(app, ["audit", "--url", f"http://127.0.0.1:{server.port}", *options])


def recorded(server: Server, file: Path) -> Report:
    done = audit(server, "--load", "decode", "--batch", "4", "--steps", "12", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    return Report.from_dict(json.loads(file.read_text())["report"])


def waits(report: Report, place: Place) -> set[str]:
    return {cause.site.function.rpartition(".")[2] for cause in report.causes if cause.place is place}


def test_running_server_is_audited_and_nothing_waits_on_its_critical_path(server: Server, tmp_path: Path):
    for _ in range(3):
        report = recorded(server, tmp_path / "report.json")
        # On a busy machine clients may come late. A step without tokens then waits once for inputs: not what is asked.
        if waits(report, Place.CRITICAL) != {"synchronize_input_prep"}:
            break
    assert waits(report, Place.CRITICAL) == set()
    assert report.headline == "Nothing waits on the critical path"
    assert report.engine.processes == "the worker in a process of its own (spawned)"
    assert report.engine.async_scheduling
    assert report.engine.plugin.startswith("on: ")
    assert report.load.name == "decode, batch 4"
    # What V1 does wait for, of the step before, was seen: an audit that sees nothing would be clean too.
    assert waits(report, Place.OVERLAPPED) >= {"_get_valid_sampled_token_count", "synchronize_input_prep"}
    assert waits(report, Place.HIDDEN)


def test_audit_of_a_server_that_has_nothing_to_do_says_so_and_leaves_it_ready_for_the_next(server: Server):
    done = audit(server, "--steps", "12", "--seconds", "1")
    assert done.exit_code == 1
    assert done.stderr == (
        "vllm-async-spec: the server did not run 8 + 12 steps in 1 seconds; send requests during the audit, or give "
        "--load, which sends requests\n"
    )
    assert audit(server, "--steps", "12", "--seconds", "1").stderr == done.stderr
