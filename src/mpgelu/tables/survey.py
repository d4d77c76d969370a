"""One pass over a table that does not fit into memory: what each column is, the target's scale, and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.errors import DataError
from mpgelu.estimators.hashing import uniform
from mpgelu.tables.cells import LARGEST, CellError, Cells
from mpgelu.tables.encoder import (
    FEWEST_OF_KIND,
    HARDLY_TWICE,
    Categorical,
    Missing,
    Numeric,
    TableEncoder,
    are_dates,
    refuse_missing,
)

_MOST_TEXTS = 100_000  # that are counted at the same time; beyond, those that were seen once are forgotten
_MOST_EXAMPLES = 200  # words that a column of numbers may turn out to hold
_FEWEST_COUNTED = 100  # rows from which on whole numbers that are all different are hardly chance


@dataclass
class Moments:
    """Number, mean, sum of squared deviations and range of numbers that come in parts (Chan et al., 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, values: NDArray[np.float64]) -> None:
        """Take note of a part."""
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
        """Standard deviation of all."""
        return math.sqrt(self.squares / self.count)


class Reservoir:
    """A uniform random sample of rows: those whose random numbers are smallest.

    Which rows it holds depends on their numbers and the seed alone, not on the order and the parts in which they come.

    Args:
        most: Rows to keep.
        seed: Of the random numbers.
    """

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self._parts: list[pd.DataFrame] = []
        self._keys: list[NDArray[np.float64]] = []
        self._limit, self._held = 1.0, 0

    def add(self, frame: pd.DataFrame, offered: NDArray[np.bool_] | bool = True) -> None:
        """Offer rows, all or some; the index has their numbers."""
        keys = uniform(frame.index.to_numpy(), self.seed)
        chosen = (keys < self._limit) & offered
        if chosen.any() or not self._parts:
            self._parts.append(frame[chosen])
            self._keys.append(keys[chosen])
        self._held += int(chosen.sum())
        if self._held > 2 * self.most:
            self._reduce()

    def frame(self) -> pd.DataFrame:
        """The rows in the order of their numbers."""
        self._reduce()
        return self._parts[0].sort_index()

    def _reduce(self) -> None:
        keys, frame = np.concatenate(self._keys), pd.concat(self._parts)
        if len(keys) > self.most:
            self._limit = float(np.partition(keys, self.most)[self.most])
            frame, keys = frame[keys < self._limit], keys[keys < self._limit]
        self._parts, self._keys, self._held = [frame], [keys], len(keys)


