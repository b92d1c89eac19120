"""The route by which a server is audited, in an application with a guard as vLLM's; the engine is a stand-in."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'vllm-async-spec[cpu]'")

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from vllm_async_spec.audit.recording import DONE
from vllm_async_spec.vllm_plugin.audit_agent import route as audit_route
from vllm_async_spec.vllm_plugin.audit_agent import run as audit_run
from vllm_async_spec.vllm_plugin.audit_agent.route import MOST_BYTES, PATH, open_door

ANSWER_S = 30
ANALYSE = audit_run._analyse
Answer = tuple[int, Any]


class Engine:
    """As much of an engine client as is asked, which is always busy unless it is `idle`."""

    def __init__(self, *, idle: bool = False) -> None:
        self.idle, self.errored = idle, False
        self.asked: list[str] = []
        self.folder = Path("/nowhere")

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[str]:
        request = json.loads(args[0])
        self.asked.append(request["do"])
        process = {"pid": 1, "started_by": "SpawnProcess"}
        if request["do"] == "describe":
            facts = {"world_size": 1, "driver": ""}
            return [json.dumps({"role": "core"} | process), json.dumps({"role": "worker", "facts": facts} | process)]
        if request["do"] == "arm":
            self.folder = Path(request["folder"])
            if not self.idle:
                (self.folder / DONE).touch()
        return [json.dumps({"role": "core"}), json.dumps({"role": "worker", "files": {}})]


class Guard:
    """vLLM's, which compares digests; `open` to all, it is one that has changed."""

    def __init__(self, app: Any, keys: list[str], open_to_all: bool = False) -> None:
        self.app, self.keys, self.open_to_all = app, keys, open_to_all

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1") and not self.open_to_all
        if guarded and Headers(scope=scope).get("Authorization") not in [f"Bearer {key}" for key in self.keys]:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def server(engine: Engine | None = None, *keys: str, api_key: Any = None, open_to_all: bool = False) -> FastAPI:
    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=api_key or list(keys) or None)
    app.state.engine_client = engine or Engine()
    app.state.server = SimpleNamespace(should_exit=False)
    if keys:
        app.add_middleware(Guard, keys=list(keys), open_to_all=open_to_all)
    return app


class Client:
    """One request, of which the test says when it goes on and when its client goes."""

    def __init__(self, *pieces: bytes, **headers: str) -> None:
        self.pieces, self.read = list(pieces), 0
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.read < len(self.pieces):
            self.read += 1
            more = self.read < len(self.pieces)
            return {"type": "http.request", "body": self.pieces[self.read - 1], "more_body": more}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def post(self, app: FastAPI, path: str = PATH) -> Answer:
        said: list[Any] = []
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        where = {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": self.headers}

        async def send(message: Any) -> None:
            said.append(message)

        await asyncio.wait_for(app(scope | where, self.receive, send), ANSWER_S)
        body = b"".join(message.get("body", b"") for message in said[1:])
        return said[0]["status"], json.loads(body)


def sent(app: FastAPI, client: Callable[[], Client], path: str = PATH) -> tuple[Answer, int]:
    """The answer to a client's request, and how many of its pieces were read."""

    async def send() -> tuple[Answer, int]:
        async with open_door(app):
            made = client()
            return await made.post(app, path), made.read

    return asyncio.run(send())


def asked(app: FastAPI, body: bytes = b"{}", **headers: str) -> Answer:
    return sent(app, lambda: Client(body, **headers))[0]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def analyse(job: Any) -> Any:
        return {"recorded": sorted(job["saved"])}

    monkeypatch.setattr(audit_run, "_analyse", analyse)
    return folder


def test_an_audit_is_answered_with_its_report_and_leaves_no_folder(scratch: Path):
    engine = Engine()
    assert asked(server(engine)) == (200, {"recorded": ["full", "plain"]})
    assert engine.asked == ["describe", "arm", "save", "arm", "save"]
    assert engine.folder.parent == scratch
    assert list(scratch.iterdir()) == []


ONE = {"Authorization": "Bearer one"}
KEYS: dict[str, tuple[Callable[[], FastAPI], dict[str, str], int]] = {
    "none": (lambda: server(None, "one"), {}, 401),
    "another": (lambda: server(None, "one"), {"Authorization": "Bearer two"}, 401),
    "another way": (lambda: server(None, "one"), {"Authorization": "Basic one"}, 401),
    "the key": (lambda: server(None, "one"), ONE, 200),
    "the second": (lambda: server(None, "two", "one"), ONE, 200),
    "not a list": (lambda: server(None, "one", api_key="one"), ONE, 200),
    "a guard that has changed": (lambda: server(None, "one", open_to_all=True), {}, 401),
    "the key, and a guard that has changed": (lambda: server(None, "one", open_to_all=True), ONE, 200),
    "an empty key is none": (lambda: server(None, api_key=[""]), {}, 200),
}


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("path", [PATH, "/v1" + PATH])
def test_the_route_obeys_the_servers_keys_before_it_reads_the_request(case: str, path: str):
    make, headers, expected = KEYS[case]
    (status, said), read = sent(make(), lambda: Client(b"{}", **headers), path)
    assert status == expected
    if expected == 401:
        assert (said, read) == ({"error": "Unauthorized"}, 0)


def test_the_key_of_the_environment_counts_unless_the_option_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "two")
    assert asked(server())[0] == 401
    assert asked(server(), Authorization="Bearer two")[0] == 200
    assert asked(server(None, "one"), Authorization="Bearer one")[0] == 200
    assert asked(server(None, "one"), Authorization="Bearer two")[0] == 401


