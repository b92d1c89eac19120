"""Kernels that verify drafts: where they can be measured, and what follows from it."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import kernels
from benchmarks.cli import app
from benchmarks.results import RESULTS
from vllm_async_spec.vllm_plugin.flashinfer_graphs import FEW_KEYS, SMALL_BATCH

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def test_the_plugin_gives_flash_attention_2_the_batches_that_it_is_as_fast_for_as_xqa():
    for row in json.loads((RESULTS / "kernels-h200.json").read_text())["rows"]:
        times, requests = row["layer_us"], row["requests"]
        small = requests <= SMALL_BATCH or requests * row["keys"] <= FEW_KEYS
        assert (times["FlashAttention 2"] < 1.05 * times["XQA"]) == small, row


@pytest.mark.skipif(HOPPER, reason="here they can be measured")
def test_other_machines_have_not_all_of_them():
    done = CliRunner().invoke(app, ["kernels"])
    assert done.exit_code == 1
    assert "no GPU of compute capability 9.0" in done.output


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize(("requests", "keys"), [(1, 17), (3, 264)])
def test_kernels_say_the_same_and_take_time(requests: int, keys: int):
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    pytest.importorskip("vllm.vllm_flash_attn", reason="vLLM's FlashAttention is not installed")
    found = kernels._measured(kernels.Batch(requests, keys, 4), kernels.Matrices())
    assert set(found) == {"alone_us", "layer_us"}
    for times in found.values():
        assert set(times) == {
            "FlashAttention 2",
            "FlashAttention 2, wide",
            "FlashAttention 3",
            "XQA",
            "vLLM's FlashAttention 3",
        }
        assert all(1 < time < 1000 for time in times.values())
