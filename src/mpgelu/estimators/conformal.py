"""Split conformal prediction, normalised: intervals with guaranteed coverage around any prediction with a spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpgelu.errors import InputError

Array = NDArray[np.float64]


def scores(y: Array, mean: Array, std: Array) -> Array:
    r"""Sorted conformity scores :math:`|y - \mu| / \sigma` of calibration rows."""
    return np.sort(np.abs(y - mean) / std)


def quantile(scores: Array, level: float) -> float:
    r"""Multiple of the standard deviation for coverage of at least ``level``.

    It is score number :math:`\lceil (n + 1) p \rceil`. Among n + 1 exchangeable scores the rank of a new one is
    uniform, so it is at most that score with probability at least p (Lei et al., 2018).

    Args:
        scores: Sorted scores of n calibration rows.
        level: p.

    Raises:
        InputError: There are too few rows for this level.
    """
    rank = int(np.ceil((len(scores) + 1) * level - 1e-9))
    if rank > len(scores):
        needed = int(np.ceil(level / (1 - level) - 1e-9))
        raise InputError(
            f"an interval of level {level:g} needs at least {needed} calibration rows, there are {len(scores)}; "
            "calibrate with more rows or ask for a lower level"
        )
    return float(scores[rank - 1])
