"""Decode wrappers that take several query tokens of each request, from flashinfer-python 0.7 on: a plan's chunks."""

from types import SimpleNamespace

import pytest
import torch

from vllm_async_spec.attention.flashinfer import write_exact_lengths

PAGE, CHUNK = 16, 32
BOUND, EXACT = (100, 40), (97, 32)
"""Four and two chunks planned; the exact lengths need four and one."""


def planned(tokens: int, names: dict[str, int]) -> SimpleNamespace:
    """A wrapper of FlashAttention 2, planned from the bound with split-KV for `tokens` query tokens of each request."""
    chunks = [-(-length // CHUNK) for length in BOUND]
    arrays = {
        "requests": [row for row, count in enumerate(chunks) for _ in range(count)],
        "chunks": [chunk for count in chunks for chunk in range(count)],
        "merge": [0, *torch.tensor(chunks).repeat_interleave(tokens).cumsum(0).tolist()],
        "output": [0, *(torch.tensor(chunks) * tokens).cumsum(0).tolist()],
        "size": [CHUNK],
    }
    data, at = torch.zeros(128, dtype=torch.int32), {}
    end = 0
    for name, values in arrays.items():
        at[name] = 4 * end
        data[end : end + len(values)] = torch.tensor(values)
        end += len(values)
    offsets = [at["requests"], 0, at["chunks"], at["merge"], at["output"], at["size"]]
    pages = torch.tensor([-(-length // PAGE) for length in BOUND])
    return SimpleNamespace(
        _backend="fa2",
        _window_left=-1,
        _plan_info=[sum(chunks), tokens * len(BOUND), 0, 16, *offsets, 0, 0, 0, 0, 1],
        _int_workspace_buffer=data.view(torch.uint8),
        _qo_indptr_buf=tokens * torch.arange(len(BOUND) + 1, dtype=torch.int32),
        _paged_kv_indptr_buf=torch.tensor([0, *pages.cumsum(0).tolist()], dtype=torch.int32),
        _paged_kv_last_page_len_buf=torch.zeros(len(BOUND), dtype=torch.int32),
        merge=data[at["merge"] // 4 :][: tokens * len(BOUND) + 1],
        **names,
    )


@pytest.mark.parametrize("name", ["_q_len_per_req", "_max_q_len"])
def test_the_chunks_of_several_query_tokens_are_counted_by_exact_lengths(name: str):
    wrapper = planned(4, {name: 4})
    write_exact_lengths(wrapper, torch.tensor(EXACT, dtype=torch.int32), PAGE)
    assert wrapper.merge.diff().tolist() == [4] * 4 + [1] * 4
    assert wrapper._paged_kv_last_page_len_buf.tolist() == [1, 0]


@pytest.mark.parametrize("names", [{}, {"_q_len_per_req": 1}, {"_q_len_per_req": None}])
def test_those_of_single_tokens_stay_as_planned(names: dict[str, int]):
    wrapper = planned(1, names)
    write_exact_lengths(wrapper, torch.tensor(EXACT, dtype=torch.int32), PAGE)
    assert wrapper.merge.diff().tolist() == [4, 2]
