import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# Where Python is told to keep no bytecode, each process that a test starts would compile all of vLLM's imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Fixed examples in CI, so that a red run is one that can be repeated.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=150)
settings.register_profile("default", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 16 rows don't need a second one, which costs most where the machine has other work to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def signals_arrive() -> None:
    """A shell's background jobs ignore Ctrl-C, and those of `nohup` a hang-up; tests send both to themselves."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def default_devices_work() -> None:
    """PyTorch keeps `torch.empty` from the first use of a default device; a test may have replaced it by then."""
    with torch.device("cpu"):
        torch.empty(0)


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """Undo what a command sets for its process where it runs in this one: variables, and vLLM's log level."""
    log = logging.getLogger("vllm")
    before, level = dict(os.environ), log.level
    yield
    log.setLevel(level)
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def gpu_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo's, trained on the GPU."""
    from vllm_async_spec.demo.train import prepare_models

    return prepare_models(tmp_path_factory.mktemp("models"), device="cuda")
