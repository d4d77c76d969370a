"""The covariance of ReLU, exact and by DVI, against quadrature."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad
from scipy.stats import multivariate_normal
from torch import Tensor

from mpgelu import FullMoments, InputError
from mpgelu.rules import leaky_relu, relu
from mpgelu.rules.relu import Covariance
from reference import MOMENTS, Array, relu_pair

RATIOS = [-4.0, -2.5, -1.0, -0.3, 0.0, 0.7, 1.5, 3.0, 4.0]
CORRELATIONS = [-1.0, -0.999, -0.95, -0.8, -0.5, -0.1, -0.029, 0.0, 1e-6, 0.031, 0.3, 0.7, 0.95, 0.999, 1.0]


@cache
def grid() -> tuple[Array, Array]:
    """Ratios and correlation (a1, a2, rho) of every case, and the covariance by quadrature."""
    cases = np.array(list(itertools.product(RATIOS, RATIOS, CORRELATIONS)))
    return cases, np.array([relu_pair(*case) for case in cases])


def pair_moments(cases: Tensor, scale: float = 1.0) -> FullMoments:
    ones = torch.ones_like(cases[:, 2])
    covariance = torch.stack([ones, cases[:, 2], cases[:, 2], ones], -1).reshape(-1, 2, 2)
    return FullMoments(scale * cases[:, :2], scale**2 * covariance)


def errors(covariance: Covariance, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    cases, wanted = grid()
    out: FullMoments = relu(pair_moments(torch.tensor(cases, dtype=dtype), scale), covariance)
    return (out.covariance[:, 0, 1].double() / scale**2 - torch.tensor(wanted)).abs()


@pytest.mark.parametrize(("a1", "a2", "rho"), [(0.5, -0.3, 0.6), (-1.0, 1.5, -0.8)])
def test_the_reference_itself_matches_double_quadrature(a1: float, a2: float, rho: float) -> None:
    density = multivariate_normal([a1, a2], [[1, rho], [rho, 1]]).pdf
    product = dblquad(lambda y, x: x * y * density((x, y)), 0, 9, 0, 9, epsabs=1e-7)[0]
    means = [m * 0.5 * math.erfc(-m / math.sqrt(2)) + math.exp(-m * m / 2) / math.sqrt(2 * math.pi) for m in (a1, a2)]
    assert relu_pair(a1, a2, rho) == pytest.approx(product - means[0] * means[1], abs=1e-6)


def test_exact_covariance_is_exact() -> None:
    assert errors("exact").max() < 1e-5


def test_exact_covariance_in_float32() -> None:
    assert errors("exact", torch.float32).max() < 1e-5


@pytest.mark.parametrize("scale", [1e-5, 1e5])
def test_covariance_scales_with_the_units(scale: float) -> None:
    torch.testing.assert_close(errors("exact", scale=scale), errors("exact"), rtol=0, atol=1e-12)
    torch.testing.assert_close(errors("dvi", scale=scale), errors("dvi"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dvi_is_within_its_known_error_and_no_closer(dtype: torch.dtype) -> None:
    error, correlation = errors("dvi", dtype), torch.tensor(grid()[0][:, 2]).abs()
    assert 1e-3 < error.max() < 1.5e-2
    assert error[correlation <= 0.95].max() < 1.3e-2
    assert error[correlation == 0].max() < 1e-9


def test_the_two_agree_on_marginals() -> None:
    moments = pair_moments(torch.tensor(grid()[0]))
    exact, dvi = relu(moments, "exact"), relu(moments, "dvi")
    assert torch.equal(exact.mean, dvi.mean)
    assert torch.equal(exact.variance, dvi.variance)


def test_equal_units_have_their_variance_as_covariance() -> None:
    a = torch.linspace(-4, 4, 33, dtype=torch.float64)
    out = relu(pair_moments(torch.stack([a, a, torch.ones_like(a)], -1)))
    torch.testing.assert_close(out.covariance[:, 0, 1], out.variance[:, 0], rtol=0, atol=1e-5)


def test_independent_units_stay_independent() -> None:
    mean = torch.randn(3, 6, dtype=torch.float64)
    for covariance in ("exact", "dvi"):
        out = relu(FullMoments.of(mean, torch.rand_like(mean)), covariance)
        off_diagonal = out.covariance - torch.diag_embed(out.variance)
        assert torch.equal(off_diagonal, torch.zeros_like(off_diagonal))


@pytest.mark.parametrize("covariance", ["exact", "dvi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_at_full_correlation_are_finite(covariance: Covariance, dtype: torch.dtype) -> None:
    cases = torch.tensor(grid()[0][np.abs(grid()[0][:, 2]) == 1], dtype=dtype, requires_grad=True)
    out = relu(pair_moments(cases), covariance)
    assert out.covariance.isfinite().all()
    (gradient,) = torch.autograd.grad(out.covariance.sum() + out.mean.sum(), cases)
    assert gradient.isfinite().all()


def test_gradients_by_correlation_follow_price() -> None:
    """The derivative by rho is the probability that both units are positive."""
    cases = torch.tensor(grid()[0][np.abs(grid()[0][:, 2]) < 0.96], requires_grad=True)
    below = relu(pair_moments(cases)).covariance[:, 0, 1]
    (gradient,) = torch.autograd.grad(below.sum(), cases)
    for (a1, a2, rho), slope in zip(cases.tolist(), gradient[:, 2].tolist(), strict=True):
        both = multivariate_normal([0, 0], [[1, rho], [rho, 1]]).cdf([a1, a2])
        assert slope == pytest.approx(both, abs=1e-4)


def test_many_units_and_rows_equal_one_pair_at_a_time() -> None:
    """Larger than any chunk the rule may cut the work into."""
    root = torch.randn(700, 24, 24, dtype=torch.float64)
    moments = FullMoments(torch.randn(700, 24, dtype=torch.float64), root @ root.mT)
    for covariance in ("exact", "dvi"):
        whole = relu(moments, covariance).covariance
        for i, j in ((0, 1), (3, 17), (22, 23)):
            pick = torch.tensor([i, j])
            pair = FullMoments(moments.mean[:, pick], moments.covariance[:, pick][:, :, pick])
            alone = relu(pair, covariance).covariance[:, 0, 1]
            torch.testing.assert_close(alone, whole[:, i, j], rtol=1e-10, atol=1e-11)


def test_one_unit_alone() -> None:
    out = relu(FullMoments(torch.tensor([[0.5]]), torch.tensor([[[1.0]]])))
    assert out.covariance.shape == (1, 1, 1)
    assert torch.equal(out.covariance[..., 0], out.variance)


@pytest.mark.parametrize("kind", [*MOMENTS, "tensor"])
def test_an_unknown_way_to_the_covariance_is_refused(kind: str) -> None:
    value = torch.ones(2, 3) if kind == "tensor" else MOMENTS[kind](2, 3)
    with pytest.raises(InputError, match=r"^relu: covariance must be 'exact' or 'dvi', got 'nonsense'"):
        relu(value, "nonsense")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^leaky_relu: covariance must be 'exact' or 'gain', got 'nonsense'"):
        leaky_relu(value, 0.1, "nonsense")  # type: ignore[arg-type]
