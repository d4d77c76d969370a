"""Fork, add and concatenate: branches that share their randomness, against the joint covariance and sampling."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, InputError
from mpgelu.layers import Periodic
from mpgelu.moments import Moments
from mpgelu.rules import (
    add,
    concatenate,
    dropout,
    elementwise,
    flatten,
    fork,
    linear,
    mpgelu,
    relu,
    scale,
    subtract_from,
)
from mpgelu.rules.activations import Tanh
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


# Without a fork: what two branches share is recognised by its tensor, or refused


def unforked_branches(value: Any, a: Tensor, b: Tensor) -> dict[str, tuple[Any, Tensor]]:
    """Sums and joins of branches of a value, each with the matrix T of which it is T h."""
    one = torch.eye(N, dtype=torch.float64)
    return {
        "itself": (add(value, value), 2 * one),
        "less itself": (add(value, value, -1.0), 0 * one),
        "alpha": (add(value, value, 0.3), 1.3 * one),
        "linear": (add(value, linear(value, a)), one + a),
        "linear first": (add(linear(value, a), value, -2.0), a - 2 * one),
        "two linear": (add(linear(value, a), linear(value, b)), a + b),
        "three": (add(add(value, linear(value, a)), value), 2 * one + a),
        "deep": (add(linear(linear(value, a), b), value), b @ a + one),
        "operators": (value + value - 3.0 * fork(value) + linear(value, a), -one + a),
        "join": (concatenate(value, value), torch.cat([one, one])),
        "join linear": (concatenate(linear(value, a), value, linear(value, b)), torch.cat([a, one, b])),
        "join of sums": (concatenate(add(value, value), value), torch.cat([2 * one, one])),
    }


@pytest.mark.parametrize("kind", FACTORED)
def test_unforked_branches_are_as_one_matrix(kind: str) -> None:
    value, (a, b) = MOMENTS[kind](3, N), weights(2)
    for out, total in unforked_branches(value, a, b).values():
        dense = FullMoments(value.mean @ total.mT, total @ value.covariance @ total.mT)
        assert_same(out, dense.mean, dense.covariance)
        after = torch.randn(2, len(total), dtype=torch.float64)
        rules: list[Callable[[Any], Any]] = [
            lambda h: dropout(h, 0.3),
            mpgelu,
            lambda h: mpgelu(dropout(h, 0.2)),
            relu,
        ]
        for rule in rules:
            found, wanted = rule(out), rule(dense)
            assert_same(found, wanted.mean, wanted.covariance)
            assert_same(
                linear(found, after), *(getattr(linear(wanted, after), part) for part in ("mean", "covariance"))
            )


@pytest.mark.parametrize("kind", FACTORED)
def test_unforked_random_branches_are_those_of_a_fork(kind: str) -> None:
    value, (a, b) = MOMENTS[kind](3, N), weights(2)

    def block(h: Any) -> Any:
        return add(h, linear(dropout(mpgelu(linear(h, a)), 0.3), b))

    wanted = block(fork(value))
    assert_same(block(value), wanted.mean, wanted.covariance)
    assert_same(mpgelu(block(value)), mpgelu(wanted).mean, mpgelu(wanted).covariance)


def test_what_can_no_longer_be_told_apart_is_refused() -> None:
    value, (a, b) = MOMENTS["factored variance"](3, N), weights(2)
    merged = {
        "dropout": dropout(value, 0.3),
        "dropout, linear": linear(dropout(value, 0.3), a),
        "mpgelu": mpgelu(value),
        "two masks": linear(mpgelu(dropout(value, 0.3)), a),
        "scale": scale(value, 2.0),
        "elementwise": linear(elementwise(value, Tanh()), a),
        "sum": add(value, MOMENTS["factored variance"](3, N)),
        "join": linear(concatenate(value, MOMENTS["factored variance"](3, 2)), torch.randn(N, N + 2).double()),
        "bounded rank": linear(replace(mpgelu(linear(value, a)), max_rank=1), b),
        "index": linear(value, a)[torch.arange(3)],
    }
    for other in merged.values():
        for branches in ((value, other), (other, value), (linear(value, a), other)):
            with pytest.raises(
                InputError, match=r"add: the values share randomness .*rules.fork before its branches use it"
            ):
                add(*branches)
        with pytest.raises(InputError, match=r"concatenate: the values share randomness"):
            concatenate(value, other)
    with pytest.raises(InputError, match=r"add: the values share randomness"):
        add(merged["dropout"], merged["mpgelu"])
    out = add(fork(value), dropout(fork(value), 0.3))  # the remedy
    assert_same(
        out, 2 * value.mean, 4 * value.covariance + torch.diag_embed(dropout(value, 0.3).variance - value.variance)
    )


def test_values_of_their_own_add_as_independent() -> None:
    variance = torch.rand(3, N)
    one, two = (FactoredMoments.of(torch.randn(3, N), variance) for _ in range(2))
    torch.testing.assert_close(add(one, two).variance, 2 * variance)
    torch.testing.assert_close(
        add(dropout(one, 0.1), mpgelu(two)).variance, dropout(one, 0.1).variance + mpgelu(two).variance
    )


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


@pytest.mark.parametrize("mixed", [False, True])
def test_a_deep_copy_does_not_count_as_independent(mixed: bool) -> None:
    value = dropout(FactoredMoments.certain(torch.randn(3, 4)), 0.2)
    if mixed:
        value = linear(value, torch.randn(4, 4))
    copied = copy.deepcopy(value)
    assert copied.mean is not value.mean
    torch.testing.assert_close(copied.covariance, value.covariance)
    with pytest.raises(InputError, match="share randomness"):
        add(value, copied)


@pytest.mark.parametrize("kind", [None, DiagonalMoments])
def test_an_embedding_of_no_rows(kind: Any) -> None:
    layer, x = Periodic(3, outputs=2), torch.zeros(0, 3)
    out = layer(x if kind is None else kind(x, x))
    assert (out if kind is None else out.mean).shape == (0, 9)
