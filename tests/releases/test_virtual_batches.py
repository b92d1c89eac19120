"""vLLM's builders under chunked local attention."""

import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_device import on_device
from undone import applied

from vllm_async_spec import HostSyncError, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.compat import builders
from vllm_async_spec.compat.backend_builders import layer_module, local_attention_builder
from vllm_async_spec.compat.builder_inputs import BuilderInputs
from vllm_async_spec.compat.cases import DRAFT_TOKENS as DRAFTS
from vllm_async_spec.vllm_plugin.patches import virtual_batches

PAGE, CHUNK = 16, 32
SETTING = BuilderInputs(torch.device("cpu"))
BATCHES = {
    "one token each": ([1, 1, 1, 1], [33, 1, 32, 64]),
    "drafts": ([4, 4, 4], [33, 17, 50]),
    "drafts around a chunk's end": ([4] * 6, [31, 32, 33, 34, 35, 36]),
    "drafts around a page's end": ([4] * 6, [15, 16, 17, 18, 19, 20]),
    "fewer drafts": ([4, 1, 3, 2], [33, 33, 65, 66]),
    "mixed": ([4, 1, 9, 70], [33, 17, 30, 70]),
    "prefills with context": ([40, 33, 32, 65], [71, 64, 96, 97]),
    "padded": ([4, 1, 0, 0], [33, 17, 0, 0]),
}
Attention = list[list[int]]
"""For each query token the KV slots that it sees."""


def patched_function() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.utils").make_local_attention_virtual_batches


@pytest.fixture(scope="module")
def stock(release: str) -> Iterator[Any]:
    own = patched_function()
    layer_module()
    with applied(*virtual_batches.IMPLEMENTATIONS):
        yield own


@pytest.fixture(scope="module", params=["flash_attn:FlashAttentionBackend", "triton_attn:TritonAttentionBackend"])
def builder(stock: Any, request: pytest.FixtureRequest) -> Any:
    module, _, backend = request.param.partition(":")
    backend = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), backend)
    return local_attention_builder(backend, SETTING, CHUNK, PAGE)


