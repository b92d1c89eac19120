"""The audit's route on a real vLLM release."""

import asyncio
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.testclient import TestClient
from undone import applied

from vllm_async_spec.compat.builders import is_absent
from vllm_async_spec.vllm_plugin.audit_agent import route as audit_route
from vllm_async_spec.vllm_plugin.audit_agent.route import PATH, open_door
from vllm_async_spec.vllm_plugin.ledger import find_patch

GUARDS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.openai.server_utils",
    "vllm.entrypoints.serve.utils.server_utils",
    "vllm.entrypoints.serve.middleware.authenticate",
)


def first(names: Sequence[str], attribute: str) -> Any:
    for name in names:
        try:
            return getattr(importlib.import_module(name), attribute)
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if not is_absent(error, name):
                raise
    raise AssertionError(f"no module has {attribute}")


@pytest.fixture(scope="module")
def guard() -> type:
    found: type = first(GUARDS, "AuthenticationMiddleware")
    return found


def application(release: str, guard: type, *keys: str) -> FastAPI:
    """As `build_app` and `init_app_state` leave it: with the guard, if there are keys, and what is kept of them."""
    app = FastAPI()
    if keys:
        app.add_middleware(guard, tokens=list(keys))
    if release != "0.12.0":
        app.state.args = Namespace(api_key=list(keys) or None)
    app.state.engine_client = SimpleNamespace(errored=False)
    return app


def status(app: FastAPI, key: str | None, body: bytes = b"no JSON") -> int:
    """What a request that is let in is answered: 400."""

    async def within(scope: Any, receive: Any, send: Any) -> None:
        async with open_door(app):
            await app(scope, receive, send)

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return TestClient(within).post(PATH, content=body, headers=headers).status_code


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ((), None, 400),
        (("one",), None, 401),
        (("one",), "two", 401),
        (("one",), "one", 400),
        (("two", "one"), "one", 400),
    ],
)
def test_the_releases_own_guard_guards_the_route(
    release: str, guard: type, keys: tuple[str, ...], key: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    # Of the two that look at the key only the release's.
    monkeypatch.setattr(audit_route, "check_key", lambda request: None)
    assert status(application(release, guard, *keys), key) == expected


@pytest.mark.parametrize(("key", "expected"), [(None, 401), ("two", 401), ("one", 400)])
def test_what_the_release_keeps_of_its_options_guards_it_again(
    release: str, guard: type, key: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
):
    if release == "0.12.0":
        pytest.skip("0.12 keeps its options nowhere: its guard is the only one")
    monkeypatch.setattr(guard, "verify_token", lambda *_: True)
    assert status(application(release, guard, "one"), key) == expected


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of `serve_http`, which is patched."""
    names = [target.module for target in find_patch("audit-route").targets]
    module = sys.modules[first(names, "serve_http").__module__]
    # `python -m vllm.entrypoints.openai.api_server` has taken the function before the plugin is loaded.
    monkeypatch.setattr(sys.modules["__main__"], "serve_http", module.serve_http, raising=False)
    with applied("audit-route"):
        yield module


@pytest.mark.parametrize("started", ["vllm serve", "python -m"])
def test_a_server_has_the_route_however_it_was_started(
    release: str, guard: type, launcher: ModuleType, started: str, monkeypatch: pytest.MonkeyPatch
):
    """uvicorn is a stand-in; the rest of `serve_http` is the release's own."""
    app = application(release, guard, "one")
    app.state.args = Namespace(api_key=["one"])
    seen: list[str] = []

    async def serve(self: Any, sockets: Any = None) -> None:
        seen.extend(route.path for route in self.config.app.routes)

    monkeypatch.setattr(launcher.uvicorn.Server, "serve", serve)

    async def run() -> None:
        module = launcher if started == "vllm serve" else sys.modules["__main__"]
        await (await vars(module)["serve_http"](app, None, host="127.0.0.1", port=0))

    asyncio.run(run())
    assert PATH in seen


def test_what_starts_servers_takes_it_from_there(launcher: ModuleType):
    starts = first(
        ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"), "run_server_worker"
    )
    assert starts.__globals__["serve_http"] is launcher.serve_http


@pytest.fixture(autouse=True)
def _metrics() -> Iterator[None]:
    collectors = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - collectors:
        REGISTRY.unregister(collector)
