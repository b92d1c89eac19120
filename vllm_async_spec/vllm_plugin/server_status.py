"""`vllm-async-spec status --url`: the plugin's state in a running server, from the server's `/metrics`."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from typing import Any

_SECONDS = 30
_MOST = 1 << 26
"""Bytes of a page; a server's metrics are far below."""


class ServerError(RuntimeError):
    """The server does not answer, or has no plugin; the message says what to do."""


@dataclass(slots=True)
class ServerStatus:
    """The plugin's state in a server."""

    url: str
    version: str = ""
    mode: str = ""
    sync: str = ""
    patches: dict[str, int] = field(default_factory=dict)
    """How many patches are in each state."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason of each patch that some process of the server refused."""
    async_scheduling: bool | None = None
    """Whether scheduling is asynchronous; None if the server does not tell, as the next three."""
    decided_by: str | None = None
    """`user`, `vllm-async-spec`, `vLLM` or `unknown`."""
    runner: str | None = None
    """`V1`, `V2` or `unknown`."""
    backend: str | None = None
    """The attention backends, separated by commas."""

    @property
    def healthy(self) -> bool:
        """Whether no process refused a patch."""
        return not (self.refused or self.patches.get("refused"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"healthy": self.healthy}


def read_server(url: str) -> ServerStatus:
    """Read the plugin's state from a server, such as `http://127.0.0.1:8000`.

    Raises:
        ServerError: no server answers there, or the server has no plugin.
    """
    page = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=_SECONDS) as response:
            return _parsed(url, _text(response))
    except urllib.error.HTTPError as error:
        raise ServerError(f"{page} answered with HTTP status {error.code}; give the address of a vLLM server") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(f"{getattr(error, 'reason', error)}".split()) or type(error).__name__
        raise ServerError(f"{page!r} can't be read: {reason}; give the address of a running vLLM server") from None


def _text(response: http.client.HTTPResponse) -> str:
    """The page, within the time and the size that a server's metrics need; the timeout is for each part of it."""
    told, page, end = int(response.headers.get("Content-Length", -1)), b"", time.monotonic() + _SECONDS
    while len(page) != told and (part := response.read1(_MOST)):
        page += part
        if len(page) > _MOST or time.monotonic() > end:
            raise OSError(f"it does not end within {_SECONDS} s and {_MOST >> 20} MiB")
    if len(page) < told:
        raise http.client.IncompleteRead(page, told - len(page))
    return page.decode()


def _parsed(url: str, text: str) -> ServerStatus:
    from prometheus_client.parser import text_string_to_metric_families

    found = ServerStatus(url)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name == "vllm:async_spec_info":
                found.version, found.mode = sample.labels["version"], sample.labels["mode"]
                found.sync = sample.labels["sync"]
            elif family.name == "vllm:async_spec_patches":
                found.patches[sample.labels["state"]] = int(sample.value)
            elif family.name == "vllm:async_spec_async_scheduling":
                found.async_scheduling = sample.value == 1 and found.async_scheduling is not False
                found.decided_by = sample.labels["decided_by"]
                found.runner, found.backend = sample.labels["runner"], sample.labels["backend"]
            elif family.name == "vllm:async_spec_refused_patch":
                found.refused[sample.labels["patch"]] = sample.labels["reason"]
    if not found.version:
        raise ServerError(
            f"the server at {url} has no metrics of vllm-async-spec: the plugin is not installed there, VLLM_PLUGINS "
            "does not name async_spec, or VLLM_ASYNC_SPEC is off; start the server with the plugin"
        )
    return found
