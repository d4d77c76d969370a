"""The chunked full ReLU rule with analytic gradients against the plain formulas left to autograd."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mpgelu.moments import FullMoments
from mpgelu.rules import relu
from mpgelu.rules.normal import cdf, pdf, standardise
from mpgelu.rules.relu import Covariance

VARIANTS: list[Covariance] = ["dvi", "exact"]
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
variants = pytest.mark.parametrize("variant", VARIANTS)


def fast(variant: Covariance) -> Rule:
    def rule(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        after = relu(FullMoments(mean, covariance), variant)
        return after.mean, after.covariance

    return rule


def plain(variant: Covariance) -> Rule:
    """The reference: dense n x n tensors, no symmetry, no chunks, gradients by autograd."""

    def rule(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        a, s = standardise(mean, variance)
        ramp = pdf(a) + a * cdf(a)
        after = mean * cdf(a) + torch.where(variance > 0, s, 0) * pdf(a)
        scale = s.unsqueeze(-1) * s.unsqueeze(-2)
        eye = torch.eye(mean.shape[-1], dtype=torch.bool)
        correlation = torch.where(eye, 0, covariance / scale).clamp(-1, 1)
        pairs = plain_dvi if variant == "dvi" else plain_exact
        matrix = scale * pairs(a.unsqueeze(-1), a.unsqueeze(-2), correlation)
        return after, torch.where(eye, (variance * (cdf(a) - ramp * (ramp - a))).unsqueeze(-1), matrix)

    return rule


def plain_dvi(a1: Tensor, a2: Tensor, correlation: Tensor) -> Tensor:
    small = correlation.abs() < 0.03
    rho = torch.where(small, 0.5, correlation.clamp(-1 + 1e-7, 1 - 1e-7))
    angle = torch.asin(rho)
    lean = rho / (1 + torch.sqrt(1 - rho * rho))
    height = angle - lean
    square = correlation * correlation
    g = torch.where(small, correlation * (0.5 + square * (1 / 24 + square / 80)), height)
    first = torch.where(small, -0.5 - square * (1 / 12 + square * (31 / 720)), -0.5 * lean / height)
    series = correlation * (1 / 3 + square * (11 / 90 + square * (107 / 1512)))
    second = torch.where(small, series, (angle - rho) / (rho * height))
    exponent = first * (a1 * a1 + a2 * a2) + second * (a1 * a2)
    return correlation * (cdf(a1) * cdf(a2) + g / (2 * math.pi) * torch.exp(exponent.clamp_min(-60)))


def plain_exact(a1: Tensor, a2: Tensor, correlation: Tensor) -> Tensor:
    nodes, weights = np.polynomial.legendre.leggauss(8)
    angle = torch.asin(correlation)
    value = correlation * cdf(a1) * cdf(a2)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        sine = torch.sin(angle * node)
        exponent = (a1 * a1 + a2 * a2 - 2 * a1 * a2 * sine) / (2 * (sine * sine - 1))
        value = value + weight * angle / (2 * math.pi) * (correlation - sine) * torch.exp(exponent.clamp_min(-60))
    return value


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Means and roots A of covariances A A^T."""
    generator = torch.Generator().manual_seed(sum(shape))
    n = shape[-1]
    mean = 1.5 * torch.randn(*shape, dtype=torch.float64, generator=generator)
    root = torch.randn(*shape, n, dtype=torch.float64, generator=generator) / math.sqrt(n)
    return mean.to(dtype).requires_grad_(), root.to(dtype).requires_grad_()


def gradients(rule: Rule, mean: Tensor, root: Tensor) -> tuple[Tensor, ...]:
    outputs = rule(mean, root @ root.mT)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, (mean, root), weights)


