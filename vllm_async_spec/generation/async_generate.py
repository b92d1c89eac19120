"""Asynchronous `generate` for transformers: transformers' own loop, with stopping criteria that do not wait.

The loop is transformers' unchanged `_sample`. It receives an `AsyncStoppingCriteriaList`, and its output is cropped.
There are two ways in. `model.generate(custom_generate=generate)` serves one call; `enabling` has the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import Cache, EncoderDecoderCache, GenerationMixin
from transformers.generation import GenerationMode

from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.dropped_arguments import dropped_arguments
from vllm_async_spec.generation.flag_channel import OpenChannel, open_channel
from vllm_async_spec.generation.interleaved import DecodeSwitches, decode_interleaved, why_not_interleaved
from vllm_async_spec.generation.known_inputs import known_inputs
from vllm_async_spec.generation.reused_inputs import reused_inputs
from vllm_async_spec.generation.rollback import (
    crop_cache,
    crop_output,
    may_draw,
    why_not_croppable,
    why_steps_show,
)
from vllm_async_spec.generation.stopping_criteria import (
    LATE,
    OWN_LOOP,
    AsyncStoppingCriteriaList,
    check_pace,
    fall_back,
)

_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_OTHER_STATES = ("cache_params", "state", "mems", "past_buckets_states")
_MARKS_GIVEN_CACHES = Version(transformers.__version__) >= Version("5.17")
"""Whether transformers sets `_is_user_defined` on a cache that the caller passed. No attribute of its own shows it."""


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
    strict: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decode greedily or by sampling, without waiting for the stop flags of each step.

    transformers calls this function: `model.generate(..., custom_generate=generate, poll_every=1)`. The output, the
    cache and the device's default random generator end up as after the synchronous loop.

    Args:
        model: a `GenerationMixin`.
        input_ids: int64 (batch, length), the prompts.
        logits_processor: passed on.
        stopping_criteria: a `StoppingCriteriaList`.
        generation_config: the prepared configuration.
        poll_every: steps whose flags share one copy to the host.
        max_in_flight: copies of flags that may be in flight; see `AsyncStoppingCriteriaList`.
        open_channel: opens the channel that carries flags to the host.
        interleaved: True: this package's decode loop, whose steps alternate between two slots. False: the same loop
            with one wait a step. None: transformers' own loop, which takes none of the options below.
        static_cache: whether keys and values use memory that is allocated once; None means True.
        cuda_graphs: whether a step is captured and then replayed by one launch; None means as `static_cache`.
        torch_compile: whether the forward of a step is compiled. A name chooses the backend, a dict holds arguments of
            `torch.compile`; None means False.
        memory_limit: bytes that may stay allocated between generations; None means no limit.
        strict: whether a generation that can't be asynchronous raises `ValueError`. If not, a
            `SynchronousGenerationWarning` gives the reason once. Beam search, and with `interleaved` a model that this
            package's loop does not support, then use transformers' own loop; a class with a loop of its own uses that.
        model_kwargs: passed on.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: transformers got an argument that it does not pass to a `custom_generate` function; or an option is
            out of range; or this package's loop does not support an argument of the call.
    """
    mode = generation_config.get_generation_mode(None)
    dropped = dropped_arguments(model)
    _refuse_what_is_lost(dropped.lost, mode)
    check_pace(poll_every, max_in_flight)
    switches = DecodeSwitches.of(
        interleaved,
        static_cache=static_cache,
        cuda_graphs=cuda_graphs,
        torch_compile=torch_compile,
        memory_limit=memory_limit,
    )
    has_own = why_not_loop(model)
    why = why_not_mode(mode) if mode in _BEAMS else has_own
    if why is None and switches is not None:
        why = why_not_interleaved(model, generation_config, switches, model_kwargs)
    if why is not None:
        fall_back(why, strict=strict, instead=LATE if why is has_own else OWN_LOOP)
        loop = model._beam_search if mode in _BEAMS else model._sample
        return loop(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )
    options: dict[str, Any] = {
        "poll_every": poll_every,
        "max_in_flight": max_in_flight,
        "open_channel": open_channel,
        "strict": strict,
    }
    if switches is not None:
        options |= {"switches": switches, "given": dropped.model_arguments}
        return decode_interleaved(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **options, **model_kwargs
        )
    return decode_late(
        model._sample,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        options=options,
        **model_kwargs,
    )


