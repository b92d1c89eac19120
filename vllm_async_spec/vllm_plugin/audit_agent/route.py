"""The route by which a running server is audited: `POST /async_spec/audit`.

The analysis runs in a process of its own, so that the server goes on serving meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_async_spec.audit.engine import RPC, SKIP, AuditError, Files, answers, described, recordings, saved_files
from vllm_async_spec.audit.recording import DONE, How

PATH = "/async_spec/audit"
MOST_STEPS = 2048
LONGEST_S = 600.0


def add_route(app: Any) -> None:
    """Give vLLM's application the route."""
    app.add_route(PATH, _audit, methods=["POST"])


async def _audit(request: Any) -> Any:
    """Record what the server is doing anyway, and answer with the report."""
    from starlette.responses import JSONResponse

    try:
        options = _options(await request.json())
        return JSONResponse(await _Audit(request.app.state.engine_client, **options).run())
    except (AuditError, ValueError) as error:
        return JSONResponse({"error": str(error)}, status_code=409 if isinstance(error, AuditError) else 400)


def _options(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, dict):
        raise ValueError(f"the request is {asked!r}; it must be an object with steps, skip and seconds, or {{}}")
    limits = {"steps": (64, 3, MOST_STEPS), "skip": (SKIP, 0, MOST_STEPS), "seconds": (120.0, 1, LONGEST_S)}
    options = {}
    for name, (default, low, high) in limits.items():
        value = asked.get(name, default)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be a number from {low} to {high:g}")
        options[name] = value if name == "seconds" else int(value)
    return options


class _Audit:
    """One audit of this server."""

    def __init__(self, client: Any, steps: int, skip: int, seconds: float) -> None:
        self._client, self._steps, self._skip, self._seconds = client, steps, skip, seconds

    async def run(self) -> dict[str, Any]:
        """Make every recording one after the other, and have them analysed."""
        facts = described(await self._ask({"do": "describe"}))
        with tempfile.TemporaryDirectory(prefix="vllm-async-spec-audit-") as folder:
            saved = {how.value: await self._record(how, folder) for how in recordings(facts)}
            return await _analyse({"facts": facts, "saved": saved})

    async def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return answers(await self._client.collective_rpc(RPC, args=(json.dumps(request),)))

    async def _record(self, how: How, folder: str) -> Files:
        done = Path(folder, DONE)
        done.unlink(missing_ok=True)
        await self._ask({"do": "arm", "how": how.value, "skip": self._skip, "steps": self._steps, "folder": folder})
        try:
            await asyncio.wait_for(_appears(done), self._seconds)
        except asyncio.TimeoutError:
            await self._ask({"do": "cancel"})
            raise AuditError(
                f"the server did not go through {self._skip} + {self._steps} steps in {self._seconds:g} seconds; send "
                "it requests meanwhile, or give --load to have them sent"
            ) from None
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._ask({"do": "cancel"})
            raise
        return saved_files(await self._ask({"do": "save"}))


async def _appears(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.05)


async def _analyse(job: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vllm_async_spec.audit.engine",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(json.dumps(job).encode())
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise AuditError(f"the recording can't be analysed: {lines[-1] if lines else 'no reason was given'}")
    found: dict[str, Any] = json.loads(out)
    return found
