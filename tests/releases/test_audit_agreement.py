"""The audit's time of data-parallel agreement, on the functions of a real vLLM release."""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_async_spec.audit.report import Phase
from vllm_async_spec.audit.spans import Watch
from vllm_async_spec.vllm_plugin.audit_agent.phases import watch_runner

ON_HOST = {"disable_nccl_for_dp_synchronization": True}
ANSWER = torch.tensor([[4, 2], [8, 8], [0, 0], [1, 1], [1, 1]])
"""Of two engines: tokens, padded tokens, micro-batches or not, and one or two more rows by release."""


class Runner:
    model = torch.nn.Identity()

    def _model_forward(self) -> None: ...


@pytest.mark.parametrize("engines", [1, 2])
def test_agreements_are_timed_where_there_are_several_engines(engines: int, monkeypatch: pytest.MonkeyPatch):
    dp_utils = importlib.import_module("vllm.v1.worker.dp_utils")
    monkeypatch.setattr(dp_utils, "_run_ar", lambda *args, **kwargs: ANSWER)
    config: Any = SimpleNamespace(data_parallel_size=engines, data_parallel_rank=0, num_ubatches=2, **ON_HOST)
    coordinate, watch = dp_utils.coordinate_batch_across_dp, Watch()
    known = inspect.signature(coordinate).parameters
    padded = {name: 1 for name in ("allow_dp_padding", "cudagraph_mode") if name in known}  # asks for equal batches
    watch_runner(watch, Runner(), None)  # type: ignore[arg-type]
    try:
        agreed = coordinate(num_tokens_unpadded=4, allow_microbatching=False, parallel_config=config, **padded)
    finally:
        watch.stop()
    assert (agreed[1] is None) is (engines == 1)
    assert [span.phase for span in watch.spans] == [Phase.AGREEMENT] * (engines - 1)
