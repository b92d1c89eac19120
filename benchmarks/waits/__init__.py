"""What waits, by feature of vLLM: each case is timed beside plain decoding, then audited."""
