"""Engines of several ranks: tokens, each rank's decisions and counts, and no start that hangs; `-m gpu` on GPUs."""

from pathlib import Path
from typing import Any

import context_ranks
import pytest
import torch
from rank_models import prepare, prepare_mla
from rank_runs import MARKS, NEAR, STOCK, Arm, Found, differing, report, run, serve_alike, served
from ranks import ASKED, DIFFER

from benchmarks.machine import installed_vllm
from benchmarks.plans.engines import all_reduce_environment
from vllm_async_spec.vllm_plugin.scheduling import PLUGIN, USER, VLLM, Decision

pytestmark = MARKS
# Slots of a draft model's tokens are computed as if one rank had the whole cache (docs/findings.md).
NGRAMS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GPUS = torch.cuda.device_count()
on_cpu = pytest.mark.skipif(GPUS > 0, reason="this test is of vLLM's CPU platform, and this machine has a GPU")
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "FLASH_ATTN": ({"attention_backend": "FLASH_ATTN"}, {}),
    "FLASHINFER": ({"attention_backend": "FLASHINFER"}, {}),
    # A start of 0.32.0 hung with these.
    "FLASHINFER, only decodes captured": (
        {"attention_backend": "FLASHINFER", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
    ),
}
"""Options of the engine and variables of its processes, on GPUs."""
BESIDE_OTHERS: dict[str, Any] = {"dtype": "float16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
"""For engines that share GPUs: with the cache given, vLLM does not derive it from memory that others take meanwhile."""
RUNNERS = {
    name: {"stock": Arm(STOCK | chosen), "plugin": Arm(chosen)}
    for name, chosen in {
        "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    }.items()
}
"""The arms in each runner. V2 of 0.26.0 refuses draft models, so there both arms fail."""


def exact(runner: str) -> dict[str, Arm]:
    """The arms of a runner, of which the first three have exact lengths on the host; with stock's asynchronous one."""
    stock, plugin = RUNNERS[runner].values()
    alone = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1, "async_scheduling": False}
    return {
        "one rank": Arm(stock.variables, alone),
        "without drafts": Arm(stock.variables, {"async_scheduling": False, "speculative_config": None}),
        "stock": Arm(stock.variables, {"async_scheduling": False}),
        "stock asynchronous": Arm(stock.variables, {"async_scheduling": True}),
        "plugin": plugin,
    }


def on_gpus(arms: dict[str, Arm], caches: Path) -> dict[str, Arm]:
    """The arms, each with compiled code of its own: they start at once, and vLLM does not lock its cache."""
    common = all_reduce_environment(installed_vllm(), ranks=2)
    return {
        name: Arm({**common, "VLLM_CACHE_ROOT": str(caches / name.replace(" ", "-")), **arm.variables}, arm.options)
        for name, arm in arms.items()
    }


def ranks_on_gpus(*numbers: int) -> list[Any]:
    """One parameter for each number of ranks, skipped where the machine has fewer GPUs."""
    return [
        pytest.param(
            number,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(number > GPUS, reason=f"{number} ranks need {number} GPUs, and here are {GPUS}"),
            ],
        )
        for number in numbers
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return prepare(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models whose ranks can share each request's KV cache: with one KV head, and with latent attention."""
    folder = tmp_path_factory.mktemp("sharing")
    return {"GQA": prepare(folder / "gqa", kv_heads=1), "MLA": prepare_mla(folder / "mla")}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def check_ranks(plugin: dict[str, Any], ranks: int) -> None:
    workers = plugin["ranks"]
    assert [worker["rank"] for worker in workers] == list(range(ranks))
    assert len({worker["pid"] for worker in workers}) == ranks
    assert all(worker["asynchronous"] for worker in workers)
    assert "applied" in workers[0]["patches"].values()
    assert all(worker["patches"] == workers[0]["patches"] for worker in workers)
    assert "refused" not in workers[0]["patches"].values()
    assert [worker["report"]["fallbacks"][ASKED] for worker in workers] == [1] * ranks
    assert plugin["fallbacks"][ASKED] == ranks
    assert len(plugin["engines"]) == 1


def check_said_once(log: str) -> None:
    for sentence in ("vllm-async-spec: the engine has the ", "vllm-async-spec: asynchronous scheduling is on"):
        assert log.count(sentence) == 1, sentence


@pytest.fixture(scope="module")
def tensor_parallel(
    request: pytest.FixtureRequest, tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Found]]:
    ranks: int = request.param
    options = {"tensor_parallel_size": ranks, "enforce_eager": True}
    arms = {"stock": Arm(STOCK), "noop": Arm({"VLLM_ASYNC_SPEC": "off"}), "plugin": Arm()}
    return ranks, run(tmp_path_factory.mktemp(f"tensor-{ranks}"), tiny, options, arms)


@on_cpu
@pytest.mark.parametrize("tensor_parallel", [2], indirect=True)
class TestTensorParallel:
    def test_tokens_are_stocks(self, tensor_parallel: tuple[int, dict[str, Found]]):
        _, found = tensor_parallel
        stock = served(found["stock"])
        for arm in ("noop", "plugin"):
            assert served(found[arm])["tokens"] == stock["tokens"], arm
            assert 0 < found[arm].said["accepted"] < found[arm].said["drafts"]
        assert not any(worker["asynchronous"] for worker in stock["ranks"])

    def test_every_rank_decides_alike_and_is_counted(self, tensor_parallel: tuple[int, dict[str, Found]]):
        ranks, found = tensor_parallel
        check_ranks(served(found["plugin"]), ranks)

    def test_the_log_says_each_sentence_once(self, tensor_parallel: tuple[int, dict[str, Found]]):
        _, found = tensor_parallel
        check_said_once(found["plugin"].log)


@on_cpu
def test_a_pipeline_with_drafts_fails_as_stock_does(tiny: tuple[Path, Path], tmp_path: Path):
    """The V1 runner of 0.32.0 asks every rank for a drafter, and only a pipeline's last rank has one."""
    options = {"pipeline_parallel_size": 2, "enforce_eager": True}
    found = run(tmp_path, tiny, options, {"stock": Arm(STOCK), "plugin": Arm()})
    words = "'CPUModelRunner' object has no attribute 'drafter'"
    assert [(arm, words in each.log, each.said) for arm, each in found.items()] == [
        ("stock", True, {}),
        ("plugin", True, {}),
    ]
    assert "asynchronous scheduling is off, decided by vLLM: vLLM refuses asynchronous scheduling with pipeline" in (
        found["plugin"].log
    )


@on_cpu
def test_context_parallelism_fails_on_a_cpu_as_stock_does(sharing: dict[str, tuple[Path, Path]], tmp_path: Path):
    options = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "enforce_eager": True}
    found = run(tmp_path, sharing["GQA"], options, {"stock": Arm(STOCK), "plugin": Arm()})
    told = report("decode context parallel 2", found)
    assert not serve_alike(found)
    assert any("Decode Context Parallelism (DCP) requires" in each for each in told["arms"]["plugin"]["failed"])


