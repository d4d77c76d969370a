"""NaN and infinity in moments have one meaning. They arise where numbers overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from mpgelu import DiagonalMoments, FullMoments, Stack, network
from mpgelu.rules import elementwise, leaky_relu, mpgelu, relu
from mpgelu.rules.activations import GELU, Sigmoid, SiLU, Softplus, Tanh

inf, nan = math.inf, math.nan
RULES: dict[str, Callable[[Any], Any]] = {
    "relu": relu,
    "relu, dvi": lambda value: relu(value, "dvi"),
    "leaky_relu": leaky_relu,
    "leaky_relu, gain": lambda value: leaky_relu(value, 0.1, "gain"),
    "mpgelu": mpgelu,
    **{type(f).__name__: partial(elementwise, activation=f) for f in (Tanh(), Sigmoid(), SiLU(), Softplus(), GELU())},
}
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@EVERY_RULE
@pytest.mark.parametrize("bad", [(nan, 0.0), (nan, 1.0), (nan, nan), (0.0, nan), (1.0, nan), (-1.0, nan), (inf, nan)])
def test_nan_in_a_mean_or_a_variance_gives_nan(rule: Callable[[Any], Any], bad: tuple[float, float]) -> None:
    mean, variance = torch.tensor([[0.3, bad[0], -0.5]]), torch.tensor([[0.2, bad[1], 0.4]])
    out, clean = (rule(DiagonalMoments(mean[:, units], variance[:, units])) for units in ([0, 1, 2], [0, 2]))
    assert out.mean[0, 1].isnan()
    assert out.variance[0, 1].isnan()
    torch.testing.assert_close(out.mean[:, [0, 2]], clean.mean)
    torch.testing.assert_close(out.variance[:, [0, 2]], clean.variance)


@EVERY_RULE
@pytest.mark.parametrize("place", ["mean", "variance", "covariance"])
def test_nan_stays_with_the_units_that_it_concerns(rule: Callable[[Any], Any], place: str) -> None:
    mean, covariance = torch.tensor([[0.3, -0.2, 0.5, -0.1]]), (torch.eye(4) + 0.3)[None]
    if place == "mean":
        mean[0, 1] = nan
    elif place == "variance":
        covariance[0, 1, 1] = nan
    else:
        covariance[0, 0, 1] = covariance[0, 1, 0] = nan
    out = rule(FullMoments(mean, covariance))
    assert bool(out.mean[0, 1].isnan()) == (place != "covariance")
    assert out.mean[0, [0, 2, 3]].isfinite().all()
    assert out.covariance[0, 0, 1].isnan()
    assert out.covariance[0][[[2], [3]], [2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinity_follows_the_formulas(dtype: torch.dtype) -> None:
    mean = torch.tensor([inf, inf, -inf, -inf, 1.0, -1.0], dtype=dtype)
    variance = torch.tensor([0.0, 1.0, 0.0, 1.0, inf, inf], dtype=dtype)
    rectified = relu(DiagonalMoments(mean, variance))
    assert rectified.mean.tolist() == [inf, inf, 0, 0, inf, inf]
    assert rectified.variance.tolist() == [0, 1, 0, 0, inf, inf]
    masked = mpgelu(DiagonalMoments(mean, variance))
    assert masked.mean[:2].tolist() == [inf, inf]
    assert masked.mean[2:4].isnan().all()  # a probability of zero times infinity
    torch.testing.assert_close(masked.mean[4:], torch.tensor([0.5, -0.5], dtype=dtype))
    assert masked.variance[4:].tolist() == [inf, inf]
    full = mpgelu(FullMoments(mean[4:], torch.diag(variance[4:]).nan_to_num(posinf=inf)))
    assert full.covariance.diagonal().tolist() == [inf, inf]


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
@pytest.mark.parametrize("kind", [DiagonalMoments, FullMoments])
def test_nan_in_one_of_several_networks_stays_there(nonlinearity: Any, kind: Any) -> None:
    networks = [network(3, (8, 8), nonlinearity=nonlinearity) for _ in range(3)]
    with torch.no_grad():
        networks[1][1].bias[0] = nan  # type: ignore[operator]
    out = Stack(networks)(kind.certain(torch.randn(3, 5, 3)))
    assert out.mean[1].isnan().all()
    assert out.variance[1].isnan().all()
    assert out.mean[[0, 2]].isfinite().all()
    assert out.covariance[[0, 2]].isfinite().all()
