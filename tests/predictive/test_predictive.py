"""The predictive distribution against brute-force integration, by-hand mixtures, limits, and its own inverse."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import norm
from torch import Tensor

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.predictive import Predictive

Array = NDArray[np.float64]
LEVELS = [0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999]

# name: (E1, E2), (S11, S22), correlation of h1 and h2, nodes
OUTPUTS: dict[str, tuple[tuple[float, float], tuple[float, float], float, int]] = {
    "uncorrelated": ((0.3, -1.0), (0.5, 0.3), 0.0, 32),
    "correlated": ((-1.0, -2.0), (1.0, 0.5), 0.6, 32),
    "strongly negative": ((2.0, -3.0), (1.0, 1.0), -0.9, 32),
    "stronger still": ((0.0, -3.0), (2.0, 1.0), 0.95, 48),
    "fully correlated": ((0.0, 0.0), (0.5, 0.7), 1.0, 96),
    "uncertain noise": ((0.0, 0.5), (0.01, 1.0), 0.3, 32),
    "known noise": ((0.5, -1.0), (0.7, 0.0), 0.0, 32),
    "known function": ((0.5, -1.0), (0.0, 1.0), 0.0, 32),
    "all known": ((0.5, -1.0), (0.0, 0.0), 0.0, 32),
}


def moments(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, int]:
    mean, (s11, s22), correlation, nodes = OUTPUTS[name]
    s12 = correlation * math.sqrt(s11 * s22)
    return torch.tensor(mean, dtype=dtype), torch.tensor([[s11, s12], [s12, s22]], dtype=dtype), nodes


def predictive(name: str, dtype: torch.dtype = torch.float64) -> Predictive:
    return Predictive.heteroscedastic(*moments(name, dtype))


def brute_force(name: str, y: Array, function: Callable[[Array], Array], power: int, points: int = 1201) -> Array:
    """Integral of function((y - h1) / sigma) / sigma^power over both outputs, sigma = exp(h2 / 2), trapezoidal rule."""
    (e1, e2), (s11, s22), correlation, _ = OUTPUTS[name]
    u1, u2 = (grid.ravel() for grid in np.meshgrid(np.linspace(-8, 8, points), np.linspace(-8, 8, 181)))
    weight = norm.pdf(u1) * norm.pdf(u2)
    weight /= weight.sum()
    h1 = e1 + math.sqrt(s11) * (correlation * u2 + math.sqrt(1 - correlation**2) * u1)
    sigma = np.exp((e2 + math.sqrt(s22) * u2) / 2)
    keep = weight > 1e-14
    weight, h1, sigma = weight[keep], h1[keep], sigma[keep]
    return np.array([(weight * function((value - h1) / sigma) / sigma**power).sum() for value in y])


def brute_force_crps(name: str, y: float, stddev: float) -> float:
    """Integral of (F(t) - [y <= t])^2 dt, Gauss-Legendre on either side of the step."""
    nodes, weights = np.polynomial.legendre.leggauss(100)
    reach = 16 * stddev
    t = (nodes + 1) / 2 * reach
    below = brute_force(name, y - t, ndtr, 0, points=201) ** 2
    above = brute_force(name, y + t, lambda a: ndtr(-a), 0, points=201) ** 2
    return float((weights * (below + above)).sum() * reach / 2)


def hostile(rows: int, count: int, seed: int, spread: float = 30.0, dtype: torch.dtype = torch.float64) -> Predictive:
    """Components that lie far apart and whose variances go from 1e-6 to 1e2, with weights as small as they come."""
    generator = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(rows, count, dtype=torch.float64, generator=generator)
    variances = 10 ** (8 * torch.rand(rows, count, dtype=torch.float64, generator=generator) - 6)
    log_weights = torch.log_softmax(2 * torch.randn(rows, count, dtype=torch.float64, generator=generator), -1)
    return by_hand(means.to(dtype), variances.to(dtype), log_weights.to(dtype))


def by_hand(means: Tensor, variances: Tensor, log_weights: Tensor) -> Predictive:
    weights = log_weights.exp()
    mean = (weights * means).sum(-1)
    epistemic = (weights * (means - mean[..., None]) ** 2).sum(-1)
    return Predictive(means, variances, log_weights, mean, epistemic, (weights * variances).sum(-1))


def extreme(kind: str, count: int, rows: int = 12, dtype: torch.dtype = torch.float64) -> Predictive:
    """Components whose widths differ by up to 1e16."""
    generator = torch.Generator().manual_seed(count)
    uniform, normal, weight = torch.rand(3, rows, count, dtype=torch.float64, generator=generator)
    normal, weight = normal.logit(), weight.logit()
    means, log10_stddevs = {
        "same mean": (0 * normal, 16 * uniform - 8),
        "far from zero": (1e3 + 0 * normal, 16 * uniform - 8),
        "narrow": (normal, 14 * uniform - 12),
        "far apart": (weight.sign() * 10 ** (6 * normal.tanh()), 14 * uniform - 10),
        "rare": (100 * normal, 12 * uniform - 8),
    }[kind]
    log_weights = torch.log_softmax((15 if kind == "rare" else 1) * weight, -1)
    return by_hand(means.to(dtype), (10 ** (2 * log10_stddevs)).to(dtype), log_weights.to(dtype))


def assert_quantiles(p: Predictive, levels: list[float], y: Tensor, tolerance: float) -> None:
    """Each is next to the root that scipy finds, or the smaller tail there is right."""
    log_weights = p.log_weights.expand_as(p.means).double().log_softmax(-1)
    for row, (means, variances, logs) in enumerate(
        zip(p.means.double(), p.variances.double(), log_weights, strict=True)
    ):
        for level, found in zip(torch.tensor(levels, dtype=y.dtype).tolist(), y[row].tolist(), strict=True):
            excess, root = scipy_quantile(means.numpy(), variances.sqrt().numpy(), logs.exp().numpy(), level)
            near = abs(found - root) <= 4 * torch.finfo(y.dtype).eps * abs(root)
            assert near or abs(excess(found)) <= tolerance * min(level, 1 - level), (row, level, found, root)


def scipy_quantile(
    means: Array, stddevs: Array, weights: Array, level: float
) -> tuple[Callable[[float], float], float]:
    """Excess of the cdf, and its root between the smallest and the largest quantile of the components."""
    sign, tail = (1, level) if level <= 0.5 else (-1, 1 - level)

    def excess(y: float) -> float:
        return sign * float((weights * ndtr(sign * (y - means) / stddevs)).sum() - tail)

    ends = means + stddevs * ndtri(level)
    lower, upper = float(ends.min()), float(ends.max())
    if excess(lower) >= 0 or excess(upper) <= 0:  # up to rounding
        return excess, lower if excess(lower) >= 0 else upper
    return excess, brentq(excess, lower, upper, xtol=1e-300, rtol=1e-15, maxiter=10_000)


def central(name: str) -> Tensor:
    """Targets that cover the central 99.98 %."""
    return predictive(name).quantile([1e-4, *LEVELS, 1 - 1e-4])


# Values


@pytest.mark.parametrize("name", OUTPUTS)
def test_density_and_cdf_match_brute_force(name: str) -> None:
    y = central(name)
    density = brute_force(name, y.numpy(), norm.pdf, 1)
    below = brute_force(name, y.numpy(), ndtr, 0)
    above = brute_force(name, y.numpy(), lambda a: ndtr(-a), 0)
    p = predictive(name)
    np.testing.assert_allclose(p.log_prob(y).numpy(), np.log(density), rtol=0, atol=1e-6)
    np.testing.assert_allclose(p.cdf(y).numpy(), below, rtol=0, atol=1e-7)
    np.testing.assert_allclose(p.probability_above(y).numpy(), above, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", OUTPUTS)
def test_crps_matches_its_integral(name: str) -> None:
    p = predictive(name)
    for y in (-1.5, 0.4):
        assert p.crps(y).item() == pytest.approx(brute_force_crps(name, y, p.stddev.item()), abs=1e-6)


@pytest.mark.parametrize("name", OUTPUTS)
def test_closed_form_moments_are_those_of_the_components(name: str) -> None:
    p = predictive(name)
    (e1, e2), (s11, s22), _, _ = OUTPUTS[name]
    assert p.mean.item() == e1
    assert p.epistemic_variance.item() == s11
    assert p.aleatoric_variance.item() == pytest.approx(math.exp(e2 + s22 / 2))
    nodes = by_hand(p.means, p.variances, p.log_weights)
    torch.testing.assert_close(nodes.mean, p.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(nodes.variance, p.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(p.stddev**2, p.variance)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_crps_sums_over_all_pairs(count: int) -> None:
    p = hostile(3, count, seed=count, spread=1.0)
    y = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    weights = p.log_weights.exp()

    def absolute(m: Tensor, v: Tensor) -> Tensor:
        a = (m / v.sqrt()).numpy()
        return torch.tensor(2 * v.sqrt().numpy() * norm.pdf(a) + m.numpy() * (2 * ndtr(a) - 1))

    expected = (weights * absolute(y[:, None] - p.means, p.variances)).sum(-1)
    for k in range(count):
        for other in range(count):
            pair = absolute(p.means[:, k] - p.means[:, other], p.variances[:, k] + p.variances[:, other])
            expected -= 0.5 * weights[:, k] * weights[:, other] * pair
    torch.testing.assert_close(p.crps(y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
@pytest.mark.parametrize("row_weights", [False, True])
def test_crps_of_many_components(dtype: torch.dtype, tolerance: float, row_weights: bool) -> None:
    """By an integral where it is smooth, by pairs where it is not: both are in here, and both are right."""
    rows, count, generator = 12, 150, torch.Generator().manual_seed(0)
    normal = torch.randn(2, rows, count, dtype=torch.float64, generator=generator)
    spread = torch.logspace(-1, 6, rows, dtype=torch.float64)[:, None]  # of the last rows' means, in their widths
    log_weights = torch.log_softmax(2 * torch.randn(rows, count, dtype=torch.float64, generator=generator), -1)
    log_weights = log_weights if row_weights else log_weights[0]
    variances = (torch.linspace(8, 0.5, rows, dtype=torch.float64)[:, None] * normal[1]).exp()
    p = by_hand(*(x.to(dtype) for x in (1e3 + spread * normal[0], variances, log_weights)))
    y = p.mean + 0.5 * p.stddev
    whole = p.crps(y)
    with torch.no_grad():
        torch.testing.assert_close(p.crps(y), whole, rtol=0, atol=0)
    means, variances, weights = (x.double() for x in (p.means, p.variances, p.log_weights.double().softmax(-1)))

    def absolute(m: Tensor, v: Tensor) -> Tensor:
        a = m / v.sqrt()
        return 2 * v.sqrt() * torch.exp(-0.5 * a**2) / math.sqrt(2 * math.pi) + m * torch.erf(a / math.sqrt(2))

    pairs = absolute(means[:, :, None] - means[:, None], variances[:, :, None] + variances[:, None])
    weights = weights.expand_as(means)
    expected = (weights * absolute(y.double()[:, None] - means, variances)).sum(-1)
    expected -= 0.5 * torch.einsum("ri,rj,rij->r", weights, weights, pairs)
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=0)


def test_crps_of_many_components_takes_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [predictive(name)[None] for name in ("uncorrelated", "correlated", "strongly negative", "known noise")]
    p = Predictive.mixture(members)
    assert p.means.shape == (1, 128)
    by_pairs = p.affine(1.0, torch.zeros(1).double().requires_grad_()).crps(0.4)
    assert by_pairs.requires_grad
    monkeypatch.setattr("mpgelu.predictive.distances._paired_difference", lambda *_: pytest.fail("by pairs"))
    torch.testing.assert_close(p.crps(0.4), by_pairs.detach(), rtol=1e-7, atol=0)


def test_crps_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    p = hostile(10, 5, seed=1)
    whole = p.crps(0.5)
    monkeypatch.setattr("mpgelu.predictive.distances._ELEMENTS_AT_ONCE", 15)
    torch.testing.assert_close(p.crps(0.5), whole, rtol=0, atol=0)
    torch.testing.assert_close(p[:, None].crps(0.5), whole[:, None], rtol=0, atol=0)


def test_tails_keep_their_digits_in_float32() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    p = Predictive.gaussian(zero, zero, one)
    assert p.cdf(-9.0).item() == pytest.approx(norm.cdf(-9), rel=1e-4, abs=0)
    assert p.probability_above(9.0).item() == pytest.approx(norm.sf(9), rel=1e-4, abs=0)
    assert p.log_prob(30.0).item() == pytest.approx(norm.logpdf(30), rel=1e-6)


def test_probabilities_stay_below_one_in_float32() -> None:
    p = hostile(400, 40, seed=0, dtype=torch.float32)
    assert (p.log_weights.exp().sum(-1) > 1).any()
    assert (p.cdf(1e4) <= 1).all()
    assert (p.probability_above(-1e4) <= 1).all()


# Quantiles


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_quantile_inverts_the_cdf_of_hostile_mixtures(count: int, compiled: bool) -> None:
    p = hostile(400, count, seed=count)
    with nullcontext() if compiled else native.disabled():
        y = p.quantile(LEVELS)
    assert y.shape == (400, len(LEVELS))
    reached = p[:, None].cdf(y)
    torch.testing.assert_close(reached, torch.tensor(LEVELS, dtype=y.dtype).expand_as(reached), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OUTPUTS)
def test_quantile_inverts_the_cdf(name: str) -> None:
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    p = predictive(name)
    torch.testing.assert_close(p.cdf(p.quantile(levels)), levels, rtol=0, atol=1e-13)
    single = predictive(name, torch.float32)
    torch.testing.assert_close(single.cdf(single.quantile(LEVELS)), levels.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(single.quantile(LEVELS), p.quantile(LEVELS).float(), rtol=1e-5, atol=1e-5)


def test_quantile_of_hostile_mixtures_in_float32() -> None:
    """The root is found up to the spacing of float32 numbers, which a narrow component far from zero feels."""
    p = hostile(400, 5, seed=0, spread=3.0, dtype=torch.float32)
    y = p.quantile(LEVELS)
    step = y.abs() * torch.finfo(torch.float32).eps
    below, above = p[:, None].cdf(y - step), p[:, None].cdf(y + step)
    levels = torch.tensor(LEVELS)
    assert (below <= levels + 1e-6).all()
    assert (above >= levels - 1e-6).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize("kind", ["same mean", "far from zero", "narrow", "far apart", "rare"])
def test_quantile_whatever_the_widths(kind: str, count: int, dtype: torch.dtype, tolerance: float) -> None:
    p, levels = extreme(kind, count, dtype=dtype), [1e-5, 0.05, 0.3, 0.5, 0.9, 0.999]
    assert_quantiles(p, levels, p.quantile(levels), tolerance)
    assert_quantiles(p, levels[1:-1], p.quantile(levels[1:-1]), tolerance)  # without tiny tails, by the kernel


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", ["same mean", "far from zero", "narrow", "far apart", "rare"])
def test_quantile_whatever_the_widths_where_numbers_are_not_seen(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    p, levels = extreme(kind, 7, dtype=dtype), [1e-5, 0.05, 0.3, 0.5, 0.9, 0.999]

    def row(means: Tensor, variances: Tensor, log_weights: Tensor) -> Tensor:
        return by_hand(means, variances, log_weights).quantile(levels)

    assert_quantiles(p, levels, torch.func.vmap(row)(p.means, p.variances, p.log_weights), tolerance)


def test_quantile_of_a_thousand_components_far_from_the_data() -> None:
    """A log-variance of stddev 5, as networks say far outside: most of the mass 1e12 times narrower than the whole."""
    mean = torch.tensor([[1.0, -6.0], [-30.0, 4.0]]).double()
    covariance = torch.tensor([[1e-12, 0.0], [0.0, 25.0]]).double()
    parts = [Predictive.heteroscedastic(mean + shift, covariance.expand(2, 2, 2)) for shift in np.linspace(0, 3, 32)]
    p, levels = Predictive.mixture(parts), [0.05, 0.5, 0.95]
    assert (p.variances.amax(-1) / p.variances.amin(-1)).sqrt().min() > 1e12
    same = by_hand(p.means, p.variances, p.log_weights.expand_as(p.means))
    for tolerance in (0.0, 1e-5):
        assert_quantiles(same, levels, p.quantile(levels, tolerance), max(1e-11, 20 * tolerance))
        assert_quantiles(same, levels, same.quantile(levels, tolerance), max(1e-11, 20 * tolerance))


@pytest.mark.parametrize("q", [1e-200, 1e-12, 1 - 1e-9])
def test_quantile_far_out_in_a_tail(q: float) -> None:
    p = hostile(20, 3, seed=0, spread=0.1)
    reached = p.cdf(p.quantile(q)) if q < 0.5 else p.probability_above(p.quantile(q))
    torch.testing.assert_close(reached, torch.full((20,), min(q, 1 - q), dtype=torch.float64), rtol=1e-9, atol=0)


def test_weights_that_sum_to_one_up_to_rounding_leave_no_tail_out() -> None:
    """Those of a float32 network in a float64 table."""
    p = by_hand(torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.full((2,), math.log(0.5) - 1e-7).double())
    assert p.quantile(1 - 1e-9).item() == pytest.approx(norm.isf(1e-9), rel=1e-7)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.999])
def test_interval_within_a_tolerance(level: float) -> None:
    generator = torch.Generator().manual_seed(0)
    means = 1e6 + 10 * torch.randn(200, 12, generator=generator, dtype=torch.float64)
    variances = torch.exp(3 * torch.randn(200, 12, generator=generator, dtype=torch.float64))
    p = by_hand(means, variances, torch.full((12,), -math.log(12)).double())
    lower, upper = p.interval(level, tolerance=1e-5)
    np.testing.assert_allclose(p.cdf(lower), (1 - level) / 2, rtol=0, atol=1e-5)
    np.testing.assert_allclose(p.cdf(upper), (1 + level) / 2, rtol=0, atol=1e-5)
    assert (p.cdf(lower) - (1 - level) / 2).abs().max() > 1e-12  # it was used


def test_components_of_infinite_variance() -> None:
    """Half of such a component lies below every number, half above; as a log-variance overflows far from the data."""
    means, variances = torch.zeros(1, 2).double(), torch.tensor([[1.0, math.inf]]).double().requires_grad_()
    p = by_hand(means, variances, torch.tensor([0.8, 0.2]).double().log())
    expected = [-math.inf, norm.ppf(0.15 / 0.8), 0.0, math.inf]
    y = p.quantile([0.05, 0.25, 0.5, 0.95])
    np.testing.assert_allclose(y[0].detach().numpy(), expected, atol=1e-12)
    assert p.crps(0.3).item() == math.inf
    (gradient,) = torch.autograd.grad(y.nan_to_num(0, 0, 0).sum(), variances)
    assert gradient[0, 0].isfinite()
    fields = (p.means, p.variances.detach(), p.log_weights.expand(1, 2))
    vmapped = torch.func.vmap(lambda *f: by_hand(*f).quantile([0.05, 0.25, 0.5, 0.95]))(*fields)
    np.testing.assert_allclose(vmapped[0].numpy(), expected, atol=1e-12)


def test_what_is_not_a_number_stays_so_and_no_rows_are_none() -> None:
    p = hostile(3, 4, seed=0)
    broken = by_hand(torch.where(torch.arange(3)[:, None] == 1, math.nan, p.means), p.variances, p.log_weights)
    y = broken.quantile([0.1, 0.9])
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], p.quantile([0.1, 0.9])[[0, 2]])
    assert p[:0].quantile([0.1, 0.9]).shape == (0, 2)
    assert p[:0].crps(0.0).shape == (0,)


@pytest.mark.parametrize("row_weights", [False, True])
def test_quantiles_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch, row_weights: bool) -> None:
    p = hostile(10, 5, seed=1)
    p = p if row_weights else by_hand(p.means, p.variances, p.log_weights[0])
    with native.disabled():
        whole = p.quantile([0.05, 0.95])
        monkeypatch.setattr("mpgelu.predictive.quantiles._ELEMENTS_AT_ONCE", 15)
        torch.testing.assert_close(p.quantile([0.05, 0.95]), whole, rtol=1e-12, atol=0)


def test_quantile_of_one_gaussian_is_closed_form() -> None:
    mean, variance = torch.tensor([1.0, -2.0]).double(), torch.tensor([4.0, 0.0]).double()
    y = Predictive.gaussian(mean, variance, torch.zeros_like(mean)).quantile(0.975)
    torch.testing.assert_close(y, mean + variance.sqrt() * norm.ppf(0.975))


def test_quantile_between_far_components_is_in_the_gap() -> None:
    means, variances = torch.tensor([[-1e3, 1e3]]).double(), torch.tensor([[1e-6, 1.0]]).double().requires_grad_()
    p = by_hand(means, variances, torch.full((2,), math.log(0.5)).double())
    y = p.quantile(0.5)
    torch.testing.assert_close(p.cdf(y), torch.full_like(y, 0.5))
    (gradient,) = torch.autograd.grad(y.sum(), variances)
    assert gradient.isfinite().all()


def test_point_masses_are_not_nan() -> None:
    means = torch.tensor([[0.0, 1.0, 5.0]]).double().requires_grad_()
    variances = torch.tensor([[0.0, 0.25, 0.0]]).double().requires_grad_()
    p = by_hand(means, variances, torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64).log())
    y = p.quantile([0.02, 0.3, 0.5, 0.97])
    torch.testing.assert_close(y[0, [1, 3]], torch.tensor([0.0, 5.0]).double(), rtol=0, atol=1e-6)
    values = [y, p.cdf(0.5), p.crps(0.5), p.probability_above(0.5), p.log_prob(0.5)]
    assert all(value.isfinite().all() for value in values)
    assert p.cdf(0.0 + 1e-9).item() == pytest.approx(0.3 + 0.4 * norm.cdf(-2), abs=1e-8)
    only_points = by_hand(means, 0 * variances, torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64).log())
    values.append(only_points.quantile([0.1, 0.5, 0.9]))
    torch.testing.assert_close(values[-1], means.detach(), rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(torch.stack([value.sum() for value in values]).sum(), [means, variances])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_interval_covers_as_promised() -> None:
    p = predictive("strongly negative")
    draws = p.sample(40_000, torch.Generator().manual_seed(0))
    for level in (0.5, 0.9, 0.99):
        lower, upper = p.interval(level)
        torch.testing.assert_close(
            p.cdf(upper) - p.cdf(lower), torch.tensor(level, dtype=torch.float64), rtol=0, atol=1e-9
        )
        torch.testing.assert_close(p.cdf(lower), p.probability_above(upper))
        covered = ((lower < draws) & (draws < upper)).double().mean().item()
        assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / len(draws))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_cdf_and_quantile_are_monotone_and_inverse(seed: int, count: int, low: float, high: float) -> None:
    p = hostile(4, count, seed=seed)
    y = p.quantile(sorted([low, high]))
    assert (y[:, 0] <= y[:, 1]).all()
    assert (p.cdf(y[:, 0]) <= p.cdf(y[:, 1]) + 1e-15).all()
    torch.testing.assert_close(p.cdf(p.quantile(low)), torch.full((4,), low, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(p.cdf(y[:, 0]) + p.probability_above(y[:, 0]), torch.ones(4).double())


# Limits


def test_known_noise_is_one_gaussian_with_finite_gradients() -> None:
    mean = torch.tensor([[0.5, -1.0], [0.5, -1.0]]).double().requires_grad_()
    covariance = torch.tensor([[[0.7, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]).double().requires_grad_()
    p = Predictive.heteroscedastic(mean, covariance)
    gaussian = p.matched()
    y = torch.tensor([1.3, 0.1]).double()
    torch.testing.assert_close(p.log_prob(y), gaussian.log_prob(y))
    torch.testing.assert_close(p.quantile(LEVELS), gaussian.quantile(LEVELS))
    torch.testing.assert_close(p.crps(y), gaussian.crps(y))
    total = p.log_prob(y).sum() + p.quantile(0.9).sum() + p.crps(y).sum() + p.cdf(y).sum()
    for gradient in torch.autograd.grad(total, [mean, covariance]):
        assert gradient.isfinite().all()


def test_small_uncertainty_of_the_noise_tends_to_none() -> None:
    y = torch.tensor([1.3]).double()
    mean = torch.tensor([[0.5, -1.0]]).double()
    values = [
        Predictive.heteroscedastic(mean, torch.diag(torch.tensor([0.7, s]).double())[None]).log_prob(y)
        for s in (0.0, 1e-30, 1e-12)
    ]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(values[2], values[0], rtol=0, atol=1e-9)


def test_singular_covariance_passes_its_gradient_on() -> None:
    """The conditional variance of h1 is zero, or a rounding error below; both must pull on the variance of h1."""
    mean = torch.tensor([[0.0, -2.0]])
    for s12 in (0.3, 0.3 * (1 + 1e-6)):
        covariance = torch.tensor([[[0.3, s12], [s12, 0.3]]], requires_grad=True)
        p = Predictive.heteroscedastic(mean, covariance)
        assert (p.variances > 0).all()
        (gradient,) = torch.autograd.grad(p.log_prob(0.2).sum(), covariance)
        assert gradient.isfinite().all()
        assert gradient[0, 0, 0].abs() > 1e-3
        almost_no_noise = Predictive.heteroscedastic(torch.tensor([[0.0, -40.0]]), covariance)
        assert (almost_no_noise.variances > 0).all()


@pytest.mark.parametrize("name", OUTPUTS)
def test_float32_agrees_with_float64(name: str) -> None:
    y = torch.tensor([-1.0, 0.2, 3.0])
    single, double = predictive(name, torch.float32), predictive(name)
    for method in ("log_prob", "cdf", "crps", "probability_above"):
        value = getattr(single, method)(y)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(double, method)(y.double()), rtol=2e-5, atol=2e-6)


# Derivatives and transforms


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's forward mode
@pytest.mark.parametrize("method", ["log_prob", "cdf", "crps", "probability_above", "quantile"])
def test_gradcheck(method: str) -> None:
    def value(mean: Tensor, factor: Tensor, weights: Tensor, argument: Tensor) -> Tensor:
        p = Predictive.heteroscedastic(mean, factor @ factor.mT, nodes=8)
        ensemble = Predictive.mixture([p, p.affine(0.7, 1.0)], weights)
        result = getattr(ensemble, method)(argument)
        assert isinstance(result, Tensor)
        return result

    mean = torch.tensor([[0.3, -1.0], [-0.5, 0.2]]).double().requires_grad_()
    factor = torch.tensor([[[0.8, 0.0], [0.3, 0.5]], [[0.5, 0.2], [-0.6, 0.1]]]).double().requires_grad_()
    weights = torch.tensor([0.6, 0.4]).double().requires_grad_()
    argument = torch.tensor([0.2, 0.9]).double().requires_grad_()
    assert torch.autograd.gradcheck(
        value, (mean, factor, weights, argument), check_forward_ad=method in ("cdf", "quantile")
    )


def test_vmap_over_rows_is_the_batch() -> None:
    mean = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    covariance = torch.eye(2).double() * 0.4 + 0.2

    def row(mean: Tensor) -> tuple[Tensor, ...]:
        p = Predictive.heteroscedastic(mean, covariance)
        return p.log_prob(0.3), p.cdf(0.3), p.crps(0.3), p.quantile([0.05, 0.95]), *p.interval(0.5)

    together = torch.func.vmap(row)(mean)
    p = Predictive.heteroscedastic(mean, covariance.expand(6, 2, 2))
    batch = (p.log_prob(0.3), p.cdf(0.3), p.crps(0.3), p.quantile([0.05, 0.95]), *p.interval(0.5))
    for a, b in zip(together, batch, strict=True):
        torch.testing.assert_close(a, b)
    gradient = torch.func.grad(lambda m: Predictive.heteroscedastic(m, covariance).quantile(0.9))(mean[0])
    torch.testing.assert_close(gradient[0], torch.ones(()).double())


def test_compiles_without_graph_breaks() -> None:
    def values(mean: Tensor, covariance: Tensor) -> tuple[Tensor, ...]:
        p = Predictive.mixture([Predictive.heteroscedastic(mean, covariance, nodes=8)] * 2).affine(2.0, 1.0)
        return p.mean, p.quantile([0.1, 0.5, 0.9]), p.crps(0.2), p.log_prob(p.mean)

    mean, covariance = torch.tensor([[0.3, -1.0]]), torch.tensor([[[0.5, 0.1], [0.1, 0.3]]])
    compiled = torch.compile(values, fullgraph=True, backend="eager")
    for a, b in zip(compiled(mean, covariance), values(mean, covariance), strict=True):
        torch.testing.assert_close(a, b)


def test_exports() -> None:
    class Quantiles(torch.nn.Module):
        def forward(self, mean: Tensor, covariance: Tensor) -> Tensor:
            return Predictive.heteroscedastic(mean, covariance, nodes=4).quantile([0.1, 0.9])

    arguments = (torch.zeros(3, 2), 0.3 * torch.eye(2).expand(3, 2, 2))
    exported = torch.export.export(Quantiles(), arguments)
    torch.testing.assert_close(exported.module()(*arguments), Quantiles()(*arguments))


# Mixtures, rows, units


def members() -> list[Predictive]:
    mean = torch.tensor([[0.3, -1.0], [-0.5, 0.2]]).double()
    covariance = torch.tensor([[0.5, 0.1], [0.1, 0.3]]).double().expand(2, 2, 2)
    first = Predictive.heteroscedastic(mean, covariance)
    return [
        first,
        first.affine(1.5, -1.0),
        Predictive.heteroscedastic(mean + 1, covariance, nodes=20),
        hostile(2, 3, 0),
    ]


def test_mixture_is_the_weighted_sum_of_its_members() -> None:
    parts, weights = members(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    shares = weights / weights.sum()
    p, y = Predictive.mixture(parts, weights), torch.tensor([0.4, -2.0]).double()
    torch.testing.assert_close(p.cdf(y), sum(w * part.cdf(y) for w, part in zip(shares, parts, strict=True)))
    density = sum(w * part.log_prob(y).exp() for w, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(p.log_prob(y).exp(), density)
    equal = Predictive.mixture(parts[:3])
    torch.testing.assert_close(equal.cdf(y), sum(part.cdf(y) for part in parts[:3]) / 3)
    assert equal.log_weights.shape == (84,)
    assert p.log_weights.shape == (2, 87)
    torch.testing.assert_close(p.log_weights.exp().sum(-1), torch.ones(2).double())


def test_mixture_obeys_the_law_of_total_variance() -> None:
    parts, weights = members(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    p = Predictive.mixture(parts, weights)
    second_moment = sum(w * (part.variance + part.mean**2) for w, part in zip(weights, parts, strict=True))
    mean = sum(w * part.mean for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(p.mean, mean)
    torch.testing.assert_close(p.variance, second_moment - mean**2)
    aleatoric = sum(w * part.aleatoric_variance for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(p.aleatoric_variance, aleatoric)
    torch.testing.assert_close(p.variance, by_hand(p.means, p.variances, p.log_weights).variance, rtol=1e-6, atol=0)


def test_mixture_over_a_dimension_is_the_mixture_of_its_slices() -> None:
    mean = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    p = Predictive.heteroscedastic(mean, (0.3 * torch.eye(2).double()).expand(3, 4, 2, 2), nodes=8)
    weights = torch.tensor([0.2, 0.3, 0.5]).double()
    over, slices = p.mixture_over(0, weights), Predictive.mixture([p[0], p[1], p[2]], weights)
    assert over.batch_shape == (4,)
    for name in ("means", "variances", "log_weights", "mean", "variance"):
        torch.testing.assert_close(getattr(over, name), getattr(slices, name))
    last = p.mixture_over(-1)
    torch.testing.assert_close(last.cdf(0.1), p.cdf(0.1).mean(-1))
    torch.testing.assert_close(last.mean, p.mean.mean(-1))


def test_rows_are_chosen_in_every_field() -> None:
    p = Predictive.mixture(members())
    torch.testing.assert_close(p[1].cdf(0.3), p.cdf(0.3)[1])
    torch.testing.assert_close(p[torch.tensor([False, True])].quantile(0.3), p.quantile(0.3)[1:])
    torch.testing.assert_close(p[..., None].variance, p.variance[:, None])
    torch.testing.assert_close(p[0:1, None].mean, p.mean[0:1, None])


@pytest.mark.parametrize("scale", [2.5, -0.5])
def test_affine_changes_the_unit(scale: float) -> None:
    p, shift = Predictive.mixture(members()), torch.tensor([3.0, -1.0]).double()
    moved, y = p.affine(scale, shift), torch.tensor([0.4, -2.0]).double()
    image = scale * y + shift
    torch.testing.assert_close(moved.log_prob(image), p.log_prob(y) - math.log(abs(scale)))
    torch.testing.assert_close(moved.cdf(image), p.cdf(y) if scale > 0 else p.probability_above(y))
    torch.testing.assert_close(moved.crps(image), p.crps(y) * abs(scale))
    torch.testing.assert_close(moved.mean, scale * p.mean + shift)
    torch.testing.assert_close(moved.epistemic_variance, scale**2 * p.epistemic_variance)
    torch.testing.assert_close(moved.aleatoric_variance, scale**2 * p.aleatoric_variance)


@pytest.mark.parametrize("row_weights", [False, True])
def test_samples_have_the_moments(row_weights: bool) -> None:
    p = Predictive.mixture(members() if row_weights else members()[:3])
    draws = p.sample(20_000, torch.Generator().manual_seed(1))
    assert draws.shape == (20_000, 2)
    assert ((draws.mean(0) - p.mean).abs() < 4 * p.stddev / math.sqrt(len(draws))).all()
    spread = ((draws - p.mean) ** 2).std(0) / math.sqrt(len(draws))
    assert ((draws.var(0) - p.variance).abs() < 4 * spread).all()
    torch.testing.assert_close(draws, p.sample(20_000, torch.Generator().manual_seed(1)), rtol=0, atol=0)
    assert p[0].sample(3).shape == (3,)


def test_matched_keeps_mean_and_variances() -> None:
    p = predictive("correlated")
    gaussian = p.matched()
    assert gaussian.means.shape == (1,)
    torch.testing.assert_close(gaussian.log_prob(0.3).item(), norm(p.mean.item(), p.stddev.item()).logpdf(0.3))
    torch.testing.assert_close(gaussian.epistemic_variance, p.epistemic_variance)


def test_targets_broadcast_against_the_rows() -> None:
    p = Predictive.mixture(members())
    grid = torch.linspace(-1, 1, 5).double()[:, None]
    for values in (p.cdf(grid), p.log_prob(grid), p.crps(grid), p.probability_above(grid)):
        assert values.shape == (5, 2)
    torch.testing.assert_close(p.crps(grid)[3], p.crps(grid[3]))


def test_targets_of_any_kind() -> None:
    p, values = gaussian(3), [0.1, 0.2, 0.3]
    wanted = p.crps(torch.tensor(values))
    for y in (values, tuple(values), np.array(values), pd.Series(values)):
        torch.testing.assert_close(p.crps(y), wanted)


def test_repr_shows_the_shapes() -> None:
    assert repr(members()[0]) == "Predictive(mean (2,), 32 components, float64)"
    assert repr(members()[0].matched()) == "Predictive(mean (2,), 1 component, float64)"


# Errors

ROWS = torch.zeros(3)
EYE = torch.eye(2).expand(3, 2, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Predictive.gaussian(torch.zeros(3, dtype=torch.int64), ROWS, ROWS), "mean must be a float.*int64"),
        (
            lambda: Predictive.gaussian(ROWS, ROWS, torch.zeros(3, 1)),
            r"aleatoric_variance .* \(3,\) or \(\), got \(3, 1\)",
        ),
        (lambda: Predictive.gaussian(ROWS, ROWS.double(), ROWS), "epistemic_variance must be torch.float32.*float64"),
        (lambda: Predictive.gaussian(ROWS, ROWS, 1.0), "aleatoric_variance must be a float tensor, got float"),  # type: ignore[arg-type]
        (lambda: Predictive.heteroscedastic(ROWS, EYE), r"mean must be \(\*batch, 2\), got \(3,\)"),
        (lambda: Predictive.heteroscedastic(torch.zeros(3, 2), EYE[0]), r"covariance .* \(3, 2, 2\), got \(2, 2\)"),
        (lambda: Predictive.heteroscedastic(torch.zeros(3, 2), EYE, nodes=0), "nodes must be at least 1, got 0"),
        (lambda: Predictive.mixture([]), "members must not be empty"),
        (lambda: Predictive.mixture([gaussian(3), gaussian(2)]), r"every member .* \(3,\), got \(2,\)"),
        (lambda: Predictive.mixture([gaussian(3)], torch.ones(2)), r"weights must have shape \(1,\), got \(2,\)"),
        (lambda: gaussian(3).mixture_over(1), "dim must be one of the 1 dimensions of the batch, got 1"),
        (lambda: gaussian(3).log_prob(torch.zeros(3, 1)), r"log_prob: y .* \(3, 1\); use y.squeeze"),
        (lambda: gaussian(3).crps(torch.zeros(4)), r"crps: y must broadcast against the rows \(3,\), got \(4,\)"),
        (lambda: gaussian(3).cdf(ROWS.double()), "cdf: y must be torch.float32.*float64"),
        (lambda: gaussian(3).quantile(1.5), "q must lie strictly between 0 and 1, got 1.5"),
        (lambda: gaussian(3).quantile(torch.full((2, 2), 0.5)), r"q must be .* \(2, 2\); use q.flatten"),
        (lambda: gaussian(3).interval(95), "level must lie strictly between 0 and 1, got 95"),
        (lambda: gaussian(3).affine(torch.ones(3, 1), 0.0), r"affine: scale .* \(\) or \(3,\), got \(3, 1\)"),
        (lambda: Predictive(torch.tensor(0.0), ROWS, ROWS, ROWS, ROWS, ROWS), "means must be .* got a scalar"),
        (lambda: Predictive(EYE[0], EYE[0], ROWS, ROWS, ROWS, ROWS), r"log_weights .* \(2,\) or \(2, 2\), got \(3,\)"),
        (lambda: Predictive(EYE[0], EYE[0], EYE[0], ROWS, ROWS, ROWS), r"Predictive: mean .* \(2,\), got \(3,\)"),
    ],
)
def test_errors_name_the_argument(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def gaussian(rows: int) -> Predictive:
    return Predictive.gaussian(torch.zeros(rows), torch.zeros(rows), torch.ones(rows))
