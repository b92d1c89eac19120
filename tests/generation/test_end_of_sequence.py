"""The end-of-sequence test that all loops share: against membership in a set, and what it must not launch."""

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria

from vllm_async_spec.generation.end_of_sequence import end_ids, ends_of


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4)])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 40])
def test_a_token_ends_a_sequence_if_it_is_one_of_the_ids(shape: tuple[int, ...], count: int):
    chance = torch.Generator().manual_seed(count)
    tokens = torch.randint(-1, 60, shape, generator=chance)
    ids = torch.randperm(61, generator=chance)[:count] - 1
    found = ends_of(tokens, ids)
    assert found.dtype is torch.bool
    assert found.shape == tokens.shape
    assert found.flatten().tolist() == [token in ids.tolist() for token in tokens.flatten().tolist()]


def test_many_ids_are_not_sorted_which_would_wait_for_the_device(monkeypatch: pytest.MonkeyPatch):
    """PyTorch sorts from 10 * tokens ** 0.145 ids on."""
    asked: list[int] = []
    isin = torch.isin
    monkeypatch.setattr(torch, "isin", lambda tokens, ids: asked.append(len(ids)) or isin(tokens, ids))
    for count in range(30):
        ends_of(torch.zeros(1, dtype=torch.long), torch.arange(count))
    assert asked
    assert max(asked) < 10


def test_the_ids_of_all_criteria_are_one_tensor():
    criteria = [EosTokenCriteria(7), MaxLengthCriteria(9), EosTokenCriteria(torch.tensor([3, 4]))]
    found = end_ids(criteria, torch.device("cpu"))
    assert found is not None
    assert found.dtype is torch.int64
    assert found.tolist() == [7, 3, 4]
    assert end_ids([MaxLengthCriteria(9)], torch.device("cpu")) is None
