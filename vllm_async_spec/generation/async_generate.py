"""`generate` of transformers whose stop check does not wait: its own loop, given other stopping criteria.

The loop is transformers' `_sample`, unchanged. It is given an `AsyncStoppingCriteriaList`, and what it returns is
cropped. There are two ways in: `generate` is handed to `model.generate(custom_generate=...)`; after `enable()` a
`GenerationConfig(async_stopping_criteria=True)` has the same effect.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from vllm_async_spec.generation.flag_channel import OpenChannel, open_channel
from vllm_async_spec.generation.interleaved import DecodeSwitches, decode_interleaved
from vllm_async_spec.generation.known_inputs import known_inputs
from vllm_async_spec.generation.reused_inputs import reused_inputs
from vllm_async_spec.generation.rollback import crop_cache, crop_output, why_not_croppable
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList, warn_once
from vllm_async_spec.patching import Transaction

_SWITCH = "async_stopping_criteria"
_REMEDY = f"leave out custom_generate or {_SWITCH}, and transformers' own loop does it"


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    poll_every: int = 1,
    max_in_flight: int = 1,
    open_channel: OpenChannel = open_channel,
    interleaved: bool | None = None,
    static_cache: bool | None = None,
    cuda_graphs: bool | None = None,
    torch_compile: bool | str | dict[str, Any] | None = None,
    memory_limit: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode greedily or by sampling, without waiting for the stop flags of each step.

    Not called by a user but by transformers: `model.generate(..., custom_generate=generate, poll_every=1)`. What it
    returns, and leaves in the cache and in the device's default random generator, is what the synchronous loop does.

    Args:
        model: a `GenerationMixin`.
        input_ids: int64 (batch, length), the prompts.
        logits_processor: handed on.
        stopping_criteria: a `StoppingCriteriaList`.
        generation_config: the prepared configuration.
        poll_every: tokens between two looks at the flags.
        max_in_flight: copies of flags that may be under way; see `AsyncStoppingCriteriaList`.
        open_channel: how flags reach the host.
        interleaved: True for a decode loop of our own, whose steps take turns in two slots; False for the same loop
            with one wait a step; None for transformers' own loop. The rest is for the first two.
        static_cache: whether keys and values are written to memory that is allocated once; True, if None.
        cuda_graphs: whether a step is captured, and then replayed by one launch; as `static_cache`, if None.
        torch_compile: whether the forward of a step is compiled; a name chooses the backend, a dict has arguments of
            `torch.compile`; False, if None.
        memory_limit: bytes that may be held between generations; no limit, if None.
        model_kwargs: handed on.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: the decoding mode is not greedy search or sampling, or transformers was given an argument that it
            does not hand to a `custom_generate` function; or the loop of our own can't do what was asked for.
    """
    _refuse_mode(generation_config.get_generation_mode(None))
    given = _refuse_arguments_that_transformers_drops()
    switches = DecodeSwitches.of(
        interleaved,
        static_cache=static_cache,
        cuda_graphs=cuda_graphs,
        torch_compile=torch_compile,
        memory_limit=memory_limit,
    )
    if switches is not None:
        return decode_interleaved(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            switches=switches,
            poll_every=poll_every,
            max_in_flight=max_in_flight,
            open_channel=open_channel,
            given=given,
            **model_kwargs,
        )
    return _decode(
        model._sample,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        options={"poll_every": poll_every, "max_in_flight": max_in_flight, "open_channel": open_channel},
        **model_kwargs,
    )


def enable() -> None:
    """Make every model of transformers heed `GenerationConfig(async_stopping_criteria=True)`; doing it twice is once.

    With it go `async_stopping_poll_every` and `async_stopping_max_in_flight`, both 1 where they are not set.
    """
    if _enabled:
        return
    with Transaction() as changes:
        changes.set(GenerationMixin, "_sample", _switched(GenerationMixin._sample))
        for name, mode in _REFUSED.items():
            changes.set(GenerationMixin, name, _refusing(getattr(GenerationMixin, name), mode))
        _enabled.append(changes)


def disable() -> None:
    """Undo `enable`."""
    while _enabled:
        _enabled.pop().roll_back()


