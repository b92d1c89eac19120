"""Processes that start others and print their identifiers, and what is left of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
BARE = f"""
import sys, types
package = types.ModuleType("vllm_async_spec")
package.__path__ = [{str(ROOT / "vllm_async_spec")!r}]
sys.modules["vllm_async_spec"] = package
"""
"""Code that makes the package's modules importable without PyTorch, which takes seconds to import."""
GRANDCHILD = "import subprocess, sys, time; g = subprocess.Popen(['sleep', '600']); "
"""Code of a child: starts a process that does not end by itself, as vLLM's engine core does not."""
PARENT = f"""{BARE}
import os
from pathlib import Path
from vllm_async_spec.json_child import start
with start([sys.executable, "-c", sys.argv[1]], log=Path(sys.argv[2]), env=os.environ,
           fail=RuntimeError) as child:
    print(child.process.pid, child.answer()["pid"], flush=True)
    child.answer(600)  # whose limit must not hold up the end
"""
"""Code of a parent: waits for a second answer of the child that runs the code `sys.argv[1]`."""
CHILD = f"""{BARE}
from vllm_async_spec.json_child import answering
with answering() as answer:
    {GRANDCHILD}
    answer({{"pid": g.pid}})
    time.sleep(600)
"""


def begin(*arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=heed_signals
    )


def heed_signals() -> None:
    """Undo what a caller in the background, or under nohup, makes its children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def family(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    found = [int(word) for word in process.stdout.readline().split()]
    assert found, process.stderr and process.stderr.read()
    return found


def left(identifiers: Iterable[int], patience_s: float = 20) -> list[int]:
    remaining, end = list(identifiers), time.monotonic() + patience_s
    while remaining and time.monotonic() < end:
        time.sleep(0.02)
        remaining = [identifier for identifier in remaining if _runs(identifier)]
    return remaining


def _runs(identifier: int) -> bool:
    try:
        state = Path(f"/proc/{identifier}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def of_session(parent: int) -> list[int]:
    stats = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent_of, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state not in "ZX":
            stats[int(stat.parent.name)] = (int(parent_of), int(session))
    leaders = [identifier for identifier, (of, session) in stats.items() if of == parent and session == identifier]
    return [identifier for identifier, (_, session) in stats.items() if session in leaders]
