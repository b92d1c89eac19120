"""Draft steps of the real proposers of 0.12 and 0.13."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drafter import PAGE, PAGES, forward_context, greedy, model_and_drafter, proposer
from undone import applied

from vllm_async_spec.compat import builders

DRAFTS = 3
STEPS = 12
PROMPTS = [5, 16, 17, 40]


@pytest.fixture
def eagle(release: str) -> Any:
    if release not in ("0.12.0", "0.13.0"):
        pytest.skip("draft steps take rejected tokens off here")
    return importlib.import_module("vllm.v1.spec_decode.eagle")


@pytest.fixture
def patched(eagle: Any) -> Iterator[None]:
    with applied("draft-lengths"):
        yield


@dataclass
class Ran:
    counts: list[int] = field(default_factory=list)
    """Tokens of each request and step, the target's own included."""
    right: list[bool] = field(default_factory=list)
    """Whether a request's drafts are what the drafter says without a cache."""
    lengths: list[list[list[int]]] = field(default_factory=list)
    """Of each step, the lengths that the builder was given by draft step."""
    shadows_kept: list[bool] = field(default_factory=list)
    """Of each step, whether the host lengths that the runner gave are as they were."""
    exact: list[list[int]] = field(default_factory=list)
    """Of each step, how many tokens each request has computed that exist."""

    @property
    def acceptance_length(self) -> float:
        return sum(self.counts) / len(self.counts)


def run(eagle: Any, steps: int) -> Ran:
    """Speculative decoding, greedy: the target and its verification in plain PyTorch, the drafts by vLLM."""
    target, model = model_and_drafter(noise=0.1)
    source, ran = torch.Generator().manual_seed(1), Ran()
    requests = [torch.randint(target.shape.vocab, (length,), generator=source).tolist() for length in PROMPTS]
    made = proposer(eagle, model, len(requests), DRAFTS)
    made.shadows_kept = ran.shadows_kept
    table = torch.randperm(len(requests) * PAGES, generator=source).view(len(requests), PAGES).int()
    drafts: list[list[int]] = [[] for _ in requests]
    with forward_context(eagle, made):
        for step in range(steps):
            inputs, starts, last, following = [], [], [], []
            for tokens, drafted in zip(requests, drafts, strict=True):
                begin = 0 if step == 0 else len(tokens) - 1
                inputs.append(tokens[begin:] + drafted)
                starts.append(begin)
                said = greedy_after_each(target, tokens + drafted, begin)
                accepted = next(
                    (i for i, draft in enumerate(drafted) if draft != said[i - len(drafted) - 1]), len(drafted)
                )
                last.append(len(inputs[-1]) - len(drafted) + accepted - 1)
                following.append(said[last[-1]])
                tokens += [*drafted[:accepted], following[-1]]
                if step:
                    ran.counts.append(accepted + 1)
            ran.exact.append([start + at + 1 for start, at in zip(starts, last, strict=True)])
            drafts = propose(made, table, inputs, starts, last, following)
            ran.lengths.append(made.attn_metadata_builder.lengths)
            made.attn_metadata_builder.lengths = []
            ran.right += [
                drafted == greedy(model, tokens[1:], DRAFTS) for tokens, drafted in zip(requests, drafts, strict=True)
            ]
    return ran


def greedy_after_each(target: Any, tokens: list[int], begin: int) -> list[int]:
    logits = target(torch.tensor([tokens]), torch.arange(len(tokens))[None])
    said: list[int] = logits[0, begin:].argmax(-1).tolist()
    return said


def propose(
    made: Any,
    table: torch.Tensor,
    inputs: list[list[int]],
    starts: list[int],
    last: list[int],
    following: list[int],
) -> list[list[int]]:
    query = [len(tokens) for tokens in inputs]
    metadata = builders.common_metadata(
        query, [start + count for start, count in zip(starts, query, strict=True)], host=True, block_size=PAGE
    )
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, query, strict=True)])
    row = torch.arange(len(query)).repeat_interleave(torch.tensor(query))
    metadata.block_table_tensor = table
    metadata.slot_mapping = table[row, positions // PAGE].long() * PAGE + positions % PAGE
    shadow = metadata._seq_lens_cpu if hasattr(metadata, "_seq_lens_cpu") else metadata.seq_lens_cpu
    before = shadow.clone()
    begins = metadata.query_start_loc[:-1]
    drafted = made.propose(
        target_token_ids=torch.tensor([token for tokens in inputs for token in tokens], dtype=torch.int32),
        target_positions=positions,
        target_hidden_states=torch.zeros_like(made.hidden_states[: len(positions)]),
        next_token_ids=torch.tensor(following, dtype=torch.int32),
        last_token_indices=begins + torch.tensor(last, dtype=torch.int32),
        common_attn_metadata=metadata,
        sampling_metadata=None,
    )
    made.shadows_kept.append(torch.equal(shadow, before))
    return [list(map(int, row)) for row in drafted.tolist()]


def expected(exact: list[int]) -> list[list[int]]:
    return [[length + step for length in exact] for step in range(1, DRAFTS)]


def test_with_the_patch_draft_steps_attend_to_what_exists(eagle: Any, patched: None):
    ran = run(eagle, STEPS)
    assert [lengths[1:] for lengths in ran.lengths] == [expected(exact) for exact in ran.exact]
    assert all(ran.right)
    assert all(ran.shadows_kept)
    assert min(ran.counts) < 1 + DRAFTS, "nothing was rejected, and so nothing was tried"


def test_stock_attends_to_rejected_tokens_and_is_accepted_less_often(eagle: Any, release: str):
    stock = run(eagle, STEPS)
    assert [lengths[1:] for lengths in stock.lengths] != [expected(exact) for exact in stock.exact]
    assert not all(stock.right)
    assert all(stock.shadows_kept) is (release == "0.12.0"), "0.13 adds to the runner's own buffers in place"
    with applied("draft-lengths"):
        ours = run(eagle, STEPS)
    print(f"accepted: {stock.acceptance_length:.3f} in stock, {ours.acceptance_length:.3f} with the patch")
    assert ours.acceptance_length > stock.acceptance_length
