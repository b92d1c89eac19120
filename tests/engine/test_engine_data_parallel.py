"""Two engines that divide experts, with the V1 runner: tokens, agreements of each step, and no start that hangs."""

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import prepare_moe
from rank_runs import MARKS, NEAR, STOCK, Arm, differing, run, served

pytestmark = MARKS
ENGINE = Path(__file__).with_name("engines.py")
OFF = {"VLLM_ASYNC_SPEC": "off"}
ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30, "dtype": "float16"}
Said = list[dict[str, Any]]
"""What each engine said, with its log."""


def serve(folder: Path, models: tuple[Path, Path], engines: Sequence[Mapping[str, str]]) -> Said:
    """Serve all requests with these engines at once, each with its variables; one that hangs fails with its stacks."""
    several = len(engines) > 1
    options = ON_GPU | {"enable_expert_parallel": several} if torch.cuda.is_available() else {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arms = {}
    for number, variables in enumerate(engines):
        place = {"VLLM_DP_RANK": str(number), "VLLM_DP_RANK_LOCAL": str(number), "VLLM_DP_SIZE": str(len(engines))}
        place |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        arms[str(number)] = Arm({"VLLM_USE_V2_MODEL_RUNNER": "0"} | (place if several else {}) | variables)
    found = run(folder, models, {"enforce_eager": True} | options, arms, ENGINE)
    said = [served(each) | {"log": each.log} for each in found.values()]
    assert [each.code for each in found.values()] == [0] * len(engines)
    return said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return prepare_moe(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine of stock says."""
    return serve(tmp_path_factory.mktemp("alone"), models, [STOCK])[0]


@pytest.fixture(scope="module")
def steps(models: tuple[Path, Path], alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> int:
    """Steps of two engines of stock, which agree for the target, for the first pass and for the draft steps."""
    found = serve(tmp_path_factory.mktemp("stock"), models, [STOCK, STOCK])
    check_tokens(alone, found)
    return agreed(found) // 3


def check_tokens(alone: dict[str, Any], found: Said) -> None:
    for each in found:
        expected = {name: [alone[name][row] for row in each["rows"]] for name in ("tokens", "margins")}
        assert differing(expected, each, NEAR if torch.cuda.is_available() else 0.0) == []
        assert 0 < each["accepted"] < each["drafts"]


def agreed(found: Said) -> int:
    """Agreements of each engine while it served."""
    first, second = (each["agreements"] for each in found)
    assert first == second
    print(json.dumps({"agreements": first, "accepted": [each["accepted"] for each in found]}))
    return int(first[0])


@pytest.mark.parametrize("engines", [(OFF, OFF), ({}, {}), ({}, OFF)], ids=["off", "plugin", "one of each"])
def test_engines_agree_once_a_step_where_all_have_the_plugin(
    engines: tuple[Mapping[str, str], ...],
    models: tuple[Path, Path],
    alone: dict[str, Any],
    steps: int,
    tmp_path: Path,
):
    found = serve(tmp_path, models, engines)
    check_tokens(alone, found)
    votes = OFF not in engines
    expected = steps + 1 if votes else 3 * steps  # a CPU profiles no memory, so its first step holds the vote
    assert agreed(found) == pytest.approx(expected, abs=4 if torch.cuda.is_available() else 0)
    said = "the 2 engines draft without asking each other"
    assert [said in each["log"] for each in found] == [votes] * 2
