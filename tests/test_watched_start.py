"""The watchdog of engine tests: a start without progress fails with the stacks of all processes, and leaves none."""

import sys
import textwrap
from pathlib import Path

import pytest
from families import left
from watched_start import WAITING, HungError, progress, watched

RANKS = """
import multiprocessing, sys, time

def hang_in_rank(barrier):
    print("rank started", flush=True)
    {rank}

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    barrier = context.Barrier(3)
    ranks = [context.Process(target=hang_in_rank, args=(barrier,)) for _ in range({ranks})]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(rank.exitcode for rank in ranks))
"""


def script(folder: Path, rank: str, ranks: int = 2, method: str = "spawn") -> list[str | Path]:
    file = folder / "ranks.py"
    file.write_text(textwrap.dedent(RANKS).format(rank=rank, ranks=ranks, method=method), encoding="utf-8")
    return [sys.executable, file]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_start_that_hangs_fails_with_the_stacks_of_all_ranks(tmp_path: Path, method: str):
    command = script(tmp_path, "barrier.wait()", method=method)  # a third party never comes
    with watched(command, tmp_path / "start.log") as start:
        start.wait_until(lambda: start.text().count("rank started") == 2)
        start.silent_s = 1.0
        with pytest.raises(HungError, match="no progress for 1 s") as caught:
            start.wait()
    told = str(caught.value)
    assert told.count("in hang_in_rank") == 2
    assert told.count("in join") >= 1  # the parent's
    assert "rank started" in told
    assert len(start.processes()) >= 3
    assert left(start.processes()) == []


def test_a_start_that_ends_gives_its_exit_code(tmp_path: Path):
    with watched(script(tmp_path, "sys.exit(3)", ranks=1), tmp_path / "start.log") as start:
        assert start.wait() == 3
    assert "rank started" in start.text()


def test_a_bar_that_moves_is_progress_and_a_line_of_a_waiting_process_is_not():
    log = "capturing: 0/19"
    assert progress(log + "\rcapturing: 1/19") > progress(log)
    for line in WAITING:
        assert progress(f"{log}\nINFO [shm_broadcast.py:690] {line} 60 s.\n") == progress(log)


@pytest.mark.parametrize(("name", "compiles"), [("ninja", True), ("other", False)])
def test_a_compiler_that_runs_is_progress(tmp_path: Path, name: str, compiles: bool):
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    with watched([program, "600"], tmp_path / "start.log") as start:
        assert start.compiles() is compiles
