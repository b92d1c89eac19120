"""Replays the drafting of vLLM's V1 runner as CUDA graphs.

The runner launches each draft step kernel by kernel. With a small target model these launches take two thirds of the
host's step, and the device waits for them. vLLM captures the target, and at most the drafter's pieces between attention
layers. The patch captures all of `propose` for batches whose requests all have drafts to verify. For EAGLE and MTP it
also captures what follows the first pass, for batches with prompts. Other batches run vLLM's `propose`. Drafts change
how fast tokens come, and never which tokens.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform
from vllm_async_spec.vllm_plugin.patches import optimistic_runner
from vllm_async_spec.vllm_plugin.patches.capture_on_ranks import Ranks, RanksApartError
from vllm_async_spec.vllm_plugin.patches.drafter_agreement import asks_engines
from vllm_async_spec.vllm_plugin.patches.replayed_drafter import LAST_INDICES, Drafter, most_rows

if TYPE_CHECKING:
    from vllm_async_spec.spec_decode.draft_graphs import Replay
    from vllm_async_spec.vllm_plugin.upstream import Proposer, RunnerBase

BUILDERS = frozenset({"FlashAttentionMetadataBuilder"})
"""Builders whose builds for drafting only launch kernels, and read only device tensors and upper bounds."""
PROPOSERS = frozenset({"EagleProposer", "DraftModelProposer"})
"""Drafters, by class, whose `propose` takes no state from the runner beyond its arguments. EAGLE's is MTP's too."""


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
        "not all ranks are tensor-parallel": parallel.world_size > parallel.tensor_parallel_size,
        "the drafter asks the other engines of data parallelism": parallel.data_parallel_size > 1
        and asks_engines(drafter),
        "ranks divide each request's KV cache": parallel.decode_context_parallel_size > 1,
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
        "graphs are smaller than the tokens of one request": most_rows(runner) < 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _builders(drafter: Proposer) -> list[object]:
    """The metadata builders of the drafter's layers."""
    if hasattr(drafter, "draft_attn_groups"):
        return [builder for group in drafter.draft_attn_groups for builder in group.metadata_builders]
    indexer = drafter.draft_indexer_metadata_builder
    first = drafter.attn_metadata_builder or drafter._get_attention_metadata_builder()
    return [first, *([] if indexer is None else [indexer])]


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


def _replay(runner: RunnerBase, changes: Transaction, ranks: Ranks) -> tuple[int, int, str, float, float]:
    """Capture this runner's drafter on all ranks, and replay the graphs from now on.

    Returns:
        The number of batch sizes, the largest, whether batches with prompts have graphs, in words, the seconds taken,
        and the MiB of device memory taken.
    """
    start, reserved, pool = time.perf_counter(), _held(), torch.cuda.graph_pool_handle()

    def capture(runs: Sequence[Callable[[], torch.Tensor]]) -> Sequence[Replay]:
        return ranks.capture(runs, pool, runner.device)

    with _no_garbage_collected(), torch.inference_mode():
        drafting = Drafter(runner, capture)
    changes.set(runner.drafter, "propose", drafting.propose)
    taken = (_held() - reserved) / 2**20
    prompts = "with" if drafting.has_rest else "without"
    return len(drafting.sizes), drafting.sizes[-1], prompts, time.perf_counter() - start, taken


def _held() -> int:
    """Bytes that the allocator can't give back. Its cache does not count, because each capture empties it."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _capture(runner: RunnerBase, warm_up: Callable[[], object]) -> None:
    """Let this runner's drafter replay graphs, or log why it can't.

    Args:
        runner: a runner whose KV cache has been initialised.
        warm_up: allocates the sampler's largest tensors. vLLM leaves them in the allocator's cache, which each capture
            empties. If they no longer fit beside the graphs, the graphs go.
    """
    drafter = getattr(runner, "drafter", None)
    try:
        if drafter is None or not any(name in inspect.signature(drafter.propose).parameters for name in LAST_INDICES):
            return  # no drafter, or one without a model
        reason = refused(runner)
        if reason is None:
            ranks = Ranks.of(runner)
            with Transaction() as changes:
                taken = _replay(runner, changes, ranks)
                ranks.all_do(warm_up)
            inform(
                "vllm-async-spec replays drafting as CUDA graphs of %d batch sizes up to %d, "
                "%s the draft steps of batches with prompts (%.1f s, %.0f MiB)",
                *taken,
            )
            return
        failed = False
    except RanksApartError:
        raise
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
