"""Elementwise functions: the stated error of their quadrature, their limits, and that they stay factored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules import elementwise, leaky_relu, relu
from mpgelu.rules.activations import GELU, Rectifier, Sigmoid, SiLU, SmoothLimit, Softplus, Tanh
from mpgelu.rules.elementwise import Activation, Linearisation
from reference import FUNCTIONS, TYPES, function_marginal, random_covariance

EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
EVERY_FUNCTION = pytest.mark.parametrize("activation", FUNCTIONS, ids=lambda f: type(f).__name__)
SMOOTH = [Tanh(), Sigmoid(), SiLU(), Softplus(), GELU(), SmoothLimit(2.5)]
EVERY_SMOOTH = pytest.mark.parametrize("activation", SMOOTH, ids=lambda f: type(f).__name__)
MEANS = np.linspace(-10, 10, 11)
RATIOS = np.array([-9, -7, -6, -5, -3, -1, -0.3, 0.3, 1, 3, 5, 6, 7, 9])  # of mean to standard deviation
VARIANCES = [1e-9, 1e-4, 0.01, 0.3, 1.0, 4.0, 9.0, 25.0, 100.0, 1e3, 1e4, 1e5, 1e6]


def grid(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    cases = [(m, v) for v in VARIANCES for m in (*MEANS, *(np.sqrt(v) * RATIOS))]
    mean, variance = torch.tensor(cases, dtype=torch.float64).T
    return mean.to(dtype), variance.to(dtype)


def errors(activation: Activation, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Absolute errors of mean, variance and gain over the grid, and the variance of the input."""
    mean, variance = grid()
    function = FUNCTIONS.get(activation, lambda x: np.logaddexp(0, x))
    marginals = [function_marginal(function, *pair) for pair in torch.stack([mean, variance], -1).tolist()]
    wanted = torch.tensor(marginals, dtype=torch.float64)
    fit = activation.linearise(mean.to(dtype), variance.to(dtype))
    found = torch.stack([fit.mean, fit.gain.square() * variance.to(dtype) + fit.rest, fit.gain], -1).double()
    error = (found - wanted).abs()
    return error[:, 0], error[:, 1], error[:, 2]


@EVERY_SMOOTH
def test_quadrature_is_within_its_stated_error(activation: Activation) -> None:
    mean, variance, gain = errors(activation)
    v = torch.ones(()) if isinstance(activation, Tanh | Sigmoid) else grid()[1].clamp_min(1)
    assert (mean / v.sqrt()).max() < 5e-9
    assert (variance / v).max() < 2e-8
    assert gain[grid()[1] > 1e-6].max() < 1e-8  # the reference divides by the standard deviation


@pytest.mark.parametrize("activation", [Softplus(20.0), Softplus(0.05)], ids=str)
def test_the_nodes_follow_the_width_of_the_bend(activation: Softplus) -> None:
    found = activation.linearise(*grid())
    unit = Softplus().linearise(activation.beta * grid()[0], activation.beta**2 * grid()[1])
    size = (activation.beta**2 * grid()[1]).clamp_min(1)
    assert ((activation.beta * found.mean - unit.mean).abs() / size.sqrt()).max() < 1e-8
    assert ((found.gain - unit.gain).abs()).max() < 1e-8
    assert ((activation.beta**2 * found.rest - unit.rest).abs() / size).max() < 4e-8


def test_closed_forms_are_exact() -> None:
    v = grid()[1].clamp_min(1)
    mean, _, gain = errors(GELU())
    assert (mean / v.sqrt()).max() < 1e-12
    assert gain[grid()[1] > 1e-6].max() < 1e-10
    mean, variance, gain = errors(Rectifier(0.2))
    assert max((mean / v.sqrt()).max(), (variance / v).max()) < 1e-11
    assert gain[grid()[1] > 1e-6].max() < 1e-9


