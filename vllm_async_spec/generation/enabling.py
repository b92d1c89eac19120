"""`enable` and `disable`: asynchronous stopping for every model of the process, where a generation asks for it.

A generation asks with `async_stopping_criteria=True`, as a keyword of `model.generate` or in its `GenerationConfig`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from vllm_async_spec.generation.async_generate import decode_late, why_not_loop, why_not_mode
from vllm_async_spec.generation.stopping_criteria import OWN_LOOP, AsyncStoppingCriteriaList, fall_back
from vllm_async_spec.patching import Transaction

_SWITCH = "async_stopping_criteria"
_STRICT = "async_stopping_strict"
_OPTIONS = {"async_stopping_poll_every": "poll_every", "async_stopping_max_in_flight": "max_in_flight"}
_OTHER_LOOPS = {"_beam_search": GenerationMode.BEAM_SEARCH, "_assisted_decoding": GenerationMode.ASSISTED_GENERATION}

_enabled: list[Transaction] = []
"""The changes of `enable`, until `disable` undoes them."""


def enable() -> None:
    """Make every transformers model honour `async_stopping_criteria=True`.

    `model.generate` takes it as a keyword, and a `GenerationConfig` as an entry. Three options go with it:
    `async_stopping_poll_every` and `async_stopping_max_in_flight`, which default to 1, and `async_stopping_strict`.
    A generation that can't be asynchronous is synchronous and warns once; with `async_stopping_strict` it raises
    `ValueError`. A second call of `enable` does nothing.
    """
    if _enabled:
        return
    with Transaction() as changes:
        changes.set(
            GenerationMixin, "_prepare_generation_config", _with_keywords(GenerationMixin._prepare_generation_config)
        )
        changes.set(GenerationMixin, "_sample", _switched(GenerationMixin._sample))
        for name, mode in _OTHER_LOOPS.items():
            changes.set(GenerationMixin, name, _falling_back(getattr(GenerationMixin, name), mode))
        _enabled.append(changes)


def disable() -> None:
    """Undo `enable`."""
    while _enabled:
        _enabled.pop().roll_back()


def _with_keywords(original: Callable[..., Any]) -> Callable[..., Any]:
    """Move this package's keywords of `generate` into the prepared configuration, because transformers refuses them."""

    @functools.wraps(original)
    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, model_kwargs = original(self, *args, **kwargs)
        given = {name: model_kwargs.pop(name) for name in (_SWITCH, _STRICT, *_OPTIONS) if name in model_kwargs}
        for name, value in given.items():
            setattr(config, name, value)
        for name in (_SWITCH, _STRICT):
            value = getattr(config, name, False)
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
        if not getattr(config, _SWITCH, False):
            for name in given.keys() - {_SWITCH}:
                raise ValueError(
                    f"{name} is {given[name]!r}, and {_SWITCH} is not set; pass {_SWITCH}=True too, or leave it out"
                )
        elif (reason := why_not_loop(self)) is not None:
            fall_back(reason, strict=getattr(config, _STRICT, False))
        return config, model_kwargs

    return _prepare_generation_config


def _switched(original: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the signature of `_sample`, which transformers inspects.
    @functools.wraps(original)
    def _sample(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Any:
        loop = functools.partial(original, self)
        if not getattr(generation_config, _SWITCH, False) or isinstance(stopping_criteria, AsyncStoppingCriteriaList):
            return loop(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        options = {name: getattr(generation_config, entry, 1) for entry, name in _OPTIONS.items()}
        options["strict"] = getattr(generation_config, _STRICT, False)
        return decode_late(
            loop, self, input_ids, logits_processor, stopping_criteria, generation_config, options=options, **kwargs
        )

    return _sample


def _falling_back(original: Callable[..., Any], mode: GenerationMode) -> Callable[..., Any]:
    @functools.wraps(original)
    def other_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config")
        if getattr(config, _SWITCH, False):
            fall_back(why_not_mode(mode), strict=getattr(config, _STRICT, False), instead=OWN_LOOP)
        return original(self, *args, **kwargs)

    return other_loop