@dataclass
class ColumnSurvey:
    """What is known of a column after the parts seen so far.

    Args:
        name: Name of the column.
        is_categorical: Whether it was said to hold names.
    """

    name: str
    is_categorical: bool = False
    rows: int = 0
    missing: int = 0
    words: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    whole: bool = True
    dates: bool = True
    first: str | None = None
    constant: bool = True
    texts: Counter[str] = field(default_factory=Counter)
    forgotten: bool = False
    examples: dict[str, int] = field(default_factory=dict)
    numeric_digest: Any = field(default_factory=blake2b)
    text_digest: Any = field(default_factory=blake2b)

    def add(self, cells: Cells) -> None:
        """Take note of a part.

        Raises:
            CellError: A number is infinite or too large.
        """
        is_number = pd.api.types.is_numeric_dtype(cells.text) and not self.is_categorical
        present = ~cells.missing
        self.rows, self.missing = self.rows + len(present), self.missing + int(cells.missing.sum())
        self.numeric_digest.update(cells.values.tobytes())
        self._add_numbers((cells.numbers() if is_number else cells.values)[present])
        if not is_number:
            self._add_texts(cells, present)
        elif self.first is None and present.any():
            self.first = str(cells.text.iloc[int(np.argmax(present))])

    def _add_numbers(self, numbers: NDArray[np.float64]) -> None:
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            return
        self.lowest, self.highest = min(self.lowest, float(numbers.min())), max(self.highest, float(numbers.max()))
        self.whole = self.whole and bool((np.floor(numbers) == numbers).all())
        self.dates = self.dates and are_dates(numbers)

    def _add_texts(self, cells: Cells, present: NDArray[np.bool_]) -> None:
        texts = cells.categories()
        self.text_digest.update("\0".join(texts).encode() + b"\0")
        for text, count in texts[present].value_counts(sort=False).items():
            self.texts[str(text)] += int(count)
        if len(self.texts) > _MOST_TEXTS:
            self.texts, self.forgotten = Counter({t: n for t, n in self.texts.items() if n > 1}), True
        self.first = self.first if self.first is not None else next(iter(self.texts), None)
        words = np.flatnonzero(cells.words)
        self.words += len(words)
        for at in words if len(self.examples) < _MOST_EXAMPLES else ():
            self.examples.setdefault(str(cells.text.iloc[at]), int(cells.rows[at]))
            if len(self.examples) >= _MOST_EXAMPLES:
                break

    @property
    def as_text(self) -> bool:
        """Whether its cells are names."""
        return self.is_categorical or self.words > 0

    @property
    def content(self) -> bytes:
        """A hash of all cells."""
        digest: bytes = (self.text_digest if self.as_text else self.numeric_digest).digest()
        return digest

    @property
    def useless(self) -> str | None:
        """Why the column says nothing, if so."""
        if self.missing == self.rows:
            return "is empty"
        same = len(self.texts) == 1 and not self.forgotten if self.texts else self.lowest == self.highest
        return f"is {self.first!r} in every row" if same and not self.missing else None

    def column(self, sample: Cells) -> Numeric | Categorical:
        """What the column is.

        Args:
            sample: Cells of some rows, for the median.

        Raises:
            CellError: As :meth:`TableEncoder.learn`.
        """
        if self.as_text:
            if not self.is_categorical:
                self._check_readable()
            return Categorical.counted(self.name, dict(self.texts.most_common()), self.missing)
        if max(abs(self.lowest), abs(self.highest)) > LARGEST:
            raise CellError("holds a number that is infinite or too large; put finite numbers there", self.name)
        if self.dates:
            raise sample.date_error(f"{self.lowest:.0f}")
        numbers = sample.values[~sample.missing]
        median = float(np.median(numbers)) if len(numbers) else self.lowest
        span = self.highest - self.lowest
        counts = self.whole and _FEWEST_COUNTED <= self.rows - 1 <= span < 2 * self.rows
        is_number_of_row = counts and len(np.unique(numbers)) == len(numbers)
        return Numeric(
            self.name, median, self.missing >= FEWEST_OF_KIND, self.lowest, self.highest, bool(is_number_of_row)
        )

    def _check_readable(self) -> None:
        """Refuse words that were probably not meant as categories, by examples and by how many there are."""
        text = pd.Series(list(self.examples), dtype="str")
        rows, gaps = np.array(list(self.examples.values())), np.zeros(len(text), dtype=bool)
        words = Cells(self.name, rows, text, np.full(len(text), np.nan), gaps)
        words.check_readable()
        if 2 * self.words < self.rows - self.missing:
            raise words.among_numbers()


class Survey:
    """What one pass over the rows finds out about the columns beside the target.

    Args:
        names: Columns beside the target.
        missing: As in :class:`TableEncoder`.
        categorical: As in :meth:`TableEncoder.learn`.
        drop: As in :meth:`TableEncoder.learn`.
    """

    def __init__(
        self, names: Collection[str], *, missing: Missing, categorical: Collection[str], drop: Collection[str]
    ) -> None:
        self.missing = missing
        self.dropped = {name: "as asked" for name in names if name in drop}
        self.columns = [ColumnSurvey(name, name in categorical) for name in names if name not in drop]

    def add(self, frame: pd.DataFrame) -> None:
        """Take note of rows.

        Raises:
            CellError: A cell cannot be learned from.
        """
        for column in self.columns:
            cells = Cells.of(frame[column.name])
            if self.missing == "error":
                refuse_missing(cells)
            column.add(cells)

    def encoder(self, sample: pd.DataFrame) -> TableEncoder:
        """What :meth:`TableEncoder.learn` would have found for all rows, but for medians, which are of the sample.

        Raises:
            CellError: As there.
        """
        columns: list[Numeric | Categorical] = []
        dropped: dict[str, str] = dict(self.dropped)
        seen: dict[bytes, str] = {}
        for found in self.columns:
            reason = found.useless
            if reason is None and (first := seen.setdefault(found.content, found.name)) != found.name:
                reason = f"is a copy of {first!r}"
            if reason is None:
                column = found.column(Cells.of(sample[found.name]))
                if isinstance(column, Categorical) and not column.categories:
                    reason = HARDLY_TWICE
                else:
                    columns.append(column)
            if reason is not None:
                dropped[found.name] = reason
        return TableEncoder(tuple(columns), dropped, self.missing)


def check_encoder(encoder: TableEncoder, target: str) -> None:
    """Raise a DataError if no column is left to predict from."""
    if not encoder.columns and not encoder.dropped:
        raise DataError(f"no column beside the target {target!r}; a model needs something to predict from")
    if not encoder.columns:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in encoder.dropped.items())
        raise DataError(f"no column is left to predict from: {reasons}")
