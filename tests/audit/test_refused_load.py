"""A load that a server refuses, in part or as a whole."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from audit_reports import waiting
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app

PROMPTS = [{"prompt": "short"}, {"prompt": "too long"}]
WHY = "the prompt is too long"


@contextmanager
def server(refuses: Callable[[str], bool], audited: bool = True) -> Iterator[str]:
    """A server's address; the server answers an audit after three completions."""
    asked, enough = [0], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "m", "max_model_len": 64}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/completions":
                refused = refuses(body["prompt"])
                self._answer(*((400, {"error": {"message": f"{WHY}."}}) if refused else (200, {})))
                asked[0] += 1
                if asked[0] == 3:
                    enough.set()
            else:
                assert enough.wait(30)
                time.sleep(0.3)  # until the third answer has been read; a fourth request comes after a second
                self._answer(*((200, waiting().to_dict()) if audited else (409, {"error": "no steps"})))

        def _answer(self, status: int, said: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def audit(url: str, folder: Path) -> Result:
    load = folder / "load.jsonl"
    load.write_text("\n".join(map(json.dumps, PROMPTS)))
    page = str(folder / "page.html")
    return CliRunner().invoke(app, ["audit", "--url", url, "--load", str(load), "--batch", "1", "--html", page])


def test_a_load_that_is_refused_in_part_is_noted(tmp_path: Path):
    with server(lambda prompt: prompt == "too long") as url:
        done = audit(url, tmp_path)
    assert done.exit_code == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "- The server refused " in shown
    assert f" requests: {WHY}." in shown
    assert f" requests: {WHY}.</li>" in (tmp_path / "page.html").read_text()


def test_a_load_that_is_refused_as_a_whole_is_not_audited(tmp_path: Path):
    with server(lambda prompt: True) as url:
        done = audit(url, tmp_path)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("vllm-async-spec: the server refused ")
    assert line.endswith(f" requests: {WHY}")
    assert len(set(line.split()) & {"3", "4"}) == 1, "all of all"


def test_an_audit_that_fails_tells_what_was_refused_too(tmp_path: Path):
    with server(lambda prompt: prompt == "too long", audited=False) as url:
        done = audit(url, tmp_path)
    assert done.exit_code == 1
    assert "vllm-async-spec: no steps; the server refused " in done.stderr


def test_an_audit_of_a_load_that_is_taken_has_no_note(tmp_path: Path):
    with server(lambda prompt: False) as url:
        assert "refused" not in audit(url, tmp_path).stdout
