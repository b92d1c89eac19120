"""Structured output: a grammar that vLLM's manager asks for masks, and the kernel that applies them.

What the grammar forbids depends on the token before and on the number of tokens. So a mask of another row or draft,
or one that is a token early, shows.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from simulation.device import Gpu
from simulation.wishes import VOCABULARY, Wishes

_BITS = 32


class Grammar(StructuredOutputGrammar):
    def __init__(self, wishes: Wishes) -> None:
        self._wishes, self._said = wishes, list[int]()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if len(self.validate_tokens(tokens)) < len(tokens):
            return False
        self._said += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        for count, token in enumerate(tokens):
            if not self._wishes.allowed([*self._said, *tokens[:count]])[token]:
                return tokens[:count]
        return tokens

    def rollback(self, num_tokens: int) -> None:
        del self._said[len(self._said) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """A bit for each token that may come next: (rows, vocabulary / 32) int32."""
        bits = np.packbits(self._wishes.allowed(self._said), bitorder="little").view(np.int32)
        bitmask[batch_index] = torch.from_numpy(bits)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self._said.clear()


def manager(config: Any) -> Any:
    from vllm.v1.structured_output import StructuredOutputManager

    made = StructuredOutputManager(config)

    def allocate(rows: int) -> torch.Tensor:
        return torch.full((rows, VOCABULARY // _BITS), -1, dtype=torch.int32)

    made.backend = SimpleNamespace(allocate_token_bitmask=allocate)
    return made


@contextlib.contextmanager
def masking(gpu: Gpu) -> Iterator[None]:
    from vllm.v1.structured_output import utils

    def run(logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None) -> None:
        rows = torch.arange(len(logits)) if indices is None else indices.long()
        bits = (bitmask[rows, :, None] >> torch.arange(_BITS)) & 1
        logits[rows] = logits[rows].masked_fill(bits.flatten(1) == 0, float("-inf"))

    def apply(logits: Any, bitmask: Any, indices: Any = None) -> None:
        if isinstance(indices, list):
            indices = torch.tensor(indices).to(logits.device)
        gpu.kernel(run, logits, bitmask, indices)

    with mock.patch.object(utils, "xgr", SimpleNamespace(apply_token_bitmask_inplace=apply)):
        yield
