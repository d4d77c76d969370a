"""Scales of features and targets, as they are before any training."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mpgelu.errors import InputError
from mpgelu.networks import FeatureScale

Array = NDArray[np.float64]

LIMIT = 3.0  # of scaled features
_SMALLEST_SCALE = 1e-12  # relative to the centre: a feature that varies less is constant
_OF_QUARTILES = 1.349  # distance of the quartiles of a standard normal distribution
_LEAST_SHARE = 0.2  # of the standard deviation; quartiles may lie close together in a wide distribution


def robust_scale(X: Array) -> FeatureScale:
    """Median and distance of the quartiles of each feature, with a smooth limit at three of them.

    The scale is at least a fifth of the standard deviation, taken inside the limit of ten quartile distances so that
    one absurd cell does not flatten a column. Where the quartiles are equal, as of a column that is mostly zero, it is
    the typical distance of the other values from the median: these carry the information and must not be limited.

    Raises:
        InputError: Differences of the values overflow.
    """
    center = np.median(X, axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        distance = X - center
        quartiles = np.quantile(distance, [0.25, 0.75], axis=0)
    if not np.isfinite(distance).all():
        raise InputError("fit: values are too large: their differences overflow; rescale the data")
    largest = np.abs(distance).max(axis=0)
    constant = largest <= _SMALLEST_SCALE * np.abs(center)
    unit = np.where(constant, 1.0, largest)  # squares of what is at most one neither overflow nor vanish
    spread = (quartiles[1] - quartiles[0]) / _OF_QUARTILES
    typical = np.where(spread > 0, 10 * spread, np.inf)
    inside = np.clip(distance, -typical, typical) / unit
    stddev = unit * np.sqrt((inside**2).mean(axis=0))
    scale = np.where(spread > 0, np.maximum(spread, _LEAST_SHARE * stddev), _typical_distance(distance))
    scale = np.where(constant, 1.0, scale)
    scaled = distance / scale
    numbers = (torch.as_tensor(part) for part in (center, scale, scaled.min(axis=0), scaled.max(axis=0)))
    center_, scale_, lower, upper = numbers
    return FeatureScale(center_, scale_, LIMIT, lower, upper)


def _typical_distance(distance: Array) -> Array:
    """Median of the absolute values that are not zero, of each column; one where all are."""
    found = np.ones(distance.shape[1])
    for column, values in enumerate(np.abs(distance.T)):
        others = values[values > 0]
        found[column] = np.median(others) if len(others) else 1.0
    return found


def target_scales(y: Array, weights: Array) -> tuple[float, float]:
    """Weighted mean and standard deviation of the target; a constant one has scale one.

    Raises:
        InputError: Differences of the values overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(np.average(y, weights=weights))
        largest = float(np.abs(y - mean).max())
    if not (np.isfinite(mean) and np.isfinite(largest)):
        raise InputError("fit: values are too large: their differences overflow; rescale the data")
    if largest <= _SMALLEST_SCALE * abs(mean) or largest == 0:
        return mean, 1.0
    return mean, largest * float(np.sqrt(np.average(((y - mean) / largest) ** 2, weights=weights)))
