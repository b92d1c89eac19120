"""The loaded release's metadata builders of multi-head latent attention, made the same way for every release."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import LAYER, BuilderInputs
from vllm_async_spec.compat.cases import MAX_MODEL_LEN
from vllm_async_spec.compat.check import AbsentError
from vllm_async_spec.compat.machine import workspace
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

__all__ = [
    "DIMENSIONS",
    "HEADS",
    "SCALE",
    "indexer_builder",
    "mla_builder",
    "mla_prefill_builder",
    "sparse_mla_builder",
]

DIMENSIONS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Latent and rotary parts, as DeepSeek V2 and V3 have them."""
HEADS, SCALE = 8, 0.1
"""Query heads, and the factor on their logits."""
_SPARSE_BLOCK = 64
"""Tokens in a block, as all kernels of sparse MLA want it."""
_FLAGS = {
    "FLASH_ATTN": None,
    "FLASHINFER": "use_flashinfer_prefill",
    "CUDNN": "use_cudnn_prefill",
    "TRTLLM_RAGGED": "use_trtllm_ragged_deepseek_prefill",
}
"""What says in releases up to 0.18 which kernels prefill; FlashAttention's do where none does."""


class _Layer(SimpleNamespace):
    """What a builder asks of its layer: its dimensions, and the kernels of its prefills."""

    num_heads = HEADS
    q_lora_rank = None
    dcp_manager = None
    prefill_class: Any = None
    vllm_config: Any = None

    @property
    def prefill_backend(self) -> Any:
        kernels = self.prefill_class or _no_kernels()
        return kernels(num_heads=self.num_heads, scale=SCALE, vllm_config=self.vllm_config, **DIMENSIONS)


def _no_kernels() -> Any:
    """Kernels that prepare nothing."""
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    kernels: Any = type("NoPrefill", (MLAPrefillBackend,), {})
    kernels.__abstractmethods__ = frozenset()  # none of them is called while metadata is built
    return kernels


def mla_builder(builder_class: Any, setting: BuilderInputs, block_size: int, prefill_class: Any = None) -> Any:
    """The release's metadata builder `builder_class` of an MLA backend.

    Args:
        builder_class: Such as `FlashMLAMetadataBuilder`.
        setting: What it is made from, but for the shape of its layer and of its KV cache.
        block_size: Tokens in a block of the KV cache.
        prefill_class: The kernels of prefills, in releases where the layer has them. If None, FlashAttention's on a
            GPU, and elsewhere some that prepare nothing.

    Returns:
        The builder. Its model is a small Llama with the latent dimensions of DeepSeek V2.
    """
    layers, config, device = _latent(setting, block_size)
    if prefill_class is None and device.type == "cuda" and (registry := _registry()) is not None:
        prefill_class = registry.MLAPrefillBackendEnum.FLASH_ATTN.get_class()
    config.compilation_config.static_forward_context[LAYER] = _Layer(
        **DIMENSIONS, prefill_class=prefill_class, vllm_config=config
    )
    with workspace(device) if prefill_class is not None else contextlib.nullcontext():
        return setting.construct(builder_class, _spec(block_size, 576), layers, config, device)


def mla_prefill_builder(setting: BuilderInputs, kernels: str, block_size: int) -> Any:
    """The builder of Triton MLA, whose prefills are `kernels`.

    Args:
        setting: What it is made from.
        kernels: A key of `_FLAGS`.
        block_size: Tokens in a block of the KV cache.

    Returns:
        The builder.

    Raises:
        AbsentError: This release has no such kernels.
    """
    found = importlib.import_module("vllm.v1.attention.backends.mla.triton_mla").TritonMLABackend.get_builder_cls()
    registry = _registry()
    if registry is None:
        return _flagged(found, setting, kernels, block_size)
    named = getattr(registry.MLAPrefillBackendEnum, kernels, None)
    if named is None:
        raise AbsentError(f"this release prefills no MLA with {kernels}")
    chosen = named.get_class()
    module: Any = importlib.import_module(chosen.__module__)
    if kernels == "FLASHINFER":
        module.BatchPrefillWithRaggedKVCacheWrapper = _ragged()
    if hasattr(chosen, "_resolve_global_hyperparameters"):
        chosen._resolve_global_hyperparameters = lambda self: _hyperparameters()
    module.get_per_layer_parameters = lambda *arguments: {LAYER: _hyperparameters()}
    if getattr(module, "flash_attn_varlen_func", 1) is None:
        module.flash_attn_varlen_func = _no_attention
    return mla_builder(found, setting, block_size, chosen)


def _registry() -> Any:
    """The release's kernels of prefills; None where the builder itself chooses them, as up to 0.18."""
    try:
        return importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
    except ModuleNotFoundError:
        return None


