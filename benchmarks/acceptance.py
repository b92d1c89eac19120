"""Dummy weights that give a drafter a set share of accepted drafts.

A model with random weights accepts almost no draft, and a benchmark without accepted drafts measures only half of
speculative decoding. This module arranges existing weights and leaves every matrix dense:

- Rows of the embeddings are random directions, far longer than anything that layers of dummy weights (all within
  0.001) add to them: the residual stream that leaves the last layer is the token's embedding.
- The head's row for `successor[i]` is the embedding of `i`, so that the target always generates `successor[i]` after
  `i`. The successors form one long cycle.
- Two hidden dimensions are reserved. In the target's embeddings `MARK` is +1 for tokens after which the drafter must be
  wrong, and -1 for the others. The head ignores `MARK`. `VOTE` is zero in these embeddings. The *stranger* is the one
  token that is no successor; its row of the head has a large weight for `VOTE`.
- The drafter would otherwise generate the target's tokens, so the mark is copied into its `VOTE`. In EAGLE and MTP the
  projection of the input does this, and also copies the embedding. EAGLE-3's projection does not see the embedding, so
  its attention does this, in which each token attends to itself alone. A draft model's own embeddings hold the mark.

Marks are spread over the cycle at random, and every step begins at a token that no earlier step has read. So each draft
is accepted with probability `share`, independently of the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

MARK, VOTE = 0, 1
SEED = 20

_EMBEDDINGS = {"embed_tokens", "embedding"}
_HEADS = {"lm_head", "head"}
_NORMS = {"norm", "enorm", "hnorm"}
"""Norms outside the layers: of the last hidden state, and of the inputs of a drafter's projection."""
_PROJECTIONS = {"fc", "eh_proj"}
"""Projections from (embedding, target's hidden state) to the drafter's hidden state, of EAGLE and of DeepSeek's MTP;
EAGLE-3's takes three of the target's hidden states."""
_LOOK = 2.0
"""Scale of the query that puts a token's own key far ahead of the others', so that it attends almost only to itself."""


def named_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A model's parameters, each with the last part of its name, without `weight`."""
    return [(name.removesuffix(".weight").split(".")[-1], weight) for name, weight in model.named_parameters()]


def is_embedding(name: str) -> bool:
    """Whether this last part of a parameter's name is that of the embeddings of tokens."""
    return name in _EMBEDDINGS


def is_head(name: str) -> bool:
    """Whether this last part of a parameter's name is the head's."""
    return name in _HEADS


def is_projection(name: str) -> bool:
    """Whether this last part of a parameter's name is that of the projection of a drafter's input."""
    return name in _PROJECTIONS


class ArrangementError(ValueError):
    """These weights can't be arranged; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Orbit:
    """The successor of each token, and the tokens after which the drafter is wrong."""

    successor: Tensor
    """[vocabulary - 1] int64; the vocabulary's last token, the stranger, has no defined successor."""
    wrong: Tensor
    """[vocabulary - 1] bool."""

    @property
    def stranger(self) -> int:
        """The token that the drafter generates when it must be wrong."""
        return len(self.successor)


