"""Audit agents in an engine's processes and an HTTP route for audits, with `VLLM_ASYNC_SPEC_AUDIT=1`."""
