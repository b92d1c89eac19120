import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batches import INT32_MAX, Batch, batches
from hypothesis import given
from hypothesis import strategies as st

from vllm_async_spec import (
    CommonAttentionMetadata,
    Epoch,
    HostSyncError,
    MetadataError,
    reset_sync_report,
    sync_policy,
    sync_report,
)
from vllm_async_spec.streams import waits_refused

MIXED = Batch(query_lens=(1, 4, 7, 0), seq_lens=(33, 100, 7, 0), token_padding=2)
PER_REQUEST = ("seq_lens", "block_table_tensor", "seq_lens_cpu_upper_bound", "is_prefilling")


@pytest.fixture(autouse=True)
def _fresh_report():
    reset_sync_report()


def reads() -> int:
    return sync_report().count


@given(batches(), st.booleans(), st.integers(0, 7))
def test_host_views_equal_the_plain_model_and_cost_one_copy(batch: Batch, known: bool, slack: int):
    reset_sync_report()
    metadata = batch.metadata(known=known, slack=slack, epoch=Epoch())
    assert metadata.num_computed_tokens_cpu.tolist() == batch.computed
    assert metadata.seq_lens_cpu.tolist() == list(batch.seq_lens)
    assert metadata.seq_lens_cpu.dtype == metadata.num_computed_tokens_cpu.dtype == torch.int32
    assert reads() == (0 if known else 1)
    assert metadata.num_computed_tokens.tolist() == batch.computed
    assert metadata.seq_len_upper_bound == metadata.max_seq_len >= max(batch.seq_lens, default=0)


@given(batches(min_requests=1, most=10_000), st.booleans(), st.data())
def test_derived_metadata_never_syncs_and_equals_the_plain_model(batch: Batch, known: bool, data: st.DataObject):
    reset_sync_report()
    metadata = batch.metadata(known=known, slack=3, epoch=Epoch())
    start = data.draw(st.integers(0, len(batch.seq_lens)))
    stop = data.draw(st.integers(start, len(batch.seq_lens)))
    total = batch.starts[-1]
    offsets = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    with sync_policy("error"):
        part = metadata.slice_requests(start, stop)
        parts = metadata.split(*offsets)
        metadata.replace(causal=False)
    live = sum(n > 0 for n in batch.query_lens)
    with sync_policy("error"):
        unpadded = metadata.unpadded(total, live)

    assert part.seq_lens_cpu.tolist() == list(batch.seq_lens[start:stop])
    assert part.num_computed_tokens_cpu.tolist() == batch.computed[start:stop]
    assert unpadded.num_computed_tokens_cpu.tolist() == batch.computed[:live]
    assert torch.cat([p.slot_mapping for p in parts]).tolist() == metadata.slot_mapping.tolist()
    positions = []
    for p in parts:
        assert int(p.query_start_loc_cpu[0]) == 0
        assert p.query_start_loc.tolist() == p.query_start_loc_cpu.tolist()
        assert p.seq_lens_cpu.tolist() == p.seq_lens.tolist()
        assert int((p.query_start_loc_cpu[1:] - p.query_start_loc_cpu[:-1]).max()) == p.max_query_len
        assert int(p.seq_lens.max()) <= p.max_seq_len <= metadata.max_seq_len
        assert bool((p.seq_lens <= p.seq_lens_cpu_upper_bound).all())
        for computed, length in zip(p.num_computed_tokens.tolist(), p.seq_lens.tolist(), strict=True):
            positions += range(computed, length)
    # However the batch is cut, every query token is there once, at its own position.
    assert positions == [
        at for computed, length in zip(batch.computed, batch.seq_lens, strict=True) for at in range(computed, length)
    ]
    assert reads() == 0 or not known, "parts of what is known are known"


