"""Make the loaded release's metadata builders, without a model and the same way for every release.

`mla` makes the builders of multi-head latent attention.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from vllm_async_spec.compat.builder_inputs import LAYER, AbsentError, BuilderInputs, context_parallel
from vllm_async_spec.compat.cases import BLOCK_SIZE, DRAFT_TOKENS, NUM_BLOCKS
from vllm_async_spec.compat.model_shapes import TINY, Model
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

_BACKENDS = "vllm.v1.attention.backends."


def triton_backend() -> Any:
    """The release's Triton backend class, which other kinds of attention wrap."""
    return importlib.import_module(f"{_BACKENDS}triton_attn").TritonAttentionBackend


def plain_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make an attention builder from the default arguments."""
    return setting.construct(cls, *_with_layers(cls, setting))


def _with_layers(cls: Any, setting: BuilderInputs) -> tuple[Any, ...]:
    """The default arguments, with the model's layers where FlashAttention's builder looks for their windows.

    A layer here has only the attributes that builders read; nothing is allocated.
    """
    arguments = setting.arguments()
    kind = getattr(importlib.import_module(cls.__module__), "FlashAttentionImpl", None)
    if kind is None or setting.model is TINY:
        return arguments
    config = arguments[2]
    context = config.compilation_config.static_forward_context
    # The builder's own layer first: its window is the model's, or the group's.
    own = setting.model.window
    for at, window in enumerate((own, *(each for each in setting.model.windows if each != own))):
        implementation = object.__new__(kind)
        implementation.num_heads = config.model_config.get_num_attention_heads(config.parallel_config)
        implementation.sliding_window = (-1, -1) if window is None else (window - 1, 0)
        layer = object.__new__(_attention_class())
        vars(layer)["impl"] = implementation  # a torch module that was not initialised takes no attributes
        context[LAYER if at == 0 else f"model.layers.{at}.self_attn.attn"] = layer
    return arguments


def _attention_class() -> Any:
    """The release's layer of attention."""
    for name in ("vllm.model_executor.layers.attention", "vllm.attention.layer"):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return importlib.import_module(name).Attention
    raise ImportError("the loaded vLLM has its attention layer in no known module")


def flex_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make FlexAttention's builder, which sizes its masks by the number of KV-cache blocks."""
    arguments = setting.arguments()
    arguments[2].cache_config.num_gpu_blocks = NUM_BLOCKS
    return setting.construct(cls, *arguments)


def mamba_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make a builder of state-space layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    # As in a model with only state-space layers: no prefix caching, and 1 + DRAFT_TOKENS blocks per request.
    _, layers, config, device = setting.arguments(enable_prefix_caching=False)
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=setting.model.state,
        dtypes=(torch.bfloat16,) * len(setting.model.state),
        num_speculative_blocks=DRAFT_TOKENS,
    )
    return setting.construct(cls, spec, layers, config, device)


@contextlib.contextmanager
def before_hopper() -> Iterator[None]:
    """Make the release use FlashAttention 2, as on GPUs before Hopper; on an H200 it uses version 3."""
    with temporarily() as changes:
        module = importlib.import_module(f"{_BACKENDS}flash_attn")
        changes.set(module, "get_flash_attn_version", lambda *args, **kwargs: 2)
        yield


def flash_attention_2_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make FlashAttention's builder for version 2 of the kernels."""
    arguments = _with_layers(cls, setting)
    with before_hopper():
        return setting.construct(cls, *arguments)


def flash_attention_dcp_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make FlashAttention's builder with each request's KV cache spread over two GPUs."""
    arguments = _with_layers(cls, setting)
    with context_parallel(arguments[2]):
        return setting.construct(cls, *arguments)


def cascade_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make FlashAttention's builder for batches that share a prefix.

    Raises:
        AbsentError: This release has no cascade attention.
    """
    if not hasattr(importlib.import_module(cls.__module__), "cascade_attention"):
        raise AbsentError("this release has no cascade attention")
    return plain_builder(cls, setting)


def cpu_builder(cls: Any, setting: BuilderInputs) -> Any:
    """Make the CPU backend's builder; in an unpacked release a stub records its compiled scheduler's arguments."""
    source = loaded_source()
    if source is not None:
        module: Any = importlib.import_module(cls.__module__)

        def scheduled(**given: Any) -> torch.Tensor:
            result = torch.zeros(1, dtype=torch.int32)
            source.kernel("cpu_attn_get_scheduler_metadata", given, result)
            return result

        source.stands_in("vllm._custom_ops:cpu_attn_get_scheduler_metadata")
        module.ops.cpu_attn_get_scheduler_metadata = scheduled
    return plain_builder(cls, setting)


def encoder_only_builder(found: Any, setting: BuilderInputs) -> Any:
    """Make encoder-only attention's builder; `found` is the release's factory, which wraps another backend."""
    return _wrapped(found, setting, "EncoderOnlyAttentionSpec")


