"""The host views on vLLM's own metadata are exact when they are returned, and free where vLLM gave the value."""

import copy
import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from length_writers import MODES, writers
from undone import ledger_of, undone

from vllm_async_spec import HostSyncWarning, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.compat import builders
from vllm_async_spec.host_lengths import Trust, VllmHostLengths, with_host_values

QUERY, SEQ, COMPUTED = [1, 4, 7], [33, 100, 7], [32, 96, 0]
UNSEEN = ("data", "numpy", "ctypes")
"""Writers that PyTorch's version counter does not show."""
WRITERS = writers("cpu") | {"assigned": lambda metadata: setattr(metadata, "seq_lens", metadata.seq_lens + 1)}


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    fake_flashinfer.install()
    with undone():
        ledger_of(["metadata-unpadded", "metadata-micro-batches"]).install()
        yield


def write(how: str, metadata: Any) -> None:
    WRITERS[how](metadata if how == "assigned" else metadata.seq_lens)


def assert_exact(metadata: Any) -> None:
    for _ in range(2):
        assert metadata.seq_lens_cpu.tolist() == metadata.seq_lens.tolist()
        assert metadata.num_computed_tokens_cpu.tolist() == metadata.num_computed_tokens.tolist()


DERIVED: dict[str, Callable[[Any], list[Any]]] = {
    "itself": lambda metadata: [],
    "copy": lambda metadata: [copy.copy(metadata)],
    "replace": lambda metadata: [dataclasses.replace(metadata, max_query_len=9)],
    "replaced lengths": lambda metadata: [dataclasses.replace(metadata, seq_lens=metadata.seq_lens + 3)],
    "unpadded": lambda metadata: [metadata.unpadded(5, 2)],
}


@pytest.mark.parametrize("mode", MODES)
def test_what_was_copied_before_a_write_is_never_returned(mode: str):
    for how, derived in itertools.product(WRITERS, DERIVED):
        with MODES[mode](), warnings.catch_warnings():
            warnings.simplefilter("ignore", HostSyncWarning)
            metadata = builders.common_metadata(QUERY, SEQ)
            assert_exact(metadata)
            metadata.prefetch_host()
            parts = DERIVED[derived](metadata)
            for part in parts:
                assert_exact(part)
            for _ in range(2):
                write(how, metadata)
                for part in (metadata, *parts):
                    assert_exact(part)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("derived", DERIVED)
def test_what_vllm_gave_is_returned_until_a_change_shows(mode: str, how: str, derived: str):
    with MODES[mode]():
        metadata = builders.common_metadata(QUERY, SEQ, host=True)
        if metadata.host_trust is Trust.RENEWED:
            pytest.skip("0.12's own drafters renew every host value, and what they renew is what is returned")
        if not metadata.seq_lens.is_inference() and how in UNSEEN and metadata.host_trust is Trust.UNCHANGED:
            pytest.skip("vLLM 0.13 to 0.29 renew what they gave after such a write; the next test has that")
        parts = DERIVED[derived](metadata)
        for part in (metadata, *parts):
            assert_exact(part)
        write(how, metadata)
        for part in (metadata, *parts):
            assert_exact(part)


def test_what_vllm_gives_costs_nothing():
    reset_sync_report()
    metadata = builders.common_metadata(QUERY, SEQ, host=True)
    gives = "_seq_lens_cpu" in parameters() or "seq_lens_cpu" in parameters()
    assert gives is (metadata.host_trust is not Trust.NONE)
    for each in (metadata, copy.copy(metadata), dataclasses.replace(metadata, max_query_len=9)):
        assert each.seq_lens_cpu.tolist() == SEQ
        assert each.num_computed_tokens_cpu.tolist() == COMPUTED
    assert bool(sync_report().count) is not gives


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", [False, True])
def test_the_drafters_own_upkeep_gives_exact_lengths(mode: str, host: bool):
    """Upstream's drafters write the device lengths, in later releases by a kernel, and then add to the host's."""
    with MODES[mode]():
        metadata = builders.common_metadata(QUERY, SEQ, host=host)
        for step in (1, 2):
            WRITERS["ctypes"](metadata.seq_lens)
            if "seq_lens_cpu" in parameters():  # 0.12 adds unconditionally
                metadata.seq_lens_cpu = metadata.seq_lens_cpu + 1
                metadata.num_computed_tokens_cpu = metadata.seq_lens_cpu - torch.tensor(QUERY)
            else:
                if metadata._seq_lens_cpu is not None:
                    metadata._seq_lens_cpu += 1
                if metadata._num_computed_tokens_cpu is not None:
                    metadata._num_computed_tokens_cpu += 1
            assert metadata.seq_lens_cpu.tolist() == [n + step for n in SEQ]
            assert metadata.num_computed_tokens_cpu.tolist() == [n + step for n in COMPUTED]


def test_the_device_knows_how_many_drafts_are_verified():
    """From 0.31 on the host's query offsets have the right total, and the device's the right ones of each request."""
    metadata = builders.common_metadata(QUERY, SEQ)
    metadata.query_start_loc = torch.tensor([0, 2, 5, 12], dtype=torch.int32)
    assert metadata.num_computed_tokens_cpu.tolist() == [31, 97, 0]


def test_a_stand_in_says_what_it_was_told_and_is_not_copied():
    metadata = builders.common_metadata(QUERY, SEQ)
    bound = torch.tensor([40, 100, 7], dtype=torch.int32)
    with sync_policy("error"):
        told = with_host_values(metadata, bound)
        assert told.seq_lens_cpu is bound
        assert metadata._seq_lens_cpu is None


def test_a_kept_copy_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The control: the properties of vLLM 0.13, which keep what they copied."""

    def keeping(self: Any) -> torch.Tensor:
        return self.__dict__.setdefault("_kept", self.seq_lens.to("cpu", copy=True))

    monkeypatch.setattr(builders.common_metadata_class(), "seq_lens_cpu", property(keeping, lambda self, value: None))
    metadata = builders.common_metadata(QUERY, SEQ)
    assert_exact(metadata)
    write("add_", metadata)
    with pytest.raises(AssertionError):
        assert_exact(metadata)


def test_what_is_grafted_is_ours():
    cls = builders.common_metadata_class()
    assert vars(cls)["seq_lens_cpu"] is vars(VllmHostLengths)["seq_lens_cpu"]


def parameters() -> Any:
    return inspect.signature(inspect.unwrap(builders.common_metadata_class().__init__)).parameters
