"""The periodic embedding: closed forms against quadrature, limits, and how factored moments stay factored."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, InputError
from mpgelu.moments import Block
from mpgelu.rules import add, linear, periodic
from reference import TYPES, Array, Dense, random_covariance, weighted_moments

N, K, D = 3, 5, 2
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
VARIANCES = [1e-12, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e4]


def parameters(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies, two of which differ by little only, phases and weights."""
    frequency = 0.3 * torch.randn(n, K, dtype=dtype)
    frequency[:, 1] = frequency[:, 0] + 1e-3
    return frequency, torch.rand(n, K, dtype=dtype), torch.randn(n, K, D, dtype=dtype)


def quadrature(mean: float, variance: float, frequency: Array, phase: Array, weight: Array) -> Dense:
    """One feature by the trapezoidal rule, fine enough for a thousand waves within a standard deviation."""
    z = np.arange(-10, 10, 2e-3)
    density = np.exp(-z * z / 2)
    x = mean + math.sqrt(variance) * z[:, None]
    values = np.concatenate([x, np.cos(2 * np.pi * (x * frequency + phase)) @ weight], 1)
    return weighted_moments(values, density / density.sum())


def textbook(mean: Array, covariance: Array, frequency: Array, phase: Array) -> Array:
    """Covariance of all cosines by cos A cos B = (cos(A - B) + cos(A + B)) / 2, in extended precision."""
    wide = np.longdouble
    slope = 2 * wide(np.pi) * frequency.astype(wide)
    angle = (slope * mean[:, None] + 2 * wide(np.pi) * phase.astype(wide)).ravel()
    joint = np.repeat(np.repeat(covariance.astype(wide), K, 0), K, 1) * np.outer(slope.ravel(), slope.ravel())
    spread = np.diag(joint)[:, None] + np.diag(joint)
    minus = np.cos(angle[:, None] - angle) * np.exp(-(spread - 2 * joint) / 2)
    plus = np.cos(angle[:, None] + angle) * np.exp(-(spread + 2 * joint) / 2)
    each = np.cos(angle) * np.exp(-np.diag(joint) / 2)
    return np.asarray((minus + plus) / 2 - np.outer(each, each), dtype=np.float64)


# Values


@EVERY_TYPE
@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_marginals_match_quadrature_for_small_and_large_variances_and_means(
    kind: Any, variance: float, size: float
) -> None:
    mean, held = size * torch.randn(N, dtype=torch.float64), parameters()
    out = periodic(kind.of(mean, torch.full_like(mean, variance)), *held)
    exact = [quadrature(float(mean[j]), variance, *(p[j].numpy() for p in held)) for j in range(N)]
    scale = math.sqrt(variance) if variance < 1 else 1.0
    np.testing.assert_allclose(out.mean, np.concatenate([m for m, _ in exact]), rtol=1e-10, atol=1e-11)
    for j, (_, wanted) in enumerate(exact):
        place = slice(j * (1 + D), (j + 1) * (1 + D))
        found = out.covariance[place, place].numpy()
        wanted = np.diag(np.diag(wanted)) if kind is DiagonalMoments else wanted
        np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-10 * scale**2 * size)
    others = [out.covariance[i, j] for i, j in np.ndindex(9, 9) if i // (1 + D) != j // (1 + D)]
    assert not torch.stack(others).any()  # independent features stay independent


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0, 1e4])
def test_correlated_features_match_the_sum_formula(size: float) -> None:
    frequency, phase, _ = parameters()
    cosines = torch.eye(K, dtype=torch.float64).expand(N, K, K)
    mean, covariance = torch.randn(N, dtype=torch.float64), size * random_covariance(N)
    for value in (FullMoments(mean, covariance), FactoredMoments.of(mean, covariance, max_rank=math.inf)):
        out = periodic(value, frequency, phase, cosines)
        found = out.covariance.view(N, 1 + K, N, 1 + K)
        wanted = textbook(mean.numpy(), covariance.numpy(), frequency.numpy(), phase.numpy())
        np.testing.assert_allclose(found[:, 1:, :, 1:].reshape(N * K, N * K), wanted, rtol=1e-8, atol=1e-13)
        torch.testing.assert_close(found[:, 0, :, 0], covariance)


@EVERY_TYPE
@pytest.mark.parametrize("variance", VARIANCES)
def test_float32_is_as_good_as_its_rounding(kind: Any, variance: float) -> None:
    mean, held = torch.randn(50, N), parameters(torch.float32)
    out = periodic(kind.of(mean, torch.full_like(mean, variance)), *held)
    wanted = periodic(kind.of(mean.double(), torch.full_like(mean, variance).double()), *(p.double() for p in held))
    torch.testing.assert_close(out.mean.double(), wanted.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.covariance.double(), wanted.covariance, rtol=2e-6, atol=1e-6 * min(variance, 1))
    assert (out.variance >= 0).all()