@given(batches(most=INT32_MAX - 40), st.booleans(), st.lists(st.integers(0, 5), max_size=3))
def test_advance_equals_the_plain_model(batch: Batch, known: bool, steps: list[int]):
    reset_sync_report()
    metadata = batch.metadata(known=known, slack=3, epoch=Epoch())
    bound = metadata.max_seq_len
    with sync_policy("error"):
        for step in steps:
            metadata.advance(step)
    lengths = [n + sum(steps) if n else 0 for n in batch.seq_lens]
    assert metadata.seq_lens.tolist() == lengths
    assert metadata.max_seq_len == bound + sum(steps)
    assert metadata.seq_lens_cpu.tolist() == lengths
    assert metadata.seq_lens_cpu.dtype == torch.int32
    assert metadata.seq_lens_cpu_upper_bound.tolist() == [n + 3 + sum(steps) if n else 0 for n in batch.seq_lens]
    assert reads() == (0 if known else 1)


def test_a_host_copy_does_not_follow_the_device_tensor():
    metadata = MIXED.metadata()
    before = metadata.seq_lens_cpu
    metadata.seq_lens.add_(1)
    assert before.tolist() == list(MIXED.seq_lens)


def test_prefetch_makes_the_read_an_event_wait():
    metadata = MIXED.metadata(epoch=Epoch())
    with sync_policy("error"):
        metadata.prefetch_host()
        metadata.prefetch_host()
        assert metadata.seq_lens_cpu.tolist() == list(MIXED.seq_lens)
        part = metadata.slice_requests(1, 3)
        assert part.seq_lens_cpu.tolist() == list(MIXED.seq_lens[1:3])
    (site,) = sync_report().sites
    assert (site.kind.value, site.count, site.bytes) == ("event", 1, 16)
    assert site.site.file == __file__


def test_error_policy_refuses_before_anything_is_copied():
    metadata = MIXED.metadata()
    with (
        sync_policy("error"),
        pytest.raises(HostSyncError, match=r"a blocking host read of seq_lens at .*test_metadata"),
    ):
        metadata.num_computed_tokens_cpu  # noqa: B018
    assert metadata._seq_lens_cpu is None


@given(batches(min_requests=1))
def test_replace_and_unpadded_lose_no_field(batch: Batch):
    metadata = batch.metadata(known=True, slack=2, epoch=Epoch())
    full = metadata.unpadded(metadata.num_actual_tokens, metadata.num_reqs)
    for field in dataclasses.fields(CommonAttentionMetadata):
        for other in (metadata.replace(), full, metadata.slice_requests(0, metadata.num_reqs)):
            assert _equal(getattr(other, field.name), getattr(metadata, field.name)), field.name
            assert other._seq_lens_cpu is not None


def test_replacing_seq_lens_drops_what_was_known_of_the_old():
    metadata = MIXED.metadata(known=True, epoch=Epoch())
    assert metadata.replace(seq_lens=metadata.seq_lens + 1)._seq_lens_cpu is None
    assert metadata.replace(epoch=Epoch())._seq_lens_cpu is None
    assert dataclasses.replace(metadata, seq_lens=metadata.seq_lens + 1)._seq_lens_cpu is None
    kept = [metadata.replace(max_seq_len=200), dataclasses.replace(metadata, max_seq_len=200)]
    assert [each.seq_lens_cpu.data_ptr() for each in kept] == [metadata.seq_lens_cpu.data_ptr()] * 2


def test_a_callers_host_tensor_may_be_given_again_with_other_lengths():
    given = torch.tensor(MIXED.seq_lens, dtype=torch.int32)
    first = MIXED.metadata(epoch=Epoch()).replace(_seq_lens_cpu=given)
    assert first._seq_lens_cpu is not None
    assert MIXED.metadata(epoch=Epoch()).replace(_seq_lens_cpu=given)._seq_lens_cpu is not None


