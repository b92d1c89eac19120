"""A batch in plain Python, against the fields of vLLM's names in what a builder built.

A builder that is wrong whatever the host knows differs from nothing that it builds itself. Where it keeps a field under
vLLM's name, such as `seq_lens`, the integers of the case say what belongs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_async_spec.compat.cases import Call, Case
from vllm_async_spec.compat.compare import Difference, Judgement, Snapshot

_Rows = list[list[int]]


def _starts(case: Case) -> list[int]:
    starts = [0]
    for query in case.query_lens[: case.live]:
        starts.append(starts[-1] + query)
    return starts


def _table(case: Case, block_size: int) -> _Rows:
    """The blocks that each request needs; tables may be wider."""
    given = case.fields(block_size=block_size)["block_table_tensor"].tolist()
    return [row[: -(-length // block_size)] for row, length in zip(given, case.seq_lens, strict=True) if length]


def _slots(case: Case, block_size: int) -> list[int]:
    slots: list[int] = case.fields(block_size=block_size)["slot_mapping"][: sum(case.query_lens)].tolist()
    return slots


def _leading(found: Any, wanted: list[int]) -> bool | None:
    """Whether an array of one axis begins with what is wanted; None if it can't be compared."""
    if found.ndim != 1 or len(found) < len(wanted):
        return None
    return bool(found[: len(wanted)].tolist() == wanted)


def _blocks(found: Any, wanted: _Rows) -> bool | None:
    if found.ndim != 2 or len(found) < len(wanted) or found.shape[1] < max(map(len, wanted)):
        return None
    return all(row[: len(blocks)].tolist() == blocks for row, blocks in zip(found, wanted, strict=False))


_ARRAYS: dict[str, Callable[[Case, int], Any]] = {
    "seq_lens": lambda case, block_size: list(case.seq_lens[: case.live]),
    "query_start_loc": lambda case, block_size: _starts(case),
    "query_start_loc_cpu": lambda case, block_size: _starts(case),
    "slot_mapping": _slots,
    "block_table": _table,
    "block_table_tensor": _table,
}
"""What the leading entries of a field must be, for the requests and tokens that are no padding."""

_NUMBERS: dict[str, Callable[[Case, int], bool]] = {
    "max_query_len": lambda case, found: found == max(case.query_lens),
    "max_seq_len": lambda case, found: found >= max(case.seq_lens),
    "num_reqs": lambda case, found: found in (case.live, case.rows),
    "num_actual_tokens": lambda case, found: found in (sum(case.query_lens), sum(case.query_lens) + case.token_padding),
}
"""Whether a number is right; `max_seq_len` may be a bound, and counts may have the padding."""

_RIGHT: dict[str, Callable[[Case], int]] = {
    "max_query_len": lambda case: max(case.query_lens),
    "max_seq_len": lambda case: max(case.seq_lens),
    "num_reqs": lambda case: case.rows,
    "num_actual_tokens": lambda case: sum(case.query_lens) + case.token_padding,
}

FIELDS = (*_ARRAYS, *_NUMBERS)
"""Fields of vLLM's names that are compared, at the top of what was built."""


def against_model(
    built: Snapshot, case: Case, block_size: int, remakes: tuple[str, ...] = ()
) -> tuple[Difference, ...]:
    """Fields of the build with exact host lengths that differ from the batch in plain Python.

    A batch for a CUDA graph is not compared: its lengths are placeholders. `remakes` names the fields to which the
    builder gives another meaning, such as lengths of chunks instead of requests.
    """
    found: list[Difference] = []
    for name in FIELDS if case.call is not Call.CAPTURE else ():
        leaf = built.leaves.get(name)
        if leaf is None or name in remakes or not leaf.validated:
            continue
        if name in _NUMBERS:
            if isinstance(leaf.value, int | np.integer) and not _NUMBERS[name](case, int(leaf.value)):
                found.append(Difference(name, Judgement.WRONG, str(_RIGHT[name](case)), str(leaf.value)))
            continue
        if not isinstance(leaf.value, torch.Tensor | np.ndarray):
            continue
        wanted = _ARRAYS[name](case, block_size)
        right = _blocks(leaf.value, wanted) if name.startswith("block_table") else _leading(leaf.value, wanted)
        if right is False:
            shown = leaf.value[: len(wanted)].tolist()
            found.append(Difference(name, Judgement.WRONG, _few(wanted), _few(shown)))
    return tuple(found)


def _few(values: list[Any]) -> str:
    """The first entries, of the first row if there are rows."""
    if values and isinstance(values[0], list):
        return f"{_few(values[0])} in its first row"
    return f"{values[:8]}" + (" ..." if len(values) > 8 else "")
