"""vLLM's FlashInfer backend with a metadata builder that plans from the upper bound, so that it waits for nothing.

The builder is a subclass of vLLM's. It hands vLLM's `build` the bound in place of exact lengths, and afterwards
writes the device's lengths over what was planned. Where drafts are verified by a planned wrapper, it lets vLLM capture
them in full CUDA graphs, and so it does on Hopper, though XQA would take them, while drafts and short prompts are
planned together. It also settles which XQA kernels decoding needs: one token a request, all drafts of every
request, and a ragged batch; all are compiled when the builder is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vllm_async_spec.attention.flashinfer import PlanBuffers, write_exact_lengths
from vllm_async_spec.attention.trtllm import causal_draft_masks
from vllm_async_spec.attention.trtllm_shape import (
    XQA,
    FlashInferFeatures,
    TrtllmShape,
    UnsupportedShapeError,
    takes_ragged,
)
from vllm_async_spec.host_lengths import with_host_values
from vllm_async_spec.kernels import compile_kernels
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform
from vllm_async_spec.vllm_plugin.patches.flashinfer_graphs import MOST_ROWS, GraphWrappers, drafts_in_graphs
from vllm_async_spec.vllm_plugin.patches.flashinfer_mixed import MixedWrapper, load_flash_attention_2
from vllm_async_spec.vllm_plugin.patches.flashinfer_xqa import compile_xqa, no_flashinfer, without_xqa

_PLANS_IN_FLIGHT = 8
"""A step plans once for the target and at most once for each draft, and two steps are in flight; more wait, counted."""

_PLAN_BYTES = 8 << 20
"""What flashinfer-python gives each wrapper to plan in."""

_WORDS = 2
"""uint16 words of a row of XQA's draft mask, for up to 32 query tokens."""

_DRAFT_MASKS = causal_draft_masks(torch.arange(16 * _WORDS, device="cpu"), 16 * _WORDS).numpy()


def _unneeded(builder: Any) -> str | None:
    metadata = sys.modules[builder.__module__].CommonAttentionMetadata
    if "seq_lens_cpu_upper_bound" not in metadata.__dataclass_fields__:
        return "this vLLM's runner gives no upper bound to plan from"
    return None


def _apply(transaction: Transaction, module: ModuleType) -> None:
    builder = _device_lengths(module.FlashInferMetadataBuilder, module.AttentionCGSupport)
    transaction.set(module.FlashInferBackend, "get_builder_cls", staticmethod(lambda: builder))


