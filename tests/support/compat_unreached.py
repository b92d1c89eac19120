"""Builders that no batch of the suite makes wait, and that could: plain PyTorch, no vLLM.

Lines that must be told end in `# told`.
"""

from typing import Any

import torch
from compat_planted import Builder
from compat_unreached_helper import longest_on_host


class Thresholds(Builder):
    """Waits with many heads, and with prompts longer than any of the suite's."""

    heads = 8

    def extra(self, metadata: Any) -> Any:
        if self.heads >= 64:
            return metadata.seq_lens.cpu()  # told
        if metadata.max_query_len > 100_000:
            return metadata.seq_lens.max().item()  # told
        return None


class Callee(Builder):
    """Waits in functions that only a line not reached calls: a method, and a function of another module."""

    def extra(self, metadata: Any) -> Any:
        if metadata.num_reqs > 1_000_000:
            return self._by_host(metadata), longest_on_host(metadata)
        return None

    def _by_host(self, metadata: Any) -> Any:
        lengths = metadata.seq_lens_cpu  # told
        torch.cuda.synchronize()  # told
        return list(lengths)


class OneLine(Builder):
    def extra(self, metadata: Any) -> Any:
        total = metadata.seq_lens.sum().item() if metadata.num_reqs > 1_000_000 else 0  # told
        longest = metadata.num_reqs > 1_000_000 and metadata.seq_lens.tolist()  # told
        if metadata.num_reqs > 1_000_000: return metadata._seq_lens_cpu  # fmt: skip # noqa: E701 # told
        return total, longest


class OneLineReached(Builder):
    """The same with a condition that holds, and a tensor of the host's that no name tells."""

    def extra(self, metadata: Any) -> Any:
        lengths = torch.arange(3)
        return lengths.sum().item() if metadata.num_reqs > 0 else 0


class SeveralLines(Builder):
    """A condition of its own line inside a statement that ran."""

    def extra(self, metadata: Any) -> Any:
        return (
            metadata.seq_lens.tolist()  # told
            if metadata.num_reqs > 1_000_000
            else None
        )


class NeverWaits(Builder):
    """Lines that no batch reaches and that wait for nothing, or delay no step."""

    def extra(self, metadata: Any) -> Any:
        if metadata.num_reqs > 1_000_000:
            starts = None
            if metadata.num_reqs > 2_000_000:
                starts = metadata.query_start_loc_cpu
            assert starts is not None
            lengths = starts[1:] - starts[:-1]
            longest, is_long = lengths.max().item(), (lengths > 1).tolist()
            raise ValueError(f"{metadata.seq_lens.tolist()} for {longest}, {is_long}")
        return None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        if common_attn_metadata.num_reqs > 1_000_000:
            torch.cuda.synchronize()
        return super().build_for_cudagraph_capture(common_attn_metadata)


class Misnamed(Builder):
    """A local variable is judged by what is assigned to it."""

    def extra(self, metadata: Any) -> Any:
        if metadata.num_reqs > 1_000_000:
            lengths_cpu = metadata.seq_lens.to("cpu", non_blocking=True)
            return lengths_cpu.tolist()  # told
        return None


class NoDrafts(Builder):
    """A method of the step that no batch builds, because it fails."""

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        assert draft_index > 100
        return common_attn_metadata.seq_lens.nonzero()  # told


class SomeBranches(Builder):
    """Three branches of six: the condition's two, and the loop's first."""

    def extra(self, metadata: Any) -> Any:
        if metadata.num_reqs > 3:
            pass
        for _ in range(2):
            return None
        match metadata.num_reqs:
            case 4:
                return 1
            case _:
                return 2