@pytest.mark.parametrize("epoch", [None, Epoch()])
def test_assigning_an_epoch_drops_what_was_known(epoch: Epoch | None):
    metadata = MIXED.metadata(known=True, epoch=Epoch())
    with torch.inference_mode():
        metadata = metadata.replace(seq_lens=metadata.seq_lens.clone(), _seq_lens_cpu=metadata._seq_lens_cpu)
        metadata.epoch = epoch
        metadata.seq_lens.add_(1)
        metadata.seq_lens_changed()
        assert metadata.seq_lens_cpu.tolist() == metadata.seq_lens.tolist()


def test_values_that_are_one_tensor_on_a_cpu_advance_once():
    lengths = torch.tensor(MIXED.seq_lens, dtype=torch.int32)
    metadata = MIXED.metadata(epoch=Epoch()).replace(
        seq_lens=lengths, _seq_lens_cpu=lengths, seq_lens_cpu_upper_bound=lengths
    )
    metadata.advance(1)
    assert metadata.seq_lens.tolist() == [34, 101, 8, 0]
    assert metadata.seq_lens_cpu.tolist() == metadata.seq_lens_cpu_upper_bound.tolist() == [34, 101, 8, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_knows_what_was_known_and_no_more(copied: Callable[[Any], Any], changed: bool):
    metadata = MIXED.metadata(epoch=Epoch())
    metadata.seq_lens.add_(0)
    metadata.seq_lens_cpu  # noqa: B018
    if changed:
        metadata.seq_lens.add_(1)
    other = copied(metadata)
    assert (other._seq_lens_cpu is None) == changed
    assert other.seq_lens_cpu.tolist() == metadata.seq_lens.tolist()


def test_a_batch_is_printed_without_a_read():
    assert "seq_lens=torch.int32 (4,) on cpu, num_reqs=4, " in repr(MIXED.metadata())


def test_non_contiguous_tensors_are_taken():
    wide = torch.zeros(4, 2, dtype=torch.int32)
    wide[:, 0] = torch.tensor(MIXED.seq_lens)
    metadata = MIXED.metadata().replace(seq_lens=wide[:, 0])
    assert metadata.num_computed_tokens_cpu.tolist() == MIXED.computed
    metadata.advance(2)
    assert wide[:, 0].tolist() == metadata.seq_lens_cpu.tolist() == [35, 102, 9, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_on_a_gpu(prefetch: bool):
    metadata = MIXED.metadata()
    moved = {
        field.name: value.cuda()
        for field in dataclasses.fields(metadata)
        if isinstance(value := getattr(metadata, field.name), torch.Tensor)
        and field.name not in ("query_start_loc_cpu", "seq_lens_cpu_upper_bound")
    }
    moved["query_start_loc_cpu"] = metadata.query_start_loc_cpu.pin_memory()
    metadata = metadata.replace(**moved, epoch=Epoch())
    torch.cuda._sleep(20_000_000)
    with waits_refused():
        metadata.advance(1)
        part = metadata.split(6)[0]
        if prefetch:
            metadata.prefetch_host()
            torch.cuda._sleep(20_000_000)
            assert metadata.seq_lens_cpu.is_pinned()
            assert metadata.num_computed_tokens_cpu.tolist() == [33, 97, 1, 0]
    assert metadata.seq_lens_cpu.tolist() == [34, 101, 8, 0]
    assert part.seq_lens_cpu.tolist() == part.seq_lens.tolist()
    metadata.seq_lens.add_(1)
    assert metadata.seq_lens_cpu.tolist() == [35, 102, 9, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "wrong dtype": ({"seq_lens": torch.zeros(4)}, "seq_lens is torch.float32; it must be torch.int32"),
    "int64 lengths": (
        {"query_start_loc_cpu": torch.zeros(5, dtype=torch.int64)},
        "query_start_loc_cpu is torch.int64; it must be torch.int32",
    ),
    "wrong shape": (
        {"seq_lens": torch.zeros(3, dtype=torch.int32)},
        "seq_lens has shape (3,); it must be (4)",
    ),
    "wrong rank": (
        {"block_table_tensor": torch.zeros(4, dtype=torch.int32)},
        "block_table_tensor has shape (4,); it must be (4, any)",
    ),
    "wrong device": (
        {"query_start_loc": torch.zeros(5, dtype=torch.int32, device="meta")},
        "query_start_loc is on meta; it must be on cpu",
    ),
    "host field on a device": (
        {"seq_lens_cpu_upper_bound": torch.zeros(4, dtype=torch.int32, device="meta")},
        "seq_lens_cpu_upper_bound is on meta; it must be on cpu",
    ),
    "given lengths": (
        {"_seq_lens_cpu": torch.zeros(9, dtype=torch.int32)},
        "_seq_lens_cpu has shape (9,); it must be (4)",
    ),
    "not a tensor": ({"seq_lens": [1, 2]}, "seq_lens is list [1, 2]; it must be a torch.int32 tensor"),
    "no slots": (
        {"slot_mapping": torch.zeros(3, dtype=torch.int64)},
        "slot_mapping has 3 entries; it must have at least num_actual_tokens, 14",
    ),
    "negative": ({"max_seq_len": -1}, f"max_seq_len is -1; it must be an integer from 0 to {INT32_MAX}"),
    "too long": ({"max_seq_len": 2**31}, f"max_seq_len is 2147483648; it must be an integer from 0 to {INT32_MAX}"),
    "a float": ({"num_reqs": 4.0}, f"num_reqs is 4.0; it must be an integer from 0 to {INT32_MAX}"),
    "mask": ({"is_prefilling": torch.zeros(4)}, "is_prefilling is torch.float32; it must be torch.bool"),
    "no mask": ({"causal": None}, "causal is None; it must be True or False"),
    "a mask by request": (
        {"causal": torch.ones(4, dtype=torch.bool)},
        "causal is torch.bool (4,) on cpu; it must be True or False",
    ),
    "no epoch": ({"epoch": 5}, "epoch is 5; it must be an Epoch, as Epoch() makes, or None"),
    "the class": ({"epoch": Epoch}, f"epoch is {Epoch!r}; it must be an Epoch, as Epoch() makes, or None"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_named(case: str):
    changes, message = BAD[case]
    with pytest.raises(MetadataError) as caught:
        MIXED.metadata().replace(**changes)
    assert str(caught.value) == message


ASCENDING = "it must be integers that ascend strictly between 0 and the 12 query tokens"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.unpadded(3, 5), "num_actual_reqs is 5; it must be an integer from 0 to 4"),
        (lambda m: m.unpadded(99, 4), "num_actual_tokens is 99; it must be an integer from 0 to 14"),
        (lambda m: m.unpadded(5.0, 2), "num_actual_tokens is 5.0; it must be an integer from 0 to 14"),
        (lambda m: m.unpadded(5, None), "num_actual_reqs is None; it must be an integer from 0 to 4"),
        (
            lambda m: m.unpadded(4, 2),
            "num_actual_tokens is 4; it must be at least 5, the query tokens of the 2 requests",
        ),
        (lambda m: m.slice_requests(3, 2), "start is 3; it must be an integer from 0 to 2"),
        (lambda m: m.slice_requests(False, 2), "start is False; it must be an integer from 0 to 2"),
        (
            lambda m: m.slice_requests(0, torch.tensor(2)),
            "stop is torch.int64 () on cpu; it must be an integer from 0 to 4",
        ),
        (lambda m: m.split(5, 5), f"token_offsets is (5, 5); {ASCENDING}"),
        (lambda m: m.split(12), f"token_offsets is (12,); {ASCENDING}"),
        (lambda m: m.split("3"), f"token_offsets is ('3',); {ASCENDING}"),
        (lambda m: m.split(1.5), f"token_offsets is (1.5,); {ASCENDING}"),
        (lambda m: m.advance(1.0), f"num_tokens is 1.0; it must be an integer from 0 to {INT32_MAX}"),
        (lambda m: m.advance(-1), f"num_tokens is -1; it must be an integer from 0 to {INT32_MAX}"),
        (
            lambda m: m.replace(max_seq_len=INT32_MAX).advance(1),
            f"max_seq_len + num_tokens is {INT32_MAX + 1}; it must be an integer from 0 to {INT32_MAX}",
        ),
    ],
)
def test_a_bad_argument_is_named(call: Any, message: str):
    with pytest.raises(MetadataError) as caught:
        call(MIXED.metadata())
    assert str(caught.value) == message


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_numpy_integers_are_taken(integer: Callable[[int], Any]):
    metadata = MIXED.metadata()
    part = metadata.slice_requests(integer(0), integer(2))
    whole = metadata.unpadded(integer(14), integer(4))
    assert [each.num_reqs for each in metadata.split(integer(1))] == [1, 3]
    metadata.advance(integer(1))
    assert part.seq_lens.tolist() == [34, 101]
    for each in (part, whole, metadata):
        assert {type(each.num_reqs), type(each.num_actual_tokens), type(each.max_seq_len)} == {int}


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        (torch.ones(4), "seq_lens_cpu is torch.float32; it must be torch.int32"),
        ([33, 100, 7, 0], "seq_lens_cpu is list [33, 100, 7, 0]; it must be a torch.int32 tensor"),
        (torch.ones(3, dtype=torch.int32), "seq_lens_cpu has shape (3,); it must be (4)"),
        (torch.ones(4, dtype=torch.int32, device="meta"), "seq_lens_cpu is on meta; it must be on cpu"),
    ],
)
def test_what_is_assigned_as_exact_lengths_must_be_such(assigned: Any, message: str):
    metadata = MIXED.metadata(epoch=Epoch())
    with pytest.raises(MetadataError) as caught:
        metadata.seq_lens_cpu = assigned
    assert str(caught.value) == message
    assert metadata._seq_lens_cpu is None


