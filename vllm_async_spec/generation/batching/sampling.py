"""Tokens from logits, on the device: greedily, or by sampling that depends only on a request's seed and position.

Sampling adds Gumbel noise to the logits and takes the largest, which draws from the softmax (Gumbel, 1954). The noise
is a hash of seed, position and token (the finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014). So the noise
does not depend on which rows share a step, and a row computed twice draws the same token twice.
"""

from __future__ import annotations

import torch

from vllm_async_spec.generation.batching.request import UNDRAWN

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
# One bit less than a float32's significand, so that adding one half is never rounded up to 1.
_BITS = 23


def sample(
    logits: torch.Tensor, temperature: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Choose one token for each row.

    Args:
        logits: (rows, vocabulary) floating point.
        temperature: (rows,) float32, 0 where a row is greedy; None if all are.
        seeds: (rows,) int64.
        positions: (rows,) int, position of the fed token that gave each row's logits.

    Returns:
        (rows,) int64; `UNDRAWN` where a row is not greedy and its logits give no probabilities: one is NaN or infinite,
        or all are minus infinity.
    """
    greedy = logits.argmax(-1)
    if temperature is None:
        return greedy
    # Greedy rows are divided by 1, and their draws are dropped.
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    largest, drawn = (scaled + gumbel_noise(seeds, positions, logits.shape[-1])).max(-1)
    drawn = torch.where(largest.isfinite(), drawn, UNDRAWN)  # the largest of a row with NaN is NaN
    return torch.where(temperature > 0, drawn, greedy)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(rows, vocabulary) float32 on the device of `seeds`: independent draws of the standard Gumbel distribution.

    `seeds` are (rows,) int64, `positions` (rows,) int.
    """
    rows = _mixed(_mixed(seeds) + positions.long())
    tokens = torch.arange(vocabulary, device=seeds.device)
    bits = _shifted(_mixed(rows[:, None] + tokens * _GOLDEN), 64 - _BITS)
    # Never 0 or 1, so no logarithm is infinite.
    uniform = (bits.float() + 0.5) / (1 << _BITS)
    return -(-uniform.log()).log()


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = bits + _GOLDEN
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right with zeros from the left; the shift of int64 copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
