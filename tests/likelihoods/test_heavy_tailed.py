"""The likelihood with wide and background errors, against its definition; and what likelihoods say of their noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from mpgelu import FullMoments, Gaussian, HeteroscedasticGaussian, InputError, Likelihood, Predictive
from mpgelu.likelihoods import HeavyTailedGaussian, MeanAndLogVariance
from reference import normal_rule, product_rule

MEAN, COVARIANCE = torch.tensor([0.4, -0.6]).double(), torch.tensor([[0.5, 0.2], [0.2, 0.3]]).double()
HEAVY = HeavyTailedGaussian(0.2, 3.0, 0.05, 1.5)
SKEWED = HeavyTailedGaussian(0.2, 3.0, 0.05, 1.5, tail_offset=-1.3)


def density(h: Any, y: float, tails: HeavyTailedGaussian) -> Any:
    """The definition: p(y | h) of three kinds of errors."""
    variance = np.exp(h[:, 1])
    variances = variance, tails.tail_width**2 * variance, variance + tails.background_variance
    usual, wide, _ = tails.shares
    offsets = -wide * tails.tail_offset / usual, tails.tail_offset, 0.0
    each = zip(tails.shares, offsets, variances, strict=True)
    scale = np.sqrt(variance)
    return sum(share * norm.pdf(y, h[:, 0] + o * scale, np.sqrt(noise)) for share, o, noise in each)


def draws() -> tuple[Any, Any]:
    points, weights = product_rule(normal_rule(60), normal_rule(60))
    return MEAN.numpy() + points @ np.linalg.cholesky(COVARIANCE.numpy()).T, weights


@pytest.mark.parametrize("y", [-4.0, 0.3, 2.0])
@pytest.mark.parametrize("tails", [HEAVY, SKEWED])
def test_predictive_density_and_noise_match_their_definition(tails: HeavyTailedGaussian, y: float) -> None:
    h, weights = draws()
    moments = FullMoments(MEAN, COVARIANCE)
    found = tails.predictive(moments, 64)
    assert found.log_prob(torch.tensor(y).double()).item() == pytest.approx(
        math.log(weights @ density(h, y, tails)), rel=1e-6
    )
    grid = np.linspace(-60, 60, 4001)
    densities = np.array([weights @ density(h, at, tails) for at in grid])
    step = grid[1] - grid[0]
    mean = step * densities @ grid
    assert mean == pytest.approx(0.4, abs=1e-6)
    assert found.mean.item() == pytest.approx(mean, abs=1e-6)
    variance = step * densities @ (grid - mean) ** 2
    assert tails.variance(moments).item() == pytest.approx(variance, rel=1e-6)
    assert tails.noise(moments).item() == pytest.approx(variance - 0.5, rel=1e-6)
    assert found.aleatoric_variance.item() == pytest.approx(variance - 0.5, rel=1e-6)


@pytest.mark.parametrize("y", [-4.0, 0.3, 2.0])
@pytest.mark.parametrize("offset", [0.0, 0.9])
def test_the_objective_bounds_the_expected_log_density(offset: float, y: float) -> None:
    h, weights = draws()
    tails = HeavyTailedGaussian(0.2, 3.0, tail_offset=offset)
    scale = np.exp(h[:, 1] / 2)
    parts = (-0.25 * offset, 1.0), (offset, 3.0)
    logs = [norm.logpdf(y, h[:, 0] + move * scale, width * scale) for move, width in parts]
    found = tails.expected_log_prob(FullMoments(MEAN, COVARIANCE), torch.tensor(y).double()).item()
    assert found == pytest.approx(weights @ (0.8 * logs[0] + 0.2 * logs[1]), rel=1e-7)
    assert found < weights @ np.logaddexp(math.log(0.8) + logs[0], math.log(0.2) + logs[1])


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), HEAVY, SKEWED, HeavyTailedGaussian(0.1, 2.0)])
def test_gaussians_are_the_noise(likelihood: Likelihood) -> None:
    known = MeanAndLogVariance(torch.tensor([0.5, 1.0]).double(), torch.tensor([-1.0, 0.3]).double())
    gaussians = likelihood.gaussians(known.log_variance, known=True)
    assert gaussians is not None
    y = torch.tensor([-1.0, 3.0]).double()
    mixed = sum(
        share * norm.pdf(y, known.mean if offset is None else known.mean + offset, torch.exp(noise / 2))
        for share, noise, offset in gaussians
    )
    np.testing.assert_allclose(likelihood.predictive(known.joined()).log_prob(y).exp(), mixed, rtol=1e-9)


def test_gaussians_only_where_they_are_exact() -> None:
    class Own(HeteroscedasticGaussian):
        def predictive(self, moments: Any, nodes: int = 32) -> Predictive:
            return super().predictive(moments, nodes).affine(2.0, 0.0)

    zero = torch.zeros(())
    assert Own().gaussians(zero, known=True) is None
    assert Gaussian().gaussians(zero, known=True) is None
    assert HEAVY.gaussians(zero, known=False) is None
    assert HeavyTailedGaussian(0.1, 2.0, tail_offset=0.5).gaussians(zero, known=False) is None
    assert HeavyTailedGaussian(0.1, 2.0).gaussians(zero, known=False) is not None


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), Gaussian(0.3)])
def test_outputs_in_another_unit_predict_the_target_in_that_unit(likelihood: Any) -> None:
    gain, shift = (torch.tensor(part).double() for part in likelihood.in_unit(3.0, -2.0))
    count = likelihood.outputs
    moments = FullMoments(MEAN[:count], COVARIANCE[:count, :count])
    scaled = FullMoments(moments.mean * gain + shift, moments.covariance * torch.outer(gain, gain))
    wanted = likelihood.predictive(moments).affine(3.0, -2.0)
    if count == 1:
        likelihood = Gaussian(0.3 * 9)
    found = likelihood.predictive(scaled)
    y = torch.tensor(0.7).double()
    torch.testing.assert_close(found.log_prob(y), wanted.log_prob(y), rtol=1e-6, atol=1e-7)


def test_outputs_by_name_keep_their_order() -> None:
    both: Tensor = torch.randn(4, 2)
    parts = MeanAndLogVariance.of(both)
    assert torch.equal(parts.mean, both[:, 0])
    assert torch.equal(parts.joined(), both)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tail_share": -0.1},
        {"tail_width": 0.5},
        {"tail_share": 0.6, "background_share": 0.5},
        {"tail_offset": math.inf},
    ],
)
def test_shares_and_widths_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="HeavyTailedGaussian: wants shares"):
        HeavyTailedGaussian(**wrong)
