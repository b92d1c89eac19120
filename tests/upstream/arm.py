"""One arm of `make test-upstream`: a process with vLLM imported, which forks for each file of upstream's tests.

arm.py JOB    where JOB is JSON: source, out, way, modules, files, seconds, case_seconds
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    os.chdir(job["source"])
    sys.path.insert(0, job["source"])
    # vLLM's own call loads the plugin, or not: VLLM_PLUGINS decides, as in a server.
    importlib.import_module("vllm.plugins").load_general_plugins()
    for module in job["modules"]:
        importlib.import_module(module)
    importlib.import_module("tests.conftest")
    # Upstream unfreezes and collects garbage after each case: more than half a second, were all of vLLM looked at.
    gc.freeze()
    gc.unfreeze = lambda: None
    for file in job["files"]:
        started = time.monotonic()
        end = run_file(job, file)
        print(f"{job['way']:7} {time.monotonic() - started:6.1f} s  {file}  {end}", flush=True)


def record_of(out: str, file: str) -> Path:
    return Path(out) / file.replace("/", "-").replace(".py", ".jsonl")


def run_file(job: dict[str, Any], file: str) -> str:
    """How the process of one file ended; what it found is in its record."""
    record = record_of(job["out"], file)
    record.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = _in_child(job, file, record)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = _wait(child, job["seconds"])
    with record.open("a", encoding="utf-8") as lines:
        lines.write("\n" + json.dumps({"file": file, "ended": end}) + "\n")
    return end


def _in_child(job: dict[str, Any], file: str, record: Path) -> int:
    os.setsid()
    log = os.open(record.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, stream)
    import pytest
    from recorder import Recorder

    options = ["-q", "--rootdir=.", "--color=no", "--no-header", f"--timeout={job['case_seconds']}"]
    options += ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "pytest_asyncio.plugin"]
    return int(pytest.main([*options, file], plugins=[Recorder(record)]))


def _wait(child: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            _kill_group(child)
            os.waitpid(child, 0)
            return f"timed out after {seconds} s"
        time.sleep(0.02)
    _kill_group(child)  # what the tests started and left behind
    code = os.waitstatus_to_exitcode(status)
    return f"exit {code}" if code >= 0 else f"killed by signal {-code}"


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
