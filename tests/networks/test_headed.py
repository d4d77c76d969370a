"""Networks whose last layer alone is random: the moments of their layers in float64, of any type."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, GaussianLinear, GaussianMixture, Linear, Stack, native
from mpgelu.estimators.pupil import compact_network
from mpgelu.layers import Beside, SiLU
from mpgelu.networks.headed import headed_form

NEEDS_KERNELS = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


def stacked(hidden: tuple[int, ...], models: int) -> Stack:
    torch.manual_seed(0)
    networks = [compact_network(3, hidden, GaussianMixture(2)) for _ in range(models)]
    for network in networks:
        nn.init.normal_(network[-1].get_submodule("0").get_parameter("log_weight_variance"))
    return Stack(networks).requires_grad_(False)


@NEEDS_KERNELS
@pytest.mark.parametrize("kind", [DiagonalMoments, FactoredMoments])
@pytest.mark.parametrize(("hidden", "models"), [((20, 9), 1), ((20, 9), 3), ((7,), 1)])
def test_moments_are_those_of_the_layers_in_float64(
    kind: type[mp.Moments], hidden: tuple[int, ...], models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, x = stacked(hidden, models), 2 * torch.randn(models, 70, 3)
    exact = copy.deepcopy(stack).double()(kind.certain(x.double()))
    monkeypatch.setattr(stack, "forward", None)  # the layers are not run one by one
    found = stack.of_known(x, kind)
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5)
    assert (found.variance[..., 1:] == 0).all()


@NEEDS_KERNELS
def test_changed_weights_are_seen() -> None:
    stack, x = stacked((8,), 1), torch.randn(1, 5, 3)
    before = stack.of_known(x, FactoredMoments)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(1.5)
    after = stack.of_known(x, FactoredMoments)
    assert (after.mean != before.mean).all()
    torch.testing.assert_close(after.mean, stack(FactoredMoments.certain(x)).mean)


def test_training_and_other_networks_are_left_to_torch() -> None:
    def headed(*head: nn.Module) -> nn.Sequential:
        return nn.Sequential(Linear(3, 4), SiLU(), Beside(*head))

    assert headed_form(headed(GaussianLinear(4, 1), Linear(4, 2))) is not None
    assert headed_form(headed(Linear(4, 1), Linear(4, 2))) is None
    assert headed_form(headed(GaussianLinear(4, 1), Linear(4, 2, bias=False))) is None
    assert headed_form(nn.Sequential(Linear(3, 4), mp.ReLU(), Beside(GaussianLinear(4, 1), Linear(4, 2)))) is None
    assert headed_form(nn.Sequential(mp.Dropout(0.1), SiLU(), Beside(GaussianLinear(3, 1), Linear(3, 2)))) is None
    assert headed_form(mp.network(3)) is None
    stack, x = stacked((5,), 1), torch.randn(1, 4, 3)
    assert stack.of_known(x.clone().requires_grad_(), FactoredMoments).mean.requires_grad
    assert stack.requires_grad_().of_known(x, FactoredMoments).mean.requires_grad
    assert stack.double().of_known(x.double(), FactoredMoments).mean.dtype == torch.float64
