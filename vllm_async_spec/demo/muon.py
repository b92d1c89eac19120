"""The Muon optimizer (Jordan et al., 2024) in float32, for the matrices of the demo's models."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor

# Of the quintic iteration: they drive every singular value near 1 in five rounds. kellerjordan.github.io/posts/muon
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Step each matrix by its momentum with all singular values near 1, scaled to the length of a step of AdamW.

    `torch.optim.Muon` computes the same in bfloat16, which takes ten times as long on a CPU without such instructions.
    """

    def __init__(self, matrices: Iterable[Tensor], momentum: float, weight_decay: float, lr: float = 1e-3) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the demo has no closures
        """Update every matrix from its gradient, in place."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["mean"] = torch.zeros_like(matrix)
                state["mean"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(state["mean"], momentum))
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * lr * sqrt(max(matrix.shape)))  # 0.2: what AdamW's steps measure


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring the singular values of a float32 matrix, [rows, columns], between about 0.7 and 1.2, whatever its scale."""
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(_ROUNDS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return wide if matrix.size(0) <= matrix.size(1) else wide.T
