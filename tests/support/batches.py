"""Random batches, and the plain-Python model that the metadata is compared with."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from vllm_async_spec import CommonAttentionMetadata, Epoch

INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Batch:
    """A batch as plain integers; padding rows have query length 0 and sequence length 0."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    token_padding: int = 0

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return starts

    @property
    def computed(self) -> list[int]:
        return [total - new for total, new in zip(self.seq_lens, self.query_lens, strict=True)]

    def metadata(
        self, *, known: bool = False, bounded: bool = True, slack: int = 0, epoch: Epoch | None = None
    ) -> CommonAttentionMetadata:
        """The metadata of this batch; `slack` is what the upper bounds exceed the truth by on live rows."""
        starts, lengths = torch.tensor(self.starts, dtype=torch.int32), _int32(self.seq_lens)
        tokens = self.starts[-1] + self.token_padding
        bound = _int32([min(n + slack, INT32_MAX) if n else 0 for n in self.seq_lens])
        return CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(self.seq_lens),
            num_actual_tokens=tokens,
            max_query_len=max(self.query_lens, default=0),
            max_seq_len=int(bound.max()) if self.seq_lens else 0,
            block_table_tensor=torch.arange(len(self.seq_lens) * 2, dtype=torch.int32).reshape(-1, 2),
            slot_mapping=torch.arange(tokens, dtype=torch.int64),
            seq_lens_cpu_upper_bound=bound if bounded else None,
            is_prefilling=torch.tensor([n > 4 for n in self.query_lens], dtype=torch.bool),
            epoch=epoch,
            _seq_lens_cpu=lengths.clone() if known else None,
        )


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def batches(draw: st.DrawFn, *, min_requests: int = 0, most: int = INT32_MAX) -> Batch:
    live = draw(st.integers(min_requests, 12))
    query_lens = [draw(st.one_of(st.just(1), st.integers(2, 8), st.integers(9, 300))) for _ in range(live)]
    contexts = [draw(st.one_of(st.just(0), st.integers(0, 5000), st.just(most - n))) for n in query_lens]
    padding = draw(st.integers(0, 4))
    return Batch(
        query_lens=(*query_lens, *[0] * padding),
        seq_lens=(*[c + q for c, q in zip(contexts, query_lens, strict=True)], *[0] * padding),
        token_padding=draw(st.integers(0, 8)),
    )


@st.composite
def ordered_batches(draw: st.DrawFn, *, query_tokens: int, page: int) -> Batch:
    """As vLLM orders requests: up to `query_tokens` first, then longer ones, then padding; rows may be empty.

    Contexts are none, short, long, or end beside a page's end. Tokens may be padded as for a CUDA graph.
    """
    kinds = {
        "single tokens": st.just(1),
        "drafts": st.just(query_tokens),
        "ragged": st.integers(1, query_tokens),
        "empty rows": st.just(0) | st.integers(1, query_tokens),
        "padded for a graph": st.just(query_tokens),
    }
    kind = draw(st.sampled_from([*kinds, "prefills"]))
    graph = kind == "padded for a graph"
    longer = st.integers(query_tokens + 1, 40) | (st.just(0) if kind == "empty rows" else st.nothing())
    decodes = [] if kind == "prefills" else draw(st.lists(kinds[kind], min_size=1, max_size=6))
    prefills = draw(st.lists(longer, min_size=0 if decodes else 1, max_size=0 if graph else 3))
    query_lens = [*decodes, *prefills]
    boundaries = st.builds(lambda pages, beside: pages * page + beside, st.integers(3, 20), st.integers(-1, 1))
    seq_lens = [draw(st.one_of(st.just(n), st.integers(n, 200), boundaries)) for n in query_lens]
    if draw(st.integers(0, 9)) == 0:
        seq_lens[-1] = 3000
    padding = draw(st.integers(1 if graph else 0, 3))
    return Batch(
        query_lens=(*query_lens, *[0] * padding),
        seq_lens=(*seq_lens, *[0] * padding),
        token_padding=padding * query_tokens if graph else draw(st.sampled_from([0, 3])),
    )
