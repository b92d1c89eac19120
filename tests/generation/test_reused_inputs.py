"""Reused inputs of a step with a static cache of transformers 5, step by step; and what they cost."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from prepared_inputs import HAS_POSITIONS, PREPARE, Seen, attending, masks_made, prompts, shown
from test_async_stopping_cost import Operators

from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.method_patching import has_own, replaced
from vllm_async_spec.generation.reused_inputs import _Mask, reused_inputs

pytestmark = pytest.mark.skipif(HAS_POSITIONS, reason="with transformers 4.57 nothing is reused")


def by_hand(
    model: Any,
    steps: int,
    change: Callable[[int, dict[str, Any]], None],
    *,
    reusing: bool,
    padding: str = "left",
    batch: int = 3,
) -> tuple[list[Seen], Counter[str]]:
    """The inputs of steps and the operators they took; `change` is what somebody else does between two steps."""
    inputs = prompts(padding, batch)
    ids = inputs["input_ids"]
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    kwargs = {
        "attention_mask": inputs["attention_mask"],
        "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0),
        CACHE: cache,
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
    with attending("llama", "sdpa") as model:
        forward = type(model).forward
        calls: Counter[str] = Counter()

        def replacing(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(model, *args, **kwargs)
            calls["forward"] += 1
            if calls["forward"] == 6:
                outputs[CACHE] = copy.deepcopy(outputs[CACHE])
            return outputs

        found = []
        for reusing in (False, True):
            calls.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model, "forward", replacing)
                found.append(by_hand(model, 10, nothing, reusing=reusing)[0])
    assert found[0] == found[1]


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


# What it costs

VIEWS = [f"aten.{name}" for name in ("empty.memory_format", "expand.default", "slice.Tensor", "unsqueeze.default",
                                     "view.default")]  # fmt: skip


@pytest.mark.parametrize("padding", ["full", "left"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_prepares_its_inputs_by_five_operators(padding: str, batch: int):
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
