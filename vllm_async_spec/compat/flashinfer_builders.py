"""The loaded release's metadata builder of FlashInfer in each of the ways that it attends."""

from __future__ import annotations

import enum
import importlib
from typing import Any

from vllm_async_spec.compat.builder_inputs import LAYER, AbsentError, BuilderInputs, context_parallel

__all__ = ["PAGE_TABLE", "Way", "flashinfer_builder"]

PAGE_TABLE = ("_copy_page_indices_kernel", ".page ends", ".last page")
"""Where pages lie among the indices. What masks is the length that the ends and the last page give together."""

_MODULE = "vllm.v1.attention.backends.flashinfer"


class Way(enum.Enum):
    """Which of FlashInfer's kernels vLLM takes."""

    NATIVE = enum.auto()
    """The wrappers, which are planned on the host."""
    XQA = enum.auto()
    """XQA for decodes, and the wrappers for prefills: what vLLM takes on an H200 that has FlashInfer's kernels."""
    TRTLLM = enum.auto()
    """trtllm-gen for all, as on a B200."""
    CONTEXT_PARALLEL = enum.auto()
    """The wrappers, with the KV cache of each request spread over two GPUs."""


def flashinfer_builder(cls: Any, setting: BuilderInputs, way: Way) -> Any:
    """The builder, made so that it takes these kernels.

    Args:
        cls: `FlashInferMetadataBuilder`.
        setting: What it is made from.
        way: The kernels.

    Returns:
        The builder.

    Raises:
        AbsentError: This release decodes with other kernels on this machine.
    """
    arguments = setting.arguments()
    config: Any = arguments[2]
    forced = {Way.TRTLLM: True, Way.XQA: None}.get(way, False)
    if hasattr(config, "attention_config"):  # 0.12 has XQA on no Hopper
        config.attention_config.use_trtllm_attention = forced
    if hasattr(config.cache_config, "kv_cache_layout"):  # from 0.30 on, where the engine settles it at start-up
        config.cache_config.kv_cache_layout = "LBNHC"
    _know_one_layer()
    if way is Way.CONTEXT_PARALLEL:
        with context_parallel(config, 2):
            return setting.construct(cls, *arguments)
    builder = setting.construct(cls, *arguments)
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    if way is Way.XQA and getattr(kernel, "value", None) != "xqa":
        raise AbsentError("this release decodes with FlashInfer's native wrappers on an H200")
    if way is Way.TRTLLM and not builder.use_trtllm_decode_attention:
        raise AbsentError("this release does not decode with trtllm-gen", "not constructible here: needs trtllm-gen")
    return builder


def _know_one_layer() -> None:
    """The layers' parameters, which it finds in the model."""
    module = importlib.import_module(_MODULE)
    parameters = importlib.import_module("vllm.v1.attention.backends.utils").PerLayerParameters(-1, None, 0.125)
    module.get_per_layer_parameters = lambda *arguments: {LAYER: parameters}  # type: ignore[attr-defined]
