"""Runs a step on the device: copies its inputs in, calls the model, and copies its tokens out.

The last token of each request stays on the device, in its request slot. The step that decodes the token reads it there,
whether or not the host has seen it. `Decoding` defines what else a request slot holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_async_spec.generation.batching.attention_function import ModelError
from vllm_async_spec.generation.batching.decoding import Decoding
from vllm_async_spec.generation.batching.paged_model import PagedModel
from vllm_async_spec.generation.batching.scheduler import Row
from vllm_async_spec.generation.batching.step_inputs import fill_decodes, fill_prefills
from vllm_async_spec.generation.batching.step_slots import HostInputs, Sizes, StepSlot, StepSlots
from vllm_async_spec.generation.batching.streams import CudaStreams, Streams
from vllm_async_spec.metadata import CommonAttentionMetadata
from vllm_async_spec.streams import Arrival, captured_beside_others


@dataclass(frozen=True, slots=True)
class Launched:
    """The results of a step on their way to the host."""

    arrival: Arrival
    results: torch.Tensor
    """(rows, columns) int64, host, as `StepSlot.results`; valid once `arrival` has happened."""


class Runner:
    """Launches steps of one model.

    Args:
        target: the model.
        decoding: how rows are decoded, and what request slots hold.
        streams: where work is launched.
        sizes: limits of a step.
        slots: sets of buffers that steps use in turn: one more than the steps launched ahead.
        decode_sizes: numbers of rows that decodes are padded to, ascending; the last is `sizes.batch`.
        longest: maximum tokens of a sequence, drafts after its end included.
        cuda_graphs: whether decodes are captured, each size in each slot; all graphs share one memory pool.

    Raises:
        ModelError: the model can't be captured.
    """

    def __init__(
        self,
        target: PagedModel,
        *,
        decoding: Decoding,
        streams: Streams,
        sizes: Sizes,
        slots: int,
        decode_sizes: Sequence[int],
        longest: int,
        cuda_graphs: bool,
    ) -> None:
        device = target.model.device
        self._target = target
        self._decoding = decoding
        self._streams = streams
        self._sizes = sizes
        self.batch = sizes.batch
        """Index of the first prefill row in the results; decode rows come before."""
        self._decode_sizes = decode_sizes
        self._longest = longest
        self._slots = StepSlots(slots, sizes, device)
        self._padding_slot = sizes.batch
        self._graphs: dict[tuple[int, int], Callable[[], Any]] = {}
        if device.type == "cuda":
            # The buffers and the request slots were made on the current stream, for which `streams` do not wait.
            torch.cuda.current_stream(device).synchronize()
        self._warm_up()
        if cuda_graphs:
            assert isinstance(streams, CudaStreams)
            try:
                self._capture(streams)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ModelError(
                    f"{type(target.model).__name__} can't be captured in CUDA graphs; give cuda_graphs=False: {error}"
                ) from error

    def open(self) -> OpenStep:
        """Begin a step in the next slot."""
        return OpenStep(self, *self._slots.next())

    def _warm_up(self) -> None:
        """Call every kernel once, on the null page, so that kernels are compiled now."""
        slot, host, _ = self._slots.next()
        for name in ("query_start_loc", "page_indptr"):
            host.prefill[name][:2] = (0, 1)
        for name in ("seq_lens", "last_page_len"):
            host.prefill[name][0] = 1
        host.prefill["request_slots"][0] = self._padding_slot
        fill_decodes(
            host, [], size=self._sizes.batch, page_size=self._target.cache.page_size, padding_slot=self._padding_slot
        )
        with torch.inference_mode():
            self._streams.copy_in(slot.number, lambda: self._slots.send(slot, host, prefills=True))
            self._streams.compute(slot.number, lambda: self._warm_up_in(slot, host))
        self._streams.drain()

    def _warm_up_in(self, slot: StepSlot, host: HostInputs) -> None:
        self._prefill(slot, host, rows=1, tokens=1, longest=1, longest_query=1, sampled=True)
        for size in self._decode_sizes:
            # A padding row has one token, or with drafts two tokens and the drafts.
            self._decode(slot, size, longest=2 + self._sizes.drafts, sampled=True)

    def _capture(self, streams: CudaStreams) -> None:
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            # Capture the largest size first, so that the others fit into its memory.
            for size in reversed(self._decode_sizes):
                for slot in self._slots.slots:
                    forward = functools.partial(self._decoding.forward, slot.inputs.decode, size, self._longest)
                    self._graphs[slot.number, size] = captured_beside_others(
                        lambda: None, forward, pool, stream=streams.stream, capture_error_mode="thread_local"
                    )
        streams.drain()

    def size_of(self, rows: int) -> int:
        """The decode size that this number of rows is padded to."""
        return next(size for size in self._decode_sizes if size >= rows)

    def _decode(self, slot: StepSlot, size: int, *, longest: int, sampled: bool) -> None:
        replay, inputs = self._graphs.get((slot.number, size)), slot.inputs.decode
        found = self._decoding.forward(inputs, size, longest) if replay is None else replay()
        self._decoding.commit(found, inputs, size, sampled, slot.results[:size])

    def _prefill(
        self,
        slot: StepSlot,
        host: HostInputs,
        *,
        rows: int,
        tokens: int,
        longest: int,
        longest_query: int,
        sampled: bool,
    ) -> None:
        inputs, known = slot.inputs.prefill, host.tensors.prefill
        metadata = CommonAttentionMetadata(
            query_start_loc=inputs.query_start_loc[: rows + 1],
            query_start_loc_cpu=known.query_start_loc[: rows + 1],
            seq_lens=inputs.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=tokens,
            max_query_len=longest_query,
            max_seq_len=longest,
            block_table_tensor=inputs.block_table[:rows],
            slot_mapping=inputs.slot_mapping[:tokens],
            seq_lens_cpu_upper_bound=known.seq_lens[:rows],
        )
        logits = self._target.prefill(metadata, known, inputs)
        self._decoding.prefill(metadata, known, inputs)
        batch = self._sizes.batch
        self._decoding.commit_prefill(logits, inputs, rows, sampled, slot.results[batch : batch + rows])


class OpenStep:
    """One step while it is launched, in inference mode: call `fill`, then `decode` and `prefill`, then `close`."""

    def __init__(self, runner: Runner, slot: StepSlot, host: HostInputs, results: torch.Tensor) -> None:
        self._runner = runner
        self._slot = slot
        self._host = host
        self._results = results
        self._sampled_decodes = self._sampled_prefills = False

    def fill(self, decodes: Sequence[Row], prefills: Sequence[Row]) -> None:
        """Write the inputs of all rows, and send them to the device."""
        runner, slot, host = self._runner, self._slot, self._host
        self._sampled_decodes = self._sampled_prefills = False
        page_size, padding_slot = runner._target.cache.page_size, runner._padding_slot
        if decodes:
            size = runner.size_of(len(decodes))
            self._sampled_decodes = fill_decodes(
                host, decodes, size=size, page_size=page_size, padding_slot=padding_slot
            )
        if prefills:
            self._sampled_prefills = fill_prefills(host, prefills, page_size=page_size, padding_slot=padding_slot)
        runner._streams.copy_in(slot.number, lambda: runner._slots.send(slot, host, prefills=bool(prefills)))

    def decode(self, rows: Sequence[Row]) -> None:
        """Launch the decodes."""
        runner, size = self._runner, self._runner.size_of(len(rows))
        longest = max(row.stop for row in rows)

        def work() -> None:
            runner._decode(self._slot, size, longest=longest, sampled=self._sampled_decodes)

        runner._streams.compute(self._slot.number, work)

    def prefill(self, rows: Sequence[Row]) -> None:
        """Launch the prompts."""
        runner = self._runner
        lengths = [row.stop - row.start for row in rows]

        def work() -> None:
            runner._prefill(
                self._slot,
                self._host,
                rows=len(rows),
                tokens=sum(lengths),
                longest=max(row.stop for row in rows),
                longest_query=max(lengths),
                sampled=self._sampled_prefills,
            )

        runner._streams.compute(self._slot.number, work)

    def close(self) -> Launched:
        """Send the results to the host."""
        runner = self._runner
        arrival = runner._streams.copy_out(self._slot.number, lambda: runner._slots.fetch(self._slot, self._results))
        return Launched(arrival, self._results)
