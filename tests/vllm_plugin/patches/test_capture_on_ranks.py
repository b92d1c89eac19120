"""Ranks capture together or not at all, in two real processes."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from vllm_async_spec.vllm_plugin.patches import capture_on_ranks
from vllm_async_spec.vllm_plugin.patches.capture_on_ranks import Ranks


def as_rank(rank: int, folder: str, failing: list[int], absent: list[int]) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    ranks = Ranks(torch.distributed.group.WORLD, patience_s=1.0)

    def step() -> str:
        if rank in failing:
            raise ValueError(f"no memory on {rank}")
        return f"made by {rank}"

    said: dict[str, Any] = {}
    try:
        if rank not in absent:
            with torch.inference_mode():  # as while drafting is captured
                said["made"] = ranks.all_do(step)
    except Exception as error:
        said = {"error": type(error).__name__, "said": str(error)}
    Path(folder, f"{rank}.part").write_text(json.dumps(said))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    while len(list(Path(folder).glob("*.json"))) < 2:  # no rank leaves while another may still be asking it
        time.sleep(0.01)
    os._exit(0)  # the threads of gloo sometimes abort an ordinary exit


def run(folder: Path, failing: list[int], absent: list[int]) -> list[dict[str, Any]]:
    torch.multiprocessing.spawn(as_rank, (str(folder), failing, absent), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_or_none(tmp_path: Path):
    for name in ("both", "one", "absent"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "both", [], []) == [{"made": "made by 0"}, {"made": "made by 1"}]
    assert run(tmp_path / "one", [1], []) == [
        {"error": "RankFailedError", "said": "rank 1 failed: ValueError: no memory on 1"},
        {"error": "ValueError", "said": "no memory on 1"},
    ]
    waited, gone = run(tmp_path / "absent", [], [1])
    assert waited["error"] == "RanksApartError"
    assert "did not capture drafting within 1 s" in waited["said"]
    assert gone == {}


def test_one_rank_asks_nobody():
    assert Ranks(None).all_do(lambda: "made") == "made"


@pytest.mark.parametrize("fails", [False, True])
def test_several_ranks_capture_where_vllm_exchanges_the_addresses_of_its_all_reduce(
    fails: bool, monkeypatch: pytest.MonkeyPatch
):
    events: list[object] = []
    stream = object()
    all_reduce = SimpleNamespace(disabled=False)

    @contextlib.contextmanager
    def graph_capture(device: torch.device) -> Iterator[Any]:
        events.append(f"entered on {device}")
        try:
            yield SimpleNamespace(stream=stream)
        finally:
            events.append("skipped" if all_reduce.disabled else "exchanged")

    def captured(run: Any, pool: object, **given: object) -> str:
        events.append((run, pool, given))
        if fails:
            raise RuntimeError("not captured")
        return f"a replay of {run}"

    group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=all_reduce))
    state = SimpleNamespace(graph_capture=graph_capture, get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.setattr(capture_on_ranks, "captured", captured)
    monkeypatch.setattr(capture_on_ranks, "refuse_waits", lambda run: events.append(f"{run} waits"))
    ranks = Ranks(torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2))
    monkeypatch.setattr(ranks, "all_do", lambda step: (events.append("all"), step())[1])
    runs: Any = ["4", "2"]
    with pytest.raises(RuntimeError, match="not captured") if fails else contextlib.nullcontext():
        assert ranks.capture(runs, (0, 1), torch.device("cpu")) == ["a replay of 4", "a replay of 2"]
    before = ["all", "4 waits", "2 waits", "entered on cpu", "all", ("4", (0, 1), {"stream": stream})]
    after = ["skipped"] if fails else [("2", (0, 1), {"stream": stream}), "exchanged"]
    assert events == before + after
    assert not all_reduce.disabled
