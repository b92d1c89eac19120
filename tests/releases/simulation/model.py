"""A model whose every token depends on all that attention reads, a drafter that is sometimes wrong, and what they say.

The model writes each token with its position to the slot that it is told, and reads keys through the block table up
to the length that it is told. So a wrong position, length, slot or block shows in the tokens. `greedy` finds them
from the list of tokens alone. A draft head sees each token one position early, as EAGLE's do, and nothing of the
first; so that counts for nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from simulation.device import DeviceTensor, Gpu
from simulation.wishes import PLAIN, RANKED, VOCABULARY, Wishes

WINDOW = 20
"""Keys that the second KV cache group sees."""
PRIME = 1_000_003


def entries_of(tokens: Any, positions: Any) -> Any:
    return np.where(positions == 0, 0, (tokens * 7919 + positions * 104_729 + 13) % 65_521)


def sums(entries: Any, first: int) -> tuple[int, int]:
    """All keys up to the last and those in the window, each weighed by its place; `first` is the place of the first."""
    weighed = entries * (np.arange(len(entries)) + first + 3)
    return int(weighed.sum()), int(weighed[max(0, len(entries) - WINDOW) :].sum())


def _token(full: int, window: int) -> int:
    return (full * 31 + window * 17) % PRIME % VOCABULARY


def greedy(
    prompt: Sequence[int],
    count: int,
    stop: int,
    longest: int,
    wishes: Wishes = PLAIN,
    *,
    stops: bool = True,
    following: Callable[[Any], int] = lambda entries: _token(*sums(entries, 0)),
) -> list[int]:
    """The tokens that follow a prompt: up to `count`, or to `stop` if it `stops`, or to a sequence of `longest`.

    `following`: the next token, by all keys.
    """
    tokens, outputs = list(prompt), list[int]()
    while len(outputs) < count and len(tokens) < longest:
        token = following(entries_of(np.array(tokens), np.arange(len(tokens))))
        if wishes is not PLAIN:
            token = wishes.token(token, prompt, outputs, stop)
        tokens.append(token)
        outputs.append(token)
        if stops and token == stop:
            break
    return outputs


@dataclass(slots=True)
class Seen:
    """What one call of `target` or of `draft N` was given when it ran, by name; lists are by KV cache group."""

    layer: str
    values: dict[str, Any]
    host: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Given:
    common: dict[str, Any]
    draft_index: int | None = None


_FIELDS = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
_SIZES = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")


class Builder:
    __module__ = "vllm.v1.attention.backends.simulated"

    supports_update_block_table = False
    reorder_batch_threshold = None
    kv_cache_spec: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Given:
        return Given({name: getattr(common_attn_metadata, name) for name in _FIELDS + _SIZES})

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Given:
        return Given(self.build(0, common_attn_metadata).common, draft_index)


class _Model:
    early = 0
    """Positions by which it sees each token early."""

    def __init__(self, gpu: Gpu, slots: int, block_size: int, layers: Sequence[str], saw: Callable[[Seen], None]):
        self.gpu, self.block_size, self.layers, self.saw = gpu, block_size, layers, saw
        self.cache = [np.full(slots, 1) for _ in layers]

    def compute_logits(self, hidden_states: DeviceTensor) -> DeviceTensor:
        """The model's token first, then those that follow it: (rows, vocabulary)."""
        logits = torch.zeros(hidden_states.shape[0], VOCABULARY, device=hidden_states.device)

        def run(hidden: torch.Tensor, out: torch.Tensor) -> None:
            first = hidden[:, :1].long().clamp(0, VOCABULARY - 1)
            out.copy_(torch.from_numpy(RANKED)[(torch.arange(VOCABULARY) - first) % VOCABULARY])

        self.gpu.kernel(run, hidden_states, logits)
        return logits

    def _forward(self, name: str, input_ids: DeviceTensor, positions: DeviceTensor, width: int, given: Any) -> Any:
        hidden = torch.zeros(input_ids.shape[0], width, dtype=torch.bfloat16, device=input_ids.device)
        commons = [each.common for each in given]
        values = {"input_ids": input_ids, "positions": positions}
        values |= {field: [common[field] for common in commons] for field in _FIELDS}
        self.saw(Seen(name, self.gpu.snapshot(values), {size: [common[size] for common in commons] for size in _SIZES}))
        self.gpu.kernel(self._run, input_ids, positions, [[c[field] for field in _FIELDS] for c in commons], hidden)
        return hidden

    def _run(self, input_ids: Any, positions: Any, groups: Any, hidden: Any) -> None:
        tokens, places = input_ids.numpy().astype(np.int64), positions.numpy()
        places = places[0] if places.ndim == 2 else places
        groups = [[tensor.numpy() for tensor in group] for group in groups]
        for (starts, _, _, slots), cache in zip(groups, self.cache, strict=True):
            count = min(int(starts[-1]), len(slots))
            at = slots[:count]
            # A slot that is none of the cache's is not written; on a GPU it would be anybody's memory.
            inside = (at >= 0) & (at < len(cache))
            cache[at[inside]] = entries_of(tokens[:count], places[:count] + self.early)[inside]
        starts = groups[0][0]
        for row in range(len(starts) - 1):
            first, end = int(starts[row]), int(starts[row + 1])
            keys = [
                self._keys(cache, table[row], int(lens[row]))
                for (_, lens, table, _), cache in zip(groups, self.cache, strict=True)
            ]
            for token in range(first, end):
                hidden[token, 0] = self._next([seen[: max(0, len(seen) - (end - 1 - token))] for seen in keys])

    def _keys(self, cache: Any, table: Any, length: int) -> Any:
        places = np.arange(min(max(length, 0), len(table) * self.block_size))
        slots = table[places // self.block_size] * self.block_size + places % self.block_size
        return cache[np.clip(slots, 0, len(cache) - 1)]

    def _next(self, keys: Any) -> int:
        raise NotImplementedError


class Target(_Model):
    """The target model; its KV cache has two groups, and the second sees a window."""

    supports_mrope = True

    def get_mrope_input_positions(self, tokens: Sequence[int], features: Any) -> tuple[torch.Tensor, int]:
        return torch.arange(len(tokens)).expand(3, -1).clone(), 0

    def __call__(self, input_ids: DeviceTensor, positions: DeviceTensor, **kwargs: Any) -> DeviceTensor:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        return self._forward("target", input_ids, positions, 8, [metadata[layer] for layer in self.layers])

    def _next(self, keys: Any) -> int:
        return _token(sums(keys[0], 0)[0], sums(keys[-1], 0)[1])


class Draft(_Model):
    """The draft head: right, unless a coin that depends on all it sees says otherwise."""

    early = 1
    wrong = 30
    """Of 97."""

    def __call__(
        self, input_ids: DeviceTensor, positions: DeviceTensor, hidden_states: DeviceTensor, **kwargs: Any
    ) -> Any:
        from vllm.forward_context import get_forward_context

        given = get_forward_context().attn_metadata[self.layers[0]]
        hidden = self._forward(f"draft {given.draft_index}", input_ids, positions, hidden_states.shape[1], [given])
        return hidden, hidden

    def _next(self, keys: Any) -> int:
        full, window = sums(keys[0], 1)
        return _token(full, window) if full % 97 >= self.wrong else (_token(full, window) + 1) % VOCABULARY