def test_the_variance_of_an_even_wave_does_not_cancel() -> None:
    """Around the top of a wave the variance is a^4 v^2 / 2, far below the rounding of the second moment."""
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for variance in (1e-14, 1e-10, 1e-6):
        value = DiagonalMoments(none, variance * one)
        found = periodic(value, one, none, one.unsqueeze(0)).variance[0, 1].item()
        assert found == pytest.approx((2 * math.pi) ** 4 * variance**2 / 2, rel=1e-3)


@EVERY_TYPE
def test_variances_of_what_nearly_cancels_are_not_negative(kind: Any) -> None:
    frequency = 0.3 + 1e-6 * torch.arange(4.0).expand(N, 4)
    weight = torch.tensor([1.0, -1.0, -1.0, 1.0]).view(1, 4, 1).expand(N, 4, 1)
    for variance in VARIANCES:
        value = kind.of(torch.randn(200, N), torch.full((200, N), variance))
        assert (periodic(value, frequency, torch.zeros(N, 4), weight).variance >= 0).all()


# Limits


@EVERY_TYPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_zero_variance_it_is_the_plain_embedding(kind: Any, dtype: torch.dtype) -> None:
    x, held = torch.randn(7, N, dtype=dtype, requires_grad=True), parameters(dtype)
    plain = periodic(x, *held)
    for value in (kind.certain(x), kind.of(x, torch.zeros(N, dtype=dtype))):
        out = periodic(value, *held)
        torch.testing.assert_close(out.mean, plain, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-14)
        assert torch.equal(out.covariance, torch.zeros(7, 9, 9, dtype=dtype))
        wanted, found = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (plain, out.mean))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@EVERY_TYPE
def test_the_derivative_by_a_variance_of_zero_is_the_square_of_the_slope(kind: Any) -> None:
    x, held = torch.randn(1, N, dtype=torch.float64), parameters()
    variance = torch.zeros(N, dtype=torch.float64)
    found = torch.func.jacrev(lambda v: periodic(kind.of(x, v), *held).variance[0])(variance)
    slopes = torch.func.jacrev(lambda x: periodic(x, *held))(x[0])
    torch.testing.assert_close(found, slopes.square())


def test_the_second_derivative_by_a_variance_of_zero() -> None:
    """At the top of a wave the variance is a^4 v^2 / 2 to second order."""
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)

    def variance(v: Tensor) -> Tensor:
        found: Tensor = periodic(DiagonalMoments(none, v), 0.3 * one, none, one.unsqueeze(0)).variance[0, 1]
        return found

    found = torch.func.jacrev(torch.func.jacrev(variance))(none)
    assert found.item() == pytest.approx((2 * math.pi * 0.3) ** 4)


def test_perfectly_correlated_features_of_huge_variance() -> None:
    """Angles of equal variance and correlation one: rounding of their covariance must not be exponentiated."""
    root = 1e12 * (1 + torch.rand(6, dtype=torch.float64))
    frequency = (0.3e12 / root).unsqueeze(-1)
    value = FullMoments(torch.zeros_like(root), root[:, None] * root)
    out = periodic(value, frequency, torch.zeros_like(frequency), torch.ones(6, 1, 1, dtype=torch.float64))
    waves = out.covariance.view(6, 2, 6, 2)[:, 1, :, 1]
    assert ((waves >= -1e-9) & (waves <= 0.5 + 1e-9)).all()


def test_the_derivative_by_a_covariance_of_zero() -> None:
    """The formula is odd in the covariance of two angles: its slope there is the product of the embedding's slopes."""
    x, held = torch.randn(2, dtype=torch.float64), parameters(n=2)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)

    def pairs(c: Tensor) -> Tensor:
        out: Tensor = periodic(FullMoments(x, c * swap + 1e-9 * torch.eye(2)), *held).covariance[:3, 3:]
        return out

    zero = torch.zeros((), dtype=torch.float64)
    slopes = torch.func.jacrev(lambda x: periodic(x, *held))(x)
    wanted = slopes[:3, 0, None] * slopes[3:, 1]
    torch.testing.assert_close(torch.func.jacrev(pairs)(zero), wanted, rtol=1e-5, atol=1e-7)


