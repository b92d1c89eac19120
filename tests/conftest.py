from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Fixed examples in CI, so that a red run is one that can be repeated.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=150)
settings.register_profile("default", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices of 16 rows don't need a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
