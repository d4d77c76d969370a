"""Quantiles of mixtures by the kernel: what it finds is right and does not depend on the rows beside or on threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import Tensor

from mpgelu import native
from mpgelu.native.mixture import mixture_quantiles

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")

LEVELS = torch.tensor([0.001, 0.05, 0.5, 0.95, 0.999]).double()


def mixtures(rows: int, count: int, widths: tuple[float, float], shared: bool = True) -> list[Tensor]:
    """Means, variances, weights, mean and standard deviation of random mixtures."""
    rng = np.random.default_rng(count)
    means = 10 + rng.normal(size=(rows, count))
    stddevs = np.exp(rng.uniform(np.log(widths[0]), np.log(widths[1]), size=(rows, count)))
    weights = rng.dirichlet(np.ones(count), size=1 if shared else rows)
    mean = (weights * means).sum(-1)
    variance = (weights * (stddevs**2 + (means - mean[:, None]) ** 2)).sum(-1)
    return [torch.from_numpy(array) for array in (means, stddevs**2, weights, mean, np.sqrt(variance))]


def solved(mixture: list[Tensor], rows: slice = slice(None)) -> Tensor:
    chosen = [part if len(part) == 1 else part[rows] for part in mixture]
    return mixture_quantiles(chosen, LEVELS, torch.special.ndtri(LEVELS))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [1, 3, 63])
@pytest.mark.parametrize("widths", [(0.5, 2.0), (0.05, 5.0), (1e-3, 3.0)])
def test_roots_are_those_of_scipy(count: int, widths: tuple[float, float], shared: bool) -> None:
    mixture = mixtures(20, count, widths, shared)
    found = solved(mixture)
    assert found.isfinite().all()
    means, variances, weights = (part.numpy() for part in mixture[:3])
    for row in range(20):
        of_row = weights[0] if shared else weights[row]

        def excess(y: float, level: float, row: int = row, of_row: object = of_row) -> float:
            return float((of_row * ndtr((y - means[row]) / np.sqrt(variances[row]))).sum() - level)

        wanted = [brentq(excess, -30, 50, args=(float(level),), xtol=1e-14, rtol=1e-14) for level in LEVELS]
        np.testing.assert_allclose(found[row].numpy(), wanted, rtol=0, atol=1e-9)


def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads() -> None:
    mixture, threads = mixtures(2_000, 30, (0.05, 5.0)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        once = solved(mixture)
        torch.set_num_threads(3)
        assert torch.equal(solved(mixture), once)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([solved(mixture, slice(row, row + 1)) for row in range(20)]), once[:20])


@pytest.mark.parametrize(("place", "value"), [(0, torch.nan), (1, torch.nan), (1, 0.0), (1, -1.0), (1, torch.inf)])
def test_what_it_cannot_find_is_nan_in_its_row_alone(place: int, value: float) -> None:
    mixture = mixtures(3, 5, (0.5, 2.0))
    wanted = solved(mixture)
    mixture[place][1] = value
    found = solved(mixture)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