def _device_lengths(upstream: type[Any], support: Any) -> type[Any]:
    """The subclass of vLLM's builder that plans from the upper bound."""

    class FlashInferMetadataBuilder(upstream):  # type: ignore[misc]
        """As vLLM's; see this module."""

        reorder_batch_threshold: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            platform = sys.modules[upstream.__module__].current_platform
            if _decodes_with_xqa(self) and (reason := _xqa_refuses(self, platform)) is not None:
                inform("vllm-async-spec: FlashInfer decodes by its planned wrappers, without XQA: %s", reason)
                with without_xqa():
                    super().__init__(*args, **kwargs)
            self._drafts = self.vllm_config.speculative_config is not None
            self._batch: Any = None
            # Who may plan a whole batch, drafts and prompts alike, and who has the one that is being built.
            self._planners: list[GraphWrappers | MixedWrapper] = []
            self._planner: GraphWrappers | MixedWrapper | None = None
            if self._drafts:
                self._plan_buffers = PlanBuffers(_PLANS_IN_FLIGHT, _PLAN_BYTES, self.device)
                _unpin(self)
                compile_kernels(self.device)
            if _may_plan(self.vllm_config):
                backend = _backend_of_wrappers(self, platform)
                if self.enable_cuda_graph and (self.reorder_batch_threshold == 1 or _takes_over(self, backend)):
                    # Elsewhere FlashInfer has no other kernels to choose.
                    flash_attention_2 = backend == "fa2" or not platform.is_device_capability(90)
                    self._planners.append(GraphWrappers(self, backend, flash_attention_2))
                    if self.reorder_batch_threshold > 1:
                        _say()
                if backend == "fa2":
                    self._planners.append(MixedWrapper(self))
                    load_flash_attention_2(self)
            if _decodes_with_xqa(self):
                compile_xqa(_xqa_shapes(self))

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            module = sys.modules[upstream.__module__]
            taken = _xqa_takes(vllm_config, kv_cache_spec, module.FlashInferBackend, module.current_platform)
            with contextlib.nullcontext() if taken else without_xqa():
                found = super().get_cudagraph_support(vllm_config, kv_cache_spec)
            wider = found is support.UNIFORM_SINGLE_TOKEN_DECODE and _may_plan(vllm_config)
            return support.UNIFORM_BATCH if wider else found

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            if not self._drafts:
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata = common_attn_metadata
            planner = next((each for each in self._planners if each.takes(metadata)), None)
            reason = _needs_exact(self, common_prefix_len)
            if reason is not None:
                record_fallback(reason)
                return self._build_from(metadata, planner, common_prefix_len, metadata, fast_build)
            graphs = planner if isinstance(planner, GraphWrappers) else None
            bound, block_table = _bound_of(metadata), None
            built = None if graphs is None else graphs.again(metadata, bound)
            if built is not None:
                block_table = metadata.block_table_tensor
            else:
                bound = bound if graphs is None else graphs.ahead(metadata, bound)
                given = _bounded(metadata, bound)
                built = self._build_from(given, planner, common_prefix_len, metadata, fast_build)
                if not hasattr(built.prefill, "wrapper"):
                    graphs = None  # upstream has chosen kernels that are not planned
                if graphs is not None:
                    graphs.keep(metadata, bound, built)
            if graphs is not None:
                # A drafter runs it outside the graph too, where it refuses a query with the rows that pad the batch.
                built.prefill.wrapper._qo_indptr_last = built.num_prefill_tokens
            lengths, decodes = metadata.seq_lens, built.num_decodes
            for part, rows in ((built.decode, lengths[:decodes]), (built.prefill, lengths[decodes:])):
                if hasattr(part, "wrapper"):
                    write_exact_lengths(part.wrapper, rows, self.page_size, block_table)
            return built

        def _build_from(self, given: Any, planner: Any, common_prefix_len: int, metadata: Any, fast_build: bool) -> Any:
            """Upstream's `build` of `given`, which stands for `metadata`, with a wrapper of `planner`, if given."""
            threshold, self._batch, self._planner = self.reorder_batch_threshold, metadata, planner
            if planner is not None:
                # So that to upstream all are prefills, which have a wrapper, and none is XQA's.
                self.reorder_batch_threshold = 0
            try:
                built = super().build(common_prefix_len, given, fast_build)
            finally:
                self._batch, self._planner, self.reorder_batch_threshold = None, None, threshold
                self._plan_buffers.planned()
            return built

        def _get_prefill_wrapper(self, *args: Any, **kwargs: Any) -> Any:
            make = functools.partial(super()._get_prefill_wrapper, *args, **kwargs)
            return self._with_plan_buffer(make() if self._planner is None else self._planner.of(self._batch, make))

        def _get_decode_wrapper(self, *args: Any, **kwargs: Any) -> Any:
            return self._with_plan_buffer(super()._get_decode_wrapper(*args, **kwargs))

        def _with_plan_buffer(self, wrapper: Any) -> Any:
            # That of decode context parallelism holds two others, and waits.
            if self._batch is not None and hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
                self._plan_buffers.lend(wrapper)
            return wrapper

    if hasattr(upstream, "_compute_decode_query_lens"):
        _add_ragged_xqa(FlashInferMetadataBuilder, upstream)
    if hasattr(upstream, "get_varlen_cudagraph_max_query_len"):
        # Upstream's own answer: ours to the question above would lead it to kernels that this machine has not.
        FlashInferMetadataBuilder.get_varlen_cudagraph_max_query_len = upstream.get_varlen_cudagraph_max_query_len
    FlashInferMetadataBuilder.__qualname__ = upstream.__qualname__
    return FlashInferMetadataBuilder


def _may_plan(config: Any) -> bool:
    """Whether drafts may be planned for by wrappers of the plugin's, as far as the configuration decides."""
    # Without splits, as batch invariance has it, a plan for a graph does not say which of its work there is.
    return drafts_in_graphs(config) and not importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT


