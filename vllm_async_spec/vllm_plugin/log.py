"""The plugin's logger: a child of vLLM's, so that its lines look and go where vLLM's do."""

from __future__ import annotations

import logging
import multiprocessing

logger = logging.getLogger("vllm.async_spec")


def is_main_process() -> bool:
    """Whether this process was not started by another through multiprocessing: the one that talks to the operator."""
    return multiprocessing.parent_process() is None
