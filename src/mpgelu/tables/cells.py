"""The cells of one column, as text, as numbers, or as missing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.errors import DataError

Missing = Literal["impute", "error"]  # treatment of missing cells: fill them, or refuse the table

MISSING = frozenset(
    ["", "?", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NaN", "nan", "-nan", "NULL", "null", "None", "NaT"]
)
LARGEST = 1e150  # squares of larger numbers overflow float64
_DATE = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}([ T]\d.*)?|\d{4}/\d{1,2}/\d{1,2}( \d.*)?|\d{1,2}([/.-])\d{1,2}\3\d{2,4}( \d.*)?"
    r"|\d{1,2}[ -][A-Za-z]{3,9}\.?[ -]\d{2,4}|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)
_COMMA_NUMBER = re.compile(r"[-+]?\d+(,\d+)+(\.\d+)?|[-+]?\d+(\.\d{3})+,\d+")
_SIGNED_NUMBER = re.compile(r"[-+]?[$€£¥] ?\d[\d,]*(\.\d+)?|[-+]?\d[\d,]*(\.\d+)? ?[%$€£¥]")
_COMMA = "has a comma; write decimals with a point, and thousands without a separator"
_SIGN = "is a number with a sign of its unit; write the number alone"
_EXAMPLES = 200


class CellError(DataError):
    """An error in a column or in one of its cells; the reader of the file adds the file and the line.

    Args:
        problem: What is wrong, and how to fix it.
        column: Name of the column.
        row: Number of the row from 0, if the error is in one cell.
    """

    def __init__(self, problem: str, column: str, row: int | None = None) -> None:
        at = "" if row is None else f", row {row + 1}"
        super().__init__(f"column {column!r}{at}: {problem}")
        self.problem, self.column, self.row = problem, column, row


@dataclass(frozen=True, eq=False)
class Cells:
    """One column, both as text and as numbers.

    Args:
        name: Name of the column.
        rows: Number of each row in its file, from 0.
        text: Content of the cells without surrounding blanks; empty where a numeric column has no value.
        values: Values as numbers; NaN where a cell is missing or not a number.
        missing: Whether each cell is missing.
    """

    name: str
    rows: NDArray[np.int64]
    text: pd.Series[Any]
    values: NDArray[np.float64]
    missing: NDArray[np.bool_]

    @staticmethod
    def of(column: pd.Series[Any]) -> Cells:
        """Return the cells of a column of any dtype.

        Args:
            column: The column; an integer index contains the numbers of the rows in the file.

        Raises:
            CellError: The column contains neither numbers nor text.
        """
        name, rows = str(column.name), np.arange(len(column))
        if pd.api.types.is_integer_dtype(column.index):
            rows = column.index.to_numpy(dtype=np.int64)
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            values = column.to_numpy(dtype=np.float64, na_value=np.nan)
            return Cells(name, rows, column, values, np.isnan(values))
        if column.dtype != "str":
            try:
                column = column.astype(object).where(column.notna(), "").astype("str")
            except (UnicodeDecodeError, NotImplementedError) as error:
                problem = f"holds {column.dtype}, not numbers or text; convert it, or leave it out with `drop` {name!r}"
                raise CellError(problem, name) from error
        text = column.fillna("").str.strip()
        values = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        return Cells(name, rows, text, values, text.isin(MISSING).to_numpy(dtype=bool))

    @property
    def words(self) -> NDArray[np.bool_]:
        """Whether each cell has content that is not a number, ``(rows,)``."""
        return np.isnan(self.values) & ~self.missing

    def numbers(self) -> NDArray[np.float64]:
        """Return the values, NaN where missing.

        Raises:
            CellError: A cell is a word, or a number too large to compute with.
        """
        if self.words.any():
            raise self.error(self.words, _why_no_number(str(self.text[self.words].iloc[0])))
        if (large := np.abs(self.values) > LARGEST).any():
            raise self.error(large, "is infinite or too large; put a finite number there, or leave out the row")
        return self.values

    def complete(self) -> NDArray[np.float64]:
        """Return the values of a column without missing cells.

        Raises:
            CellError: As in :meth:`numbers`, or a cell is missing.
        """
        numbers = self.numbers()
        self.check_complete("leave out the row")
        return numbers

    def check_complete(self, remedy: str) -> None:
        """Raise a :class:`CellError` that offers a remedy if a cell is missing."""
        if self.missing.any():
            row = int(self.rows[np.argmax(self.missing)])
            raise CellError(f"missing value; fill it in, or {remedy}", self.name, row)

    def targets(self) -> NDArray[np.float64]:
        """Return the values of a target column, NaN where missing.

        Raises:
            CellError: As in :meth:`numbers`; or the whole column consists of words.
        """
        words = self.text[self.words]
        if len(words) and 2 * len(words) >= np.sum(~self.missing):
            examples = words.drop_duplicates().head(_EXAMPLES)
            if not _mostly(examples, _COMMA_NUMBER) and not _mostly(examples, _SIGNED_NUMBER):
                kind = "dates or times" if _mostly(examples, _DATE) else "text"
                raise CellError(
                    f"holds {kind} such as {str(words.iloc[0])!r}; this is regression, which predicts a number: choose "
                    "another target, or write this one as numbers (yes and no as 1 and 0, a date as days)",
                    self.name,
                )
        return self.numbers()

    def categories(self) -> pd.Series[Any]:
        """Return the cells as text, empty where missing."""
        text = self.text if self.text.dtype == "str" else self.text.astype(object).astype("str")
        return text.where(~self.missing, "")

    def error(self, wrong: NDArray[np.bool_], problem: str) -> CellError:
        """Return the error for the first invalid cell.

        Args:
            wrong: Whether each cell is invalid, ``(rows,)``; at least one is.
            problem: What is wrong with it, as the predicate of a sentence whose subject is the cell.
        """
        first = int(np.argmax(wrong))
        return CellError(f"{str(self.text.iloc[first])!r} {problem}", self.name, int(self.rows[first]))

    def date_error(self, example: str) -> CellError:
        """Return the error for a column of dates, with one of them as an example."""
        return CellError(
            f"holds dates or times such as {example!r}; turn them into numbers first (year, month, "
            f"weekday, days since a start), or leave the column out with `drop` {self.name!r}",
            self.name,
        )

    def check_readable(self) -> None:
        """Check that a column of words was probably meant as categories.

        Raises:
            CellError: The words are dates, or numbers with commas or signs.
        """
        words = self.text[self.words]
        examples = words.drop_duplicates().head(_EXAMPLES)
        if _mostly(examples, _DATE):
            raise self.date_error(str(words.iloc[0]))
        if _mostly(examples, _COMMA_NUMBER):
            raise self.error(self.words, _COMMA)
        if _mostly(examples, _SIGNED_NUMBER):
            names = f", or give `categorical` {self.name!r} if these are names"
            raise self.error(self.words, _SIGN + names)

    def among_numbers(self) -> CellError:
        """Return the error for a word in a column of numbers."""
        return self.error(
            self.words,
            "is not a number, as most of this column are; "
            f"correct the cell, or give `categorical` {self.name!r} if these are names",
        )


def _why_no_number(text: str) -> str:
    """Return the reason why a text is not read as a number."""
    if _COMMA_NUMBER.fullmatch(text):
        return _COMMA
    return _SIGN if _SIGNED_NUMBER.fullmatch(text) else "is not a number"


def _mostly(examples: pd.Series[Any], pattern: re.Pattern[str]) -> bool:
    """Return whether more than 80 % of the examples match a pattern."""
    matches = sum(pattern.fullmatch(str(example)) is not None for example in examples)
    return matches > 0.8 * len(examples)
