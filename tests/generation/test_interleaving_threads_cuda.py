"""Threads that generate with a model each on one GPU: the tokens of one after the other, whoever captures meanwhile."""

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from interleaving_controls import INTERLEAVED, STATIC, VOCABULARY, delayed, generate, make_model, prompts

from vllm_async_spec import generation

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": VOCABULARY}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "static": {"cuda_graphs": False},
    "dynamic": {"static_cache": False},
    "with the wait": {"interleaved": False},
}
ROUNDS = 4


@pytest.mark.parametrize(
    "ways",
    [
        ("graphs", "graphs"),
        ("graphs", "dynamic"),
        ("dynamic", "dynamic"),
        ("static", "graphs"),
        ("with the wait", "graphs"),
    ],
)
@pytest.mark.parametrize("own_stream", [False, True])
def test_two_threads_generate_what_one_does(ways: tuple[str, str], own_stream: bool):
    models = [make_model(), make_model()]
    inputs = [prompts([3, 1, 4], 1), prompts([2, 5], 2)]
    expected = [generate(model, each, **SETTINGS, **STATIC)[0] for model, each in zip(models, inputs, strict=True)]
    torch.cuda.synchronize()
    begin = threading.Barrier(2, timeout=60)

    def rounds(index: int) -> list[torch.Tensor]:
        found = []
        with torch.cuda.stream(torch.cuda.Stream()) if own_stream else contextlib.nullcontext():
            for each in range(ROUNDS):
                if each % 2 == 0:
                    generation.release(models[index])  # what can be captured is captured anew
                begin.wait()
                found.append(
                    models[index].generate(**inputs[index], **SETTINGS, **(INTERLEAVED | WAYS[ways[index]])).cpu()
                )
        return found

    with delayed(0, steps=True, flags=True), ThreadPoolExecutor(2) as threads:
        both = [threads.submit(rounds, index) for index in range(2)]
        found = [each.result(300) for each in both]
    for model in models:
        generation.release(model)
    for index in range(2):
        assert all(torch.equal(each, expected[index]) for each in found[index]), f"model {index}, {ways[index]}"


def test_without_turns_one_thread_s_capture_takes_in_what_the_other_launches():
    """The control. In a process of its own, whose device may not be of use afterwards."""
    command = [sys.executable, Path(__file__).parents[1] / "support" / "interleaving_threads.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "right with turns" in done.stdout, done.stdout + done.stderr
    broke = done.returncode != 0 and "CUDA error" in done.stderr
    assert broke or "wrong without turns" in done.stdout, done.stdout + done.stderr


def test_what_another_thread_reads_while_one_captures_is_no_error():
    model, inputs = make_model(), prompts([3, 1])
    ended = threading.Event()

    def read() -> int:
        count = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            value = torch.ones(1, device="cuda")
            while not ended.is_set():
                count += int(value.item())
        return count

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            for _ in range(20):
                generation.release(model)
                generate(model, inputs, **SETTINGS, **INTERLEAVED)
        finally:
            ended.set()
        assert reading.result(60) > 0
    generation.release(model)
