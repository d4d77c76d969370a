"""Ranks of conformal intervals, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mpgelu import InputError
from mpgelu.estimators import conformal


@pytest.mark.parametrize(("level", "fewest"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99), (0.8, 4)])
def test_the_rows_that_a_level_needs(level: float, fewest: int) -> None:
    """With n rows the largest score covers n of n + 1 places, so that n / (n + 1) is the largest level."""
    scores = np.arange(1.0, fewest + 1)
    assert conformal.quantile(scores, level) == fewest
    if fewest > 1:
        with pytest.raises(InputError, match=f"level {level:g} needs at least {fewest} calibration rows, there are"):
            conformal.quantile(scores[:-1], level)


def test_scores_are_sorted_distances_in_standard_deviations() -> None:
    y, mean, std = np.array([3.0, -4.0, 1.0]), np.array([1.0, 0.0, 1.0]), np.array([4.0, 2.0, 1.0])
    np.testing.assert_array_equal(conformal.scores(y, mean, std), [0.0, 0.5, 2.0])
