"""Undoes extra steps, launched after the last row had stopped: tokens, collected outputs, the cache, random draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from vllm_async_spec.generation.graph_key import with_foreign_hook
from vllm_async_spec.generation.rotary import rope_types

# Fields of transformers' outputs with one entry a step; the encoder's fields have one entry a layer.
_PER_STEP = (
    "scores",
    "logits",
    "attentions",
    "hidden_states",
    "decoder_attentions",
    "cross_attentions",
    "decoder_hidden_states",
)


def crop_output(output: Any, steps: int) -> Any:
    """The output of `_sample`, int64 (batch, length) or a dataclass with it as `sequences`, without its last steps.

    `crop_cache` crops the cache.
    """
    if isinstance(output, torch.Tensor):
        return output[:, :-steps].clone(memory_format=torch.contiguous_format)
    output.sequences = crop_output(output.sequences, steps)
    for name in _PER_STEP:
        if collected := output.get(name):
            output[name] = collected[:-steps]
    return output


def why_not_croppable(cache: Any, tokens: int | None) -> str | None:
    """The reason why steps can't be undone in a cache of at most `tokens` tokens, if known; None if they can."""
    if cache is None:
        return None
    if not isinstance(cache, Cache | EncoderDecoderCache):
        return f"the cache is a {type(cache).__name__}, which can't be cropped"
    own = _self_attention(cache)
    for each in (cache, own):
        # A subclass from elsewhere may count tokens in a way that no crop undoes.
        if type(each).__module__ != Cache.__module__:
            return f"the cache is a {type(each).__name__}, which can't be cropped"
    if getattr(own, "offloading", False):
        return f"the {type(own).__name__} is offloaded, and offloaded layers can't be cropped"
    for layer in own.layers:
        kind = type(layer)
        if kind is StaticLayer and tokens is not None and tokens > layer.max_cache_len:
            return f"a StaticLayer has room for {layer.max_cache_len} of up to {tokens} tokens, none for extra steps"
        if kind in (DynamicLayer, StaticLayer):
            continue
        if kind not in (DynamicSlidingWindowLayer, StaticSlidingWindowLayer):
            return f"the cache has a {kind.__name__}, which can't be cropped"
        room = layer.max_cache_len if kind is StaticSlidingWindowLayer else layer.sliding_window - 1
        if tokens is None or tokens > room:
            held = "an unknown number of" if tokens is None else f"up to {tokens}"
            return f"a {kind.__name__} keeps only {room} of {held} tokens, and dropped tokens can't be restored"
    return None


def why_steps_show(model: Any) -> str | None:
    """The reason why an extra step leaves a trace in the model itself, if known; None if it leaves none."""
    for module, kind in rope_types(model):
        # Type longrope chooses its frequencies anew at each step. Type dynamic keeps those of the longest sequence.
        if "dynamic" in kind:
            return (
                f"the {type(module).__name__} is of type {kind}, and an extra step would change its frequencies for "
                "later calls"
            )
    return None


def crop_cache(cache: Any, steps: int) -> None:
    """Undo the last `steps` single-token updates of a cache that `why_not_croppable` allows.

    Raises:
        ValueError: generation added a layer of a kind that can't be cropped.
    """
    if cache is None:
        return
    for layer in _self_attention(cache).layers:
        if isinstance(layer, StaticLayer | DynamicLayer) and not layer.is_initialized:
            continue  # some models never fill a cache that they are given
        if isinstance(layer, StaticLayer):
            _crop_static(layer, steps)
        elif isinstance(layer, DynamicLayer):
            layer.crop(-steps)
        else:
            raise ValueError(f"generation made a {type(layer).__name__}, which can't be cropped; pass another cache")


def _crop_static(layer: Any, steps: int) -> None:
    """Zero the written places in place: compiled graphs keep the address, and 4.57 counts tokens by nonzero keys."""
    length = layer.get_seq_length()
    written = torch.arange(-steps, 0, device=layer.keys.device) + length
    layer.keys.index_fill_(2, written, 0)
    layer.values.index_fill_(2, written, 0)
    for name in ("cumulative_length", "cumulative_length_int"):
        if hasattr(layer, name):
            counter = getattr(layer, name)
            counter -= steps  # in place, if a tensor
            setattr(layer, name, counter)


def _self_attention(cache: Any) -> Any:
    """The part of a cache that grows with each step."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator, uint8, on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Put the device's default generator into a state that `generator_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def may_draw(model: Any, do_sample: bool, *called: Iterable[Any] | None) -> bool:
    """Whether a step may draw random numbers: in sampling, in training, or in code that is not transformers' own.

    `called` are lists of logits processors or stopping criteria.
    """
    if do_sample or any(module.training for module in model.modules()) or with_foreign_hook(model) is not None:
        return True
    return any(is_foreign(each) for some in called for each in some or ())


def is_foreign(called: Any) -> bool:
    """Whether a logits processor or stopping criterion is not transformers' own, so that it may do anything."""
    return not type(called).__module__.startswith("transformers.")


class RngHistory:
    """Remembers the state of a device's default generator after each of the last `steps` steps.

    Reading the state of a CUDA generator does not wait: seed and offset are kept on the host.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._states: deque[tuple[int, torch.Tensor]] = deque(maxlen=steps)

    def mark(self, length: int) -> None:
        """Record the current state for the step that made the sequences `length` tokens long."""
        self._states.append((length, generator_state(self._device)))

    def rewind(self, length: int) -> None:
        """Restore the generator's state after the step that made the sequences `length` tokens long.

        Raises:
            KeyError: the history no longer holds that step.
        """
        set_generator_state(dict(self._states)[length], self._device)
