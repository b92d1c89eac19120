"""Multi-head latent attention (MLA): the loaded release's metadata builders, and a layer that uses their metadata.

Builders are made the same way for every release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import LAYER, AbsentError, BuilderInputs, configured, workspace
from vllm_async_spec.compat.cases import MAX_MODEL_LEN
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.layer import POISON, Batch, kv_cache, layer_attributes, random, reference
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

_DIMENSIONS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Sizes of the latent and rotary parts in DeepSeek V2 and V3."""
_TINY = _DIMENSIONS | {"q_lora_rank": None, "index_topk": 2048}
"""What the configuration of a small model lacks."""
_HEADS, _SCALE = 8, 0.1
"""Query heads of the layer that attends, and the factor on their logits."""
_LATENT, _NOPE, _ROPE, _VALUE = (
    _DIMENSIONS[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
)
_DECODER = "decoder"
"""vLLM's `AttentionType.DECODER`, which is a string."""
_SPARSE_BLOCK = 64
"""Tokens in a block, which all sparse MLA kernels need."""
_FLAGS = {
    "FLASH_ATTN": None,
    "FLASHINFER": "use_flashinfer_prefill",
    "CUDNN": "use_cudnn_prefill",
    "TRTLLM_RAGGED": "use_trtllm_ragged_deepseek_prefill",
}
"""Functions that choose the prefill kernels in releases up to 0.18; FlashAttention's are used if all say no."""


class _BuilderLayer(SimpleNamespace):
    """The layer attributes that a builder reads: dimensions and prefill kernels."""

    num_heads: int
    q_lora_rank = None
    dcp_manager = None
    prefill_class: Any = None
    vllm_config: Any = None

    @property
    def prefill_backend(self) -> Any:
        kernels = self.prefill_class or _no_kernels()
        return kernels(num_heads=self.num_heads, scale=_SCALE, vllm_config=self.vllm_config, **_DIMENSIONS)


def _builder_layer(config: Any, prefill_class: Any = None) -> _BuilderLayer:
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    return _BuilderLayer(**_DIMENSIONS, num_heads=heads, prefill_class=prefill_class, vllm_config=config)


def _no_kernels() -> Any:
    """A prefill backend class that prepares nothing."""
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    kernels: Any = type("NoPrefill", (MLAPrefillBackend,), {"get_name": staticmethod(lambda: "NONE")})
    kernels.__abstractmethods__ = frozenset()  # building metadata calls no other abstract method
    return kernels


def mla_builder(builder_class: Any, setting: BuilderInputs, block_size: int, prefill_class: Any = None) -> Any:
    """Make an MLA backend's metadata builder, with the latent dimensions of DeepSeek V2 and V3 and the model's heads.

    Args:
        builder_class: Such as `FlashMLAMetadataBuilder`.
        setting: The builder's inputs; this function replaces the layer and the KV-cache spec.
        block_size: Tokens in a block of the KV cache.
        prefill_class: The prefill backend class, in releases whose layers have one. None means FlashAttention's on a
            GPU, and elsewhere a class that prepares nothing.
    """
    layers, config, device = _latent(setting, block_size)
    if prefill_class is None and device.type == "cuda" and (registry := _registry()) is not None:
        prefill_class = registry.MLAPrefillBackendEnum.FLASH_ATTN.get_class()
    config.compilation_config.static_forward_context[LAYER] = _builder_layer(config, prefill_class)
    with workspace(device) if prefill_class is not None else contextlib.nullcontext():
        return setting.construct(builder_class, _spec(block_size, 576), layers, config, device)


def mla_prefill_builder(setting: BuilderInputs, kernels: str, block_size: int) -> Any:
    """Make Triton MLA's builder with the prefill kernels `kernels`, a key of `_FLAGS`.

    Raises:
        AbsentError: This release has no such kernels.
    """
    found = importlib.import_module("vllm.v1.attention.backends.mla.triton_mla").TritonMLABackend.get_builder_cls()
    registry = _registry()
    if registry is None:
        return _flagged(found, setting, kernels, block_size)
    named = getattr(registry.MLAPrefillBackendEnum, kernels, None)
    if named is None:
        raise AbsentError(f"this release has no MLA prefill with {kernels}")
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
    """The release's registry of prefill kernels; None up to 0.18, where the builder itself chooses them."""
    try:
        return importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
    except ModuleNotFoundError:
        return None


def _flagged(builder_class: Any, setting: BuilderInputs, kernels: str, block_size: int) -> Any:
    """Make the builder in releases up to 0.18, where the builder itself chooses the prefill kernels."""
    module: Any = inspect.getmodule(next(each for each in builder_class.__mro__ if "MLACommon" in each.__name__))
    if kernels == "FLASHINFER":  # the module may have been imported before the FlashInfer stub
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
    """Make the builder of a sparse MLA backend, which attends to the tokens that an indexer chose.

    The KV cache's dtype is `auto` or `fp8_ds_mla`. The layer and the KV-cache spec of `setting` are replaced.
    """
    layers, config, device = _latent(setting, _SPARSE_BLOCK)
    config.cache_config.cache_dtype = cache_dtype
    config.compilation_config.static_forward_context[LAYER] = _builder_layer(config)
    return setting.construct(builder_class, _spec(_SPARSE_BLOCK, 576, cache_dtype), layers, config, device)


def indexer_builder(builder_class: Any, setting: BuilderInputs) -> Any:
    """Make the metadata builder of DeepSeek's sparse indexer, with a KV-cache spec of its own.

    In an unpacked release a stub of DeepGEMM's scheduler records its arguments.
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
    """Stub of DeepGEMM's decode scheduler; returns (num_sms + 1, 2) int32 zeros."""
    result = torch.zeros(num_sms + 1, 2, dtype=torch.int32)
    source = loaded_source()
    assert source is not None
    given = {"context_lens": context_lens, "block_size": block_size, "num_sms": num_sms, **more}
    source.kernel("get_paged_mqa_logits_metadata", given, result)
    return result


def _latent(setting: BuilderInputs, block_size: int) -> tuple[list[str], Any, torch.device]:
    """Layer names, the configuration of a model with latent attention and an indexer, and the device."""
    _, layers, config, device = setting.arguments(block_size=block_size)
    model: Any = config.model_config
    for target in (model.hf_text_config, model.hf_config):
        for name, size in {**_TINY, **setting.model.attributes}.items():
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


class MlaLayer:
    """One layer of an MLA backend, which attends with the metadata of `builder`.

    As in vLLM's `MLAAttention`, decodes attend to latent keys, by `forward_mqa` between two projections. Prefills
    attend by `forward_mha` to keys that `kv_b_proj` expands from latent keys. The reference always attends to latent
    keys; only rounding differs.

    Raises:
        NoForwardError: Neither the backend nor vLLM says the shape of the KV cache.
    """

    def __init__(self, backend: Any, builder: Any, device: Device, block_size: int) -> None:
        self._device = device
        # (latent, heads * (key + value)), scaled so that keys and values have unit variance.
        weight = random(device, 4, _LATENT, _HEADS * (_NOPE + _VALUE), dtype=torch.float32) * _LATENT**-0.5
        self._weight = weight.to(torch.bfloat16)
        per_head = self._weight.view(_LATENT, _HEADS, _NOPE + _VALUE)
        # (heads, key, latent) and (heads, latent, value).
        self._up_keys = per_head[..., :_NOPE].permute(1, 2, 0).contiguous()
        self._up_values = per_head[..., _NOPE:].permute(1, 0, 2).contiguous()
        projection = _Projection(self._weight)
        sizes = _DIMENSIONS | {"q_lora_rank": None, "qk_head_dim": _NOPE + _ROPE, "kv_b_proj": projection}
        with configured(builder), device.watching():
            cache = kv_cache(backend, builder, device, block_size, 1, _LATENT + _ROPE)
            # Since 0.30 the cache has a dimension for the one head.
            self._cache = cache.squeeze(1) if cache.dim() == 4 else cache
            self._layer = layer_attributes(builder, device)
            self.impl = backend.get_impl_cls()(
                _HEADS, _LATENT + _ROPE, _SCALE, 1, None, None, "auto", None, _DECODER, None, **sizes
            )
        if getattr(self.impl, "dcp_world_size", 1) < 1:  # up to 0.27 the layer sets it
            self.impl.dcp_world_size = 1

    def fill(self, batch: Batch) -> None:
        """See `Layer`."""
        self._batch = batch
        keys = random(self._device, 1, len(batch.content), _LATENT + _ROPE)
        self._keys = keys[batch.content]
        self._query = random(self._device, 3, batch.tokens, _HEADS, _NOPE + _ROPE)
        self._new_keys = batch.queries(self._keys)
        with self._device.watching():
            self._output = torch.zeros(batch.tokens, _HEADS * _VALUE, dtype=torch.bfloat16, device=self._device.device)
            self._cache.fill_(POISON)
        if len(batch.context):
            self._write(self._keys[batch.context], batch.slots[batch.context])

    def attend(self, metadata: Any) -> torch.Tensor:
        """See `Layer`."""
        with workspace(self._device.device):
            self._write(self._new_keys, self._batch.slot_mapping)
            decodes, tokens = metadata.num_decode_tokens, metadata.num_actual_tokens
            if tokens > decodes:
                latent, rotary = self._new_keys[decodes:tokens].split([_LATENT, _ROPE], dim=-1)
                self.impl.forward_mha(
                    self._query[decodes:tokens],
                    latent.contiguous(),
                    rotary[:, None].contiguous(),
                    self._cache,
                    metadata,
                    self._layer._k_scale,
                    output=self._output[decodes:tokens],
                )
            if decodes:
                attended, _ = self.impl.forward_mqa(self._absorbed(decodes), self._cache, metadata, self._layer)
                values = attended.reshape(decodes, _HEADS, _LATENT).transpose(0, 1) @ self._up_values
                self._output[:decodes] = values.transpose(0, 1).flatten(1)
        return self._output[: len(self._batch.new)].view(-1, _HEADS, _VALUE)

    def expected(self) -> torch.Tensor:
        """See `Layer`."""
        query = torch.cat(self._absorbed(self._batch.tokens, torch.float32), dim=-1)
        latent = self._keys[:, None]
        attended = reference(self._batch, query, latent, latent, scale=_SCALE)[..., :_LATENT]
        values: torch.Tensor = (attended.transpose(0, 1) @ self._up_values.float()).transpose(0, 1)
        return values

    def _absorbed(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries for latent keys, (tokens, heads, latent), and their rotary part, (tokens, heads, rotary)."""
        nope, rotary = self._query[:tokens].to(dtype).split([_NOPE, _ROPE], dim=-1)
        return (nope.transpose(0, 1) @ self._up_keys.to(dtype)).transpose(0, 1), rotary

    def _write(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rotary = keys.split([_LATENT, _ROPE], dim=-1)
        self.impl.do_kv_cache_update(
            latent.contiguous(), rotary[:, None].contiguous(), self._cache, slots, "auto", self._layer._k_scale
        )


class _Projection(SimpleNamespace):
    """Stub of `kv_b_proj`: (tokens, latent) to (tokens, heads * (key + value)), and None for the bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight=weight.T, params_dtype=weight.dtype)

    def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T, None
