"""Attention kernels of continuous batching on a GPU, against the reference."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_batchers import DRAFTS

from vllm_async_spec import CommonAttentionMetadata
from vllm_async_spec.generation.batching.attention_backends import (
    AttentionChoiceError,
    ReferenceBackend,
    choose_backend,
)
from vllm_async_spec.generation.batching.paged_cache import LayerShape
from vllm_async_spec.generation.batching.step_slots import PrefillInputs

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(
    num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, scale=128**-0.5, sliding_window=None
)
PAGE = 64


@pytest.fixture(params=["FLASH_ATTN", "FLASHINFER_TRTLLM"])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int]]:
    page = 256 if request.param == "FLASH_ATTN" else PAGE
    try:
        yield (
            choose_backend(
                request.param, [SHAPE], page_size=page, slots=2, device=torch.device("cuda", 0), query_tokens=1 + DRAFTS
            ),
            page,
        )
    except AttentionChoiceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("query_lens", [[1] * 6, [1 + DRAFTS] * 5, [7, 1, 300, 64, 1]])
def test_kernels_attend_as_the_reference_does(query_lens: list[int], backend: tuple[Any, int]):
    """|kernel - reference in float32| <= 0.02 + 0.02 |reference|: inputs are bfloat16."""
    made, page = backend
    choose = random.Random(len(query_lens))
    seq_lens = [length + choose.choice([0, 1, page - 1, page, 700]) for length in query_lens]
    width = -(-max(seq_lens) // page) + 1
    rows, count = len(query_lens), sum(query_lens)
    table = torch.randperm(rows * width).to(torch.int32).reshape(rows, width)
    torch.manual_seed(0)
    shape = (rows * width, page, SHAPE.num_kv_heads, SHAPE.head_size)
    keys, values = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    query = torch.randn(count, SHAPE.num_heads, SHAPE.head_size, device="cuda").bfloat16()
    starts = torch.tensor([sum(query_lens[:row]) for row in range(rows + 1)], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    metadata = CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.cuda(),
        num_reqs=rows,
        num_actual_tokens=count,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table.cuda(),
        slot_mapping=torch.zeros(count, dtype=torch.int64, device="cuda"),
        seq_lens_cpu_upper_bound=lengths,
    )
    if len(set(query_lens)) == 1:
        attend: Callable[..., torch.Tensor] = made.decode(metadata)
    else:
        used = [-(-length // page) for length in seq_lens]
        empty = torch.empty(0)
        host = PrefillInputs(
            tokens=empty,
            positions=empty,
            slot_mapping=empty,
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=table,
            last=empty,
            request_slots=empty,
            temperature=empty,
            seeds=empty,
            page_indptr=torch.tensor([sum(used[:row]) for row in range(rows + 1)], dtype=torch.int32),
            page_indices=torch.cat([table[row, :pages] for row, pages in enumerate(used)]),
            last_page_len=(lengths - 1) % page + 1,
        )
        device = dataclasses.replace(host, page_indices=host.page_indices.cuda())
        attend = made.prefill(metadata, host, device)
    got = attend(SHAPE, query, keys, values)
    expected = ReferenceBackend().decode(metadata)(SHAPE, query.float(), keys.float(), values.float())
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0.02)
