"""The pytest plugin of vllm-async-spec's compatibility suite: the fixture `async_spec_backend`.

A backend's own repository names its builder once, in `pyproject.toml`,

    [tool.pytest.ini_options]
    async_spec_backends = ["my_backend:MyMetadataBuilder"]

and tests the result:

    def test_no_host_sync(async_spec_backend):
        assert async_spec_backend.passed, async_spec_backend.explain()

pytest imports this file in every run, so the file is not part of the package, which imports PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_async_spec.compat.results import BackendResult

_SUITE = "vllm_async_spec.compat"
_NO_BACKEND = "no backend is named; set async_spec_backends in pytest's settings, or give --async-spec-backend NAME"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options; all have long names, to avoid those of other plugins."""
    group = parser.getgroup("async-spec", "vllm-async-spec: does your attention backend make the host wait?")
    names = ["--async-spec-backend"]
    config: Any = pluginmanager.get_plugin("pytestconfig")  # sys.argv has no arguments in a worker of pytest-xdist
    if any(str(argument).startswith(_SUITE) for argument in config.invocation_params.args):
        names.append("--backend")  # here the suite itself runs, so no other plugin's option is meant
    group.addoption(*names, action="append", default=[], metavar="NAME", help="module:Builder, or one of vLLM's")
    group.addoption("--async-spec-device", default="cpu", metavar="cpu|cuda", help="cpu simulates a device")
    group.addoption(
        "--async-spec-source", type=Path, metavar="DIR", help="an unpacked vLLM; default: the installed vLLM"
    )
    group.addoption(
        "--async-spec-forward-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="time for a backend's forwards",
    )
    parser.addini(
        "async_spec_backends", "backends of async_spec_backend, named as for --async-spec-backend", "linelist"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses `async_spec_backend` once for each named backend."""
    if "async_spec_backend" in metafunc.fixturenames:
        names = _names(metafunc.config) or [pytest.param(None, id="none")]
        metafunc.parametrize("async_spec_backend", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def async_spec_backend(request: pytest.FixtureRequest) -> BackendResult:
    """The compatibility suite's result for a backend: `passed`, `need`, `waits`, `faults`, `unreached`, `explain()`."""
    if request.param is None:
        pytest.fail(_NO_BACKEND, pytrace=False)
    found: BackendResult = _check(request.config, request.param)
    return found


_OPENED = pytest.StashKey[tuple[Any, Any]]()
_SETTINGS = pytest.StashKey[dict[str, str]]()


def _names(config: pytest.Config) -> list[Any]:
    # As `compat.installed.distinct`, which would import PyTorch while pytest collects.
    named = config.getoption("--async-spec-backend") or config.getini("async_spec_backends")
    return list(dict.fromkeys(name if ":" in name else name.upper() for name in named))


def _check(config: pytest.Config, name: str) -> Any:
    from vllm_async_spec.cli.compat import try_in_new_process
    from vllm_async_spec.compat.builder_inputs import SubjectError
    from vllm_async_spec.compat.suite import own_settings
    from vllm_async_spec.compat.third_party import is_third_party
    from vllm_async_spec.compat.vllm_source import VllmSourceError

    device_name, unpacked = config.getoption("--async-spec-device"), config.getoption("--async-spec-source")
    try:
        if device_name == "cpu" and unpacked is None and not is_third_party(name):
            # vLLM's own builder is tried as on a machine with a GPU, which this process must not pretend to be.
            return try_in_new_process(name, device_name)
        with own_settings(config.stash.setdefault(_SETTINGS, {})):
            return _run_here(config, name, device_name, unpacked)
    except (SubjectError, VllmSourceError) as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        _unload_what_is_off()


def _run_here(config: pytest.Config, name: str, device_name: str, unpacked: Path | None) -> Any:
    from vllm_async_spec.compat.suite import open_device, prepare, run

    if _OPENED not in config.stash:
        source = prepare(unpacked)
        config.stash[_OPENED] = source, open_device(device_name, source)
    source, device = config.stash[_OPENED]
    seconds = config.getoption("--async-spec-forward-seconds")
    return run([name], device, source=source, forward_seconds=seconds).results[0]


def _unload_what_is_off() -> None:
    """Have vLLM load plugins again for the session's next engine, if the suite had it load this package's as off."""
    from vllm_async_spec.vllm_plugin import state
    from vllm_async_spec.vllm_plugin.settings import Mode

    plugin, loader = state.active_plugin(), sys.modules.get("vllm.plugins")
    if plugin is not None and loader is not None and plugin.settings.mode is Mode.OFF and plugin.ledger is None:
        state._plugin = None
        vars(loader)["plugins_loaded"] = False
