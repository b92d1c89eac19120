"""A drafter of the V1 runner whose drafting is captured as CUDA graphs; the patch `draft-graphs` puts it in place."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.patching import Transaction, temporarily
from vllm_async_spec.spec_decode.draft_graphs import DraftGraphs, DraftInputs, DraftShape, batch_sizes
from vllm_async_spec.vllm_plugin.log import inform
from vllm_async_spec.vllm_plugin.patches.draft_first_pass import FirstPass, GivenFirstPass, returns_pair

if TYPE_CHECKING:
    from vllm_async_spec.spec_decode.draft_graphs import Capture
    from vllm_async_spec.vllm_plugin.upstream import Proposer, RunnerBase

_SPLIT = "EagleProposer"
"""The drafter whose batches keep their tokens in the first pass; a draft model's get one more for each request."""
LAST_INDICES = ("token_indices_to_sample", "last_token_indices")
"""Parameter of `propose` with the index of each request's last accepted token, newer name first."""
_DRAFTS = "num_speculative_tokens"
"""Parameter of `propose` with the number of drafts to make."""


def most_rows(runner: RunnerBase) -> int:
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
def _launched_plainly(drafter: Proposer) -> Iterator[Transaction]:
    """Within the block, the drafter launches its kernels one by one, without padding and piecewise graphs.

    Yields:
        Takes more changes for the length of the block.
    """
    with temporarily() as changes:
        if hasattr(drafter, "use_cuda_graph"):
            changes.set(drafter, "use_cuda_graph", False)
        if hasattr(drafter, "cudagraph_dispatcher"):
            changes.set(drafter, "cudagraph_dispatcher", _Plainly(drafter.cudagraph_dispatcher))
        yield changes


