"""Skips the files of this folder, before they are imported, where transformers is not installed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest


class SkippedFile(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        why = "generation needs transformers: pip install 'vllm-async-spec[transformers]'"
        pytest.skip(why, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("transformers") is not None:
        return None
    return SkippedFile.from_parent(parent, path=module_path)
