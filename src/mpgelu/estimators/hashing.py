"""Random numbers as a function of the row number, independent of the order and the parts in which rows are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniform(numbers: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each row number, by the mixing function of SplitMix64 (Steele et al., 2014).

    Args:
        numbers: Numbers of rows, of any shape.
        seed: Seed; different seeds give independent numbers.

    Returns:
        Multiples of 2**-53, uniformly distributed, in the shape of ``numbers``.
    """
    start = np.uint64(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    with np.errstate(over="ignore"):
        z = start + numbers.astype(np.uint64) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
        z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
