"""The parts of a served plan."""

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench_command import bench
from bench_documents import document
from served import PLAN
from served_results import raw_result

from benchmarks import caches, facts, published, tables
from benchmarks.acceptance import arrange
from benchmarks.arms import Arm, PlanError, Plugin
from benchmarks.plans.serving import SERVE_PLANS, find_serve_plan, serve_tiny
from benchmarks.present import notes
from benchmarks.results import RESULTS, result_files
from benchmarks.serving.arguments import server_arguments
from benchmarks.serving.client import Client, ClientError, _Rows, digest, requests_of
from benchmarks.serving.plan import ServeLoad, ServePlan, Step
from benchmarks.serving.requests import trace, write_requests, write_sample
from benchmarks.serving.results import ServeFile, served_files
from benchmarks.serving.servers import server_environment
from benchmarks.serving.table import against_grid, serve_grid, serve_notes
from benchmarks.serving.tokenizer import as_text, write_tokenizer

SERVE_8B = find_serve_plan("serve-8b")
MACHINE = {"device": "a device"}
FACTS = {
    "vllm": "0.32.0",
    "runner": "V2",
    "backends": ["FLASHINFER"],
    "compilation": {"mode": "VLLM_COMPILE", "backend": "inductor", "largest_graph": 512},
    "graphs": "FULL_AND_PIECEWISE",
    "all_reduce": "none",
    "async_scheduling": True,
    "hardware": MACHINE,
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lengths_are_those_of_the_trace(tmp_path: Path):
    prompts, outputs = zip(*trace(), strict=True)
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.02)
    assert statistics.median(outputs) == pytest.approx(129, rel=0.05)
    path = tmp_path / "requests.jsonl"
    count = write_requests(path, ServeLoad("rate", rate=50.0), 0, SERVE_8B, 128_256, seconds=2.0)
    found = rows(path)
    assert count == len(found) == 100
    assert {len(row["prompt"].split()) for row in found} <= {*prompts}
    assert {row["output_tokens"] for row in found} <= {*outputs}
    assert max(prompts) + max(outputs) < SERVE_8B.arms[0].engine["max_model_len"]


def test_each_pass_has_prompts_of_its_own_the_same_for_all_arms(tmp_path: Path):
    first, again, second = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    load = PLAN.loads[0]
    for path, number in ((first, 0), (again, 0), (second, 1)):
        write_requests(path, load, number, PLAN, 1024, seconds=2.0)
    assert first.read_text() == again.read_text()
    assert not {row["prompt"] for row in rows(first)} & {row["prompt"] for row in rows(second)}


def test_prompts_share_long_prefixes(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    load = ServeLoad("prefixes", concurrency=32, each_second=1.0, prefixes=2)
    write_requests(path, load, 0, SERVE_8B, 128_256, seconds=1.0)
    prefixes = {tuple(row["prompt"].split()[:1024]) for row in rows(path)}
    assert len(prefixes) == 2
    assert all(len(row["prompt"].split()) > 1024 for row in rows(path))


def test_a_prompt_has_as_many_tokens_as_it_should(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, 1024))
    tokens = [5, 17, 1023, 2, 2]
    assert tokenizer(as_text(tokens)).input_ids == tokens
    assert tokenizer.decode(tokens) == "5 17 1023 2 2"


def test_a_digest_has_percentiles_rates_and_a_hash_for_each_request():
    raw = raw_result(3, 1.0) | {"generated_texts": ["1 2", "1 3", "1 2"]}
    found = digest(raw)
    assert found["tpot"] == {"p50": 3, "p90": 5.4, "p99": pytest.approx(5.94)}
    assert (found["completed"], found["failed"], found["acceptance_length"]) == (3, 0, 2.5)
    one, other, again = requests_of(found["texts"])
    assert one == again != other


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (raw_result(2, 1.0, failed=2), "no request was completed: ConnectionResetError: lost"),
        ({"completed": 0}, "no request was completed: the client names no error"),
        ({"completed": 1}, "the result of vLLM's client has no 'duration'; it is of another release"),
    ],
)
def test_a_result_that_says_nothing_is_refused(raw: dict[str, Any], sentence: str):
    with pytest.raises(ClientError) as refused:
        digest(raw)
    assert str(refused.value) == sentence