def _backend_of_wrappers(builder: Any, platform: Any) -> str:
    """FlashInfer's, of wrappers that have drafts. On Hopper it would choose FlashAttention 3, which is for prompts.

    That neither packs the heads of a group nor splits keys, as few query tokens want it. With a cache of 8 bits queries
    of wrappers have 8 too, and FlashAttention 2 takes none of those.
    """
    sixteen_bits = builder.kv_cache_dtype in (torch.float16, torch.bfloat16)
    return "fa2" if sixteen_bits and platform.is_device_capability(90) else "auto"


def _takes_over(builder: Any, backend: str) -> bool:
    """Whether drafts that XQA takes are planned for instead."""
    drafts = builder.vllm_config.speculative_config.num_speculative_tokens
    rows = (1 + drafts) * builder.num_qo_heads // builder.num_kv_heads
    return _decodes_with_xqa(builder) and backend == "fa2" and rows <= MOST_ROWS


@functools.cache
def _say() -> None:
    inform("vllm-async-spec: FlashAttention 2 verifies drafts in CUDA graphs, XQA has the other decodes")


def _needs_exact(builder: Any, common_prefix_len: int) -> str | None:
    """Why this batch must be built from exact host lengths, in one of a few words; None if it needn't."""
    if builder.use_dcp:
        return "decode context parallelism"
    if common_prefix_len > 0:
        return "cascade attention"
    if getattr(builder, "is_kvcache_nvfp4", False):
        return "NVFP4 KV cache"
    return None


class _BoundedLengths(torch.Tensor):
    """Device lengths whose copy on the host is the upper bound; whatever is computed from them is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    bound: torch.Tensor

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The bound, which is on the host already."""
        return self.bound


def _bound_of(metadata: Any) -> torch.Tensor:
    """The host's upper bound of each length. Up to 0.26 the V2 runner gives draft steps that of the longest alone."""
    bound: torch.Tensor | None = metadata.seq_lens_cpu_upper_bound
    return torch.full((metadata.num_reqs,), metadata.max_seq_len, dtype=torch.int32) if bound is None else bound


def _bounded(metadata: Any, bound: torch.Tensor) -> Any:
    """A copy whose host lengths are `bound`. Releases up to 0.29 read `seq_lens_cpu`, later ones copy `seq_lens`."""
    bounded = with_host_values(metadata, bound)
    bounded.seq_lens = metadata.seq_lens.as_subclass(_BoundedLengths)
    bounded.seq_lens.bound = bound
    return bounded


def _unpin(builder: Any) -> None:
    """Make pageable what upstream fills at each build and copies to the device, so that no build overtakes a copy.

    Up to 0.28 these buffers are pinned under the V1 runner, and nothing but the wait for exact lengths stood between
    one draft step's copy and the next one's numbers. From pageable memory a copy has read its source when it returns,
    which is upstream's own remedy for the V2 runner, and for both from 0.29 on.
    """
    with torch.inference_mode(False):
        for name, value in list(vars(builder).items()):
            if isinstance(value, torch.Tensor):
                if value.is_pinned():
                    setattr(builder, name, torch.zeros_like(value))
            elif isinstance(host := getattr(value, "cpu", None), torch.Tensor) and host.is_pinned():
                value.cpu = torch.zeros_like(host)
                value.np = value.cpu.numpy()


def _decodes_with_xqa(builder: Any) -> bool:
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    return kernel is not None and kernel.value == "xqa"


def _takes_ragged(builder: Any) -> bool:
    """Whether XQA decodes, and may be given requests with different numbers of query tokens."""
    return bool(getattr(builder, "use_xqa", False) or getattr(builder, "use_dedicated_xqa", False))


def _xqa_refuses(builder: Any, platform: Any) -> str | None:
    """What of this builder's shape XQA does not take, or takes for something else; None if it takes it."""
    if getattr(builder, "is_kvcache_nvfp4", False):
        return None  # SM12x takes it, and the rules here are for other caches.
    return _refusal(
        capability=tuple(platform.get_device_capability()),
        page_size=builder.page_size,
        head_size=builder.head_dim,
        num_heads=builder.num_qo_heads,
        num_kv_heads=builder.num_kv_heads,
        query_dtype=builder.q_data_type_decode,
        kv_dtype=builder.kv_cache_dtype,
        query_tokens=builder.reorder_batch_threshold,
        sliding_window=None if builder.window_left < 0 else builder.window_left + 1,
    )


