"""Fork, add and concatenate: branches that share their randomness, against the joint covariance and sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, InputError
from mpgelu.moments import Moments
from mpgelu.rules import add, concatenate, dropout, flatten, fork, linear, mpgelu, scale, subtract_from
from reference import MOMENTS, random_covariance

N = 4
FACTORED = [name for name in MOMENTS if name.startswith("factored")]


def weights(count: int, rows: int = N) -> list[Tensor]:
    return [torch.randn(rows, N, dtype=torch.float64) for _ in range(count)]


def assert_same(found: Moments, mean: Tensor, covariance: Tensor) -> None:
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-9, atol=1e-11)


# Linear branches: h -> A h and B h, whose joint covariance is known


@pytest.mark.parametrize("kind", [*FACTORED, "full"])
@pytest.mark.parametrize("alpha", [1.0, -1.0, 0.3])
def test_branches_add_as_one_matrix_would(kind: str, alpha: float) -> None:
    value, (a, b) = MOMENTS[kind](3, N), weights(2)
    shared = fork(value)
    total = a + alpha * b
    wanted = value.mean @ total.mT, total @ value.covariance @ total.mT
    assert_same(add(linear(shared, a), linear(shared, b), alpha), *wanted)
    identity = torch.eye(N, dtype=torch.float64)
    total = identity + alpha * b
    assert_same(add(shared, linear(shared, b), alpha), value.mean @ total.mT, total @ value.covariance @ total.mT)


@pytest.mark.parametrize("kind", [*FACTORED, "full"])
def test_branches_join_as_one_matrix_would(kind: str) -> None:
    value, (a, b) = MOMENTS[kind](3, N), [*weights(1), *weights(1, rows=2)]
    shared = fork(value)
    total = torch.cat([a, torch.eye(N, dtype=torch.float64), b])
    out = concatenate(linear(shared, a), shared, linear(shared, b), dim=1)
    assert_same(out, value.mean @ total.mT, total @ value.covariance @ total.mT)


@pytest.mark.parametrize("kind", FACTORED)
def test_a_value_minus_itself_is_nothing_and_twice_it_is_twice(kind: str) -> None:
    value = fork(MOMENTS[kind](3, N))
    nothing = add(value, value, -1.0)
    assert_same(nothing, torch.zeros(3, N).double(), torch.zeros(3, N, N).double())
    assert_same(add(value, value), 2 * value.mean, 4 * value.covariance)


def test_a_fork_moves_the_residual_into_a_block_and_forbids_dense_matrices() -> None:
    value = FactoredMoments.of(torch.randn(3, N), torch.rand(3, N))
    shared = fork(value)
    assert shared.residual is None
    assert shared.blocks[0].variance is value.residual
    assert torch.equal(shared.blocks[0].factor, torch.eye(N))
    assert shared.max_rank == math.inf
    assert fork(shared).blocks == shared.blocks
    for _ in range(20):
        shared = dropout(linear(shared, torch.randn(N, N) / 2), 0.1)
    assert isinstance(shared, FactoredMoments)


def test_without_a_fork_the_residual_of_two_branches_would_look_independent() -> None:
    value = FactoredMoments.of(torch.zeros(1, N), torch.ones(1, N))
    assert torch.equal(add(value, value).variance, torch.full((1, N), 2.0))
    assert torch.equal(add(fork(value), fork(value)).variance, torch.full((1, N), 4.0))


# Random branches, against sampling


def residual_block(value: Any, weight: Tensor, rate: float) -> Any:
    """``h + W dropout(mpgelu(h))``: exact rules only."""
    shared = fork(value)
    return add(shared, linear(dropout(mpgelu(shared), rate), weight))


def test_a_residual_block_matches_sampling_and_independent_branches_do_not() -> None:
    draws, rate, weight = 400_000, 0.3, weights(1)[0]
    mean, covariance = torch.randn(N).double(), random_covariance(N)
    value = FactoredMoments.of(mean, covariance)
    out = residual_block(value, weight, rate)

    h = mean + torch.randn(draws, N).double() @ torch.linalg.cholesky(covariance).mT
    keep = torch.special.ndtr(mean / covariance.diagonal().sqrt())
    mask = (torch.rand(draws, N) < keep) * (torch.rand(draws, N) < 1 - rate) / (1 - rate)
    samples = h + (h * mask) @ weight.mT
    centred = samples - samples.mean(0)
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    error = (products.mean(0) - out.covariance).abs() / (products.std(0) / math.sqrt(draws))
    assert error.max() < 4.5
    assert ((samples.mean(0) - out.mean).abs() < 4.5 * samples.std(0) / math.sqrt(draws)).all()

    branch = linear(dropout(mpgelu(value), rate), weight)
    independent = covariance + branch.covariance
    assert ((products.mean(0) - independent).abs() / (products.std(0) / math.sqrt(draws))).max() > 100


def test_gradients_flow_through_branches() -> None:
    def total(mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = residual_block(FactoredMoments(mean, residual=variance), weight, 0.3)
        return out.mean, out.covariance

    inputs = (torch.randn(2, 3).double(), torch.rand(2, 3).double() + 0.1, torch.randn(3, 3).double())
    assert torch.autograd.gradcheck(total, [x.requires_grad_() for x in inputs])


def test_vmap_and_compile_keep_the_names() -> None:
    weight, x, variance = weights(1)[0].float(), torch.randn(5, N), torch.rand(5, N)

    def covariance(x: Tensor, variance: Tensor) -> Tensor:
        out: Tensor = residual_block(FactoredMoments(x, residual=variance), weight, 0.3).covariance
        return out

    wanted = covariance(x, variance)
    torch.testing.assert_close(torch.func.vmap(covariance)(x, variance), wanted)
    torch.compiler.reset()
    compiled = torch.compile(covariance, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, variance), wanted)


# Diagonal and full moments, tensors, constants


def test_diagonal_moments_add_as_if_independent() -> None:
    value, other = (DiagonalMoments(torch.randn(3, N), torch.rand(3, N)) for _ in range(2))
    out = add(value, other, -2.0)
    torch.testing.assert_close(out.mean, value.mean - 2 * other.mean)
    torch.testing.assert_close(out.variance, value.variance + 4 * other.variance)
    joined = concatenate(value, other)
    assert torch.equal(joined.variance, torch.cat([value.variance, other.variance], -1))
    assert fork(value) is value


def test_dense_branches_are_refused_not_guessed() -> None:
    value = FullMoments.of(torch.randn(3, N), random_covariance(3, N).float())
    with pytest.raises(InputError, match=r"add: cannot add FullMoments and FullMoments: .* start with FactoredMoments"):
        add(value, value)
    with pytest.raises(InputError, match=r"concatenate: FullMoments do not hold .* start with FactoredMoments"):
        concatenate(value, value)
    with pytest.raises(InputError, match=r"add: cannot add FactoredMoments and FullMoments"):
        add(FactoredMoments.from_moments(value), value)


def test_a_bounded_rank_is_refused_at_a_fork() -> None:
    with pytest.raises(InputError, match=r"fork: max_rank=3 would merge sources .* needs max_rank=None or math.inf"):
        fork(FactoredMoments.certain(torch.ones(1, N), max_rank=3))


@pytest.mark.parametrize("kind", MOMENTS)
def test_constants_from_either_side(kind: str) -> None:
    value, constant = MOMENTS[kind](3, N), torch.randn(N).double()
    for out in (add(value, constant, 2.0), add(constant.expand(3, N) * 2, value)):
        assert_same(out, value.mean + 2 * constant, value.covariance)
    assert_same(subtract_from(value, 1.5, 2.0), 1.5 - 2 * value.mean, 4 * value.covariance)
    rows = torch.rand(3, N).double()
    assert_same(scale(value, rows), rows * value.mean, rows.unsqueeze(-1) * rows.unsqueeze(-2) * value.covariance)


@pytest.mark.parametrize("kind", ["diagonal", "full", "factored variance"])
def test_constants_must_not_enlarge_moments(kind: str) -> None:
    value = MOMENTS[kind](3, 1)
    for rule in (add, scale):
        with pytest.raises(InputError, match=r"constant of shape \(5,\) does not fit .* \(3, 1\); .* shape \(1,\)"):
            rule(value, torch.ones(5, dtype=torch.float64))


def test_tensors_are_added_and_joined_as_by_torch() -> None:
    x, y = torch.randn(3, N), torch.randn(3, N)
    assert torch.equal(add(x, y, 0.5), torch.add(x, y, alpha=0.5))
    assert torch.equal(concatenate(x, y, dim=0), torch.cat([x, y]))
    assert torch.equal(subtract_from(x, 2.0), 2 - x)
    assert torch.equal(flatten(torch.ones(2, 3, 4)), torch.ones(2, 12))


@pytest.mark.parametrize("kind", ["diagonal", "factored variance"])
def test_shapes_that_do_not_belong_together(kind: str) -> None:
    value = MOMENTS[kind](3, N)
    with pytest.raises(InputError, match=r"add: the two means have shapes \(3, 4\) and \(3, 5\)"):
        add(value, MOMENTS[kind](3, 5))
    with pytest.raises(InputError, match=r"concatenate: the values must be of one kind and batch shape"):
        concatenate(value, MOMENTS[kind](2, N))
    with pytest.raises(InputError, match=r"concatenate: moments are joined along their features.* got dim=0"):
        concatenate(value, value, dim=0)
    with pytest.raises(InputError, match=r"flatten: .* \(2, 3, 4\) are more than that; flatten the input"):
        flatten(MOMENTS[kind](2, 3, N))