@EVERY_FUNCTION
def test_float32_is_as_good_as_its_rounding(activation: Activation) -> None:
    mean, variance = grid()
    double, single = activation.linearise(mean, variance), activation.linearise(mean.float(), variance.float())
    size = mean.square() + variance  # of a second moment
    assert ((single.mean - double.mean).abs() <= 2e-6 * size.sqrt() + 1e-6).all()
    assert ((single.gain - double.gain).abs() <= 4e-6).all()
    assert ((single.rest - double.rest).abs() <= 4e-6 * variance + 1e-9).all()
    assert (single.rest >= 0).all()


@EVERY_FUNCTION
@EVERY_TYPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_zero_variance_it_is_the_plain_function(activation: Activation, kind: Any, dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 33, dtype=dtype).requires_grad_()
    plain = activation(x)
    for value in (kind.certain(x), kind.of(x, torch.zeros(33, dtype=dtype))):
        out = elementwise(value, activation)
        torch.testing.assert_close(out.mean, plain, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-15)
        assert torch.equal(out.covariance, torch.zeros(33, 33, dtype=dtype))
        wanted, found = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (plain, out.mean))
        torch.testing.assert_close(found[x != 0], wanted[x != 0], rtol=1e-5, atol=1e-6)


@EVERY_FUNCTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_and_bounded_at_tiny_variances(activation: Activation, dtype: torch.dtype) -> None:
    """Rounding divided by a standard deviation would show as huge derivatives."""
    exponents = torch.cat([torch.linspace(-40, 1, 83), torch.tensor([-torch.inf])])
    for m in (-3.0, 0.0, 0.7, 5.0):
        variance = (10.0**exponents).to(dtype).requires_grad_()
        mean = torch.full_like(variance, m).requires_grad_()
        out = elementwise(DiagonalMoments(mean, variance), activation)
        for y in (out.mean, out.variance):
            by_mean, by_variance = torch.autograd.grad(y.sum(), (mean, variance), retain_graph=True)
            assert (by_mean.abs() < 10).all()
            assert by_variance.isfinite().all()
            if not isinstance(activation, Rectifier):  # whose mean has the derivative phi(a) / 2 s
                assert (by_variance.abs() < 2).all()


@EVERY_FUNCTION
@EVERY_TYPE
def test_extreme_numbers_stay_finite_in_float32(activation: Activation, kind: Any) -> None:
    pairs = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], [0.0, 1e-30, 1.0, 1e30])))
    mean, variance = pairs[:, 0].clone().requires_grad_(), pairs[:, 1].clone().requires_grad_()
    out = elementwise(kind.of(mean, variance), activation)
    assert out.mean.isfinite().all()
    assert out.variance.isfinite().all()
    gradients = torch.autograd.grad(out.mean.sum() + out.variance.sum(), (mean, variance))
    assert all(gradient.isfinite().all() for gradient in gradients)


@EVERY_FUNCTION
def test_factored_moments_stay_factored_and_keep_the_names_of_their_sources(activation: Activation) -> None:
    value = FactoredMoments.of(torch.randn(5, 4), random_covariance(5, 4).float())
    out = elementwise(value, activation)
    assert isinstance(out, FactoredMoments)
    assert [block.variance is source.variance for block, source in zip(out.blocks, value.blocks, strict=True)] == [True]
    dense = elementwise(FullMoments.from_moments(value), activation)
    torch.testing.assert_close(out.covariance, dense.covariance, rtol=1e-5, atol=1e-6)


def test_a_certain_value_gets_no_residual() -> None:
    out = elementwise(FactoredMoments.certain(torch.randn(5, 4)), Tanh())
    assert out.blocks == ()
    assert out.residual is None
    assert isinstance(leaky_relu(FactoredMoments.certain(torch.randn(5, 4))), FactoredMoments)


@EVERY_SMOOTH
def test_covariance_by_the_gain_is_close_to_sampling(activation: Activation) -> None:
    """First order: what is missing is of second order in the correlation."""
    draws = 200_000
    covariance = torch.tensor([[0.5, 0.3], [0.3, 0.8]], dtype=torch.float64)
    mean = torch.tensor([0.4, -0.3], dtype=torch.float64)
    out = elementwise(FullMoments.of(mean, covariance), activation)
    h = mean + torch.randn(draws, 2, dtype=torch.float64) @ torch.linalg.cholesky(covariance).mT
    sampled = torch.cov(activation(h).mT)
    scale = out.variance.sqrt().prod()
    assert (sampled - out.covariance).abs()[0, 1] < 0.1 * scale
    torch.testing.assert_close(out.variance, sampled.diagonal(), rtol=0.02, atol=0)


