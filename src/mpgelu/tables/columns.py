"""The encoding of one column of a table as features: numeric or categorical."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.tables.cells import Cells

Matrix = NDArray[np.float64]

_MOST_CATEGORIES = 50
_MOST_REMEMBERED = 10_000  # categories that are stored, to distinguish new categories from rare ones
COUNTED_ROWS = 100  # smallest number of rows for which distinct integers suggest row numbers
FEWEST_OF_KIND = 3  # cells of a category, or missing cells, that a feature of its own requires


@dataclass
class Encoded:
    """A table as a matrix of features.

    Attributes:
        X: Features, ``(rows, n)``.
        unseen: Number of cells of each column whose category did not occur in training; encoded as "other".
        filled: Number of missing cells of each column that had none in training; they are imputed too.
        far: Number of values of each column that are far outside the range of training.
    """

    X: Matrix
    unseen: Counter[str] = field(default_factory=Counter)
    filled: Counter[str] = field(default_factory=Counter)
    far: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Numeric:
    """A numeric column: missing values are replaced by the median, with an indicator feature if training had some.

    Args:
        name: Name of the column.
        median: Median of the training values.
        indicator: Whether a feature indicates missing cells.
        lowest: Smallest training value.
        highest: Largest training value.
        counts: Whether the values could be row numbers.
    """

    name: str
    median: float
    indicator: bool
    lowest: float = -math.inf
    highest: float = math.inf
    counts: bool = False

    @property
    def features(self) -> list[str]:
        """Names of the features of this column."""
        return [self.name, *[f"{self.name} missing"] * self.indicator]

    @property
    def summary(self) -> str:
        """Description of the encoding that is printed for the user."""
        hint = "; whole and never the same: a number of the row? then drop it"
        return "number" + ", some missing" * self.indicator + hint * self.counts

    def encode(self, cells: Cells, encoded: Encoded) -> Matrix:
        """Return the features, ``(rows, 1)`` or ``(rows, 2)``, and count unusual cells in ``encoded``."""
        values = np.where(cells.missing, self.median, cells.numbers())
        span = self.highest - self.lowest
        _note(encoded.far, self.name, (values < self.lowest - span) | (values > self.highest + span))
        if not self.indicator:
            _note(encoded.filled, self.name, cells.missing)
        return np.column_stack([values, cells.missing]) if self.indicator else values[:, None]


@dataclass(frozen=True)
class Categorical:
    """A categorical column: one feature for each frequent category, one for all others, one for missing cells.

    Args:
        name: Name of the column.
        categories: Categories with a feature of their own, by descending frequency.
        other: Whether training had further categories.
        indicator: Whether training had missing cells.
        rare: The further categories, unless there were too many to store.
    """

    name: str
    categories: tuple[str, ...]
    other: bool
    indicator: bool
    rare: tuple[str, ...] | None = None

    @classmethod
    def counted(cls, name: str, counts: Mapping[str, int], missing: int, forgotten: bool) -> Categorical:
        """Return the encoding of a column from the number of cells of each category.

        Args:
            name: Name of the column.
            counts: Number of cells of each category, in descending order.
            missing: Number of missing cells.
            forgotten: Whether there were further categories, which occurred once.
        """
        names, frequent = tuple(counts), sum(count >= FEWEST_OF_KIND for count in counts.values())
        frequent = min(frequent, _MOST_CATEGORIES)
        rare = names[frequent:] if len(names) <= _MOST_REMEMBERED and not forgotten else None
        return cls(name, names[:frequent], frequent < len(names) or forgotten, missing >= FEWEST_OF_KIND, rare)

    @property
    def features(self) -> list[str]:
        """Names of the features of this column."""
        names = [f"{self.name} = {category}" for category in self.categories]
        return names + [f"{self.name} other"] * self.other + [f"{self.name} missing"] * self.indicator

    @property
    def summary(self) -> str:
        """Description of the encoding that is printed for the user."""
        count = len(self.categories)
        others = " and others" * self.other + ", some missing" * self.indicator
        return f"{count} {'category' if count == 1 else 'categories'}{others}"

    def encode(self, cells: Cells, encoded: Encoded) -> Matrix:
        """Return one-hot features, ``(rows, n)``, and count unusual cells in ``encoded``.

        A category without a feature of its own sets that of all other categories, if training had such; otherwise all
        features of the row are 0.
        """
        names = pd.Index(cells.categories())
        codes = pd.Index(self.categories).get_indexer(names)
        is_other = (codes < 0) & ~cells.missing
        one_hot = np.zeros((len(codes), len(self.features)))
        (known,) = np.nonzero(codes >= 0)
        one_hot[known, codes[known]] = 1
        if self.other:
            one_hot[is_other, len(self.categories)] = 1
        if self.rare is not None:
            _note(encoded.unseen, self.name, is_other & ~names.isin(self.rare))
        if self.indicator:
            one_hot[cells.missing, -1] = 1
        else:
            _note(encoded.filled, self.name, cells.missing)
        return one_hot


def _note(counts: Counter[str], name: str, cells: NDArray[np.bool_]) -> None:
    """Count the given cells of a column, if there are any."""
    if count := int(cells.sum()):
        counts[name] += count


def are_dates(numbers: Matrix) -> bool:
    """Return whether all numbers are dates such as 20240131."""
    if numbers.min() < 19000101 or numbers.max() > 21001231:
        return False
    dates = pd.to_datetime(pd.Series(numbers).astype("int64").astype("str"), format="%Y%m%d", errors="coerce")
    return bool((numbers % 1 == 0).all() and dates.notna().all())
