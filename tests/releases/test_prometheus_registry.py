"""The patch `prometheus-registry` on the page that a real vLLM release serves, with one API server and with several."""

import importlib
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.testclient import TestClient
from undone import applied


@pytest.fixture(scope="module")
def mount() -> Callable[[FastAPI], None]:
    """What puts /metrics on the release's app. It has imported the registry's function before the plugin is loaded."""
    try:
        return importlib.import_module("vllm.entrypoints.serve.instrumentator.metrics").attach_router
    except ModuleNotFoundError:  # before 0.13
        return importlib.import_module("vllm.entrypoints.openai.api_server").mount_metrics


@pytest.fixture
def _patched(mount: Callable[[FastAPI], None]) -> Iterator[None]:
    with applied("prometheus-registry"):
        collectors = set(REGISTRY._collector_to_names)
        yield
    for collector in set(REGISTRY._collector_to_names) - collectors:
        REGISTRY.unregister(collector)


@pytest.fixture(params=["one API server", "several API servers"])
def page(request: pytest.FixtureRequest, mount, monkeypatch, tmp_path) -> Callable[[], str]:
    if request.param == "several API servers":
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def get() -> str:
        app = FastAPI()
        mount(app)
        answer = TestClient(app).get("/metrics")
        assert answer.status_code == 200
        return answer.text

    return get


@pytest.mark.usefixtures("_patched")
def test_the_page_has_the_plugins_state(page: Callable[[], str]):
    for _ in range(2):  # a second app of the same process, too
        assert page().count("\nvllm:async_spec_info{") == 1


def test_without_the_patch_the_page_has_nothing_of_ours(page: Callable[[], str]):
    assert "async_spec" not in page()
