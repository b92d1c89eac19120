"""The settings of a `ContinuousBatcher`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from vllm_async_spec.generation.batching.step_slots import decode_sizes_of
from vllm_async_spec.generation.compiling import Compile, compile_arguments

_POSITIVE = ("max_batch", "max_prefill_tokens", "max_prefills", "steps_ahead")
_POSITIVE_OR_NONE = ("draft_tokens", "max_length", "page_size", "cache_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """Settings of a `ContinuousBatcher`, checked when given; the batcher checks what depends on the model.

    Raises:
        ValueError: a setting is invalid; the message names it.
    """

    max_batch: int
    """Sequences that run at once."""
    draft_tokens: int | None = None
    """Drafts of each sequence in a step; None means 4 if there is a draft model."""
    max_length: int | None = None
    """Tokens of a sequence, prompt and generated; None means 2048, or the models' positions if these are fewer."""
    page_size: int | None = None
    """Tokens in a page of the KV cache; None means what suits the attention backend."""
    cache_tokens: int | None = None
    """Tokens that the whole cache holds; None means enough for `max_batch` sequences of `max_length`."""
    max_prefill_tokens: int = 2048
    """Prompt tokens in a step; a longer prompt takes several steps."""
    max_prefills: int = 8
    """Prompts in a step.

    With 1 and one decode size, the rest of the batch changes no bit of a sequence's logits, if kernels compute rows
    independently. The kernels used here do.
    """
    attention: str = "auto"
    """`auto`, `FLASH_ATTN`, `FLASHINFER_TRTLLM` or `TORCH_REFERENCE`."""
    eos_token_id: int | Sequence[int] | None = None
    """Tokens that end a sequence; None means those of the model's generation configuration."""
    decode_sizes: Sequence[int] | None = None
    """Numbers of sequences that decodes are padded to; None means powers of two and `max_batch`."""
    cuda_graphs: bool | None = None
    """Whether decodes are captured, one graph for each size and slot; None means True on a CUDA device."""
    torch_compile: Compile = False
    """Whether the forward of decodes is compiled, for each size once, when the batcher is made.

    A name chooses the backend, a dict holds arguments of `torch.compile`. Compiled kernels round differently.
    """
    steps_ahead: int = 1
    """Steps launched before a step's tokens are read. With more than 1 the host learns later, and seldom gains."""
    synchronous: bool = False
    """Wait for each step before the next is planned: the reference for the asynchronous loop's tokens."""

    def __post_init__(self) -> None:
        for name in _POSITIVE + _POSITIVE_OR_NONE:
            value = getattr(self, name)
            if value is None and name in _POSITIVE_OR_NONE:
                continue
            if not isinstance(value, Integral):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
            object.__setattr__(self, name, int(value))  # NumPy's integers are not like Python's in all
        compile_arguments(self.torch_compile)
        sizes = decode_sizes_of(self.max_batch, self.decode_sizes)
        if self.decode_sizes is not None:
            object.__setattr__(self, "decode_sizes", tuple(sizes))  # an iterator can be read only once

    @property
    def compile_with(self) -> dict[str, Any] | None:
        """Arguments of `torch.compile` for the forward of decodes; None if decodes are not compiled."""
        return compile_arguments(self.torch_compile)

    @property
    def padded_sizes(self) -> list[int]:
        """Numbers of sequences that decodes are padded to, ascending; the last is `max_batch`."""
        return decode_sizes_of(self.max_batch, self.decode_sizes)


def config_of(tokenizer: Any, config: BatcherConfig | None, settings: dict[str, Any]) -> BatcherConfig:
    """The config of a batcher's arguments, made from `settings` if the caller gave these one by one.

    Raises:
        TypeError: the arguments hold no config, or two; the message says what to give.
    """
    if isinstance(tokenizer, BatcherConfig):
        raise TypeError("the BatcherConfig was given as the tokenizer; give it by name, as config=...")
    if isinstance(config, BatcherConfig):
        if settings:
            raise TypeError(f"a config and {', '.join(settings)} were given; put all settings into the BatcherConfig")
        return config
    if config is not None:
        raise TypeError(f"config is {config!r}; it must be a BatcherConfig, such as BatcherConfig(max_batch=8)")
    if not settings:
        raise TypeError("ContinuousBatcher needs a config, such as BatcherConfig(max_batch=8)")
    warnings.warn(
        f"keyword arguments of ContinuousBatcher work in this release only: give {', '.join(settings)} in a config, "
        "as in ContinuousBatcher(model, tokenizer, BatcherConfig(max_batch=8))",
        DeprecationWarning,
        stacklevel=3,
    )
    return BatcherConfig(**settings)