def test_where_the_keys_have_moved_nobody_is_let_in():
    app = server()
    app.state.args = SimpleNamespace(api_keys=["one"])
    why = "this server can't be audited over HTTP, because its keys can't be found in this vLLM"
    assert asked(app) == (503, {"error": why})


OBJECT = "it must be an object with steps, skip, seconds and rank, or {}"
MISTAKES = {
    "": "the request is b'', which is not JSON; send an object with steps, skip, seconds and rank, or {}",
    "{": "the request is b'{', which is not JSON; send an object",
    "\xff": "which is not JSON",
    "[" * 4000: "which is not JSON",
    "3": f"the request is 3; {OBJECT}",
    '{"step": 3}': f"the request has the unknown key 'step'; {OBJECT}",
    '{"steps": NaN}': "steps is nan; it must be a whole number from 3 to 2048",
    '{"steps": true}': "steps is True; it must be a whole number from 3 to 2048",
    '{"steps": 3.5}': "steps is 3.5; it must be a whole number from 3 to 2048",
    '{"steps": 2049}': "steps is 2049; it must be a whole number from 3 to 2048",
    '{"skip": -1}': "skip is -1; it must be a whole number from 0 to 2048",
    '{"seconds": NaN}': "seconds is nan; it must be a number from 1 to 600",
    '{"seconds": 1e999}': "seconds is inf; it must be a number from 1 to 600",
    '{"seconds": true}': "seconds is True; it must be a number from 1 to 600",
}


@pytest.mark.parametrize("body", MISTAKES)
def test_a_bad_request_is_refused_in_one_sentence(body: str):
    engine = Engine()
    status, said = asked(server(engine), body.encode("latin-1"))
    assert status == 400
    assert MISTAKES[body] in said["error"]
    assert len(said["error"]) < 200
    assert engine.asked == []


def test_no_more_is_read_than_a_request_may_have():
    (status, said), read = sent(server(), lambda: Client(*[b" " * 1024] * 100))
    assert (status, read) == (413, MOST_BYTES // 1024 + 1)
    assert said["error"].startswith("the request is longer than 4096 bytes; send an object")


def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_route, "_BODY_S", 0.05)
    why = "the request did not arrive within 0.05 seconds; send the whole request at once"
    assert sent(server(), Client)[0] == (408, {"error": why})


@asynccontextmanager
async def under_way(app: FastAPI, reached: Callable[[], bool]) -> AsyncIterator[Any]:
    client = Client(b"{}")
    task = asyncio.create_task(client.post(app))
    while not reached():
        assert not task.done(), task.result()
        await asyncio.sleep(0.01)
    yield client, task


def recording(engine: Engine) -> Callable[[], bool]:
    return lambda: engine.asked[-1:] == ["arm"]


def test_one_audit_at_a_time():
    engine = Engine(idle=True)
    app = server(engine)

    async def ask() -> None:
        async with open_door(app), under_way(app, recording(engine)) as (client, task):
            refused = await Client(b"{}").post(app)
            assert refused == (409, {"error": "an audit of this server is under way; wait until it ends"})
            client.gone.set()
            await task
            engine.idle = False
            assert (await Client(b"{}").post(app))[0] == 200

    asyncio.run(ask())


def test_an_audit_takes_no_longer_than_all_of_it_may(monkeypatch: pytest.MonkeyPatch, scratch: Path):
    monkeypatch.setattr(audit_route, "most_seconds", lambda seconds: 0.2)
    engine = Engine(idle=True)
    why = "the audit took longer than 0.2 seconds in all; request fewer steps"
    assert asked(server(engine)) == (504, {"error": why})
    assert engine.asked[-1] == "cancel"
    assert list(scratch.iterdir()) == []


