"""XQA itself with the adapter's arguments, on a GPU, against the oracle."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from batches import Batch
from trtllm_shapes import PAGE, SM90

from vllm_async_spec import CommonAttentionMetadata, sync_policy
from vllm_async_spec.attention import FlashInferFeatures, ReferenceAdapter, TrtllmAdapter, bmm_scales, paged_attention
from vllm_async_spec.streams import waits_refused


@dataclass
class OnGpu:
    """A random batch with its caches, of the shape that XQA is compiled for below."""

    batch: Batch
    metadata: CommonAttentionMetadata
    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]


GPU_SHAPE = replace(SM90, kv_layout="NHD")


def random_batch(seed: int) -> Batch:
    choose = random.Random(seed)
    width = choose.choice([lambda: 1, lambda: 4, lambda: choose.choice([1, 2, 3, 4]), lambda: choose.choice([0, 1, 4])])
    query_lens = [width() for _ in range(choose.choice([1, 3, 8, 24]))]
    seq_lens = []
    for tokens in query_lens:
        boundary = PAGE * choose.randrange(1, 40) + choose.choice([-1, 0, 1])
        length = choose.choice([tokens, tokens + choose.randrange(300), boundary, choose.randrange(4, 9000)])
        seq_lens.append(max(length, tokens))
    padding = choose.choice([0, 0, 2])
    graph = padding * max(query_lens)
    return Batch((*query_lens, *[0] * padding), (*seq_lens, *[0] * padding), choose.choice([0, graph]))


def on_gpu(seed: int, kv_dtype: torch.dtype) -> OnGpu:
    batch = random_batch(seed)
    torch.manual_seed(seed)
    metadata = batch.metadata(slack=random.Random(seed).choice([0, 3, 600]))
    width = max(1, -(-metadata.max_seq_len // PAGE))
    pages = torch.randperm(metadata.num_reqs * width, dtype=torch.int32).reshape(-1, width)
    shape = (pages.numel(), PAGE, GPU_SHAPE.num_kv_heads, GPU_SHAPE.head_size)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kv_dtype) for _ in range(2))
    query = torch.randn(
        metadata.num_actual_tokens, GPU_SHAPE.num_heads, GPU_SHAPE.head_size, device="cuda", dtype=torch.bfloat16
    )
    moved = {name: getattr(metadata, name).cuda() for name in ("query_start_loc", "seq_lens", "slot_mapping")}
    return OnGpu(batch, metadata.replace(**moved, block_table_tensor=pages.cuda()), query, (keys, values))


@pytest.fixture(scope="module")
def compiled_xqa() -> Callable[..., torch.Tensor]:
    """FlashInfer's function, with every kernel that the tests below need compiled, all at once."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    capability = torch.cuda.get_device_capability()
    if capability[0] not in (9, 12):
        pytest.skip(f"FlashInfer does not decode with XQA on compute capability {capability[0]}.{capability[1]}")
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    from vllm_async_spec.vllm_plugin.patches.flashinfer_xqa import compile_xqa

    group = GPU_SHAPE.num_heads // GPU_SHAPE.num_kv_heads
    shapes: list[tuple[Any, ...]] = []
    for kv_dtype, window in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, False)):
        shape = (torch.bfloat16, kv_dtype, PAGE, GPU_SHAPE.head_size, group, window, torch.bfloat16)
        shapes += [(*shape, 1), (*shape, 4)]
        if FlashInferFeatures.installed().ragged_xqa:
            shapes.append((*shape, 4, True))
    compile_xqa(shapes)
    function: Callable[..., torch.Tensor] = xqa_batch_decode_with_kv_cache
    return function


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "kv_dtype"), [(None, "bfloat16"), (100, "bfloat16"), (None, "float8_e4m3fn")])
def test_xqa_equals_the_oracle_and_its_own_result_from_exact_maxima(
    window: int | None, kv_dtype: str, compiled_xqa: Callable[..., torch.Tensor]
):
    """Tolerance: 0.02 + 0.02 |oracle| in bf16; over an fp8 cache 0.1, as in FlashInfer's own tests."""
    dtype: torch.dtype = getattr(torch, kv_dtype)
    features = FlashInferFeatures.installed()
    if window is not None and not features.ragged_xqa:
        pytest.skip("this FlashInfer's XQA applies a window to single tokens only")
    capability = torch.cuda.get_device_capability()
    shape = replace(GPU_SHAPE, capability=capability, kv_dtype=dtype, sliding_window=window, features=features)
    adapter = TrtllmAdapter(shape)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    tolerance, on_device = (0.02, 1.0) if dtype == torch.bfloat16 else (0.1, torch.full((1,), 0.5, device="cuda"))
    scales = bmm_scales(shape.head_size**-0.5, key=on_device, value=on_device)
    seen = set()
    for seed in range(60):
        case = on_gpu(seed, dtype)
        with sync_policy("error"), waits_refused():
            arguments = adapter.arguments(case.metadata)
        decode = arguments.decode
        if decode is None:
            continue
        seen.add((decode.max_q_len, decode.cum_seq_lens_q is not None))
        call = {"query": case.query[decode.tokens].contiguous(), "kv_cache": case.caches, "workspace_buffer": workspace}
        got = compiled_xqa(**call, **decode.xqa_batch_decode(), **scales)
        exact = replace(decode, max_seq_len=max(case.batch.seq_lens))
        assert exact.max_seq_len <= decode.max_seq_len
        again = compiled_xqa(**call, **exact.xqa_batch_decode(), **scales)

        tokens = min(case.batch.starts[-1], decode.tokens.stop)
        keys, values = (cache.float() * on_device for cache in case.caches)
        oracle = ReferenceAdapter().arguments(case.metadata)
        expected = paged_attention(case.query.float(), keys, values, oracle, sliding_window=window)[:tokens]
        rows = got.reshape(-1, *got.shape[-2:])[:tokens]
        assert torch.allclose(rows.float(), expected, atol=tolerance, rtol=tolerance), (seed, case.batch)
        assert torch.equal(rows, again.reshape(-1, *got.shape[-2:])[:tokens]), (seed, case.batch)
    assert {(1, False), (4, False)} <= seen
    assert not features.ragged_xqa or (4, True) in seen
