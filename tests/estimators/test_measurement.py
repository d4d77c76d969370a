"""Errors of the features: the points against closed forms, and predictions against averages over random inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import mpgelu as mp
from mpgelu import Predictive
from mpgelu.estimators.measurement import averaged, error_points, main_effects
from mpgelu.estimators.predicting import PredictedParts

Array = NDArray[np.float64]
COUNTS = (2, 3, 6, 13, 40)


def expectation(values: Tensor, features: int) -> Tensor:
    return error_points(features).weights @ values


# the points


@pytest.mark.parametrize("features", [0, 1, *COUNTS])
def test_points_have_the_moments_of_the_errors(features: int) -> None:
    nodes, weights = error_points(features)
    assert nodes.shape == (len(weights), features)
    assert nodes.dtype == weights.dtype == torch.float64
    assert (weights > 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
    covariance = nodes.mT @ (weights[:, None] * nodes)
    torch.testing.assert_close(weights @ nodes, torch.zeros(features).double(), atol=1e-13, rtol=0)
    torch.testing.assert_close(covariance, torch.eye(features).double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("features", COUNTS)
def test_points_are_mirrored_so_that_odd_functions_vanish(features: int) -> None:
    nodes, _ = error_points(features)
    torch.testing.assert_close(nodes[: len(nodes) // 2], -nodes[len(nodes) // 2 :], atol=1e-12, rtol=0)
    for i, j, k in itertools.product(range(min(features, 4)), repeat=3):
        third = expectation(nodes[:, i] * nodes[:, j] * nodes[:, k], features)
        assert float(third) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("features", COUNTS)
def test_fourth_moments_of_each_error(features: int) -> None:
    fourth = expectation(error_points(features).nodes ** 4, features)
    np.testing.assert_allclose(fourth, 3, rtol=0.05)


@pytest.mark.parametrize("features", [2, 3])
def test_few_errors_are_exact_to_the_fifth_degree(features: int) -> None:
    nodes = error_points(features).nodes
    for powers in itertools.product(range(6), repeat=features):
        if sum(powers) <= 5:
            exact = math.prod(0 if power % 2 else math.prod(range(power - 1, 0, -2)) for power in powers)
            found = expectation((nodes ** torch.tensor(powers)).prod(1), features)
            assert float(found) == pytest.approx(exact, abs=1e-11)


def test_one_error_is_exact_for_polynomials_and_smooth_functions() -> None:
    z = error_points(1).nodes[:, 0]
    for degree in range(0, 12, 2):
        exact = float(math.prod(range(degree - 1, 0, -2)))
        assert float(expectation(z**degree, 1)) == pytest.approx(exact, rel=1e-8)
    for a in (0.3, 1.0, 3.0):
        assert float(expectation((a * z).cos(), 1)) == pytest.approx(math.exp(-(a**2) / 2), abs=1e-9)
        assert float(expectation((a * z).exp(), 1)) == pytest.approx(math.exp(a**2 / 2), rel=1e-6)


@pytest.mark.parametrize("features", COUNTS)
def test_smooth_functions_of_several_errors(features: int) -> None:
    """Along random directions, of a total error as large as the function's own scale."""
    z = error_points(features).nodes
    directions = torch.randn(200, features, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    along = z @ directions.mT
    wave = expectation(along.cos(), features) - math.exp(-0.5)
    growth = expectation(along.exp(), features) / math.exp(0.5) - 1
    assert float(wave.square().mean().sqrt()) < 0.010  # 0.020 for as many random points
    assert float(growth.square().mean().sqrt()) < 0.016  # 0.058
    assert float(wave.abs().max()) < 0.05
    assert float(growth.abs().max()) < 0.12


def test_there_are_enough_points_for_many_features() -> None:
    assert [len(error_points(count).weights) for count in (0, 1, 2, 64, 65)] == [1, 128, 512, 512, 1024]


# averages over them


def quadratic(x: Tensor) -> Predictive:
    """y has the mean x0 + x1^2, and a noise that depends on x2."""
    mean = x[:, 0] + x[:, 1].square()
    return Predictive.gaussian(mean, torch.full_like(mean, 0.1), x[:, 2].exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_a_function_that_is_known(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 0.5, 0.2], [-2.0, 0.0, 0.0]], dtype=dtype)
    std = torch.tensor([0.3, 0.4, 0.5], dtype=dtype)
    rtol = 1e-5 if dtype == torch.float32 else 1e-10
    for places in ([0], [1], [2]):  # one error: exact
        errors = torch.zeros_like(x)
        errors[:, places] = std[places]
        p = averaged(quadratic, quadratic, x, errors)
        _check_quadratic(p, x, errors, rtol, rtol)
    everything = averaged(quadratic, quadratic, x, std.expand_as(x).contiguous())
    _check_quadratic(everything, x, std.expand_as(x), rtol, 1e-3)