def check_local_lengths(found: dict[str, Found], bounds: str) -> None:
    """The arm `bounds` masks by the host's bound, so most of its requests must be wrong, and all others' right."""
    said = {name: served(each) for name, each in found.items()}
    wrong = {name: len(differing(said["one rank"], each, NEAR)) for name, each in said.items()}
    assert wrong.pop(bounds) > context_ranks.REQUESTS / 2
    assert wrong == dict.fromkeys(wrong, 0)
    assert said["plugin"]["accepted"] == said["stock"]["accepted"] > said[bounds]["accepted"]
    asynchronous = {name: {rank["asynchronous"] for rank in each["ranks"]} for name, each in said.items()}
    assert asynchronous == {name: {name in ("plugin", bounds)} for name in said}


@on_cpu
def test_ranks_that_share_a_cache_mask_by_exact_lengths(sharing: dict[str, tuple[Path, Path]], tmp_path: Path):
    """In a backend that masks by the runner's local lengths; `bounds` is the plugin without them, as stock would be."""
    several = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    arms = {
        "one rank": Arm(STOCK),
        "stock": Arm(STOCK, several),
        "plugin": Arm(options=several),
        "bounds": Arm({context_ranks.BOUNDS: "1"}, several),
    }
    found = run(tmp_path, sharing["GQA"], {"enforce_eager": True}, arms, Path(context_ranks.__file__))
    check_local_lengths(found, "bounds")


