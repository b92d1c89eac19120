import inspect
import json
import os
import signal
import sys
import threading
import warnings

import pytest
import torch

from vllm_async_spec import (
    Epoch,
    HostCopy,
    HostSyncError,
    HostSyncWarning,
    PinnedRing,
    SyncPolicy,
    current_sync_policy,
    reset_sync_report,
    set_sync_policy,
    sync_policy,
    sync_report,
)
from vllm_async_spec.sync_policy import on_first_count, record_fallback

module = sys.modules["vllm_async_spec.sync_policy"]
"""The package has a function of the module's name."""


@pytest.fixture(autouse=True)
def _fresh_policy():
    reset_sync_report()
    previous = set_sync_policy("allow")
    yield
    set_sync_policy(previous)


def read(name: str = "seq_lens") -> torch.Tensor:
    return HostCopy(torch.arange(8, dtype=torch.int32), name).read()


def line_of_read() -> int:
    return inspect.getsourcelines(read)[1] + 1


def test_a_read_is_counted_at_the_line_that_asked():
    for _ in range(3):
        read()
    (site,) = sync_report().sites
    assert (site.count, site.bytes, site.what) == (3, 96, "seq_lens")
    assert (site.site.file, site.site.line, site.site.function) == (__file__, line_of_read(), "read")
    assert site.seconds > 0
    assert json.loads(json.dumps(sync_report().to_dict()))["count"] == 3


def test_reset_forgets_and_returns():
    read()
    assert reset_sync_report().count == 1
    assert sync_report().count == 0


def test_warn_warns_once_a_site_with_the_callers_line():
    with sync_policy("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            read()
        read("other")
    assert [(w.category, w.filename, w.lineno) for w in caught] == [(HostSyncWarning, __file__, line_of_read())] * 2
    assert "a blocking host read of seq_lens at " in str(caught[0].message)
    assert sync_report().count == 4


def test_error_raises_and_counts_the_attempt_without_bytes():
    with sync_policy("error"), pytest.raises(HostSyncError, match="use the device tensor or seq_lens_cpu_upper_bound"):
        read()
    assert (sync_report().count, sync_report().bytes) == (1, 0)


def test_the_scoped_policy_is_this_threads_and_the_process_policy_is_everybodys():
    seen: list[SyncPolicy] = []

    def elsewhere():
        seen.append(current_sync_policy())

    set_sync_policy("warn")
    with sync_policy("error"):
        assert current_sync_policy() is SyncPolicy.ERROR
        with sync_policy("allow"):
            assert current_sync_policy() is SyncPolicy.ALLOW
        assert current_sync_policy() is SyncPolicy.ERROR
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [SyncPolicy.WARN]
    assert current_sync_policy() is SyncPolicy.WARN


def test_counters_are_exact_under_threads():
    threads = [threading.Thread(target=lambda: [read() for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sync_report().count == 1600


def test_fallbacks_are_counted_by_reason_and_reported():
    for reason in ("min_tokens", "penalties", "min_tokens"):
        record_fallback(reason)
    assert sync_report().fallbacks == {"min_tokens": 2, "penalties": 1}
    assert json.loads(json.dumps(sync_report().to_dict()))["fallbacks"] == sync_report().fallbacks
    assert reset_sync_report().fallbacks == {"min_tokens": 2, "penalties": 1}
    assert sync_report().fallbacks == {}


@pytest.mark.parametrize("count", [read, lambda: record_fallback("min_tokens")])
def test_the_first_count_is_announced_once(count):
    announced = []
    on_first_count(lambda: announced.append(sync_report().count + sum(sync_report().fallbacks.values())))
    assert announced == []
    count()
    count()
    assert announced == [1]
    on_first_count(lambda: announced.append("late"))
    assert announced == [1, "late"], "something has been counted already"


def test_a_forked_child_starts_at_zero_even_if_its_parent_was_counting():
    read()
    record_fallback("min_tokens")
    with module._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # what it waits for would never come
            empty = sync_report().count == 0 and sync_report().fallbacks == {}
            record_fallback("min_tokens")
            os._exit(0 if empty and sync_report().fallbacks == {"min_tokens": 1} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sync_report().count == 1


@pytest.mark.parametrize("use", [set_sync_policy, lambda value: sync_policy(value).__enter__()])
def test_an_unknown_policy_is_named_with_those_that_exist(use):
    with pytest.raises(ValueError, match="sync policy is 'never'; it must be one of allow, warn, error"):
        use("never")


def test_pinned_ring_hands_out_its_buffers_in_turn():
    ring = PinnedRing((2,), torch.int32, depth=2, device="cpu")
    first = ring.next()
    first.fill_(7)
    assert ring.fence() is None
    assert ring.next() is not first
    assert ring.next() is first
    assert first.tolist() == [7, 7]
    with pytest.raises(ValueError, match="depth is 0; a PinnedRing needs at least 1 buffer"):
        PinnedRing((2,), torch.int32, depth=0, device="cpu")


def test_pinned_ring_is_on_the_host_whatever_pytorchs_default_device_is():
    with torch.device("meta"):
        ring = PinnedRing((3,), torch.int32, depth=2, device="cpu")
    assert ring.next().tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_copies_are_pinned_whatever_pytorchs_default_device_is():
    source = torch.arange(8, dtype=torch.int32, device="cuda")
    with torch.device("cuda"):
        copy = HostCopy(source, "seq_lens", epoch=Epoch())
        copy.prefetch()
        assert PinnedRing((3,), torch.int32, depth=1, device="cuda").next().is_pinned()
    assert copy.read().is_pinned()
    assert copy.read().tolist() == list(range(8))


@pytest.mark.gpu
def test_pinned_ring_waits_for_the_copy_that_still_reads_the_buffer():
    ring = PinnedRing((1 << 16,), torch.int32, depth=1, device="cuda")
    targets = [torch.empty(1 << 16, dtype=torch.int32, device="cuda") for _ in range(4)]
    for value, target in enumerate(targets):
        ring.next().fill_(value)
        torch.cuda._sleep(20_000_000)  # so that without its fence the buffer is overwritten before it is read
        target.copy_(ring._buffers[0], non_blocking=True)
        ring.fence()
    assert [int(t.unique().item()) for t in targets] == [0, 1, 2, 3]
    assert sync_report().count == 3
