"""The device work of one generation: the prefill, and the decode steps, captured or not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from vllm_async_spec.generation.cache_argument import CACHE
from vllm_async_spec.generation.decode_buffers import DecodeBuffers
from vllm_async_spec.generation.decode_tail import DecodeTail
from vllm_async_spec.generation.rollback import generator_state, set_generator_state
from vllm_async_spec.generation.step_graphs import StepGraphs
from vllm_async_spec.generation.stopping_criteria import with_verdict
from vllm_async_spec.generation.workspace import Workspace
from vllm_async_spec.patching import temporarily

_RAW = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Decode:
    """Runs the device work of one `generate` call, in the buffers of a workspace.

    Args:
        model: a `GenerationMixin`.
        tail: chooses the tokens after each forward.
        workspace: holds the buffers, and the cache if it is static.
        kwargs: the model arguments from transformers, with the cache.
        positions: from `first_positions`.
        compile_with: arguments of `torch.compile` for the forward of a step, or None.
    """

    def __init__(
        self,
        model: Any,
        tail: DecodeTail,
        workspace: Workspace,
        kwargs: dict[str, Any],
        *,
        positions: torch.Tensor | None,
        compile_with: dict[str, Any] | None,
    ) -> None:
        self.tail = tail
        self.buffers: DecodeBuffers = workspace.buffers
        self._model = model
        self._workspace = workspace
        self._kwargs = kwargs if workspace.cache is None else {**kwargs, CACHE: workspace.cache}
        self._forward: Callable[..., Any] = (
            model if compile_with is None else torch.compile(model.forward, dynamic=False, **compile_with)
        )
        self._compiled = compile_with is not None
        self._first_positions = positions
        self._tells_cache_position = _tells_cache_position(model)

    def begin(self, prompts: torch.Tensor, generation_config: Any) -> None:
        """Run the prefill of prompts, int64 (batch, length), and settle the first tokens into slot 0.

        Raises:
            ValueError: the model's forward failed.
        """
        if self._workspace.cache is not None:
            self._workspace.cache.reset()
        kwargs = dict(self._kwargs)
        self.buffers.begin(prompts, kwargs.get("attention_mask"), self._first_positions)
        if self._tells_cache_position:
            kwargs = self._model._get_initial_cache_position(prompts.shape[1], prompts.device, kwargs)
        with self._errors_in_a_sentence():
            if hasattr(self._model, "_prefill"):
                outputs = self._model._prefill(prompts, generation_config, kwargs)
            else:
                outputs = self._model(**self._model.prepare_inputs_for_generation(prompts, **kwargs), return_dict=True)
        self.tail.settle(self.buffers, 0, prompts, _last(outputs.logits))
        if self._workspace.cache is None:
            _use_on(kwargs[CACHE], self._workspace.slots.streams)

    def capture(self) -> None:
        """Capture the step of each slot, with its tail if possible. The buffers' contents are lost.

        Raises:
            ValueError: the step does something that no graph can hold.
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
            # The first runs allocate the cache's tensors, load kernels and compile.
            with self._errors_in_a_sentence():
                for slot in (0, 1):
                    self._rewind()
                    step(slot)
            self._workspace.graphs = StepGraphs(self._workspace.slots, step, self._rewind)
            # A graph keeps only tensors from its capture alive, so the workspace keeps this tail's constants.
            self._workspace.read_by_graphs = self.tail.constants
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"a decode step of {type(self._model).__name__} can't be captured in a CUDA graph: {error}; "
                "pass cuda_graphs=False, or load the model with attn_implementation='sdpa' instead of 'eager'"
            ) from error
        finally:
            set_generator_state(state, device)

    def launch(self, slot: int, length: int) -> torch.Tensor | None:
        """Run the forward of a step of `slot` on sequences of `length` tokens; a captured tail runs with it.

        Returns:
            float32 (batch, vocabulary), logits for `settle`; None if a captured tail has settled them.

        Raises:
            ValueError: the model's forward failed.
        """
        if self._workspace.graphs is not None:
            logits = self._workspace.graphs.replay(slot)
            # The slot's next step overwrites what a graph returns.
            return logits.clone() if logits is not None and self.tail.may_keep_logits else logits
        with self._errors_in_a_sentence():
            return self._logits(slot, length)

    def settle(self, slot: int, length: int, logits: torch.Tensor) -> None:
        """Choose and write the tokens of a step of `slot`; `length` as in `launch`."""
        self.tail.settle(self.buffers, slot, self.ids(length), logits)

    def judge(self, slot: int, length: int) -> None:
        """Evaluate the criteria that need more than the last token, and add their flags to those of the step's slot.

        `length` is of the sequences, the step's tokens included.

        Raises:
            ValueError: a criterion's flags have a wrong shape.
        """
        if self.tail.criteria is None:
            return
        flags, ids = self.buffers.finished[slot], self.ids(length)
        finished = flags
        for criterion in self.tail.criteria:
            finished = with_verdict(finished, criterion, ids, None)
        flags.copy_(finished)

    def ids(self, length: int) -> torch.Tensor:
        """int64 (batch, length): a copy of the first `length` tokens of each sequence."""
        return self.buffers.sequences[:, :length].clone(memory_format=torch.contiguous_format)

    @contextlib.contextmanager
    def _errors_in_a_sentence(self) -> Iterator[None]:
        """Name the model and the remedy where its forward raises what no caller can use, such as a bad unpacking.

        Passes on any exception with a class of its own, such as out of memory, because a caller may catch that class.
        """
        try:
            yield
        except Exception as error:
            if type(error) not in _RAW:
                raise
            static = "pass static_cache=False, or " if self._workspace.cache is not None else ""
            raise ValueError(
                f"the forward of {type(self._model).__name__} failed in interleaved generation with "
                f"{type(error).__name__}: {error}; {static}leave out interleaved to use transformers' own loop"
            ) from error

    def _rewind(self) -> None:
        self._workspace.cache.reset()
        self.buffers.rewind()

    def _logits(self, slot: int, length: int | None) -> torch.Tensor:
        """Run the forward of a step; only a growing cache uses `length`."""
        kwargs = dict(self._kwargs)
        buffers = self.buffers
        if kwargs.get("attention_mask") is not None:
            # A static cache uses all columns of the mask. A growing cache gains one column a step.
            kwargs["attention_mask"] = buffers.mask[:, : None if self._workspace.cache is not None else length]
        if self._first_positions is not None:
            kwargs["position_ids"] = buffers.positions
        if self._tells_cache_position:
            kwargs["cache_position"] = buffers.length - 1
        mask = kwargs.get("attention_mask")
        fuses_mask = self._compiled and "attention_mask" in kwargs
        if fuses_mask:
            # Given a 4-D mask, transformers builds none. The compiled forward then builds the mask.
            kwargs["attention_mask"] = buffers.mask[:, None, None]
        with _given_one_token(self._model):
            inputs = self._model.prepare_inputs_for_generation(buffers.tokens[1 - slot], **kwargs)
        if fuses_mask:
            inputs["attention_mask"] = mask
        return _last(self._forward(**inputs, return_dict=True).logits)