def _flagged(builder_class: Any, setting: BuilderInputs, kernels: str, block_size: int) -> Any:
    """With the kernels that the builder itself asks for, as releases up to 0.18 do."""
    module: Any = inspect.getmodule(next(each for each in builder_class.__mro__ if "MLACommon" in each.__name__))
    if kernels == "FLASHINFER":  # it may have been imported before anything stood for FlashInfer
        module.BatchPrefillWithRaggedKVCacheWrapper = _ragged()
    module.get_per_layer_parameters = lambda *arguments: {LAYER: _hyperparameters()}
    with temporarily() as changes:
        for flag in _FLAGS.values():
            if flag is not None and hasattr(module, flag):
                changes.set(module, flag, lambda flag=flag: flag == _FLAGS[kernels])
        return mla_builder(builder_class, setting, block_size)


def _ragged() -> Any:
    return importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper


def _hyperparameters() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.utils").PerLayerParameters(-1, None, 0.125)


def _no_attention(*arguments: Any, **keywords: Any) -> Any:
    raise NotImplementedError("no kernel runs while metadata is built")


def sparse_mla_builder(builder_class: Any, setting: BuilderInputs, cache_dtype: str) -> Any:
    """The release's metadata builder `builder_class` of an attention that reads the tokens that an indexer chose.

    Args:
        builder_class: Such as `FlashMLASparseMetadataBuilder`.
        setting: What it is made from, but for the shape of its layer and of its KV cache.
        cache_dtype: Of the KV cache: `auto` or `fp8_ds_mla`.

    Returns:
        The builder.
    """
    layers, config, device = _latent(setting, _SPARSE_BLOCK)
    config.cache_config.cache_dtype = cache_dtype
    config.compilation_config.static_forward_context[LAYER] = _Layer(**DIMENSIONS, vllm_config=config)
    return setting.construct(builder_class, _spec(_SPARSE_BLOCK, 576, cache_dtype), layers, config, device)


def indexer_builder(builder_class: Any, setting: BuilderInputs) -> Any:
    """The release's metadata builder of DeepSeek's sparse indexer.

    Args:
        builder_class: `DeepseekV32IndexerMetadataBuilder`.
        setting: What it is made from, but for the shape of its KV cache.

    Returns:
        The builder. DeepGEMM's scheduler is there, and where nothing is compiled its arguments are recorded.
    """
    layers, config, device = _latent(setting, _SPARSE_BLOCK)
    if (source := loaded_source()) is not None:
        source.stands_in("vllm.v1.attention.backends.mla.indexer:get_paged_mqa_logits_metadata")
        module: Any = importlib.import_module(builder_class.__module__)
        with contextlib.suppress(AttributeError):
            module.get_paged_mqa_logits_metadata = _scheduled
            module.has_deep_gemm = module.is_deep_gemm_supported = lambda: True
    spec = _spec(_SPARSE_BLOCK, 132)
    given = spec, layers, config, device
    if "block_table_width" not in inspect.signature(builder_class.__init__).parameters:
        return setting.construct(builder_class, *given)
    return setting.construct(
        lambda *each: builder_class(*each, block_table_width=-(-MAX_MODEL_LEN // _SPARSE_BLOCK)), *given
    )


def _scheduled(context_lens: torch.Tensor, block_size: int, num_sms: int, **more: Any) -> torch.Tensor:
    """Stands for DeepGEMM's scheduler of decodes: one row for each processor and one more, of zeros."""
    result = torch.zeros(num_sms + 1, 2, dtype=torch.int32)
    source = loaded_source()
    assert source is not None
    given = {"context_lens": context_lens, "block_size": block_size, "num_sms": num_sms, **more}
    source.kernel("get_paged_mqa_logits_metadata", given, result)
    return result


def _latent(setting: BuilderInputs, block_size: int) -> tuple[list[str], Any, torch.device]:
    """Layers, the configuration of a model with latent attention and an indexer, and the device."""
    _, layers, config, device = setting.arguments(block_size=block_size)
    model: Any = config.model_config
    for target in (model.hf_text_config, model.hf_config):
        for name, size in (DIMENSIONS | {"q_lora_rank": None, "index_topk": 2048}).items():
            setattr(target, name, size)
    object.__setattr__(model, "get_head_size", lambda: 576)
    return layers, config, device


def _spec(block_size: int, head_size: int, cache_dtype: str | None = None) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    named: dict[str, Any] = {"dtype": torch.bfloat16}
    if cache_dtype == "fp8_ds_mla":
        named = {"dtype": torch.uint8, "cache_dtype_str": cache_dtype}
    known = {each.name for each in dataclasses.fields(MLAAttentionSpec)}
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=head_size,
        **{name: value for name, value in named.items() if name in known},
    )