def test_lines_of_json_are_read_without_pandas(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    write_sample(path, 5, 1024, 16)
    found = _Rows(path_or_buf=str(path), lines=True)
    assert found.columns == ["prompt", "output_tokens", "max_tokens"]
    assert [row.to_dict() for _, row in found.iterrows()] == rows(path)


def test_a_client_that_refuses_a_load_stays(monkeypatch: pytest.MonkeyPatch):
    async def nothing(_: object) -> dict[str, Any]:
        return {"completed": 0, "errors": ["Traceback\nValueError: no"]}

    client = Client.__new__(Client)
    client._module = SimpleNamespace(main_async=nothing)
    monkeypatch.setattr("benchmarks.serving.client.parse", lambda *_: None)
    assert client.measure([]) == {"error": "no request was completed: ValueError: no"}


def test_a_server_has_vllms_defaults_and_a_head_that_leaves_sampling_a_choice(tmp_path: Path):
    arm = next(arm for arm in SERVE_8B.arms if arm.name == "plugin")
    options = server_arguments(arm, models=tmp_path, tokenizer=tmp_path, port=18000)
    named = {option for option in options if option.startswith("--")}
    assert not named & {"--compilation-config", "--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs"}
    loading = json.loads(options[options.index("--model-loader-extra-config") + 1])
    assert loading["head_scale"] == pytest.approx(1.3 * 11.76 / 4096, rel=0.01)
    assert json.loads(options[options.index("--speculative-config") + 1])["method"] == "eagle"


def test_flags_are_turned_on_and_off(tmp_path: Path):
    arm = Arm("an arm", "tiny", engine={"enforce_eager": True, "async_scheduling": False, "runner": None})
    options = server_arguments(arm, models=tmp_path, tokenizer=tmp_path, port=18000)
    assert {"--enforce-eager", "--no-async-scheduling"} <= {*options}
    assert not any("runner" in option for option in options)


def test_a_server_has_processes_of_its_own_and_the_callers_cache():
    arm = Arm("an arm", "tiny", plugin=Plugin.NOOP, runner="V1")
    found = server_environment(arm, {"VLLM_CACHE_ROOT": "/cache", "VLLM_ATTENTION_BACKEND": "X", "HOME": "/home"})
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in found
    assert int(found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 60  # seconds for which the client keeps a connection
    assert "VLLM_ATTENTION_BACKEND" not in found
    assert (found["VLLM_CACHE_ROOT"], found["VLLM_ASYNC_SPEC"], found["VLLM_SERVER_DEV_MODE"]) == ("/cache", "off", "1")


def test_a_head_scale_changes_no_order_of_logits():
    import torch

    heads = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(64, 32), "lm_head": torch.nn.Linear(32, 64)})
        arrange(model, 64, 0.7, head_scale=scale)
        heads.append(model["lm_head"].weight.clone())
    torch.testing.assert_close(heads[1], 0.25 * heads[0])


def test_drafts_that_change_no_graphs_size_and_no_length_share_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    arm = SERVE_8B.arms[0].to_dict()
    caches.mark(arm, longest=264)
    states = [caches.state(arm | {"draft_tokens": number}, longest=264) for number in (1, 5, 7)]
    assert states == ["warm", "cold", "warm"]
    assert caches.state(arm, longest=33_000) == "cold"


