"""Inputs of a step with a static cache that are made of those of the step before: the same, and of few operators.

Of transformers 5; with 4.57 nothing is reused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

import tiny_models
import transformers
from generating import RowsStopAt
from late_device import LateChannel
from prepared_inputs import HAS_POSITIONS, attending
from test_async_stopping_cost import Operators
from transformers import GenerationMixin

from vllm_async_spec import generation
from vllm_async_spec.generation.method_patching import has_own, replaced
from vllm_async_spec.generation.reused_inputs import _Mask, reused_inputs

PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
NEW = 12
pytestmark = pytest.mark.skipif(HAS_POSITIONS, reason="with transformers 4.57 nothing is reused")


def prompts(padding: str, batch: int) -> dict[str, torch.Tensor]:
    lengths = [4] * batch if padding == "full" else [4, 2, 3][:batch]
    return tiny_models.prompts(lengths, "left" if padding == "full" else padding)


def late() -> dict[str, Any]:
    return {"custom_generate": generation.generate, "open_channel": LateChannel(1).open}


Seen = dict[str, Any]


def shown(value: Any) -> Any:
    """A value of an input, so that two of them can be compared after a step has changed what it was given."""
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), value.tolist()
    return value if isinstance(value, bool | int | str | type(None)) else type(value)


@contextlib.contextmanager
def given_to_forward(model: Any) -> Iterator[list[Seen]]:
    """All that the model's forward is given, step for step and in its order."""
    steps: list[Seen] = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: steps.append(shown(kwargs)), with_kwargs=True)
    try:
        yield steps
    finally:
        handle.remove()


@contextlib.contextmanager
def masks_made() -> Iterator[list[Any]]:
    """The calls in which transformers makes the masks of a step."""
    from transformers.generation import utils

    made: list[Any] = []
    own = utils.create_masks_for_generate

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "create_masks_for_generate", noted)
        yield made


def generated(model: Any, **kwargs: Any) -> tuple[Any, list[Seen], int]:
    """What comes out, what the forward was given, and how often masks were made."""
    settings = {"max_new_tokens": NEW, "cache_implementation": "static", "eos_token_id": tiny_models.VOCABULARY}
    with given_to_forward(model) as given, masks_made() as made:
        output = model.generate(**{**settings, **kwargs})
    return output, given, len(made)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "by layer"])
