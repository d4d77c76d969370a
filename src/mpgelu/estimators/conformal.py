r"""Normalised split conformal prediction: intervals with guaranteed coverage for any predicted mean and deviation.

The interval :math:`\mu(x) \pm q\, \sigma(x)` contains a new target with probability at least p if the n calibration
rows and the new row are exchangeable. The guarantee is marginal, not conditional on x.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpgelu.errors import InputError

Array = NDArray[np.float64]


def scores(y: Array, mean: Array, std: Array) -> Array:
    r"""Return the sorted conformity scores :math:`|y - \mu| / \sigma` of n calibration rows.

    Args:
        y: Observed targets, ``(n,)``.
        mean: Predicted means, ``(n,)``.
        std: Predicted standard deviations, ``(n,)``.
    """
    return np.sort(np.abs(y - mean) / std)


def quantile(scores: Array, level: float) -> float:
    r"""Return the multiple q of the standard deviation for a coverage of at least ``level``.

    It is the score of rank :math:`\lceil (n + 1) p \rceil`. The rank of a new score among n + 1 exchangeable ones is
    uniform, so the new score is at most q with probability at least p (Lei et al., 2018).

    Args:
        scores: Sorted scores of the calibration rows, ``(n,)``.
        level: Coverage p, strictly between 0 and 1.

    Raises:
        InputError: The level exceeds :math:`n / (n + 1)`, the largest for n rows.

    Example:
        >>> quantile(np.linspace(0.1, 1.9, 19), 0.9)  # rank 18 of 19
        1.8
    """
    rank = int(np.ceil((len(scores) + 1) * level - 1e-9))
    if rank > len(scores):
        needed = int(np.ceil(level / (1 - level) - 1e-9))
        raise InputError(
            f"an interval of level {level:g} needs at least {needed} calibration rows, there are {len(scores)}; "
            "calibrate with more rows or ask for a lower level"
        )
    return float(scores[rank - 1])
