"""The HTTP route that audits a running server: `POST /async_spec/audit`.

vLLM's guard checks API keys only below certain paths, of which every release has `/v1`. So the route passes each
request to the application again, for `/v1/async_spec/audit`, where the guard checks it like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from vllm_async_spec.audit.engine import SKIP, AuditError, most_seconds
from vllm_async_spec.vllm_plugin.audit_agent.run import Run
from vllm_async_spec.vllm_plugin.log import logger

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    from vllm_async_spec.vllm_plugin.upstream import HttpApp

PATH = "/async_spec/audit"
GUARDED = "/v1" + PATH
MOST_STEPS = 2048
LONGEST_S = 600.0
MOST_BYTES = 4096
_BODY_S = 10.0
_CLOSING_S = 3.0
_ENDS = "the server is shutting down; send the audit request after its restart"
_POLL_S = 0.1
_SCOPE = {"type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server", "state"}
"""The parts of a request that stay unchanged when the application gets the request again."""


class Refusal(Exception):
    """The request is refused with an HTTP status, and a reason in one sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@contextlib.asynccontextmanager
async def open_door(app: HttpApp) -> AsyncIterator[None]:
    """Add the route to vLLM's application and close it when the server ends; on failure, log why."""
    door = None
    try:
        if app.state.engine_client is None:
            raise ValueError("the server has no engine")
        door = Door()
        app.add_route(PATH, _again, methods=["POST"])
        app.add_route(GUARDED, door.answer, methods=["POST"])
    except Exception as error:  # a failure here must not end the server
        why = f"{type(error).__name__}: {error}"
        logger.warning("vllm-async-spec: this server can't be audited, because it has no POST %s: %s", PATH, why)
    try:
        yield
    finally:
        if door is not None:
            await door.close()


async def _again(request: Request) -> ASGIApp:
    """Pass an unread request to the application again, under the path that vLLM guards."""

    async def again(scope: Scope, receive: Receive, send: Send) -> None:
        kept = {name: value for name, value in scope.items() if name in _SCOPE}
        root = {"root_path": "", "path": GUARDED, "raw_path": GUARDED.encode()}
        await request.app(kept | root, receive, send)

    return again


