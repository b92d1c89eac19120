"""Asynchronous generation for transformers: the host reads stop flags late, and undoes extra steps exactly.

Importing this package imports transformers, which the extra `vllm-async-spec[transformers]` installs.
"""

from vllm_async_spec.generation.async_generate import generate
from vllm_async_spec.generation.batching import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.enabling import disable, enable
from vllm_async_spec.generation.flag_channel import FlagChannel
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList, SynchronousGenerationWarning
from vllm_async_spec.generation.workspace import MemoryReport, memory_report, release, use_expandable_segments

__all__ = [
    "AsyncStoppingCriteriaList",
    "BatcherConfig",
    "ContinuousBatcher",
    "FlagChannel",
    "MemoryReport",
    "SynchronousGenerationWarning",
    "disable",
    "enable",
    "generate",
    "memory_report",
    "release",
    "use_expandable_segments",
]
