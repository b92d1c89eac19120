"""Replays the drafting of vLLM's V1 runner as CUDA graphs.

The runner launches each draft step kernel by kernel. With a small target model these launches take two thirds of the
host's step, and the device waits for them. vLLM captures the target, and at most the drafter's pieces between attention
layers. The patch captures all of `propose` for batches whose requests all have drafts to verify. Other batches run
vLLM's `propose`. Drafts change how fast tokens come, and never which tokens.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.patching import Transaction, temporarily
from vllm_async_spec.spec_decode.draft_graphs import DraftGraphs, DraftInputs, DraftShape, batch_sizes
from vllm_async_spec.streams import captured, refuse_waits
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform
from vllm_async_spec.vllm_plugin.patches import optimistic_runner

if TYPE_CHECKING:
    from vllm_async_spec.spec_decode.draft_graphs import Replay
    from vllm_async_spec.vllm_plugin.upstream import Proposer, RunnerBase

BUILDERS = frozenset({"FlashAttentionMetadataBuilder"})
"""Builders whose builds for drafting only launch kernels, and read only device tensors and upper bounds."""
PROPOSERS = frozenset({"EagleProposer", "DraftModelProposer"})
"""Drafters, by class, whose `propose` takes no state from the runner beyond its arguments. EAGLE's is MTP's too."""

_LAST_INDICES = ("token_indices_to_sample", "last_token_indices")
"""Parameter of `propose` with the index of each request's last accepted token, newer name first."""
_DRAFTS = "num_speculative_tokens"
"""Parameter of `propose` with the number of drafts to make."""


