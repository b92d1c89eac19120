"""The rotary embeddings of a model, whose frequencies may depend on the sequences."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def rope_types(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Each module with a rotary embedding, and the embedding's type as transformers names it; one a layer type."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        for kind in found.values() if isinstance(found, dict) else [found]:
            if isinstance(kind, str):
                yield module, kind
