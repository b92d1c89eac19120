"""Small cases of what else vLLM can do, each held to stock's tokens."""
