"""What a builder and its backend declare that they do not support.

vLLM never gives a builder what its declarations exclude. So a batch that fails is no fault if a declaration excludes
the batch. The sentences here name that declaration.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch

from vllm_async_spec.attention.base import HostNeed
from vllm_async_spec.compat.builder_inputs import HEAD_SIZE
from vllm_async_spec.compat.cases import DRAFT_TOKENS, Call, Case
from vllm_async_spec.compat.results import Need

_SUPPORT = "get_cudagraph_support() is"
_NEEDS = {HostNeed.NONE: Need.NONE, HostNeed.UPPER_BOUND: Need.UPPER_BOUND, HostNeed.EXACT: Need.EXACT}


def _cudagraph_support(builder: Any) -> str:
    """The name of the builder's CUDA graph support; empty for a builder that declares none."""
    support = getattr(builder, "_cudagraph_support", None)
    ask = getattr(builder, "get_cudagraph_support", None)
    if ask is not None and hasattr(builder, "kv_cache_spec") and hasattr(builder, "vllm_config"):
        support = ask(builder.vllm_config, builder.kv_cache_spec)
    return str(getattr(support, "name", ""))


def host_need(builder: Any) -> Need | None:
    """What an adapter declares that the host must know; None if it declares nothing, as vLLM's builders."""
    found = getattr(builder, "host_need", None)
    return _NEEDS[found] if isinstance(found, HostNeed) else None


def has_no_such_call(builder: Any, case: Case) -> str | None:
    """Why the builder is never asked for this batch; None if vLLM asks for it."""
    if case.call is not Call.BUILD and not hasattr(builder, case.call.value):
        return f"the builder has no {case.call.value}"
    if case.call is not Call.CAPTURE:
        return None
    support = _cudagraph_support(builder)
    if support == "NEVER":
        return f"it is never captured: {_SUPPORT} NEVER"
    if support == "UNIFORM_SINGLE_TOKEN_DECODE" and max(case.query_lens) > 1:
        return f"only one token a request is captured: {_SUPPORT} {support}"
    return None


def refusal(builder: Any, case: Case) -> str | None:
    """The declaration that allows the builder to fail with this batch; None if there is none."""
    support = _cudagraph_support(builder)
    if case.call is Call.CAPTURE and max(case.query_lens) == 1 and support == "UNIFORM_BATCH":
        return f"with drafts only {1 + DRAFT_TOKENS} tokens a request are captured: {_SUPPORT} {support}"
    return None


def pads_no_rows(builder: Any, case: Case) -> str | None:
    """The declaration by which vLLM pads only the layer's input in this batch, and no rows; None if it pads rows."""
    if case.call is Call.CAPTURE or not case.padded:
        return None
    support = _cudagraph_support(builder)
    if support == "NEVER" or (support == "UNIFORM_SINGLE_TOKEN_DECODE" and max(case.query_lens) > 1):
        return f"{_SUPPORT} {support}, so vLLM pads the layer's input and no rows"
    return None


def reordered(builder: Any, case: Case) -> Case:
    """The batch with its rows as vLLM orders them for the builder's `reorder_batch_threshold`."""
    threshold = getattr(builder, "reorder_batch_threshold", None)
    return case.ordered(threshold) if isinstance(threshold, int) and case.call is Call.BUILD else case


def unsupported(backend: Any, builder: Any, block_size: int) -> str | None:
    """What the backend's `supports_...` methods refuse of the suite's layer; None if they refuse nothing.

    The builder's spec of the KV cache may say the head size.
    """
    asked: list[tuple[str, Any]] = [
        ("supports_head_size", getattr(getattr(builder, "kv_cache_spec", None), "head_size", HEAD_SIZE)),
        ("supports_dtype", torch.bfloat16),
        ("supports_kv_cache_dtype", "auto"),
        ("supports_block_size", block_size),
    ]
    if "vllm" in sys.modules:
        platform = importlib.import_module("vllm.platforms").current_platform
        asked.append(("supports_compute_capability", platform.get_device_capability()))
    for name, value in asked:
        declares = getattr(backend, name, None)
        with contextlib.suppress(Exception):  # a method that fails declares nothing, and the forward's fault stays
            if declares is not None and value is not None and not declares(value):
                return f"the backend's {name}({value}) is False"
    return None
