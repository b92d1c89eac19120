"""The example's attention backend with decode context parallelism: it masks by the runner's local lengths.

Its ranks need no GPU, so real engines of two ranks run on a CPU too. It writes keys where their positions say, because
vLLM's kernel of slots has no context parallelism on a CPU, and draft steps have none anywhere (docs/findings.md).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples" / "backend"))
from paged_rows import PagedRowsBackend, PagedRowsImpl, PagedRowsMetadataBuilder


class ContextRowsMetadataBuilder(PagedRowsMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        rows: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)
        rows.local_lens = common_attn_metadata.dcp_local_seq_lens  # None with one rank
        return rows


class ContextRowsImpl(PagedRowsImpl):
    can_return_lse_for_decode = supports_dcp = True  # which vLLM asks of a backend with context parallelism

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **_: Any
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        m, tokens, page_size = attn_metadata, len(attn_metadata.row), kv_cache.shape[2]
        place = (m.seq_lens - m.query_lens)[m.row] + m.column  # of each query token in its request
        local = torch.div(place, self.dcp_world_size, rounding_mode="floor")
        mine = place % self.dcp_world_size == self.dcp_rank
        page = m.block_table[m.row, local // page_size].where(mine, 0)  # which vLLM gives to no request
        kv_cache[page.long(), :, local % page_size] = torch.cat([key, value], dim=-1)[:tokens]

        def gathered(shares: torch.Tensor, dim: int = 0) -> Any:
            return get_dcp_group().all_gather(shares.contiguous(), dim=dim)

        queries = gathered(query[:tokens], dim=1)
        pages = kv_cache[m.block_table].transpose(1, 2).flatten(2, 3)[:, 0]  # one KV head
        keys, values = pages.split(self.head_size, dim=-1)
        lens = self._count(m.seq_lens) if m.local_lens is None else m.local_lens
        seen = lens[m.row] - (self._count(m.seq_lens)[m.row] - self._count(place + 1))
        scores = torch.einsum("thd,tkd->thk", queries, keys[m.row]) * self.scale
        hidden = torch.arange(keys.shape[1], device=keys.device) >= seen[:, None]
        scores.masked_fill_(hidden[:, None], float("-inf"))
        sums = scores.logsumexp(dim=-1, keepdim=True)
        shares = torch.exp(scores - sums).nan_to_num(0.0)  # a token may have no key on this rank
        attended = torch.einsum("thk,tkd->thd", shares, values[m.row])

        weights = gathered(sums[None]).softmax(dim=0)
        whole = (weights * gathered(attended[None])).sum(dim=0)
        first = self.dcp_rank * self.num_heads
        output[:tokens] = whole[:, first : first + self.num_heads]
        return output

    def _count(self, length: torch.Tensor) -> torch.Tensor:
        """How many of the first `length` tokens of a request lie on this rank."""
        return torch.div(length - self.dcp_rank + self.dcp_world_size - 1, self.dcp_world_size, rounding_mode="floor")


class ContextRowsBackend(PagedRowsBackend):
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[ContextRowsImpl]:
        return ContextRowsImpl

    @staticmethod
    def get_builder_cls() -> type[ContextRowsMetadataBuilder]:
        return ContextRowsMetadataBuilder


def register() -> None:
    """Make `CUSTOM`, and on a CPU `CPU_ATTN`, this backend in this process, and leave a CPU's slots to it."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "context_rows.ContextRowsBackend")
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "context_rows.ContextRowsBackend")
        cpu_triton_utils._compute_slot_mapping_kernel_impl = lambda *_, **__: None
