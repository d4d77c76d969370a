"""Limits: certain inputs, unit variance, and numbers at the ends of float32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments import Moments
from mpgelu.rules import relu
from reference import TYPES

LAYERS: dict[str, nn.Module] = {
    "mpgelu": mp.MPGELU(),
    "relu": mp.ReLU(),
    "dvi": mp.ReLU("dvi"),
    "dropout": mp.Dropout(0.3),
    "paper's dropout": mp.Dropout(0.3, rescale=False),
}
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)


def deterministic(nonlinearity: str) -> nn.Sequential:
    """Three linear layers, nothing random but the nonlinearity."""
    return mp.network(5, hidden=(16, 16), nonlinearity=nonlinearity, rate=0)  # type: ignore[arg-type]


@EVERY_TYPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
def test_a_certain_input_gives_exactly_the_deterministic_network(
    kind: Any, nonlinearity: str, dtype: torch.dtype
) -> None:
    net, x = deterministic(nonlinearity).to(dtype), torch.randn(64, 5, dtype=dtype)
    plain, out = net(x), net(kind.certain(x))
    assert torch.equal(out.mean, plain)
    assert torch.equal(out.variance, torch.zeros_like(plain))
    assert torch.equal(out.covariance, torch.zeros(64, 2, 2, dtype=dtype))
    wanted = torch.autograd.grad(plain.square().sum(), list(net.parameters()))
    found = torch.autograd.grad(out.mean.square().sum() + out.covariance.sum(), list(net.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@EVERY_TYPE
@pytest.mark.parametrize("name", LAYERS)
def test_zero_mean_and_zero_variance(kind: Any, name: str) -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    spread = torch.zeros(3, 4, requires_grad=True)
    out = LAYERS[name](kind.of(x, spread))
    assert torch.equal(out.mean, torch.zeros(3, 4))
    assert torch.equal(out.covariance, torch.zeros(3, 4, 4))
    for gradient in torch.autograd.grad(out.mean.sum() + out.covariance.sum(), (x, spread)):
        assert gradient.isfinite().all()


@EVERY_TYPE
@pytest.mark.parametrize("name", ["mpgelu", "relu", "dvi"])
def test_a_certain_unit_is_rectified_exactly_however_small(kind: Any, name: str) -> None:
    x = torch.tensor([[1e-3, 1e-12, 1e-14, 1e-20, -1e-14, -1e-20]])
    assert torch.equal(LAYERS[name](kind.certain(x)).mean, torch.relu(x))


@EVERY_TYPE
def test_some_units_certain_and_some_not(kind: Any) -> None:
    mean = torch.tensor([-2.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    variance = torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    for rule in (mp.MPGELU(), mp.ReLU(), mp.ReLU("dvi")):
        out = rule(kind.of(mean, variance))
        assert out.mean[:3].tolist() == [0, 3, 0]
        assert out.covariance[:3].abs().max() == 0
        assert out.variance[3] > 0


@EVERY_TYPE
def test_unit_variance_gives_gelu_of_the_mean(kind: Any) -> None:
    mean = torch.linspace(-6, 6, 101, dtype=torch.float64)
    covariance = torch.full((101, 101), 0.5, dtype=torch.float64).fill_diagonal_(1)
    out = mp.MPGELU()(kind.of(mean, covariance))
    torch.testing.assert_close(out.mean, F.gelu(mean), rtol=1e-9, atol=1e-15)


@EVERY_TYPE
def test_small_variance_tends_to_relu_and_large_to_half(kind: Any) -> None:
    mean = torch.tensor([[-1.0, 2.0]], dtype=torch.float64)
    small = mp.MPGELU()(kind.of(mean, torch.full_like(mean, 1e-12)))
    torch.testing.assert_close(small.mean, torch.relu(mean), rtol=1e-12, atol=1e-12)
    large = mp.MPGELU()(kind.of(mean, torch.full_like(mean, 1e12)))
    torch.testing.assert_close(large.mean, mean / 2, rtol=1e-5, atol=0)
    torch.testing.assert_close(large.variance, torch.full_like(mean, 5e11), rtol=1e-5, atol=0)


def extreme(kind: Any) -> tuple[Moments, list[Tensor]]:
    """Every pairing of a far mean with a tiny, ordinary or huge variance, half correlated; and its leaves."""
    pairs = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], [0.0, 1e-30, 1.0, 1e30])))
    mean, variance = pairs[None, :, 0].clone().requires_grad_(), pairs[None, :, 1].clone().requires_grad_()
    stddev = pairs[:, 1].sqrt()
    half = 0.5 * (1 - torch.eye(len(pairs))) * stddev[:, None] * stddev
    if kind is FullMoments:
        return FullMoments(mean, torch.diag_embed(variance) + half), [mean, variance]
    if kind is FactoredMoments:  # a common source and an independent rest give the same covariance
        common = mp.moments.Block(stddev[None, None] * 0.5**0.5, torch.ones(1, 1))
        return FactoredMoments(mean, (common,), variance / 2), [mean, variance]
    return DiagonalMoments(mean, variance), [mean, variance]


@EVERY_TYPE
@pytest.mark.parametrize("name", LAYERS)
def test_extreme_numbers_stay_finite_in_float32(kind: Any, name: str) -> None:
    value, leaves = extreme(kind)
    last = mp.Linear(12, 2)
    out = LAYERS[name](value)
    after = last(out)
    for tensor in (out.mean, out.variance, out.covariance, after.mean, after.variance, after.covariance):
        assert tensor.isfinite().all()
    assert (out.variance >= 0).all()
    gradients = torch.autograd.grad(after.mean.sum() + after.covariance.sum(), [*leaves, *last.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@EVERY_TYPE
@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
def test_extreme_numbers_stay_finite_through_a_network(kind: Any, nonlinearity: str) -> None:
    net = mp.network(12, hidden=(8, 8), nonlinearity=nonlinearity, rate=0.1)  # type: ignore[arg-type]
    value, leaves = extreme(kind)
    out = net(value)
    assert out.mean.isfinite().all()
    assert out.covariance.isfinite().all()
    gradients = torch.autograd.grad(out.mean.sum() + out.variance.sum(), [*leaves, *net.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@settings(max_examples=150, deadline=None)
@given(
    mean=st.floats(-1e4, 1e4, width=32).filter(lambda m: m == 0 or abs(m) > 1e-12),
    variance=st.one_of(st.just(0.0), st.floats(-30, 30).map(lambda e: 10.0**e)),
)
def test_bounds_that_hold_for_every_unit(mean: float, variance: float) -> None:
    """Masking or rectifying cannot add second moment; a mean after ReLU is at least the ReLU of the mean."""
    value = DiagonalMoments(torch.tensor([mean]), torch.tensor([variance]))
    for out in (mp.MPGELU()(value), relu(value)):
        second = out.variance + out.mean.square()
        assert out.variance.item() >= 0
        assert second.item() <= (variance + mean * mean) * (1 + 1e-5) + 1e-27
    assert relu(value).mean.item() >= max(mean, 0) * (1 - 1e-6)
