"""What an ensemble says about rows, for a network that is to say the same: rows, and values of their distributions."""

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

VALUES = 4  # that stand for a row's distribution in a step

_NEIGHBOURS, _MOST_NEIGHBOURS_OF = 10, 10_000  # of a row; rows among which they are searched for
_WHOLLY = 0.5  # share of the made rows whose features are exchanged wholly
_OUTSIDE, _FARTHEST = 0.1, 3.0  # share of the made rows that are moved away, and by how many standard deviations
_SETS = 8  # of values of a row
_LEAST_SHARE = 1e-6  # of the variance that counts as epistemic
_AT_ONCE = 1024
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Lesson:
    """What a teacher predicts, in units of the target's scale.

    Args:
        z: Scaled features ``(rows, n)``.
        values: Sets of values that stand for each row's distribution, ``(sets, rows, values)``.
        mean: ``(rows,)``.
        log_epistemic: Logarithm of the variance from not knowing the function, ``(rows,)``.
        variance: The whole variance, ``(rows,)``.
        given: How many of the rows, the first, are given ones.
    """

    z: Tensor
    values: Tensor
    mean: Tensor
    log_epistemic: Tensor
    variance: Tensor
    given: int

    @classmethod
    def of(cls, teacher: Ensemble, rows: Tensor, given: int, seed: int) -> Lesson:
        """Ask a teacher about raw features ``(rows, n)``."""
        generator = torch.Generator().manual_seed(seed)
        parts: list[tuple[Tensor, ...]] = []
        for some in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                p = teacher(some, None, VALUES)
            values = spread_values(p, VALUES, generator, _SETS).transpose(0, 1)  # (rows, sets, values)
            parts.append((values, p.mean, p.epistemic_variance, p.variance))
        values, mean, epistemic, variance = (torch.cat(part).float() for part in zip(*parts, strict=True))
        variance = variance.clamp_min(torch.finfo(torch.float32).tiny)
        epistemic = torch.maximum(epistemic, _LEAST_SHARE * variance)  # of one sure network there is none
        return cls(
            teacher.scaling(rows).float(), values.movedim(1, 0).contiguous(), mean, epistemic.log(), variance, given
        )

    def batch(self, at: Tensor, step: int) -> Batch:
        """Some of the rows, with another set of their values in every step.

        Args:
            at: Which rows, ``(batch,)``.
            step: Number of the step.
        """
        values = self.values[step % len(self.values)].index_select(0, at).T
        z, *facts = torch.split(self._together.index_select(0, at), [self.z.shape[1], 1, 1, 1], 1)
        return Batch(z, values, *(fact.squeeze(1) for fact in facts))

    @cached_property
    def _together(self) -> Tensor:
        """What is known of each row side by side, since every choice of rows costs: ``(rows, n + 3)``."""
        return torch.cat([self.z, torch.stack([self.mean, self.log_epistemic, self.variance], 1)], 1)


class Batch(NamedTuple):
    """Rows of a lesson.

    Args:
        z: Scaled features ``(batch, n)``.
        values: That stand for each row's distribution, ``(values, batch)``.
        mean: ``(batch,)``.
        log_epistemic: ``(batch,)``.
        variance: ``(batch,)``.
    """

    z: Tensor
    values: Tensor
    mean: Tensor
    log_epistemic: Tensor
    variance: Tensor


def spread_values(distribution: Predictive, count: int, generator: torch.Generator, sets: int = 1) -> Tensor:
    """Sets of values that stand for each row's distribution, ``(sets, rows, count)``: randomly shifted lattices.

    The first coordinate of a point chooses the component, the second the place in it. An average over the values of a
    set has the expectation under the distribution as its mean, and far less variance than one over independent draws.

    Args:
        distribution: Of the rows, ``(rows,)``.
        count: Values of a row in each set.
        generator: Source of the shifts.
        sets: How many, independent of each other.
    """
    rows, dtype = distribution.means.shape[0], distribution.means.dtype
    shifts = torch.rand(2, rows, sets, 1, generator=generator, dtype=dtype)
    places = torch.arange(count, dtype=dtype)
    which, where = ((places + shifts[0]) / count).flatten(1), ((places * _GOLDEN + shifts[1]) % 1).flatten(1)
    steps = distribution.log_weights.exp().expand_as(distribution.means).cumsum(-1)
    component = torch.searchsorted(steps / steps[:, -1:], which).clamp_max(steps.shape[-1] - 1)
    deviation = torch.special.ndtri(where.clamp(1e-9, 1 - 1e-9))
    values: Tensor = distribution.variances.gather(1, component).sqrt() * deviation
    return (values + distribution.means.gather(1, component)).reshape(rows, sets, count).transpose(0, 1)


def made_rows(X: Array, scaling: FeatureScale, count: int, rng: np.random.Generator) -> Array:
    """Rows like given ones: half of the features are moved part of the way to a near neighbour, some rows outside.

    Args:
        X: Raw features ``(rows, n)``.
        scaling: In whose units neighbours are near.
        count: How many to make.
        rng: Source of randomness.
    """
    known = X[rng.permutation(len(X))[:_MOST_NEIGHBOURS_OF]]
    z = scaling(torch.as_tensor(known)).numpy()
    count_of_near = min(_NEIGHBOURS, len(known) - 1)
    base = rng.integers(len(known), size=count)
    rows = known[base]
    if count_of_near:
        near = np.asarray(cKDTree(z).query(z, count_of_near + 1)[1])[:, 1:]
        other = known[near[base, rng.integers(count_of_near, size=count)]]
        part = np.where(rng.random((count, 1)) < _WHOLLY, 1.0, rng.random((count, 1)))  # whole steps keep codes codes
        moved = (rng.random(rows.shape) < 0.5) * part
        rows = rows + moved * (other - rows)
    outside = rng.random((count, 1)) < _OUTSIDE
    chosen = rng.random(rows.shape) < rng.random((count, 1))  # few features of some rows, most of others
    distance = rng.standard_normal(rows.shape) * known.std(axis=0) * rng.uniform(0, _FARTHEST, (count, 1))
    made: Array = np.where(outside & chosen, rows + distance, rows)
    return made
