"""vLLM's own scheduler and runner, on a device that runs late: what a runner's subclass is held to account by."""
