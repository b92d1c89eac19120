"""This package's decode loop for transformers' `generate`: its options, what it refuses, and one generation."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList

from vllm_async_spec.generation import decode_loops
from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.compiling import Compile, compile_arguments
from vllm_async_spec.generation.decode import Decode, first_positions
from vllm_async_spec.generation.decode_buffers import DecodeBuffers, full_static_cache, layer_beside_keys_and_values
from vllm_async_spec.generation.decode_tail import DecodeTail
from vllm_async_spec.generation.flag_channel import FinishTracker, FlagChannel, OpenChannel, open_channel
from vllm_async_spec.generation.graph_key import frozen_in_graphs, why_not_captured
from vllm_async_spec.generation.rollback import RngHistory, may_draw, why_steps_show
from vllm_async_spec.generation.stopping_criteria import HostCriteria, check_pace, fall_back
from vllm_async_spec.generation.workspace import Workspace, in_use, keep, kept, memory_report, release, slots_of

_KINDS: dict[str, tuple[type, ...]] = {"torch_compile": (object,), "memory_limit": (int, type(None))}
"""Types of the options that are not bool; `compile_arguments` checks the first."""


@dataclass(frozen=True, slots=True)
class DecodeSwitches:
    """Options of `generate(interleaved=...)`.

    Raises:
        ValueError: two of them contradict each other, or a value is out of range.
    """

    interleaved: bool
    """Whether a step is launched before the previous step's stop flags are read."""
    static_cache: bool = True
    """Whether keys and values use memory that is allocated once."""
    cuda_graphs: bool = True
    """Whether a step is captured and then replayed by one launch."""
    torch_compile: Compile = False
    """Whether the model's forward is compiled; a name chooses the backend, a dict has arguments of `torch.compile`."""
    memory_limit: int | None = None
    """Bytes that may stay allocated between generations; None means no limit."""

    @classmethod
    def of(cls, interleaved: bool | None, **chosen: Any) -> DecodeSwitches | None:
        """The switches of a call; None if the call uses transformers' own loop.

        Raises:
            ValueError: as the class raises it, or an option was given without `interleaved`.
        """
        given = {name: value for name, value in chosen.items() if value is not None}
        if interleaved is None:
            if given:
                name, value = next(iter(given.items()))
                raise ValueError(
                    f"{name} is {value!r}, and transformers' own loop has no such option; "
                    "pass interleaved=True or interleaved=False too"
                )
            return None
        static = bool(given.get("static_cache", True))
        return cls(interleaved, **{"cuda_graphs": static, **given})

    @property
    def compiles_with(self) -> dict[str, Any] | None:
        """Arguments of `torch.compile`; None if nothing is compiled."""
        return compile_arguments(self.torch_compile)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = _KINDS.get(each.name, (bool,))
            if not isinstance(value, kinds):
                raise ValueError(f"{each.name} is {value!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")
        if self.cuda_graphs and not self.static_cache:
            raise ValueError(
                "cuda_graphs needs static_cache, because a captured step writes to the same memory each time; "
                "leave out one of the two"
            )
        if self.compiles_with is not None and not self.static_cache:
            raise ValueError(
                "torch_compile needs static_cache, because with any other cache each length is compiled again; "
                "leave out one of the two"
            )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ValueError(f"memory_limit is {self.memory_limit}; it must be at least 1 byte")


_REMEDY = "leave out interleaved to use transformers' own loop"
_ALIGNED = 64
"""On a GPU, a static cache holds a multiple of this many tokens."""
_PREPARED = {"attention_mask", "position_ids", CACHE, "cache_position"}
"""Arguments that each step prepares anew; all others must be the same at each step."""


