from __future__ import annotations

import pytest
import torch

from vllm_async_spec import reset_sync_report, sync_policy, sync_report
from vllm_async_spec.streams import captured, counted_wait


class Late:
    """An arrival that is there once it was waited for."""

    def __init__(self, there: bool) -> None:
        self.there, self.waits = there, 0

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.there, self.waits = True, self.waits + 1


@pytest.mark.parametrize("there", [True, False])
def test_a_wait_is_counted_where_there_is_one(there: bool):
    reset_sync_report()
    arrival = Late(there)
    counted_wait(arrival, "flags", 24)
    counted_wait(arrival, "flags", 24)
    assert arrival.waits == (not there)
    assert [(site.what, site.count, site.bytes, site.site.file) for site in sync_report().sites] == [
        ("flags", 1, 24, __file__)
    ] * (not there)


def test_the_error_policy_lets_it_wait():
    """It refuses copies, for which waiting for an event is the remedy."""
    late = Late(there=False)
    with sync_policy("error"):
        counted_wait(late, "flags", 24)
    assert late.waits == 1


@pytest.mark.gpu
def test_a_captured_function_is_replayed_into_what_it_returned():
    given = torch.arange(4, device="cuda")
    torch.cuda.synchronize()
    replay = captured(lambda: given * 2, torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())
    given += 1
    assert replay().tolist() == [2, 4, 6, 8]
    with pytest.raises(RuntimeError):
        captured(lambda: given.sum().item(), torch.cuda.graph_pool_handle())
