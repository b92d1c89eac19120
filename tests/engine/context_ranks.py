"""`ranks.py` with the attention backend of `context_rows`, and with few requests.

A draft model's slots are computed as if one rank had the whole cache, so longer ones would lie behind its tables.
"""

import os
from typing import Any

import ranks

BOUNDS = "CONTEXT_RANKS_BOUNDS"
"""A variable that leaves the runner's local lengths as stock has them."""
REQUESTS = 7


def run(target: str, draft: str, options: dict[str, Any]) -> dict[str, Any]:
    # Else vLLM looks for a backend of its own for the draft model.
    drafting = ranks.drafting(draft) | {"attention_backend": options.get("attention_backend")}
    return ranks.run(target, draft, {"speculative_config": drafting, **options}, REQUESTS)


def prepare() -> None:
    """In each process: those of the engine and its workers run this file again."""
    import context_rows

    context_rows.register()
    if BOUNDS in os.environ:
        from vllm_async_spec.vllm_plugin.patches import context_parallel_lengths

        context_parallel_lengths.take_device_lengths = lambda runner: None


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    ranks.main(run, __doc__)
