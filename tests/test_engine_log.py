"""The error that ended an engine, from logs of three releases' shapes."""

import os
from pathlib import Path

import pytest

from vllm_async_spec.engine_log import last_error, names_no_cause

LOGS = Path(__file__).parent / "support" / "engine_logs"
"""Most without frames of tracebacks. 0.32.0-kv-cache and 0.32.0-killed-in-a-step were recorded, the others written as
the releases' sources print."""
CAUSES = {
    "0.18.1-kv-cache": "ValueError: To serve at least one request with the models's max seq len (32768), ",
    "0.18.1-out-of-memory-in-a-step": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "0.18.1-coloured": "ValueError: in colours",
    "0.26.0-out-of-memory-in-worker": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. ",
    "0.26.0-killed": "the engine core was killed by SIGKILL, which the kernel sends when memory runs out",
    "0.32.0-kv-cache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` ",
    "0.32.0-killed-in-a-step": "the engine core ended and left no traceback, as after SIGKILL",
    "0.32.0-arguments": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, User-specified "
        "max_model_len (99999) is greater "
    ),
}


@pytest.mark.parametrize("log", CAUSES)
def test_the_cause_is_found_in_the_lines_of_whichever_process_failed(log: str):
    found = last_error(LOGS / f"{log}.log")
    assert found.startswith(CAUSES[log])
    assert "\n" not in found


def test_every_log_is_tried():
    assert {path.stem for path in LOGS.glob("*.log")} == CAUSES.keys()


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ],
)
def test_an_error_that_refers_to_another_is_none(error: str):
    assert names_no_cause(error)
    assert not names_no_cause("ValueError: No available memory for the cache blocks.")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "the log is empty"),
        ("\n \nstarting\n", "starting"),
        ("Killed\nbye\n", "Killed"),
        ("ValueError: first\nINFO nothing\nRuntimeError: second\n  at somewhere\n", "RuntimeError: second"),
        ("RuntimeError: real\nException ignored in: <f>\nTraceback\nAttributeError: noise\n", "RuntimeError: real"),
        ("RuntimeError: real\nKeyboardInterrupt: \nBrokenPipeError: [Errno 32]\n", "RuntimeError: real"),
        ("ValueError: real\nRuntimeError: See root cause above.\nOSError: later\n", "ValueError: real"),
        ("RuntimeError: See root cause above.\nValueError: printed late\n", "ValueError: printed late"),
        ("Fatal Python error: Aborted\nengine core exited unexpectedly\nno Error\n", "Fatal Python error: Aborted"),
        ("ValueError: " + "x" * 5000, "ValueError: " + "x" * 588),
    ],
)
def test_a_short_log_is_read_too(tmp_path: Path, text: str, cause: str):
    log = tmp_path / "log"
    log.write_text(text)
    assert last_error(log) == cause


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "no file"])
def test_a_log_that_is_no_file_is_not_read(tmp_path: Path, kind: str):
    log = Path("/dev/null") if kind == "a device" else tmp_path / "log"
    if kind == "a pipe":
        os.mkfifo(log)
    assert last_error(log) == "the log says why, and is no file to read it from"
