"""Weights of kinds and the width of their mixture against the formulas of their docstrings, evaluated independently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu.estimators.noise import LEAST_SHARE, NoiseHead
from mpgelu.estimators.recipe.head import _loss, mean_range
from mpgelu.estimators.recipe.weights import fit_width, mean_weights, stacking_weights
from mpgelu.likelihoods import HeavyTailedGaussian
from mpgelu.predictive import Predictive


def test_mean_weights_minimise_their_objective() -> None:
    """Two kinds on few rows, where the penalty and the weights of the rows both move the optimum."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=6)
    means = np.stack([y + 0.3 * rng.normal(size=6), y + 0.8 * rng.normal(size=6)])
    rows = np.array([0.1, 2.0, 0.4, 1.5, 0.5, 1.5])
    delta = np.median(np.abs(y - means.mean(0)))

    def objective(apart: float) -> float:  # the two logits are +-apart / 2: the penalty leaves no common part
        w = 1 / (1 + math.exp(-apart))
        residuals = y - w * means[0] - (1 - w) * means[1]
        return float((rows * np.sqrt(residuals**2 + delta**2)).sum() / delta + apart**2 / 2)

    best = min(np.linspace(-8, 8, 160_001), key=objective)
    assert abs(best) > 0.3
    assert mean_weights(means, y, rows)[0] == pytest.approx(1 / (1 + math.exp(-best)), abs=1e-4)


def test_the_score_is_the_log_density_of_the_mixture_of_all_kinds() -> None:
    rng = np.random.default_rng(1)
    rows = 40
    y = rng.normal(size=rows) * np.where(rng.random(rows) < 0.2, 3.0, 0.5)
    means, log_variance = 0.3 * rng.normal(size=(2, rows)), 0.5 * rng.normal(size=rows) - 1
    weights, row_weights = np.array([0.7, 0.3]), rng.uniform(0.1, 1.9, rows)
    width, score = fit_width(means, log_variance, y, weights, row_weights)
    noise = HeavyTailedGaussian(width.tail_share, width.tail_width, 1 / (rows + 50), 0.1, width.tail_offset)
    average = weights @ means
    moved, noises = average + width.spread * (means - average), log_variance + np.log(width.scale)
    outputs = np.stack([moved, np.tile(noises, (2, 1))])
    members = [noise.predictive(torch.as_tensor(outputs[:, k].T)) for k in range(2)]
    densities = Predictive.mixture(members, torch.as_tensor(weights)).log_prob(torch.as_tensor(y)).numpy()
    assert score == pytest.approx((row_weights * densities).mean(), rel=1e-9)


def test_rows_of_little_weight_have_little_influence_on_the_width() -> None:
    rng = np.random.default_rng(2)
    y = np.concatenate([0.5 * rng.normal(size=500), 5 * rng.normal(size=500)])
    width, _ = fit_width(np.zeros((1, 1000)), np.zeros(1000), y, np.ones(1), np.repeat([1.998, 0.002], 500))
    assert math.sqrt(width.scale) == pytest.approx(0.5, rel=0.2)
    assert width.tail_share < 0.1  # and not one half


def test_stacking_weights_maximise_the_weighted_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    rows = torch.where(logs[:, 0] > logs[:, 1], 3.0, 0.2).double()  # the first candidate is better where it counts
    weights, score = stacking_weights(logs, rows)
    shares = torch.linspace(0, 1, 1001, dtype=torch.float64)
    each = torch.logsumexp(logs + torch.stack([shares, 1 - shares], 1)[:, None].log(), -1) @ (rows / rows.sum())
    assert score == pytest.approx(float(each.max()), abs=1e-5)
    assert float(weights[0]) == pytest.approx(float(shares[each.argmax()]), abs=0.01)
    assert float(weights[0]) > float(stacking_weights(logs, torch.ones(50))[0][0]) + 0.1


def test_no_more_than_a_share_of_the_noise_is_taken_off() -> None:
    stack = mp.Stack([mp.network(4, (), 1, rate=0)])
    for parameter in stack.parameters():
        parameter.data.zero_()
    held = torch.zeros(4), torch.ones(4), torch.tensor(0.0), torch.ones(1), torch.tensor(0.5), torch.tensor([-9.0, 9.0])
    means = torch.tensor([3.0, -3.0])[:, None].expand(2, 5)  # networks that differ by much more than the noise of one
    after = NoiseHead(stack, *held)(torch.zeros(5, 1), [torch.stack([means, torch.zeros(2, 5)], -1)])
    assert isinstance(after, torch.Tensor)
    torch.testing.assert_close(after[..., 1].exp(), torch.full((2, 5), LEAST_SHARE))


def test_the_noise_knows_how_far_means_are_moved_towards_their_average() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    settings: dict[str, Any] = {
        "hidden": (8,),
        "sigma": (0.4, 1.0),
        "diverse": False,
        "folds": 2,
        "steps": 20,
        "random_state": 0,
    }
    ensemble = mp.MPGELURegressor(**settings).fit(X, X[:, 0] + 0.3 * rng.normal(size=60)).ensemble_
    assert ensemble.noise is not None
    assert ensemble.noise.spread.item() == pytest.approx(ensemble.spread.item())
    assert ensemble.spread.item() < 0.99


def test_the_loss_of_the_head_is_that_of_students_distribution() -> None:
    """Up to a constant, for log-variances so small that their bound does not matter."""
    generator = torch.Generator().manual_seed(0)
    h, residuals = (torch.randn(50, generator=generator).double() for _ in range(2))
    scale = (10 * torch.tanh(h / 10) / 2).exp()
    wanted = -torch.distributions.StudentT(torch.tensor(5.0).double(), 0.0, scale).log_prob(3 * residuals)  # type: ignore[no-untyped-call]
    difference = _loss(h, 3 * residuals) - wanted
    torch.testing.assert_close(difference, difference[:1].expand(50))


def test_means_may_leave_the_range_of_the_targets_by_three_tenths_of_it() -> None:
    torch.testing.assert_close(mean_range(torch.tensor([1.0, -1.0, 0.0])), torch.tensor([-1.6, 1.6]))
