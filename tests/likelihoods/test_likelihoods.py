"""Expected log-likelihoods against brute-force quadrature over the outputs, and what they predict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import (
    DiagonalMoments,
    FactoredMoments,
    FullMoments,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    InputError,
    Likelihood,
)
from mpgelu.likelihoods import HeavyTailedGaussian
from reference import TYPES, normal_rule, product_rule

OUTPUTS: dict[str, tuple[list[float], list[list[float]]]] = {
    "independent": ([0.3, -1.0], [[0.5, 0.0], [0.0, 0.3]]),
    "correlated": ([-1.0, 0.5], [[1.0, 0.4], [0.4, 0.5]]),
    "negatively correlated": ([2.0, -2.0], [[0.7, -0.6], [-0.6, 0.9]]),
    "singular": ([0.1, 0.2], [[0.25, 0.5], [0.5, 1.0]]),
    "known noise": ([0.5, -1.0], [[0.7, 0.0], [0.0, 0.0]]),
    "known": ([0.5, -1.0], [[0.0, 0.0], [0.0, 0.0]]),
}
TARGETS = [-3.0, -0.2, 0.4, 5.0]


def outputs(name: str) -> tuple[Tensor, Tensor]:
    mean, covariance = OUTPUTS[name]
    return torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64)


def brute_force(mean: Tensor, covariance: Tensor, y: float) -> float:
    """Mean of log N(y; h1, exp h2) over h, by Gauss-Hermite in both directions."""
    points, weights = product_rule(normal_rule(60), normal_rule(60))
    values, vectors = np.linalg.eigh(covariance.numpy())
    h = mean.numpy() + points @ (vectors * np.sqrt(values.clip(0))).T
    log_density = -0.5 * (math.log(2 * math.pi) + h[:, 1] + (y - h[:, 0]) ** 2 * np.exp(-h[:, 1]))
    return float(weights @ log_density)


# Expected log-likelihood


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("kind", [FullMoments, FactoredMoments])
def test_heteroscedastic_matches_brute_force(name: str, kind: Any) -> None:
    mean, covariance = outputs(name)
    rows = len(TARGETS)
    moments = kind.of(mean.expand(rows, 2), covariance.expand(rows, 2, 2))
    found = HeteroscedasticGaussian().expected_log_prob(moments, torch.tensor(TARGETS, dtype=torch.float64))
    assert found.shape == (rows,)
    for ours, y in zip(found.tolist(), TARGETS, strict=True):
        assert ours == pytest.approx(brute_force(mean, covariance, y), rel=1e-8, abs=1e-8)


def test_heteroscedastic_with_diagonal_moments_ignores_the_correlation() -> None:
    mean, covariance = outputs("correlated")
    y = torch.tensor(0.4, dtype=torch.float64)
    found = HeteroscedasticGaussian().expected_log_prob(DiagonalMoments.of(mean, covariance), y)
    assert found.item() == pytest.approx(brute_force(mean, covariance.diagonal().diag(), 0.4), abs=1e-8)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("noise", [0.01, 1.0, 30.0])
def test_gaussian_matches_brute_force(kind: Any, noise: float) -> None:
    nodes, weights = normal_rule()
    mean, variance = 0.7, 0.4
    h = mean + math.sqrt(variance) * nodes
    moments = kind.of(torch.full((4, 1), mean).double(), torch.full((4, 1), variance).double())
    found = Gaussian(noise).double().expected_log_prob(moments, torch.tensor(TARGETS, dtype=torch.float64))
    for ours, y in zip(found.tolist(), TARGETS, strict=True):
        wanted = weights @ (-0.5 * (math.log(2 * math.pi * noise) + (y - h) ** 2 / noise))
        # The logarithm of the noise is held in float32, which is exact for unit noise only.
        assert ours == pytest.approx(wanted, rel=1e-8 if noise == 1 else 1e-6)


def test_the_paper_uses_unit_noise() -> None:
    moments = FullMoments.of(torch.tensor([[0.262]]).double(), torch.zeros(1, 1).double())
    found = Gaussian().expected_log_prob(moments, torch.zeros(1).double())
    assert -found.item() == pytest.approx(0.919 + 0.262**2 / 2, abs=1e-3)


@pytest.mark.parametrize(("likelihood", "count"), [(HeteroscedasticGaussian(), 2), (Gaussian(0.5), 1)])
def test_a_plain_output_is_known_exactly(likelihood: Any, count: int) -> None:
    output, y = torch.randn(2, 5, count, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    variance = output[..., 1].exp() if count == 2 else torch.tensor(0.5).double()
    wanted = -0.5 * (torch.log(2 * math.pi * variance) + (y - output[..., 0]) ** 2 / variance)
    torch.testing.assert_close(likelihood.expected_log_prob(output, y), wanted, rtol=1e-6, atol=1e-6)
    predictive = likelihood.predictive(output)
    torch.testing.assert_close(predictive.mean, output[..., 0])
    torch.testing.assert_close(predictive.epistemic_variance, torch.zeros(2, 5, dtype=torch.float64))
    torch.testing.assert_close(predictive.log_prob(y), wanted, rtol=1e-6, atol=1e-6)


def test_expected_log_prob_is_a_lower_bound_of_the_log_predictive() -> None:
    for name in OUTPUTS:
        moments = FullMoments.of(*outputs(name))
        for target in TARGETS:
            y = torch.tensor(target, dtype=torch.float64)
            likelihood = HeteroscedasticGaussian()
            assert likelihood.expected_log_prob(moments, y) <= likelihood.predictive(moments).log_prob(y) + 1e-9


def test_gradients_of_the_expected_log_prob() -> None:
    mean, covariance = outputs("correlated")
    inputs = [t.requires_grad_() for t in (mean, covariance, torch.tensor(0.3, dtype=torch.float64))]

    def heteroscedastic(mean: Tensor, covariance: Tensor, y: Tensor) -> Tensor:
        return HeteroscedasticGaussian().expected_log_prob(FullMoments(mean, (covariance + covariance.mT) / 2), y)

    assert torch.autograd.gradcheck(heteroscedastic, inputs)


# Prediction


@pytest.mark.parametrize("kind", TYPES)
def test_heteroscedastic_predictive_moments(kind: Any) -> None:
    mean, covariance = outputs("correlated")
    predictive = HeteroscedasticGaussian().predictive(kind.of(mean.expand(3, 2), covariance.expand(3, 2, 2)))
    aleatoric = math.exp(0.5 + 0.5 / 2)
    assert predictive.mean.tolist() == pytest.approx([-1.0] * 3)
    assert predictive.epistemic_variance.tolist() == pytest.approx([1.0] * 3)
    assert predictive.aleatoric_variance.tolist() == pytest.approx([aleatoric] * 3)
    assert predictive.variance.tolist() == pytest.approx([1 + aleatoric] * 3)


@pytest.mark.parametrize("kind", TYPES)
def test_gaussian_predictive_moments(kind: Any) -> None:
    moments = kind.of(torch.full((3, 1), 0.7), torch.full((3, 1), 0.4))
    predictive = Gaussian(0.25).predictive(moments)
    assert predictive.mean.tolist() == pytest.approx([0.7] * 3)
    assert predictive.epistemic_variance.tolist() == pytest.approx([0.4] * 3)
    assert predictive.aleatoric_variance.tolist() == pytest.approx([0.25] * 3)
    assert predictive.stddev.tolist() == pytest.approx([math.sqrt(0.65)] * 3)
    assert predictive.cdf(torch.tensor(0.7)).tolist() == pytest.approx([0.5] * 3)


LIKELIHOODS = [
    Gaussian(0.3),
    HeteroscedasticGaussian(),
    HeavyTailedGaussian(0.2, 2.5, 0.05, 0.3, 0.8),
    GaussianMixture(3),
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: type(likelihood).__name__)
def test_summaries_are_those_of_the_predictive_distribution(likelihood: Likelihood, kind: Any) -> None:
    generator, n = torch.Generator().manual_seed(0), likelihood.outputs
    mean, root = torch.randn(4, n, generator=generator), 0.5 * torch.randn(4, n, n, generator=generator)
    moments = kind.of(mean.double(), root.double() @ root.double().mT)
    predictive, short = likelihood.predictive(moments, 64), likelihood.short(moments)
    torch.testing.assert_close(likelihood.noise(moments), predictive.aleatoric_variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(likelihood.variance(moments), predictive.variance, rtol=1e-6, atol=0)
    for name in ("mean", "epistemic_variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(short, name), getattr(predictive, name), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: type(likelihood).__name__)
def test_the_direction_of_the_mean_is_its_gradient(likelihood: Likelihood) -> None:
    h = torch.randn(4, likelihood.outputs, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.predictive(h).mean.sum(), h)
    torch.testing.assert_close(likelihood.mean_direction(DiagonalMoments.certain(h.detach())), gradient)


# Noise


def test_noise_is_a_parameter_only_when_learned() -> None:
    assert not list(Gaussian(2.0).parameters())
    assert dict(Gaussian(2.0).named_buffers())["log_noise_variance"].item() == pytest.approx(math.log(2))
    assert [name for name, _ in Gaussian(2.0, learn_noise=True).named_parameters()] == ["log_noise_variance"]
    assert isinstance(HeteroscedasticGaussian(), nn.Module)


def test_learned_noise_goes_to_the_noise_of_the_data() -> None:
    x = torch.linspace(-1, 1, 400)[:, None]
    y = 2 * x[:, 0] + 0.3 * torch.randn(400)
    net, likelihood = nn.Sequential(mp.Linear(1, 1)), Gaussian(learn_noise=True)
    mp.fit(net, likelihood, (x, y), epochs=150, optimizer=lambda p: torch.optim.Adam(p, lr=0.05), progress=False)
    assert likelihood.noise_variance.item() == pytest.approx(0.09, rel=0.15)


# Bad input


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan")])
def test_bad_noise(noise: float) -> None:
    with pytest.raises(InputError, match="Gaussian: noise_variance must be positive"):
        Gaussian(noise)


@pytest.mark.parametrize(("likelihood", "count"), [(HeteroscedasticGaussian(), 2), (Gaussian(), 1)])
def test_wrong_number_of_outputs(likelihood: Any, count: int) -> None:
    name = type(likelihood).__name__
    for wrong in {1, 2, 3} - {count}:
        output = torch.zeros(5, wrong)
        for given in (output, FullMoments.certain(output)):
            with pytest.raises(InputError, match=rf"{name}.expected_log_prob: needs .* {count} output.*\(5, {wrong}\)"):
                likelihood.expected_log_prob(given, torch.zeros(5))
            with pytest.raises(InputError, match=rf"{name}.predictive: needs .* {count} output"):
                likelihood.predictive(given)


@pytest.mark.parametrize(("likelihood", "count"), [(HeteroscedasticGaussian(), 2), (Gaussian(), 1)])
def test_targets_with_a_column_are_refused_with_the_fix(likelihood: Any, count: int) -> None:
    moments = DiagonalMoments.certain(torch.zeros(5, count))
    with pytest.raises(InputError, match=r"y must have .* shape \(5,\), got \(5, 1\); use y.squeeze\(-1\)"):
        likelihood.expected_log_prob(moments, torch.zeros(5, 1))
    for shape in ((4,), (), (1, 5)):
        with pytest.raises(InputError, match=r"y must have one target .* \(5,\), got \("):
            likelihood.expected_log_prob(moments, torch.zeros(shape))