@pytest.mark.parametrize("padding", ["full", "left", "right"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_what_a_step_is_given_is_what_transformers_gives_it(kind: str, padding: str, batch: int, do_sample: bool):
    """Values, shapes, strides, order: a compiled forward would be compiled anew for another of the last three."""
    found = []
    for way in ({}, late()):
        with attending(kind, "sdpa") as model:
            torch.manual_seed(3)
            found.append(generated(model, **prompts(padding, batch), do_sample=do_sample, **way))
    (stock, given, made), (ours, given_to_ours, made_by_ours) = found
    assert torch.equal(stock, ours)
    assert [list(step) for step in given] == [list(step) for step in given_to_ours]
    assert given == given_to_ours
    assert (made, made_by_ours) == (NEW, 2)


def sliding(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"kind": "sliding"}


def some_layers_sliding(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"kind": "hybrid"}


def eager(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"attention": "eager"}


def dynamic(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"cache_implementation": "dynamic"}


def an_argument_that_changes(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    # What transformers continues by a token at each step, for any model.
    return {"kind": "gpt2", "token_type_ids": torch.zeros(2, 4, dtype=torch.long)}


def inputs_of_the_class(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)

    patch.setattr(transformers.LlamaForCausalLM, PREPARE, prepare, raising=False)
    return {}


def inputs_of_everybody(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = GenerationMixin.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    patch.setattr(GenerationMixin, PREPARE, prepare)
    return {}


def inputs_of_the_model(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    model = tiny_models.model("llama")
    patch.setattr(
        model, PREPARE, functools.partial(GenerationMixin.prepare_inputs_for_generation, model), raising=False
    )
    return {}


def updates_of_the_model(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    model = tiny_models.model("llama")
    patch.setattr(model, UPDATE, functools.partial(GenerationMixin._update_model_kwargs_for_generation, model))
    return {}


def masks_of_the_model(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    from transformers.generation import utils

    def masks(self: Any, **kwargs: Any) -> Any:
        return utils.create_masks_for_generate(**kwargs)

    patch.setattr(transformers.LlamaForCausalLM, "create_masks_for_generate", masks, raising=False)
    return {}


def masks_of_somebody(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    from transformers import masking_utils

    own = masking_utils.sdpa_mask
    patch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: own(*a, **k))
    return {}


@pytest.mark.parametrize(
    "case",
    [
        sliding,
        some_layers_sliding,
        eager,
        dynamic,
        an_argument_that_changes,
        inputs_of_the_class,
        inputs_of_everybody,
        inputs_of_the_model,
        updates_of_the_model,
        masks_of_the_model,
        masks_of_somebody,
    ],
)
def test_where_it_might_not_be_exact_inputs_are_prepared_as_ever(
    case: Callable[[pytest.MonkeyPatch], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    options = {"kind": "llama", "attention": "sdpa"} | case(monkeypatch)
    kind, attention = options.pop("kind"), options.pop("attention")
    found = []
    for way in ({}, late()):
        with attending(kind, attention) as model:
            found.append(generated(model, **prompts("left", 2), **options, **way))
    (stock, given, made), (ours, given_to_ours, made_by_ours) = found
    assert torch.equal(stock, ours)
    assert made == made_by_ours
    # A carrier of what the host knows is given where the cache is dynamic; it has the same values.
    assert case is dynamic or given == given_to_ours


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
    for way in ({}, late()):
        with attending(kind, "sdpa") as model:
            found.append(continued(model, way))
    (stock, given), (ours, given_to_ours) = found
    for one, other in zip(stock, ours, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert given == given_to_ours


# --- step by step, where `_sample` has no say ------------------------------------------------------------------------


def by_hand(
    model: Any,
    steps: int,
    change: Callable[[int, dict[str, Any]], None],
    *,
    reusing: bool,
    padding: str = "left",
    batch: int = 3,
) -> tuple[list[Seen], Counter[str]]:
    """The inputs of steps as `_sample` has them prepared, and the operators that this took.

    `change` is what somebody else does between two steps.
    """
    inputs = prompts(padding, batch)
    ids = inputs["input_ids"]
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    kwargs = {
        "attention_mask": inputs["attention_mask"],
        "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0),
        "past_key_values": cache,
        "use_cache": True,
    }
    given, counted = [], Operators()
    with torch.no_grad(), reused_inputs(model, kwargs) if reusing else contextlib.nullcontext():
        for step in range(steps):
            change(step, kwargs)
            first = step == 0
            with counted:
                prepared = model.prepare_inputs_for_generation(
                    ids, next_sequence_length=None if first else 1, is_first_iteration=first, **kwargs
                )
            given.append(shown(prepared))
            outputs = model(**prepared, return_dict=True)
            with counted:
                kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
            ids = torch.cat([ids, outputs.logits[:, -1:].argmax(-1)], dim=-1)
    return given, counted.seen


def nothing(step: int, kwargs: dict[str, Any]) -> None:
    pass


def another_setting(step: int, kwargs: dict[str, Any]) -> None:
    if step == 5:
        kwargs["logits_to_keep"] = 1


def another_setting_again(step: int, kwargs: dict[str, Any]) -> None:
    kwargs["logits_to_keep"] = 1 if step in (4, 7) else 0


def a_tensor(step: int, kwargs: dict[str, Any]) -> None:
    kwargs["logits_to_keep"] = 0 if step < 5 else torch.tensor([0])


@pytest.mark.parametrize("change", [nothing, another_setting, another_setting_again, a_tensor])
def test_what_is_changed_between_two_steps_is_heeded(change: Any):
    with attending("llama", "sdpa") as model:
        expected, _ = by_hand(model, 10, change, reusing=False)
        with masks_made() as made:
            found, _ = by_hand(model, 10, change, reusing=True)
    assert found == expected
    assert (len(made) == 2) == (change is nothing)


def test_another_cache_is_nobody_s_yet():
    """A model that returns another one than it was given, from its sixth step on."""
    with attending("llama", "sdpa") as model:
        forward = type(model).forward
        calls: Counter[str] = Counter()

        def replacing(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(model, *args, **kwargs)
            calls["forward"] += 1
            if calls["forward"] == 6:
                outputs.past_key_values = copy.deepcopy(outputs.past_key_values)
            return outputs

        found = []
        for reusing in (False, True):
            calls.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model, "forward", replacing)
                found.append(by_hand(model, 10, nothing, reusing=reusing)[0])
    assert found[0] == found[1]


def test_a_generation_within_another_has_inputs_of_its_own():
    """Of one model: both have the seam at once, and the outer one keeps it."""
    with attending("llama", "sdpa") as model:
        inner: list[Any] = []
        other = prompts("right", 3)

        class Asks(transformers.LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if input_ids.shape[1] in (7, 9):
                    way = late() if input_ids.shape[1] == 7 else {}
                    inner.append(generated(model, **other, **way))
                return scores

        settings = {"max_new_tokens": NEW, "cache_implementation": "static", "eos_token_id": tiny_models.VOCABULARY}
        expected = model.generate(**prompts("left", 2), **settings)
        tokens, given, _ = generated(model, **other)
        found = model.generate(
            **prompts("left", 2), **settings, **late(), logits_processor=transformers.LogitsProcessorList([Asks()])
        )
        assert not {PREPARE, UPDATE} & set(vars(model))
    assert torch.equal(found, expected)
    assert len(inner) == 2
    for tokens_within, given_within, _ in inner:
        assert torch.equal(tokens_within, tokens)
        assert given_within == given


def test_what_replaces_a_method_is_not_the_model_s_own():
    model = tiny_models.model("llama")
    assert not has_own(model, PREPARE)
    with replaced(model, PREPARE, lambda own: own):
        assert PREPARE in vars(model)
        assert not has_own(model, PREPARE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, PREPARE, lambda: None, raising=False)
        assert has_own(model, PREPARE)
        with replaced(model, PREPARE, lambda own: own):
            assert has_own(model, PREPARE)
    assert PREPARE not in vars(model)


def test_a_mask_has_the_strides_of_the_first():
    """Of dimensions of size 1 too, by which a compiled forward would notice."""
    odd = torch.ones(9, dtype=torch.bool).as_strided((1, 1, 1, 8), (50, 3, 20, 1))
    mask = _Mask(odd & False, torch.tensor(2))
    found = _Mask(odd, torch.tensor(2)).up_to(torch.tensor(4))
    assert found.stride() == odd.stride()
    assert found.flatten().tolist() == [True] * 5 + [False] * 3
    assert mask.up_to(torch.tensor(4)).flatten().tolist() == [False] * 3 + [True] * 2 + [False] * 3


# --- what it costs -----------------------------------------------------------------------------------------------

VIEWS = [f"aten.{name}" for name in ("empty.memory_format", "expand.default", "slice.Tensor", "unsqueeze.default",
                                     "view.default")]  # fmt: skip


@pytest.mark.parametrize("padding", ["full", "left"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_prepares_its_inputs_by_five_operators(padding: str, batch: int):
    """The newest token, cut off and copied; the last position, cut off and one more; and the mask."""
    counts = []
    with attending("llama", "sdpa") as model:
        for reusing in (True, False):
            few, many = (
                by_hand(model, steps, nothing, reusing=reusing, padding=padding, batch=batch)[1] for steps in (6, 10)
            )
            more = {name: (count - few[name]) / 4 for name, count in many.items()}
            counts.append((sum(more.values()), sum(count for name, count in more.items() if name not in VIEWS)))
    (ours, launched), (stock, launched_by_stock) = counts
    assert (ours, launched) == (5, 3)
    assert stock >= 30
    assert launched_by_stock >= 15
