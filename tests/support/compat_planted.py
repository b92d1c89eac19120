"""Builders with one fault each, and clean ones, for the tests of the suite: plain PyTorch, no vLLM.

`need` and, in the case `case`, a sentence with `fault` must be found; the site that must be named ends in `# here`.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_async_spec.compat.results import Need


@dataclass
class Built:
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int
    extra: Any = None


class Builder:
    need: ClassVar[Need] = Need.NONE
    fault: ClassVar[str | None] = None
    note: ClassVar[str | None] = None
    case: ClassVar[str] = "spec K + 1"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lengths = torch.zeros(512, dtype=torch.int32, device=device)

    def extra(self, metadata: Any) -> Any:
        return None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        m = common_attn_metadata
        return Built(m.seq_lens, m.block_table_tensor, m.max_seq_len, self.extra(m))

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


class Blocks(Builder):
    """Makes the host wait: `wait` is the fault."""

    need = Need.BLOCKING

    def __init_subclass__(cls, wait: str) -> None:
        cls.fault = wait


class Clean(Builder):
    """Device lengths, its own buffer, an asynchronous copy of what the host made, and all that costs nothing."""

    def extra(self, metadata: Any) -> Any:
        count = metadata.num_reqs
        self.lengths[:count].copy_(metadata.seq_lens)
        self.lengths[count:].fill_(0)
        queries = metadata.query_start_loc_cpu.diff()
        longest = int(queries.max())
        on_device = queries.to(self.device, non_blocking=True)
        pages = torch.nn.functional.pad(metadata.seq_lens.cumsum(0), (1, 0))
        rows = torch.arange(count, device=metadata.seq_lens.device)
        tokens = torch.repeat_interleave(rows, on_device, output_size=int(queries.sum()))
        torch.cuda.Stream().wait_event(torch.cuda.current_stream().record_event())
        return self.lengths[:count], on_device, pages, tokens, longest, metadata.seq_lens.to(torch.int64), [queries]


class CleanOnStreams(Builder):
    """Work on a second stream, which the host does not wait for."""

    def extra(self, metadata: Any) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            metadata.seq_lens.record_stream(side)
        with side:
            return torch.zeros(2, device=side.device)


class CleanOperators(Builder):
    """What reads on a CPU only, and both sides in one operator where PyTorch allows it."""

    def extra(self, metadata: Any) -> Any:
        arrives = metadata.seq_lens.to("cpu", non_blocking=True)
        torch.add(arrives[:1] * 2, torch.ones(1))
        self.lengths[: len(arrives)] = metadata.seq_lens * torch.tensor(2)
        classes = torch.nn.functional.one_hot(metadata.seq_lens.long() % 8, num_classes=8)
        return copy.deepcopy(metadata.seq_lens), classes


class FromTheBound(Builder):
    """Sizes from the bound, lengths from the device."""

    need = Need.UPPER_BOUND

    def extra(self, metadata: Any) -> Any:
        pages = (metadata.seq_lens_cpu_upper_bound + 15) // 16
        cost = metadata.max_seq_len * 1.5
        return int(pages.sum()), pages, torch.zeros(int(pages.sum()), device=self.device), cost


class FromPrefills(Builder):
    """Host lengths of prefills only."""

    need = Need.PREFILL_ROWS

    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens_cpu_upper_bound[metadata.is_prefilling].to(self.device, non_blocking=True)


class CopiesToHost(Blocks, wait="copy to host (cpu)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.cpu()  # here


class MovesToHost(Blocks, wait="copy to host (to)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.to("cpu")  # here


class CopiesIntoHostBuffer(Blocks, wait="copy to host (copy_)"):
    def extra(self, metadata: Any) -> Any:
        buffer = torch.zeros(metadata.num_reqs, dtype=torch.int32)
        buffer.copy_(metadata.seq_lens)  # here
        return int(buffer.max())


class Item(Blocks, wait="read (item)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.max().item()  # here


class Branch(Blocks, wait="read (item)"):
    def extra(self, metadata: Any) -> Any:
        if (metadata.seq_lens > 4000).any():  # here
            return "long"
        return "short"


class ToList(Blocks, wait="read (tolist)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.tolist()  # here


class Numpy(Blocks, wait="read (numpy)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.numpy()  # here


class Print(Blocks, wait="read (repr)"):
    def extra(self, metadata: Any) -> Any:
        return len(str(metadata.seq_lens))  # here


class Mask(Blocks, wait="read (boolean index)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.block_table_tensor[metadata.seq_lens > 40]  # here


class Nonzero(Blocks, wait="read (nonzero)"):
    def extra(self, metadata: Any) -> Any:
        return torch.where(metadata.seq_lens > 40)  # here


class DynamicShape(Blocks, wait="read (repeat_interleave)"):
    def extra(self, metadata: Any) -> Any:
        queries = metadata.query_start_loc.diff()
        return torch.repeat_interleave(torch.arange(metadata.num_reqs, device=self.device), queries)  # here


class Bincount(Blocks, wait="read (bincount)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.query_start_loc.bincount()  # here


class UnfencedCopy(Blocks, wait="read (numpy)"):
    """Read before anybody has waited for it: a wait, or garbage."""

    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.to("cpu", non_blocking=True).numpy()  # here


class OwnBuffer(Blocks, wait="read (tolist)"):
    """What is read back is the builder's, not the batch's."""

    def extra(self, metadata: Any) -> Any:
        return self.lengths[:2].tolist()  # here


class TensorOfList(Blocks, wait="copy to device (tensor)"):
    def extra(self, metadata: Any) -> Any:
        return torch.tensor([0, metadata.num_reqs], device=self.device)  # here


class BlockingUpload(Blocks, wait="copy to device (to)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.query_start_loc_cpu.to(metadata.seq_lens.device)  # here


class BlockingFill(Blocks, wait="copy to device (copy_)"):
    def extra(self, metadata: Any) -> Any:
        self.lengths[: metadata.num_reqs + 1] = metadata.query_start_loc_cpu  # here
        return self.lengths


class Synchronizes(Blocks, wait="device (synchronize)"):
    def extra(self, metadata: Any) -> Any:
        torch.cuda.synchronize()  # here


class WaitsForAStream(Blocks, wait="stream (synchronize)"):
    def extra(self, metadata: Any) -> Any:
        torch.cuda.current_stream().synchronize()  # here


class WaitsForAnEvent(Blocks, wait="event (synchronize)"):
    """Reads what it may read, having waited for it."""

    def extra(self, metadata: Any) -> Any:
        event = torch.Event()
        event.record()
        event.synchronize()  # here


class WaitsForItsOwnEvent(Blocks, wait="event (synchronize)"):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.event = torch.cuda.Event()

    def extra(self, metadata: Any) -> Any:
        torch.cuda.Stream().record_event(self.event)
        self.event.synchronize()  # here


class UploadsByCuda(Blocks, wait="copy to device (to)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.query_start_loc_cpu.cuda()  # here


class WritesAtHostIndex(Blocks, wait="copy to device (index on the host)"):
    def extra(self, metadata: Any) -> Any:
        self.lengths[torch.tensor([0])] = 1  # here
        return self.lengths


class HostIndex(Blocks, wait="copy to device (index on the host)"):
    def extra(self, metadata: Any) -> Any:
        return metadata.block_table_tensor[torch.tensor([0])]  # here


class ExactLengths(Builder):
    """The lazy property, which copies where nobody gave the lengths."""

    need, fault = Need.EXACT, "copy to host (to)"

    def extra(self, metadata: Any) -> Any:
        return int(metadata.seq_lens_cpu.max())  # here


class NoLengths(Builder):
    need, fault = Need.EXACT, "it fails: TypeError: 'NoneType' object is not subscriptable"

    def extra(self, metadata: Any) -> Any:
        return int(metadata._seq_lens_cpu[0])  # here


class BoundForTruth(Builder):
    need, fault = Need.EXACT, "extra is"

    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens_cpu_upper_bound.to(self.device, non_blocking=True)


class MaximumForTruth(Builder):
    """Right only where the maximum is exact."""

    need, fault = Need.EXACT, "extra is"

    def extra(self, metadata: Any) -> Any:
        return torch.full((metadata.num_reqs,), metadata.max_seq_len, dtype=torch.int32, device=self.device)


class TooSmall(Builder):
    """Reserves less the longer the bound."""

    need, fault = Need.EXACT, "extra is"

    def extra(self, metadata: Any) -> Any:
        return 9000 - metadata.max_seq_len


class LeavesAFieldOut(Builder):
    """A kernel would find nothing where it looks for its plan."""

    need, fault = Need.EXACT, "extra.plan is missing, not 1"

    def extra(self, metadata: Any) -> Any:
        return {} if metadata._seq_lens_cpu is None else {"plan": 1}


class ChangesTheBound(Builder):
    need, fault = Need.PREFILL_ROWS, "it changes seq_lens_cpu_upper_bound"

    def extra(self, metadata: Any) -> Any:
        metadata.seq_lens_cpu_upper_bound.sub_(1)


class ChangesTheLengths(Builder):
    fault = "it changes seq_lens of"

    def extra(self, metadata: Any) -> Any:
        metadata.seq_lens.add_(1)


class ReplacesAField(Builder):
    fault = "it changes slot_mapping of"

    def extra(self, metadata: Any) -> Any:
        metadata.slot_mapping = metadata.slot_mapping[:1]


class ChangesANumber(Builder):
    fault = "it changes max_seq_len of"

    def extra(self, metadata: Any) -> Any:
        metadata.max_seq_len = 1


class TrustsGivenLengths(Builder):
    note = "needs no host lengths, but uses them where they are given"

    def extra(self, metadata: Any) -> Any:
        given = metadata._seq_lens_cpu
        return metadata.seq_lens if given is None else given.to(self.device, non_blocking=True)


class TrustsLengthsBesideTheBound(FromTheBound):
    need = Need.UPPER_BOUND
    note = "needs the upper bound only, but uses host lengths where they are given"

    def extra(self, metadata: Any) -> Any:
        given = metadata._seq_lens_cpu
        return (metadata.seq_lens_cpu_upper_bound if given is None else given) + 15


class OnlyDrafting(Blocks, wait="read (item)"):
    case = "draft step 2"

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return int(common_attn_metadata.seq_lens[0])  # here


class OnlyCapture(Blocks, wait="copy to host (cpu)"):
    case = "capture, K + 1"

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return common_attn_metadata.seq_lens.cpu()  # here


class OnlyManyRequests(Blocks, wait="read (item)"):
    case = "256 requests"

    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens[-1].item() if metadata.num_reqs > 128 else 0  # here


CLEAN = (Clean, CleanOperators, CleanOnStreams, FromTheBound, FromPrefills)
CLEAN += (TrustsGivenLengths, TrustsLengthsBesideTheBound)
PLANTED = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Builder) and kind not in (Builder, Blocks, *CLEAN)
)
