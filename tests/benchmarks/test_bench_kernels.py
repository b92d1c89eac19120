"""Kernels that verify drafts."""

from pathlib import Path

import pytest
import torch
from bench_command import bench

from benchmarks import kernels
from benchmarks.results import RESULTS
from benchmarks.stored import files, read_json
from vllm_async_spec.vllm_plugin.patches.flashinfer_graphs import MOST_ROWS

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("path", files(RESULTS, "kernels-h200*.json"), ids=lambda path: path.stem)
def test_xqa_is_faster_than_flash_attention_2_for_none_but_many_rows_and_keys(path: Path):
    found = read_json(path)
    rows = found["tokens"] * found["group"]
    assert rows <= MOST_ROWS, "who has such drafts does not follow from this"
    for row in found["rows"]:
        most = 1.15 if rows > 16 and row["requests"] * row["keys"] > 1 << 17 else 1.04
        assert row["layer_us"]["FlashAttention 2"] < most * row["layer_us"]["XQA"], row


def test_the_table_by_rows_has_both_kernels_of_every_result():
    made = {"requests": 4, "keys": 1024, "layer_us": {"FlashAttention 2": 17.4, "XQA": 30.6, "FlashAttention 3": 1}}
    other = made | {"layer_us": {"FlashAttention 2": 15.0, "XQA": 29.0}}
    assert list(kernels.by_rows([{"rows": [made]}, {"rows": [other]}])) == [("4", "1,024", "17 / 31", "15 / 29")]


@pytest.mark.skipif(HOPPER, reason="here they can be measured")
def test_other_machines_have_not_all_of_them():
    done = bench("kernels")
    assert done.exit_code == 2
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
        assert all(time > 0 for time in times.values())
