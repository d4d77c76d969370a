"""The mixture likelihood against quadrature and sampling of its outputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, GaussianMixture, HeteroscedasticGaussian, InputError
from mpgelu.likelihoods import likelihoods
from reference import TYPES, normal_rule

K = 2
LIKELIHOOD = GaussianMixture(K)
LOGITS, OFFSETS, LOG_NOISES = slice(1, 1 + K), slice(1 + K, 1 + 2 * K), slice(1 + 2 * K, None)
MEAN = torch.tensor([0.3, 0.4, -0.2, -1.0, 0.8, -1.5, -0.7], dtype=torch.float64)
DRAWS = 400_000


def covariance(known: tuple[slice, ...] = (), scale: float = 1.0) -> Tensor:
    """A correlated covariance of all outputs, zero for those that are known."""
    generator = torch.Generator().manual_seed(3)
    root = 0.25 * torch.randn(7, 7, dtype=torch.float64, generator=generator)
    for outputs in known:
        root[outputs] = 0
    return scale * root @ root.T


def sampled(S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, means and variances of the components for draws of the outputs, ``(draws, K)`` each."""
    values, vectors = torch.linalg.eigh(S)
    root = vectors * values.clamp_min(0).sqrt()
    h = MEAN + torch.randn(DRAWS, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ root.T
    return h[:, LOGITS].softmax(-1), h[:, :1] + h[:, OFFSETS], h[:, LOG_NOISES].exp()


def density(parts: tuple[Tensor, Tensor, Tensor], y: float) -> Tensor:
    weights, means, variances = parts
    return (weights * torch.exp(-0.5 * (y - means) ** 2 / variances) / (2 * math.pi * variances).sqrt()).sum(-1)


def close(found: Tensor, draws: Tensor, sigmas: float = 4.5) -> bool:
    return bool((found - draws.mean()).abs() < sigmas * draws.std() / math.sqrt(len(draws)))


@pytest.mark.parametrize("components", [1, 3])
def test_known_outputs_are_a_plain_mixture(components: int) -> None:
    likelihood = GaussianMixture(components)
    h, y = torch.randn(2, 5, likelihood.outputs, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    first, logits, offsets, log_noises = torch.split(h, [1, components, components, components], -1)
    plain: Any = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=logits),
        torch.distributions.Normal(first + offsets, (log_noises / 2).exp()),
    )
    predictive = likelihood.predictive(h)
    torch.testing.assert_close(likelihood.expected_log_prob(h, y), plain.log_prob(y))
    torch.testing.assert_close(predictive.log_prob(y), plain.log_prob(y))
    torch.testing.assert_close(predictive.mean, plain.mean)
    torch.testing.assert_close(predictive.aleatoric_variance, plain.variance)
    assert not predictive.epistemic_variance.any()


@pytest.mark.parametrize("y", [-2.0, 0.1, 1.5])
def test_the_objective_is_a_lower_bound_and_close_for_little_variance(y: float) -> None:
    target = torch.tensor(y, dtype=torch.float64)
    for scale, gap in ((1.0, math.inf), (0.01, 5e-3)):
        S = covariance(scale=scale)
        bound = LIKELIHOOD.expected_log_prob(FullMoments(MEAN, S), target)
        draws = density(sampled(S), y).log()
        error = 4.5 * draws.std() / math.sqrt(DRAWS)
        assert bound < draws.mean() + error
        assert bound > draws.mean() - error - gap


