"""Command lines of `vllm serve` and `vllm bench serve`, which vLLM 0.18 to 0.32 take alike."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm
from benchmarks.options import EXTENSION, model_options
from benchmarks.serving.client import LATENCIES, PERCENTILES
from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.shapes import find_shape

MODEL = "bench"
"""The name under which each server serves its model."""
SEED = 7
"""Seed of a seeded request."""
_HOST = "127.0.0.1"
_SPREAD = 1.3
"""Lead of the arranged weights' next token over all others, in logarithms of the vocabulary: at temperature 1 a few
tokens of a hundred are drawn at random. Without a head scale, seeded requests would have greedy requests' tokens."""


def server_arguments(arm: Arm, *, models: Path, tokenizer: Path, port: int) -> list[str]:
    """The command line after `vllm serve`: the arm's engine arguments, and nothing else that vLLM has a default for."""
    options = model_options(arm.to_dict(), models) | {
        "host": _HOST,
        "port": port,
        "tokenizer": str(tokenizer),
        "served_model_name": MODEL,
        "worker_extension_cls": EXTENSION,
    }
    if "model_loader_extra_config" in options:
        target = find_shape(arm.shape).target
        options["model_loader_extra_config"]["head_scale"] = (
            _SPREAD * math.log(target["vocab_size"]) / target["hidden_size"]
        )
    options |= arm.engine
    model = options.pop("model")
    return [model, *(part for name, value in options.items() for part in _option(name, value))]


def load_arguments(load: ServeLoad, plan: ServePlan, number: int) -> list[str]:
    """What a load adds to `client_arguments`."""
    rate = "inf" if load.rate is None else f"{load.rate:g}"
    closed = [] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]
    kept = [f"{name}:{limit:g}" for name, limit in plan.goodput.items()]
    return ["--request-rate", rate, *closed, "--seed", str(number), *(["--goodput", *kept] if kept else [])]


def sample_arguments(concurrency: int, *, seeded: bool) -> list[str]:
    """What greedy requests, or requests with a seed and a temperature of 1, add to `client_arguments`."""
    drawn = ["--extra-body", json.dumps({"temperature": 1.0, "seed": SEED})] if seeded else []
    return ["--max-concurrency", str(concurrency), *drawn]


def client_arguments(*, port: int, tokenizer: Path, dataset: Path, requests: int) -> list[str]:
    """The command line after `vllm bench serve`, for the requests in a file."""
    return [
        *("--backend", "vllm", "--base-url", f"http://{_HOST}:{port}", "--model", MODEL),
        *("--tokenizer", str(tokenizer), "--dataset-name", "custom", "--dataset-path", str(dataset)),
        *("--custom-output-len=-1", "--skip-chat-template", "--disable-shuffle", "--no-oversample"),
        *("--num-prompts", str(requests), "--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--save-detailed", "--disable-tqdm", "--ready-check-timeout-sec", "0"),
    ]


def _option(name: str, value: Any) -> list[str]:
    """An engine argument as vLLM's command line takes it."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
