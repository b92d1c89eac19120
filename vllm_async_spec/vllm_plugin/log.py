"""The plugin's logger: a child of vLLM's, so that its lines look and go where vLLM's do."""

from __future__ import annotations

import logging
import multiprocessing

logger = logging.getLogger("vllm.async_spec")


def is_main_process() -> bool:
    """Whether this process was not started by another through multiprocessing: the one that talks to the operator."""
    return multiprocessing.parent_process() is None


def inform(message: str, *arguments: object) -> None:
    """Log a line for the operator at INFO, which vLLM shows.

    From 0.31 on vLLM configures its logger only after it has loaded the plugins; until then Python shows warnings only.
    """
    configured = logging.getLogger("vllm").handlers
    logger.log(logging.INFO if configured else logging.WARNING, message, *arguments)
