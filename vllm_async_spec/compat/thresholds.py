"""Batches on both sides of a builder's own thresholds, which are read from the builder by attribute.

`cases.CASES` is on both sides of small thresholds. Some MLA builders treat prompts of up to 512 tokens as decodes, and
cut contexts that exceed a workspace of 64k tokens; such builders get further batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_async_spec.compat.cases import CASES, DRAFT_TOKENS, MAX_MODEL_LEN, NUM_BLOCKS, Case, Host

_WORKSPACES = ("chunked_prefill_workspace_size", "max_prefill_buffer_size")
"""Attributes of builders: tokens of all prefills of a batch, beyond which the builder cuts the batch into chunks."""
_SPARSE_WORKSPACE = "get_prefill_workspace_size"
"""The function of sparse MLA's module that gives the same number."""

_LONGEST_PROMPT = max(max(case.query_lens) for case in CASES if case.prefills)
_CONTEXT = 200
"""Tokens before a prompt that is built with context."""
_DECODE = 1 + DRAFT_TOKENS, 33
"""Query tokens and length of the decode at the start of each batch."""


def threshold_cases(builder: Any, block_size: int) -> tuple[Case, ...]:
    """The batches for a builder's thresholds.

    These are prompts at `reorder_batch_threshold` tokens and one token longer, where no batch of `CASES` is that long;
    and for each workspace a batch whose contexts exceed it.
    """
    threshold = getattr(builder, "reorder_batch_threshold", None)
    threshold = threshold if isinstance(threshold, int) else 1
    return *_prompts(threshold), *_long_contexts(workspaces(builder), threshold, block_size)


def does_not_fit(case: Case, block_size: int) -> str | None:
    """Why a batch for a workspace can't be built; None if it can."""
    blocks = 1 + sum(-(-bound // block_size) for bound in case.lengths(Host.BOUND))
    if max(case.seq_lens) > MAX_MODEL_LEN or blocks > NUM_BLOCKS:
        return f"such contexts exceed the suite's KV cache of {NUM_BLOCKS} blocks"
    return None


def workspaces(builder: Any) -> Mapping[str, int]:
    """Tokens that each of the builder's workspaces holds, by the name under which vLLM keeps that number."""
    found = {name: value for name in _WORKSPACES if isinstance(value := getattr(builder, name, None), int)}
    modules = map(inspect.getmodule, type(builder).__mro__)
    functions = (getattr(module, _SPARSE_WORKSPACE, None) for module in modules)
    size = next((function for function in functions if function is not None), None)
    if size is not None and getattr(builder, "use_fp8_kv_cache", False):
        # Up to 0.26 the function takes `max_model_len`, later the whole configuration.
        by_length = "max_model_len" in inspect.signature(size).parameters
        found["prefill_workspace_size"] = size(MAX_MODEL_LEN if by_length else builder.vllm_config)
    return found


def _prompts(threshold: int) -> Iterator[Case]:
    if threshold < _LONGEST_PROMPT:
        return
    query, length = _DECODE
    yield Case("prompt at threshold", (query, threshold), (length, threshold), prefills=1)
    yield Case("prompt past threshold", (query, threshold + 1), (length, threshold + 1), prefills=1)
    with_context = (length, threshold + 1 + _CONTEXT)
    yield Case("prompt past threshold, with context", (query, threshold + 1), with_context, prefills=1)


def _long_contexts(sizes: Mapping[str, int], threshold: int, block_size: int) -> Iterator[Case]:
    """Contexts that exceed both a workspace together, and their equal share of it each."""
    for name, size in sizes.items():
        prompts = size // MAX_MODEL_LEN + 1
        query = max(threshold, 1 + DRAFT_TOKENS) + 1
        length = size // prompts + block_size + query
        rows = (_DECODE, *((query, length) for _ in range(prompts)))
        queries, lengths = zip(*rows, strict=True)
        yield Case(f"contexts past {name}", queries, lengths, prefills=prompts)
