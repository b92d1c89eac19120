"""A layer of multi-head latent attention: the query tokens that a builder called decodes absorbed, the others not.

As in vLLM's `MLAAttention`: a decode attends to latent keys, by `forward_mqa` between two projections; a prefill to
keys that `kv_b_proj` makes of them, by `forward_mha`. The reference attends to latent keys throughout, which but for
rounding is the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import configured, workspace
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.impl_layer import kv_cache, layer_attributes
from vllm_async_spec.compat.layer import POISON, Batch, random, reference
from vllm_async_spec.compat.mla import DIMENSIONS, HEADS, SCALE

__all__ = ["MlaLayer"]

_LATENT, _NOPE, _ROPE, _VALUE = (
    DIMENSIONS[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
)


class MlaLayer:
    """One layer of an MLA backend.

    Args:
        backend: The backend class.
        builder: The builder whose metadata it will be given.
        device: Where it attends.
        block_size: Tokens in a block of its KV cache.

    Raises:
        NoForwardError: Nothing says what its KV cache looks like.
    """

    def __init__(self, backend: Any, builder: Any, device: Device, block_size: int) -> None:
        self._device = device
        # Of a size that leaves keys and values normally distributed: (latent, heads * (key + value)).
        weight = random(device, 4, _LATENT, HEADS * (_NOPE + _VALUE), dtype=torch.float32) * _LATENT**-0.5
        self._weight = weight.to(torch.bfloat16)
        per_head = self._weight.view(_LATENT, HEADS, _NOPE + _VALUE)
        # (heads, key, latent) and (heads, latent, value).
        self._up_keys = per_head[..., :_NOPE].permute(1, 2, 0).contiguous()
        self._up_values = per_head[..., _NOPE:].permute(1, 0, 2).contiguous()
        projection = _Projection(self._weight)
        sizes = DIMENSIONS | {"q_lora_rank": None, "qk_head_dim": _NOPE + _ROPE, "kv_b_proj": projection}
        with configured(builder), device.watching():
            cache = kv_cache(backend, builder, device, block_size, 1, _LATENT + _ROPE)
            # From 0.30 on there is a dimension for the one head.
            self._cache = cache.squeeze(1) if cache.dim() == 4 else cache
            self._layer = layer_attributes(builder, device)
            self.impl = backend.get_impl_cls()(
                HEADS, _LATENT + _ROPE, SCALE, 1, None, None, "auto", None, _DECODER, None, **sizes
            )
        if getattr(self.impl, "dcp_world_size", 1) < 1:  # up to 0.27 the layer says it
            self.impl.dcp_world_size = 1

    def fill(self, batch: Batch) -> None:
        """See `Layer`."""
        self._batch = batch
        keys = random(self._device, 1, len(batch.content), _LATENT + _ROPE)
        self._keys = keys[batch.content]
        self._query = random(self._device, 3, batch.tokens, HEADS, _NOPE + _ROPE)
        self._new_keys = batch.queries(self._keys)
        with self._device.watching():
            self._output = torch.zeros(batch.tokens, HEADS * _VALUE, dtype=torch.bfloat16, device=self._device.device)
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
                values = attended.reshape(decodes, HEADS, _LATENT).transpose(0, 1) @ self._up_values
                self._output[:decodes] = values.transpose(0, 1).flatten(1)
        return self._output[: len(self._batch.new)].view(-1, HEADS, _VALUE)

    def expected(self) -> torch.Tensor:
        """See `Layer`."""
        query = torch.cat(self._absorbed(self._batch.tokens, torch.float32), dim=-1)
        latent = self._keys[:, None]
        attended = reference(self._batch, query, latent, latent, scale=SCALE)[..., :_LATENT]
        values: torch.Tensor = (attended.transpose(0, 1) @ self._up_values.float()).transpose(0, 1)
        return values

    def _absorbed(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of latent keys: (tokens, heads, latent), and their rotary part."""
        nope, rotary = self._query[:tokens].to(dtype).split([_NOPE, _ROPE], dim=-1)
        return (nope.transpose(0, 1) @ self._up_keys.to(dtype)).transpose(0, 1), rotary

    def _write(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rotary = keys.split([_LATENT, _ROPE], dim=-1)
        self.impl.do_kv_cache_update(
            latent.contiguous(), rotary[:, None].contiguous(), self._cache, slots, "auto", self._layer._k_scale
        )


_DECODER = "decoder"
"""A value of vLLM's enumeration of strings."""


class _Projection(SimpleNamespace):
    """What `kv_b_proj` is to an implementation: called, it gives (tokens, heads * (key + value)), and no bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight=weight.T, params_dtype=weight.dtype)

    def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latent @ self.weight.T, None
