"""Dummy weights under which attention affects the next token, so that a wrong length shows in the tokens.

Attentive weights keep the arrangement of `acceptance` as a tendency. The layers' matrices are noise of the usual size,
so that attention moves the residual stream as far as the embeddings do. The head gets a random part, through which that
movement changes the logits. The successor still wins more often than not, and the drafter relies on this.

A router of random weights would make a small difference of rounding a large one: it decides between experts that are
almost equal. So each token has a class, and in each layer a class ranks all experts, with a wide gap between any two.
"""

import math

import torch
from torch import Tensor, nn

from benchmarks.acceptance import (
    MARK,
    SEED,
    VOTE,
    fill_norm,
    fill_rows,
    is_embedding,
    is_head,
    is_projection,
    named_weights,
)

_SEED = SEED + 1
_GAIN = 1.5
"""Sharp enough that a token attends to a few others, and not to the mean of all."""
_MOVED = 1.25
"""About how far all layers together move the residual stream, next to embeddings of 1."""
_LEAD = 1.25
"""How far the successor is ahead of the best of the others on average, in standard deviations of their logits."""
_QUERY_KEY_NORMS = {"q_norm", "k_norm"}
"""Norms that undo the gain of the matrices before them."""
_ROUTERS = {"gate", "router"}
_CLASSES = list(range(2, 10))
"""Hidden dimensions of which one tells a token's class. Only embeddings write them, and only routers read them."""
_CLASS = math.sqrt(len(_CLASSES))
"""Length of a class, so that embeddings keep theirs."""
_RANKED = 2.0
"""How far an expert's logit is ahead of the next, where the residual stream is as long as an embedding."""
_OUTPUTS = {"o_proj", "out_proj", "down_proj", "w2_weight"}
"""Matrices that write into the residual stream."""


@torch.no_grad()
def make_attentive(
    model: nn.Module, vocabulary: int, *, votes: bool = False, ranks: int = 1, experts: bool = False
) -> None:
    """Add random parts to the arranged weights of a target, and to the head of a drafter that may share it.

    `acceptance.arrange` must have arranged the model. A draft model (`votes`) has its own head and stays unchanged.
    With `experts` the target has routers. Its drafter gets the same embeddings and head.

    Of several tensor-parallel ranks, `model` is one rank's part. All ranks get the same noise in their layers: a matrix
    that every rank holds whole must be equal on all of them. Heads then repeat from rank to rank, so each rank writes
    its share, 1 / `ranks`, of what one rank would write, and vLLM adds the shares.
    """
    if votes:
        return
    weights = named_weights(model)
    drafts = any(is_projection(name) for name, _ in weights)
    numbers = [int(part) for name, _ in model.named_parameters() for part in name.split(".") if part.isdigit()]
    layers = max(numbers, default=0) + 1
    reserved = [MARK, VOTE, *(_CLASSES if experts else ())]
    for index, (name, weight) in enumerate(weights):
        if is_head(name):
            _attentive_head(weight, vocabulary)
            if experts:
                weight[:, _CLASSES] = 0
        elif is_embedding(name):
            if experts:
                _classify(weight, vocabulary)
        elif drafts:
            continue
        elif weight.ndim == 1 and "norm" in name:
            fill_norm(model, weight, _GAIN if name in _QUERY_KEY_NORMS else 1)
        elif name in _ROUTERS and weight.ndim > 1:
            _rank_experts(weight, _SEED + index)
        elif weight.ndim > 1 and not name.endswith("bias"):  # experts have a bias each
            gain = _GAIN * _scale(name, layers, ranks) / math.sqrt(weight.shape[-1])
            weight.copy_(_noise(weight, _SEED + index) * gain)
            if name in _OUTPUTS:
                weight[..., reserved, :] = 0  # no layer may write them


def _scale(name: str, layers: int, ranks: int) -> float:
    return 1 / (math.sqrt(2 * layers) * ranks) if name in _OUTPUTS else 1.0


def _classify(weight: nn.Parameter, vocabulary: int) -> None:
    """Write a class into each token's embedding, which may be a row of another rank."""
    arranged = weight.clone()
    tokens = torch.arange(vocabulary, device=weight.device)
    rows = weight.new_zeros(vocabulary, weight.shape[1])
    rows[tokens, _CLASSES[0] + tokens % len(_CLASSES)] = _CLASS
    fill_rows(weight, rows)
    arranged[:, _CLASSES] = weight[:, _CLASSES]
    weight.copy_(arranged)


def _rank_experts(weight: nn.Parameter, seed: int) -> None:
    """Let a router, [experts, hidden], prefer the experts of each class in an order of its own."""
    ranks = _noise(weight[:, _CLASSES], seed).argsort(0).argsort(0)
    weight.zero_()
    weight[:, _CLASSES] = -ranks.to(weight.dtype) * (_RANKED / _CLASS)


def _attentive_head(weight: nn.Parameter, vocabulary: int) -> None:
    """Shrink the successor's part until it leads by `_LEAD`, and add a random part: the rank's rows of the whole."""
    hidden, arranged = weight.shape[1], weight.clone()
    best = math.sqrt(2 * math.log(vocabulary))
    share = min(1.0, (best + _LEAD) * math.sqrt(1 + _MOVED**2) / math.sqrt(hidden))
    rows = weight.new_zeros(vocabulary, hidden)
    rows[:-1] = _noise(rows[:-1], _SEED)
    rows[:, [MARK, VOTE]] = 0
    fill_rows(weight, rows)
    stranger = arranged[:, VOTE, None] != 0  # may be a row of another rank
    weight.copy_(torch.where(stranger, arranged, arranged * share + weight))
    weight.div_(math.sqrt(hidden))  # logits of the others spread by 1, so that gaps between them have a unit


def _noise(like: Tensor, seed: int) -> Tensor:
    """Standard normal, of the same shape, type and device."""
    source = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=source, device=like.device).to(like.dtype)