def test_one_component_with_a_known_logit_is_heteroscedastic() -> None:
    mean = torch.tensor([0.3, 5.0, 0.2, -0.6], dtype=torch.float64)
    root = 0.4 * torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    root[1] = 0
    S = root @ root.T
    into = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.float64)  # m = location + offset, and s
    y = torch.linspace(-3, 3, 7, dtype=torch.float64)
    ours = FullMoments.of(mean.expand(7, 4), S.expand(7, 4, 4))
    plain = FullMoments.of((into @ mean).expand(7, 2), (into @ S @ into.T).expand(7, 2, 2))
    found = GaussianMixture(1).expected_log_prob(ours, y)
    torch.testing.assert_close(found, HeteroscedasticGaussian().expected_log_prob(plain, y))
    mixture, other = GaussianMixture(1).predictive(ours), HeteroscedasticGaussian().predictive(plain)
    torch.testing.assert_close(mixture.epistemic_variance, other.epistemic_variance)
    torch.testing.assert_close(mixture.aleatoric_variance, other.aleatoric_variance)


def test_mean_and_both_variances_are_exact_where_the_logits_are_known() -> None:
    S = covariance(known=(LOGITS,))
    weights, means, variances = sampled(S)
    mean = (weights * means).sum(-1)
    predictive = LIKELIHOOD.predictive(FullMoments(MEAN, S))
    assert close(predictive.mean, mean)
    assert close(predictive.epistemic_variance, (mean - predictive.mean).square())
    assert close(predictive.aleatoric_variance, (weights * (variances + (means - mean[:, None]) ** 2)).sum(-1))


@pytest.mark.parametrize("y", [-1.0, 0.4])
def test_the_distribution_is_exact_where_only_places_are_random(y: float) -> None:
    S = covariance(known=(LOGITS, LOG_NOISES))
    predictive = LIKELIHOOD.predictive(FullMoments(MEAN, S))
    assert close(predictive.log_prob(torch.tensor(y, dtype=torch.float64)).exp(), density(sampled(S), y))


def test_a_random_location_is_exact_by_quadrature() -> None:
    variance = torch.zeros(7, dtype=torch.float64)
    variance[0] = 0.3
    nodes, weights = (torch.as_tensor(part) for part in normal_rule(60))
    known = MEAN.repeat(60, 1)
    known[:, 0] += math.sqrt(0.3) * nodes
    y = torch.tensor(0.7, dtype=torch.float64)
    found = LIKELIHOOD.predictive(DiagonalMoments(MEAN, variance))
    torch.testing.assert_close(found.log_prob(y).exp(), weights @ LIKELIHOOD.predictive(known).log_prob(y).exp())
    torch.testing.assert_close(found.epistemic_variance, variance[0])


def test_uncertain_logits_count_to_first_order() -> None:
    """Where logits are uncertain weights are those at their mean: a few percent off at variances of 0.02."""
    S = covariance(scale=0.1)
    weights, means, variances = sampled(S)
    mean = (weights * means).sum(-1)
    predictive = LIKELIHOOD.predictive(FullMoments(MEAN, S))
    assert predictive.mean == pytest.approx(mean.mean().item(), abs=0.01)
    assert predictive.epistemic_variance == pytest.approx(mean.var().item(), rel=0.03)
    wanted = (weights * (variances + (means - mean[:, None]) ** 2)).sum(-1).mean().item()
    assert predictive.aleatoric_variance == pytest.approx(wanted, rel=0.03)


def test_the_parts_never_exceed_the_whole() -> None:
    """Logits so uncertain that the first order says more than there is: nothing but noise stays aleatoric."""
    variance = torch.zeros(7, dtype=torch.float64)
    variance[LOGITS] = 50.0
    predictive = LIKELIHOOD.predictive(DiagonalMoments(MEAN, variance))
    noise = (MEAN[LOGITS].softmax(-1) * MEAN[LOG_NOISES].exp()).sum()
    torch.testing.assert_close(predictive.aleatoric_variance, noise)
    known = LIKELIHOOD.predictive(MEAN)
    torch.testing.assert_close(predictive.variance, known.variance)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_moments(kind: Any) -> None:
    variance = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).double() / 4
    mean, y = MEAN.expand(4, 7), torch.linspace(-2, 2, 4, dtype=torch.float64)
    wanted, found = DiagonalMoments.of(mean, variance), kind.of(mean, variance)
    torch.testing.assert_close(LIKELIHOOD.expected_log_prob(found, y), LIKELIHOOD.expected_log_prob(wanted, y))
    for name in ("mean", "epistemic_variance", "aleatoric_variance", "variances"):
        ours, reference = (getattr(LIKELIHOOD.predictive(m), name) for m in (found, wanted))
        torch.testing.assert_close(ours, reference)


