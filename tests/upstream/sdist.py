"""vLLM's own tests, which only its source distribution has: downloaded from the package index and never built."""

import hashlib
import html
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

RELEASE = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
WANTED = ("tests/", "examples/features/logits_processor/", "pyproject.toml")
"""What is kept: the tests, an example that one of them imports, and pytest's markers."""


class SdistError(RuntimeError):
    """The tests can't be had."""


def tests_of_vllm(cache: Path) -> Path:
    """The directory that has `tests/` of vLLM `RELEASE`, downloaded unless it is there; SdistError if it can't be had.

    `pip download --no-binary` would build what it downloads.
    """
    target = cache / f"vllm-{RELEASE}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        archive = Path(scratch) / "sdist.tar.gz"
        archive.write_bytes(_download())
        with tarfile.open(archive) as packed:
            top = f"vllm-{RELEASE}/"
            kept = [each for each in packed if each.name.removeprefix(top).startswith(WANTED)]
            packed.extractall(scratch, kept, filter="data")
        (Path(scratch) / top).rename(target)
    return target


def _download() -> bytes:
    """The sdist, from the first index that lists it by the PEP 503 page that each index has."""
    name = f"vllm-{RELEASE}.tar.gz"
    tried = []
    for index in _indexes():
        page = index.rstrip("/") + "/vllm/"
        try:
            text = _get(page).decode()
            found = re.search(rf'href="([^"]*/{re.escape(name)}(?:#[^"]*)?)"', text)
            if found is None:
                tried.append(f"{page} lists no {name}")
                continue
            data = _get(urllib.parse.urljoin(page, html.unescape(found[1])))
        except (OSError, urllib.error.URLError) as error:
            tried.append(f"{page}: {error}")
            continue
        if (digest := hashlib.sha256(data).hexdigest()) != SHA256:
            raise SdistError(f"{name} from {page} has the SHA-256 {digest}; it must be {SHA256}")
        return data
    raise SdistError(f"{name} can't be downloaded: {'; '.join(tried)}")


def _get(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.pypi.simple.v1+html, text/html, */*"})
    with urllib.request.urlopen(request, timeout=180) as answer:
        data: bytes = answer.read()
    return data


def _indexes() -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = dict(line.split("=", 1) for line in listed.stdout.splitlines() if "=" in line)
    values = {key.rpartition(".")[2]: value.strip("'\"") for key, value in settings.items()}
    first = os.environ.get("PIP_INDEX_URL") or values.get("index-url") or "https://pypi.org/simple"
    return [first, *values.get("extra-index-url", "").split()]
