"""The overlap of host and device for `generate` of transformers: the stop check is read late, and undone exactly.

Importing it imports transformers, which the extra `vllm-async-spec[transformers]` installs.
"""

from vllm_async_spec.generation.async_generate import disable, enable, generate
from vllm_async_spec.generation.batching import ContinuousBatcher
from vllm_async_spec.generation.flag_channel import FlagChannel
from vllm_async_spec.generation.memory import MemoryReport, use_expandable_segments
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList
from vllm_async_spec.generation.warn_once import SynchronousGenerationWarning
from vllm_async_spec.generation.workspace import memory_report, release

__all__ = [
    "AsyncStoppingCriteriaList",
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
