"""The audit's route on real servers with keys, started in both ways."""

import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from serving import STOP_TIMEOUT, Server, free_port, serve_command, started

from vllm_async_spec.demo.train import DemoModels
from vllm_async_spec.vllm_plugin.audit_agent.route import PATH

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = {"Authorization": "Bearer second"}
SLACK_S = 10.0
"""More than a machine with other work to do needs; an audit that is waited for takes its 100 seconds."""
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "vllm serve": serve_command,
    "python -m": lambda model: [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)],
}


@contextmanager
def serving(way: str, models: DemoModels, folder: Path) -> Iterator[Server]:
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    options += ["--max-num-seqs", "4", "--enforce-eager", "--api-key", "first", "second"]
    # Not below pytest's folder: a socket of vLLM's lies there, and the path of one has at most 107 characters.
    with tempfile.TemporaryDirectory() as temporary:
        (folder / "tmp").symlink_to(temporary)
        variables = {"VLLM_ASYNC_SPEC_AUDIT": "1", "TMPDIR": temporary}
        with started([*COMMANDS[way](models.target), *options], port, folder, **variables) as server:
            yield server


def post(server: Server, body: dict[str, float], headers: dict[str, str]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", PATH, json.dumps(body), headers)
    return connection


def answer(server: Server, body: dict[str, float], headers: dict[str, str]) -> tuple[int, str]:
    with closing(post(server, body, headers)) as connection:
        response = connection.getresponse()
        return response.status, json.load(response)["error"]


def recordings(server: Server) -> list[Path]:
    return list((server.log_file.parent / "tmp").glob("vllm-async-spec-audit-*"))


def until(reached: Callable[[], bool], server: Server) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, server.log()[-4000:]
        time.sleep(0.05)


def seconds_to_end(server: Server) -> float:
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(STOP_TIMEOUT)
    return time.monotonic() - began


def check_door(server: Server) -> None:
    """Who has no key stays out; who has is let in, to a server that has nothing to do."""
    for headers in ({}, {"Authorization": "Bearer third"}):
        assert answer(server, {}, headers) == (401, "Unauthorized")
    status, why = answer(server, {"steps": 12, "seconds": 1}, KEY)
    assert (status, why[:50]) == (409, "the server did not run 8 + 12 steps in 1 seconds; "), server.log()[-4000:]


def test_an_audit_ends_with_its_client_and_does_not_hold_up_the_end_of_its_server(models: DemoModels, tmp_path: Path):
    took = {}
    for way in COMMANDS:
        folder = tmp_path / way.replace(" ", "-")
        folder.mkdir()
        with serving(way, models, folder) as server:
            check_door(server)
            if way == "vllm serve":
                with closing(post(server, {"seconds": 100}, KEY)):
                    until(lambda server=server: bool(recordings(server)), server)
                until(lambda server=server: not recordings(server), server)
                # The engine is free for another, which is under way when the server is told to end.
                check_door(server)
                with closing(post(server, {"seconds": 100}, KEY)):
                    until(lambda server=server: bool(recordings(server)), server)
                    took[way] = seconds_to_end(server)
            else:
                took[way] = seconds_to_end(server)
            assert recordings(server) == []
    assert took["vllm serve"] < took["python -m"] + SLACK_S, took
