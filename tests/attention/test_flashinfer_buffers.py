"""The pinned buffers that FlashInfer's wrappers plan in, without a GPU."""

import pytest
import torch

from vllm_async_spec import reset_sync_report, sync_report
from vllm_async_spec.attention.flashinfer import PlanBuffers, PlanError


def test_a_plan_more_than_there_are_buffers_waits_for_the_oldest_copy_and_is_counted():
    class Copy:
        ran = False

        def query(self) -> bool:
            return self.ran

        def synchronize(self) -> None:
            self.ran = True

    class Wrapper:
        _pin_memory_int_workspace_buffer = torch.zeros(16, dtype=torch.uint8)

    buffers, wrapper, copies = PlanBuffers(2, 16, torch.device("cpu")), Wrapper(), [Copy(), Copy()]
    reset_sync_report()
    for copy_of in copies:
        buffers.lend(wrapper)
        buffers._ring._fences[buffers._ring._turn] = copy_of  # type: ignore[call-overload]
    first = buffers._ring._buffers[0].data_ptr()
    assert (sync_report().count, wrapper._pin_memory_int_workspace_buffer.data_ptr() != first) == (0, True)
    buffers.lend(wrapper)
    assert (copies[0].ran, copies[1].ran, sync_report().count) == (True, False, 1)
    assert wrapper._pin_memory_int_workspace_buffer.data_ptr() == first


def test_a_wrapper_that_plans_more_than_a_buffer_holds_is_refused():
    class Wrapper:
        _pin_memory_int_workspace_buffer = torch.zeros(17, dtype=torch.uint8)

    with pytest.raises(PlanError, match="the plan of Wrapper needs 17 bytes, but each buffer has 16"):
        PlanBuffers(2, 16, torch.device("cpu")).lend(Wrapper())
