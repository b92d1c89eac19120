"""Replaces vLLM's FlashInfer metadata builder by a subclass that plans from the upper bound, to avoid host waits.

The subclass passes the bound to vLLM's `build` instead of exact lengths, then writes the exact lengths over the plan
on the device. It lets vLLM capture drafts in full CUDA graphs where a planned wrapper verifies them. On Hopper it
prefers a planned wrapper to XQA for such drafts, and plans drafts together with short prompts. It also compiles
every XQA kernel that decoding needs: one token a request, all drafts of every request, and a ragged batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from vllm_async_spec.attention.flashinfer import PlanBuffers, write_exact_lengths
from vllm_async_spec.host_lengths import with_host_values
from vllm_async_spec.kernels import compile_kernels
from vllm_async_spec.known_on_host import known_on_host
from vllm_async_spec.patching import Transaction
from vllm_async_spec.sync_policy import record_fallback
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform
from vllm_async_spec.vllm_plugin.patches.flashinfer_graphs import MOST_ROWS, GraphWrappers, drafts_in_graphs
from vllm_async_spec.vllm_plugin.patches.flashinfer_mixed import MixedWrapper, load_flash_attention_2
from vllm_async_spec.vllm_plugin.patches.flashinfer_xqa import compile_xqa, no_flashinfer, without_xqa
from vllm_async_spec.vllm_plugin.patches.flashinfer_xqa_shapes import (
    RaggedXqa,
    decodes_with_xqa,
    xqa_refuses,
    xqa_shapes,
    xqa_takes,
)
from vllm_async_spec.vllm_plugin.upstream_flashinfer import FlashInferBuilderBase

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import AttentionSpec, BatchMetadata
    from vllm_async_spec.vllm_plugin.upstream_config import MaybeNone, Platform, VllmConfig
    from vllm_async_spec.vllm_plugin.upstream_flashinfer import FlashInferMetadata, PlannedWrapper

_PLANS_IN_FLIGHT = 8
"""Pinned plan buffers. Each of two steps in flight plans for the target and at most once per draft. More plans wait."""

_AUTOREGRESSIVE = frozenset({"eagle", "eagle3", "mtp"})
"""Methods whose drafters extend each request by one token a draft step; dFlash's take several."""

_PLAN_BYTES = 8 << 20
"""Bytes of the pinned buffer in which a wrapper of flashinfer-python plans."""

Planner: TypeAlias = GraphWrappers | MixedWrapper


def _apply(transaction: Transaction, module: ModuleType) -> None:
    builder = _subclass(module)
    transaction.set(module.FlashInferBackend, "get_builder_cls", staticmethod(lambda: builder))


class _UpstreamBuild:
    """Changes the builder while vLLM's `build` runs, and restores it afterwards.

    Each builder reuses one instance, which costs 0.5 µs a step more than plain assignments. A generator takes 3 µs and
    a `Transaction` 4 µs.

    Attributes:
        batch: the batch that is being built, or None.
        planner: has the wrapper for this batch; None where vLLM has it.
    """

    __slots__ = ("_builder", "_threshold", "batch", "planner")

    def __init__(self, builder: PlansFromBound) -> None:
        self._builder, self._threshold = builder, 0
        self.batch: BatchMetadata | MaybeNone = None
        self.planner: Planner | None = None

    def of(self, batch: BatchMetadata, planner: Planner | None) -> _UpstreamBuild:
        """Set the batch and planner of the next build, and return this context manager."""
        self.batch, self.planner = batch, planner
        return self

    def __enter__(self) -> None:
        if self.planner is not None:
            # With threshold 0, vLLM treats every request as a prefill: it uses the planned wrapper and never XQA.
            self._threshold, self._builder.reorder_batch_threshold = self._builder.reorder_batch_threshold, 0

    def __exit__(self, *raised: object) -> None:
        self.batch = None
        if self.planner is not None:
            self.planner, self._builder.reorder_batch_threshold = None, self._threshold
        self._builder._plan_buffers.planned()