def test_gradients_and_single_precision() -> None:
    inputs = MEAN.clone().requires_grad_(), covariance().requires_grad_()
    y = torch.tensor(0.2, dtype=torch.float64)

    def objective(mean: Tensor, S: Tensor) -> Tensor:
        return LIKELIHOOD.expected_log_prob(FullMoments(mean, (S + S.mT) / 2), y)

    def predicted(mean: Tensor, S: Tensor) -> Tensor:
        p = LIKELIHOOD.predictive(FullMoments(mean, (S + S.mT) / 2))
        return torch.stack([p.log_prob(y), p.epistemic_variance, p.aleatoric_variance])

    assert torch.autograd.gradcheck(objective, inputs)
    assert torch.autograd.gradcheck(predicted, inputs)
    single = LIKELIHOOD.expected_log_prob(FullMoments(MEAN.float(), covariance().float()), y.float())
    assert single.item() == pytest.approx(objective(*inputs).item(), rel=1e-5)


@pytest.mark.parametrize("location", [1e3, 1e6, 9.7e29])
def test_far_from_zero_the_variance_is_that_at_zero(location: float) -> None:
    h = torch.randn(50, GaussianMixture(6).outputs, generator=torch.Generator().manual_seed(0))
    near, far = (
        GaussianMixture(6).predictive(torch.cat([torch.full((50, 1), at), h[:, 1:]], 1)) for at in (0, location)
    )
    torch.testing.assert_close(far.variance, near.variance)
    torch.testing.assert_close(far.mean, near.mean + location)


def test_files_know_it_and_errors_name_it() -> None:
    built = likelihoods.build(likelihoods.describe(GaussianMixture(4)))
    assert isinstance(built, GaussianMixture)
    assert built.outputs == 13
    with pytest.raises(InputError, match="components must be at least 1, got 0"):
        GaussianMixture(0)
    with pytest.raises(InputError, match="needs a network with 7 outputs"):
        LIKELIHOOD.predictive(torch.zeros(3, 2))


def test_a_target_with_two_modes_is_learned() -> None:
    """Two branches y = x and y = -x: the mixture finds both, one Gaussian cannot."""
    torch.manual_seed(0)
    x = torch.rand(400, 1) * 2 + 0.5
    y = x[:, 0] * torch.where(torch.rand(400) < 0.5, 1.0, -1.0) + 0.05 * torch.randn(400)
    likelihood = GaussianMixture(2)
    network = mp.network(1, (16,), likelihood.outputs, rate=0.001)
    mp.fit(network, likelihood, (x, y), epochs=80, optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
    predictive = likelihood.predictive(network(FactoredMoments.certain(torch.tensor([[2.0]]))))
    assert predictive.log_prob(torch.tensor([2.0])) > -1
    assert predictive.log_prob(torch.tensor([-2.0])) > -1
    assert predictive.log_prob(torch.tensor([0.0])) < -4


def test_sources_add_up_along_the_mean() -> None:
    likelihood = GaussianMixture(3)
    network, x = mp.network(2, (8,), likelihood.outputs, rate=0.1).double(), torch.randn(5, 2).double()
    frame = mp.attribute(network, x, likelihood=likelihood)
    predictive = likelihood.predictive(network(FactoredMoments.certain(x)))
    epistemic = frame[frame.kind != "noise"].groupby("row").variance.sum()
    assert epistemic.tolist() == pytest.approx(predictive.epistemic_variance.tolist())
    assert frame.groupby("row").variance.sum().tolist() == pytest.approx(predictive.variance.tolist())
