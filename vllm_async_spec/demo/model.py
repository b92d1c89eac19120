"""A Llama decoder in plain torch, small enough to train on two CPU cores while you wait.

The modules are named so that `state_dict()` has exactly the keys of Hugging Face's `LlamaForCausalLM`: the weights can
be saved as they are and loaded by transformers or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROPE_THETA = 10_000.0
RMS_EPS = 1e-5


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model; every attention head has its own keys and values (no grouping)."""

    hidden: int
    heads: int
    layers: int
    intermediate: int
    head_dim: int = 64  # the smallest head that the GPU attention kernels all accept
    vocab: int = 272  # 256 bytes and <eos>, rounded up to a multiple of 16
    max_positions: int = 2048


class TinyLlama(nn.Module):
    """A causal language model over `shape.vocab` tokens, with weights uninitialised until `initialise`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights afresh from `generator` (a CPU generator), in float32, whatever device they live on.

        Matrices are normal with variance 1 / fan-in, embeddings normal with variance 1, norm gains one.
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
            else:
                scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
                with torch.no_grad():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Score every possible next token at every position.

        Args:
            tokens: [batch, length] int64, ids below `shape.vocab`.
            positions: [batch, length] int64, strictly increasing along the length; gaps are allowed.

        Returns:
            [batch, length, vocab] logits, in the dtype of the weights.
        """
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits


class _Decoder(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, RMS_EPS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        rotation = _rotation(positions, self.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        normed: Tensor = self.norm(x)
        return normed


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, RMS_EPS)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, RMS_EPS)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, length, head_dim]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class _Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotary angle, [batch, 1, length, head_dim] each."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * ROPE_THETA**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate element i with element i + head_dim / 2, which is how Hugging Face stores Llama weights."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
