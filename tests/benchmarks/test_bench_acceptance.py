"""Weights under which drafts are accepted as often as one asks, on models in plain torch."""

import functools
from typing import Any

import pytest
import torch
from bench_walk import as_steps, walk
from torch import Tensor, nn

from benchmarks.acceptance import ArrangementError, arrange, fill_norm, make_orbit
from benchmarks.arms import expected_length
from benchmarks.loads import Load
from benchmarks.timing import time_run
from vllm_async_spec.demo.model import ModelShape, TinyLlama

VOCABULARY = 1024
TARGET = ModelShape(hidden=128, heads=2, layers=4, intermediate=256, vocab=VOCABULARY)
SHARES = [0.0, 0.3, 0.7, 0.95, 1.0]


def dummy(model: nn.Module) -> None:
    """As vLLM's dummy loader."""
    source = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-1e-3, 1e-3, generator=source)


class Eagle(nn.Module):
    """An EAGLE drafter: one layer behind a projection of embedding and hidden state; its head is the target's."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner = TinyLlama(shape).model
        self.embed_tokens, self.layer, self.rotation = (
            inner.embed_tokens,
            inner.layers[0],
            (torch.ones(1), torch.zeros(1)),
        )
        self.layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.embed_tokens(tokens), hidden), dim=-1))
        out: Tensor = self.layer(x, self.rotation)
        return out


def arranged(model: Any, share: float, vocabulary: int = VOCABULARY, **options: Any) -> Any:
    dummy(model)
    arrange(model, vocabulary, share, **options)
    return model


def keep_part(model: nn.Module, name: str, rank: int, ranks: int = 2) -> None:
    """Leave one rank's rows of a matrix, which vLLM's loader of a split matrix writes."""
    module = model.get_submodule(name)
    part = nn.Parameter(module.weight[: VOCABULARY // ranks].detach().clone())
    part.weight_loader = lambda part, rows: part.copy_(rows.chunk(ranks)[rank])  # type: ignore[attr-defined]
    module.weight = part


def after_every_token(model: TinyLlama) -> tuple[Tensor, Tensor]:
    """What `model` says after each token of the vocabulary with others before it, and its last hidden state."""
    others = torch.randint(VOCABULARY, (VOCABULARY, 5), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat((others, torch.arange(VOCABULARY)[:, None]), dim=1)
    with torch.no_grad():
        hidden = model.model(tokens, torch.arange(6).expand_as(tokens))[:, -1]
        return model.lm_head(hidden).argmax(-1), hidden


@functools.cache
def target_after_every_token(share: float) -> tuple[TinyLlama, Tensor, Tensor]:
    model = arranged(TinyLlama(TARGET), share)
    return model, *after_every_token(model)


@pytest.mark.parametrize("share", SHARES)
def test_the_target_follows_the_orbit_whatever_came_before(share: float):
    _, said, _ = target_after_every_token(share)
    assert torch.equal(said[:-1], make_orbit(VOCABULARY, share).successor)


def test_the_orbit_is_one_cycle_through_all_but_the_stranger():
    orbit = make_orbit(VOCABULARY, 0.5)
    token, seen = 0, set()
    for _ in range(VOCABULARY - 1):
        token = int(orbit.successor[token])
        seen.add(token)
    assert seen == set(range(VOCABULARY - 1))


@pytest.mark.parametrize("share", SHARES)
def test_a_draft_model_is_wrong_after_the_marked_tokens_only(share: float):
    shape = ModelShape(hidden=64, heads=1, layers=1, intermediate=128, vocab=VOCABULARY)
    model = arranged(TinyLlama(shape), share, votes=True)
    said, _ = after_every_token(model)
    orbit = make_orbit(VOCABULARY, share)
    assert torch.equal(said[:-1], torch.where(orbit.wrong, orbit.stranger, orbit.successor))


@pytest.mark.parametrize("share", SHARES)
def test_an_eagle_drafter_is_wrong_after_the_marked_tokens_only_draft_after_draft(share: float):
    (model, _, hidden), drafter = target_after_every_token(share), arranged(Eagle(TARGET), share)
    orbit = make_orbit(VOCABULARY, share)
    tokens, hidden = torch.arange(orbit.stranger), hidden[:-1]
    for _ in range(4):
        with torch.no_grad():
            hidden = drafter(tokens[:, None], hidden[:, None])[:, 0]
            said = model.lm_head(hidden).argmax(-1)
        assert torch.equal(said, torch.where(orbit.wrong[tokens], orbit.stranger, orbit.successor[tokens]))
        tokens = orbit.successor[tokens]


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_the_acceptance_length_is_what_the_share_asks_for(share: float, draft_tokens: int):
    orbit = make_orbit(128_256, share)
    load = Load("walk", requests=64, running=64, prompt=(1, 1), output=(400, 400))
    requests = [walk(orbit, 400, draft_tokens, start=1000 * name) for name in range(64)]
    timing = time_run(load, 0.0, as_steps(requests))
    assert timing.acceptance_length == pytest.approx(expected_length(share, draft_tokens), rel=0.02)


def test_every_matrix_stays_dense_and_keeps_its_shape():
    model, drafter = arranged(TinyLlama(TARGET), 0.7), arranged(Eagle(TARGET), 0.7)
    for name, weight in [*model.named_parameters(), *drafter.named_parameters()]:
        assert (weight != 0).float().mean() > 0.95, name


def test_padding_of_the_vocabulary_is_left_out():
    model = arranged(TinyLlama(TARGET), 0.7, VOCABULARY - 24)
    assert not model.model.embed_tokens.weight[-24:].any()
    assert not model.lm_head.weight[-24:].any()


def test_each_rank_keeps_its_part_of_matrices_that_are_split_by_tokens():
    whole, halves = TinyLlama(TARGET), [TinyLlama(TARGET) for _ in range(2)]
    arrange(whole, VOCABULARY, 0.7)
    names = ("model.embed_tokens", "lm_head")
    for rank, half in enumerate(halves):
        for name in names:
            keep_part(half, name, rank)
        arrange(half, VOCABULARY, 0.7)
    for name in names:
        parts = [half.get_submodule(name).weight for half in halves]
        assert torch.equal(torch.cat(parts), whole.get_submodule(name).weight)


def test_one_matrix_for_head_and_embeddings_is_refused():
    model = TinyLlama(TARGET)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ArrangementError, match="set tie_word_embeddings to false"):
        arrange(model, VOCABULARY, 0.7)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ArrangementError, match=r"an acceptance of 1\.2 can't be arranged"):
        make_orbit(VOCABULARY, 1.2)


class GemmaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_norm_that_adds_one_to_its_weight_scales_as_the_others_do(scale: float):
    model = nn.Sequential(nn.RMSNorm(4), GemmaRMSNorm())
    with torch.no_grad():
        for norm in model:
            fill_norm(model, norm.weight, scale)
        plain, adding = (norm(torch.ones(4)) for norm in model)
    assert torch.allclose(plain, torch.full((4,), scale))
    assert torch.equal(adding, torch.full((4,), scale))
