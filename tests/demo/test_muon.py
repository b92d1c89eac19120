"""The demo's optimizer."""

import pytest
import torch

from vllm_async_spec.demo.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_singular_values_end_near_one(shape: tuple[int, int], scale: float):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_gradient_of_zeros_moves_nothing():
    assert orthogonal(torch.zeros(4, 6)).count_nonzero() == 0


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_steps_are_those_of_torchs_muon_in_bfloat16(shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=generator), torch.randn((5, *shape), generator=generator)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    both = (
        Muon([ours], momentum=0.85, weight_decay=0.01, lr=0.02),
        torch.optim.Muon([theirs], lr=0.02, momentum=0.85, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for each in both:
            each.step()
    with torch.no_grad():
        assert (ours - theirs).norm() < 0.02 * (ours - start).norm()
