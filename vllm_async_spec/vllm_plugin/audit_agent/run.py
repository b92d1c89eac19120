"""One audit of this process's server: recordings in the engine, then their analysis.

The analysis runs in a separate process, so that it does not block the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_async_spec.audit.engine import RPC, AuditError, Files, answers, described, recordings, saved_files
from vllm_async_spec.audit.folder import make_folder
from vllm_async_spec.audit.recording import DONE, How

if TYPE_CHECKING:
    from vllm_async_spec.vllm_plugin.upstream import EngineClient

_CANCEL_S = 2.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """An audit. Cancelling its task ends the recording and the analysis, and removes the folder.

    Args:
        client: vLLM's `EngineClient`.
        steps: steps to record.
        skip: steps to leave out before the recording.
        seconds: longest duration of one recording.
        rank: the worker to record, of several.
        ending: tells whether the server and its engine are ending.
    """

    client: EngineClient
    steps: int
    skip: int
    seconds: float
    rank: int
    ending: Callable[[], bool]

    async def report(self) -> dict[str, object]:
        """Make the recordings one after another, and analyse them.

        Raises:
            AuditError: the audit can't be made; the message says why.
        """
        facts = described(await self._ask({"do": "describe"}), self.rank)
        with _folder() as folder:
            saved = {how.value: await self._record(how, folder) for how in recordings(facts)}
            return await _analyse({"facts": facts, "saved": saved})

    async def _ask(self, request: dict[str, object]) -> list[dict[str, Any]]:
        try:
            asked = json.dumps(request | {"rank": self.rank})
            replies = await self.client.collective_rpc(RPC, args=(asked,))
        except Exception as error:
            raise AuditError(f"the engine did not answer the audit: {type(error).__name__}: {error}") from error
        return answers(replies)

    async def _record(self, how: How, folder: str) -> Files:
        done = Path(folder, DONE)
        done.unlink(missing_ok=True)
        order = {"how": how.value, "skip": self.skip, "steps": self.steps, "folder": folder}
        try:
            await self._ask({"do": "arm", **order})
            await asyncio.wait_for(self._appears(done), self.seconds)
            return saved_files(await self._ask({"do": "save"}))
        except asyncio.TimeoutError:
            await self._cancel(folder)
            raise AuditError(
                f"the server did not run {self.skip} + {self.steps} steps in {self.seconds:g} seconds; send requests "
                "during the audit, or give --load, which sends requests"
            ) from None
        except BaseException:
            await self._cancel(folder)
            raise

    async def _appears(self, path: Path) -> None:
        while not path.exists():
            if self.client.errored:
                raise AuditError("the engine ended during the audit; the server's log says why")
            await asyncio.sleep(_POLL_S)

    async def _cancel(self, folder: str) -> None:
        """Stop the engine's recording into this folder, unless the engine is ending."""
        if self.ending():
            return
        with contextlib.suppress(AuditError, asyncio.TimeoutError):
            await asyncio.wait_for(self._ask({"do": "cancel", "folder": folder}), _CANCEL_S)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """As `make_folder`.

    Raises:
        AuditError: there is no temporary directory that can be written.
    """
    try:
        return make_folder()
    except OSError as error:
        # An error without a file name lists the directories that were tried.
        tried = f"{Path(error.filename).parent} " if error.filename else ""
        raise AuditError(
            f"the server can't write to its temporary directory {tried}({error.strerror}); make it writable, or set "
            "TMPDIR"
        ) from error


async def _analyse(job: dict[str, object]) -> dict[str, object]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vllm_async_spec.audit.engine",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate(json.dumps(job).encode())
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise AuditError(f"the recording can't be analysed: {lines[-1] if lines else 'the analysis printed no reason'}")
    found: dict[str, object] = json.loads(out)
    return found
