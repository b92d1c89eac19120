"""Engines of several ranks: tokens, each rank's decisions and counts, and no start that hangs; `-m gpu` on GPUs."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import prepare
from ranks import ASKED, DIFFER
from scenario import environment
from watched_start import watched

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'vllm-async-spec[cpu]'"
    ),
]
RANKS = Path(__file__).with_name("ranks.py")
STOCK = {"VLLM_PLUGINS": ""}
NEAR = 0.05
"""Difference of the two best log-probabilities below which the sum of a GPU's ranks may go either way."""
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


class Found:
    def __init__(self, log: Path, said: Path) -> None:
        self.log = log.read_text(encoding="utf-8", errors="replace")
        self.said: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}


def run(
    folder: Path,
    models: tuple[Path, Path],
    options: dict[str, Any],
    arms: dict[str, dict[str, str]],
    *,
    at_once: bool = True,
) -> dict[str, Found]:
    """Run one engine for each arm (its variables), and return what they said; one that hangs fails with its stacks."""
    common = environment() | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for functions sent to the workers
    for ours in ("VLLM_ASYNC_SPEC", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        del common[ours]  # processes as a user has them
    target, draft = map(str, models)
    starts = []
    with ExitStack() as running:
        for arm, variables in arms.items():
            said = folder / f"{arm}.json"
            command = [sys.executable, RANKS, "--target", target, "--draft", draft, "--out", said]
            command += ["--options", json.dumps(options)]
            starts.append(running.enter_context(watched(command, folder / f"{arm}.log", common | variables)))
            if not at_once:
                starts[-1].wait()
        for start in starts:
            start.wait()
    return {arm: Found(folder / f"{arm}.log", folder / f"{arm}.json") for arm in arms}


def served(found: Found) -> dict[str, Any]:
    assert found.said, f"the engine failed; the end of its log:\n{found.log[-4000:]}"
    return found.said


def differing(stock: dict[str, Any], plugin: dict[str, Any], near: float) -> list[tuple[int, int]]:
    found = []
    for row, (ours, theirs) in enumerate(zip(plugin["tokens"], stock["tokens"], strict=True)):
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and stock["margins"][row][at] >= near:
            found.append((row, at))
    return found


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
    arms = {"stock": STOCK, "noop": {"VLLM_ASYNC_SPEC": "off"}, "plugin": {}}
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
    found = run(tmp_path, tiny, options, {"stock": STOCK, "plugin": {}})
    words = "'CPUModelRunner' object has no attribute 'drafter'"
    assert [(arm, words in each.log, each.said) for arm, each in found.items()] == [
        ("stock", True, {}),
        ("plugin", True, {}),
    ]
    assert "asynchronous scheduling is off, decided by vLLM: vLLM refuses asynchronous scheduling with pipeline" in (
        found["plugin"].log
    )


@on_cpu
def test_ranks_that_decide_differently_end_the_start(tiny: tuple[Path, Path], tmp_path: Path):
    options = {"tensor_parallel_size": 2, "enforce_eager": True}
    found = run(tmp_path, tiny, options, {"stock": STOCK | {DIFFER: "1"}, "plugin": {DIFFER: "1"}})
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", ranks_on_gpus(2, 4, 8))
def test_tokens_and_counts_of_ranks_on_gpus(ranks: int, case: str, tiny: tuple[Path, Path], tmp_path: Path):
    options, variables = CASES[case]
    options = options | {"tensor_parallel_size": ranks, "dtype": "float16", "gpu_memory_utilization": 0.4}
    arms = {"stock": STOCK | variables, "plugin": variables}
    found = run(tmp_path, tiny, options, arms, at_once=False)  # they share the GPUs
    stock, plugin = served(found["stock"]), served(found["plugin"])
    assert differing(stock, plugin, NEAR) == []
    assert 0 < plugin["accepted"] < plugin["drafts"]
    check_ranks(plugin, ranks)
    check_said_once(found["plugin"].log)
