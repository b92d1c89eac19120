"""Children and their children end with the parent: at the end, at a signal, and when the parent is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from families import BARE, CHILD, GRANDCHILD, PARENT, begin, family, left

from vllm_async_spec.json_child import start
from vllm_async_spec.process_group import end_group

CALLER = f"""{BARE}
import os, subprocess, time
from vllm_async_spec.process_group import NewProcess

def print_and_wait():
    other = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), other.pid, flush=True)
    time.sleep(600)

def told(function, *arguments, **named):
    try:
        with NewProcess() as process:
            return process.submit(function, *arguments, **named).result()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

if __name__ == "__main__":
    if sys.argv[1] == "wait":
        with NewProcess() as process:
            process.submit(print_and_wait).result()
    print(told(divmod, 7, 3), told(divmod, 7, 0), told(os._exit, status=7), sep="\\n")
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("kind", ["json_child", "call"])
def test_no_process_outlives_an_ended_parent(number: signal.Signals, kind: str, tmp_path: Path):
    (tmp_path / "caller.py").write_text(CALLER)
    parent = {
        "json_child": lambda: begin("-c", PARENT, CHILD, str(tmp_path / "log")),
        "call": lambda: begin(str(tmp_path / "caller.py"), "wait"),
    }[kind]()
    children = family(parent)
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode != 0
    assert left(children) == []


def test_a_child_that_ends_takes_what_it_started_along(tmp_path: Path):
    code = f"{GRANDCHILD} print('{{\"pid\": ' + str(g.pid) + '}}', flush=True)"
    with start([sys.executable, "-c", code], log=tmp_path / "log", env=os.environ, fail=RuntimeError) as child:
        started = child.answer()["pid"]
    assert child.process.returncode == 0
    assert left([started], 0.1) == []


def test_what_ignores_sigterm_is_killed():
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    end_group(process.pid, grace_s=0.2)
    assert process.wait() == -signal.SIGKILL


def test_a_group_of_the_callers_is_never_ended():
    process = begin("-c", f"{BARE}\nfrom vllm_async_spec.process_group import end_with_parent; end_with_parent()")
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 0)
    reading, writing = os.pipe()
    code = f"""{BARE}
import os
from vllm_async_spec.process_group import LIFELINE, end_with_parent
os.environ[LIFELINE] = "{reading}"
end_with_parent()
"""
    # A group that does not end with the process, in whatever group the tests are themselves.
    done = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[reading], capture_output=True, text=True, preexec_fn=os.setpgrp
    )
    os.close(reading)
    os.close(writing)
    assert done.stderr.endswith(
        "RuntimeError: this process is in a group of its caller's, which must not end with it\n"
    )


def test_a_call_in_a_new_process_gives_its_result_or_its_error(tmp_path: Path):
    (tmp_path / "caller.py").write_text(CALLER)
    told, errors = begin(str(tmp_path / "caller.py"), "tell").communicate(timeout=60)
    assert told.splitlines() == [
        "(2, 1)",
        "ZeroDivisionError: integer division or modulo by zero",
        "BrokenExecutor: the process ended with exit code 7 and gave no result",
    ], errors
