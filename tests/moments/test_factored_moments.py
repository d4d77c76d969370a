"""Factored moments are full moments written shorter: the same numbers, promoted where cheaper, truncated on request."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments import Block
from reference import random_covariance

INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "certain": torch.zeros_like,
    "variance": lambda x: torch.rand_like(x) + 0.1,
    "covariance": lambda x: random_covariance(*x.shape, dtype=x.dtype),
}
FLAVOURS = ["plain", "dropout", "paper's dropout", "gaussian", "mixed"]
WIDTHS = [[3, 8, 2], [1, 1, 1, 1], [4, 64, 64, 2], [5, 7, 64, 3, 1], [2, 6, 6, 6, 6, 2], [64, 5, 64, 5, 2], [9, 2]]


def build(widths: list[int], flavour: str) -> nn.Sequential:
    """MP-GELU between linear layers of several flavours."""
    layers: list[nn.Module] = []
    for depth, (before, after) in enumerate(itertools.pairwise(widths)):
        if depth > 0:
            layers.append(mp.MPGELU())
        if "dropout" in flavour or (flavour == "mixed" and depth % 2 == 0):
            layers.append(mp.Dropout(0.2, rescale="paper" not in flavour))
        gaussian = flavour == "gaussian" or (flavour == "mixed" and depth % 2 == 1)
        layers.append(mp.GaussianLinear(before, after, initial_variance=0.05) if gaussian else mp.Linear(before, after))
    return nn.Sequential(*layers)


def kinds_on_the_way(net: nn.Sequential, value: object) -> set[type]:
    kinds = set()
    for layer in net:
        value = layer(value)
        kinds.add(type(value))
    return kinds


def assert_same(found: mp.moments.Moments, wanted: mp.moments.Moments, tolerance: float) -> None:
    scale = wanted.covariance.abs().max().item()
    torch.testing.assert_close(found.mean, wanted.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.variance, wanted.variance, rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(found.covariance, wanted.covariance, rtol=tolerance, atol=tolerance * scale)


# Exactness


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("spread", INPUTS)
def test_factored_equals_full(spread: str, widths: list[int], flavour: str) -> None:
    net, x = build(widths, flavour).double(), torch.randn(6, widths[0], dtype=torch.float64)
    noise = INPUTS[spread](x)
    wanted = net(FullMoments.of(x, noise))
    assert_same(net(FactoredMoments.of(x, noise)), wanted, 1e-10)
    assert_same(net(FactoredMoments.of(x, noise, max_rank=math.inf)), wanted, 1e-10)
    single = net.float()(FactoredMoments.of(x.float(), noise.float()))
    assert_same(single, FullMoments(wanted.mean.float(), wanted.covariance.float()), 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 64), min_size=2, max_size=5),
    flavour=st.sampled_from(FLAVOURS),
    spread=st.sampled_from(sorted(INPUTS)),
    rows=st.integers(1, 4),
)
def test_factored_equals_full_for_any_widths(widths: list[int], flavour: str, spread: str, rows: int) -> None:
    torch.manual_seed(1)
    net, x = build(widths, flavour).double(), torch.randn(rows, widths[0], dtype=torch.float64)
    noise = INPUTS[spread](x)
    assert_same(net(FactoredMoments.of(x, noise)), net(FullMoments.of(x, noise)), 1e-10)


def test_gradients_are_those_of_full_moments() -> None:
    net, x = build([4, 10, 10, 10, 2], "mixed").double(), torch.randn(5, 4, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad(out.mean.square().sum() + out.covariance.sum(), list(net.parameters()))
        for out in (net(FactoredMoments.certain(x)), net(FullMoments.certain(x)))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("limit", [0, 2**24])
def test_every_way_to_carry_a_block_gives_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables and large products take another path than small ones."""
    monkeypatch.setattr(sys.modules["mpgelu.rules.linear"], "_TABLE_LIMIT", limit)
    monkeypatch.setattr(sys.modules["mpgelu.moments.factored"], "_TABLE_LIMIT", limit)
    for widths in ([3, 40, 40, 30, 2], [30, 6, 3], [40, 30, 4]):
        net, x = build(widths, "mixed").double(), torch.randn(3, widths[0], dtype=torch.float64)
        noise = random_covariance(3, widths[0])
        assert_same(net(FactoredMoments.of(x, noise, math.inf)), net(FullMoments.of(x, noise)), 1e-10)


# Promotion


def test_promotion_happens_where_the_rank_is_high_and_not_before() -> None:
    x = torch.randn(4, 3)
    assert kinds_on_the_way(build([3, 20, 20, 2], "dropout"), FactoredMoments.certain(x)) == {FactoredMoments}
    deep = build([3, 6, 6, 6, 6, 6, 2], "dropout")
    assert kinds_on_the_way(deep, FactoredMoments.certain(x)) == {FactoredMoments, FullMoments}
    assert kinds_on_the_way(deep, FactoredMoments.certain(x, max_rank=math.inf)) == {FactoredMoments}
    assert kinds_on_the_way(deep, FactoredMoments.certain(x, max_rank=4)) == {FactoredMoments}


def test_promoted_at_a_gaussian_layer() -> None:
    net = build([3, 5, 5, 5, 5, 5, 5, 2], "gaussian").double()
    x = torch.randn(4, 3, dtype=torch.float64)
    assert FullMoments in kinds_on_the_way(net, FactoredMoments.certain(x))
    assert_same(net(FactoredMoments.certain(x)), net(FullMoments.certain(x)), 1e-10)


