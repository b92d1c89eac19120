"""The audit's agent in an engine's process: stand-ins for vLLM's objects, and a recorder that is real."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'vllm-async-spec[cpu]'")

from vllm_async_spec.audit import engine
from vllm_async_spec.audit.engine import AuditError, Ran, answers, described, saved_files
from vllm_async_spec.audit.folder import make_folder
from vllm_async_spec.audit.recording import How, Order
from vllm_async_spec.vllm_plugin.audit_agent.agent import Agent


class Runner:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.steps = 0

    def execute_model(self, scheduler_output: Any) -> None:
        self.steps += 1


class Scheduler:
    def schedule(self) -> Any:
        return SimpleNamespace(total_num_scheduled_tokens=4)


class EngineOf:
    def __init__(self, *, apart: bool = False, rank: int = 0) -> None:
        self.scheduler, self.runner = Scheduler(), Runner()
        wrapper = SimpleNamespace(worker=SimpleNamespace(rank=rank, model_runner=self.runner))
        core, worker = Agent(), Agent()
        self._core = core if apart else worker
        self._call = lambda core, rpc, timeout, args, kwargs: [worker.worker(wrapper, *args)]

    def replies(self, **request: Any) -> list[str]:
        return self._core.core(self, self._call, json.dumps(request), None)

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return answers(self.replies(**request))

    def step(self) -> None:
        self.runner.execute_model(self.scheduler.schedule())

    def arm(self, folder: Any, how: str = "full") -> None:
        self.ask({"do": "arm", "how": how, "skip": 0, "steps": 3, "folder": str(folder)})

    def cancel(self, folder: Any) -> None:
        self.ask({"do": "cancel", "folder": str(folder)})


@pytest.fixture
def folder() -> Iterator[Path]:
    with make_folder() as made:
        yield Path(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the whole engine is recorded instead")
@pytest.mark.parametrize("apart", [False, True], ids=["one process", "two processes"])
def test_phases_of_core_and_worker_are_recorded_once_and_everything_is_put_back(apart, folder):
    before = vars(Runner)["execute_model"], vars(Scheduler)["schedule"]
    engine_ = EngineOf(apart=apart)
    engine_.arm(folder)
    for _ in range(5):
        engine_.step()
    files = saved_files(engine_.ask({"do": "save"}))
    assert (vars(Runner)["execute_model"], vars(Scheduler)["schedule"]) == before
    assert (files["core"] is not None) is apart
    names = {}
    for role in ("worker", "core") if apart else ("worker",):
        with open(files[role]["recording"]) as file:
            names[role] = {span["name"] for span in json.load(file)["spans"]}
    assert "Runner.execute_model" in names["worker"]
    assert "Scheduler.schedule" in names["core" if apart else "worker"]


@pytest.mark.parametrize("how", ["plain", "full"])
@pytest.mark.parametrize("apart", [False, True], ids=["one process", "two processes"])
def test_a_second_audit_is_refused_in_words_until_who_asked_for_the_first_cancels_it(apart, how, folder):
    engine_ = EngineOf(apart=apart)
    engine_.arm(folder, how)
    for _ in range(2):
        with pytest.raises(AuditError, match=r"^an audit of this engine is under way \(0 of 3 steps\); wait until it"):
            engine_.arm(folder, how)
        engine_.cancel("/another")
    engine_.cancel(folder)
    engine_.arm(folder, how)
    engine_.cancel(folder)


def _linked(folder: Path) -> Path:
    link = folder.with_name(f"{folder.name}-link")
    link.symlink_to(folder)
    return link


def _file(folder: Path) -> Path:
    file = folder.with_name(f"{folder.name}-file")
    file.touch(0o700)
    return file


def _open(folder: Path) -> Path:
    folder.chmod(0o750)
    return folder


def _somebody_elses(folder: Path) -> Path:
    os.chown(folder, 65534, -1)
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "elsewhere": (lambda folder: Path.home(), "it does not match "),
    "below": (lambda folder: folder / folder.name, "it does not match "),
    "around a corner": (lambda folder: folder / ".." / "..", "it does not match "),
    "another name": (lambda folder: folder.parent / "mine", "it does not match "),
    "gone": (lambda folder: folder.with_name(f"{folder.name}-gone"), "No such file or directory"),
    "a link": (_linked, "it is not a directory"),
    "a file": (_file, "it is not a directory"),
    "open to others": (_open, "it does not belong to this user with mode 0700"),
    "somebody else's": (_somebody_elses, "it does not belong to this user with mode 0700"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_nothing_is_recorded_in_a_folder_that_no_front_end_made(case, folder, tmp_path, monkeypatch):
    make, why = FOLDERS[case]
    if make is _somebody_elses and os.geteuid():
        pytest.skip("only root gives a folder away")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine_ = EngineOf()
    with make_folder() as good:
        named = make(Path(good))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(AuditError) as error:
            engine_.arm(named)
        engine_.step()
        assert f"an audit can't be recorded in {str(named)!r}: {why}" in str(error.value)
        assert str(error.value).endswith("; let vllm-async-spec create the folder")
        assert sorted(tmp_path.rglob("*")) == before
        Path(good).chmod(0o700)
        os.chown(good, os.geteuid(), -1)
        engine_.arm(good)
        engine_.cancel(good)


def test_what_an_agent_does_not_know_is_an_answer_and_no_exception():
    (reply,) = EngineOf().replies(do="dance")[1:]
    assert "asked to 'dance'; it can describe, arm, save and cancel" in json.loads(reply)["error"]


def test_another_rank_than_the_one_asked_for_is_not_recorded(folder):
    engine_ = EngineOf(rank=1)
    (reply,) = engine_.replies(do="arm", how="plain", skip=0, steps=3, folder=str(folder))[1:]
    assert json.loads(reply) == {"role": "worker", "rank": 1}
    engine_.step()


def test_a_load_that_fails_leaves_the_engine_ready_for_the_next_audit(folder):
    engine_ = EngineOf()

    def breaks() -> Ran:
        engine_.step()
        raise ConnectionError("the load's own")

    for _ in range(2):
        with pytest.raises(ConnectionError, match="the load's own"):
            engine._record(engine_.ask, breaks, Order(How.PLAIN, 0, 3, str(folder)))


def test_a_load_is_run_until_the_steps_are_through(folder):
    engine_ = EngineOf()

    def work() -> Ran:
        engine_.step()
        return Ran(1, 1.0, None)

    engine._record(engine_.ask, work, Order(How.PLAIN, 1, 3, str(folder)))
    assert engine_.runner.steps == 5


def test_the_rank_that_is_asked_for_answers():
    engine = EngineOf(rank=1)
    assert engine.ask({"do": "describe"})[1:] == [{"role": "worker", "rank": 1}]
    with pytest.raises(AuditError, match="the engine has no rank 0; give --rank from 0 to 1"):
        described(engine.ask({"do": "describe"}), 0)
    facts = {"world_size": 2, "driver": ""}
    found = [{"pid": 1}, {"rank": 0}, {"facts": facts, "pid": 2, "started_by": "SpawnProcess"}]
    assert described(found, 1)["processes"].endswith("(spawned); only rank 1 was recorded")
