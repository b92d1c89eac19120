import contextlib
import importlib
import itertools
from dataclasses import dataclass, replace
from functools import partial

import kernel_contract
import pytest
import torch
from batches import Batch

from vllm_async_spec import CommonAttentionMetadata, sync_policy
from vllm_async_spec.attention import (
    FlashAttentionAdapter,
    ReferenceAdapter,
    paged_attention,
)
from vllm_async_spec.streams import waits_refused

PAGE = 16
BATCHES = {
    "decode": Batch((1, 1, 1), (33, 1, 48)),
    "speculative": Batch((4, 4, 4), (33, 4, 50)),
    "prefill": Batch((17, 5), (17, 5)),
    "prefill with context": Batch((7, 16), (40, 32)),
    "mixed": Batch((1, 4, 9, 2), (60, 20, 9, 31)),
    "page boundary": Batch((1, 1, 1, 1), (15, 16, 17, 32)),
    "padded": Batch((4, 4, 0, 0), (21, 9, 0, 0), token_padding=3),
    "one request": Batch((1,), (1,)),
}


@dataclass
class Case:
    metadata: CommonAttentionMetadata
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_case(batch: Batch, *, slack: int = 0, device: str = "cpu", dtype=torch.float32, head_size: int = 8) -> Case:
    generator = torch.Generator().manual_seed(0)
    metadata = batch.metadata(slack=slack)
    width = -(-(metadata.max_seq_len) // PAGE)
    pages = torch.randperm(len(batch.seq_lens) * width, generator=generator, dtype=torch.int32)
    heads, kv_heads = 4, 2
    shape = (pages.numel(), PAGE, kv_heads, head_size)
    random = partial(torch.randn, generator=generator)
    moved = {name: getattr(metadata, name).to(device) for name in ("query_start_loc", "seq_lens", "slot_mapping")}
    return Case(
        metadata.replace(**moved, block_table_tensor=pages.reshape(-1, width).to(device)),
        random(metadata.num_actual_tokens, heads, head_size).to(device, dtype),
        random(shape).to(device, dtype),
        random(shape).to(device, dtype),
    )


def oracle(case: Case, **options) -> torch.Tensor:
    with sync_policy("error"):
        arguments = ReferenceAdapter().arguments(case.metadata)
    return paged_attention(case.query, case.keys, case.values, arguments, **options)


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_flash_attention_arguments_mean_what_the_oracle_computes(name: str, window: int | None, slack: int):
    case = make_case(BATCHES[name], slack=slack)
    with sync_policy("error"):
        arguments = FlashAttentionAdapter(sliding_window=window).arguments(case.metadata)
        calls = [arguments.vllm_varlen(), arguments.varlen()]
    expected = oracle(case, sliding_window=window)
    for call in calls:
        got = kernel_contract.flash_attn_varlen_func(case.query, case.keys, case.values, **call)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    got = kernel_contract.flash_attn_with_kvcache(case.query, case.keys, case.values, **arguments.with_kvcache_3())
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["decode", "speculative"])
def test_flash_attention_2_with_kvcache_takes_uniform_batches(name: str):
    case = make_case(BATCHES[name])
    arguments = FlashAttentionAdapter().arguments(case.metadata)
    query = case.query.unflatten(0, (case.metadata.num_reqs, -1))
    got = kernel_contract.flash_attn_with_kvcache(query, case.keys, case.values, **arguments.with_kvcache())
    torch.testing.assert_close(got.flatten(0, 1), oracle(case), atol=1e-5, rtol=1e-5)


def test_with_kvcache_compares_on_the_host_whatever_pytorchs_default_device_is():
    arguments = FlashAttentionAdapter().arguments(make_case(BATCHES["decode"]).metadata)
    with torch.device("meta"):
        assert arguments.with_kvcache()["cache_seqlens"] is arguments.seqused_k


