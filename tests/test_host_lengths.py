"""A host length is exact when it is returned: whoever wrote the device's, however, in whatever mode."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import Batch, batches
from hypothesis import given
from hypothesis import strategies as st
from interpreted import compare_on_a_gpu_or_interpreted
from length_writers import MODES, writers
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_async_spec import CommonAttentionMetadata, Epoch, HostCopy, HostSyncWarning, reset_sync_report, sync_report
from vllm_async_spec.host_lengths import _described, is_of_others

MIXED = Batch(query_lens=(1, 4, 7, 0), seq_lens=(33, 100, 7, 0), token_padding=2)

BEFORE: dict[str, Callable[[CommonAttentionMetadata], object]] = {
    "nothing": lambda metadata: None,
    "read": lambda metadata: (metadata.seq_lens_cpu, metadata.num_computed_tokens_cpu),
    "prefetched": lambda metadata: metadata.prefetch_host(),
    "advanced": lambda metadata: metadata.advance(1),
}
DERIVED: dict[str, Callable[[CommonAttentionMetadata], list[CommonAttentionMetadata]]] = {
    "itself": lambda metadata: [metadata],
    "replace": lambda metadata: [metadata.replace(causal=False)],
    "unpadded": lambda metadata: [metadata.unpadded(12, 3)],
    "slice": lambda metadata: [metadata.slice_requests(1, 3)],
    "split": lambda metadata: list(metadata.split(3, 8)),
}
HOST_FIELDS = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound")


def on(device: str, metadata: CommonAttentionMetadata, epoch: Epoch | None) -> CommonAttentionMetadata:
    """The same on `device`, with `epoch`, and with what is given where there is one."""
    fields = {name: value for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
    moved = {name: value.clone().to(device) for name, value in fields.items() if name not in HOST_FIELDS}
    known = {} if epoch is None else {"_seq_lens_cpu": metadata.seq_lens.clone()}
    return metadata.replace(**moved, epoch=epoch, **known)


def assert_exact(metadata: CommonAttentionMetadata) -> None:
    """Each view is what the device has now; asked for twice, because the first answer might be kept."""
    for _ in range(2):
        assert metadata.seq_lens_cpu.tolist() == metadata.seq_lens.tolist()
        assert metadata.num_computed_tokens_cpu.tolist() == metadata.num_computed_tokens.tolist()
    known = metadata._seq_lens_cpu
    assert known is None or known.tolist() == metadata.seq_lens.tolist()


def compare(device: str) -> None:
    """Every way of writing, after everything that could have kept a value, of everything that shares the lengths."""
    for mode, before, derived, write in itertools.product(MODES, BEFORE, DERIVED, writers(device)):
        for epoch in (None, Epoch()):
            with MODES[mode](), warnings.catch_warnings():
                warnings.simplefilter("ignore", HostSyncWarning)
                metadata = on(device, MIXED.metadata(), epoch)
                BEFORE[before](metadata)
                parts = DERIVED[derived](metadata)
                for part in parts:
                    BEFORE[before](part)
                for _ in range(2):
                    writers(device)[write](metadata.seq_lens)
                    if epoch is not None:
                        epoch.advance()
                    for part in (metadata, *parts):
                        assert_exact(part)


def test_whoever_writes_a_length_the_host_views_are_exact():
    compare_on_a_gpu_or_interpreted(compare)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", writers("cpu"))
def test_a_copy_that_is_kept_without_a_proof_is_seen(mode: str, write: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HostCopy, "_now", lambda self: 0 if self.source.is_inference() else self.source._version)
    with MODES[mode]():
        metadata = MIXED.metadata()
        shows = not metadata.seq_lens.is_inference() and write not in ("data", "numpy", "ctypes")
        assert metadata.seq_lens_cpu.tolist() == list(MIXED.seq_lens)
        writers("cpu")[write](metadata.seq_lens)
        stale = metadata.seq_lens_cpu.tolist() != metadata.seq_lens.tolist()
    assert stale is not shows


@pytest.mark.parametrize("mode", MODES)
@given(batches(min_requests=1, most=10_000), st.booleans(), st.data())
def test_no_sequence_of_operations_gives_a_stale_length(mode: str, batch: Batch, proved: bool, data: st.DataObject):
    write = writers("cpu")
    epoch = Epoch() if proved else None
    with MODES[mode](), warnings.catch_warnings():
        warnings.simplefilter("ignore", HostSyncWarning)
        family = [on("cpu", batch.metadata(slack=40), epoch)]
        for _ in range(data.draw(st.integers(1, 8))):
            chosen = data.draw(st.sampled_from(family))
            act = data.draw(st.sampled_from(["read", "write", "prefetch", "advance", "slice", "split", "replace"]))
            total = int(chosen.query_start_loc_cpu[-1])
            if act == "read":
                assert_exact(chosen)
            elif act == "write":
                write[data.draw(st.sampled_from(sorted(write)))](chosen.seq_lens)
                if epoch is not None:
                    epoch.advance()
            elif act == "prefetch":
                chosen.prefetch_host()
            elif act == "advance":
                chosen.advance(data.draw(st.integers(0, 3)))
            elif act == "slice":
                start = data.draw(st.integers(0, chosen.num_reqs))
                family.append(chosen.slice_requests(start, data.draw(st.integers(start, chosen.num_reqs))))
            elif act == "split" and total > 1:
                family += chosen.split(data.draw(st.integers(1, total - 1)))
            else:
                family.append(chosen.replace(max_seq_len=chosen.max_seq_len + 1))
        for metadata in family:
            assert_exact(metadata)


def test_with_an_epoch_a_length_is_copied_once_and_given_ones_never():
    reset_sync_report()
    metadata = MIXED.metadata().replace(epoch=Epoch())
    assert metadata.num_computed_tokens_cpu.tolist() == MIXED.computed
    assert metadata.seq_lens_cpu is metadata.seq_lens_cpu
    assert [part.seq_lens_cpu.tolist() for part in metadata.split(3)] == [[33, 98], [100, 7, 0]]
    assert sync_report().count == 1
    on("cpu", MIXED.metadata(), Epoch()).seq_lens_cpu  # noqa: B018
    assert sync_report().count == 1


@pytest.mark.parametrize("ask", ["read", "prefetched"])
def test_a_length_without_values_is_not_kept(ask: str):
    """As of a copy made while a compiler traces with fake tensors."""
    metadata = MIXED.metadata(epoch=Epoch())
    with FakeTensorMode(allow_non_fake_inputs=True):
        BEFORE[ask](metadata)
    assert_exact(metadata)


def test_a_length_without_values_is_not_handed_on():
    metadata = MIXED.metadata(epoch=Epoch())
    assert_exact(metadata)
    with FakeTensorMode(allow_non_fake_inputs=True):
        derived = metadata.replace(causal=False)
    assert_exact(derived)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: MIXED.metadata().prefetch_host(), "seq_lens is not prefetched"),
        (lambda: MIXED.metadata().replace(_seq_lens_cpu=torch.zeros(4, dtype=torch.int32)), "the value given for"),
    ],
    ids=["prefetched", "given"],
)
def test_what_cannot_be_used_without_an_epoch_is_said_where_it_was_asked_for(ask: Callable[[], object], said: str):
    with pytest.warns(HostSyncWarning, match=f"{said}.* because no Epoch was given") as caught:
        ask()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_what_is_copied_with_its_lengths_is_of_none(copied: Callable[[object], Any]):
    """A copied tensor counts its versions anew, so that a stale value of vLLM's could look current."""
    lengths, other = torch.zeros(4), torch.zeros(4)
    value = _described(torch.zeros(4), lengths)
    assert (is_of_others(value, lengths), is_of_others(value, other)) == (False, True)
    value, lengths = copied((value, lengths))
    assert is_of_others(value, lengths)