def test_an_arms_caches_are_cold_until_it_or_its_like_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    stock, noop, plugin, other = (arm.to_dict() for arm in SERVE_8B.arms)
    assert caches.state(stock) == "cold"
    caches.mark(stock)
    assert [caches.state(arm) for arm in (stock, noop, plugin, other)] == ["warm", "shared", "shared", "cold"]
    caches.mark(noop, served=True)
    served = [caches.state(arm, served=True) for arm in (stock, noop, plugin, other)]
    assert served == ["cold", "warm", "shared", "cold"]
    (tmp_path / "a file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "a file"))
    caches.mark(stock)
    assert caches.state(stock) == "cold"


@pytest.mark.parametrize(
    ("communicators", "ranks", "words"),
    [
        ({}, 1, "none"),
        (
            {"ca_comm": SimpleNamespace(disabled=False), "pynccl_comm": SimpleNamespace(disabled=False)},
            2,
            "custom, NCCL",
        ),
        ({"ca_comm": SimpleNamespace(disabled=True), "pynccl_comm": SimpleNamespace()}, 2, "NCCL"),
        ({}, 2, "SimpleNamespace"),
    ],
)
def test_all_reduces_are_named(communicators: dict[str, Any], ranks: int, words: str, monkeypatch: pytest.MonkeyPatch):
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: SimpleNamespace(device_communicator=SimpleNamespace(**communicators))
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert facts.all_reduce(ranks) == words


@pytest.mark.parametrize(
    ("engines", "experts", "words"),
    [
        (1, True, ""),
        (2, False, "data parallel 2, "),
        (2, True, "data parallel 2 with experts by allgather_reducescatter, "),
    ],
)
def test_facts_say_how_data_parallel_engines_exchange_tokens(engines: int, experts: bool, words: str):
    parallel = SimpleNamespace(
        data_parallel_size=engines, enable_expert_parallel=experts, all2all_backend="allgather_reducescatter"
    )
    assert facts.data_parallel(parallel) == words
    said = facts.in_words(FACTS | {"data_parallel": words})
    assert said.endswith(f"all-reduce none, {words}asynchronous scheduling")


def test_an_odd_number_of_turns_is_refused():
    with pytest.raises(PlanError, match="--turns is 3; it must be even"):
        ServePlan("a plan", "", (), (), turns=3)


def test_an_unknown_plan_is_refused_with_those_that_there_are():
    with pytest.raises(
        PlanError, match="no served plan 'x'; there are serve-tiny, serve-tiny-tp2, serve-8b, "
    ) as refused:
        find_serve_plan("x")
    assert str(refused.value).startswith("there is no served plan")
    assert [find_serve_plan(name).name for name in SERVE_PLANS] == [*SERVE_PLANS]
    rates = [load.rate for load in SERVE_8B.loads if load.rate]
    assert rates == sorted(rates)
    assert {load.concurrency for load in SERVE_8B.loads} >= {1, 8, 32, 128}
    assert serve_tiny().arms[0].method == SERVE_8B.arms[0].method


ARMS = (*PLAN.arms, Arm("FLASH_ATTN", "tiny"))


def written(path: Path, speeds: dict[str, float], plan: ServePlan = PLAN) -> ServeFile:
    file = ServeFile(path, plan)
    file.begin("a command")
    for arm in plan.arms:
        file.started(arm.name, {"seconds": 42.4, "caches": "warm", "beside": 3}, FACTS)
        counts = {} if arm.name == plan.reference else {"different": 0}
        samples: dict[str, Any] = {kind: {"requests": 8, "tokens": 80} | counts for kind in ("greedy", "seeded")}
        samples["seeded"]["unlike_greedy"] = 7
        file.compared(Step(arm), samples)
        for load in plan.loads:
            for number in (0, 1):
                run = digest(raw_result(4, speeds[arm.name] * (1 + number / 10)))
                file.measured(Step(arm, load, number), run)
    return file


def test_the_table_has_percentiles_spreads_and_ratios(tmp_path: Path):
    file = written(tmp_path / "result.json", {"stock": 1.0, "noop": 1.0, "plugin": 2.0})
    found = serve_grid(file.document)
    cells = dict(zip(found.head, found.rows[2], strict=True))
    assert (cells["load"], cells["arm"]) == ("rate-2", "plugin")
    assert cells["TTFT, ms: p50 / p90 / p99"] == "14 / 26 / 28"
    assert cells["TPOT, ms: p50 / p90 / p99"] == "1.43 (1.36-1.50) / 2.58 / 2.83 (2.70-2.97)"
    assert cells["tokens/s"] == "21 (20-22)"
    assert cells["speed by TPOT p99, stock = 1"] == "2.000 (2.000-2.000)"
    assert cells["n"] == "2"
    assert serve_notes(file.document) == [
        "Requests whose tokens differ from stock's: "
        "noop 0 of 8 greedy and 0 of 8 seeded; plugin 0 of 8 greedy and 0 of 8 seeded.",
        "Sampling drew other tokens than the likeliest in 7 seeded requests.",
        *(
            f"{arm}: ready 42 s after its start, with 2 others, with warm caches."
            for arm in ("stock", "noop", "plugin")
        ),
        "stock, noop, plugin: vLLM 0.32.0, runner V2, FLASHINFER, compilation VLLM_COMPILE (inductor), "
        "graphs FULL_AND_PIECEWISE, all-reduce none, asynchronous scheduling.",
        "Goodput counts requests with TTFT up to 200 ms and TPOT up to 20 ms.",
    ]


def test_ratios_are_omitted_where_noop_differs_from_stock(tmp_path: Path):
    file = written(tmp_path / "result.json", {"stock": 1.0, "noop": 1.5, "plugin": 2.0})
    cells = dict(zip((found := serve_grid(file.document)).head, found.rows[2], strict=True))
    assert cells["speed by TPOT p50, stock = 1"] == "-"
    (note,) = [line for line in serve_notes(file.document) if line.startswith("Ratios omitted")]
    assert note.startswith("Ratios omitted for rate-2, rate-4, closed-4: the noop arm, ")


def test_a_page_gets_the_table_of_a_served_result(tmp_path: Path):
    written(tmp_path / "serve-tiny.json", {"stock": 1.0, "noop": 1.0, "plugin": 2.0})
    assert "| rate-2 | plugin | 14 / 26 / 28 |" in tables.make_table("serve-tiny", tmp_path, tmp_path / "page.md")


def test_figures_of_all_served_results_count_their_loads_and_requests(tmp_path: Path):
    with pytest.raises(LookupError, match="no served result has the plugin"):
        published.in_words_of(["shorter", "tpot", "p99"], tmp_path)
    with pytest.raises(LookupError, match="no such comparison"):
        published.in_words_of(["tokens", "serve-*", "plugin"], tmp_path)
    written(tmp_path / "serve-a.json", {"stock": 1.0, "noop": 1.0, "plugin": 2.0})
    slow = written(tmp_path / "serve-b.json", {"stock": 1.0, "noop": 1.0, "plugin": 0.9})
    slow.document["tokens"]["plugin"]["seeded"]["different"] = 2
    slow.path.write_text(json.dumps(slow.document))
    assert published.in_words_of(["shorter", "tpot", "p99"], tmp_path) == "3 of 6"
    assert published.in_words_of(["tokens", "serve-a", "plugin"], tmp_path) == "0 of 16"
    assert published.in_words_of(["tokens", "serve-*", "plugin"], tmp_path) == "2 of 32"
    (tmp_path / "serve-no.json").write_text("{}")
    with pytest.raises(LookupError, match="serve-no is no result of a served plan"):
        published.in_words_of(["tokens", "serve-*", "plugin"], tmp_path)


def test_every_served_result_has_a_section_with_its_figure(tmp_path: Path):
    plan = dataclasses.replace(PLAN, name="serve-8b", arms=tuple(dataclasses.replace(arm, shape="8b") for arm in ARMS))
    speeds = {"stock": 1.0, "noop": 1.0, "plugin": 2.0, "FLASH_ATTN": 1.6}
    written(tmp_path / "serve-8b.json", speeds, plan)
    written(tmp_path / "serve-8b-h100.json", speeds, plan)
    written(tmp_path / "serve-tiny.json", speeds)  # a CPU's
    page = published.served(tmp_path)
    assert [line for line in page.splitlines() if line.startswith("#")] == ["## 8b-h100", "## 8b"]
    assert "![TPOT against the request rate](assets/results/serve-8b-h100.svg)" in page
    assert "| rate-2 | 1.250 (1.250-1.250) | 1.250 (1.250-1.250) | 1.250 (1.250-1.250) | 2 |" in page
    assert "Not measured yet: 1b, 8b-0.26.0-V2, " in page
    for head in ("load | arm | TTFT, ms: p50 / p90 / p99 | TPOT", "load | arm | goodput, requests/s | tokens/s | acc"):
        assert page.count(f"| {head}") == 2
    assert page.count("The plugin is slower than FLASH_ATTN by more than noise in: no cell.") == 2
    slow = written(tmp_path / "slow.json", speeds | {"FLASH_ATTN": 2.5}, plan)
    assert (
        "slower than FLASH_ATTN by more than noise in: rate-2 (TPOT p50), rate-2 (TPOT p99)"
        in published.served_table(slow.document, "slow")
    )
    noisy = written(tmp_path / "noisy.json", speeds | {"noop": 1.5}, plan)
    assert [*against_grid(noisy.document, "plugin", "FLASH_ATTN").rows[0]] == ["rate-2", "-", "-", "-", "2"]


def test_show_and_plot_take_a_served_result(tmp_path: Path):
    path = tmp_path / "served.json"
    written(path, {"stock": 1.0, "noop": 1.0, "plugin": 2.0})
    shown = bench("show", str(path))
    assert shown.exit_code == 0
    assert "Latencies that nobody measured" in shown.stdout
    assert shown.stdout.count("rate-2") == 2 * len(PLAN.arms)  # latencies, and all else
    shown = bench("show", str(path), "--against", "plugin")
    assert "plugin =" in shown.stdout
    refused = bench("show", str(path), "--against", "none")
    assert refused.exit_code == 1
    assert "made-up has no arm 'none'; it has stock, noop, plugin" in refused.stderr
    assert bench("plot", str(path)).exit_code == 0
    assert path.with_suffix(".svg").stat().st_size > 5000
    assert served_files(tmp_path) == [path]
    assert not {*served_files(RESULTS)} & {*result_files(RESULTS)}


def test_a_result_without_a_measured_load_has_no_empty_table(tmp_path: Path):
    file = ServeFile(tmp_path / "served.json", PLAN)
    file.begin("a command")
    file.failed(Step(PLAN.arms[0]), "the port is taken")
    shown = bench("show", str(file.path))
    assert "stock, tokens: the port is taken" in shown.stdout
    assert "tokens/s" not in shown.stdout


def test_a_table_of_engines_names_what_vllm_resolved():
    assert facts.captions({"old": {"vllm": "0.32.0"}}) == []
    assert facts.captions({"a": FACTS, "b": FACTS | {"graphs": "NONE"}})[1].startswith("b: vLLM 0.32.0, runner V2, ")
    found = document({arm: [1.0, 1.1] for arm in ("stock", "noop", "plugin")}, facts=FACTS)
    assert facts.captions({"stock, noop, plugin": FACTS})[0] in notes(found)


def test_notes_name_each_machine_and_what_started_with_a_server(tmp_path: Path):
    file = ServeFile(tmp_path / "served.json", PLAN)
    for beside, cores in ((1, 16), (2, 32)):
        hardware = {"device": "a GPU", "cores": cores, "memory_gib": 126, "driver": "580", "cuda": "13.0"}
        file.begin("a command")
        file.started("stock", {"seconds": 42.4, "caches": "cold", "beside": beside}, FACTS | {"hardware": hardware})
        last = "with 1 other" if beside == 2 else "alone"
        assert f"stock: ready 42 s after its start, {last}, with cold caches." in serve_notes(file.document)
    assert "Machine 2: a GPU, 32 cores, 126 GiB, driver 580, CUDA 13.0." in serve_notes(file.document)