def test_a_ragged_batch_is_refused_where_the_kernel_needs_a_uniform_one():
    arguments = FlashAttentionAdapter().arguments(make_case(BATCHES["mixed"]).metadata)
    with pytest.raises(
        ValueError, match=r"16 query tokens, .* \[1, 4, 9, 2\]; flash_attn_with_kvcache needs 9 for each"
    ):
        arguments.with_kvcache()


@pytest.mark.parametrize(
    ("starts", "tokens", "taken"),
    [
        ([0, 4, 8], 8, True),
        ([0, 4, 4], 8, True),  # a padding row, with as many padding tokens
        ([0, 4, 6], 8, False),  # padding makes up for what the second request lacks
        ([0, 2, 6], 8, False),
        ([0, 4, 8], 9, False),
        ([0, 0, 0], 0, True),
    ],
)
def test_padding_does_not_make_a_ragged_batch_uniform(starts: list[int], tokens: int, taken: bool):
    lens = [b - a for a, b in itertools.pairwise(starts)]
    metadata = Batch(tuple(lens), tuple(each and 32 for each in lens), token_padding=tokens - starts[-1]).metadata()
    arguments = FlashAttentionAdapter().arguments(metadata)
    with contextlib.nullcontext() if taken else pytest.raises(ValueError, match="needs 4 for each"):
        arguments.with_kvcache()


@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_equals_unpaged_attention(causal: bool):
    case = make_case(Batch((5, 1), (20, 7)))
    case.metadata.causal = causal
    got = oracle(case)
    for row, (start, queries, keys) in enumerate([(0, 5, 20), (5, 1, 7)]):
        pages = case.metadata.block_table_tensor[row].long()
        k, v = (cache[pages].flatten(0, 1)[:keys].transpose(0, 1) for cache in (case.keys, case.values))
        q = case.query[start : start + queries].transpose(0, 1)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(got[start : start + queries], sdpa.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_a_bound_below_the_truth_is_what_the_contract_kernel_catches():
    case = make_case(BATCHES["decode"])
    arguments = replace(FlashAttentionAdapter().arguments(case.metadata), max_seqlen_k=40)
    with pytest.raises(AssertionError, match="would not reach"):
        kernel_contract.flash_attn_varlen_func(case.query, case.keys, case.values, **arguments.vllm_varlen())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ({"num_splits": -1}, "num_splits is -1; it must be at least 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        FlashAttentionAdapter(**options)


def installed_kernels() -> list[str]:
    found = []
    for name in ("vllm.vllm_flash_attn", "flash_attn"):
        try:
            found += [name] if hasattr(importlib.import_module(name), "flash_attn_varlen_func") else []
        except ImportError:
            continue
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("slack", [0, 5, 600])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_the_kernels_equal_the_oracle_on_a_gpu(name: str, window: int | None, slack: int):
    """bf16: |kernel - float32 oracle| <= 0.02 + 0.02 |oracle|, since inputs and outputs round to 8 bits of mantissa."""
    kernels = installed_kernels()
    assert kernels, "a CUDA device but neither vLLM's FlashAttention nor flash-attn"
    case = make_case(BATCHES[name], slack=slack, device="cuda", dtype=torch.bfloat16, head_size=64)
    full = Case(case.metadata, case.query.float(), case.keys.float(), case.values.float())
    expected = oracle(full, sliding_window=window)
    tokens = sum(BATCHES[name].query_lens)
    for kernel in kernels:
        function = importlib.import_module(kernel).flash_attn_varlen_func
        own = kernel.startswith("vllm")
        with waits_refused():
            arguments = FlashAttentionAdapter(sliding_window=window).arguments(case.metadata)
            call = arguments.vllm_varlen() | {"fa_version": 3} if own else arguments.varlen()
            got = function(case.query, case.keys, case.values, **call)
        torch.testing.assert_close(got[:tokens].float(), expected[:tokens], atol=0.02, rtol=0.02)
