"""The end-of-sequence test that all loops share: which tokens end a sequence. It never waits for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import EosTokenCriteria

_SORTED_FROM = 10
"""With this many ids `torch.isin` may sort; on CUDA, sorting makes the host wait and can't be captured."""


def end_ids(criteria: Iterable[Any], device: torch.device) -> torch.Tensor | None:
    """The ids of every `EosTokenCriteria` among `criteria`: (ids,) int64 on `device`; None where there is none."""
    ids = [each.eos_token_id.to(device).flatten() for each in criteria if type(each) is EosTokenCriteria]
    return torch.cat(ids) if ids else None


def ends_of(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Find the tokens that end a sequence, in as few launches as `ids` allow; may be captured and compiled.

    Tokens are (..., n) int64, `ids` (ids,) int64 on the same device; if empty, no token ends a sequence.

    Returns:
        (..., n) bool.
    """
    if len(ids) == 1:
        return tokens == ids
    if len(ids) < _SORTED_FROM:
        return torch.isin(tokens, ids)
    return (tokens[..., None] == ids).any(-1)
