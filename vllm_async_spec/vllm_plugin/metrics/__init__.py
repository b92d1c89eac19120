"""The plugin's counters on vLLM's `/metrics`, from every process of the server that one machine runs."""