class Door:
    """Runs one audit at a time, and ends the audit when its client disconnects or the server ends."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._under_way: asyncio.Task[dict[str, object]] | None = None

    async def answer(self, request: Request) -> JSONResponse:
        """Audit the server under its current load, and answer with the report."""
        from starlette.responses import JSONResponse

        try:
            check_key(request)
            return JSONResponse(await self._audit(request))
        except AuditError as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        except Refusal as refusal:
            return JSONResponse({"error": str(refusal)}, status_code=refusal.status)
        except Exception as error:  # else the server logs a traceback, and its client gets no reason
            why = f"the audit failed: {type(error).__name__}: {' '.join(str(error).split())}"
            logger.error("vllm-async-spec: %s", why)
            return JSONResponse({"error": why}, status_code=500)

    async def close(self) -> None:
        """End the current audit and refuse new ones."""
        self._closing.set()
        if self._under_way is not None:
            await asyncio.wait({self._under_way}, timeout=_CLOSING_S)

    async def _audit(self, request: Request) -> dict[str, object]:
        options = read_options(await _body(request))
        if self._closing.is_set():
            raise Refusal(503, _ENDS)
        if self._under_way is not None:
            raise Refusal(409, "an audit of this server is under way; wait until it ends")
        run = Run(request.app.state.engine_client, **options, ending=self._closing.is_set)
        try:
            return await self._while_wanted(request, run.report(), most_seconds(options["seconds"]))
        finally:
            self._under_way = None

    async def _while_wanted(
        self, request: Request, report: Coroutine[Any, Any, dict[str, object]], seconds: float
    ) -> dict[str, object]:
        """Wait for the report; cancel it if the client disconnects, the server ends or the time is over."""
        work = self._under_way = asyncio.create_task(report)
        gone = asyncio.create_task(_gone(request))
        ends = asyncio.create_task(self._server_ends(request.app))
        try:
            await asyncio.wait({work, gone, ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                logger.info("vllm-async-spec: the client disconnected, so the audit was stopped")
                raise Refusal(499, "the client disconnected")
            if ends.done():
                raise Refusal(503, _ENDS)
            raise Refusal(504, f"the audit took longer than {seconds:g} seconds in all; request fewer steps")
        finally:
            for task in (work, gone, ends):
                task.cancel()
            await asyncio.wait({work, gone, ends})

    async def _server_ends(self, app: HttpApp) -> None:
        server = getattr(app.state, "server", None)
        while not (self._closing.is_set() or getattr(server, "should_exit", False)):
            await asyncio.sleep(_POLL_S)
        self._closing.set()


def check_key(request: Request) -> None:
    """Check a request's API key again after vLLM's guard, in case a changed guard leaves the route open.

    Raises:
        Refusal: the request has none of the server's keys, or the server's keys can't be found.
    """
    options = getattr(request.app.state, "args", None)
    if options is None:
        return  # 0.12 does not store its options, so only the guard checks
    if not hasattr(options, "api_key"):
        raise Refusal(503, "this server can't be audited over HTTP, because its keys can't be found in this vLLM")
    given = options.api_key
    # As in vLLM, the option has precedence over the variable, and an empty key is no key.
    keys = [given] if isinstance(given, str) else list(given or [os.environ.get("VLLM_API_KEY")])
    digests = [_digest(key) for key in keys if key]
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    # Compare with every key, so that the time reveals nothing.
    matches = [secrets.compare_digest(_digest(key), digest) for digest in digests]
    if digests and not (scheme.lower() == "bearer" and any(matches)):
        raise Refusal(401, "Unauthorized")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _body(request: Request) -> bytes:
    """Read the request's body; refuse a body that is too long or too slow."""
    from starlette.requests import ClientDisconnect

    async def read() -> bytes:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise Refusal(413, f"the request is longer than {MOST_BYTES} bytes; send an object with {_NAMES}")
        return body

    try:
        return await asyncio.wait_for(read(), _BODY_S)
    except asyncio.TimeoutError:
        raise Refusal(
            408, f"the request did not arrive within {_BODY_S:g} seconds; send the whole request at once"
        ) from None
    except ClientDisconnect:
        raise Refusal(499, "the client disconnected") from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_LIMITS: dict[str, tuple[float, float, float]] = {
    "steps": (64, 3, MOST_STEPS),
    "skip": (SKIP, 0, MOST_STEPS),
    "seconds": (120.0, 1, LONGEST_S),
    "rank": (0, 0, 4096),
}
"""Default, lowest and highest value of each option."""
_NAMES = "steps, skip, seconds and rank, or {}"


def read_options(body: bytes) -> dict[str, Any]:
    """The options in a request's body.

    Raises:
        Refusal: the body is not JSON, or has invalid options; the message names the valid ones.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, f"the request is {_shown(body)}, which is not JSON; send an object with {_NAMES}") from None
    if not isinstance(asked, dict):
        raise Refusal(400, f"the request is {_shown(asked)}; it must be an object with {_NAMES}")
    if unknown := set(asked) - set(_LIMITS):
        raise Refusal(
            400, f"the request has the unknown key {_shown(min(unknown))}; it must be an object with {_NAMES}"
        )
    return {name: _number(name, asked.get(name, limits[0]), *limits[1:]) for name, limits in _LIMITS.items()}


def _number(name: str, value: object, low: float, high: float) -> float:
    kinds = (int, float) if name == "seconds" else (int,)
    # NaN fails the comparison. Python's True would pass as 1.
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "a number" if name == "seconds" else "a whole number"
        raise Refusal(400, f"{name} is {_shown(value)}; it must be {what} from {low:g} to {high:g}")
    return value


def _shown(value: object) -> str:
    return f"{value!r:.60}"