@EVERY_TYPE
def test_extreme_numbers_stay_finite_in_float32(kind: Any) -> None:
    pairs = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], [0.0, 1e-30, 1.0, 1e30])))
    mean, variance = pairs[None, :, 0].clone().requires_grad_(), pairs[None, :, 1].clone().requires_grad_()
    held = [p.requires_grad_() for p in parameters(torch.float32, 12)]
    stddev = pairs[:, 1].sqrt()
    common = 0.5 * (1 - torch.eye(12)) * stddev[:, None] * stddev
    value: Any = DiagonalMoments(mean, variance)
    if kind is FullMoments:
        value = FullMoments(mean, torch.diag_embed(variance) + common)
    elif kind is FactoredMoments:
        value = FactoredMoments(mean, residual=variance)
    out = periodic(value, *held)
    cosines = out.covariance.view(1, 12, 1 + D, 12, 1 + D)[:, :, 1:, :, 1:]
    assert out.mean.isfinite().all()
    assert out.covariance.isfinite().all()
    assert (out.variance >= 0).all()
    gradients = torch.autograd.grad(out.mean.sum() + cosines.sum(), [mean, variance, *held])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_much_variance_leaves_random_phases() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    out = periodic(DiagonalMoments(0.3 * one, 1e4 * one), one, 0 * one, one.unsqueeze(0))
    torch.testing.assert_close(out.mean[0], torch.tensor([0.3, 0.0], dtype=torch.float64))
    torch.testing.assert_close(out.variance[0], torch.tensor([1e4, 0.5], dtype=torch.float64))


# Factored moments


def test_a_certain_value_gets_no_sources() -> None:
    x, held = torch.randn(5, N), parameters(torch.float32)
    out = periodic(FactoredMoments.certain(x, max_rank=4), *held)
    assert (out.blocks, out.residual, out.max_rank) == ((), None, 4)
    assert torch.equal(out.mean, periodic(x, *held))


@pytest.mark.parametrize("max_rank", [None, 3, math.inf])
def test_independent_features_stay_factored(max_rank: float | None) -> None:
    value = FactoredMoments.of(torch.randn(5, N).double(), torch.rand(5, N).double(), max_rank=max_rank)
    out = periodic(value, *parameters())
    assert isinstance(out, FactoredMoments)
    assert out.max_rank == max_rank
    assert sum(block.rank for block in out.blocks) == N * (1 + D)
    assert out.blocks[0].variance is value.residual  # the features are sources of the linear part


@pytest.mark.parametrize("variance", [0.0, 1e-9, 1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_rest_has_sources_too(variance: float, dtype: torch.dtype) -> None:
    """Five cosines of nearly one frequency are nearly one number."""
    frequency = (0.3 + 1e-4 * torch.arange(K, dtype=dtype)).expand(N, K)
    cosines = torch.eye(K, dtype=dtype).expand(N, K, K)
    mean, spread = torch.randn(20, N, dtype=dtype), torch.full((20, N), variance, dtype=dtype)
    phase = torch.zeros(N, K, dtype=dtype)
    out, full = (periodic(kind.of(mean, spread), frequency, phase, cosines) for kind in (FactoredMoments, FullMoments))
    assert all((block.variance >= 0).all() for block in out.blocks)
    error = 1e-6 if dtype == torch.float32 else 1e-8
    torch.testing.assert_close(out.covariance, full.covariance, rtol=error, atol=error * min(variance, 1))


def test_correlated_features_become_full_unless_every_source_must_be_kept() -> None:
    block = Block(torch.randn(2, N).double(), torch.rand(5, 2).double())
    value = FactoredMoments(torch.randn(5, N).double(), (block,), torch.rand(5, N).double())
    held = parameters()
    full = periodic(value, *held)
    kept = periodic(FactoredMoments(value.mean, value.blocks, value.residual, math.inf), *held)
    assert isinstance(full, FullMoments)
    assert isinstance(kept, FactoredMoments)
    assert [kept.blocks[0].variance is block.variance, kept.blocks[1].variance is value.residual] == [True, True]
    torch.testing.assert_close(kept.covariance, full.covariance)
    assert isinstance(periodic(FactoredMoments(value.mean, value.blocks, max_rank=2), *held), FullMoments)


def test_branches_meet_again_exactly() -> None:
    """An embedding minus its own linear combination: sources have kept their names."""
    value = FactoredMoments.of(torch.randn(4, N).double(), random_covariance(4, N), max_rank=math.inf)
    out = periodic(value, *parameters())
    nothing = add(out, linear(out, -torch.eye(N * (1 + D), dtype=torch.float64)))
    assert nothing.variance.abs().max() < 1e-12


# Bad input


@pytest.mark.parametrize("kind", [*TYPES, Tensor])
def test_errors_name_shapes_and_fix(kind: Any) -> None:
    value, held = torch.randn(5, 4), parameters(torch.float32)
    given = value if kind is Tensor else kind.certain(value)
    with pytest.raises(InputError, match=r"periodic: frequency embeds 3 features but .* has 4 .*Periodic\(4\)\?"):
        periodic(given, *held)
    given = value[:, :3].double() if kind is Tensor else kind.certain(value[:, :3].double())
    with pytest.raises(InputError, match=r"periodic: frequency is torch.float32 but the input is torch.float64; use"):
        periodic(given, *held)
