"""Released vLLM sources, loaded without a GPU, and what their attention builders are given: for compatibility tests."""
