"""Rules against quadrature over everything that is random, and against Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules import dropout, gaussian_linear, linear, mpgelu, relu
from reference import (
    Array,
    Dense,
    bernoulli_rule,
    normal_rule,
    product_rule,
    random_covariance,
    relu_marginal,
    weighted_moments,
)

MEAN, COVARIANCE = np.array([0.7, -0.4]), np.array([[0.9, -0.5], [-0.5, 0.6]])
WEIGHT, WEIGHT_VARIANCE = np.array([[0.3, -1.2], [2.0, 0.5]]), np.array([[0.2, 0.1], [0.4, 0.3]])
BIAS, BIAS_VARIANCE = np.array([0.1, -0.6]), np.array([0.05, 0.15])
HIDDEN = (normal_rule(), normal_rule())


def hidden(points: Array) -> Array:
    """Correlated Gaussian pairs from independent standard ones."""
    return MEAN + points @ np.linalg.cholesky(COVARIANCE).T


def brute_linear() -> Dense:
    points, weights = product_rule(*HIDDEN)
    return weighted_moments(hidden(points) @ WEIGHT.T + BIAS, weights)


def brute_gaussian_linear() -> Dense:
    """Over two inputs, four weights and two biases: every entry of each is drawn in the sum."""
    points, weights = product_rule(*[normal_rule(3)] * 8)
    h, w, b = hidden(points[:, :2]), points[:, 2:6].reshape(-1, 2, 2), points[:, 6:]
    drawn = WEIGHT + np.sqrt(WEIGHT_VARIANCE) * w
    return weighted_moments(np.einsum("pij,pj->pi", drawn, h) + BIAS + np.sqrt(BIAS_VARIANCE) * b, weights)


def brute_mask(keep: Array, scale: float = 1.0) -> Dense:
    points, weights = product_rule(*HIDDEN, *(bernoulli_rule(k, scale) for k in keep))
    return weighted_moments(points[:, 2:] * hidden(points[:, :2]), weights)


def double(*arrays: Array) -> list[Tensor]:
    return [torch.tensor(array) for array in arrays]


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], Dense]]] = {
    "linear": (lambda h: linear(h, *double(WEIGHT, BIAS)), brute_linear),
    "gaussian_linear": (
        lambda h: gaussian_linear(h, *double(WEIGHT, WEIGHT_VARIANCE, BIAS, BIAS_VARIANCE)),
        brute_gaussian_linear,
    ),
    "dropout": (
        lambda h: dropout(h, torch.tensor(0.2, dtype=torch.float64)),
        lambda: brute_mask(np.array([0.8, 0.8]), 1 / 0.8),
    ),
    "dropout of the paper": (
        lambda h: dropout(h, torch.tensor(0.2, dtype=torch.float64), rescale=False),
        lambda: brute_mask(np.array([0.8, 0.8])),
    ),
    "mpgelu": (mpgelu, lambda: brute_mask(ndtr(MEAN / np.sqrt(np.diag(COVARIANCE))))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [FullMoments, FactoredMoments])
def test_exact_rules_match_quadrature(name: str, kind: Any) -> None:
    rule, brute = CASES[name]
    mean, covariance = brute()
    out = rule(kind.of(*double(MEAN, COVARIANCE)))
    np.testing.assert_allclose(out.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(out.covariance, covariance, rtol=1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.005, 0.5, 0.999])
@pytest.mark.parametrize("kind", [DiagonalMoments, FullMoments, FactoredMoments])
def test_a_python_number_is_as_good_a_rate_as_a_tensor(kind: Any, rate: float) -> None:
    value = kind.of(*double(MEAN, COVARIANCE))
    for rescale in (True, False):
        ours = dropout(value, rate, rescale)
        wanted = dropout(value, torch.tensor(rate, dtype=torch.float64), rescale)
        torch.testing.assert_close(ours.mean, wanted.mean, rtol=1e-14, atol=0)
        torch.testing.assert_close(ours.covariance, wanted.covariance, rtol=1e-14, atol=0)


RATIOS = [-40, -20, -12, -8, -5, -3, -1, -0.1, 0, 0.1, 1, 3, 5, 8, 12, 20, 40]


@pytest.mark.parametrize("variance", [1e-6, 1.0, 1e6])
def test_mpgelu_marginals_match_their_mixture(variance: float) -> None:
    a, s = np.array(RATIOS, dtype=float), math.sqrt(variance)
    mean, spread = double(a * s, np.full_like(a, variance))
    out = mpgelu(DiagonalMoments(mean, spread))
    keep, drop = ndtr(a), ndtr(-a)
    np.testing.assert_allclose(out.mean, keep * a * s, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(out.variance, keep * variance + keep * drop * (a * s) ** 2, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("variance", [1e-6, 1.0, 1e6])
def test_relu_marginals_match_quadrature(variance: float) -> None:
    s = math.sqrt(variance)
    wanted = np.array([relu_marginal(a, s) for a in RATIOS])
    mean, v = double(s * np.array(RATIOS, dtype=float), np.full(len(RATIOS), variance))
    for kind in (DiagonalMoments, FullMoments, FactoredMoments):
        out = relu(kind.of(mean, v))
        np.testing.assert_allclose(out.mean, wanted[:, 0], rtol=1e-9, atol=1e-60 * s)
        np.testing.assert_allclose(out.variance, wanted[:, 1], rtol=1e-9, atol=1e-60 * variance)


@pytest.mark.parametrize("rule", [mpgelu, relu])
def test_marginals_in_float32_never_go_negative_and_keep_their_tail(rule: Callable[[Any], Any]) -> None:
    a = torch.linspace(-14, 14, 20001)
    single = rule(DiagonalMoments(a, torch.ones_like(a)))
    wanted = rule(DiagonalMoments(a.double(), torch.ones_like(a).double()))
    assert (single.variance >= 0).all()
    assert (single.mean.abs() <= a.abs() + 0.4).all()
    for name in ("mean", "variance"):
        ours, truth = getattr(single, name).double(), getattr(wanted, name)
        torch.testing.assert_close(ours, truth, rtol=3e-6, atol=1e-6)
        tail = (a > -9) & (a < -4.5)  # where 1 + erf has nothing left
        assert ((ours - truth).abs()[tail] <= 0.05 * truth.abs()[tail]).all()


def test_mpgelu_of_correlated_inputs_matches_monte_carlo() -> None:
    n, draws = 5, 200_000
    mean, covariance = torch.randn(n, dtype=torch.float64), random_covariance(n)
    out = mpgelu(FactoredMoments.of(mean, covariance))
    rng = np.random.default_rng(0)
    h = rng.multivariate_normal(mean.numpy(), covariance.numpy(), draws)
    keep = ndtr(mean.numpy() / np.sqrt(covariance.diagonal().numpy()))
    assert_within_four_standard_errors(h * (rng.random(h.shape) < keep), out)


def test_relu_of_correlated_inputs_matches_monte_carlo() -> None:
    mean, covariance = torch.randn(4, dtype=torch.float64), random_covariance(4)
    rng = np.random.default_rng(0)
    h = rng.multivariate_normal(mean.numpy(), covariance.numpy(), 200_000)
    assert_within_four_standard_errors(np.maximum(h, 0), relu(FullMoments.of(mean, covariance)))


def test_random_weights_and_masks_match_monte_carlo() -> None:
    draws, rng = 100_000, np.random.default_rng(0)
    mean, covariance = torch.randn(3, dtype=torch.float64), random_covariance(3)
    weight, variance = torch.randn(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    value = dropout(FactoredMoments.of(mean, covariance), 0.25)
    out = gaussian_linear(value, weight, variance, None, None)
    h = rng.multivariate_normal(mean.numpy(), covariance.numpy(), draws) * (rng.random((draws, 3)) < 0.75) / 0.75
    weights = weight.numpy() + np.sqrt(variance.numpy()) * rng.standard_normal((draws, 2, 3))
    assert_within_four_standard_errors(np.einsum("dij,dj->di", weights, h), out)


def assert_within_four_standard_errors(samples: Array, out: Any) -> None:
    centred = samples - samples.mean(0)
    products = centred[:, :, None] * centred[:, None, :]
    mean_error = samples.std(0) / math.sqrt(len(samples))
    covariance_error = products.std(0) / math.sqrt(len(samples))
    assert (np.abs(samples.mean(0) - out.mean.numpy()) <= 4 * mean_error).all()
    assert (np.abs(products.mean(0) - out.covariance.numpy()) <= 4 * covariance_error).all()