class PlansFromBound(FlashInferBuilderBase):
    """The subclass's own methods. Each method that overrides one of vLLM's calls it."""

    _vllm: ModuleType
    """The module that defines vLLM's builder."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        platform = self._vllm.current_platform
        if decodes_with_xqa(self) and (reason := xqa_refuses(self, platform)) is not None:
            inform("vllm-async-spec: FlashInfer decodes with its planned wrappers, not with XQA: %s", reason)
            with without_xqa():
                super().__init__(*args, **kwargs)
        self._drafts = self.vllm_config.speculative_config is not None
        self._building = _UpstreamBuild(self)
        # Planners of whole batches, drafts and prompts alike, in order of preference.
        self._planners: list[Planner] = []
        if self._drafts:
            self._plan_buffers = PlanBuffers(_PLANS_IN_FLIGHT, _PLAN_BYTES, self.device)
            _unpin(self)
            compile_kernels(self.device)
        if _may_plan(self.vllm_config):
            _plan_drafts_as_prefills(self)
            backend = _backend_of_wrappers(self, platform)
            if self.enable_cuda_graph and (self.reorder_batch_threshold == 1 or _takes_over(self, backend)):
                # FlashInfer chooses between FlashAttention 2 and 3 on SM90 only.
                flash_attention_2 = backend == "fa2" or not platform.is_device_capability(90)
                self._planners.append(GraphWrappers(self, backend, flash_attention_2))
                if self.reorder_batch_threshold > 1:
                    _say()
            if backend == "fa2":
                self._planners.append(MixedWrapper(self))
                load_flash_attention_2(self)
        if decodes_with_xqa(self):
            compile_xqa(xqa_shapes(self))
            # From 0.28 on vLLM's V2 runner then replays all draft steps after the first as one CUDA graph. A subclass
            # that builds other batches, as of chunked local attention, would keep those of the first step.
            is_whole = type(self).build is PlansFromBound.build
            self.supports_draft_decode_metadata_update = is_whole and _drafts_by_single_tokens(self.vllm_config)

    def update_draft_decode_metadata(self, metadata: FlashInferMetadata) -> None:
        """Do nothing between draft steps: XQA reads only the lengths and pages on the device, which vLLM advances."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> object:
        """Widen vLLM's answer for this builder's kernels to uniform batches where plans may be captured."""
        vllm, support = cls._vllm, cls._vllm.AttentionCGSupport
        taken = xqa_takes(vllm_config, kv_cache_spec, vllm.FlashInferBackend, vllm.current_platform)
        with contextlib.nullcontext() if taken else without_xqa():
            found = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        wider = found is support.UNIFORM_SINGLE_TOKEN_DECODE and _may_plan(vllm_config)
        return support.UNIFORM_BATCH if wider else found

    def build(
        self, common_prefix_len: int, common_attn_metadata: BatchMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """Build vLLM's metadata from the upper bound, and correct its plan on the device."""
        if not self._drafts:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = common_attn_metadata
        planner = next((each for each in self._planners if each.takes(metadata)), None)
        reason = _needs_exact(self, common_prefix_len)
        if reason is not None:
            record_fallback(reason)
            with self._building.of(metadata, planner):
                return super().build(common_prefix_len, metadata, fast_build)
        graphs = planner if isinstance(planner, GraphWrappers) else None
        bound, block_table = _bound_of(metadata), None
        built = None if graphs is None else graphs.again(metadata, bound)
        if built is not None:
            block_table = metadata.block_table_tensor
        else:
            bound = bound if graphs is None else graphs.ahead(metadata, bound)
            given = _bounded(metadata, bound)
            with self._building.of(metadata, planner):
                built = super().build(common_prefix_len, given, fast_build)
            if not hasattr(built.prefill, "wrapper"):
                graphs = None  # vLLM has chosen kernels without a plan
            if graphs is not None:
                graphs.keep(metadata, bound, built)
        if graphs is not None:
            # A drafter also runs this wrapper outside the graph, where FlashInfer refuses a query with padding rows.
            built.prefill.wrapper._qo_indptr_last = built.num_prefill_tokens
        lengths, decodes = metadata.seq_lens, built.num_decodes
        for part, rows in ((built.decode, lengths[:decodes]), (built.prefill, lengths[decodes:])):
            if hasattr(part, "wrapper"):
                write_exact_lengths(part.wrapper, rows, self.page_size, block_table)
        return built

    def _get_prefill_wrapper(self, *args: object, **kwargs: object) -> PlannedWrapper:
        make = functools.partial(super()._get_prefill_wrapper, *args, **kwargs)
        batch, planner = self._building.batch, self._building.planner
        return self._with_plan_buffer(make() if planner is None else planner.of(batch, make))

    def _get_decode_wrapper(self, *args: object, **kwargs: object) -> PlannedWrapper:
        return self._with_plan_buffer(super()._get_decode_wrapper(*args, **kwargs))

    def _with_plan_buffer(self, wrapper: PlannedWrapper) -> PlannedWrapper:
        # The wrapper of decode context parallelism consists of two others and has no such buffer; its plans wait.
        if self._building.batch is not None and hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
            self._plan_buffers.lend(wrapper)
        return wrapper


def _subclass(module: ModuleType) -> type:
    """The subclass of vLLM's builder, under the same name."""
    upstream = module.FlashInferMetadataBuilder
    ragged = (RaggedXqa,) if hasattr(upstream, "_compute_decode_query_lens") else ()
    members = {"__module__": __name__, "__qualname__": upstream.__qualname__, "_vllm": module}
    if hasattr(upstream, "get_varlen_cudagraph_max_query_len"):
        # Bound to vLLM's class: with our wider `get_cudagraph_support` it would choose kernels this machine lacks.
        members["get_varlen_cudagraph_max_query_len"] = upstream.get_varlen_cudagraph_max_query_len
    return type(upstream.__name__, (PlansFromBound, *ragged, upstream), members)


def _drafts_by_single_tokens(config: VllmConfig) -> bool:
    """Whether each draft step after the first has one token a request, for which XQA needs no mask and no plan."""
    return config.speculative_config is not None and config.speculative_config.method in _AUTOREGRESSIVE


def _may_plan(config: VllmConfig) -> bool:
    """Whether the configuration allows the plugin's wrappers to plan drafts."""
    # Batch invariance turns split-KV off, and without split-KV a graph's plan does not mark its valid tiles.
    return drafts_in_graphs(config) and not importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT


def _plan_drafts_as_prefills(builder: FlashInferBuilderBase) -> None:
    """Make vLLM leave drafts to prefill wrappers below SM90, for which our planners plan; vLLM 0.32 always did.

    From 0.33 on vLLM has decode wrappers verify a uniform batch of drafts. Their graphs need a plan for each step.
    """
    if getattr(builder, "use_fa2_native_decode", False):
        builder.use_fa2_native_decode, builder.reorder_batch_threshold = False, 1


def _backend_of_wrappers(builder: FlashInferBuilderBase, platform: Platform) -> str:
    """The FlashInfer backend of wrappers that verify drafts: `fa2` or `auto`.

    On Hopper `auto` is FlashAttention 3. It lacks GQA packing and split-KV, so short queries run faster on
    FlashAttention 2. With an 8-bit KV cache queries have 8 bits too, which FlashAttention 2 does not support.
    """
    sixteen_bits = builder.kv_cache_dtype in (torch.float16, torch.bfloat16)
    return "fa2" if sixteen_bits and platform.is_device_capability(90) else "auto"


def _takes_over(builder: FlashInferBuilderBase, backend: str) -> bool:
    """Whether planned wrappers verify drafts that XQA could verify."""
    drafts = builder.vllm_config.speculative_config.num_speculative_tokens
    rows = (1 + drafts) * builder.num_qo_heads // builder.num_kv_heads
    return decodes_with_xqa(builder) and backend == "fa2" and rows <= MOST_ROWS


@functools.cache
def _say() -> None:
    inform("vllm-async-spec: FlashAttention 2 verifies drafts in CUDA graphs; XQA runs the other decodes")


def _needs_exact(builder: FlashInferBuilderBase, common_prefix_len: int) -> str | None:
    """The reason why this batch must be built from exact host lengths, or None."""
    if builder.use_dcp:
        return "decode context parallelism"
    if common_prefix_len > 0:
        return "cascade attention"
    if getattr(builder, "is_kvcache_nvfp4", False):
        return "NVFP4 KV cache"
    return None


def _bound_of(metadata: BatchMetadata) -> torch.Tensor:
    """(requests,) int32, host: upper bounds. Up to 0.26 the V2 runner's draft steps only know the longest's bound."""
    bound = metadata.seq_lens_cpu_upper_bound
    if bound is None:
        return torch.full((metadata.num_reqs,), metadata.max_seq_len, dtype=torch.int32, device="cpu")
    return bound


def _bounded(metadata: BatchMetadata, bound: torch.Tensor) -> Any:
    """A copy whose host lengths are `bound`. Releases up to 0.29 read `seq_lens_cpu`, later ones copy `seq_lens`."""
    bounded = with_host_values(metadata, bound)
    bounded.seq_lens = known_on_host(metadata.seq_lens, bound)
    return bounded


def _unpin(builder: object) -> None:
    """Make the builder's host buffers pageable, so that no build overwrites a buffer before its copy has run.

    vLLM fills these buffers at each build and copies them to the device. Up to 0.28 they are pinned under the V1
    runner, and only the wait for exact lengths prevented this race between draft steps. A copy from pageable memory
    has read its source when it returns. vLLM does the same for the V2 runner, and from 0.29 on for both.
    """
    with torch.inference_mode(False):
        for name, value in list(vars(builder).items()):
            if isinstance(value, torch.Tensor):
                if value.is_pinned():
                    setattr(builder, name, torch.zeros_like(value))
            elif isinstance(host := getattr(value, "cpu", None), torch.Tensor) and host.is_pinned():
                value.cpu = torch.zeros_like(host)
                value.np = value.cpu.numpy()


IMPLEMENTATIONS = {"flashinfer-builder": Implementation(_apply, unneeded_here=no_flashinfer)}
