"""Statistics and random samples of rows that arrive in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.estimators.hashing import uniform


@dataclass
class RunningStatistics:
    r"""Number, mean, sum of squared deviations and range of numbers that arrive in parts.

    A part of k numbers with mean m and sum of squared deviations q updates the first n numbers by
    (Chan, Golub and LeVeque, 1983)

    .. math:: \mu \leftarrow \mu + \frac{k}{n + k} (m - \mu), \qquad
        Q \leftarrow Q + q + \frac{n k}{n + k} (m - \mu)^2,

    which does not cancel, unlike the difference of sums of squares.

    Attributes:
        count: Number of values.
        mean: Their mean.
        squares: Sum of their squared deviations from the mean.
        lowest: Smallest value.
        highest: Largest value.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, values: NDArray[np.float64]) -> None:
        """Add a part, ``(k,)``."""
        if not len(values):
            return
        mean, count = float(values.mean()), self.count + len(values)
        shift = mean - self.mean
        self.squares += float(np.square(values - mean).sum()) + shift * shift * self.count * len(values) / count
        self.mean += shift * len(values) / count
        self.count = count
        self.lowest, self.highest = min(self.lowest, float(values.min())), max(self.highest, float(values.max()))

    @property
    def stddev(self) -> float:
        """Standard deviation of all values, with the divisor n."""
        return math.sqrt(self.squares / self.count)


class Reservoir:
    """A uniform random sample of rows without replacement: those with the smallest random keys.

    The key of a row is a hash of its number and the seed. The sample therefore does not depend on the order and the
    parts in which the rows arrive.

    Args:
        most: Largest number of rows in the sample.
        seed: Seed of the keys.
    """

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self._parts: list[pd.DataFrame] = []
        self._keys: list[NDArray[np.float64]] = []
        self._limit, self._held = 1.0, 0

    def add(self, frame: pd.DataFrame, offered: NDArray[np.bool_] | bool = True) -> None:
        """Add rows to those that are sampled.

        Args:
            frame: The rows; the index contains their numbers.
            offered: Whether each row may be sampled.
        """
        keys = uniform(frame.index.to_numpy(), self.seed)
        chosen = (keys < self._limit) & offered
        if chosen.any() or not self._parts:
            self._parts.append(frame[chosen])
            self._keys.append(keys[chosen])
        self._held += int(chosen.sum())
        if self._held > 2 * self.most:
            self._reduce()

    def frame(self) -> pd.DataFrame:
        """Return the sample in the order of the row numbers."""
        self._reduce()
        return self._parts[0].sort_index()

    def _reduce(self) -> None:
        """Discard all rows but those with the smallest keys."""
        keys, frame = np.concatenate(self._keys), pd.concat(self._parts)
        if len(keys) > self.most:
            self._limit = float(np.partition(keys, self.most)[self.most])
            frame, keys = frame[keys < self._limit], keys[keys < self._limit]
        self._parts, self._keys, self._held = [frame], [keys], len(keys)
