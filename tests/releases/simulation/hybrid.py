"""A hybrid on the simulated device: linear attention keeps a state for each token of a step, in blocks of its own.

The state of a request folds all its tokens, and goes on from that of its last accepted one. So a wrong count of
accepted tokens, a wrong block, or a prompt without its state shows in the tokens. A step that vLLM takes for decoding
reads the builder's own tensors, as a CUDA graph does.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
from linear_graphs import captured, noting, writes_as_for_graphs

from simulation.device import DEVICE, DeviceTensor
from simulation.engine import Engine
from simulation.model import PRIME, Draft, Target, entries_of, greedy, sums
from simulation.shape import BLOCK, DRAFT_LAYER, LAYERS, LONGEST
from simulation.wishes import VOCABULARY

FULL, LINEAR = LAYERS


def folded(state: int, entries: Any) -> int:
    for entry in entries.tolist():
        state = (state * 31 + entry) % PRIME
    return state


def _seen(keys: Any, first: int) -> int:
    return sums(keys, first)[0] * 31 % PRIME % VOCABULARY


def answer(prompt: list[int], count: int, stop: int) -> list[int]:
    """The right tokens after a prompt."""
    return greedy(prompt, count, stop, LONGEST, following=lambda keys: (_seen(keys, 0) + folded(0, keys)) % VOCABULARY)


class HybridTarget(Target):
    """The target model, with a layer of attention and one of linear attention."""

    builder: Any
    decodes: list[bool]
    """Of each step whether vLLM took it for decoding."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states = np.zeros(len(self.cache[0]), dtype=np.int64)

    def __call__(self, input_ids: DeviceTensor, positions: DeviceTensor, **kwargs: Any) -> DeviceTensor:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        attention, linear = metadata[FULL], metadata[LINEAR]
        if self.decodes[-1]:
            linear = captured(self.builder, linear, attention.common["num_reqs"])
        hidden: DeviceTensor = self._forward("target", input_ids, positions, 8, [attention])
        counts = linear.num_prefills + linear.num_decodes, linear.num_spec_decodes
        tensors = {name: value for name, value in vars(linear).items() if isinstance(value, DeviceTensor)}
        self.gpu.kernel(self._fold, input_ids, positions, tensors, counts, hidden)
        return hidden

    def _next(self, keys: Any) -> int:
        return _seen(keys[0], 0)

    def _fold(self, ids: Any, positions: Any, linear: Mapping[str, Any], counts: tuple[int, int], hidden: Any) -> None:
        entries = entries_of(ids.numpy().astype(np.int64), positions.numpy())
        plain, drafting = counts
        for row in range(drafting):
            blocks = linear["spec_state_indices_tensor"][row].tolist()
            tokens = self._tokens(linear, "spec", row, listed=plain > 0)
            state = self._state(blocks[int(linear["num_accepted_tokens"][row]) - 1])
            for block, token in zip(blocks, tokens, strict=False):
                state = self._go_on(state, entries, token, hidden)
                self._keep(block, state)
        for row in range(plain):
            block = int(linear["non_spec_state_indices_tensor"][row])
            tokens = self._tokens(linear, "non_spec", row, listed=drafting > 0)
            # vLLM takes a first chunk of one token for decoding, which would go on from what is in its block.
            goes_on = linear["has_initial_state"][row] if "has_initial_state" in linear else positions[tokens[0]] > 0
            state = self._state(block) if goes_on else 0
            for token in tokens:
                state = self._go_on(state, entries, token, hidden)
            self._keep(block, state)

    @staticmethod
    def _tokens(linear: Mapping[str, Any], kind: str, row: int, *, listed: bool) -> list[int]:
        """The places of a row's tokens in the batch."""
        first, end = linear[f"{kind}_query_start_loc"][row : row + 2].tolist()
        found: list[int] = linear[f"{kind}_token_indx"][first:end].tolist() if listed else [*range(first, end)]
        return found

    @staticmethod
    def _go_on(state: int, entries: Any, token: int, hidden: Any) -> int:
        state = folded(state, entries[token : token + 1])
        hidden[token, 0] = (int(hidden[token, 0]) + state) % VOCABULARY
        return state

    def _state(self, block: int) -> int:
        return int(self.states[block]) if block > 0 else 0

    def _keep(self, block: int, state: int) -> None:
        if block > 0:  # the kernels leave the null block alone
            self.states[block] = state


class HybridDraft(Draft):
    """Right, unless its coin says otherwise; it keeps no states."""

    def _next(self, keys: Any) -> int:
        seen = _seen(keys[0], 1) + folded(0, keys[0])
        return (seen if sums(keys[0], 1)[0] % 97 >= self.wrong else seen + 1) % VOCABULARY


def _hybrids() -> Any:
    from vllm.config import ModelConfig

    return mock.patch.object(ModelConfig, "is_hybrid", True)


class HybridEngine(Engine):
    """The engine of a hybrid; its shape has `states`."""

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        # The configuration is made for a model that is no hybrid.
        with super()._active(), _hybrids() if hasattr(self, "config") else contextlib.nullcontext():
            yield

    def _make_runner(self, runner_class: Any) -> None:
        with _hybrids():
            super()._make_runner(runner_class)
        runner, decodes = self.runner, list[bool]()
        runner.model.builder, runner.model.decodes = self._linear, decodes
        runner.cudagraph_dispatcher.dispatch = noting(runner.cudagraph_dispatcher.dispatch, decodes)
        runner.reorder_batch_threshold = self.shape.drafts + 1

    def _target(self) -> Any:
        return HybridTarget(self.gpu, self.shape.blocks * BLOCK, BLOCK, [FULL], self._saw)

    def _draft(self) -> Any:
        return HybridDraft(self.gpu, self.shape.blocks * BLOCK, BLOCK, [DRAFT_LAYER], self._saw)

    def _builder(self, spec: Any) -> Any:
        if not hasattr(spec, "num_speculative_blocks"):
            return super()._builder(spec)
        module: Any = importlib.import_module("vllm.v1.attention.backends.gdn_attn")
        self.config.compilation_config.max_cudagraph_capture_size = None  # else its tensors have no room
        self._linear = module.GDNAttentionMetadataBuilder(spec, [LINEAR], self.config, DEVICE)
        writes_as_for_graphs(self._linear)
        return self._linear
