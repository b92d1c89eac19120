"""Servers and clients as child processes of this one: started together, and ended with it."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import caches, child
from benchmarks.arms import Arm
from benchmarks.child import ChildError
from benchmarks.facts import EngineError, check_declared
from benchmarks.serving.arguments import server_arguments
from benchmarks.serving.tokenizer import write_tokenizer
from benchmarks.shapes import find_shape
from vllm_async_spec import json_child

SERVER, CLIENT = ["-m", "benchmarks.serving.server"], ["-m", "benchmarks.serving.client"]
_START_S, _DESCRIBE_S, _CLIENT_START_S = 900.0, 90.0, 180.0
_END_S = 10.0
"""Seconds that a server has to end by itself."""
_REFUSAL_S = 0.5
"""Seconds in which a client that has failed ends; one that only had to refuse a load stays."""
_DYING_S = 5.0
"""Seconds in which a server whose engine has died ends."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    arm: Arm
    process: json_child.Child
    port: int
    tokenizer: Path
    started: dict[str, Any]
    """How the start went: `seconds`, `caches`, and `beside`, the number of servers that started at the same time."""
    facts: dict[str, Any]
    audit: bool = False

    def death(self) -> str | None:
        """Why the server has ended, with the path of its log; None if it runs."""
        if not _ends(self.process.process, _DYING_S):
            return None
        try:
            self.process.answer(_DYING_S)
        except ChildError as error:
            return str(error)
        return f"the server of {self.arm.name!r} ended (log: {self.process.log})"


class Processes(contextlib.AbstractContextManager["Processes"]):
    """The servers of arms, and a client for each release of vLLM; leaving the context ends all of them."""

    def __init__(self, plan: str, envs: Mapping[str, Path], cache: Path) -> None:
        """Start nothing yet; `plan` names the logs, and `cache` holds these and the models."""
        self._plan, self._envs, self._cache = plan, envs, cache.resolve()
        self._servers: dict[str, tuple[Server, contextlib.ExitStack]] = {}
        self._clients: dict[str | None, tuple[json_child.Child, contextlib.ExitStack]] = {}
        self._ready: set[str | None] = set()
        self._ports: set[int] = set()

    def __exit__(self, *error: Any) -> None:
        ending = contextlib.ExitStack()
        for _, stack in (*self._servers.values(), *self._clients.values()):
            ending.push(stack)
        self._servers.clear()
        self._clients.clear()
        ending.__exit__(*error)  # an interrupt ends the processes at once

    def running(self, arm: Arm) -> Server | None:
        """The server of an arm, if it was started and not ended."""
        return self._servers[arm.name][0] if arm.name in self._servers else None

    def end(self, arm: Arm) -> None:
        if arm.name in self._servers:
            self._servers.pop(arm.name)[1].close()

    def start(self, arms: Sequence[Arm], limit_s: float = _START_S, *, audit: bool = False) -> dict[str, str]:
        """Start servers side by side, and wait until they are ready, each for at most `limit_s` seconds.

        With `audit` they have the audit's agent.

        Of arms with the same code that none of them has compiled yet, one starts first and compiles it for the others.

        Returns:
            Why a server did not start, by the name of its arm.
        """
        for arm in arms:
            self._begin_client(arm.release)
        failed: dict[str, str] = {}
        for together in caches.waves(arms, served=True):
            begun = [self._begin(arm, len(together), audit=audit) for arm in together]
            for arm, process, port, tokenizer, started, stack in begun:
                try:
                    started["seconds"] = process.answer(min(_START_S, limit_s))["seconds"]
                    facts = process.ask("describe")
                    check_declared(arm.to_dict(), facts)
                except (ChildError, EngineError) as error:
                    failed[arm.name] = str(error)
                    stack.close()
                else:
                    self._servers[arm.name] = (Server(arm, process, port, tokenizer, started, facts, audit), stack)
                    caches.mark(arm.to_dict(), served=True)
        return failed

    def ask_client(self, arm: Arm, arguments: list[str], limit_s: float) -> dict[str, Any]:
        """Run vLLM's client, of the arm's release, with these arguments.

        Raises:
            ChildError: it failed, or took longer than `limit_s` seconds and was ended.
        """
        self._begin_client(arm.release)
        client, stack = self._clients[arm.release]
        try:
            if arm.release not in self._ready:
                client.wait_until_ready()
                self._ready.add(arm.release)
            return dataclasses.replace(client, answer_s=limit_s).ask("measure", arguments=arguments)
        except ChildError:
            if _ends(client.process, _REFUSAL_S):  # the next load gets a new client
                del self._clients[arm.release]
                self._ready.discard(arm.release)
                stack.close()
            raise

    def _begin_client(self, release: str | None) -> None:
        """Start a client, unless there is one; it gets ready while servers start."""
        if release not in self._clients:
            stack = contextlib.ExitStack()
            self._clients[release] = (stack.enter_context(self._client(release)), stack)

    def _begin(
        self, arm: Arm, beside: int, *, audit: bool
    ) -> tuple[Arm, json_child.Child, int, Path, dict[str, Any], contextlib.ExitStack]:
        port = next(port for port in iter(free_port, None) if port not in self._ports)  # a server binds it much later
        self._ports.add(port)
        shape = find_shape(arm.shape)
        tokenizer = write_tokenizer(self._cache / "tokenizers", shape.target["vocab_size"])
        options = server_arguments(arm, models=self._cache / "models", tokenizer=tokenizer, port=port)
        alias = str(self._cache / "alias")
        setup = {"arm": arm.to_dict(), "port": port, "alias": alias, "options": options}
        stack = contextlib.ExitStack()
        process = stack.enter_context(
            json_child.start(
                [*self._interpreter(arm.release), *SERVER, json.dumps(setup)],
                log=self._log(f"{arm.name}-audit" if audit else arm.name),  # the timed server's log stays
                env=server_environment(arm, os.environ, audit=audit),
                fail=lambda why: ChildError(f"the server of {arm.name!r} failed: {why}"),
                cwd=child.ROOT,
                answer_s=_DESCRIBE_S,
                end_s=_END_S,
            )
        )
        started = {"caches": caches.state(arm.to_dict(), served=True), "beside": beside}
        return arm, process, port, tokenizer, started, stack

    def _client(self, release: str | None) -> contextlib.AbstractContextManager[json_child.Child]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        return json_child.start(
            [*self._interpreter(release), *CLIENT],
            log=self._log(f"client-{release or 'installed'}"),
            env=kept | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""},
            fail=lambda why: ChildError(f"vLLM's client failed: {why}"),
            cwd=child.ROOT,
            ready_s=_CLIENT_START_S,
        )

    def _interpreter(self, release: str | None) -> list[str]:
        return child.interpreter(self._envs.get(release) if release else None)

    def _log(self, name: str) -> Path:
        return self._cache / "logs" / f"{self._plan}-{name}.log"


def server_environment(arm: Arm, inherited: Mapping[str, str], *, audit: bool = False) -> dict[str, str]:
    """Environment of a server: as of an engine, but with vLLM's own processes, and the page that tells facts."""
    found = child.environment(arm, inherited, audit=audit) | {"VLLM_SERVER_DEV_MODE": "1"}
    found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"  # the client keeps connections too, and may not meet a closing one
    del found["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return found


def _ends(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port: int = probe.getsockname()[1]
    return port
