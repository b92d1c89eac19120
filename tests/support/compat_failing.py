"""Builders and backends that raise, in what vLLM's engine asks of them or in what a declaration excludes."""

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import compat_attention
import compat_planted


class OnlyOneToken(compat_planted.Clean):
    """Builds a fifth of the batches: not even decodes with drafts."""

    def extra(self, metadata: Any) -> Any:
        if metadata.max_query_len > 1:
            raise ValueError("one token each")  # here
        return super().extra(metadata)


class FailsAtCapture(compat_planted.Clean):
    """A server with this builder does not start."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        raise ValueError("no graphs")  # here


class Declares(compat_planted.Clean):
    """Declares its CUDA graphs, as vLLM's builders do."""

    support: ClassVar[str] = "ALWAYS"

    @property
    def _cudagraph_support(self) -> Any:
        return SimpleNamespace(name=self.support)


class RefusesRows(Declares):
    """Fails with rows that have no tokens."""

    def extra(self, metadata: Any) -> Any:
        if 0 in metadata.query_start_loc_cpu.diff():
            raise ValueError("a row without tokens")
        return super().extra(metadata)


class NeverRefusesRows(RefusesRows):
    support = "NEVER"


class SingleRefusesRows(RefusesRows):
    support = "UNIFORM_SINGLE_TOKEN_DECODE"


class RefusesOneTokenGraphs(Declares):
    support = "UNIFORM_BATCH"

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        if common_attn_metadata.max_query_len == 1:
            raise ValueError("graphs are for drafts")
        return super().build_for_cudagraph_capture(common_attn_metadata)


class Reorders(Declares):
    """Decodes of up to two tokens come first, as its threshold tells vLLM."""

    reorder_batch_threshold: int | None = 2

    def extra(self, metadata: Any) -> Any:
        long = metadata.query_start_loc_cpu.diff() > 2
        if bool((long[:-1] & ~long[1:]).any()) and 0 not in metadata.query_start_loc_cpu.diff():
            raise ValueError("out of order")
        return super().extra(metadata)


class DoesNotReorder(Reorders):
    reorder_batch_threshold = None


class ForwardRefusesRows(compat_attention.Right):
    """Its forward fails with rows that have no tokens."""

    class builder(compat_attention.Builder):
        def secret(self, metadata: Any) -> Any:
            queries = metadata.query_start_loc_cpu.diff()
            return lambda: queries

    class impl(compat_attention.Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            if 0 in arguments[5].secret():
                raise ValueError("a row without tokens")  # here
            return super().forward(*arguments, output=output)


class ForwardExits(compat_attention.Right):
    class impl(compat_attention.Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            sys.exit(0)


class ForwardNeverRefusesRows(ForwardRefusesRows):
    """The same, and its builder declares that vLLM pads no rows for it."""

    class builder(ForwardRefusesRows.builder):
        _cudagraph_support = SimpleNamespace(name="NEVER")


class ForwardDoesNotSlice(ForwardNeverRefusesRows):
    """Its forward fails also where only the input is padded, as vLLM pads it for every builder."""

    class impl(ForwardRefusesRows.impl):
        def forward(self, layer: Any, query: Any, *arguments: Any, output: Any) -> Any:
            if len(query) != int(arguments[3].secret().sum()):
                raise ValueError("the input is longer")  # here
            return super().forward(layer, query, *arguments, output=output)


class SmallHeads(compat_attention.Fails):
    """Its forward fails with heads of 64, and it says so."""

    @staticmethod
    def supports_head_size(size: int) -> bool:
        return size == 32
