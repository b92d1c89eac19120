"""The batches of the compatibility suite, and what the host is told of them."""

import pytest
import torch

from vllm_async_spec.compat.cases import (
    BLOCK_SIZE,
    CASES,
    DRAFT_TOKENS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Call,
    Case,
    Host,
    our_metadata,
)

NAMES = {case.name: case for case in CASES}


def test_every_batch_of_the_suite_is_there():
    wanted = ["decode", "spec K + 1", "non-uniform spec", "prefill", "prefill with context", "mixed", "long"]
    wanted += ["page boundary", "padded rows", "empty rows", "one request", "256 requests", "draft step 2"]
    wanted += ["draft step 3", "micro-batch, first half", "micro-batch, second half"]
    wanted += ["capture, one token", "capture, K + 1"]
    assert list(NAMES) == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_batch_is_as_a_runner_makes_it(case: Case):
    metadata = our_metadata()(case, Host.EXACT)  # our class checks shapes and types
    assert metadata.seq_lens.tolist() == list(case.seq_lens)
    assert metadata.query_start_loc.diff().tolist() == list(case.query_lens)
    live = metadata.slot_mapping[: sum(case.query_lens)]
    assert len(set(live.tolist())) == len(live)
    assert int(live.min()) >= BLOCK_SIZE
    assert (metadata.slot_mapping[len(live) :] == -1).all()
    used = metadata.block_table_tensor[metadata.block_table_tensor > 0].tolist()
    assert len(set(used)) == len(used) == sum(-(-length // BLOCK_SIZE) for length in case.lengths(Host.BOUND))
    assert max(used) < NUM_BLOCKS
    assert all((q == 0) == (n == 0) and n >= q for q, n in zip(case.query_lens, case.seq_lens, strict=True))
    assert max(case.seq_lens) <= MAX_MODEL_LEN
    assert (case.call is Call.DRAFTING) == (case.draft_index > 0)
    # No two tensors share memory, or a tainted one would taint another.
    tensors = [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_host_is_told(case: Case):
    told = {host: case.lengths(host) for host in Host}
    rows = list(zip(case.seq_lens, case.query_lens, case.prefilling, strict=True))
    for row, (exact, query, prefilling) in enumerate(rows):
        if exact == 0:
            assert {lengths[row] for lengths in told.values()} == {0}
            continue
        slack = 0 if prefilling else DRAFT_TOKENS
        assert told[Host.BOUND][row] == exact + slack
        assert told[Host.GARBAGE][row] not in (exact, exact + DRAFT_TOKENS)
        assert (told[Host.GARBAGE_DECODES][row] == exact) is prefilling
        assert all(query <= lengths[row] <= MAX_MODEL_LEN for lengths in told.values())


def test_garbage_is_too_long_and_too_short():
    case = NAMES["spec K + 1"]
    assert [g > e for g, e in zip(case.lengths(Host.GARBAGE), case.seq_lens, strict=True)] == [True, False] * 2


@pytest.mark.parametrize(
    ("host", "lengths", "bound", "longest"),
    [
        (Host.EXACT, "exact", "exact", 50),
        (Host.ABSENT, None, None, 50),
        (Host.BOUND, None, "bound", 53),
        (Host.STALE, "garbage", "bound", 53),
        (Host.GARBAGE, "garbage", "garbage", 50),
    ],
)
def test_host_fields(host: Host, lengths: str | None, bound: str | None, longest: int):
    case = Case("two", (4, 9), (50, 30), prefills=1)
    metadata = our_metadata()(case, host)
    values = {None: None, "exact": [50, 30], "bound": [53, 30], "garbage": list(case.lengths(Host.GARBAGE))}
    found = (metadata._seq_lens_cpu, metadata.seq_lens_cpu_upper_bound)
    assert [None if t is None else t.tolist() for t in found] == [values[lengths], values[bound]]
    assert metadata.max_seq_len == longest
    assert metadata.is_prefilling.tolist() == [False, True]