def test_assigned_lengths_are_known_until_none_is_assigned():
    metadata = MIXED.metadata(epoch=Epoch())
    metadata.seq_lens_cpu = torch.tensor(MIXED.seq_lens, dtype=torch.int32)
    with sync_policy("error"):
        assert metadata.seq_lens_cpu.tolist() == list(MIXED.seq_lens)
    metadata.seq_lens_cpu = None
    assert metadata._seq_lens_cpu is None
    assert metadata.seq_lens_cpu.tolist() == list(MIXED.seq_lens)


def test_unpadded_may_keep_padding_tokens():
    kept = MIXED.metadata().unpadded(7, 2)
    assert (kept.num_actual_tokens, kept.query_start_loc_cpu.tolist()) == (7, [0, 1, 5])


@given(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=8).filter(any), st.data())
def test_every_row_is_in_a_part(query_lens: list[int], data: st.DataObject):
    """Rows without query tokens too, wherever they are; only a request that a cut divides is in two parts."""
    seq_lens = [10 + length for length in query_lens]
    metadata = Batch(tuple(query_lens), tuple(seq_lens)).metadata(known=True, epoch=Epoch())
    total = sum(query_lens)
    offsets = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    parts = metadata.split(*offsets)
    rows = [row for part in parts for row in (part.block_table_tensor[:, 0] // 2).tolist()]
    starts = metadata.query_start_loc_cpu.tolist()
    divided = [sum(a <= row for a in starts) - 1 for row in offsets if row not in starts]
    assert rows == sorted([*range(len(query_lens)), *divided])
    for part in parts:
        assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist()
        assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist()
        assert int(part.query_start_loc_cpu[-1]) == part.num_actual_tokens


def test_a_first_row_without_query_tokens_stays():
    parts = Batch((0, 5, 7), (9, 5, 7)).metadata().split(5)
    assert [part.seq_lens.tolist() for part in parts] == [[9, 5], [7]]
    assert [part.query_start_loc_cpu.tolist() for part in parts] == [[0, 0, 5], [0, 7]]


def _equal(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
