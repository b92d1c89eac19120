"""The plugin's logger, a child of vLLM's logger with the same format and destination."""

from __future__ import annotations

import logging
import multiprocessing

logger = logging.getLogger("vllm.async_spec")


def is_main_process() -> bool:
    """Whether this process was not started through multiprocessing. Such a process informs the operator."""
    return multiprocessing.parent_process() is None


def inform(message: str, *arguments: object) -> None:
    """Log a line for the operator: at INFO, or at WARNING before vLLM has configured its logger.

    From 0.31 on vLLM does so only after it has loaded the plugins. Until then Python shows only warnings.
    """
    configured = logging.getLogger("vllm").handlers
    logger.log(logging.INFO if configured else logging.WARNING, message, *arguments)