def why_not_interleaved(
    model: Any, generation_config: Any, switches: DecodeSwitches, kwargs: dict[str, Any]
) -> str | None:
    """The reason why this loop can't run a model at all, with the arguments from transformers; None if it can."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"interleaved generation supports only decoder-only models, and {name} has an encoder"
    cache = kwargs.get(CACHE)
    # From transformers 5.24 on, a model that keeps only states has a cache, too.
    keeps_keys = cache is not None and not all(getattr(cache, "is_linear", None) or [False])
    if generation_config.use_cache and not keeps_keys:
        return f"interleaved generation needs a cache of keys and values, and transformers makes none for {name}"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return f"interleaved generation runs on one device, and {name} is spread over several"
    if switches.static_cache and not model._can_compile_fullgraph:
        return f"{name} does not support a static cache, and interleaved generation needs static_cache=False for that"
    if switches.static_cache and (layer := layer_beside_keys_and_values(model)) is not None:
        return (
            f"the static cache of {name} has a {layer}, which keeps more than keys and values, and interleaved "
            "generation needs static_cache=False for that"
        )
    return None


def decode_interleaved(
    model: Any,
    prompts: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    switches: DecodeSwitches,
    poll_every: int,
    max_in_flight: int,
    open_channel: OpenChannel,
    strict: bool,
    given: dict[str, Any],
    **kwargs: Any,
) -> torch.Tensor:
    """Decode greedily or by sampling with the loop that `switches` select; see `generate` for the other arguments.

    `why_not_interleaved` must give no reason. `kwargs` are what transformers made of `given`, the caller's arguments
    for the model.

    Returns:
        int64 (batch, length), what `model.generate` returns.

    Raises:
        ValueError: the call needs something that this loop does not support.
    """
    _refuse(model, generation_config, switches, given, kwargs)
    check_pace(poll_every, max_in_flight)
    device = prompts.device
    switches = _possible(model, switches, device, strict=strict)
    compile_with = switches.compiles_with
    host = HostCriteria(stopping_criteria)
    pads = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
    tail = DecodeTail(
        logits_processor if logits_processor is not None else LogitsProcessorList(),
        host.rest,
        do_sample=bool(generation_config.do_sample),
        pad=generation_config._pad_token_tensor if pads else None,
        device=device,
        compile_with=compile_with,
    )
    # Buffers that outlive the call must not be inference tensors, which can't be written later.
    with in_use(model), slots_of(device).turn(), torch.inference_mode(False), torch.no_grad():
        # A criterion of the caller replaces that of `max_length`.
        longest = max(generation_config.max_length, stopping_criteria.max_length or 0)
        positions = first_positions(model, prompts, kwargs)
        workspace = _workspace(model, tail, prompts, longest, switches, kwargs, positions)
        decode = Decode(model, tail, workspace, kwargs, positions=positions, compile_with=compile_with)
        with _optimised(model):
            if _captures(switches, device) and workspace.graphs is None and longest > prompts.shape[1] + 1:
                decode.capture()
            decode.begin(prompts, generation_config)
            keep(model, workspace)
            _bound(model, switches.memory_limit)
            channel = None
            if switches.interleaved:
                flags = poll_every + tail.do_sample
                channel = _channel(workspace, device, flags, max_in_flight, open_channel)
            length = prompts.shape[1] + 1
            if channel is None:
                length = decode_loops.synchronous(decode, host, length)
            else:
                draws = may_draw(model, generation_config.do_sample, logits_processor, stopping_criteria)
                length = decode_loops.interleaved(
                    decode,
                    host,
                    length,
                    slots=workspace.slots,
                    channel=channel,
                    watch=FinishTracker(
                        channel, device, width=poll_every, in_flight=max_in_flight, can_fail=tail.do_sample
                    ),
                    trail=RngHistory(device, poll_every * (max_in_flight + 1)) if draws else None,
                )
        return decode.ids(length)


def _possible(model: Any, switches: DecodeSwitches, device: torch.device, *, strict: bool) -> DecodeSwitches:
    """The switches without what the model does not allow; a warning gives each reason, and that of the device."""
    if device.type != "cuda":
        fall_back(
            f"streams, CUDA graphs and asynchronous stop flags need a CUDA device, and input_ids are on {device.type}",
            strict=strict,
        )
    if switches.interleaved and (why := why_steps_show(model)) is not None:
        fall_back(why, strict=strict)
        switches = replace(switches, interleaved=False)
    if _captures(switches, device) and (why := why_not_captured(model)) is not None:
        # Never an error: without graphs, steps still don't wait for each other's flags.
        fall_back(why, strict=False, instead="steps run without CUDA graphs")
        switches = replace(switches, cuda_graphs=False)
    return switches


def _refuse(
    model: Any, generation_config: Any, switches: DecodeSwitches, given: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    """Refuse arguments that this loop does not support, or that transformers would answer differently."""
    asked = generation_config.cache_implementation or ""
    for reason, applies in (
        ("returns only tokens, and return_dict_in_generate is set", generation_config.return_dict_in_generate),
        ("needs a cache, and use_cache is off", not generation_config.use_cache),
        ("makes its own cache, and a cache was passed", given.get(CACHE) is not None),
        (
            f"can't use the cache that cache_implementation={asked!r} selects",
            any(word in asked for word in ("offloaded", "quantized", "paged")),
        ),
        ("makes its own cache, and cache_position was passed", given.get("cache_position") is not None),
        (
            "prefills prompts in one step, and prefill_chunk_size is set",
            generation_config.prefill_chunk_size is not None,
        ),
        (
            "can't extend position_ids the way this version of transformers does, and position_ids were passed",
            given.get("position_ids") is not None and hasattr(model, "_get_initial_cache_position"),
        ),
    ):
        if applies:
            raise ValueError(f"interleaved generation {reason}; {_REMEDY}")
    for each, value in kwargs.items():
        if each not in _PREPARED and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            raise ValueError(f"interleaved generation gives the model only tokens, and {each} was passed; {_REMEDY}")
    if switches.static_cache and asked == "dynamic":
        raise ValueError(
            "static_cache and cache_implementation='dynamic' contradict each other; leave out one of the two"
        )


def _workspace(
    model: Any,
    tail: DecodeTail,
    prompts: torch.Tensor,
    longest: int,
    switches: DecodeSwitches,
    kwargs: dict[str, Any],
    positions: torch.Tensor | None,
) -> Workspace:
    """The model's kept workspace if it fits the call; else a new one, after the kept one was freed."""
    device = prompts.device
    shape = (1,) if positions is None else tuple(positions.shape)
    reuse_key: list[Any] = [
        device,
        len(prompts),
        switches.static_cache,
        model.config._attn_implementation,
        model.training,
        [each.dtype for each in model.parameters()],
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        shape,
        kwargs.get("attention_mask") is None,
        sorted((name, value) for name, value in kwargs.items() if name not in _PREPARED),
    ]
    if _captures(switches, device):
        # A graph reads weights by address.
        weights = [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
        reuse_key += [tail.signature(), switches.torch_compile, weights, *frozen_in_graphs(model)]
    found = kept(model, reuse_key, longest)
    if found is not None:
        return found
    release(model)
    cache, columns = None, longest
    if switches.static_cache:
        # The model is never fed the last token. Attention kernels copy a mask whose rows are not aligned.
        columns = longest - 1 if device.type != "cuda" else _ALIGNED * math.ceil((longest - 1) / _ALIGNED)
        cache = full_static_cache(model, columns)
    buffers = DecodeBuffers.allocate(len(prompts), longest, columns, shape, device)
    return Workspace(reuse_key, longest, buffers, cache, slots_of(device))


def _bound(model: Any, limit: int | None) -> None:
    """Free the model's workspace and raise `ValueError` if it exceeds the limit."""
    if limit is None:
        return
    report = memory_report(model)
    if report is not None and report.total > limit:
        release(model)
        raise ValueError(report.over(limit))


def _captures(switches: DecodeSwitches, device: torch.device) -> bool:
    return switches.cuda_graphs and device.type == "cuda"


def _channel(
    workspace: Workspace, device: torch.device, width: int, in_flight: int, opens: OpenChannel
) -> FlagChannel | None:
    """The workspace's channel for this `width` and `in_flight`, or one from the caller's own `open_channel`."""
    if opens is not open_channel:
        return opens(device, width, in_flight)
    if (width, in_flight) not in workspace.channels:
        workspace.channels[width, in_flight] = open_channel(device, width, in_flight)
    channel: FlagChannel | None = workspace.channels[width, in_flight]
    return channel


def _optimised(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which transformers 5 decodes; an empty one for transformers 4."""
    optimise = getattr(model, "_optimize_model_for_decode", None)
    return contextlib.nullcontext() if optimise is None else optimise()