# Leaky ReLU


@EVERY_TYPE
@pytest.mark.parametrize("covariance", ["exact", "gain"])
def test_leaky_relu_of_slope_zero_is_relu_and_of_slope_one_nothing(kind: Any, covariance: Any) -> None:
    value = kind.of(torch.randn(5, 4).double(), random_covariance(5, 4))
    rectified, same = leaky_relu(value, 0.0, covariance), leaky_relu(value, 1.0, covariance)
    torch.testing.assert_close(rectified.mean, relu(value).mean)
    torch.testing.assert_close(rectified.variance, relu(value).variance)
    if covariance == "exact":
        torch.testing.assert_close(rectified.covariance, relu(value).covariance)
    torch.testing.assert_close(same.mean, value.mean)
    torch.testing.assert_close(same.covariance, value.covariance)


def test_the_gain_keeps_marginals_and_factors() -> None:
    value = FactoredMoments.of(torch.randn(5, 4).double(), random_covariance(5, 4))
    exact, gain = leaky_relu(value, 0.1), leaky_relu(value, 0.1, "gain")
    assert isinstance(exact, FullMoments)
    assert isinstance(gain, FactoredMoments)
    torch.testing.assert_close(gain.variance, exact.variance)
    assert 1e-3 < (gain.covariance - exact.covariance).abs().max() < 0.2


class Unlinearised(Tanh):
    """Fails if anything is integrated."""

    def linearise(self, mean: Tensor, variance: Tensor) -> Linearisation:
        raise AssertionError("a certain value was integrated")


@EVERY_TYPE
def test_certain_values_are_not_integrated(kind: Any) -> None:
    x = torch.randn(4, 3)
    out = elementwise(elementwise(kind.certain(x), Unlinearised()), Unlinearised())
    assert torch.equal(out.mean, x.tanh().tanh())
    assert torch.equal(out.covariance, torch.zeros(4, 3, 3))


@pytest.mark.parametrize("kind", [DiagonalMoments, FullMoments])
def test_values_that_only_seem_certain_are_integrated(kind: Any) -> None:
    """A gradient by a variance of zero, half the second derivative of the function, and a variance that is NaN."""
    x, variance = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match="integrated"):
        elementwise(kind.of(x, variance), Unlinearised())
    with torch.no_grad():
        assert torch.equal(elementwise(kind.of(x, variance), Unlinearised()).mean, x.tanh())
    one_unknown = DiagonalMoments(x, torch.full_like(x, torch.nan).where(x == x[0, 0], 0))
    assert elementwise(one_unknown, Tanh()).variance[0, 0].isnan()


@EVERY_SMOOTH
@pytest.mark.parametrize("shape", [(700, 9), (5, 3000), (40, 7, 50)])
def test_many_units_are_integrated_in_parts_with_the_same_result(
    activation: Activation, shape: tuple[int, ...]
) -> None:
    mean, variance = torch.randn(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)
    mean.requires_grad_(), variance.requires_grad_()
    in_parts = activation.linearise(mean, variance)
    at_once = activation.linearise(mean.flatten(), variance.flatten())  # a single row is never divided
    for part, whole in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(part.flatten(), whole)
    wanted = torch.autograd.grad(torch.cat(at_once).sum(), (mean, variance))
    found = torch.autograd.grad(torch.cat(in_parts).sum(), (mean, variance))
    torch.testing.assert_close(found, wanted)


def test_the_parts_fit_into_the_cache() -> None:
    seen: list[int] = []

    class Watched(Tanh):
        def slope(self, x: Tensor) -> Tensor:
            seen.append(x[..., 0].numel())
            return super().slope(x)

    Watched().linearise(torch.zeros(700, 9), torch.ones(700, 9))
    assert sum(seen) == 6300
    assert max(seen) <= 1024
