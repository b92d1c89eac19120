"""Asynchronous continuous batching for decoder models of transformers."""

from vllm_async_spec.generation.batching.attention_backends import AttentionChoiceError, SlowAttentionWarning
from vllm_async_spec.generation.batching.attention_function import ModelError
from vllm_async_spec.generation.batching.batcher import ContinuousBatcher
from vllm_async_spec.generation.batching.config import BatcherConfig
from vllm_async_spec.generation.batching.request import BatcherError, Request, RequestError

__all__ = [
    "AttentionChoiceError",
    "BatcherConfig",
    "BatcherError",
    "ContinuousBatcher",
    "ModelError",
    "Request",
    "RequestError",
    "SlowAttentionWarning",
]
