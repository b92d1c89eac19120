"""Device bookkeeping of drafts: how far each request has got, and buffers that no wait protects. Imports no vLLM."""

from vllm_async_spec.spec_decode.progress import DeviceProgress
from vllm_async_spec.spec_decode.staging import PolledEvent, RotatingBuffer

__all__ = ["DeviceProgress", "PolledEvent", "RotatingBuffer"]