class Drafter:
    """CUDA graphs of one drafter's `propose`.

    Args:
        runner: the runner that owns the drafter.
        capture: captures functions and returns their replays.

    Raises:
        ValueError: `propose` keeps state of each step in the drafter.
    """

    def __init__(self, runner: RunnerBase, capture: Capture) -> None:
        drafter = runner.drafter
        self._propose = drafter.propose
        signature = inspect.signature(drafter.propose)
        self._last_indices = next(name for name in LAST_INDICES if name in signature.parameters)
        self._drafter, self._drafts = drafter, drafter.num_speculative_tokens
        self._tokens = self._drafts + 1
        # From 0.24 on the scheduler chooses the number of drafts.
        self._chosen = _DRAFTS in signature.parameters
        self._metadata_class = inspect.unwrap(type(drafter).propose).__globals__["CommonAttentionMetadata"]
        most = most_rows(runner)
        table = runner.input_batch.block_table[getattr(drafter, "kv_cache_gid", 0)].get_device_tensor(1)
        axes = len(runner.mrope_positions.gpu) if runner.uses_mrope else 0
        self._shape = shape = DraftShape(
            most, self._tokens, _hidden(drafter, runner), table.shape[1], runner.dtype, axes
        )
        self._set: set[str] = set()
        self._graphs = self._captured(shape, runner.device, capture)
        self.sizes = self._graphs.sizes
        self._rest: DraftGraphs | None = None
        if type(drafter).__name__ == _SPLIT and self._drafts > 1:
            self._rest = self._captured(replace(shape, tokens=1, own=drafter.hidden_size), runner.device, capture)
            self._first_pass = FirstPass(drafter.model)
            self._none_rejected = torch.zeros(most, dtype=torch.int32, device=runner.device)

    def _captured(self, shape: DraftShape, device: torch.device, capture: Capture) -> DraftGraphs:
        """Graphs of `propose` for batches with `shape.tokens` tokens of each request."""
        graphs = DraftGraphs(
            functools.partial(self._launch, shape), DraftInputs(shape, device), batch_sizes(shape.rows), capture
        )
        if self._set:
            raise ValueError(f"each step sets {', '.join(sorted(self._set))} of the drafter, which no replay does")
        return graphs

    def _launch(self, shape: DraftShape, given: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        """What is captured."""
        drafter, tokens = self._drafter, shape.tokens
        metadata = self._metadata_class(
            query_start_loc=given["query_start_loc"],
            query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32, device="cpu") * tokens,
            seq_lens=given["seq_lens"],
            num_reqs=rows,
            num_actual_tokens=rows * tokens,
            max_query_len=tokens,
            # A bound for every later replay.
            max_seq_len=drafter.max_model_len,
            block_table_tensor=given["block_table"],
            slot_mapping=given["slot_mapping"],
            causal=True,
        )
        with _launched_plainly(drafter) as changes:
            if shape.own:
                both = given["sampled_states"], given["own_states"]
                changes.set(drafter, "model", GivenFirstPass(drafter.model, both if returns_pair(drafter) else both[0]))
            with self._watched():
                drafts: torch.Tensor = self._propose(
                    target_token_ids=given["token_ids"],
                    target_positions=given["positions"],
                    target_hidden_states=given["hidden_states"],
                    next_token_ids=given["next_token_ids"],
                    common_attn_metadata=metadata,
                    sampling_metadata=None,
                    num_rejected_tokens_gpu=given["rejected"],
                    **{self._last_indices: given["last_indices"]},
                    **({_DRAFTS: self._drafts} if self._chosen else {}),
                )
        return drafts

    @property
    def has_rest(self) -> bool:
        """Whether the draft steps after a first pass that is launched are replayed."""
        return self._rest is not None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note the drafter's attributes that the block sets to another object; the last block counts."""
        before = dict(vars(self._drafter))
        yield
        after = vars(self._drafter)
        self._set = {name for name in after if after[name] is not before.get(name)}

    def propose(self, **given: Any) -> torch.Tensor:
        """Replay a graph of all drafting if every request has all its drafts to verify.

        Else launch the first pass and replay what follows, or call vLLM's `propose` if there is no graph of that.
        """
        metadata = given["common_attn_metadata"]
        rows = metadata.num_reqs
        if given.get(_DRAFTS, self._drafts) != self._drafts or rows > self.sizes[-1]:
            drafts: torch.Tensor = self._propose(**given)
            return drafts
        hidden, table = given["target_hidden_states"], metadata.block_table_tensor[:rows]
        if (hidden.shape[1], table.shape[1]) != (self._shape.hidden, self._shape.pages):
            return self._stop(given, f"hidden states of width {hidden.shape[1]} and {table.shape[1]} pages a request")
        embeddings, _ = given.get("mm_embed_inputs") or ((), None)
        if (
            given["num_rejected_tokens_gpu"] is None
            or len(embeddings) > 0  # of images, say; a graph only embeds tokens
            or metadata.max_query_len != self._tokens
            or metadata.num_actual_tokens != rows * self._tokens
        ):
            return self._propose(**given) if self._rest is None else self._draft_rest(self._rest, rows, given)
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

    def _draft_rest(self, graphs: DraftGraphs, rows: int, given: dict[str, Any]) -> torch.Tensor:
        """Have vLLM launch the first pass, and replay the draft steps after it."""
        metadata, last, rejected = given["common_attn_metadata"], given[self._last_indices], "num_rejected_tokens_gpu"
        drafter = self._drafter
        model, drafter.model = drafter.model, self._first_pass
        try:
            if self._chosen:
                self._propose(**given | {_DRAFTS: 1})
            else:
                drafter.num_speculative_tokens = 1
                self._propose(**given)
        finally:
            drafter.model, drafter.num_speculative_tokens = model, self._drafts
        if last is None:
            last = metadata.query_start_loc[1 : rows + 1] - 1
        sampled, own = self._first_pass.taken(last)
        tensors = {
            "positions": given["target_positions"][..., last],
            # Of them MTP in 0.14 to 0.17 makes its next step.
            "hidden_states": given["target_hidden_states"][last],
            "sampled_states": sampled,
            "own_states": own,
            "rejected": self._none_rejected[:rows] if given[rejected] is None else given[rejected],
            "seq_lens": metadata.seq_lens[:rows],
            "block_table": metadata.block_table_tensor[:rows],
        }
        return graphs.draft(rows, tensors)

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
