"""The key of a server that is audited, and servers that can't be."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from audit_reports import waiting
from typer.testing import CliRunner, Result

from vllm_async_spec.audit import engine
from vllm_async_spec.cli import app

KEY = "sk-of-nobody-else"
FOREIGN, OK = "does not answer as a vLLM server with vllm-async-spec", "HTTP/1.1 200 OK\r\n"


class Server(ThreadingHTTPServer):
    """Answers an audit to whoever has the key; sends all who ask for models elsewhere."""

    daemon_threads = True

    def __init__(self) -> None:
        self.raw = ""
        self.seen: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._note()
        if self.path == "/v1/models":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self._note() == f"Bearer {KEY}":
            self._answer(200, waiting().to_dict())
        else:
            self._answer(401, {"error": "Unauthorized"})

    def _note(self) -> str | None:
        if self.server.raw:
            self.wfile.write(self.server.raw.encode())
            self.wfile = io.BytesIO()  # the rest goes nowhere
        key = self.headers["Authorization"]
        self.server.seen.append((self.path, key))
        return key

    def _answer(self, status: int, said: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def audit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["audit", *arguments])


def test_the_option_gives_the_server_its_key(server: Server):
    done = audit("--url", server.url, "--api-key", KEY)
    assert done.exit_code == 0, done.stderr
    assert server.seen == [("/async_spec/audit", f"Bearer {KEY}")]


def test_so_does_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert audit("--url", server.url).exit_code == 0
    assert server.seen == [("/async_spec/audit", f"Bearer {KEY}")]


@pytest.mark.parametrize("options", [[], ["--api-key", "another"], ["--api-key", ""]])
def test_a_server_that_wants_another_key_names_the_option(server: Server, options: list[str]):
    done = audit("--url", server.url, *options)
    assert done.exit_code == 1
    assert done.stderr == (
        f"vllm-async-spec: {server.url}/async_spec/audit needs one of the server's keys; give a key with --api-key, "
        "or in VLLM_API_KEY\n"
    )


def test_where_a_server_sends_us_to_the_key_is_not_shown(server: Server):
    assert audit("--url", server.url, "--api-key", KEY, "--load", "decode").exit_code == 1
    assert server.seen == [("/v1/models", f"Bearer {KEY}"), ("/elsewhere", None)]


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nHost: x", f"{KEY}\N{EURO SIGN}"])
def test_what_can_not_be_a_key_is_refused_and_not_told(server: Server, key: str):
    done = audit("--url", server.url, "--api-key", key)
    assert done.exit_code == 1
    assert done.stderr == (
        "vllm-async-spec: the value of --api-key or VLLM_API_KEY can't be a key; give printable ASCII characters\n"
    )
    assert server.seen == []


def test_an_engine_of_its_own_has_no_key():
    done = audit("--model", "m", "--api-key", KEY)
    assert done.exit_code == 2
    assert done.stderr == (
        "vllm-async-spec: --api-key has no effect on an engine that the audit starts; leave out --api-key, "
        "or use --url\n"
    )


@pytest.mark.parametrize("given", [["--api-key", KEY], [f"--api-key={KEY}"]])
def test_a_report_does_not_keep_the_key(given: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["/bin/vllm-async-spec", "audit", *given, "--url", "http://x"])
    kept = " ".join(given).replace(KEY, "KEY")
    assert engine.command_line() == f"vllm-async-spec audit {kept} --url http://x"


def test_the_help_shows_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    done = audit("--help")
    assert "VLLM_API_KEY" in done.output
    assert KEY not in done.output


@pytest.mark.parametrize(
    ("options", "raw", "said"),
    [
        ("", "SSH-2.0-OpenSSH_9.6\r\n", FOREIGN),
        ("", f"{OK}Content-Length: 999\r\n\r\n{{", FOREIGN),
        ("", f'{OK}\r\n{{"ok": true}}', FOREIGN),
        ("--load=decode", f'{OK}\r\n{{"ok": true}}', FOREIGN),
        ("--load=decode", f"{OK}\r\n[]", FOREIGN),
        ("--load=decode", f'{OK}\r\n{{"data": []}}', FOREIGN),
        ("--load=decode", "HTTP/1.1 302 Found\r\nLocation: /v1/models\r\n\r\n", "answered 302 The HTTP server"),
        ("", 'HTTP/1.1 400 Bad\r\n\r\n{"error": "one\\ntwo"}', "one two"),
    ],
)
def test_what_is_no_server_to_audit_is_told_in_one_line(server: Server, options: str, raw: str, said: str):
    server.raw = raw
    done = audit("--url", server.url, *options.split())
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
