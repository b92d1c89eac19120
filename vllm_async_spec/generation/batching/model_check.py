"""Checks whether a model can be batched continuously, and finds its layers' shapes by calling the model once."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention_function import ModelError, Probe, at_work
from vllm_async_spec.generation.batching.paged_cache import LayerShape
from vllm_async_spec.generation.batching.request import BatcherError
from vllm_async_spec.generation.rotary import rope_types

_DEFAULT_DRAFTS = 4
_DEFAULT_LENGTH = 2048
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CHANGING_ROPE = ("dynamic", "longrope")
_CHANGE_GREEDY_TOKENS = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "watermarking_config": None,
}
"""Entries of a `GenerationConfig`, and besides None the value with which each changes nothing."""


def refuse_autocast(device: torch.device) -> None:
    """Refuse to work under autocast: the driver's thread is not under it, and the cache has the model's dtype.

    Raises:
        BatcherError: autocast is on in this thread, for this type of device.
    """
    if torch.is_autocast_enabled(device.type):
        raise BatcherError(
            f"torch.autocast is on for {device.type}; leave its block, or convert the model, as in "
            "model.to(torch.bfloat16)"
        )


def check_attention(model: Any) -> None:
    """Check that the model can attend through this package's function.

    Raises:
        ModelError: the model is compiled as a whole, it has an encoder, or its attention bypasses the registry.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            "the model is compiled by torch.compile; give the model that was compiled, and torch_compile=True in the "
            "BatcherConfig"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder; only decoder-only models can be batched")
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{name} does not use transformers' AttentionInterface, so its attention can't read a paged cache; "
            "use model.generate"
        )


def layers_of(model: Any, max_length: int) -> dict[int, LayerShape]:
    """Shape of each layer, by index, of a model that `take_over` has prepared, for sequences of this length.

    Raises:
        ModelError: the model can't be batched.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    _check_configuration(model, name, config)
    probe = Probe()
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode(), at_work(probe):
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    expected = getattr(config, "num_hidden_layers", len(probe.layers))
    if not probe.layers or len(probe.layers) != expected:
        raise ModelError(
            f"{len(probe.layers)} of the {expected} layers of {name} attend through transformers' AttentionInterface; "
            "all must, because the paged cache holds no state of other layers"
        )
    windows = [layer.sliding_window for layer in probe.layers.values()]
    if _has_window(config, max_length) and not any(windows):
        raise ModelError(f"{name} has sliding layers, and passes no window to its attention; use model.generate")
    return probe.layers


def drafts_of(model: Any, draft_model: Any, given: int | None) -> int:
    """Number of drafts of each sequence in a step: the caller's, if given; 0 without a draft model.

    Raises:
        ModelError: the draft model is the model, has another vocabulary, or is on another device.
        ValueError: there is no draft model, and drafts were given.
    """
    if draft_model is None:
        if given is not None:
            raise ValueError(
                f"draft_tokens is {given} and there is no draft_model; give a draft_model, or leave out draft_tokens"
            )
        return 0
    if draft_model is model:
        raise ModelError("the draft model is the model itself, which would gain nothing; give a smaller model")
    sizes = [each.get_input_embeddings().num_embeddings for each in (draft_model, model)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the draft model's vocabulary has {sizes[0]} tokens and the model's has {sizes[1]}; give a draft model "
            "that shares the model's tokenizer"
        )
    if draft_model.device != model.device:
        raise ModelError(
            f"the draft model is on {draft_model.device} and the model on {model.device}; move both to one device"
        )
    return _DEFAULT_DRAFTS if given is None else given


def max_length_of(models: Sequence[Any], given: int | None) -> int:
    """Maximum tokens of a sequence, prompt and generated: `given`, or a default that all models allow.

    Raises:
        ValueError: one of the models has fewer positions.
    """
    known = [positions for each in models if (positions := _positions_of(each)) is not None]
    most = min(known, default=None)
    if given is None:
        return _DEFAULT_LENGTH if most is None else min(_DEFAULT_LENGTH, most)
    if most is not None and given > most:
        fewest = next(each for each in models if _positions_of(each) == most)
        whose = "the model" if fewest is models[0] else "the draft model"
        raise ValueError(f"max_length is {given} and {whose} has {most} positions; give at most {most}")
    return given


def takes_logits_to_keep(model: Any) -> bool:
    """Whether the model takes `logits_to_keep`, which selects the tokens that get logits."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def ends_of_sequence(model: Any, given: int | Sequence[int] | None) -> list[int]:
    """Tokens that end a sequence: `given`, or those of the model's generation configuration, if any.

    Raises:
        ValueError: one is no token id, or one of `given` is none of the model's.
    """
    ids: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None) if given is None else given
    if ids is None:
        return []
    try:
        found = [operator.index(each) for each in ([ids] if isinstance(ids, Integral) else ids)]
    except TypeError:
        raise ValueError(f"eos_token_id is {ids!r}; it must be a token id, or a sequence of these") from None
    tokens = range(model.get_input_embeddings().num_embeddings)
    for each in found:
        if given is not None and each not in tokens:
            raise ValueError(
                f"eos_token_id has {each}; the model's vocabulary is 0 to {len(tokens) - 1}, and [] ends no sequence"
            )
    return [each for each in found if each in tokens]


def refuse_other_tokens(model: Any) -> None:
    """Refuse a model whose own generation configuration changes the tokens of its greedy `generate`.

    Raises:
        ModelError: an entry does; the message names it.
    """
    own = getattr(model, "generation_config", None)
    for name, without in _CHANGE_GREEDY_TOKENS.items():
        value = getattr(own, name, None)
        if value is not None and value != without and value != []:
            raise ModelError(
                f"the model's generation_config has {name}={value!r}, which the batcher does not apply; set "
                f"model.generation_config.{name} = None for the model's own tokens, or use model.generate"
            )


def _positions_of(model: Any) -> int | None:
    """Maximum tokens of a sequence for this model; None if its configuration names no limit."""
    positions: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if positions is None or positions < 1 else positions  # -1 is XLNet's word for no limit


def _check_configuration(model: Any, name: str, config: Any) -> None:
    if model.training:
        raise ModelError(f"{name} is in training mode, so dropout is active; call the model's eval()")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} takes no position_ids, so sequences can't share a batch; use model.generate")
    if unknown := sorted(_layer_types(config) - _LAYER_TYPES):
        raise ModelError(
            f"{name} has layers of type {', '.join(unknown)}; only {', '.join(sorted(_LAYER_TYPES))} can be batched"
        )
    if not _layer_types(config) and any(getattr(each, "_is_stateful", False) for each in model.modules()):
        raise ModelError(f"{name} has a recurrent state, which the paged cache does not hold; use model.generate")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"{name} attends within chunks of {config.attention_chunk_size} tokens, which no adapter supports"
        )
    for _, kind in rope_types(model):
        if kind in _CHANGING_ROPE:
            raise ModelError(
                f"{name} has rotary embeddings of type {kind}, which depend on the longest sequence of the batch"
            )


def _has_window(config: Any, max_length: int) -> bool:
    """Whether layers need a sliding window, which some models make in their mask only."""
    if types := _layer_types(config):
        return "sliding_attention" in types
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window is not None and window < max_length


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())
