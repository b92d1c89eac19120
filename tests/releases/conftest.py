"""Run this folder on the Python of one vLLM release: `pytest tests/releases --vllm-source DIR`.

Without --vllm-source an `import vllm` would find the installed one, so the files are skipped before their import.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
from undone import ALL, undone

from vllm_async_spec.compat import builders
from vllm_async_spec.compat.lacking import lacking
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.vllm_source import VllmSource, VllmSourceError, load_vllm
from vllm_async_spec.vllm_plugin.ledger import Ledger, load_ledger

HANDLE = pytest.StashKey[VllmSource]()
LACKING: set[str] = set()
"""What tests failed for want of, in sentences."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-source", type=Path, help="directory that contains the vllm/ of one release")


def pytest_configure(config: pytest.Config) -> None:
    source = config.getoption("vllm_source", default=None)
    if source is None:
        return
    scratch = tempfile.TemporaryDirectory(prefix="vllm-cache-")
    config.add_cleanup(scratch.cleanup)
    os.environ["VLLM_CACHE_ROOT"] = scratch.name
    # The entry points found here are those of the installed vLLM, and our own, which a test asks for by name.
    os.environ["VLLM_PLUGINS"] = ""
    try:
        config.stash[HANDLE] = load_vllm(source)
    except VllmSourceError as error:
        raise pytest.UsageError(str(error)) from None


class SkippedFile(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("needs --vllm-source DIR, the Python of one vLLM release", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HANDLE in parent.config.stash:
        return None
    return SkippedFile.from_parent(parent, path=module_path)


def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    if call.excinfo is not None and (sentence := lacking(call.excinfo.value)) is not None:
        LACKING.add(sentence)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for sentence in sorted(LACKING):
        terminalreporter.write_line(sentence, red=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.releases)


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest) -> VllmSource:
    return request.config.stash[HANDLE]


@pytest.fixture(scope="session")
def release(loaded: VllmSource) -> str:
    return loaded.version


@pytest.fixture(scope="session")
def vllm_source(loaded: VllmSource) -> Path:
    return loaded.path


@pytest.fixture(scope="session")
def make_common_metadata() -> Callable[..., Any]:
    return builders.common_metadata


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a Llama of two small layers; no weights, no tokenizer."""
    return builders.write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def device(loaded: VllmSource) -> Iterator[SimulatedDevice]:
    """Told of each kernel that did not run."""
    simulated = SimulatedDevice()
    loaded.on_kernel = simulated.kernel_did_not_run
    yield simulated
    loaded.on_kernel = None


@pytest.fixture(scope="module")
def ledger(release: str) -> Iterator[Ledger]:
    """The ledger, settled; everything is put back after this module."""
    fake_flashinfer.install()
    ledger = Ledger(ALL, load_ledger(), release=release)
    for outcome in ledger.outcomes.values():
        for module in outcome.modules:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                assert module not in sys.modules
    with undone():
        ledger.install()
        yield ledger
