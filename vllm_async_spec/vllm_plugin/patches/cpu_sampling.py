"""Mends sampling with drafts in vLLM's CPU build.

Each draft token is sampled with its request's temperature, `top_k` and `top_p`. On a GPU a Triton kernel spreads them.
The CPU build's stand-in converts the tensor that it should write to int64, and writes to the converted copy. Where a
batch has no draft token, top-k without top-p fails, too.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.patches.async_scheduling import unneeded_off_cpu


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value to all its draft tokens.

    Args:
        output: (draft tokens,), of the dtype of `input_val`; written in place.
        input_val: (requests,), any dtype.
        cu_num_tokens: (requests,) integers, draft tokens of each request and of those before it.
        replace_from: a value that is not written.
        replace_to: what is written in its place.
        MAX_NUM_TOKENS: not used.
    """
    values = torch.where(input_val == replace_from, replace_to, input_val)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    spread = values.repeat_interleave(counts)
    output[: len(spread)] = spread


def _apply(transaction: Transaction, module: ModuleType) -> None:
    transaction.set(module, "_expand_kernel_impl", expand)
    if hasattr(module, "expand_kernel"):  # 0.26 has wrapped it at the module's end
        transaction.set(module.expand_kernel, "func", expand)


def _apply_top_k(transaction: Transaction, module: ModuleType) -> None:
    mask = module.apply_top_k_only

    @functools.wraps(mask)
    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = mask(logits, k) if len(logits) else logits
        return masked

    transaction.set_function(module, "apply_top_k_only", apply_top_k_only)


IMPLEMENTATIONS = {
    "cpu-sampling": Implementation(_apply, unneeded_off_cpu),
    "cpu-sampling-top-k": Implementation(_apply_top_k, unneeded_off_cpu),
}
