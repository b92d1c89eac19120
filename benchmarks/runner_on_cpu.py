"""vLLM's V1 runner on a CPU as the plugin changes it on a GPU.

The CPU platform's runner is a subclass of the GPU's, and the plugin leaves it as it is. From 0.21 to 0.29 it can
schedule asynchronously with drafts. An arm may then ask for the patches whose work is the host's, or has a reference in
PyTorch, so that a soak of them needs no GPU.
"""

import os

_NAME, _WANTED = "ASYNC_SPEC_BENCH_RUNNER", "cuda"
ENVIRONMENT = {_NAME: _WANTED}
"""Environment of an arm that asks for the patches."""
PATCHES = ("carried-inputs", "steady-inputs", "steady-states")
OTHER_ROWS = "steady-inputs of other rows"
"""Steps of `steady-inputs` whose rows are others than those of the step before, as soaks count them."""


def choose() -> None:
    """Let the patches apply on a CPU, if the environment says so. Call this before vLLM loads the plugin."""
    if os.environ.get(_NAME) != _WANTED:
        return
    from vllm_async_spec.vllm_plugin.ledger import Implementation
    from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

    IMPLEMENTATIONS.update({name: Implementation(IMPLEMENTATIONS[name].apply) for name in PATCHES})
