"""The plugin's counters on vLLM's `/metrics`, from all of the server's processes on one machine."""
