"""Small cases of vLLM's other features, each compared with stock's tokens."""