def decode_late(
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
    """Run `loop`, transformers' `_sample`, asynchronously if extra steps can be undone exactly, else unchanged."""
    run = functools.partial(loop, input_ids, logits_processor=logits_processor, generation_config=generation_config)
    reason = _why_synchronous(input_ids, stopping_criteria, generation_config, kwargs) or why_steps_show(model)
    if reason is not None:
        fall_back(reason, strict=options["strict"])
        return run(stopping_criteria=stopping_criteria, **kwargs)
    draws = may_draw(model, generation_config.do_sample, logits_processor, stopping_criteria)
    criteria = AsyncStoppingCriteriaList(
        stopping_criteria, rewind_generator=draws, pads=len(input_ids) > 1, starts_unfinished=True, **options
    )
    try:
        with known_inputs(model, input_ids, generation_config, kwargs) as known, reused_inputs(model, kwargs):
            output = run(stopping_criteria=criteria, **known)
    except Exception:
        # An extra step may fail where transformers' loop has ended: a grammar allows nothing after the end.
        found = None if _cache_outlives(generation_config, kwargs) else criteria.recover()
        if found is None:
            raise
        return found
    if steps := criteria.finish():
        output = crop_output(output, steps)
        if _cache_outlives(generation_config, kwargs):
            crop_cache(kwargs.get(CACHE), steps)
    return output


def _why_synchronous(
    input_ids: torch.Tensor, stopping_criteria: Any, generation_config: Any, kwargs: dict[str, Any]
) -> str | None:
    """The reason why the loop must wait for each step's flags; None if it need not."""
    if kwargs.get("streamer") is not None:
        return "a streamer reads each token on the host"
    if kwargs.get("synced_gpus"):
        return "synced_gpus makes all ranks agree on the end of each step"
    if not _cache_outlives(generation_config, kwargs):
        return None
    if generation_config.use_cache and kwargs.get(CACHE) is None:
        return "the model makes its own cache, so it is unknown whether that cache can be cropped"
    # The model is never fed the last token. With `inputs_embeds`, `max_length` does not count the prompt.
    longest = stopping_criteria.max_length
    tokens = None if longest is None or kwargs.get("inputs_embeds") is not None else longest - 1
    cache = kwargs.get(CACHE)
    if tokens is not None and not isinstance(cache, EncoderDecoderCache):
        # Mask and positions also count tokens that the cache has and `input_ids` lack.
        counted = [kwargs.get("attention_mask"), kwargs.get("position_ids"), input_ids]
        tokens += max(each.shape[-1] for each in counted if isinstance(each, torch.Tensor)) - input_ids.shape[1]
    return why_not_croppable(cache, tokens)


def _cache_outlives(generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the caller can see the cache after generation. Before 5.17 any cache may be the caller's."""
    cache = kwargs.get(CACHE)
    given = cache is not None and getattr(cache, "_is_user_defined", not _MARKS_GIVEN_CACHES)
    return bool(
        generation_config.return_dict_in_generate
        or given
        or any(kwargs.get(name) is not None for name in _OTHER_STATES)
        # A later release may rename the argument: better to wait than to leave extra tokens in the caller's cache.
        or any(isinstance(each, Cache) for name, each in kwargs.items() if name != CACHE)
    )


def why_not_mode(mode: GenerationMode) -> str:
    """The reason why a mode of generation is not asynchronous."""
    return f"asynchronous stopping supports greedy search and sampling, not {getattr(mode, 'value', mode)}"


def why_not_loop(model: Any) -> str | None:
    """The reason why the decode loop of a model is not replaced; None if it is the one that all models share."""
    if type(model)._sample is GenerationMixin._sample:
        return None
    return f"{type(model).__name__} has a decode loop of its own"


def _refuse_what_is_lost(lost: dict[str, Any], mode: GenerationMode) -> None:
    """Refuse what can't be passed on to transformers' own loop either, because transformers drops it."""
    if "assistant_model" in lost:
        mode = GenerationMode.ASSISTED_GENERATION
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, *_BEAMS):
        raise ValueError(f"{why_not_mode(mode)}; leave out custom_generate to use transformers' own loop")
    for name in lost:
        raise ValueError(
            f"transformers passes no {name} to a custom_generate function; leave out custom_generate, call "
            "vllm_async_spec.generation.enable(), and pass async_stopping_criteria=True to generate"
        )
