"""Predictions of a fitted estimator: rows in parts, and what is said of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PredictedParts(NamedTuple):
    """Mean and the two parts of the standard deviation of each row, in the unit of the target, each ``(rows,)``.

    The parts add as variances: ``stddev**2 == epistemic_std**2 + aleatoric_std**2``.

    Attributes:
        mean: Mean of the target.
        epistemic_std: Standard deviation from not knowing the function; more rows of this kind would reduce it.
        aleatoric_std: Standard deviation of the noise; more rows would not.
    """

    mean: NDArray[np.float64]
    epistemic_std: NDArray[np.float64]
    aleatoric_std: NDArray[np.float64]


def spans_of(count: int, size: int) -> list[slice]:
    """``count`` rows, ``size`` at a time."""
    return [slice(start, start + size) for start in range(0, count, size)]


def inputs_of(
    values: NDArray[np.float64], errors: NDArray[np.float64] | None, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Features of some rows and their errors, as an ensemble takes them."""
    return torch.tensor(values[rows], dtype=torch.float64), None if errors is None else torch.tensor(errors[rows])
