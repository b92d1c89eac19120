"""Builders that are wrong whatever the host knows: off by one in a field of vLLM's name; and builders that remember."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import compat_attention
import compat_planted
import torch


@dataclass
class Fields:
    """As in the metadata of vLLM's FlashAttention."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_reqs: int


class AllRight(compat_planted.Builder):
    """Each field as it was given."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        m = common_attn_metadata
        return self.change(
            Fields(
                num_actual_tokens=m.num_actual_tokens,
                max_query_len=m.max_query_len,
                query_start_loc=m.query_start_loc,
                max_seq_len=m.max_seq_len,
                seq_lens=m.seq_lens,
                block_table=m.block_table_tensor,
                slot_mapping=m.slot_mapping,
                num_reqs=m.num_reqs,
            )
        )

    def change(self, built: Fields) -> Any:
        return built


class CutAndBounded(AllRight):
    """Right too: a table may be cut, and a maximum may be a bound."""

    def change(self, built: Fields) -> Any:
        return replace(built, max_seq_len=built.max_seq_len + 7, block_table=built.block_table[:, :510])


class OffByOne(AllRight):
    """One field is off by one, whatever the host knows."""

    field: ClassVar[str] = "seq_lens"
    by: ClassVar[int] = 1

    def change(self, built: Fields) -> Any:
        return replace(built, **{self.field: getattr(built, self.field) + self.by})


def off_by_one(name: str, offset: int) -> type[OffByOne]:
    return type(f"OffByOne_{name}", (OffByOne,), {"field": name, "by": offset})


class KeepsLengths(AllRight):
    """Lengths of the first batch, kept on the device: right with every new builder."""

    kept: torch.Tensor | None = None

    def change(self, built: Fields) -> Any:
        if self.kept is None:
            self.kept = built.seq_lens.clone()
        rows = min(len(self.kept), len(built.seq_lens))
        return replace(built, seq_lens=torch.cat([self.kept[:rows], built.seq_lens[rows:]]))


class KeepsLengthsOfItsSize(AllRight):
    """Lengths of the first batch with as many rows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kept: dict[int, torch.Tensor] = {}

    def change(self, built: Fields) -> Any:
        return replace(built, seq_lens=self.kept.setdefault(built.num_reqs, built.seq_lens))


class WaitsForTheLastBatch(AllRight):
    """Waits for an event of the batch before: not in its first batch."""

    event: Any = None

    def change(self, built: Fields) -> Any:
        if self.event is not None:
            self.event.synchronize()  # here
        self.event = torch.Event()
        self.event.record()
        return built


class FailsTheSecondTime(AllRight):
    built = 0

    def change(self, built: Fields) -> Any:
        self.built += 1
        if self.built > 1:
            raise ValueError("its buffer is full")
        return built


class ReusesItsBuffer(AllRight):
    """A buffer of its own, written for each batch; what lies beyond the batch is of earlier ones. Right."""

    def change(self, built: Fields) -> Any:
        self.lengths[: built.num_reqs].copy_(built.seq_lens)
        return SimpleNamespace(lengths=self.lengths, seq_lens=self.lengths[: built.num_reqs].clone())


class PlansAgain(AllRight):
    """Tells its planner less the second time. Right."""

    planned = False

    def change(self, built: Fields) -> Any:
        plan = {"lengths": built.seq_lens} | ({} if self.planned else {"scale": 0.125})
        self.planned = True
        return [built, plan]


class AttendsOffByOne(compat_attention.Right):
    """Lengths that exclude the last token, to which the kernel adds one: right, as attention shows."""

    class builder(compat_attention.Builder):
        def build(self, *arguments: Any, **more: Any) -> Any:
            built = super().build(*arguments, **more)
            given = built.arguments
            return SimpleNamespace(arguments=given, seq_lens=given.seq_lens - 1, secret=built.secret)
