"""This release's `vllm serve`, and its client against a stand-in server, take the served plans' arguments."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.facts import engine_facts, in_words
from benchmarks.plans.serving import find_serve_plan, serve_tiny
from benchmarks.serving.arguments import client_arguments, load_arguments, sample_arguments, server_arguments
from benchmarks.serving.client import Client, requests_of
from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.serving.requests import write_requests
from benchmarks.serving.tokenizer import write_tokenizer

VOCABULARY = 1024
PLANS = {
    "0.18.1": "serve-1b-0.18.1",
    "0.24.0": "serve-1b-0.24.0",
    "0.26.0": "serve-8b-0.26.0-V1-tp2",
    "0.32.0": "serve-8b",
}


@pytest.fixture(autouse=True)
def served_plan(release: str) -> ServePlan:
    if release not in PLANS:
        pytest.skip(f"no served plan is for vLLM {release}")
    return find_serve_plan(PLANS[release])


class Completions(BaseHTTPRequestHandler):
    """Streams as many tokens as asked for, one a chunk, as vLLM's server does."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = body["max_tokens"]
        for number in range(count):
            self._send({"choices": [{"text": f" {number}"}]})
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": count}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, piece: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


def written(folder: Path, load: ServeLoad, seconds: float, port: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The requests of a load in the tiny plan, and the client's arguments for them."""
    path = folder / f"{load.name}.jsonl"
    count = write_requests(path, load, 0, serve_tiny(), VOCABULARY, seconds=seconds)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == count
    tokenizer = write_tokenizer(folder, VOCABULARY)
    return rows, client_arguments(port=port, tokenizer=tokenizer, dataset=path, requests=count)


@pytest.fixture
def server() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (Completions,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield http.server_port, asked
        http.shutdown()


def test_the_client_measures_each_kind_of_load(tmp_path: Path, server: tuple[int, list[dict[str, Any]]]):
    port, asked = server
    loads = [ServeLoad("rate", rate=50.0), ServeLoad("closed", concurrency=4, each_second=1.0, prefixes=2)]
    client = Client()
    for load in loads:
        asked.clear()
        wanted, arguments = written(tmp_path, load, 0.2, port)
        found = client.measure(arguments + load_arguments(load, serve_tiny(), 0))
        assert "error" not in found, found
        assert (found["completed"], found["failed"]) == (len(wanted), 0)
        assert sorted(body["prompt"] for body in asked) == sorted(row["prompt"] for row in wanted)
        assert found["output_tokens"] == sum(row["output_tokens"] for row in wanted)
        assert all(body["ignore_eos"] and body["temperature"] == 0 for body in asked)
        assert found["request_goodput"] > 0
        assert found["tpot"].keys() == found["ttft"].keys() == found["itl"].keys() == {"p50", "p90", "p99"}
        same = [row["output_tokens"] for row in wanted]
        hashes = requests_of(found["texts"])
        assert [hashes[0] == each for each in hashes] == [same[0] == each for each in same]  # in the file's order


def test_seeded_requests_are_drawn(tmp_path: Path, server: tuple[int, list[dict[str, Any]]]):
    port, asked = server
    _, arguments = written(tmp_path, ServeLoad("few"), 1, port)
    assert "error" not in Client().measure(arguments + sample_arguments(4, seeded=True))
    assert {(body["temperature"], body["seed"]) for body in asked} == {(1.0, 7)}


def test_arguments_that_the_client_does_not_take_are_refused_in_a_sentence():
    assert Client().measure(["--no-such-argument"]) == {
        "error": "vLLM's client refuses the arguments of the plan; the log says which"
    }


def test_the_server_takes_the_arguments_of_the_plan_for_this_release(served_plan: ServePlan, tmp_path: Path):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    for arm in served_plan.arms:
        options = server_arguments(arm, models=tmp_path, tokenizer=tmp_path, port=18000)
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
        assert parsed.port == 18000
        assert parsed.load_format == "arranged"
        assert parsed.kv_cache_memory_bytes == arm.engine["kv_cache_memory_bytes"]
        assert parsed.worker_extension_cls == "benchmarks.worker.BenchWorker"
        assert parsed.speculative_config["num_speculative_tokens"] == 3
        assert parsed.model_loader_extra_config["share"] == 0.7
        assert not parsed.enforce_eager
        assert parsed.enable_prefix_caching is not False


def test_a_worker_tells_what_this_release_resolved():
    """On the release's own configuration classes, whose fields the facts name."""
    from vllm.config import CacheConfig, CompilationConfig, ParallelConfig, SchedulerConfig
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        backend="inductor",
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=[1, 512],
    )
    scheduler = SchedulerConfig(max_model_len=128, is_encoder_decoder=False, max_num_seqs=8, async_scheduling=True)
    config = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=scheduler,
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(),
    )
    backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    facts = engine_facts(SimpleNamespace(attn_groups=[[SimpleNamespace(backend=backend)]]), config)
    assert in_words(facts).partition(", ")[2] == (
        "runner V1, FLASHINFER, compilation VLLM_COMPILE (inductor), graphs FULL_AND_PIECEWISE, all-reduce none, "
        "asynchronous scheduling"
    )
    assert facts["compilation"]["largest_graph"] == 512
    assert facts["scheduler"]["max_num_seqs"] == 8
