"""Training data of distillation: rows, and quadrature values of the distributions that the ensemble predicts there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.networks import FeatureScale
from mpgelu.predictive import Predictive

Array = NDArray[np.float64]

VALUES = 4  # number of values that represent the distribution of a row in a step

_NEIGHBOURS, _MOST_NEIGHBOURS_OF = 10, 10_000  # nearest neighbours of a row, and rows among which they are searched
_WHOLLY = 0.5  # share of the synthetic rows that take features of a neighbour without interpolation
_OUTSIDE, _FARTHEST = 0.1, 3.0  # share of the synthetic rows outside the data, and their largest standard deviation
_OUTSIDE_OF_STEP = 0.05  # share of the rows of a step that are outside the data
_FEW_GIVEN = 2_500  # number of given rows of which a step takes as many as of synthetic rows between them
_FALL = 1.5  # exponent with which their ratio falls with the given rows
_SETS = 8  # number of sets of values of a row
_LEAST_SHARE = 1e-6  # smallest epistemic part of the variance, whose logarithm must be finite
_AT_ONCE = 1024
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Lesson:
    """Predictions of a teacher, an ensemble, in units of the scaled target.

    Args:
        z: Scaled features, ``(rows, n)``.
        values: Sets of values that represent the distribution of each row, ``(sets, rows, values)``.
        mean: Mean of each distribution, ``(rows,)``.
        log_epistemic: Logarithm of the epistemic variance, ``(rows,)``.
        variance: Variance of each distribution, ``(rows,)``.
        given: Number of given rows, which come first; the others are synthetic.
        outside: Number of synthetic rows outside the data, which come last.
    """

    z: Tensor
    values: Tensor
    mean: Tensor
    log_epistemic: Tensor
    variance: Tensor
    given: int
    outside: int = 0

    @classmethod
    def of(cls, teacher: Ensemble, rows: Tensor, given: int, seed: int, outside: int = 0) -> Lesson:
        """Return the predictions of a teacher.

        Args:
            teacher: An ensemble for a target of scale one.
            rows: Raw features, ``(rows, n)``.
            given: Number of given rows, which come first.
            seed: Seed of the values.
            outside: Number of synthetic rows outside the data, which come last.
        """
        generator = torch.Generator().manual_seed(seed)
        parts: list[tuple[Tensor, ...]] = []
        for some in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                p = teacher(some, None, VALUES)
            values = spread_values(p, VALUES, generator, _SETS).transpose(0, 1)  # (rows, sets, values)
            parts.append((values, p.mean, p.epistemic_variance, p.variance))
        values, mean, epistemic, variance = (torch.cat(part).float() for part in zip(*parts, strict=True))
        variance = variance.clamp_min(torch.finfo(torch.float32).tiny)
        epistemic = torch.maximum(epistemic, _LEAST_SHARE * variance)  # a single deterministic network has none
        z, values = teacher.scaling(rows).float(), values.movedim(1, 0).contiguous()
        return cls(z, values, mean, epistemic.log(), variance, given, outside)

    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """Return the numbers of random rows for a step, ``(size,)``: given ones, rows between them, and rows outside.

        The share of rows between given ones falls with the number g of given rows, as 1 / (1 + (g / 2,500)^1.5). They
        stand in for rows that are missing. Where many are given they do harm: a row that mixes the features of two
        others need not be possible, and then the ensemble is arbitrary there.

        Args:
            size: Number of rows of the step.
            generator: Random number generator.
        """
        between = len(self.z) - self.given - self.outside
        of_outside = round(_OUTSIDE_OF_STEP * size) if self.outside else 0
        of_between = round((size - of_outside) / (1 + (self.given / _FEW_GIVEN) ** _FALL)) if between else 0
        parts = (
            (0, self.given, size - of_outside - of_between),
            (self.given, self.given + between, of_between),
            (self.given + between, len(self.z), of_outside),
        )
        return torch.cat(
            [
                torch.randint(first, end, (count,), generator=generator, device="cpu")
                for first, end, count in parts
                if count
            ]
        )

    def batch(self, at: Tensor, step: int) -> Batch:
        """Return some of the rows, with another set of their values in each step.

        Args:
            at: Numbers of the rows, ``(batch,)``.
            step: Number of the step.
        """
        values = self.values[step % len(self.values)].index_select(0, at).T
        z, *facts = torch.split(self._together.index_select(0, at), [self.z.shape[1], 1, 1, 1], 1)
        return Batch(z, values, *(fact.squeeze(1) for fact in facts))

    @property
    def unit(self) -> float:
        """Geometric mean of the standard deviations of all rows, a unit for what depends on the width."""
        return math.exp(0.5 * self.variance.log().mean().item())

    @cached_property
    def _together(self) -> Tensor:
        """Features, mean, log epistemic variance and variance of each row, ``(rows, n + 3)``, for a single gather."""
        return torch.cat([self.z, torch.stack([self.mean, self.log_epistemic, self.variance], 1)], 1)


class Batch(NamedTuple):
    """Some rows of a lesson; see there.

    Attributes:
        z: Scaled features, ``(batch, n)``.
        values: Values that represent the distribution of each row, ``(values, batch)``.
        mean: Mean of each distribution, ``(batch,)``.
        log_epistemic: Logarithm of the epistemic variance, ``(batch,)``.
        variance: Variance of each distribution, ``(batch,)``.
    """

    z: Tensor
    values: Tensor
    mean: Tensor
    log_epistemic: Tensor
    variance: Tensor


def spread_values(distribution: Predictive, count: int, generator: torch.Generator, sets: int = 1) -> Tensor:
    r"""Return sets of values that represent the distribution of each row, ``(sets, rows, count)``.

    The values are images of a randomly shifted lattice in the unit square: the first coordinate :math:`(i + u) / c` of
    point i selects the component by its weight, and the second one :math:`\{i \varphi + v\}`, with the golden ratio
    :math:`\varphi` and the fractional part in braces, is the probability whose quantile is taken in the component. The
    average of a function over a set is an unbiased estimate of its expectation, with a much smaller variance than that
    of independent draws.

    Args:
        distribution: Distributions of the rows, with batch shape ``(rows,)``.
        count: Number c of values of a row in each set.
        generator: Random number generator of the shifts u and v.
        sets: Number of independent sets.
    """
    rows, dtype = distribution.means.shape[0], distribution.means.dtype
    shifts = torch.rand(2, rows, sets, 1, generator=generator, dtype=dtype, device="cpu")
    places = torch.arange(count, dtype=dtype, device="cpu")
    which, where = ((places + shifts[0]) / count).flatten(1), ((places * _GOLDEN + shifts[1]) % 1).flatten(1)
    steps = distribution.log_weights.exp().expand_as(distribution.means).cumsum(-1)
    component = torch.searchsorted(steps / steps[:, -1:], which).clamp_max(steps.shape[-1] - 1)
    deviation = torch.special.ndtri(where.clamp(1e-9, 1 - 1e-9))
    values: Tensor = distribution.variances.gather(1, component).sqrt() * deviation
    return (values + distribution.means.gather(1, component)).reshape(rows, sets, count).transpose(0, 1)


def made_rows(X: Array, scaling: FeatureScale, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return synthetic rows in the neighbourhood of given ones, between them and outside, ``(count, n)`` together.

    A synthetic row starts at a given one. About half of its features, chosen at random, move towards those of one of
    its ten nearest neighbours: all the way in half of the rows, which keeps the values of categorical codes, and by a
    common random fraction in the others. A tenth of the rows is then moved outside the data by Gaussian steps of up to
    three standard deviations of the features.

    Args:
        X: Raw features of the given rows, ``(rows, n)``.
        scaling: Scaling of the features, in whose units distances are measured.
        count: Number of synthetic rows.
        rng: Random number generator.

    Returns:
        The rows between given ones, and those outside.
    """
    known = X[rng.permutation(len(X))[:_MOST_NEIGHBOURS_OF]]
    z = scaling(torch.as_tensor(known, device="cpu")).numpy()
    count_of_near = min(_NEIGHBOURS, len(known) - 1)
    base = rng.integers(len(known), size=count)
    rows = known[base]
    if count_of_near:
        near = np.asarray(cKDTree(z).query(z, count_of_near + 1)[1])[:, 1:]
        other = known[near[base, rng.integers(count_of_near, size=count)]]
        part = np.where(rng.random((count, 1)) < _WHOLLY, 1.0, rng.random((count, 1)))
        moved = (rng.random(rows.shape) < 0.5) * part
        rows = rows + moved * (other - rows)
    between, outside = np.split(rows, [count - round(_OUTSIDE * count)])
    chosen = rng.random(outside.shape) < rng.random((len(outside), 1))  # a random share of the features of each row
    step = rng.standard_normal(outside.shape) * known.std(axis=0) * rng.uniform(0, _FARTHEST, (len(outside), 1))
    return between, np.where(chosen, outside + step, outside)
