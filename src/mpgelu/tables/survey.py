"""The encoding of columns from statistics of their cells, which are read once, as a whole or in parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.errors import InputError
from mpgelu.tables.cells import LARGEST, CellError, Cells, Missing
from mpgelu.tables.columns import COUNTED_ROWS, FEWEST_OF_KIND, Categorical, Numeric, are_dates

_MOST_TEXTS = 100_000  # distinct texts that are counted; beyond this number, texts that occurred once are discarded
_MOST_EXAMPLES = 200  # distinct words of a column that are kept for error messages
REMEDY = "fit with `missing` impute"  # for missing cells that are refused
_HARDLY_TWICE = "hardly a text in it occurs twice, as in a column of names or numbers of the rows"


@dataclass
class ColumnSurvey:
    """Statistics of one column over the parts read so far.

    Args:
        name: Name of the column.
        is_categorical: Whether the user declared it categorical.

    Attributes:
        rows: Number of cells.
        missing: Number of missing cells.
        words: Number of cells with content that is not a number.
        lowest: Smallest number.
        highest: Largest number.
        whole: Whether all numbers are integers.
        dates: Whether all numbers could be dates such as 20240131.
        first: Text of the first cell that is not missing.
        texts: Number of cells of each text.
        forgotten: Whether texts that occurred once have been discarded, to bound memory.
        examples: Some words with the numbers of their rows, for error messages.
        numeric_digest: Hash of all numbers.
        text_digest: Hash of all texts.
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
    texts: Counter[str] = field(default_factory=Counter)
    forgotten: bool = False
    examples: dict[str, int] = field(default_factory=dict)
    numeric_digest: Any = field(default_factory=blake2b)
    text_digest: Any = field(default_factory=blake2b)

    def add(self, cells: Cells) -> None:
        """Add the cells of a part.

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
        """Update range and type of the numbers; NaN are ignored."""
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            return
        self.lowest, self.highest = min(self.lowest, float(numbers.min())), max(self.highest, float(numbers.max()))
        self.whole = self.whole and bool((np.floor(numbers) == numbers).all())
        self.dates = self.dates and are_dates(numbers)

    def _add_texts(self, cells: Cells, present: NDArray[np.bool_]) -> None:
        """Update the counts of the texts of cells that are present, and the examples of words."""
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
        """Whether the column is categorical."""
        return self.is_categorical or self.words > 0

    @property
    def content(self) -> bytes:
        """Hash of all cells, by which copies of a column are recognised."""
        digest: bytes = (self.text_digest if self.as_text else self.numeric_digest).digest()
        return digest

    @property
    def useless(self) -> str | None:
        """Reason why the column carries no information, or ``None``."""
        if self.missing == self.rows:
            return "is empty"
        same = len(self.texts) == 1 and not self.forgotten if self.texts else self.lowest == self.highest
        return f"is {self.first!r} in every row" if same and not self.missing else None

    def column(self, sample: Cells) -> Numeric | Categorical:
        """Return the encoding of the column.

        Args:
            sample: Cells of a sample of the rows, from which the median is estimated; everything else is exact.

        Raises:
            CellError: The column consists of dates, has words among its numbers, or a number that is too large.
        """
        if self.as_text:
            if not self.is_categorical:
                self._check_readable()
            return Categorical.counted(self.name, dict(self.texts.most_common()), self.missing, self.forgotten)
        numbers = sample.numbers()[~sample.missing]  # which raises for a number that is too large, and names its row
        if max(abs(self.lowest), abs(self.highest)) > LARGEST:
            raise CellError("holds a number that is infinite or too large; put finite numbers there", self.name)
        if self.dates:
            raise sample.date_error(f"{numbers[0] if len(numbers) else self.lowest:.0f}")
        median = float(np.median(numbers)) if len(numbers) else self.lowest
        present, span = self.rows - self.missing, self.highest - self.lowest
        counts = self.whole and present >= COUNTED_ROWS and present - 1 <= span < 2 * present
        is_number_of_row = bool(counts and len(np.unique(numbers)) == len(numbers))
        indicator = self.missing >= FEWEST_OF_KIND
        return Numeric(self.name, median, indicator, self.lowest, self.highest, is_number_of_row)

    def _check_readable(self) -> None:
        """Raise a :class:`CellError` if the words are probably not meant as categories; see :class:`Cells`."""
        text = pd.Series(list(self.examples), dtype="str")
        rows, gaps = np.array(list(self.examples.values())), np.zeros(len(text), dtype=bool)
        words = Cells(self.name, rows, text, np.full(len(text), np.nan), gaps)
        words.check_readable()
        if 2 * self.words < self.rows - self.missing:
            raise words.among_numbers()


class Survey:
    """Statistics of all columns but the target, from which the encoding is determined after one pass over the rows.

    Args:
        names: Names of the columns without the target.
        missing: As in :class:`TableEncoder`.
        categorical: As in :meth:`TableEncoder.learn`.
        drop: As in :meth:`TableEncoder.learn`.

    Raises:
        InputError: ``missing`` is neither ``"impute"`` nor ``"error"``.
    """

    def __init__(
        self, names: Collection[str], *, missing: Missing, categorical: Collection[str], drop: Collection[str]
    ) -> None:
        if missing not in get_args(Missing):
            raise InputError(f"`missing`: must be 'impute' or 'error', got {missing!r}")
        self.names, self.missing = names, missing
        self.dropped = {name: "as asked" for name in names if name in drop}
        self.columns = [ColumnSurvey(name, name in categorical) for name in names if name not in drop]

    def add(self, frame: pd.DataFrame) -> None:
        """Add a part of the table.

        Raises:
            CellError: A cell is invalid, or missing although missing cells are refused.
        """
        for column in self.columns:
            cells = Cells.of(frame[column.name])
            if self.missing == "error":
                cells.check_complete(REMEDY)
            column.add(cells)

    def encodings(self, sample: pd.DataFrame) -> tuple[tuple[Numeric | Categorical, ...], dict[str, str]]:
        """Return the encodings of the used columns, and the reasons why others are not used.

        Args:
            sample: A sample of the rows, or all of them; medians are those of the sample.

        Raises:
            CellError: As in :meth:`TableEncoder.learn`.
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
                    reason = _HARDLY_TWICE
                else:
                    columns.append(column)
            if reason is not None:
                dropped[found.name] = reason
        return tuple(columns), {name: dropped[name] for name in self.names if name in dropped}
