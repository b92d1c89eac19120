"""`status --url`."""

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner, Result

from vllm_async_spec.cli import app
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.metrics.collector import Collector
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine, Snapshot
from vllm_async_spec.vllm_plugin.settings import Settings

PAGES: dict[str, Snapshot] = {
    "healthy": Snapshot(
        patches={"one": State.APPLIED, "audit-route": State.APPLIED, "two": State.NOT_NEEDED},
        engines=[Engine(True, "vllm-async-spec", "V1", "FLASH_ATTN, FLASHINFER")],
    ),
    "refused": Snapshot(
        patches={"audit-route": State.REFUSED},
        refused={"audit-route": "changed"},
        engines=[Engine(False, "vLLM", "V2", "FLASH_ATTN")],
    ),
    "old": Snapshot(patches={"one": State.APPLIED}),
}


FOREIGN = {
    "html": b"<!doctype html>\n<p class=x>{}",
    "json": b'{"ok": true}',
    "bytes": b"\xff",
    "cut": b"vllm:",
    "endless": b"# \n",
}


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        registry = CollectorRegistry()
        name = self.path.split("/")[1]
        if name in PAGES:
            registry.register(Collector(lambda: PAGES[name], Settings.read({})))
        self.send_response(200)
        if name == "cut":
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(FOREIGN.get(name) or generate_latest(registry))
        with contextlib.suppress(OSError):
            while name == "endless":
                self.wfile.write(FOREIGN[name])
                time.sleep(0.01)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def status(address: str, page: str, *more: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", "--url", f"{address}/{page}", *more])


def test_a_server_tells_who_decided_and_counts_as_the_log_does(address: str):
    done = status(address, "healthy", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.stderr
    assert (found["async_scheduling"], found["decided_by"]) == (True, "vllm-async-spec")
    assert (found["runner"], found["backend"]) == ("V1", "FLASH_ATTN, FLASHINFER")
    assert found["patches"] == {"applied": 1, "not needed": 1, "refused": 0, "waiting": 0}
    words = status(address, "healthy").stdout
    assert "asynchronous scheduling is on, decided by vllm-async-spec; runner V1, attention FLASH_ATTN" in words
    assert "1 applied, 1 not needed" in words


def test_a_refused_patch_is_a_problem_also_where_it_is_not_counted(address: str):
    done = status(address, "refused")
    assert done.exit_code == 1
    assert "audit-route: changed" in done.stdout
    assert "asynchronous scheduling is off, decided by vLLM; runner V2, attention FLASH_ATTN" in done.stdout


def test_a_server_that_does_not_tell_is_not_guessed_at(address: str):
    done = status(address, "old", "--json")
    assert json.loads(done.stdout)["async_scheduling"] is None
    assert "unknown" in status(address, "old").stdout


def test_a_server_without_the_plugin_and_arguments_that_it_has_itself_get_one_sentence(address: str):
    done = status(address, "none")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "has no metrics of vllm-async-spec" in done.stderr
    done = status(address, "healthy", "--max-model-len", "8")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "leave out --max-model-len" in done.stderr


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *[(f"{{}}/{name}", "can't be read: ") for name in ("html", "json", "bytes")],
        ("{}/cut", "95 more expected"),
        ("{}/endless", "it does not end within 0.2 s"),
        ("http://127.0.0.1:abc", "nonnumeric port"),
        ("http://a b", "can't contain control characters"),
        ("http://x\n", "can't contain control characters"),
    ],
)
def test_what_is_no_server_of_vllm_gets_one_sentence(
    address: str, url: str, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vllm_async_spec.vllm_plugin.server_status._SECONDS", 0.2)
    done = CliRunner().invoke(app, ["status", "--url", url.format(address)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert reason in done.stderr
