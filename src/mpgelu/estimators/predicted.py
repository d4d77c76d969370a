"""Predictions of a fitted estimator taken apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
