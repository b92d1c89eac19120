"""The device work of one generation: the prompts' forward, and the steps, captured or not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_async_spec.generation.decode_buffers import DecodeBuffers
from vllm_async_spec.generation.decode_tail import DecodeTail
from vllm_async_spec.generation.rollback import generator_state, set_generator_state
from vllm_async_spec.generation.step_graphs import StepGraphs
from vllm_async_spec.generation.workspace import Workspace
from vllm_async_spec.patching import temporarily


class Decode:
    """What one call of `generate` runs on the device, in the buffers of a workspace.

    Args:
        model: a `GenerationMixin`.
        tail: what follows each forward.
        workspace: its buffers, and its cache where that is static.
        kwargs: what transformers hands to the model, its cache among it.
        compile_with: arguments of `torch.compile` for the forward of a step, or None.
    """

    def __init__(
        self,
        model: Any,
        tail: DecodeTail,
        workspace: Workspace,
        kwargs: dict[str, Any],
        *,
        compile_with: dict[str, Any] | None,
    ) -> None:
        self.tail = tail
        self.buffers: DecodeBuffers = workspace.buffers
        self._model = model
        self._workspace = workspace
        self._kwargs = kwargs if workspace.cache is None else {**kwargs, "past_key_values": workspace.cache}
        self._forward: Callable[..., Any] = (
            model if compile_with is None else torch.compile(model.forward, dynamic=False, **compile_with)
        )
        self._compiled = compile_with is not None
        self._first_positions = first_positions(model, kwargs)
        # transformers 4 tells the model where in the cache to write; later ones let the cache count.
        self._tells_cache_position = hasattr(model, "_get_initial_cache_position")

    def begin(self, prompts: torch.Tensor, generation_config: Any) -> None:
        """Feed the prompts to the model, and settle their first tokens, into slot 0.

        Args:
            prompts: int64 (batch, length).
            generation_config: handed on.
        """
        if self._workspace.cache is not None:
            self._workspace.cache.reset()
        kwargs = dict(self._kwargs)
        self.buffers.begin(prompts, kwargs.get("attention_mask"), self._first_positions)
        if self._tells_cache_position:
            kwargs = self._model._get_initial_cache_position(prompts.shape[1], prompts.device, kwargs)
        if hasattr(self._model, "_prefill"):
            outputs = self._model._prefill(prompts, generation_config, kwargs)
        else:
            outputs = self._model(**self._model.prepare_inputs_for_generation(prompts, **kwargs), return_dict=True)
        self.tail.settle(self.buffers, 0, prompts, _last(outputs.logits))
        if self._workspace.cache is None:
            _use_on(kwargs["past_key_values"], self._workspace.slots.streams)

    def capture(self) -> None:
        """Capture the step of each slot, the tail too where that can be; what the buffers hold is lost.

        Raises:
            ValueError: the step does something that a graph can't repeat.
        """
        device = self.buffers.length.device
        whole = self.tail.signature() is not None

        def step(slot: int) -> torch.Tensor | None:
            logits = self._logits(slot, None)
            if not whole:
                return logits
            self.tail.settle(self.buffers, slot, self.buffers.sequences, logits)
            return None

        state = generator_state(device)
        try:
            # The first runs make the cache's tensors, load kernels and compile.
            for slot in (0, 1):
                self._rewind()
                step(slot)
            self._workspace.graphs = StepGraphs(self._workspace.slots, step, self._rewind)
            # A graph keeps alive only what was made in its capture, and this tail goes with the call.
            self._workspace.read_by_graphs = self.tail.constants
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"a decode step of {type(self._model).__name__} can't be captured in a CUDA graph: {error}; "
                "pass cuda_graphs=False, or, if its attention is 'eager', load it with attn_implementation='sdpa'"
            ) from error
        finally:
            set_generator_state(state, device)

    def launch(self, slot: int, length: int) -> torch.Tensor | None:
        """Run the forward of a step of `slot`, whose sequences have `length` tokens, and its tail where it is captured.

        Returns:
            float32 (batch, vocabulary), logits for `settle`; None where that is done.
        """
        graphs = self._workspace.graphs
        return self._logits(slot, length) if graphs is None else graphs.replay(slot)

    def settle(self, slot: int, length: int, logits: torch.Tensor) -> None:
        """Choose and write the tokens of a step of `slot`; `length` as in `launch`."""
        self.tail.settle(self.buffers, slot, self.ids(length), logits)

    def judge(self, slot: int, length: int) -> None:
        """Add to the flags of `slot` those of the criteria that look at more than the last token.

        Args:
            slot: of the step.
            length: of the sequences, with its tokens.
        """
        if self.tail.criteria is not None:
            flags = self.buffers.finished[slot]
            flags |= self.tail.criteria(self.ids(length), None)

    def ids(self, length: int) -> torch.Tensor:
        """int64 (batch, length): the first tokens of each sequence, copied."""
        return self.buffers.sequences[:, :length].clone(memory_format=torch.contiguous_format)

    def _rewind(self) -> None:
        self._workspace.cache.reset()
        self.buffers.rewind()

    def _logits(self, slot: int, length: int | None) -> torch.Tensor:
        """The forward of a step; `length` only matters to a cache that grows."""
        kwargs = dict(self._kwargs)
        buffers = self.buffers
        if kwargs.get("attention_mask") is not None:
            # A static cache has the columns of the mask; another grows by one a step.
            kwargs["attention_mask"] = buffers.mask[:, : None if self._workspace.cache is not None else length]
        if self._first_positions is not None:
            kwargs["position_ids"] = buffers.positions
        if self._tells_cache_position:
            kwargs["cache_position"] = buffers.length - 1
        mask = kwargs.get("attention_mask")
        fuses_mask = self._compiled and "attention_mask" in kwargs
        if fuses_mask:
            # Given one of four dimensions transformers makes none, and the model makes it in what is compiled.
            kwargs["attention_mask"] = buffers.mask[:, None, None]
        with _given_one_token(self._model):
            inputs = self._model.prepare_inputs_for_generation(buffers.tokens[1 - slot], **kwargs)
        if fuses_mask:
            inputs["attention_mask"] = mask
        return _last(self._forward(**inputs, return_dict=True).logits)


def first_positions(model: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Position ids of the tokens that follow the prompts, as transformers would have them.

    Args:
        model: whose forward may take position ids, or not.
        kwargs: with `position_ids`, int64 (..., length), in transformers 5; with `attention_mask`, int64
            (batch, length).

    Returns:
        int64 (..., 1), or None where the model is given none.
    """
    given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if given is not None:
        return torch.as_tensor(given[..., -1:] + 1)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return torch.as_tensor(mask.long().sum(-1, keepdim=True)) if takes and mask is not None else None


def _use_on(cache: Any, streams: tuple[Any, ...]) -> None:
    """Tell the allocator that what a growing cache holds so far is read on these streams too.

    The next step replaces it, and its memory must not be another's while it is read. What steps allocate needs no such
    word: it goes back to the stream of a step, where the next step but one waits for whoever reads it.
    """
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    for tensor in held:
        if isinstance(tensor, torch.Tensor):
            for stream in streams:
                tensor.record_stream(stream)


def _last(logits: torch.Tensor) -> torch.Tensor:
    # A copy, as in `_sample`: those of a prompt may be large, and processors may write in place.
    return logits[:, -1].to(copy=True, dtype=torch.float32)


@contextlib.contextmanager
def _given_one_token(model: Any) -> Iterator[None]:
    """Keep transformers 4 from reading a position on the host, to find out which tokens the cache has not seen.

    The input is the one token that it would cut out.
    """
    name = "_cache_dependant_input_preparation"
    if not hasattr(model, name):
        yield
        return
    with temporarily() as changes:
        changes.set(model, name, lambda input_ids, inputs_embeds, cache_position: (inputs_embeds, input_ids))
        yield