def refused(runner: RunnerBase) -> str | None:
    """The reason why this runner's drafter can't be captured, or None.

    Args:
        runner: a runner whose KV cache has been initialised.
    """
    drafter, parallel, compilation = runner.drafter, runner.parallel_config, runner.compilation_config
    builders = {type(builder).__name__ for builder in _builders(drafter)}
    reasons = {
        "scheduling is synchronous": not runner.use_async_scheduling,
        "the engine captures no whole forward": not compilation.cudagraph_mode.has_full_cudagraphs(),
        "the drafter is to run eagerly": bool(getattr(runner.speculative_config, "enforce_eager", False)),
        "there are several ranks": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "experts are rebalanced": parallel.enable_eplb,
        "positions are XD-RoPE's": getattr(runner, "uses_xdrope_dim", 0) > 0,
        "drafts are made in parallel": bool(getattr(drafter, "parallel_drafting", False)),
        "drafts are a tree": any(any(path) for path in getattr(drafter, "tree_choices", ())),
        "the drafter has another vocabulary": bool(getattr(drafter, "use_heterogeneous_vocab", False)),
        "drafts are drawn at random": bool(getattr(drafter, "_enable_probabilistic_draft_probs", False)),
        f"drafts are made by {type(drafter).__name__}": type(drafter).__name__ not in PROPOSERS,
        "the engine serves LoRA adapters": runner.lora_config is not None,
        "keys go to another engine": runner.vllm_config.kv_transfer_config is not None,
        "scales of the KV cache are computed": bool(getattr(runner.cache_config, "calculate_kv_scales", False)),
        f"attention metadata is built by {', '.join(sorted(builders - BUILDERS))}": not builders <= BUILDERS,
        "the drafter's layers are in one of several groups": not hasattr(drafter, "kv_cache_gid")
        and len(runner.kv_cache_config.kv_cache_groups) > 1,
        "graphs are smaller than the tokens of one request": _most_rows(runner) < 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _builders(drafter: Proposer) -> list[object]:
    """The metadata builders of the drafter's layers."""
    if hasattr(drafter, "draft_attn_groups"):
        return [builder for group in drafter.draft_attn_groups for builder in group.metadata_builders]
    indexer = drafter.draft_indexer_metadata_builder
    first = drafter.attn_metadata_builder or drafter._get_attention_metadata_builder()
    return [first, *([] if indexer is None else [indexer])]


def _most_rows(runner: RunnerBase) -> int:
    """Requests of the largest batch to capture."""
    drafter, largest = runner.drafter, runner.compilation_config.max_cudagraph_capture_size or 0
    tokens = drafter.num_speculative_tokens + 1
    # A separate draft model takes one more token per request.
    room = drafter.max_num_tokens // (tokens + getattr(drafter, "net_num_new_slots_per_request", 0))
    most: int = min(runner.max_num_reqs, room, largest // tokens)
    return most


class _Plainly:
    """Replaces the drafter's dispatcher, so that vLLM replays no graphs of the drafter's pieces."""

    def __init__(self, dispatcher: object) -> None:
        self._dispatcher = dispatcher

    def dispatch(self, num_tokens: int, *_: object, **__: object) -> tuple[object, object]:
        """The answer of vLLM's dispatcher if nothing was captured."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor

        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._dispatcher, name)


@contextlib.contextmanager
def _launched_plainly(drafter: Proposer) -> Iterator[None]:
    """Within the block, the drafter launches its kernels one by one, without padding and piecewise graphs."""
    with temporarily() as changes:
        if hasattr(drafter, "use_cuda_graph"):
            changes.set(drafter, "use_cuda_graph", False)
        if hasattr(drafter, "cudagraph_dispatcher"):
            changes.set(drafter, "cudagraph_dispatcher", _Plainly(drafter.cudagraph_dispatcher))
        yield


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Keep the garbage collections before each capture from traversing all of vLLM's objects.

    There is none during a capture: it may unload a kernel's module, which would invalidate the capture.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


class Drafter:
    """CUDA graphs of one drafter's `propose`.

    Args:
        runner: the runner that owns the drafter.
        capture: captures a function and returns its replay.

    Raises:
        ValueError: `propose` keeps state of each step in the drafter.
    """

    def __init__(self, runner: RunnerBase, capture: Callable[[Callable[[], torch.Tensor]], Replay]) -> None:
        drafter = runner.drafter
        self._propose = propose = drafter.propose
        signature = inspect.signature(propose)
        self._last_indices = next(name for name in _LAST_INDICES if name in signature.parameters)
        self._drafter, self._drafts = drafter, drafter.num_speculative_tokens
        self._tokens = self._drafts + 1
        # From 0.24 on the scheduler chooses the number of drafts.
        chosen = {_DRAFTS: self._drafts} if _DRAFTS in signature.parameters else {}
        metadata_class = inspect.unwrap(type(drafter).propose).__globals__["CommonAttentionMetadata"]
        most = _most_rows(runner)
        table = runner.input_batch.block_table[getattr(drafter, "kv_cache_gid", 0)].get_device_tensor(1)
        axes = len(runner.mrope_positions.gpu) if runner.uses_mrope else 0
        self._shape = shape = DraftShape(
            most, self._tokens, _hidden(drafter, runner), table.shape[1], runner.dtype, axes
        )
        inputs = DraftInputs(shape, runner.device)

        def drafting(given: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
            metadata = metadata_class(
                query_start_loc=given["query_start_loc"],
                query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32) * self._tokens,
                seq_lens=given["seq_lens"],
                num_reqs=rows,
                num_actual_tokens=rows * self._tokens,
                max_query_len=self._tokens,
                # A bound for every later replay.
                max_seq_len=drafter.max_model_len,
                block_table_tensor=given["block_table"],
                slot_mapping=given["slot_mapping"],
                causal=True,
            )
            with _launched_plainly(drafter), self._watched():
                drafts: torch.Tensor = propose(
                    target_token_ids=given["token_ids"],
                    target_positions=given["positions"],
                    target_hidden_states=given["hidden_states"],
                    next_token_ids=given["next_token_ids"],
                    common_attn_metadata=metadata,
                    sampling_metadata=None,
                    num_rejected_tokens_gpu=given["rejected"],
                    **{self._last_indices: given["last_indices"]},
                    **chosen,
                )
            return drafts

        self._set: set[str] = set()
        self._graphs = DraftGraphs(drafting, inputs, batch_sizes(most), capture)
        self.sizes = self._graphs.sizes
        if self._set:
            raise ValueError(f"each step sets {', '.join(sorted(self._set))} of the drafter, which no replay does")

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note the drafter's attributes that the block sets to another object; the last block counts."""
        before = dict(vars(self._drafter))
        yield
        after = vars(self._drafter)
        self._set = {name for name in after if after[name] is not before.get(name)}

    def propose(self, **given: Any) -> torch.Tensor:
        """Replay a graph if every request has all its drafts to verify; else call vLLM's `propose`."""
        metadata = given["common_attn_metadata"]
        rows = metadata.num_reqs
        embeddings, _ = given.get("mm_embed_inputs") or ((), None)
        if (
            given["num_rejected_tokens_gpu"] is None
            or len(embeddings) > 0  # of images, say; a graph only embeds tokens
            or given.get(_DRAFTS, self._drafts) != self._drafts
            or metadata.max_query_len != self._tokens
            or metadata.num_actual_tokens != rows * self._tokens
            or rows > self.sizes[-1]
        ):
            drafts: torch.Tensor = self._propose(**given)
            return drafts
        hidden, table = given["target_hidden_states"], metadata.block_table_tensor[:rows]
        if (hidden.shape[1], table.shape[1]) != (self._shape.hidden, self._shape.pages):
            return self._stop(given, f"hidden states of width {hidden.shape[1]} and {table.shape[1]} pages a request")
        # As `propose` leaves it; a batch before this one may have got fewer drafts.
        self._drafter.num_speculative_tokens = self._drafts
        tensors = {
            "token_ids": given["target_token_ids"],
            "positions": given["target_positions"],
            "hidden_states": hidden,
            "slot_mapping": metadata.slot_mapping[: rows * self._tokens],
            "next_token_ids": given["next_token_ids"],
            "last_indices": given[self._last_indices],
            "rejected": given["num_rejected_tokens_gpu"],
            "seq_lens": metadata.seq_lens[:rows],
            "block_table": table,
        }
        return self._graphs.draft(rows, tensors)

    def _stop(self, given: Mapping[str, Any], found: str) -> torch.Tensor:
        """Have vLLM draft for this batch and all later ones, and log why."""
        self._drafter.propose = self._propose
        inform("vllm-async-spec no longer replays drafting as CUDA graphs: the drafter gets %s", found)
        return self._propose(**given)


def _hidden(drafter: Proposer, runner: RunnerBase) -> int:
    """The width of the hidden states that `propose` gets."""
    if getattr(runner, "use_aux_hidden_state_outputs", False):
        # Hidden states of several layers, concatenated: the input width of the drafter's first matrix.
        width: int = drafter.model.model.fc.weight.shape[-1]
    else:
        width = runner.model_config.get_hidden_size()
    return width


def _replay(runner: RunnerBase, changes: Transaction) -> tuple[int, int, float, float]:
    """Capture this runner's drafter, and replay the graphs from now on.

    Returns:
        The number of batch sizes, the largest, the seconds taken, and the MiB of device memory taken.
    """
    start, reserved, pool = time.perf_counter(), torch.cuda.memory_reserved(), torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], torch.Tensor]) -> Replay:
        refuse_waits(run)
        return captured(run, pool)

    with _no_garbage_collected(), torch.inference_mode():
        drafting = Drafter(runner, capture)
    changes.set(runner.drafter, "propose", drafting.propose)
    taken = (torch.cuda.memory_reserved() - reserved) / 2**20
    return len(drafting.sizes), drafting.sizes[-1], time.perf_counter() - start, taken


