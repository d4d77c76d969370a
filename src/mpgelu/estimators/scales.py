"""Scales of features and targets, estimated from the training data."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mpgelu.errors import InputError
from mpgelu.networks import FeatureScale

Array = NDArray[np.float64]

LIMIT = 10.0  # smooth limit of scaled features
_REACH = 0.5  # standard deviation that a logarithmic unit of distance from the data adds, in scales of the target
_LARGEST_TARGET = 1e150  # variances are squares of the unit of the target
_SMALLEST_SCALE = 1e-12  # variation relative to the centre below which a feature counts as constant
_OF_QUARTILES = 1.349  # interquartile range of a standard normal distribution


def robust_scale(X: Array) -> FeatureScale:
    r"""Return the robust scaling of each feature, by its median and a robust standard deviation.

    .. math:: z = \frac{x - \operatorname{median}}{s}, \qquad
        s = \max\Big(\frac{\mathrm{IQR}}{1.349},\ \sigma\Big), \qquad
        \text{output} = \frac{z}{\sqrt{1 + (z / 10)^2}}

    The standard deviation :math:`\sigma` is taken of values clipped at ten times :math:`\mathrm{IQR} / 1.349`, so that
    a single outlier widens the scale of r rows by a factor of at most about :math:`\sqrt{1 + 100 / r}`. If the
    quartiles are equal, as in a column that is mostly zero, s is the median absolute deviation of the values that
    differ from the median, because these carry the information.

    Args:
        X: Features, ``(rows, n)``.

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
    unit = np.where(constant, 1.0, largest)  # in this unit squares neither overflow nor underflow
    spread = (quartiles[1] - quartiles[0]) / _OF_QUARTILES
    typical = np.where(spread > 0, 10 * spread, np.inf)
    inside = np.clip(distance, -typical, typical) / unit
    stddev = unit * np.sqrt((inside**2).mean(axis=0))
    scale = np.where(spread > 0, np.maximum(spread, stddev), _typical_distance(distance))
    scale = np.where(constant, 1.0, scale)
    scaled = distance / scale
    numbers = (torch.as_tensor(part, device="cpu") for part in (center, scale, scaled.min(axis=0), scaled.max(axis=0)))
    center_, scale_, lower, upper = numbers
    return FeatureScale(center_, scale_, LIMIT, lower, upper, _REACH)


def _typical_distance(distance: Array) -> Array:
    """Return the median of the non-zero absolute values of each column, ``(n,)``; one if all values are zero."""
    found = np.ones(distance.shape[1])
    for column, values in enumerate(np.abs(distance.T)):
        others = values[values > 0]
        found[column] = np.median(others) if len(others) else 1.0
    return found


def target_scales(y: Array, weights: Array) -> tuple[float, float]:
    """Return the weighted mean and standard deviation of the target; the scale of a constant target is one.

    Args:
        y: Targets, ``(rows,)``.
        weights: Weights of the rows, ``(rows,)``.

    Raises:
        InputError: Squares of the values or of their differences overflow or underflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(np.average(y, weights=weights))
        largest = float(np.abs(y - mean).max())
    check_target_unit(mean, largest)
    if largest <= _SMALLEST_SCALE * abs(mean) or largest == 0:
        return mean, 1.0
    return mean, largest * float(np.sqrt(np.average(((y - mean) / largest) ** 2, weights=weights)))


def check_target_unit(mean: float, spread: float) -> None:
    """Raise if the variance of targets is too large or too small for a float64 number.

    Args:
        mean: Mean of the targets.
        spread: Their standard deviation, or largest distance from the mean.

    Raises:
        InputError: The squares of the targets overflow or underflow.
    """
    if not max(abs(mean), spread) < _LARGEST_TARGET:  # NaN is not, either
        raise InputError("fit: targets are too large: their squares overflow; give y in another unit")
    if 0 < spread < 1 / _LARGEST_TARGET:
        raise InputError("fit: targets are too close to zero: their squares underflow; give y in another unit")
