"""Inputs of a steady batch: kernel and reference against a model in plain Python."""

import dataclasses
import importlib
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import compare_on_a_gpu_or_interpreted

from vllm_async_spec.kernels import BatchInputs, advance_batch, advance_batch_reference

ROWS, TOKENS = 40, 800
UNWRITTEN = 77


def buffers(computed: list[int], device: str) -> BatchInputs:
    return BatchInputs(
        computed=torch.tensor(computed + [UNWRITTEN] * (ROWS - len(computed)), dtype=torch.int32, device=device),
        accepted=torch.full((ROWS,), UNWRITTEN, dtype=torch.int32, device=device),
        discarded=torch.ones(ROWS, dtype=torch.bool, device=device),
        query_start_loc=torch.full((ROWS + 1,), UNWRITTEN, dtype=torch.int32, device=device),
        seq_lens=torch.full((ROWS,), UNWRITTEN, dtype=torch.int32, device=device),
        positions=torch.full((TOKENS,), UNWRITTEN, dtype=torch.int64, device=device),
        input_ids=torch.full((TOKENS,), UNWRITTEN, dtype=torch.int32, device=device),
    )


def test_addresses_are_made_on_the_host_whatever_pytorchs_default_device_is():
    inputs = buffers([0], "cpu")
    with torch.device("meta"):
        assert inputs.addresses[0] == inputs.computed.data_ptr()


def check(how: Callable[..., None], batch: int, drafts: int, seed: int, device: str = "cpu") -> None:
    source, tokens = random.Random(seed), drafts + 1
    computed = [source.choice([0, 5, 2**30]) + source.randint(0, 99) for _ in range(batch)]
    counts = [source.randint(1, tokens) for _ in range(batch)]
    sampled = [[source.randint(0, 9999), -1] for _ in range(batch + 2)]
    drafted = [[source.randint(0, 9999) for _ in range(drafts)] for _ in range(batch + 2)]
    inputs = buffers(computed, device)
    kinds = source.choice([torch.int32, torch.int64]), source.choice([torch.int32, torch.int64])
    how(
        torch.tensor([*counts, 0], dtype=kinds[0], device=device),
        torch.tensor(sampled, dtype=torch.int32, device=device),
        torch.tensor(drafted, dtype=kinds[1], device=device).t().contiguous().t(),  # columns of one tensor each
        batch,
        inputs,
    )
    exact = [before + count for before, count in zip(computed, counts, strict=True)]
    behind, all_tokens = ROWS - batch, batch * tokens
    expected = {
        "computed": exact + [UNWRITTEN] * behind,
        "accepted": counts + [1] * behind,
        "discarded": [False] * ROWS,
        "query_start_loc": [row * tokens for row in range(batch)] + [all_tokens] * (behind + 1),
        "seq_lens": [length + tokens for length in exact] + [0] * behind,
        "positions": [at + token for at in exact for token in range(tokens)] + [UNWRITTEN] * (TOKENS - all_tokens),
        "input_ids": [token for row in range(batch) for token in (sampled[row][0], *drafted[row])]
        + [UNWRITTEN] * (TOKENS - all_tokens),
    }
    found = {field.name: getattr(inputs, field.name).tolist() for field in dataclasses.fields(inputs)}
    assert found == expected


@given(st.integers(1, ROWS), st.integers(1, 18), st.integers(0, 99))
def test_the_reference_is_the_model(batch: int, drafts: int, seed: int):
    check(advance_batch_reference, batch, drafts, seed)


def test_the_kernel_is_the_model():
    compare_on_a_gpu_or_interpreted(compare)


def compare(device: str) -> None:
    for seed, (batch, drafts) in enumerate([(1, 1), (1, 3), (2, 15), (7, 16), (ROWS, 3), (ROWS - 1, 17), (16, 7)]):
        check(advance_batch, batch, drafts, seed, device)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(capability: int):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    kernel = importlib.import_module("vllm_async_spec.kernels.steady_batch_triton").advance_batch
    types = dict.fromkeys(kernel.arg_names, "i32") | {"counts": "*i32", "sampled": "*i32", "drafts": "*i64"}
    types |= {"addresses": "*i64", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs={"BLOCK": 16})
    assert triton.compile(source, target=target).asm["cubin"]


def test_a_mistake_is_found():
    def forgetful(counts: torch.Tensor, *rest: object) -> None:
        advance_batch_reference(torch.ones_like(counts), *rest)  # type: ignore[arg-type]

    with pytest.raises(AssertionError):
        check(forgetful, batch=5, drafts=3, seed=0)
