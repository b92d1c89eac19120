import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_async_spec.audit import host_reads
from vllm_async_spec.audit.host_reads import CpuProbe, CudaProbe
from vllm_async_spec.audit.report import WaitKind
from vllm_async_spec.audit.waits import waits_on_cpu

READS = {
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "numpy": lambda t: t.numpy(),
    "item": lambda t: t[0].item(),
    "nonzero": lambda t: t.nonzero(),
    "boolean index": lambda t: t[t > 1],
    "bincount": lambda t: t.bincount(),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
}
# Other ways to the same; PyTorch has operators of their own for most, some of them in inference mode only.
ALSO = {
    "asarray": ("numpy", lambda t: np.asarray(t)),
    "where": ("nonzero", lambda t: torch.where(t > 1)),
    "argwhere": ("nonzero", lambda t: t.argwhere()),
    "nonzero as a tuple": ("nonzero", lambda t: t.nonzero(as_tuple=True)),
    "unique": ("nonzero", lambda t: t.unique()),
    "unique rows": ("nonzero", lambda t: t.unique(dim=0)),
    "unique_consecutive": ("nonzero", lambda t: t.unique_consecutive()),
    "masked_select": ("boolean index", lambda t: t.masked_select(t > 1)),
    "writing under a mask": ("boolean index", lambda t: t.index_put_((t > 1,), torch.tensor([5, 6]))),
    "an index of Python's": ("item", lambda t: range(t[0])),
    "a condition": ("item", lambda t: bool(t[0])),
    "equal": ("item", lambda t: torch.equal(t, t + 1)),
    "allclose": ("item", lambda t: torch.allclose(t, t)),
    "printed": ("repr", lambda t: str(t)),
    "formatted": ("repr", lambda t: f"{t}"),
    "a formatted scalar": ("item", lambda t: f"{t[0]}"),
}
FREE = {
    "a length that the host knows": lambda t: t.repeat_interleave(t, output_size=6),
    "a mask of the host's": lambda t: t[torch.tensor([True, False, True, False])],
    "one value under a mask": lambda t: t.__setitem__(t > 1, 0),
}


def forward() -> torch.Tensor:
    return torch.arange(4.0)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", READS)
def test_a_read_of_what_the_newest_step_computed_is_counted_as_now(what: str, inference: bool):
    probe = CpuProbe()
    with torch.inference_mode(inference), probe as reads:
        hidden = probe.forward(forward)
        sampled = (hidden * 2).argsort()
        READS[what](sampled)
    assert (dict(reads.now), dict(reads.late), reads.steps) == ({what: 1}, {}, 1)


@pytest.mark.parametrize("what", READS)
def test_an_audit_of_a_cpu_engine_reports_each_read(what: str):
    copies = {"cpu", "to", "numpy"}
    (wait,) = waits_on_cpu([{"thread": 1, "what": what, "late": False, "at": 5, "stack": []}], main=1)
    assert wait.kind is (WaitKind.COPY_TO_HOST if what in copies else WaitKind.READ)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("way", ALSO)
def test_other_ways_to_read(way: str, inference: bool):
    what, read = ALSO[way]
    assert counted(read, inference) == {what: 1}


def counted(read: Callable[[torch.Tensor], Any], inference: bool) -> dict[str, int]:
    probe = CpuProbe()
    with torch.inference_mode(inference), probe as reads:
        read(probe.forward(forward).argsort())
    return dict(reads.now)


def missed() -> list[str]:
    """Ways to read that are not counted."""
    ways = READS | {way: read for way, (_, read) in ALSO.items()}
    return [way for way, read in ways.items() for inference in (False, True) if not counted(read, inference)]


@pytest.mark.parametrize("table", ["_OPERATORS", "_READS"])
def test_each_of_what_reads_is_needed(table: str, monkeypatch: pytest.MonkeyPatch):
    assert missed() == []
    entries = getattr(host_reads, table)
    for entry in entries:
        monkeypatch.setattr(host_reads, table, {other: what for other, what in entries.items() if other is not entry})
        assert missed(), f"nothing here needs {entry}"


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", FREE)
def test_what_reads_nothing(what: str, inference: bool):
    assert counted(FREE[what], inference) == {}


def test_a_read_of_what_the_step_before_computed_is_late():
    probe = CpuProbe()
    with probe as reads:
        counts = probe.forward(forward).sum()
        probe.forward(forward)
        counts.item()
    assert (dict(reads.now), dict(reads.late)) == ({}, {"item": 1})


def test_an_asynchronous_copy_waits_only_where_it_is_read():
    probe = CpuProbe()
    host = torch.empty(4)
    with probe as reads:
        hidden = probe.forward(forward)
        hidden.to("cpu", non_blocking=True)
        host.copy_(hidden, non_blocking=True)
        assert reads.now.total() == 0
        host.tolist()
    assert dict(reads.now) == {"tolist": 1}


def test_a_value_that_was_fetched_once_is_the_hosts():
    probe = CpuProbe()
    with probe as reads:
        fetched = probe.forward(forward).cpu()
        fetched.numpy()
        (fetched + 1).tolist()
    assert dict(reads.now) == {"cpu": 1}


def test_what_the_host_made_itself_is_not_counted():
    probe = CpuProbe()
    with probe as reads:
        lengths = torch.tensor([1, 2])
        probe.forward(forward)
        (lengths + 1).tolist()
        lengths.max().item()
    assert reads.now.total() + reads.late.total() == 0


def test_results_written_in_place_are_the_devices():
    probe = CpuProbe()
    seq_lens = torch.zeros(4)
    with probe as reads:
        seq_lens[:2].add_(probe.forward(forward)[:2])
        seq_lens.tolist()
    assert dict(reads.now) == {"tolist": 1}


@pytest.mark.gpu
def test_the_cuda_probe_sees_each_kind_of_wait_and_leaves_no_trace():
    device = torch.arange(8, device="cuda")
    events = [torch.cuda.Event(), torch.Event("cuda")]
    probe = CudaProbe()
    with probe as reads:
        for event in events:
            probe.forward(lambda: device + 1)
            event.record()
            event.synchronize()
            event.record()
            probe.forward(lambda: device + 1)
            event.synchronize()
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        for copy in (device.cpu, device[0].item, device.tolist, device.nonzero):
            before = reads.now["copy"]
            copy()
            assert reads.now["copy"] > before, copy  # nonzero warns more than once
        before = reads.now["copy"]
        device.to("cpu", non_blocking=True)
        assert reads.now["copy"] == before
    assert (reads.now["event"], reads.now["synchronize"]) == (2, 2)
    assert (dict(reads.late), reads.steps) == ({"event": 2}, 4)
    assert torch.cuda.get_sync_debug_mode() == 0
    assert sys.getprofile() is None