def test_relu_promotes() -> None:
    net, x = mp.network(3, (5, 5), nonlinearity="relu").double(), torch.randn(4, 3, dtype=torch.float64)
    assert type(net(FactoredMoments.certain(x))) is FullMoments
    assert_same(net(FactoredMoments.certain(x)), net(FullMoments.certain(x)), 1e-10)


# Truncation


def test_max_rank_zero_is_the_diagonal_approximation() -> None:
    net, x = build([4, 12, 12, 12, 1], "dropout").double(), torch.randn(5, 4, dtype=torch.float64)
    found, wanted = net(FactoredMoments.certain(x, max_rank=0)), net(DiagonalMoments.certain(x))
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.variance, wanted.variance, rtol=1e-12, atol=0)


def test_more_rank_is_more_accurate_and_all_of_it_exact() -> None:
    net, x = build([4, 12, 12, 12, 2], "dropout").double(), torch.randn(50, 4, dtype=torch.float64)
    wanted = net(FullMoments.certain(x)).covariance
    errors = [
        (net(FactoredMoments.certain(x, max_rank=rank)).covariance - wanted).abs().mean().item()
        for rank in (0, 2, 5, 10, 20, 40)
    ]
    assert errors[-1] < 1e-12
    assert errors[0] > 1e-4
    assert errors == sorted(errors, reverse=True)


def test_truncation_keeps_marginal_variances_and_the_largest_sources() -> None:
    block = Block(torch.randn(3, 7, 5, dtype=torch.float64), torch.rand(3, 7, dtype=torch.float64))
    shared = Block(torch.randn(2, 5, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64))
    moments = FactoredMoments(torch.zeros(3, 5, dtype=torch.float64), (shared, block))
    for rank in range(8):
        cut = moments.truncated(rank)
        assert cut.row_rank == rank
        torch.testing.assert_close(cut.variance, moments.variance, rtol=1e-12, atol=0)
    importance = (block.variance.unsqueeze(-1) * block.factor.square()).sum(-1)
    kept = moments.truncated(1).blocks[-1]
    found = (kept.variance.unsqueeze(-1) * kept.factor.square()).sum(-1)
    torch.testing.assert_close(found[:, 0], importance.amax(-1))


def test_the_first_truncated_layer_keeps_its_marginal_variances() -> None:
    """Correlations dropped before a linear map change its variances; those of the layer itself stay."""
    before = build([6, 10], "dropout").double()
    x = torch.randn(4, 6, dtype=torch.float64)
    exact, cut = before(FactoredMoments.certain(x)), before(FactoredMoments.certain(x, max_rank=2))
    torch.testing.assert_close(mp.MPGELU()(cut).variance, mp.MPGELU()(exact).variance, rtol=1e-12, atol=0)
    after = mp.MPGELU()(cut).truncated(2)
    torch.testing.assert_close(after.variance, mp.MPGELU()(exact).variance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_rank", [0, 3, 7])
def test_truncation_of_a_row_does_not_depend_on_the_batch(max_rank: int) -> None:
    net, x = build([4, 12, 12, 12, 2], "mixed").double(), torch.randn(6, 4, dtype=torch.float64)
    whole = net(FactoredMoments.certain(x, max_rank))
    for index in range(6):
        part = net(FactoredMoments.certain(x[index : index + 1], max_rank))
        torch.testing.assert_close(part.covariance[0], whole.covariance[index], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("max_rank", [0, 3])
def test_truncation_of_a_row_without_batch_dimension(max_rank: int) -> None:
    net, x = build([4, 12, 12, 12, 2], "mixed").double(), torch.randn(2, 4, dtype=torch.float64)
    whole = net(FactoredMoments.certain(x, max_rank))
    alone = net(FactoredMoments.certain(x[0], max_rank))
    torch.testing.assert_close(alone.covariance, whole.covariance[0], rtol=1e-11, atol=1e-13)


def test_promotion_without_batch_dimension_is_exact() -> None:
    net, x = build([4, 6, 6, 6, 6, 2], "mixed").double(), torch.randn(4, dtype=torch.float64)
    assert_same(net(FactoredMoments.certain(x)), net(FullMoments.certain(x)), 1e-10)


@pytest.mark.parametrize("max_rank", [3, math.inf])
def test_max_rank_passes_through_vmap(max_rank: float) -> None:
    net, x = build([4, 6, 6, 2], "dropout").double(), torch.randn(3, 5, 4, dtype=torch.float64)

    def covariance(moments: FactoredMoments) -> Tensor:
        dense: Tensor = net(moments).covariance
        return dense

    found = torch.func.vmap(covariance)(FactoredMoments.certain(x, max_rank))
    torch.testing.assert_close(found, net(FactoredMoments.certain(x, max_rank)).covariance, rtol=1e-11, atol=1e-13)


# Blocks


def test_block_algebra() -> None:
    factor, variance = torch.randn(3, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    gain = torch.rand(2, 4, dtype=torch.float64)
    block = Block(factor, variance)
    assert block.rank == 3
    assert block.is_shared
    scaled = block.scaled(gain).scaled(gain)
    assert not scaled.is_shared
    assert scaled.variance is variance  # the identity of the sources
    assert block.scaled(gain[0]).is_shared
    wanted = torch.einsum("rn,br,rk->bnk", factor, variance, factor)
    torch.testing.assert_close(block.dense, wanted)
    torch.testing.assert_close(scaled.dense, wanted * gain.square()[:, :, None] * gain.square()[:, None, :])
    torch.testing.assert_close(scaled.marginal_variance, scaled.dense.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(scaled.scaled_factor, factor * gain.square()[:, None, :])
