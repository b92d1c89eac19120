"""The backend compatibility suite: released vLLM sources, loaded without a GPU, and what their builders are given."""