@pytest.mark.parametrize("ranks", ranks_on_gpus(2))
def test_ranks_on_gpus_that_share_a_cache_mask_by_exact_lengths(
    ranks: int, sharing: dict[str, tuple[Path, Path]], tmp_path: Path, caches: Path
):
    """The same on GPUs, where stock is asynchronous too, and has the host's bound."""
    options = BESIDE_OTHERS | {"dtype": "float32", "attention_backend": "CUSTOM", "enforce_eager": True}
    options |= {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    arms = on_gpus({name: arm for name, arm in exact("V1").items() if name != "without drafts"}, caches)
    found = run(tmp_path, sharing["GQA"], options, arms, Path(context_ranks.__file__))
    report(f"decode context parallel {ranks}, masked by local lengths", found, expected="one rank")
    check_local_lengths(found, "stock asynchronous")


@on_cpu
def test_ranks_that_decide_differently_end_the_start(tiny: tuple[Path, Path], tmp_path: Path):
    options = {"tensor_parallel_size": 2, "enforce_eager": True}
    found = run(tmp_path, tiny, options, {"stock": Arm(STOCK | {DIFFER: "1"}), "plugin": Arm({DIFFER: "1"})})
    assert served(found["stock"])["tokens"], "nothing meets in a collective on a CPU, so stock starts"
    assert found["plugin"].said == {}
    said = "the ranks differ in attention group 1 of "
    line = next(line for line in found["plugin"].log.splitlines() if said in line)
    assert "with graphs ALWAYS on rank 0" in line
    assert "with graphs NEVER on rank 1; give all ranks the same packages and variables" in line


def test_only_a_near_tie_may_differ_on_gpus():
    stock = {"tokens": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "margins": [[1.0, 1.0, 1.0], [1.0, 0.01, 1.0], [1.0] * 3]}
    plugin = {"tokens": [[1, 2, 3], [4, 0, 0], [7, 0, 0]]}
    assert differing(stock, plugin, NEAR) == [(2, 1)]


def test_the_words_of_a_failure_are_those_of_its_first_errors():
    prefix = "(Worker_TP1 pid=13471) ERROR 11-24 19:46:50 [multiproc_executor.py:1063]"
    log = f"""{prefix}     assert seq_lens
{prefix} AssertionError
{prefix} AttributeError: 'Runner' object has no attribute 'drafter' in step 17
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Model Runner V2 does not yet support: speculative method 'draft_model' [type=value_error, input]
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert Found(log, {}).errors == {
        "AssertionError at assert seq_lens",
        "'Runner' object has no attribute 'drafter' in step N",
        "N validation error for VllmConfig",
        "Model Runner VN does not yet support: speculative method 'draft_model'",
    }


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("by", [PLUGIN, USER, VLLM])
def test_the_log_says_whether_and_who_decided(enabled: bool, by: str):
    line = f"(Worker pid=1) INFO vllm-async-spec: {Decision(enabled, by, 'a reason: of words')}\n"
    assert Found(line * 2, {}).decisions == {("on" if enabled else "off", by)}


def test_only_failures_in_the_same_words_are_alike():
    tokens = {"tokens": [[1, 2]], "margins": [[1.0, 1.0]]}
    served_, other = Found("", tokens), Found("", {"tokens": [[1, 3]]})
    missing, lost = Found("AttributeError: no drafter", {}), Found("RuntimeError: NCCL error", {})
    assert serve_alike({"stock": served_, "plugin": served_})
    assert not serve_alike({"stock": missing, "plugin": missing})
    for pair in ((served_, other), (served_, missing), (missing, served_), (missing, lost)):
        with pytest.raises(AssertionError):
            serve_alike(dict(zip(("stock", "plugin"), pair, strict=True)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", ranks_on_gpus(2, 4, 8))
def test_tokens_and_counts_of_ranks_on_gpus(
    ranks: int, case: str, tiny: tuple[Path, Path], tmp_path: Path, caches: Path
):
    options, variables = CASES[case]
    arms = on_gpus({"stock": Arm(STOCK | variables), "plugin": Arm(variables)}, caches)
    found = run(tmp_path, tiny, BESIDE_OTHERS | options | {"tensor_parallel_size": ranks}, arms)
    report(f"tensor parallel {ranks}, {case}", found)
    assert serve_alike(found), "tensor parallelism is served"
    plugin = served(found["plugin"])
    assert 0 < plugin["accepted"] < plugin["drafts"]
    check_ranks(plugin, ranks)
    check_said_once(found["plugin"].log)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("ranks", ranks_on_gpus(2))
def test_a_pipeline_on_gpus_serves_or_fails_as_stock_does(
    ranks: int, runner: str, tiny: tuple[Path, Path], tmp_path: Path, caches: Path
):
    """By reading: V1 asks the first rank for a drafter, which only the last has; V2 takes draft models after 0.26."""
    options = BESIDE_OTHERS | {"pipeline_parallel_size": ranks, "enforce_eager": True}
    found = run(tmp_path, tiny, options, on_gpus(RUNNERS[runner], caches))
    report(f"pipeline parallel {ranks}, {runner}", found)
    alike, decisions = serve_alike(found), found["plugin"].decisions
    refused = any("validation error" in error for error in found["plugin"].errors)  # before anything is decided
    assert len(decisions) == (0 if refused else 1), f"the log says of asynchronous scheduling {decisions or 'nothing'}"
    if alike:
        workers = served(found["plugin"])["ranks"]
        assert [worker["rank"] for worker in workers] == list(range(ranks))
        assert {"on" if worker["asynchronous"] else "off" for worker in workers} == {state for state, _ in decisions}
        assert not any("refused" in worker["patches"].values() for worker in workers)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA", "FLASHMLA", "FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("ranks", ranks_on_gpus(2))
def test_context_parallel_tokens_are_those_of_exact_lengths(
    ranks: int, backend: str, runner: str, sharing: dict[str, tuple[Path, Path]], tmp_path: Path, caches: Path
):
    """Stock without asynchronous scheduling has exact lengths on the host. What stock gives with it is printed.

    By reading, of these only FLASHMLA needs the mend: it masks by the runner's local lengths, and takes requests with
    drafts as prefills, by the host's bound. FLASH_ATTN_MLA masks by whole lengths of the device, FLASH_ATTN computes
    local ones from them, and FLASHINFER waits for them.
    """
    options = BESIDE_OTHERS | {"attention_backend": backend, "enforce_eager": True, "speculative_config": NGRAMS}
    options |= {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    found = run(tmp_path, sharing["MLA" if "MLA" in backend else "GQA"], options, on_gpus(exact(runner), caches))
    report(f"decode context parallel {ranks}, {backend}, {runner}", found, expected="one rank")
    stock, alone = found["stock"].said, found["one rank"].said
    if found["plugin"].said and not stock:
        pytest.skip(f"stock fails with {sorted(found['stock'].errors)}, so there are no tokens to compare with")
    if stock and (wrong := differing(served(found["one rank"]), stock, NEAR)):
        pytest.skip(
            f"stock with exact lengths gives other tokens than one rank in {len(wrong)} of {len(alone['tokens'])}"
        )
    if serve_alike(found):
        check_ranks(served(found["plugin"]), ranks)
