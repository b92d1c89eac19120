"""A child process that answers in lines of JSON: commands, what fails, what is late, and what does not end."""

import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from vllm_async_spec.json_child import Child, start

SERVE = """
import sys, time
from vllm_async_spec.json_child import serve

class Sums:
    def add(self, a, b):
        print("adding")  # of a library that knows nothing of the answers
        return {"sum": a + b}

    def sleep(self):
        time.sleep(60)

    def secret(self):
        return {}

serve(Sums, "add", "sleep")
"""
STAGES = """
from vllm_async_spec.json_child import answering

with answering() as answer:
    answer({"stage": "one"})
    answer({"stage": "two"})
    raise ValueError("no\\n  third")
"""


def started(folder: Path, script: str, **limits: Any) -> AbstractContextManager[Child]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return start([sys.executable, "-c", script], log=folder / "new" / "log", env=env, fail=RuntimeError, **limits)


def test_commands_are_answered_and_prints_go_to_the_log(tmp_path: Path):
    with started(tmp_path, SERVE) as child:
        child.wait_until_ready()
        assert child.ask("add", a=1, b=2) == {"sum": 3}
        assert child.ask("add", a=3, b=4) == {"sum": 7}
    assert child.process.returncode == 0
    assert (tmp_path / "new" / "log").read_text().split() == ["adding"] * 2


@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [("add", {"a": 1, "b": "2"}, r"TypeError: unsupported operand .*"), ("secret", {}, "KeyError: 'secret'")],
)
def test_a_command_that_fails_is_one_sentence(tmp_path: Path, command: str, arguments: Any, why: str):
    with started(tmp_path, SERVE) as child:
        child.wait_until_ready()
        with pytest.raises(RuntimeError, match=rf"^{why} \(log: .*log\)$"):
            child.ask(command, **arguments)


def test_an_answer_that_is_late_ends_the_child(tmp_path: Path):
    with started(tmp_path, SERVE, answer_s=0.3) as child:
        child.wait_until_ready()
        with pytest.raises(RuntimeError, match=r"^the process gave no answer for 0 s \(log: "):
            child.ask("sleep")
    assert child.process.returncode == -9


def test_a_child_that_is_late_to_be_ready_is_ended(tmp_path: Path):
    with (
        started(tmp_path, "import time; time.sleep(60)", ready_s=0.2, answer_s=50) as child,
        pytest.raises(RuntimeError, match=r"^the process gave no answer for 0 s"),
    ):
        child.wait_until_ready()


def test_answers_that_nobody_asked_for_come_in_their_order_and_the_error_last(tmp_path: Path):
    with started(tmp_path, STAGES) as child:
        assert [child.answer()["stage"], child.answer()["stage"]] == ["one", "two"]
        with pytest.raises(RuntimeError, match=r"^ValueError: no third \(log: "):
            child.answer()
    assert "Traceback" in (tmp_path / "new" / "log").read_text()


def test_a_child_that_does_not_end_is_killed_in_time(tmp_path: Path):
    before = time.monotonic()
    with started(tmp_path, "import time; time.sleep(60)", end_s=0.2) as child:
        pass
    assert time.monotonic() - before < 20
    assert child.process.returncode == -9