@variants
@pytest.mark.parametrize("shape", [(4, 1), (3,), (0, 3), (7, 2), (2, 3, 5), (301, 20), (40, 50)])
def test_values_are_those_of_the_plain_formulas(shape: tuple[int, ...], variant: Covariance) -> None:
    mean, root = sample(*shape)
    for ours, theirs in zip(*(f(variant)(mean, root @ root.mT) for f in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@variants
@pytest.mark.parametrize("shape", [(4, 1), (3,), (7, 2), (2, 3, 5), (301, 20)])
def test_gradients_are_those_of_the_plain_formulas(shape: tuple[int, ...], variant: Covariance) -> None:
    mean, root = sample(*shape)
    tolerance = 1e-10 if variant == "dvi" else 1e-5  # the plain one differentiates the quadrature, ours the integral
    for ours, theirs in zip(*(gradients(f(variant), mean, root) for f in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@variants
def test_float32_agrees_with_float64(variant: Covariance) -> None:
    mean, root = sample(200, 12)
    mean32, root32 = (x.detach().float().requires_grad_() for x in (mean, root))
    wide, narrow = (
        (*fast(variant)(m, a @ a.mT), *gradients(fast(variant), m, a)) for m, a in ((mean, root), (mean32, root32))
    )
    for value64, value32, tolerance in zip(wide, narrow, (2e-6, 2e-6, 5e-5, 5e-5), strict=True):
        torch.testing.assert_close(value32.double(), value64, rtol=0, atol=tolerance)


@variants
@pytest.mark.parametrize("correlation", [0.0, 1e-30, 1e-12, -1e-8, 1e-5, -1e-3, 0.02, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_correlations(correlation: float, dtype: torch.dtype, variant: Covariance) -> None:
    ratios = torch.tensor([-12.0, -3, -1, 0, 0.5, 2, 12], dtype=torch.float64)
    mean = torch.cartesian_prod(ratios, ratios)
    matrix = torch.tensor([[1, correlation], [correlation, 1]], dtype=torch.float64).expand(len(mean), 2, 2)
    covariance = matrix.to(dtype).clone().requires_grad_()
    _, ours = fast(variant)(mean.to(dtype), covariance)
    _, theirs = plain(variant)(mean, covariance.double())
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)
    if variant == "dvi":  # the plain exact formula differentiates its quadrature
        slope, expected = (torch.autograd.grad(x[:, 0, 1].sum(), covariance)[0].double() for x in (ours, theirs))
        change = (slope + slope.mT - expected - expected.mT)[:, 0, 1]
        assert change.abs().max() < (1e-4 if dtype == torch.float32 else 1e-10)


@variants
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_gradcheck(n: int, variant: Covariance) -> None:
    mean, root = sample(3, n)
    tolerance = 1e-7 if variant == "dvi" else 2e-5  # the exact rule's analytic gradient is that of the integral
    assert torch.autograd.gradcheck(lambda m, a: fast(variant)(m, a @ a.mT), (mean, root), atol=tolerance)


@variants
def test_gradient_by_the_covariance_is_symmetric(variant: Covariance) -> None:
    mean, root = sample(5, 6)
    covariance = (root @ root.mT).detach().requires_grad_()
    weight = torch.randn(5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (slope,) = torch.autograd.grad(fast(variant)(mean, covariance)[1], covariance, weight)
    assert torch.equal(slope, slope.mT)


@variants
@pytest.mark.parametrize("shape", [(20,), (2, 9, 20), (1000, 20)])
def test_output_is_symmetric_with_the_exact_diagonal(shape: tuple[int, ...], variant: Covariance) -> None:
    mean, root = sample(*shape, dtype=torch.float32)
    covariance = root @ root.mT
    mean_after, after = fast(variant)(mean, covariance)
    marginal = plain(variant)(mean, covariance)
    assert torch.equal(after, after.mT)
    torch.testing.assert_close(mean_after, marginal[0])
    torch.testing.assert_close(after.diagonal(dim1=-2, dim2=-1), marginal[1].diagonal(dim1=-2, dim2=-1))


@variants
def test_chunks_do_not_show(variant: Covariance, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, root = sample(23, 6)
    whole = *fast(variant)(mean, root @ root.mT), *gradients(fast(variant), mean, root)
    monkeypatch.setattr(importlib.import_module("mpgelu.rules.relu"), "_CHUNK", 60)
    chunked = *fast(variant)(mean, root @ root.mT), *gradients(fast(variant), mean, root)
    torch.testing.assert_close(whole, chunked, rtol=0, atol=1e-14)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_units_are_plain_relu(dtype: torch.dtype, variant: Covariance) -> None:
    mean, root = sample(6, 5, dtype=dtype)
    alive = torch.ones(6, 5, dtype=dtype)
    alive[0], alive[1, 2:], alive[2, 0] = 0, 0, 0
    with torch.no_grad():
        mean[1, 2], mean[0, 0] = 0, 0
    root = (root * alive.unsqueeze(-1)).detach().requires_grad_()
    mean_after, after = fast(variant)(mean, root @ root.mT)
    certain = alive == 0
    assert torch.equal(mean_after[certain], torch.relu(mean)[certain])
    assert not after[certain].any()
    assert all(g.isfinite().all() for g in gradients(fast(variant), mean, root))


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_perfect_correlation_has_finite_gradients(dtype: torch.dtype, variant: Covariance) -> None:
    mean, root = sample(50, 8, dtype=dtype)
    column = root[..., :1].detach().requires_grad_()  # rank one: every correlation is +-1, up to rounding
    assert all(x.isfinite().all() for x in fast(variant)(mean, column @ column.mT))
    assert all(g.isfinite().all() for g in gradients(fast(variant), mean, column))
    duplicate = torch.ones(1, 2, 2, dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(fast(variant)(torch.zeros(1, 2, dtype=dtype), duplicate)[1].sum(), duplicate)
    assert slope.isfinite().all()


@variants
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("variance", [1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_extreme_moments_stay_finite(variance: float, size: float, variant: Covariance) -> None:
    mean, root = sample(30, 6, dtype=torch.float32)
    mean = (size * mean).detach().requires_grad_()
    covariance = ((root @ root.mT) * variance).detach().requires_grad_()
    outputs = fast(variant)(mean, covariance)
    slopes = torch.autograd.grad(outputs, (mean, covariance), [torch.ones_like(x) for x in outputs])
    assert all(x.isfinite().all() for x in (*outputs, *slopes))


@variants
def test_vmap(variant: Covariance) -> None:
    mean, root = (x.detach() for x in sample(4, 3, 5))
    expected = fast(variant)(mean, root @ root.mT)
    covariance = root @ root.mT
    torch.testing.assert_close(torch.func.vmap(fast(variant))(mean, covariance), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(fast(variant)))(mean, covariance), expected)
    last = torch.func.vmap(fast(variant), in_dims=(1, 2))(mean.movedim(0, 1), covariance.movedim(0, 2))
    torch.testing.assert_close(last, expected)
    shared = torch.func.vmap(fast(variant), in_dims=(0, None))(mean, covariance[0])
    torch.testing.assert_close(shared, fast(variant)(mean, covariance[:1].expand(4, 3, 5, 5)))


@variants
def test_function_transforms(variant: Covariance) -> None:
    mean, root = (x.detach() for x in sample(3, 4))
    covariance = root @ root.mT

    def loss(m: Tensor, c: Tensor) -> Tensor:
        after, matrix = fast(variant)(m, c)
        return after.sum() + matrix.square().sum()

    per_row = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(mean, covariance)
    together = torch.func.grad(loss, argnums=(0, 1))(mean, covariance)
    torch.testing.assert_close(per_row, together)
    jacobian = torch.func.jacrev(fast(variant), argnums=0)(mean[0], covariance[0])
    step = 1e-6 * torch.eye(4, dtype=torch.float64)
    for part, ahead, behind in zip(
        jacobian, *(fast(variant)(mean[0] + s * step, covariance[0].expand(4, 4, 4)) for s in (1, -1)), strict=True
    ):
        torch.testing.assert_close(part, ((ahead - behind) / 2e-6).movedim(0, -1), rtol=0, atol=2e-5)


@variants
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it itself
def test_compiles_in_one_graph(variant: Covariance) -> None:
    mean, root = sample(5, 4)
    compiled = torch.compile(lambda m, a: fast(variant)(m, a @ a.mT), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mean, root), fast(variant)(mean, root @ root.mT))
    loss = sum(x.square().sum() for x in compiled(mean, root))
    expected = sum(x.square().sum() for x in fast(variant)(mean, root @ root.mT))
    assert isinstance(loss, Tensor)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(*(torch.autograd.grad(x, (mean, root)) for x in (loss, expected)))