def first_positions(model: Any, prompts: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Position ids of the tokens that follow the prompts, as transformers computes them.

    Args:
        model: a `GenerationMixin`; its forward may take position ids.
        prompts: int64 (batch, length).
        kwargs: with `position_ids`, int64 (..., length), in transformers 5; with `attention_mask`, int64
            (batch, length).

    Returns:
        int64 (..., 1), or None if the model receives none.

    Raises:
        ValueError: the model computes them by a rule of its own, in transformers 4.
    """
    given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if given is not None:
        return torch.as_tensor(given[..., -1:] + 1)
    if mask is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    if _tells_cache_position(model) and _prepares_alone(model):
        with_cache_position = model._get_initial_cache_position(prompts.shape[1], prompts.device, dict(kwargs))
        own = model.prepare_inputs_for_generation(prompts, **with_cache_position).get("position_ids")
        if own is None:
            return None
        by_mask = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        if not torch.equal(own, by_mask[:, -own.shape[-1] :]):
            raise ValueError(
                f"interleaved generation takes positions from attention_mask, and {type(model).__name__} has a rule of "
                "its own for them; leave out interleaved to use transformers' own loop"
            )
    return torch.as_tensor(mask.long().sum(-1, keepdim=True))


def _tells_cache_position(model: Any) -> bool:
    """Whether transformers passes cache positions, as in release 4; later the cache counts them."""
    return hasattr(model, "_get_initial_cache_position")


def _prepares_alone(model: Any) -> bool:
    """Whether the model's class prepares a step's inputs without transformers' own code, which makes positions."""
    prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
    shared = inspect.unwrap(GenerationMixin.prepare_inputs_for_generation)
    return prepare is not shared and shared.__name__ not in prepare.__code__.co_names


def _use_on(cache: Any, streams: tuple[Any, ...]) -> None:
    """Tell the allocator that these streams, too, read the tensors of a growing cache.

    The next step replaces these tensors. Their memory must not be reused while a stream still reads it. Tensors from
    steps need no such mark: their memory returns to the step's stream, whose next step waits for every reader.
    """
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    for tensor in held:
        if isinstance(tensor, torch.Tensor):
            for stream in streams:
                tensor.record_stream(stream)


def _last(logits: torch.Tensor) -> torch.Tensor:
    # A copy, as in `_sample`: it frees a prompt's large logits, and processors may write in place.
    return logits[:, -1].to(copy=True, dtype=torch.float32)


@contextlib.contextmanager
def _given_one_token(model: Any) -> Iterator[None]:
    """Keep transformers 4 from reading a position on the host to find the tokens that the cache lacks.

    The input already is the single token that transformers would cut out.
    """
    name = "_cache_dependant_input_preparation"
    if not hasattr(model, name):
        yield
        return
    with temporarily() as changes:
        changes.set(model, name, lambda input_ids, inputs_embeds, cache_position: (inputs_embeds, input_ids))
        yield
