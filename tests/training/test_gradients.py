"""Clipping of gradients, and models that are not finite, each independent of the others."""

from __future__ import annotations

import math

import pytest
import torch

from mpgelu.training.gradients import limit_gradients


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_each_model_is_clipped_to_its_own_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    before = [torch.randn(*shape, 4, 5, dtype=torch.float64), torch.randn(*shape, 5, dtype=torch.float64)]
    after = [gradient.clone() for gradient in before]
    clip = 5.0
    assert limit_gradients(after, torch.zeros(shape), clip).all()
    start, end = (torch.cat([g.reshape(*shape, -1) for g in part], -1) for part in (before, after))
    torch.testing.assert_close(end, start * (clip / start.norm(dim=-1, keepdim=True)).clamp_max(1))


def test_models_that_are_not_finite_get_no_gradient_and_leave_the_others_alone() -> None:
    gradient = torch.ones(4, 2)
    gradient[2, 1], losses = torch.inf, torch.tensor([1.0, math.nan, 1.0, 1.0])
    assert limit_gradients([gradient], losses, None).tolist() == [True, False, False, True]
    assert gradient.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]


def test_norms_in_double_precision_do_not_overflow() -> None:
    large = torch.full((2,), 1e30)
    assert limit_gradients([large.clone()], torch.zeros(()), 1.0).item() is False
    assert limit_gradients([large], torch.zeros(()), 1.0, torch.float64).item() is True
    torch.testing.assert_close(large.norm(), torch.tensor(1.0))
