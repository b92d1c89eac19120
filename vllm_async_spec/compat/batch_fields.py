"""Fields and arguments beside the common ones that vLLM's runner gives some builders for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_async_spec.compat.cases import Case
from vllm_async_spec.compat.device import Device


def accepted_fields(case: Case, device: Device) -> Mapping[str, Any]:
    """What vLLM's runner gives state-space builders: accepted counts, and draft counts, -1 for none; both int32."""
    drafts = [
        query - 1 if query > 1 and not prefilling else -1
        for query, prefilling in zip(case.query_lens, case.prefilling, strict=True)
    ]
    accepted = [max(1, query - row % 3) for row, query in enumerate(case.query_lens)]
    return {
        "num_accepted_tokens": device.place(torch.tensor(accepted, dtype=torch.int32)),
        "num_decode_draft_tokens_cpu": torch.tensor(drafts, dtype=torch.int32),
    }


def logits_fields(case: Case, device: Device) -> Mapping[str, Any]:
    """Fields for KV-sharing fast prefill: the index of each live request's last token, int32."""
    ends = torch.tensor(case.query_lens).cumsum(0)[: case.live] - 1
    indices: Any = device.place(ends.to(torch.int32))
    # The plugin's runner patches set this attribute; stock vLLM does not read it.
    indices.tokens_per_request = np.ones(case.live, dtype=np.int32)
    return {
        "logits_indices_padded": indices,
        "num_logits_indices": case.live,
        "max_logits_per_req": 1,
    }


def encoder_fields(case: Case, device: Device) -> Mapping[str, Any]:
    """Encoder outputs of 40 tokens for each request."""
    lengths = torch.tensor([40 * (length > 0) for length in case.seq_lens], dtype=torch.int32)
    return {"encoder_seq_lens": device.place(lengths.clone()), "encoder_seq_lens_cpu": lengths.numpy()}