def make_orbit(vocabulary: int, share: float) -> Orbit:
    """One cycle through all tokens but the stranger, and `1 - share` of them marked.

    Raises:
        ArrangementError: `share` is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ArrangementError(f"an acceptance of {share} can't be arranged; it must be between 0 and 1")
    source = torch.Generator().manual_seed(SEED)
    tokens = vocabulary - 1
    order = torch.randperm(tokens, generator=source)
    successor = torch.empty(tokens, dtype=torch.int64)
    successor[order] = order.roll(-1)
    wrong = torch.zeros(tokens, dtype=torch.bool)
    wrong[torch.randperm(tokens, generator=source)[: round((1 - share) * tokens)]] = True
    return Orbit(successor, wrong)


@torch.no_grad()
def arrange(model: nn.Module, vocabulary: int, share: float, *, votes: bool = False, head_scale: float = 1.0) -> None:
    """Arrange the dummy weights of a target or of a drafter, in place.

    A target and the drafters of its hidden size get the same embeddings and head. So vLLM may let them share either
    matrix.

    Args:
        model: a causal language model, its modules named as in vLLM and transformers; of several ranks, one rank's
            part, whose layers are split as vLLM does.
        vocabulary: tokens of the model; matrices may have more rows, as padding.
        share: probability that a draft is accepted.
        votes: whether the model's own embeddings hold the marks: it is a draft model.
        head_scale: factor of all logits. At 1 a token's successor is so far ahead that sampling always draws it.

    Raises:
        ArrangementError: `share` is not between 0 and 1, or head and embeddings are one matrix.
    """
    weights = named_weights(model)
    embeddings = next(weight for name, weight in weights if is_embedding(name))
    own_head = getattr(model, "lm_head", None)
    if own_head is not None and own_head.weight is embeddings:
        raise ArrangementError(
            "the head is the embeddings' own matrix, so the target can only repeat its last token; "
            "set tie_word_embeddings to false in config.json"
        )
    orbit = make_orbit(vocabulary, share)
    hidden, device = embeddings.shape[1], embeddings.device
    rows = _directions(vocabulary, hidden, device)
    marks = torch.full((vocabulary,), -1.0, device=device)
    marks[: orbit.stranger][orbit.wrong.to(device)] = 1
    if any(is_projection(name) and weight.shape[1] == 3 * hidden for name, weight in weights):
        _hand_on_by_attention(weights, hidden)
    for name, weight in weights:
        if name in _HEADS:
            head = torch.zeros_like(rows)
            head[orbit.successor.to(device)] = rows[: orbit.stranger]
            head *= head_scale
            head[orbit.stranger, VOTE] = 4 * hidden * head_scale  # four times the logit of a token's successor
            fill_rows(weight, head)
        elif name in _NORMS:
            fill_norm(model, weight, 1)
        elif name in _PROJECTIONS and weight.shape[1] == 2 * hidden:
            weight[:, :hidden] += torch.eye(hidden, dtype=weight.dtype, device=device)
            weight[VOTE] = 0
            weight[VOTE, MARK] = 1
    rows[:, MARK] = marks
    if votes:
        rows[:, VOTE] = marks
    fill_rows(embeddings, rows)


def fill_rows(weight: nn.Parameter, rows: Tensor) -> None:
    """Write a row for each token, and zeros into padding; of several ranks, each keeps its own part."""
    if len(weight) >= len(rows):
        weight[: len(rows)] = rows.to(weight.dtype)
        weight[len(rows) :] = 0
    else:
        # vLLM's, of a matrix that is split by tokens.
        weight.weight_loader(weight, rows.to(weight.dtype))  # type: ignore[attr-defined]


def fill_norm(model: nn.Module, weight: nn.Parameter, scale: float) -> None:
    """Make a norm scale by `scale`; a norm of Gemma's kind, as Qwen3-Next's are, adds 1 to its weight."""
    adds_one = any(
        "Gemma" in type(module).__name__ for module in model.modules() if weight is getattr(module, "weight", None)
    )
    weight.fill_(scale - adds_one)


def _hand_on_by_attention(weights: list[tuple[str, nn.Parameter]], hidden: int) -> None:
    """Make the layer of an EAGLE-3 drafter, whose heads are as wide as its hidden size, copy embedding and mark."""
    for name, weight in weights:
        if name == "input_layernorm":
            weight.fill_(1)
        elif name == "qkv_proj":  # from (embedding, hidden state)
            same = torch.eye(hidden, dtype=weight.dtype, device=weight.device)
            weight[:, :hidden] += torch.cat((_LOOK * same, same, same))
        elif name == "o_proj":
            weight[:] += torch.eye(hidden, dtype=weight.dtype, device=weight.device)
            weight[VOTE] = 0
            weight[VOTE, MARK] = 1


def _directions(vocabulary: int, hidden: int, device: torch.device) -> Tensor:
    """Random rows of length sqrt(hidden), [vocabulary, hidden] float32, with nothing in the reserved dimensions."""
    rows = torch.randn(vocabulary, hidden, device=device, generator=torch.Generator(device).manual_seed(SEED))
    rows[:, [MARK, VOTE]] = 0
    return rows.mul_(hidden**0.5 / rows.norm(dim=1, keepdim=True))
