"""The patch cpu-sampling spreads parameters as vLLM's Triton kernel does, which is written out here.

tests/engine serves sampled requests with drafts.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_async_spec.vllm_plugin.patches.cpu_sampling import expand

VALUES = {torch.float32: st.sampled_from([0.0, 0.25, 1.5]), torch.int32: st.integers(0, 50), torch.int64: st.just(7)}


@given(st.sampled_from(list(VALUES)).flatmap(lambda dtype: st.tuples(st.just(dtype), rows(VALUES[dtype]))))
def test_each_draft_token_gets_its_requests_value(case: tuple[torch.dtype, list[tuple[float, int]]]):
    dtype, requests = case
    values = torch.tensor([value for value, _ in requests], dtype=dtype)
    drafts = torch.tensor([count for _, count in requests], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    output = torch.full((int(drafts[-1]) + 2,), 99, dtype=dtype)
    expand(output, values, drafts, 0, 1, MAX_NUM_TOKENS=32)
    expected = [value or 1 for value, count in requests for _ in range(count)]
    assert output.tolist() == [*expected, 99, 99]


def rows(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, int]]]:
    return st.lists(st.tuples(values, st.integers(0, 4)), min_size=1, max_size=6)