def test_kernels_are_compiled_when_a_builder_is_made(stock: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(virtual_batches, "compile_virtual_batches", lambda *given: asked.append(given))
    backend = importlib.import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
    builder = local_attention_builder(backend, SETTING, CHUNK, PAGE)
    assert asked == [(CHUNK, CHUNK // PAGE, builder.device)]


def metadata(query: list[int], exact: list[int]) -> Any:
    made = builders.common_metadata(query, exact, block_size=PAGE)
    made.seq_lens_cpu = made.num_computed_tokens_cpu = None
    if hasattr(made, "seq_lens_cpu_upper_bound"):
        made.seq_lens_cpu_upper_bound = made.seq_lens_cpu_upper_bound + DRAFTS
    made.max_seq_len += DRAFTS
    return made


def attended(starts: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor) -> Attention:
    seen: Attention = [[] for _ in range(int(starts[-1]))]
    for row, keys in enumerate(lengths.tolist()):
        first, end = starts[row : row + 2].tolist()
        for token in range(first, end):
            last = keys - end + token
            seen[token] = [int(block_table[row, key // PAGE]) * PAGE + key % PAGE for key in range(last + 1)]
    return seen


def expected(given: Any) -> Attention:
    seen: Attention = []
    for row, tokens in enumerate(given.query_start_loc.diff().tolist()):
        length = int(given.seq_lens[row])
        for position in range(length - tokens, length):
            keys = range(position // CHUNK * CHUNK, position + 1)
            seen.append([int(given.block_table_tensor[row, key // PAGE]) * PAGE + key % PAGE for key in keys])
    return seen


def random_batch(seed: int) -> tuple[list[int], list[int]]:
    choose = random.Random(seed)
    query = [choose.choice([1, 4, 4, 2, 3, choose.randrange(1, 100)]) for _ in range(choose.choice([1, 3, 9]))]
    ends = [CHUNK * choose.randrange(1, 6) + choose.choice([-1, 0, 1, choose.randrange(CHUNK)]) for _ in query]
    padding = [0] * choose.choice([0, 0, 2])
    return query + padding, [max(pair) for pair in zip(query, ends, strict=True)] + padding


ALL_BATCHES = BATCHES | {f"random {seed}": random_batch(seed) for seed in range(40)}


def virtual(cut: Any, given: Any) -> Any:
    """The common metadata of what a release's function cuts; later releases return more beside it."""
    made = cut(CHUNK, given, PAGE)
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize("batch", ALL_BATCHES)
def test_kernels_attend_to_the_chunk_of_each_token_and_nothing_is_read(builder: Any, stock: Any, batch: str):
    query, exact = ALL_BATCHES[batch]
    given = metadata(query, exact)
    reset_sync_report()
    with sync_policy("error"), on_device(given) as reads:
        built = builder.build(0, given)
    assert (sync_report().count, sync_report().fallbacks, dict(reads.now)) == (0, {}, {})
    assert attended(built.query_start_loc, built.seq_lens, built.block_table) == expected(given)
    cut = virtual(stock, builders.common_metadata(query, exact, block_size=PAGE, host=True))
    assert attended(cut.query_start_loc, cut.seq_lens, cut.block_table_tensor) == expected(given)
    assert built.max_query_len >= int(cut.max_query_len)
    assert built.max_query_len <= CHUNK
    assert built.max_seq_len >= int(built.seq_lens.max())
    assert built.max_seq_len <= CHUNK
    assert built.num_actual_tokens == given.num_actual_tokens
    assert built.slot_mapping is given.slot_mapping
    assert built.query_start_loc.dtype == built.seq_lens.dtype == built.block_table.dtype == torch.int32
    assert 0 <= len(built.seq_lens) - len(cut.seq_lens) <= sum(tokens > 1 for tokens in query)
    if getattr(builder, "supports_update_block_table", False):
        other = given.block_table_tensor + 1000
        with sync_policy("error"), on_device(given) as reads:
            again = builder.update_block_table(built, other, given.slot_mapping + 1)
        assert dict(reads.now) == {}
        moved = [[slot + 1000 * PAGE for slot in slots] for slots in expected(given)]
        assert attended(again.query_start_loc, again.seq_lens, again.block_table) == moved
        assert torch.equal(again.slot_mapping, given.slot_mapping + 1)


def test_one_token_each_needs_one_row_each(builder: Any):
    built = builder.build(0, metadata(*BATCHES["one token each"]))
    assert (len(built.seq_lens), built.max_query_len) == (4, 1)


def test_each_draft_step_is_built(builder: Any):
    """From 0.28 on vLLM's builders say that an update serves instead, and those of virtual batches inherit it."""
    if not hasattr(type(builder), "supports_draft_decode_metadata_update"):
        pytest.skip("this vLLM builds each draft step")
    assert builder.supports_draft_decode_metadata_update is False


def test_stock_reads_the_lengths(builder: Any, stock: Any, monkeypatch: pytest.MonkeyPatch):
    given = metadata(*BATCHES["drafts"])
    monkeypatch.setattr(layer_module(), "make_local_attention_virtual_batches", stock)
    with on_device(given) as reads:
        try:
            with sync_policy("error"):
                builder.build(0, given)
        except HostSyncError:
            return
    assert reads.now == {"cpu": 1}


def test_cuda_graphs_are_as_upstream_has_them(builder: Any):
    from vllm.v1.attention.backends import utils

    try:
        from vllm.v1.attention.backend import AttentionCGSupport
    except ImportError:
        AttentionCGSupport = utils.AttentionCGSupport
    try:
        support = type(builder).get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
    except AttributeError:
        support = type(builder).cudagraph_support
    assert support is AttentionCGSupport.NEVER


def test_the_class_of_a_backend_is_made_once(stock: Any):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    first = local_attention_builder(FlashAttentionBackend, SETTING, CHUNK, PAGE)
    assert type(local_attention_builder(FlashAttentionBackend, SETTING, CHUNK, PAGE)) is type(first)
    assert type(local_attention_builder(FlashAttentionBackend, SETTING, 2 * CHUNK, PAGE)) is not type(first)


def test_a_backend_that_plans_on_the_host_gets_what_vllm_cuts_and_is_counted(stock: Any):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    class Planning(FlashAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "PLANNING"

    planning = local_attention_builder(Planning, SETTING, CHUNK, PAGE)
    assert planning.supports_draft_decode_metadata_update is False
    query, exact = BATCHES["drafts around a chunk's end"]
    reset_sync_report()
    built = planning.build(0, metadata(query, exact))
    assert sync_report().fallbacks == {"chunked local attention": 1}
    assert attended(built.query_start_loc, built.seq_lens, built.block_table) == expected(metadata(query, exact))
    known = builders.common_metadata(query, exact, block_size=PAGE, host=True)
    planning.build(0, known)
    waits = 1 if hasattr(known, "_seq_lens_cpu") and known._seq_lens_cpu is not None else 2
    assert sync_report().fallbacks == {"chunked local attention": waits}


def test_host_views_of_virtual_batches_are_exact_lazy_and_counted(stock: Any):
    cut = patched_function()
    given = metadata(*BATCHES["drafts around a chunk's end"])
    given.cut_on_device = True
    reset_sync_report()
    made = virtual(cut, given)
    assert sync_report().count == 0
    for _ in range(2):
        assert torch.equal(made.query_start_loc_cpu, made.query_start_loc)
    assert sync_report().count == 1
    if hasattr(given, "seq_lens_cpu_upper_bound"):
        assert torch.equal(made.seq_lens_cpu_upper_bound, made.seq_lens)
    assert torch.equal(made.seq_lens_cpu, made.seq_lens)
    made = virtual(cut, given)
    with sync_policy("error"), pytest.raises(HostSyncError, match="a blocking host read of query_start_loc at"):
        made.query_start_loc_cpu  # noqa: B018


def test_a_chunk_that_is_not_whole_blocks_is_refused(stock: Any):
    cut = patched_function()
    given = metadata(*BATCHES["drafts"])
    given.cut_on_device = True
    with pytest.raises(ValueError, match="the attention chunk is 24 tokens and a KV cache block 16"):
        cut(24, given, PAGE)