@pytest.fixture
def slow_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int | None]:
    """An analysis that never ends; its process, as soon as there is one."""
    program, pid = tmp_path / "python", tmp_path / "pid"
    monkeypatch.setattr(audit_run, "_analyse", ANALYSE)
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(audit_run.sys, "executable", str(program))
    return lambda: int(pid.read_text()) if pid.exists() else None


def is_running(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(scratch: Path, end: Callable[[FastAPI, Client], None], child: Any = None) -> tuple[Answer, list[str]]:
    """The answer to an audit that ends while it records, or while `child` analyses; what the engine was asked."""
    engine = Engine(idle=child is None)
    app = server(engine)
    reached = recording(engine) if child is None else lambda: child() is not None

    async def ask() -> Answer:
        async with open_door(app), under_way(app, reached) as (client, task):
            assert len(list(scratch.iterdir())) == 1 if child is None else is_running(child())
            end(app, client)
            answer: Answer = await task
            assert child is None or not is_running(child())
            assert list(scratch.iterdir()) == []
            return answer

    return asyncio.run(ask()), engine.asked


def client_goes(app: FastAPI, client: Client) -> None:
    client.gone.set()


def server_ends(app: FastAPI, client: Client) -> None:
    app.state.server.should_exit = True


ENDS = {
    client_goes: ((499, {"error": "the client disconnected"}), "cancel"),
    server_ends: ((503, {"error": "the server is shutting down; send the audit request after its restart"}), "arm"),
}
"""The answer, and the last that a recording engine is asked: nothing more where it ends with its server."""


@pytest.mark.parametrize("end", ENDS)
def test_recording_ends_with_its_client_and_with_the_server(scratch: Path, end: Any):
    answer, requests = ended(scratch, end)
    assert (answer, requests[-1]) == ENDS[end]


@pytest.mark.parametrize("end", ENDS)
def test_analysis_ends_with_its_client_and_with_the_server(scratch: Path, slow_analysis: Any, end: Any):
    assert ended(scratch, end, slow_analysis)[0] == ENDS[end][0]


def test_a_server_that_has_stopped_serving_ends_its_audit_first(scratch: Path):
    """`serve_http` returns before uvicorn waits for its connections; up to 0.17 nothing else tells of the end."""
    engine = Engine(idle=True)
    app = server(engine)
    del app.state.server

    async def ask() -> int:
        async with open_door(app):
            entered = under_way(app, recording(engine))
            _, task = await entered.__aenter__()
        assert list(scratch.iterdir()) == []
        status: int = (await task)[0]
        assert (await Client(b"{}").post(app))[0] == 503
        return status

    assert asyncio.run(ask()) == 503
    assert engine.asked[-1] == "arm"


def test_an_engine_that_dies_is_not_waited_for():
    engine = Engine(idle=True)
    engine.errored = True
    why = "the engine ended during the audit; the server's log says why"
    assert asked(server(engine)) == (409, {"error": why})


@pytest.mark.parametrize("lacks", ["its folder", "every folder"])
def test_a_server_without_a_temporary_directory_says_so(
    lacks: str, scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    if lacks == "its folder":
        scratch.rmdir()
        where = f"{scratch} (No such file or directory)"
    else:
        monkeypatch.setattr(tempfile, "gettempdir", none)
        where = "(No usable temporary directory found in ['/tmp'])"
    why = f"the server can't write to its temporary directory {where}; make it writable, or set TMPDIR"
    assert asked(server()) == (409, {"error": why})
    assert caplog.messages == []


def test_an_audit_that_fails_unexpectedly_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def analyse(job: Any) -> Any:
        raise ValueError("one\ntwo")

    monkeypatch.setattr(audit_run, "_analyse", analyse)
    assert asked(server()) == (500, {"error": "the audit failed: ValueError: one two"})
    assert caplog.messages == ["vllm-async-spec: the audit failed: ValueError: one two"]


@pytest.mark.parametrize("lacks", ["engine", "routes"])
def test_a_server_without_a_route_says_so_in_its_log_and_serves(lacks: str, caplog: pytest.LogCaptureFixture):
    app = server()
    owner, name = (app.state, "engine_client") if lacks == "engine" else (app, "add_route")
    setattr(owner, name, None)
    assert asked(app)[0] == 404
    (line,) = caplog.messages
    assert line.startswith(f"vllm-async-spec: this server can't be audited, because it has no POST {PATH}: ")
