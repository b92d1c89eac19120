"""What `VLLM_ASYNC_SPEC_AUDIT=1` adds to an engine: agents in its processes, and a route."""
