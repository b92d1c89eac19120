"""Processes of tests: the command `vllm-async-spec`, whose vLLM stays what it is imported as, and engines of stock."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'vllm-async-spec'; from vllm_async_spec.cli import main; main()",
]


def python_path(*folders: str | Path, inherited: Mapping[str, str] = os.environ) -> str:
    """A PYTHONPATH of these folders, and of those that are inherited."""
    return os.pathsep.join(filter(None, (*map(str, folders), inherited.get("PYTHONPATH"))))


def found_by(engine: str, command: Sequence[str], environment: Mapping[str, str]) -> Any:
    """What the process of an engine prints behind `FOUND`, as JSON. RuntimeError: it printed no such line."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    if line is None:
        raise RuntimeError(f"the engine of {engine} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(line.removeprefix("FOUND "))
