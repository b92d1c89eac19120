"""Fills the host's inputs of a step from its rows. Nothing here touches the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_async_spec.generation.batching.pages import NULL_PAGE
from vllm_async_spec.generation.batching.scheduler import Row
from vllm_async_spec.generation.batching.step_slots import Array, HostInputs


def fill_decodes(host: HostInputs, rows: Sequence[Row], *, size: int, page_size: int, padding_slot: int) -> bool:
    """Write the decode rows, and padding up to `size` rows.

    With drafts, a row may be planned to start past `Job.last`; its position is then `Job.last`.

    A padding row is a sequence of one token on the null page, so that kernels need not know of padding.

    Returns:
        Whether any row is not greedy.
    """
    fields, count = host.decode, len(rows)
    table, temperature = fields["block_table"], fields["temperature"]
    jobs = [row.job for row in rows]
    starts = [min(row.start, row.job.last) for row in rows]
    temperatures = [job.request.temperature for job in jobs]
    # Assign whole lists: numpy spends as much on a single element.
    fields["request_slots"][:count] = [job.request_slot for job in jobs]
    fields["positions"][:count] = starts
    fields["slot_mapping"][:count] = [
        job.pages[at // page_size] * page_size + at % page_size for job, at in zip(jobs, starts, strict=True)
    ]
    temperature[:count] = temperatures
    fields["seeds"][:count] = [job.request.seed for job in jobs]
    for index, job in enumerate(jobs):
        table[index, : len(job.pages)] = job.pages
    padding = slice(count, size)
    fields["request_slots"][padding] = padding_slot
    fields["positions"][padding] = 0
    fields["slot_mapping"][padding] = NULL_PAGE * page_size
    table[padding] = NULL_PAGE
    temperature[padding] = 0
    np.add(fields["positions"][:size], 1, out=fields["seq_lens"][:size], casting="unsafe")
    return any(temperatures)


def fill_prefills(host: HostInputs, rows: Sequence[Row], *, page_size: int, padding_slot: int) -> bool:
    """Write the prefill rows, one after another.

    Returns:
        Whether any row yields a token and is not greedy.
    """
    fields, sampled, token, page = host.prefill, False, 0, 0
    fields["query_start_loc"][0] = fields["page_indptr"][0] = 0
    for index, row in enumerate(rows):
        job, request = row.job, row.job.request
        at = np.arange(row.start, row.stop)
        here = slice(token, token + len(at))
        pages = np.asarray(job.pages, dtype=np.int32)
        # Only the pages that the sequence uses by now: a plan expects exactly these.
        used = pages[: -(-row.stop // page_size)]
        fields["tokens"][here] = request.prompt[row.start : row.stop]
        fields["positions"][here] = at
        fields["slot_mapping"][here] = _slots(pages, at, page_size)
        fields["seq_lens"][index] = row.stop
        fields["block_table"][index, : len(pages)] = pages
        fields["page_indices"][page : page + len(used)] = used
        fields["last_page_len"][index] = (row.stop - 1) % page_size + 1
        fields["last"][index] = token + len(at) - 1
        fields["request_slots"][index] = job.request_slot if row.samples else padding_slot
        fields["temperature"][index] = request.temperature
        fields["seeds"][index] = request.seed
        token, page = token + len(at), page + len(used)
        fields["query_start_loc"][index + 1] = token
        fields["page_indptr"][index + 1] = page
        sampled = sampled or (row.samples and request.temperature > 0)
    return sampled


def _slots(pages: Array, at: Array, page_size: int) -> Array:
    slots: Array = pages[at // page_size].astype(np.int64) * page_size + at % page_size
    return slots
