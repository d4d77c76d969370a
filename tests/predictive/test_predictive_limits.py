"""Predictives at their limits: point masses, widths of many decades, NaN, single rows, shapes of draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from mpgelu.predictive import Predictive

Array = NDArray[np.float64]
LEVELS = [0.01, 0.05, 0.3, 0.5, 0.52, 0.8, 0.95]
DTYPES = [torch.float64, torch.float32]


def by_hand(means: Tensor, variances: Tensor, log_weights: Tensor) -> Predictive:
    weights = log_weights.exp()
    mean = (weights * means).sum(-1)
    epistemic = (weights * (means - mean[..., None]) ** 2).sum(-1)
    return Predictive(means, variances, log_weights, mean, epistemic, (weights * variances).sum(-1))


def drawn(rows: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal means, uniform numbers, log weights."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, rows, count, dtype=torch.float64, generator=generator)
    uniform = torch.rand(rows, count, dtype=torch.float64, generator=generator)
    return normal[0], uniform, torch.log_softmax(normal[1], -1)


def paired_crps(p: Predictive, y: float) -> Array:
    """The sum over all pairs of components, in float64 by numpy and scipy."""
    means, stddevs = p.means.double().numpy(), np.sqrt(p.variances.double().numpy())
    weights = p.log_weights.double().softmax(-1).expand_as(p.means).numpy()

    def absolute(m: Array, s: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            a = np.where(s > 0, m / s, np.inf * np.sign(m))
        a = np.nan_to_num(a, posinf=1e9, neginf=-1e9)
        return np.asarray(2 * s * np.exp(-0.5 * a**2) / math.sqrt(2 * math.pi) + m * (2 * ndtr(a) - 1))

    first = (weights * absolute(y - means, stddevs)).sum(-1)
    pairs = absolute(means[:, :, None] - means[:, None], np.hypot(stddevs[:, :, None], stddevs[:, None]))
    return np.asarray(first - 0.5 * np.einsum("ri,rj,rij->r", weights, weights, pairs))


# CRPS


def mixtures_of_many() -> dict[str, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Means, standard deviations and log weights of mixtures of many components, by their number."""

    def widths(decades: float, spread: float = 1.0) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
        def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
            normal, uniform, logs = drawn(4, count)
            return spread * normal, 10 ** (decades * (2 * uniform - 1)), logs

        return made

    def narrow(chosen: Callable[[Tensor], Tensor], stddev: float) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
        def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
            normal, uniform, logs = drawn(4, count)
            return normal, torch.where(chosen(uniform), stddev, 0.5 + uniform), logs

        return made

    def rare_and_far(count: int) -> tuple[Tensor, Tensor, Tensor]:
        normal, uniform, logs = drawn(4, count)
        first = torch.arange(count) == 0
        logs = torch.log_softmax(torch.where(first, -30.0, logs), -1)
        return torch.where(first, 1e6, normal), torch.where(first, 0.0, 0.5 + uniform), logs

    def two_scales(count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Wide components three standard deviations beside narrow ones."""
        normal, uniform, logs = drawn(4, count)
        half = torch.arange(count) < count // 2
        return torch.where(half, 1e-3 * normal, 3.0), torch.where(half, 1e-4, 1.0 + 0 * uniform), logs

    return {
        "ordinary": widths(0.2),
        "decades": widths(1.0),
        "nine decades": widths(9.0),
        "nine decades, same mean": widths(9.0, spread=0.0),
        "points": narrow(lambda uniform: uniform >= 0, 0.0),
        "almost points": narrow(lambda uniform: uniform >= 0, 1e-10),
        "half points": narrow(lambda uniform: uniform > 0.5, 0.0),
        "some narrow": narrow(lambda uniform: uniform > 0.95, 1e-4),
        "one point": narrow(lambda uniform: uniform == uniform.max(), 0.0),
        "rare and far": rare_and_far,
        "two scales": two_scales,
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("count", [128, 600])
@pytest.mark.parametrize("kind", mixtures_of_many())
def test_crps_of_many_components_of_any_width(kind: str, count: int, dtype: torch.dtype, tolerance: float) -> None:
    means, stddevs, logs = mixtures_of_many()[kind](count)
    p = by_hand(*(x.to(dtype) for x in (means, stddevs**2, logs)))
    np.testing.assert_allclose(p.crps(0.3).double().numpy(), paired_crps(p, 0.3), rtol=tolerance)


def test_crps_of_equal_points_is_that_of_the_uniform_staircase() -> None:
    means = torch.arange(128.0).double()[None]
    p = by_hand(means, 0 * means, torch.full((128,), -math.log(128)).double())
    assert p.crps(63.5).item() == pytest.approx(32 - (128**2 - 1) / (6 * 128), rel=1e-12)  # E|Y - Y'| = (n^2 - 1) / 3n


# Quantiles of point masses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stddev", [0.0, 1e-30, 1e-20, 1e-17, 1e-15, 1e-10])
@pytest.mark.parametrize("traced", [False, True])
def test_quantile_with_point_masses_beside_wide_components(stddev: float, dtype: torch.dtype, traced: bool) -> None:
    """Next to the quantile the cdf is below its level on one side and above on the other."""
    for count in (2, 10, 33):
        normal, uniform, logs = drawn(40, count, seed=count)
        stddevs = torch.where(uniform > 0.6, stddev, 0.1 + uniform)
        p = by_hand(*(x.to(dtype) for x in (normal, stddevs**2, logs)))

        def row(means: Tensor, variances: Tensor, log_weights: Tensor) -> Tensor:
            return by_hand(means, variances, log_weights).quantile(LEVELS)

        y = torch.func.vmap(row)(p.means, p.variances, p.log_weights) if traced else p.quantile(LEVELS)
        means, variances = p.means.double().numpy()[:, None], p.variances.double().numpy()[:, None]
        weights = p.log_weights.double().softmax(-1).numpy()[:, None]
        slack, places = 4 * torch.finfo(dtype).eps, y.double().numpy()[..., None]
        smallest = torch.finfo(dtype).tiny ** 0.75
        below, above = (
            (weights * ndtr((places + by * np.abs(places) - means) / np.sqrt(np.maximum(variances, smallest)))).sum(-1)
            for by in (-slack, slack)
        )
        levels = torch.tensor(LEVELS, dtype=dtype).double().numpy()
        tolerance = 1e-11 if dtype == torch.float64 else 1e-6
        assert (below <= levels + tolerance).all(), (count, (below - levels).max())
        assert (above >= levels - tolerance).all(), (count, (above - levels).min())


def test_a_quantile_inside_a_point_mass_is_the_point() -> None:
    means, variances = torch.tensor([[[0.7, 0.7]], [[0.0, 1.0]]], dtype=torch.float64)
    p = by_hand(means, variances, torch.full((2,), -math.log(2), dtype=torch.float64))
    for traced in (False, True):
        q = torch.tensor([0.3, 0.45, 0.5, 0.6]).double()
        y = torch.func.vmap(lambda q: p.quantile(q))(q)[:, 0] if traced else p.quantile(q)[0]
        np.testing.assert_allclose(y.numpy(), 0.7, rtol=4e-16)


# NaN

RESULTS: dict[str, Callable[[Predictive], Tensor]] = {
    "log_prob": lambda p: p.log_prob(0.3),
    "cdf": lambda p: p.cdf(0.3),
    "probability_above": lambda p: p.probability_above(0.3),
    "quantile": lambda p: p.quantile([0.001, 0.1, 0.9]),
    "interval": lambda p: torch.stack(p.interval(0.8, tolerance=1e-5), -1),
    "crps": lambda p: p.crps(0.3),
    "sample": lambda p: p.sample(20, torch.Generator().manual_seed(0)).movedim(0, -1),
}


def with_nan(field: str, count: int, dtype: torch.dtype) -> tuple[Predictive, Predictive]:
    """Three rows, of which the second has one component with a NaN; and the same rows without it."""
    normal, uniform, logs = drawn(3, count)
    fields = {"means": normal, "variances": torch.where(uniform > 0.8, 0.0, uniform), "log_weights": logs}
    whole = by_hand(*(x.to(dtype) for x in fields.values()))
    fields[field] = fields[field].clone()
    fields[field][1, fields["variances"][1].argmin()] = math.nan  # the narrowest, a point mass if there is one
    return by_hand(*(x.to(dtype) for x in fields.values())), whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 20, 150])
@pytest.mark.parametrize("field", ["means", "variances", "log_weights"])
@pytest.mark.parametrize("result", RESULTS)
def test_a_row_with_nan_is_nan_and_others_are_not_touched(
    result: str, field: str, count: int, dtype: torch.dtype
) -> None:
    broken, whole = (RESULTS[result](p) for p in with_nan(field, count, dtype))
    assert broken[1].isnan().all()
    torch.testing.assert_close(broken[[0, 2]], whole[[0, 2]])
    assert whole.isfinite().all()


@pytest.mark.parametrize("mode", ["vmap", "compile", "gradient"])
@pytest.mark.parametrize("field", ["means", "variances", "log_weights"])
def test_nan_where_numbers_are_not_seen(mode: str, field: str) -> None:
    p, _ = with_nan(field, 3, torch.float32)

    def values(means: Tensor, variances: Tensor, log_weights: Tensor) -> Tensor:
        row = by_hand(means, variances, log_weights)
        names = [name for name in RESULTS if name != "sample"]
        return torch.cat([RESULTS[name](row).reshape(*row.batch_shape, -1) for name in names], -1)

    run = {
        "vmap": torch.func.vmap(values),
        "compile": torch.compile(values, fullgraph=True, backend="eager"),
        "gradient": lambda means, *rest: values(means.clone().requires_grad_(), *rest).detach(),
    }[mode]
    found = run(p.means, p.variances, p.log_weights)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("variance", [0.0, 1.0])
def test_a_target_or_level_of_nan_is_nan(variance: float) -> None:
    p = Predictive.gaussian(torch.zeros(2), torch.tensor([variance, 1.0]), torch.zeros(2))
    y = torch.tensor([math.nan, 0.0])
    for name in ("log_prob", "cdf", "probability_above", "crps"):
        assert getattr(p, name)(y).isnan().tolist() == [True, False], name
    q = torch.tensor([0.5, math.nan, 1e-5])
    assert p.quantile(q).isnan().tolist() == [[False, True, False]] * 2
    np.testing.assert_allclose(p.quantile(q)[1, 2], -4.264891, rtol=1e-6)
    assert torch.func.vmap(lambda q: p.quantile(q))(q).isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


def test_infinite_variance_makes_the_crps_of_many_components_infinite() -> None:
    normal, uniform, logs = drawn(2, 130)
    uniform[0, 5] = math.inf
    crps = by_hand(normal, uniform, logs).crps(0.0)
    assert crps[0] == math.inf
    assert crps[1].isfinite()


# Batches without dimensions, shapes of draws


@pytest.mark.parametrize("count", [1, 3, 150])
def test_one_row_alone_is_the_row(count: int) -> None:
    normal, uniform, logs = drawn(2, count)
    p = by_hand(normal, uniform, logs)
    alone, y = p[0], torch.tensor(0.4).double()
    assert alone.batch_shape == ()
    for name in ("log_prob", "cdf", "probability_above", "crps"):
        torch.testing.assert_close(getattr(alone, name)(y), getattr(p, name)(y)[0])
    torch.testing.assert_close(alone.quantile(0.5), p.quantile(0.5)[0])
    torch.testing.assert_close(alone.quantile([0.1, 0.9]), p.quantile([0.1, 0.9])[0])
    for a, b in zip(alone.interval(0.9, 1e-5), p.interval(0.9, 1e-5), strict=True):
        torch.testing.assert_close(a, b[0], rtol=1e-4, atol=1e-4)
    assert alone.quantile(torch.tensor([0.5]).double()).shape == (1,)
    assert alone.matched().quantile(0.5).shape == ()
    assert Predictive.mixture([alone, alone]).affine(2.0, 1.0).quantile(0.5).shape == ()
    alone.means.requires_grad_()
    assert alone.quantile(0.5).shape == ()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), torch.Size([4, 1]), 7, 0])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_sample_has_the_shapes_of_torch_distributions(shape: int | tuple[int, ...], batch: tuple[int, ...]) -> None:
    like: Any = torch.distributions.Normal(torch.zeros(batch), torch.ones(batch))
    p = Predictive.gaussian(torch.zeros(batch), torch.zeros(batch), torch.ones(batch))
    wanted = like.sample((shape,) if isinstance(shape, int) else shape).shape
    assert p.sample(shape).shape == wanted
    assert shape != () or p.sample().shape == wanted


def test_draws_of_every_place_have_the_distribution_of_their_row() -> None:
    p = Predictive.gaussian(torch.tensor([0.0, 10.0]), torch.zeros(2), torch.tensor([1.0, 4.0]))
    draws = p.sample((200, 50), torch.Generator().manual_seed(0))
    assert draws.shape == (200, 50, 2)
    error = p.stddev / 100
    assert ((draws.mean((0, 1)) - p.mean).abs() < 4 * error).all()
    assert ((draws.std((0, 1)) - p.stddev).abs() < 4 * error).all()
