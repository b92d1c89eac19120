"""Progress of each request, kept on the device, and host buffers that need no wait. Imports no vLLM."""

from vllm_async_spec.spec_decode.progress import DeviceProgress
from vllm_async_spec.spec_decode.staging import PolledEvent, RotatingBuffer

__all__ = ["DeviceProgress", "PolledEvent", "RotatingBuffer"]
