"""Attentive weights: they show what attention does, and hide what rounding does."""

from typing import TypeVar

import pytest
import torch
import transformers
from test_bench_acceptance import TARGET, VOCABULARY, Eagle, dummy
from torch import nn

from benchmarks import attentive_weights
from benchmarks.acceptance import arrange, make_orbit
from benchmarks.attentive_weights import make_attentive
from benchmarks.soak.engine import NEAR
from vllm_async_spec.demo.model import TinyLlama

Model = TypeVar("Model", bound=nn.Module)


def attentive(model: Model, *, experts: bool = False) -> Model:
    dummy(model)
    arrange(model, VOCABULARY, 0.9)
    make_attentive(model, VOCABULARY, experts=experts)
    return model


def say(model: TinyLlama, tokens: torch.Tensor) -> torch.Tensor:
    """What follows each row's last token."""
    with torch.no_grad():
        hidden = model.model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[:, -1]
        return model.lm_head(hidden).argmax(-1)


def test_in_attentive_weights_the_successor_leads_and_earlier_tokens_decide():
    model, orbit = attentive(TinyLlama(TARGET)), make_orbit(VOCABULARY, 0.9)
    tokens = torch.randint(orbit.stranger, (256, 24), generator=torch.Generator().manual_seed(0))
    said = say(model, tokens)
    assert 0.35 < (said == orbit.successor[tokens[:, -1]]).float().mean() < 0.85
    assert not (said == orbit.stranger).any()
    assert (say(model, tokens[:, 1:]) != said).float().mean() > 0.02  # the first of 24 is missing
    assert (say(model, tokens[:, -4:]) != said).float().mean() > 0.2


def with_experts() -> nn.Module:
    """A mixture of experts that norms its queries and keys, as the shape `moe` does."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=96,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return attentive(model, experts=True)


def follows(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what follows each row's last token, [rows, vocabulary] float32."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits[:, -1]
    return logits.float().log_softmax(-1)


def test_with_experts_earlier_tokens_decide_because_the_router_prefers_few(monkeypatch: pytest.MonkeyPatch):
    orbit = make_orbit(VOCABULARY, 0.9)
    tokens = torch.randint(orbit.stranger, (256, 24), generator=torch.Generator().manual_seed(0))

    def others() -> float:
        said = follows(with_experts(), tokens).argmax(-1)
        return (said != orbit.successor[tokens[:, -1]]).float().mean().item()

    assert 0.15 < others() < 0.65
    monkeypatch.setattr(attentive_weights, "_RANKED", 0.1)
    assert others() < 0.1


def test_with_experts_rounding_moves_no_logit_far_because_routers_have_no_near_ties(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.randint(VOCABULARY - 1, (256, 24), generator=torch.Generator().manual_seed(0))

    def furthest() -> float:
        exact, rounded = (follows(with_experts().to(dtype), tokens) for dtype in (torch.float32, torch.float16))
        return (exact - rounded).abs().max().item()

    assert furthest() < NEAR
    monkeypatch.setattr(attentive_weights, "_ROUTERS", ())  # routers of random weights
    assert furthest() > NEAR


def test_the_token_alone_chooses_experts_in_each_layer_others_and_most_are_chosen():
    model, chosen = with_experts(), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, given, found: chosen.append(found[0].topk(8).indices))
    tokens = torch.arange(VOCABULARY - 1)
    follows(model, torch.stack((tokens, tokens.flip(0), tokens), 1))
    for experts in chosen:
        first, _, last = experts.view(len(tokens), 3, 8).unbind(1)
        assert torch.equal(first, last)
        assert len(first.unique()) > 24
    assert not torch.equal(chosen[0], chosen[1])


def test_a_drafter_of_attentive_weights_still_says_the_successor():
    model, drafter = attentive(TinyLlama(TARGET)), attentive(Eagle(TARGET))
    orbit = make_orbit(VOCABULARY, 0.9)
    tokens = torch.arange(orbit.stranger)
    with torch.no_grad():
        said = model.lm_head(drafter(tokens[:, None], torch.zeros(len(tokens), 1, TARGET.hidden))[:, 0]).argmax(-1)
    meant = torch.where(orbit.wrong, orbit.stranger, orbit.successor)
    assert (said == meant).float().mean() > 0.95


def test_a_draft_model_stays_as_it_is():
    model = TinyLlama(TARGET)
    dummy(model)
    arrange(model, VOCABULARY, 0.9, votes=True)
    before = [weight.clone() for weight in model.parameters()]
    make_attentive(model, VOCABULARY, votes=True)
    assert all(map(torch.equal, before, model.parameters()))
