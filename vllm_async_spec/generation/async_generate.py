"""Asynchronous `generate` for transformers: transformers' own loop, with stopping criteria that do not wait.

The loop is transformers' unchanged `_sample`. It receives an `AsyncStoppingCriteriaList`, and its output is cropped.
There are two ways in. `model.generate(custom_generate=generate)` serves one call. After `enable()`, a
`GenerationConfig(async_stopping_criteria=True)` has the same effect.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
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
_REMEDY = f"leave out custom_generate or {_SWITCH} to use transformers' own loop"


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
        model_kwargs: passed on.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: the mode is not greedy search or sampling; or transformers got an argument that it does not pass to
            a `custom_generate` function; or this package's loop does not support the call.
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
    """Make every transformers model honour `GenerationConfig(async_stopping_criteria=True)`.

    A second call does nothing. The configuration may also set `async_stopping_poll_every` and
    `async_stopping_max_in_flight`; both default to 1.
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
"""The changes of `enable`, until `disable` undoes them."""
_REFUSED = {"_beam_search": GenerationMode.BEAM_SEARCH, "_assisted_decoding": GenerationMode.ASSISTED_GENERATION}
_OTHER_STATES = ("cache_params", "state", "mems", "past_buckets_states")
_MARKS_GIVEN_CACHES = Version(transformers.__version__) >= Version("5.17")
"""Whether transformers sets `_is_user_defined` on a cache that the caller passed. No attribute of its own shows it."""


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
    """Run `loop`, transformers' `_sample`, asynchronously if extra steps can be undone exactly, else unchanged."""
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
    """The reason why the loop must wait for each step's flags; None if it need not."""
    if kwargs.get("streamer") is not None:
        return "a streamer reads each token on the host"
    if kwargs.get("synced_gpus"):
        return "synced_gpus makes all ranks agree on the end of each step"
    if not _cache_outlives(generation_config, kwargs):
        return None
    if generation_config.use_cache and kwargs.get("past_key_values") is None:
        return "the model makes its own cache, so it is unknown whether that cache can be cropped"
    # The model is never fed the last token. With `inputs_embeds`, `max_length` does not count the prompt.
    longest = stopping_criteria.max_length
    tokens = None if longest is None or kwargs.get("inputs_embeds") is not None else longest - 1
    return why_not_croppable(kwargs.get("past_key_values"), tokens)


def _cache_outlives(generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the caller can see the cache after generation. Before 5.17 any cache may be the caller's."""
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
        raise ValueError(f"asynchronous stopping supports greedy search and sampling, not {name}; {_REMEDY}")


def _refuse_arguments_that_transformers_drops() -> dict[str, Any]:
    """Refuse arguments that `model.generate` accepts but does not pass to a `custom_generate` function.

    Only the frame of `generate` still holds them. If the caller is another function, nothing is refused.

    Returns:
        The model arguments of `model.generate`; transformers 4.57 does not mark which ones its caller passed.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "generate":
        return {}
    if frame.f_locals.get("assistant_model") is not None:
        _refuse_mode(GenerationMode.ASSISTED_GENERATION)
    for name in ("streamer", "synced_gpus"):
        if frame.f_locals.get(name):
            raise ValueError(
                f"transformers passes no {name} to a custom_generate function; "
                f"call vllm_async_spec.generation.enable() and set {_SWITCH}=True in the GenerationConfig"
            )
    given: dict[str, Any] = frame.f_locals.get("kwargs") or {}
    return given
