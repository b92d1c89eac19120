"""`vllm serve` as a user starts it, and an HTTP client for it that needs nothing but Python."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalogue import MAX_MODEL_LEN
from command_line import python_path
from results import Completion

from benchmarks.serving.server import name_the_cpu_build

START_TIMEOUT = 600.0
STOP_TIMEOUT = 60.0
MAX_NUM_SEQS = 16
"""Requests of the largest batch."""


def serve_command(model: Path, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *options]


def serve_environment(folder: Path, **variables: str) -> dict[str, str]:
    """`variables`, and what a machine without a network needs; `folder` is for the name of vLLM's CPU build."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    common = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if (alias := name_the_cpu_build(folder)) is not None:
        common["PYTHONPATH"] = python_path(alias)
    return inherited | common | variables


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    log_file: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> str:
        with closing(self._connect()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"{path} answers {response.status}")
            return response.read().decode()

    def complete(self, prompt: str, max_tokens: int, **options: Any) -> Completion:
        with self._asked(prompt, max_tokens, options) as response:
            answer = json.load(response)
        assert response.status == 200, answer
        return _completion(prompt, [answer["choices"][0]])

    def stream(self, prompt: str, max_tokens: int, **options: Any) -> Generator[dict[str, Any]]:
        with self._asked(prompt, max_tokens, options | {"stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))["choices"][0]

    def complete_in_pieces(self, prompt: str, max_tokens: int) -> Completion:
        return _completion(prompt, list(self.stream(prompt, max_tokens)))

    def ask(self, prompt: str, max_tokens: int, **options: Any) -> http.client.HTTPConnection:
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        connection = self._connect()
        connection.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("vllm:" + name)]
        assert len(lines) == 1, lines
        return float(lines[0].rpartition(" ")[2])

    def series(self, name: str) -> dict[str, float]:
        found = re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def _asked(self, prompt: str, max_tokens: int, options: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        with closing(self.ask(prompt, max_tokens, **options)) as connection:
            yield connection.getresponse()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)


def _completion(prompt: str, pieces: list[dict[str, Any]]) -> Completion:
    return Completion(
        prompt,
        tuple(token for piece in pieces for token in piece["token_ids"] or ()),
        "".join(piece["text"] for piece in pieces),
        pieces[-1]["finish_reason"],
        pieces[-1]["stop_reason"],
    )


def speculating_command(target: Path, draft: Path, port: int) -> list[str]:
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    return serve_command(
        *(target, "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--enforce-eager"),
        *("--speculative-config", json.dumps(drafting)),
    )


@contextmanager
def serving(target: Path, draft: Path, folder: Path, **variables: str) -> Iterator[Server]:
    """A server with speculative decoding that is ready; afterwards it has been asked to stop, and has."""
    port = free_port()
    with started(speculating_command(target, draft, port), port, folder, **variables) as server:
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_TIMEOUT) == 0, server.log()[-4000:]


@contextmanager
def started(command: list[str], port: int, folder: Path, **variables: str) -> Iterator[Server]:
    log_file = folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=serve_environment(folder, **variables),
            start_new_session=True,
        )
    server = Server(port, log_file, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        with suppress(ProcessLookupError):  # whatever is left of its own processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
    return port


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        assert server.process.poll() is None, f"the server ended; the end of its log:\n{server.log()[-4000:]}"
        assert time.monotonic() < deadline, f"the server is not ready; the end of its log:\n{server.log()[-4000:]}"
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.2)
        else:
            return


def processes_with_plugin(log: str) -> set[str]:
    lines = re.finditer(r"\((\w+)[^()]* pid=(\d+)\) DEBUG .*vllm-async-spec \S+ is on in process \2: ", log)
    return {line[1] for line in lines}
