"""A runner that assumes that all drafts are accepted and corrects the device, and the same with a mistake.

It shares nothing with the plugin's: without a mistake the simulation passes it, with one it does not.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

MISTAKES = {
    "no correction": "positions, lengths and slots of the device stay those that the host assumed",
    "subtraction": "the rejected are subtracted from what the scheduler says, which may know of them already",
    "rows by index": "a request is looked for in the row that it has now",
    "one group left": "the slots of the last KV cache group are not corrected",
    "no fence": "a pinned buffer is filled again while the device may have yet to copy it",
    "shadow": "draft steps count in the pinned lengths, which the device may have yet to copy",
    "backup": "as of no fence, but the buffer is vLLM's own, and only the wait that is gone kept it",
}


def optimistic(stock: Any, mistake: str | None = None) -> Any:
    """The class that is made of a release's `GPUModelRunner`, with one of `MISTAKES` or none."""
    return type("Optimistic", (_Optimistic, stock), {"mistake": mistake})


class _Optimistic:
    mistake: str | None
    _counts: torch.Tensor | None = None
    _begun: torch.Tensor | None = None
    """Where each row of the step before began, and how many tokens it had: (2, rows), on the device."""
    _drafted: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafted, self._rows_before = {}, {}
        self._pinned = torch.zeros(self.max_num_reqs, dtype=torch.int64)

    def _get_valid_sampled_token_count(self) -> list[int]:
        batch = self.input_batch
        if batch.prev_sampled_token_ids is None:
            return []
        counts = [1] * batch.prev_sampled_token_ids.shape[0]
        self._drafted, self._rows_before = {}, dict(batch.prev_req_id_to_index)
        for name, row in batch.prev_req_id_to_index.items():
            if name in batch.req_id_to_index and self.requests[name].prev_num_draft_len:
                self._drafted[name] = self.requests[name].prev_num_draft_len
                counts[row] += self._drafted[name]
        return counts

    def _copy_valid_sampled_token_count(self, next_token_ids: Any, counts: Any) -> None:
        super()._copy_valid_sampled_token_count(next_token_ids, counts)
        self._counts = counts

    def _update_states(self, scheduled: Any) -> Any:
        self._drafted, self._scheduled = {}, scheduled
        return super()._update_states(scheduled)

    def _prepare_inputs(self, scheduled: Any, scheduled_tokens: Any, *args: Any) -> Any:
        made = super()._prepare_inputs(scheduled, scheduled_tokens, *args)
        self._correct(np.asarray(scheduled_tokens))
        return made

    def _correct(self, tokens: Any) -> None:
        names = self.input_batch.req_ids
        rows = len(names)
        host = torch.zeros(3, rows, dtype=torch.int64)
        for row, name in enumerate(names):
            drafted = name in self._drafted
            before = row if self.mistake == "rows by index" else self._rows_before[name] if drafted else 0
            host[:, row] = torch.tensor([before, drafted, self.input_batch.num_computed_tokens_cpu[row]])
        before, drafted, assumed = host.to(self.device, non_blocking=True)
        count = torch.from_numpy(tokens.astype(np.int64)).to(self.device, non_blocking=True)
        exact = assumed
        if self._begun is not None:
            begun, had = self._begun
            before = before.clamp(max=len(begun) - 1)
            rejected = self._drafts[before] + 1 - self._counts[before]
            carried = assumed - rejected if self.mistake == "subtraction" else begun[before] + had[before] - rejected
            exact = torch.where(drafted > 0, carried, assumed)
        self._begun = torch.stack([exact, count])
        if self.mistake == "no correction":
            return
        total = int(tokens.sum())
        within = torch.from_numpy(np.concatenate([np.arange(each) for each in tokens]))
        within = within.to(self.device, non_blocking=True)
        of = torch.repeat_interleave(torch.arange(rows, device=self.device), count, output_size=total)
        self.positions.gpu[:total] = exact[of] + within
        if self.uses_mrope:
            self.mrope_positions.gpu[:, :total] += (exact - assumed)[of]
        self.seq_lens.gpu[:rows] += (exact - assumed).to(torch.int32)
        positions = self.positions.gpu[:total]
        tables = self.input_batch.block_table.block_tables
        for table in tables[:-1] if self.mistake == "one group left" else tables:
            blocks = table.block_table.gpu[of, positions // table.block_size]
            table.slot_mapping.gpu[:total] = blocks * table.block_size + positions % table.block_size

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        made, common = super()._build_attention_metadata(*args, **kwargs)
        if self.mistake != "shadow":
            # A new object: of lengths that are assigned later the plugin's metadata can't tell that they are right.
            common = dataclasses.replace(
                common,
                _seq_lens_cpu=common._seq_lens_cpu.clone(),
                _num_computed_tokens_cpu=common._num_computed_tokens_cpu.clone(),
            )
        return made, common

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        drafts = self._pinned if self.mistake == "no fence" else torch.zeros_like(self._pinned)
        for row, name in enumerate(self.input_batch.req_ids):
            drafts[row] = len(self._scheduled.scheduled_spec_decode_tokens.get(name, ()))
        self._drafts = drafts.to(self.device, non_blocking=True)
        if self.mistake != "backup":
            buffer = self.drafter.backup_next_token_ids
            buffer.cpu = torch.zeros_like(buffer.cpu)
            buffer.np = buffer.cpu.numpy()
        return super().sample_tokens(*args, **kwargs)
