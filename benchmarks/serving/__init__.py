"""Served as people serve: `vllm serve` for each arm, driven by vLLM's own client over HTTP."""
