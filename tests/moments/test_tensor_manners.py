"""Moments where a tensor would be expected: shapes, types, indices, operators, and what plain torch does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpgelu as mp
from mpgelu import FactoredMoments, FullMoments
from mpgelu.errors import MissingRuleError
from mpgelu.layers import BatchNorm1d
from mpgelu.moments import Moments
from mpgelu.rules import add, linear, mpgelu, scale
from reference import MOMENTS, TYPES, tensors

EVERY_KIND = pytest.mark.parametrize("kind", MOMENTS)
INDICES: list[Any] = [
    0,
    -1,
    slice(0, 1),
    slice(None, None, 2),
    [1, 0, 1],
    (1, 2),
    (slice(None), 1),
    None,
    ...,
    (..., 2),
]


def assert_same(found: Moments, wanted: Moments) -> None:
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance, wanted.covariance, rtol=1e-12, atol=1e-12)


@EVERY_KIND
def test_shapes_and_types(kind: str) -> None:
    value = MOMENTS[kind](2, 3, 4)
    assert value.shape == (2, 3, 4)
    assert value.batch_shape == (2, 3)
    assert value.event_shape == (4,)
    assert value.dim() == 3
    assert value.dtype == torch.float64
    assert value.device == torch.device("cpu")
    torch.testing.assert_close(value.stddev, value.variance.sqrt())


@EVERY_KIND
def test_to_changes_every_tensor(kind: str) -> None:
    value = MOMENTS[kind](2, 3, 4)
    single = value.to(torch.float32)
    assert type(single) is type(value)
    assert {tensor.dtype for tensor in tensors(single)} == {torch.float32}
    torch.testing.assert_close(single.covariance, value.covariance.float())
    assert all(new is old for new, old in zip(tensors(value.to(torch.float64)), tensors(value), strict=True))


@EVERY_KIND
def test_a_repr_needs_no_numbers(kind: str) -> None:
    value = MOMENTS[kind](2, 3, 4).to("meta")
    assert repr(value).startswith(f"{type(value).__name__}(mean (2, 3, 4), ")
    assert repr(value).endswith("float64, meta)")
    assert "rate=?" in repr(mp.network(2).to("meta"))


@EVERY_KIND
def test_detach_lets_go_of_the_graph(kind: str) -> None:
    value = MOMENTS[kind](2, 4)
    factor = torch.ones(4, dtype=torch.float64, requires_grad=True)
    scaled = mpgelu(scale(value, factor))
    detached = scaled.detach()
    assert scaled.mean.requires_grad
    assert not any(tensor.requires_grad for tensor in tensors(detached))
    assert_same(detached, scaled)
    if isinstance(detached, FactoredMoments):  # nor is it kept by the names of merged sources
        held = [*detached.merged, *(source for block in detached.blocks for source in block.merged)]
        assert not any(tensor.requires_grad for tensor in held)


@EVERY_KIND
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_picks_rows(kind: str, index: Any) -> None:
    value = MOMENTS[kind](2, 3, 4)
    picked = value[index]
    rows = torch.arange(6).view(2, 3)[index]
    assert type(picked) is type(value)
    assert torch.equal(picked.mean, value.mean.view(6, 4)[rows])
    assert torch.equal(picked.variance, value.variance.view(6, 4)[rows])
    torch.testing.assert_close(picked.covariance, value.covariance.view(6, 4, 4)[rows], rtol=1e-12, atol=1e-15)
    weight = torch.randn(3, 4, dtype=torch.float64)  # whose rule needs to know what is per row
    wanted = linear(mpgelu(value), weight).covariance.view(6, 3, 3)[rows]
    torch.testing.assert_close(linear(mpgelu(picked), weight).covariance, wanted, rtol=1e-10, atol=1e-12)


@EVERY_KIND
def test_rows_can_be_iterated_and_features_not_picked(kind: str) -> None:
    value = MOMENTS[kind](2, 4)
    assert [row.shape for row in value] == [(4,), (4,)]  # type: ignore[attr-defined]
    assert value[0][None].shape == (1, 4)
    with pytest.raises(IndexError, match=r"over the batch dimensions \(2,\) and leaves the features \(4,\) together"):
        _ = value[0, 1]
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        _ = value[2]


@EVERY_KIND
def test_operators_are_the_rules(kind: str) -> None:
    value, constant = MOMENTS[kind](2, 4), torch.randn(4, dtype=torch.float64)
    for found in (value + constant, constant + value, value + constant.numpy(), constant.numpy() + value):
        assert_same(found, add(value, constant))
    assert_same(value - 1.5, add(value, -1.5))
    for found in (1.5 - value, -value + 1.5, -(value - 1.5)):
        assert_same(found, add(scale(value, -1.0), 1.5))
    for found in (value * constant, constant * value, value / (1 / constant)):
        assert_same(found, scale(value, constant))
    assert_same(2 * value, scale(value, 2.0))
    if not isinstance(value, FullMoments):
        other = MOMENTS[kind](2, 4)
        assert_same(value + other, add(value, other))
        assert_same(value - other, add(value, other, -1.0))
    with pytest.raises(MissingRuleError, match="the product of two random vectors has no rule"):
        _ = value * value
    with pytest.raises(MissingRuleError, match="a division by a random vector has no rule"):
        _ = value / value


def test_operators_compile() -> None:
    value = FactoredMoments.of(torch.randn(3, 4), torch.rand(3, 4))
    torch.compiler.reset()
    compiled = torch.compile(lambda h: (2 * (h + h) - 1).covariance, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(value), 16 * value.covariance)


# Plain torch


MODULES: list[tuple[Callable[[Any], Any], str]] = [
    (
        nn.Linear(4, 2),
        "linear takes tensors, not .*; use mpgelu.Linear, or convert the whole .* with mpgelu.from_torch",
    ),
    (nn.ReLU(), "use mpgelu.ReLU,"),
    (nn.Dropout(0.1), "use mpgelu.Dropout,"),
    (nn.GELU(), "use mpgelu.layers.GELU,"),
    (nn.Tanh(), "use mpgelu.layers.Tanh,"),
    (nn.LayerNorm(4), "use mpgelu.layers.LayerNorm,"),
    (nn.BatchNorm1d(4).eval(), "use mpgelu.layers.BatchNorm1d,"),
    (nn.Sequential(mp.Linear(4, 4), nn.Softplus()), "use mpgelu.layers.Softplus,"),
    (nn.Softmax(-1), "use a rule of mpgelu.rules or a layer of mpgelu.layers, or convert"),
    (lambda value: torch.cat([value, value]), "use mpgelu.rules.concatenate,"),
    (lambda value: F.relu(value, inplace=True), "use mpgelu.ReLU,"),
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("module", "text"), MODULES, ids=lambda part: str(part)[:20])
def test_plain_modules_name_the_remedy(module: Callable[[Any], Any], text: str, kind: Any) -> None:
    with pytest.raises(MissingRuleError, match=text):
        module(kind.certain(torch.randn(3, 4)))
    assert BatchNorm1d(4)(kind.certain(torch.randn(3, 4))).shape == (3, 4)  # ours asks for the dimensions too


@pytest.mark.parametrize("kind", TYPES)
def test_methods_of_tensors_that_moments_lack(kind: Any) -> None:
    value = kind.certain(torch.randn(3, 4))
    with pytest.raises(
        AttributeError, match=r"has no attribute 'flatten'; tensors have it, .* \(see also .mean.flatten\)"
    ):
        value.flatten()
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = value.nothing
    assert not hasattr(value, "flatten")
    assert np.asarray(value.mean).shape == (3, 4)
