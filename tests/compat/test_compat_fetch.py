"""Which releases can be fetched; nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_async_spec.compat import fetch

TAGS = ("manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "manylinux_2_35")
"""Of 0.21; of 0.22 on; of 0.12 to 0.19; of 0.20."""


def test_pip_is_asked_for_the_tag_of_every_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        asked.append(command)
        raise fetch.FetchError("no download")

    monkeypatch.setattr(fetch, "_pip", lambda: ["pip"])
    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(fetch.FetchError, match="no download"):
        fetch.fetch_release("0.21.0", tmp_path)
    assert {f"--platform={tag}_x86_64" for tag in TAGS} <= set(asked[0])


@pytest.mark.parametrize("version", ["0.11.2", "latest", "../0.21.0", "0.21.0/../..", ""])
def test_what_is_no_release_is_refused_by_name(version: str, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match=re.escape(f"{version!r} is not a vLLM release since 0.12.0; name one")):
        fetch.fetch_release(version, tmp_path)
