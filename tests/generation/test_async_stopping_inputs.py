"""Inputs of a step with a static cache, made of those of the step before, are those that transformers 5 makes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import RowsStopAt, late
from late_device import LateChannel
from prepared_inputs import (
    HAS_POSITIONS,
    PREPARE,
    UPDATE,
    Seen,
    attending,
    given_to_forward,
    masks_made,
    prompts,
    shown,
)
from transformers import GenerationMixin

NEW = 12
pytestmark = pytest.mark.skipif(HAS_POSITIONS, reason="with transformers 4.57 nothing is reused")


def generated(model: Any, **kwargs: Any) -> tuple[Any, list[Seen], int]:
    settings = {"max_new_tokens": NEW, "cache_implementation": "static", "eos_token_id": tiny_models.VOCABULARY}
    with given_to_forward(model, shown) as given, masks_made() as made:
        output = model.generate(**{**settings, **kwargs})
    return output, given, len(made)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "by layer"])
@pytest.mark.parametrize("padding", ["full", "left", "right"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_what_a_step_is_given_is_what_transformers_gives_it(kind: str, padding: str, batch: int, do_sample: bool):
    """Values, and shapes, strides and order, for which a forward would be compiled anew."""
    found = []
    for way in ({}, late(LateChannel(1))):
        with attending(kind, "sdpa") as model:
            torch.manual_seed(3)
            found.append(generated(model, **prompts(padding, batch), do_sample=do_sample, **way))
    (stock, given, made), (ours, given_to_ours, made_by_ours) = found
    assert torch.equal(stock, ours)
    assert [list(step) for step in given] == [list(step) for step in given_to_ours]
    assert given == given_to_ours
    assert (made, made_by_ours) == (NEW, 2)


def inputs_of_the_class(patch: pytest.MonkeyPatch) -> None:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)

    patch.setattr(transformers.LlamaForCausalLM, PREPARE, prepare, raising=False)


def inputs_of_everybody(patch: pytest.MonkeyPatch) -> None:
    own = GenerationMixin.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    patch.setattr(GenerationMixin, PREPARE, prepare)


def inputs_of_the_model(patch: pytest.MonkeyPatch) -> None:
    model = tiny_models.model("llama")
    patch.setattr(
        model, PREPARE, functools.partial(GenerationMixin.prepare_inputs_for_generation, model), raising=False
    )


def updates_of_the_model(patch: pytest.MonkeyPatch) -> None:
    model = tiny_models.model("llama")
    patch.setattr(model, UPDATE, functools.partial(GenerationMixin._update_model_kwargs_for_generation, model))


def masks_of_the_model(patch: pytest.MonkeyPatch) -> None:
    from transformers.generation import utils

    def masks(self: Any, **kwargs: Any) -> Any:
        return utils.create_masks_for_generate(**kwargs)

    patch.setattr(transformers.LlamaForCausalLM, "create_masks_for_generate", masks, raising=False)


def masks_of_somebody(patch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    own = masking_utils.sdpa_mask
    patch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: own(*a, **k))


@pytest.mark.parametrize(
    "case",
    [
        {"kind": "sliding"},
        {"kind": "hybrid"},
        {"attention": "eager"},
        {"cache_implementation": "dynamic"},
        # What transformers continues by a token at each step, for any model.
        {"kind": "gpt2", "token_type_ids": torch.zeros(2, 4, dtype=torch.long)},
        inputs_of_the_class,
        inputs_of_everybody,
        inputs_of_the_model,
        updates_of_the_model,
        masks_of_the_model,
        masks_of_somebody,
    ],
)
def test_where_it_might_not_be_exact_inputs_are_prepared_as_ever(
    case: dict[str, Any] | Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    options: dict[str, Any] = {"kind": "llama", "attention": "sdpa"}
    if isinstance(case, dict):
        options |= case
    else:
        case(monkeypatch)
    kind, attention = options.pop("kind"), options.pop("attention")
    found = []
    for way in ({}, late(LateChannel(1))):
        with attending(kind, attention) as model:
            found.append(generated(model, **prompts("left", 2), **options, **way))
    (stock, given, made), (ours, given_to_ours, made_by_ours) = found
    assert torch.equal(stock, ours)
    assert made == made_by_ours
    # A carrier of what the host knows is given where the cache is dynamic; it has the same values.
    assert "cache_implementation" in options or given == given_to_ours


def continued(model: Any, way: dict[str, Any]) -> tuple[list[Any], list[Seen]]:
    """Two calls with one static cache, the first cropped by what was too much, the second with all of the tokens."""
    inputs = prompts("left", 2)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    stop = transformers.StoppingCriteriaList([RowsStopAt([7, 6])])
    settings = {"past_key_values": cache, "cache_implementation": None, "return_dict_in_generate": True, **way}
    first, given, _ = generated(model, **inputs, stopping_criteria=stop, **settings)
    tokens = first.sequences
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, tokens.shape[1] - 4, dtype=torch.long)], dim=-1)
    second, given_then, _ = generated(model, input_ids=tokens, attention_mask=mask, **settings)
    return [tokens, second.sequences, int(cache.get_seq_length()), *[each.keys for each in cache.layers]], [
        *given[: tokens.shape[1] - 4],
        *given_then[: second.sequences.shape[1] - tokens.shape[1]],
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_cache_that_is_used_again_goes_on_where_it_was(kind: str):
    found = []
    for way in ({}, late(LateChannel(1))):
        with attending(kind, "sdpa") as model:
            found.append(continued(model, way))
    (stock, given), (ours, given_to_ours) = found
    for one, other in zip(stock, ours, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert given == given_to_ours


def test_a_generation_within_another_has_inputs_of_its_own():
    with attending("llama", "sdpa") as model:
        inner: list[Any] = []
        other = prompts("right", 3)

        class Asks(transformers.LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if input_ids.shape[1] in (7, 9):
                    way = late(LateChannel(1)) if input_ids.shape[1] == 7 else {}
                    inner.append(generated(model, **other, **way))
                return scores

        settings = {"max_new_tokens": NEW, "cache_implementation": "static", "eos_token_id": tiny_models.VOCABULARY}
        expected = model.generate(**prompts("left", 2), **settings)
        tokens, given, _ = generated(model, **other)
        found = model.generate(
            **prompts("left", 2),
            **settings,
            **late(LateChannel(1)),
            logits_processor=transformers.LogitsProcessorList([Asks()]),
        )
        assert not {PREPARE, UPDATE} & set(vars(model))
    assert torch.equal(found, expected)
    assert len(inner) == 2
    for tokens_within, given_within, _ in inner:
        assert torch.equal(tokens_within, tokens)
        assert given_within == given