def _capture(runner: RunnerBase, warm_up: Callable[[], object]) -> None:
    """Let this runner's drafter replay graphs, or log why it can't.

    Args:
        runner: a runner whose KV cache has been initialised.
        warm_up: allocates the sampler's largest tensors. vLLM leaves them in the allocator's cache, which each capture
            empties. If they no longer fit beside the graphs, the graphs go.
    """
    drafter = getattr(runner, "drafter", None)
    try:
        if drafter is None or not any(name in inspect.signature(drafter.propose).parameters for name in _LAST_INDICES):
            return  # no drafter, or one without a model
        reason = refused(runner)
        if reason is None:
            with Transaction() as changes:
                taken = _replay(runner, changes)
                warm_up()
            inform(
                "vllm-async-spec replays drafting as CUDA graphs of %d batch sizes up to %d (%.1f s, %.0f MiB)", *taken
            )
            return
        failed = False
    except Exception as error:  # vLLM's own drafting still works
        failed, reason = True, f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}"
    if failed:
        _give_back(warm_up)
    inform("vllm-async-spec does not capture drafting as CUDA graphs: %s", reason)


def _give_back(warm_up: Callable[[], object]) -> None:
    """Free the memory of graphs that nothing replays, and leave the sampler's tensors in the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    warm_up()


def _apply(transaction: Transaction, module: ModuleType) -> None:
    runner = module.GPUModelRunner
    dummy_sampler_run = runner._dummy_sampler_run
    done = weakref.WeakSet[Any]()

    @functools.wraps(dummy_sampler_run)
    def _dummy_sampler_run(self: RunnerBase, *args: object, **kwargs: object) -> object:
        made = dummy_sampler_run(self, *args, **kwargs)
        # vLLM calls this at the end of warm-up, after capturing the target, and earlier at the end of memory profiling.
        if self.attn_groups and self not in done:
            done.add(self)
            _capture(self, lambda: dummy_sampler_run(self, *args, **kwargs))
        return made

    transaction.set(runner, "_dummy_sampler_run", _dummy_sampler_run)


IMPLEMENTATIONS = {"draft-graphs": Implementation(_apply, optimistic_runner.unneeded)}
