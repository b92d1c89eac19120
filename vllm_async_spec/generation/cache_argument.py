"""What transformers calls the cache of keys and values among a model's arguments."""

import inspect

from transformers import GenerationMixin

CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""`past_key_values` up to transformers 5.23. Later releases rename it to `cache` in each call that has the old name."""