def fast_prefill_builder(found: Any, setting: BuilderInputs) -> Any:
    """Make KV-sharing fast prefill's builder; `found` is the release's factory, which wraps another backend."""
    return plain_builder(found("FastPrefill", triton_backend()).get_builder_cls(), setting)


def cross_attention_builder(found: Any, setting: BuilderInputs) -> Any:
    """Make cross-attention's builder; `found` is the release's factory, which wraps another backend."""
    return _wrapped(found, setting, "CrossAttentionSpec")


def _wrapped(found: Any, setting: BuilderInputs, spec_class: str) -> Any:
    from vllm.v1 import kv_cache_interface

    full, layers, config, device = setting.arguments()
    spec = getattr(kv_cache_interface, spec_class)(
        block_size=BLOCK_SIZE, num_kv_heads=full.num_kv_heads, head_size=full.head_size, dtype=torch.bfloat16
    )
    return setting.construct(found(triton_backend()).get_builder_cls(), spec, layers, config, device)


def layer_module() -> ModuleType:
    """The release's module of chunked local attention.

    Raises:
        ImportError: The loaded release has the module in none of the known places.
    """
    for name in ("vllm.model_executor.layers.attention", "vllm.attention.layers"):
        try:
            return importlib.import_module(f"{name}.chunked_local_attention")
        except ModuleNotFoundError:
            continue
    raise ImportError("the loaded vLLM has chunked local attention in no known module")


def local_attention_builder(backend: Any, setting: BuilderInputs, chunk: int, block_size: int) -> Any:
    """Make the metadata builder of `backend`, an attention backend class, under chunked local attention.

    CUDA graphs are piecewise, as in an engine with such a layer; the KV-cache spec of `setting` is replaced.

    Args:
        backend: Such as `FlashAttentionBackend`.
        setting: The builder's inputs.
        chunk: Tokens in an attention chunk.
        block_size: Tokens in a block of the KV cache.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    create = layer_module().create_chunked_local_attention_backend
    # Up to 0.17 the release's factory also takes the block size.
    sizes = (chunk, block_size) if "block_size" in inspect.signature(create).parameters else (chunk,)
    full, layers, config, device = setting.arguments(block_size=block_size)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=torch.bfloat16,
        attention_chunk_size=chunk,
    )
    return setting.construct(create(backend, *sizes).get_builder_cls(), spec, layers, config, device)


class Way(enum.Enum):
    """Which FlashInfer kernels vLLM uses."""

    NATIVE = enum.auto()
    """FlashInfer's wrappers, which are planned on the host."""
    XQA = enum.auto()
    """XQA for decodes, the wrappers for prefills: vLLM's choice on an H200 that has FlashInfer's kernels."""
    TRTLLM = enum.auto()
    """trtllm-gen for all requests, as on a B200."""
    CONTEXT_PARALLEL = enum.auto()
    """The wrappers, with each request's KV cache spread over two GPUs."""


def flashinfer_builder(cls: Any, setting: BuilderInputs, way: Way) -> Any:
    """Make FlashInfer's builder so that it uses the given kernels.

    Raises:
        AbsentError: This release decodes with other kernels on this machine.
    """
    arguments = setting.arguments()
    config: Any = arguments[2]
    forced = {Way.TRTLLM: True, Way.XQA: None}.get(way, False)
    if hasattr(config, "attention_config"):  # 0.12 never uses XQA on Hopper
        config.attention_config.use_trtllm_attention = forced
    if hasattr(config.cache_config, "kv_cache_layout"):  # since 0.30; an engine sets it at start-up
        config.cache_config.kv_cache_layout = "LBNHC"
    _know_one_layer(setting.model)
    if loaded_source() is not None:
        _no_workspace()
    if way is Way.CONTEXT_PARALLEL:
        with context_parallel(config):
            return setting.construct(cls, *arguments)
    builder = setting.construct(cls, *arguments)
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    if way is Way.XQA and getattr(kernel, "value", None) != "xqa":
        raise AbsentError("this release decodes with FlashInfer's native wrappers on an H200")
    if way is Way.TRTLLM and not builder.use_trtllm_decode_attention:
        raise AbsentError("this release does not decode with trtllm-gen", "not constructible here: needs trtllm-gen")
    return builder


def _no_workspace() -> None:
    """Keep FlashInfer's builder from sizing its workspace by the heads: no kernel of an unpacked release runs."""
    module: Any = importlib.import_module(f"{_BACKENDS}flashinfer")
    if hasattr(module, "FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM"):  # since 0.26
        module.FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM = 0


def _know_one_layer(model: Model) -> None:
    """Give FlashInfer's builder one layer's parameters, which in an engine it reads from the model."""
    module = importlib.import_module(f"{_BACKENDS}flashinfer")
    window_left = -1 if model.window is None else model.window - 1
    made = importlib.import_module(f"{_BACKENDS}utils").PerLayerParameters
    parameters = made(window_left, None, model.head_size**-0.5, model.sinks)
    module.get_per_layer_parameters = lambda *arguments: {LAYER: parameters}  # type: ignore[attr-defined]