_enabled: list[Transaction] = []
"""The changes of `enable`, until they are undone."""
_REFUSED = {"_beam_search": GenerationMode.BEAM_SEARCH, "_assisted_decoding": GenerationMode.ASSISTED_GENERATION}
_OTHER_STATES = ("cache_params", "state", "mems", "past_buckets_states")
_MARKS_GIVEN_CACHES = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names


def _switched(original: Callable[..., Any]) -> Callable[..., Any]:
    # Wrapped, so that transformers, which looks at the signature of `_sample`, sees its own.
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
        options = {
            "poll_every": getattr(generation_config, "async_stopping_poll_every", 1),
            "max_in_flight": getattr(generation_config, "async_stopping_max_in_flight", 1),
        }
        return _decode(
            loop, self, input_ids, logits_processor, stopping_criteria, generation_config, options=options, **kwargs
        )

    return _sample


def _refusing(original: Callable[..., Any], mode: GenerationMode) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("generation_config"), _SWITCH, False):
            _refuse_mode(mode)
        return original(self, *args, **kwargs)

    return refuse


def _decode(
    loop: Callable[..., Any],
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    options: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Run `loop`, transformers' `_sample`, asynchronously where that can be undone exactly, else as it is."""
    run = functools.partial(loop, input_ids, logits_processor=logits_processor, generation_config=generation_config)
    reason = _why_synchronous(stopping_criteria, generation_config, kwargs)
    if reason is not None:
        warn_once(reason)
        return run(stopping_criteria=stopping_criteria, **kwargs)
    draws = bool(generation_config.do_sample or model.training)
    criteria = AsyncStoppingCriteriaList(stopping_criteria, rewind_generator=draws, pads=len(input_ids) > 1, **options)
    with known_inputs(model, input_ids, generation_config, kwargs) as known, reused_inputs(model, kwargs):
        output = run(stopping_criteria=criteria, **known)
    if steps := criteria.finish():
        output = crop_output(output, steps)
        if _cache_outlives(generation_config, kwargs):
            crop_cache(kwargs.get("past_key_values"), steps)
    return output


def _why_synchronous(stopping_criteria: Any, generation_config: Any, kwargs: dict[str, Any]) -> str | None:
    """Why the loop has to wait for each step's flags; None where it has not."""
    if kwargs.get("streamer") is not None:
        return "a streamer reads each token on the host"
    if kwargs.get("synced_gpus"):
        return "synced_gpus makes all ranks agree on the end of each step"
    if not _cache_outlives(generation_config, kwargs):
        return None
    if generation_config.use_cache and kwargs.get("past_key_values") is None:
        return "the model makes its cache itself, and what nobody has seen can't be cropped"
    # The last token of a sequence is never fed to the model. Embeddings of a prompt are in no length.
    longest = stopping_criteria.max_length
    tokens = None if longest is None or kwargs.get("inputs_embeds") is not None else longest - 1
    return why_not_croppable(kwargs.get("past_key_values"), tokens)


def _cache_outlives(generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether anybody can see the cache after generation. 4.57 does not mark those that it was given."""
    cache = kwargs.get("past_key_values")
    given = cache is not None and getattr(cache, "_is_user_defined", not _MARKS_GIVEN_CACHES)
    return bool(
        generation_config.return_dict_in_generate
        or given
        or any(kwargs.get(name) is not None for name in _OTHER_STATES)
    )


def _refuse_mode(mode: Any) -> None:
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        name = getattr(mode, "value", mode)
        raise ValueError(f"asynchronous stopping does greedy search and sampling, not {name}; {_REMEDY}")


def _refuse_arguments_that_transformers_drops() -> dict[str, Any]:
    """Refuse what `model.generate` takes and does not hand to a `custom_generate` function, rather than ignore it.

    Only its frame still has it. Where that is not the caller there is nothing to see, and nothing is refused.

    Returns:
        What it was given for the model; 4.57 marks nothing of it as given.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "generate":
        return {}
    if frame.f_locals.get("assistant_model") is not None:
        _refuse_mode(GenerationMode.ASSISTED_GENERATION)
    for name in ("streamer", "synced_gpus"):
        if frame.f_locals.get(name):
            raise ValueError(
                f"transformers hands no {name} to a custom_generate function; "
                f"call vllm_async_spec.generation.enable() and set {_SWITCH}=True in the GenerationConfig"
            )
    given: dict[str, Any] = frame.f_locals.get("kwargs") or {}
    return given