def _xqa_takes(config: Any, kv_cache_spec: Any, backend: Any, platform: Any) -> bool:
    """Whether XQA takes the shapes of this KV cache, as far as they are known before there is a builder."""
    cache: str = config.cache_config.cache_dtype
    capability = platform.get_device_capability()
    if capability is None or capability[0] not in (9, 12) or cache.startswith("nvfp4"):
        return True  # it is not XQA that is asked about, or the rules here are for other caches
    parts = getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()
    return not any(
        _refusal(
            capability=tuple(capability),
            page_size=spec.block_size,
            head_size=spec.head_size,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            num_kv_heads=spec.num_kv_heads,
            query_dtype=config.model_config.dtype,
            kv_dtype=_eight_bits(backend, cache) if cache.startswith("fp8") else spec.dtype,
            query_tokens=1 + getattr(config.speculative_config, "num_speculative_tokens", 0),
            sliding_window=getattr(spec, "sliding_window", None),
        )
        for spec in parts
        if hasattr(spec, "num_kv_heads")  # of attention; other layers have caches too
    )


def _eight_bits(backend: Any, cache: str) -> Any:
    """The dtype of a cache of 8 bits, by vLLM's own function, which has another name in 0.20."""
    known = hasattr(backend, "get_dtype_for_flashinfer")
    return (backend.get_dtype_for_flashinfer if known else backend.get_fp8_dtype_for_flashinfer)(cache)


def _refusal(**shape: Any) -> str | None:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    features = FlashInferFeatures(ragged_xqa=takes_ragged(xqa_batch_decode_with_kv_cache), large_pages=False)
    try:
        TrtllmShape(kernel=XQA, features=features, **shape)
    except UnsupportedShapeError as error:
        return str(error)
    return None


def _xqa_shapes(builder: Any) -> list[tuple[Any, ...]]:
    """Arguments of `gen_xqa_module` for every kernel that decoding may ask for."""
    shape = (
        builder.q_data_type_decode,
        builder.kv_cache_dtype,
        builder.page_size,
        builder.head_dim,
        builder.num_qo_heads // builder.num_kv_heads,
        builder.window_left >= 0,
        builder.model_config.dtype,
    )
    most = builder.reorder_batch_threshold
    if not _takes_ragged(builder):
        return [(*shape, tokens) for tokens in range(1, most + 1)]
    shapes = [(*shape, 1)]
    return shapes if most == 1 else [*shapes, (*shape, most), (*shape, most, True)]


def _add_ragged_xqa(builder: type[Any], upstream: type[Any]) -> None:
    """Ragged batches always as wide as all drafts, which has one kernel, and their mask without a wait."""

    @functools.wraps(upstream._compute_decode_query_lens)
    def _compute_decode_query_lens(
        self: Any, qo_indptr: torch.Tensor, qo_indptr_cpu: torch.Tensor, num_decodes: int, num_decode_tokens: int
    ) -> Any:
        original = upstream._compute_decode_query_lens
        tokens, offsets, ragged = original(self, qo_indptr, qo_indptr_cpu, num_decodes, num_decode_tokens)
        most = self.reorder_batch_threshold
        if not _takes_ragged(self) or (tokens in (1, most) and ragged is None):
            return tokens, offsets, ragged
        return most, qo_indptr[: num_decodes + 1], np.diff(qo_indptr_cpu[: num_decodes + 1].numpy())

    @functools.wraps(upstream._get_decode_mask)
    def _get_decode_mask(self: Any, q_len_per_req: int, ragged_q_lens: Any, num_decodes: int, causal: bool) -> Any:
        if ragged_q_lens is None or not causal or q_len_per_req > 16 * _WORDS:
            return upstream._get_decode_mask(self, q_len_per_req, ragged_q_lens, num_decodes, causal)
        starts = np.cumsum(ragged_q_lens) - ragged_q_lens
        within = np.arange(ragged_q_lens.sum()) - np.repeat(starts, ragged_q_lens)
        mask = torch.from_numpy(_DRAFT_MASKS[within])
        return mask.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else mask

    builder._compute_decode_query_lens = _compute_decode_query_lens
    builder._get_decode_mask = _get_decode_mask


IMPLEMENTATIONS = {"flashinfer-builder": Implementation(_unneeded, _apply, no_flashinfer)}
