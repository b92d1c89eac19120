"""Audit an engine in another process: a newly started engine, or a running server."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_async_spec import json_child
from vllm_async_spec._version import __version__
from vllm_async_spec.audit.engine import AuditError, command_line, most_seconds
from vllm_async_spec.audit.loads import Work, check_load
from vllm_async_spec.audit.report import Load, Report

Stage = Callable[[str], None]


def audit_model(
    engine_arguments: list[str],
    *,
    load: str,
    batch: int,
    steps: int,
    plugin: bool,
    log: Path,
    stage: Stage,
    rank: int = 0,
) -> Report:
    """Start an engine, audit it, and end it.

    Args:
        engine_arguments: as on vLLM's command line.
        load: the engine's load; see `loads`.
        batch: requests that run together, at most.
        steps: steps to record.
        plugin: whether the plugin is on; otherwise vLLM is stock.
        log: where the engine's log goes.
        stage: called with what is being done.
        rank: the worker to record, of several.

    Raises:
        AuditError: the audit failed; the message says why, and where the log is.
        LoadError: there is no such load, or its file can't be read; no engine was started.
    """
    check_load(load)
    setup = {"engine_arguments": engine_arguments, "load": load, "batch": batch, "steps": steps, "rank": rank}
    environment = os.environ | {"VLLM_ASYNC_SPEC_AUDIT": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not plugin:
        environment["VLLM_ASYNC_SPEC"] = "off"
    with json_child.start(
        [sys.executable, "-m", "vllm_async_spec.audit.child", json.dumps(setup)],
        log=log,
        env=environment,
        fail=lambda why: AuditError(f"the engine could not be audited: {why}"),
    ) as child:
        while "report" not in (answer := child.answer()):
            stage(answer["stage"])
    return dataclasses.replace(Report.from_dict(answer["report"]), command=command_line())


def audit_server(
    url: str, *, load: str | None, batch: int, steps: int, seconds: float, api_key: str | None = None, rank: int = 0
) -> Report:
    """Audit a server.

    Args:
        url: the server's address, such as `http://127.0.0.1:8000`.
        load: the load to send meanwhile; None to audit the server's live traffic.
        batch: requests that are sent at once.
        steps: steps to record.
        seconds: time limit for each of the three recordings.
        api_key: one of the server's keys, if it has any.
        rank: the worker to record, of several.

    Raises:
        AuditError: the server can't be asked, can't answer, or refuses the whole load; the message says why.
    """
    url = url.rstrip("/")
    headers = _headers(api_key)
    with contextlib.ExitStack() as stack:
        given: Load | None = None
        sent = _Sent()
        if load is not None:
            with _known_answer(url):
                model = _ask(f"{url}/v1/models", headers, None, 30)["data"][0]
                name, longest = model["id"], int(model.get("max_model_len") or 2048)
            # Any vocabulary has 200 tokens; a step gives a request only a few.
            work = Work.make(
                load,
                batch=batch,
                steps=steps,
                tokens_a_step=4,
                vocabulary=200,
                longest=longest,
            )
            sent = stack.enter_context(_sending(url, headers, name, work))
            given = Load(work.name, work.together, None, None)
        try:
            answer = _ask(
                f"{url}/async_spec/audit",
                headers,
                {"steps": steps, "seconds": seconds, "rank": rank},
                most_seconds(seconds) + 30,
            )
        except AuditError as error:
            sent.check()
            raise AuditError("; ".join([str(error), *sent.refusals()])) from None
        sent.check()
        with _known_answer(url):
            report = Report.from_dict(answer)
    notes = (*report.notes, *(f"{said[0].upper()}{said[1:]}." for said in sent.refusals()))
    return dataclasses.replace(report, load=given or report.load, notes=notes, command=command_line())


@dataclass(slots=True)
class _Sent:
    """The requests of a load so far."""

    requests: int = 0
    refused: list[Exception] = field(default_factory=list)
    """Why requests failed; those under way have not."""

    def refusals(self) -> list[str]:
        """A sentence, without its full stop, if the server refused any."""
        if not self.refused:
            return []
        why = str(self.refused[0]).rstrip(".")
        return [f"the server refused {len(self.refused)} of {self.requests} requests: {why}"]

    def check(self) -> None:
        """Raise `AuditError` if the server refused all, so that an audit would be of no load, or of another's."""
        if self.refused and len(self.refused) == self.requests:
            raise AuditError(*self.refusals())


def _headers(api_key: str | None) -> dict[str, str]:
    """The HTTP header with the API key, if there is one.

    Raises:
        AuditError: the value can't be a key; the message does not show the value.
    """
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise AuditError("the value of --api-key or VLLM_API_KEY can't be a key; give printable ASCII characters")
    return {"Authorization": f"Bearer {api_key}"}


def _ask(url: str, headers: dict[str, str], body: Any, seconds: float) -> Any:
    """GET JSON, or POST if there is a body.

    Raises:
        AuditError: there is no such server, or it refuses; the message says why.
    """
    data = None if body is None else json.dumps(body).encode()
    with _known_answer(url):
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            for name, value in headers.items():
                request.add_unredirected_header(name, value)  # a redirect must not get the key
            with urllib.request.urlopen(request, timeout=seconds) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise AuditError(_refusal(url, error)) from None
        except (OSError, ValueError, http.client.InvalidURL) as error:
            raise AuditError(
                f"{url} can't be reached: {getattr(error, 'reason', error)}; give the address of a running vLLM server"
            ) from None
        return json.loads(text)


@contextlib.contextmanager
def _known_answer(url: str) -> Iterator[None]:
    """Make what an unknown answer raises an `AuditError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, http.client.HTTPException):
        raise AuditError(
            f"{url} does not answer as a vLLM server with vllm-async-spec {__version__}; give the URL of one"
        ) from None


@contextlib.contextmanager
def _sending(url: str, headers: dict[str, str], model: str, work: Work) -> Iterator[_Sent]:
    """Send `work` to the server over and over; yield what counts the requests, and those that failed."""
    sent = _Sent()
    requests = itertools.cycle(work.requests)
    lock, stop = threading.Lock(), threading.Event()

    def send() -> None:
        while not stop.is_set():
            with lock:
                request = next(requests)
                sent.requests += 1
            body = {
                "model": model,
                "prompt": request.prompt,  # a tuple is a list in JSON
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                _ask(f"{url}/v1/completions", headers, body, 600)
            except Exception as error:
                sent.refused.append(error)
                stop.wait(1)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(work.together)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        stop.set()


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return (
            f"{url} does not exist; install vllm-async-spec beside the server's vLLM, and start the server with "
            "VLLM_ASYNC_SPEC_AUDIT=1"
        )
    if error.code == 401:
        return f"{url} needs one of the server's keys; give a key with --api-key, or in VLLM_API_KEY"
    try:
        said = json.load(error)["error"]
        message = str(said["message"] if isinstance(said, dict) else said)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        message = f"{url} answered {error.code} {error.reason}"
    return " ".join(message.split())
