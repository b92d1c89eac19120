"""Compatibility tests: load a vLLM release's Python without a GPU, and try its attention metadata builders."""
