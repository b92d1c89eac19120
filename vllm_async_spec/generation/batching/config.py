"""The settings of a `ContinuousBatcher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.generation.batching.step_slots import decode_sizes_of
from vllm_async_spec.generation.compiling import Compile, compile_arguments

_POSITIVE = (
    "max_batch",
    "draft_tokens",
    "max_length",
    "page_size",
    "cache_tokens",
    "max_prefill_tokens",
    "max_prefills",
    "steps_ahead",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """Settings of a `ContinuousBatcher`, checked when they are given; what they need of the model, by the batcher.

    Raises:
        ValueError: a setting can't be; the message names it.
    """

    max_batch: int
    """Sequences that run at once."""
    draft_tokens: int | None = None
    """Drafts of each sequence and step; 4 if None and there is a draft model."""
    max_length: int | None = None
    """Tokens of a sequence, prompt and generated; 2048, or as many positions as the models have, if None."""
    page_size: int | None = None
    """Tokens in a page of the KV cache; what suits the attention backend if None."""
    cache_tokens: int | None = None
    """Tokens that the cache holds in all; enough for `max_batch` sequences of `max_length` if None."""
    max_prefill_tokens: int = 2048
    """Prompt tokens in a step; a longer prompt takes several."""
    max_prefills: int = 8
    """Prompts in a step.

    With 1, and one decode size, what else is in the batch changes no bit of a sequence's logits where a kernel's rows
    are independent of each other, as they are in those used here.
    """
    attention: str = "auto"
    """`auto`, `FLASH_ATTN`, `FLASHINFER_TRTLLM` or `TORCH_REFERENCE`."""
    eos_token_id: int | Sequence[int] | None = None
    """Tokens that end a sequence; those of the model's generation configuration if None."""
    decode_sizes: Sequence[int] | None = None
    """Numbers of sequences that decodes are padded to; powers of two and `max_batch` if None."""
    cuda_graphs: bool | None = None
    """Whether decodes are captured, one graph for each size and slot; on a CUDA device if None."""
    torch_compile: Compile = False
    """Whether the forward of decodes is compiled, for each size once, when the batcher is made.

    A name chooses the backend, a dict has arguments of `torch.compile`. Its kernels round in their own way.
    """
    steps_ahead: int = 1
    """Steps launched before the tokens of one are read; more than 1 learns later, and seldom wins."""
    synchronous: bool = False
    """Wait for each step before the next is planned, as the specification of what must come out."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        compile_arguments(self.torch_compile)
        decode_sizes_of(self.max_batch, self.decode_sizes)

    @property
    def compile_with(self) -> dict[str, Any] | None:
        """Arguments of `torch.compile` for the forward of decodes, None where they are not compiled."""
        return compile_arguments(self.torch_compile)

    @property
    def padded_sizes(self) -> list[int]:
        """Numbers of sequences that decodes are padded to, ascending; the last is `max_batch`."""
        return decode_sizes_of(self.max_batch, self.decode_sizes)