def _check_quadratic(p: Predictive, x: Tensor, errors: Tensor, rtol: float, loose: float) -> None:
    s = errors.square()
    mean = x[:, 0] + x[:, 1].square() + s[:, 1]
    spread = s[:, 0] + 4 * x[:, 1].square() * s[:, 1] + 2 * s[:, 1].square()
    torch.testing.assert_close(p.mean, mean, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(p.epistemic_variance, 0.1 + spread, rtol=loose, atol=0)
    torch.testing.assert_close(p.aleatoric_variance, (x[:, 2] + s[:, 2] / 2).exp(), rtol=loose, atol=0)
    assert p.mean.dtype == x.dtype
    components = (p.log_weights.exp() * p.means).sum(-1)
    torch.testing.assert_close(components, p.mean, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    errors = torch.rand(7, 3, dtype=torch.float64)
    errors[0], errors[1, 1:], errors[4, 0] = 0, 0, 0
    whole = averaged(quadratic, quadratic, x, errors)
    monkeypatch.setattr("mpgelu.estimators.measurement._PREDICTED_AT_ONCE", 300)
    parts = averaged(quadratic, quadratic, x, errors)
    levels = [0.05, 0.5, 0.99]
    for row in range(7):
        alone = averaged(quadratic, quadratic, x[row : row + 1], errors[row : row + 1])
        for p in (whole, parts):
            for name in ("mean", "epistemic_variance", "aleatoric_variance"):
                torch.testing.assert_close(getattr(p, name)[row], getattr(alone, name)[0])
            torch.testing.assert_close(p[row : row + 1].quantile(levels), alone.quantile(levels))
            torch.testing.assert_close(p[row : row + 1].crps(0.3), alone.crps(0.3))
            torch.testing.assert_close(p[row : row + 1].log_prob(0.3), alone.log_prob(0.3))
    assert whole.sample(5).isfinite().all()


def test_rows_without_errors_are_predicted_as_they_are() -> None:
    def short(_: Tensor) -> Predictive:
        raise AssertionError("not needed")

    x = torch.randn(4, 3)
    p, exact = averaged(quadratic, short, x, torch.zeros(4, 3)), quadratic(x)
    assert torch.equal(p.means, exact.means)
    assert torch.equal(p.log_weights, exact.log_weights)


# main effects


def test_main_effects_of_known_functions() -> None:
    points = error_points(4)
    z = points.nodes
    values = torch.stack([2 * z[:, 0] + z[:, 1].square() - z[:, 2], z[:, 0] * z[:, 3], torch.ones(len(z)).double()])
    parts = main_effects(values, points)
    np.testing.assert_allclose(parts[0], [4, 2, 1, 0, 0], atol=0.1)
    np.testing.assert_allclose(parts[1], [0, 0, 0, 0, 1], atol=0.12)
    np.testing.assert_allclose(parts[2], 0, atol=1e-20)


@pytest.mark.parametrize("features", [0, 1, *COUNTS])
def test_main_effects_add_up_to_the_variance(features: int) -> None:
    points = error_points(features)
    weights = torch.randn(features, 5, dtype=torch.float64) / max(1, features) ** 0.5
    values = (points.nodes @ weights + 0.5).exp().mT + torch.rand(5, len(points.weights), dtype=torch.float64)
    parts = main_effects(values, points)
    assert parts.shape == (5, features + 1)
    assert (parts >= 0).all()
    mean = values @ points.weights
    torch.testing.assert_close(parts.sum(1), (values - mean[:, None]).square() @ points.weights)


def test_one_error_has_all_of_the_variance() -> None:
    points = error_points(1)
    assert float(main_effects((5 * points.nodes.mT).sin(), points)[0, 1]) == 0


# the estimator


@pytest.fixture(scope="module")
def wave() -> mp.MPGELURegressor:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (400, 2))
    y = np.sin(3 * X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.normal(size=400)
    return mp.MPGELURegressor((32, 32), folds=2, steps=400, random_state=0).fit(X, y)


X = np.array([[0.6, 0.0], [-0.5, 1.0], [1.6, -1.0]])


def variances(parts: PredictedParts) -> tuple[Array, Array, Array]:
    """Mean, epistemic and aleatoric variance."""
    return parts.mean, parts.epistemic_std**2, parts.aleatoric_std**2


@pytest.mark.parametrize("errors", [(0.3, 0.0), (0.3, 0.3), (0.05, 0.5)])
def test_input_errors_average_the_same_model(wave: mp.MPGELURegressor, errors: Any) -> None:
    """The mean, both variances and the quantiles are those of 20,000 random inputs, within the error of these."""
    mean, epistemic, aleatoric = variances(wave.predict_parts(X, input_std=errors))
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    quantiles = wave.predict_quantile(X, levels, input_std=errors)
    rng, draws = np.random.default_rng(1), 20_000
    for row, x in enumerate(X):
        inputs = x + np.asarray(errors) * rng.normal(size=(draws, 2))
        means, e, a = variances(wave.predict_parts(inputs))
        stddev = np.sqrt(means.var() + (e + a).mean())
        assert abs(mean[row] - means.mean()) / stddev < 4 * means.std() / stddev / draws**0.5 + 0.003
        assert np.sqrt(epistemic[row] + aleatoric[row]) == pytest.approx(stddev, rel=0.025)
        assert aleatoric[row] == pytest.approx(a.mean(), rel=0.05)
        sampled = wave.predict_distribution(inputs[:4000])
        cdf = [float(sampled.cdf(q).mean()) for q in quantiles[row]]
        np.testing.assert_allclose(cdf, levels, atol=0.02)


def test_the_mean_does_not_follow_the_moments_of_the_paper(wave: mp.MPGELURegressor) -> None:
    """An error of 0.3 flattens sin(3 x) by exp(-0.405), while keep-probabilities of noisy units would raise it."""
    mean = wave.predict([[0.6, 0.0]], input_std=[0.3, 0.0])[0]
    assert mean == pytest.approx(math.sin(1.8) * math.exp(-0.405), abs=0.06)


def test_no_error_changes_nothing(wave: mp.MPGELURegressor) -> None:
    for none in (0, [0.0, 0.0], np.zeros((3, 2))):
        np.testing.assert_array_equal(wave.predict_quantile(X, 0.9, input_std=none), wave.predict_quantile(X, 0.9))


def test_distributions_of_rows_with_different_errors(wave: mp.MPGELURegressor) -> None:
    errors = np.array([[0.0, 0.0], [0.3, 0.0], [0.3, 0.2]])
    p = wave.predict_distribution(X, input_std=errors)
    mean, stddev = wave.predict(X, return_std=True, input_std=errors)
    np.testing.assert_allclose(p.mean, mean)
    np.testing.assert_allclose(p.stddev, stddev)
    np.testing.assert_allclose(p.quantile(0.9), wave.predict_quantile(X, 0.9, input_std=errors))
