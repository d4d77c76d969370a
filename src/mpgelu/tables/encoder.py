"""The encoding of table columns as features, learned from the training table and applied to any later one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import pandas as pd

from mpgelu.errors import DataError, InputError, closest
from mpgelu.storage.schema import Optional, checked
from mpgelu.tables.cells import Cells, Missing
from mpgelu.tables.columns import Categorical, Encoded, Numeric
from mpgelu.tables.survey import REMEDY, Survey


@dataclass(frozen=True)
class TableEncoder:
    """The encoding of all columns of a table.

    Args:
        columns: Encodings of the used columns, in the order of their features.
        dropped: Names of the unused columns of the training table, each with the reason.
        missing: ``"impute"`` fills missing cells, ``"error"`` refuses them.

    Example:
        >>> table = pd.DataFrame({"size": [1, 2, 3, None, 5, 6], "kind": ["a", "b"] * 3, "unit": ["m"] * 6})
        >>> encoder = TableEncoder.learn(table)
        >>> encoder.features
        ['size', 'kind = a', 'kind = b']
        >>> encoder.dropped
        {'unit': "is 'm' in every row"}
        >>> encoder.encode(pd.DataFrame({"kind": ["b", "c"], "size": [7.0, None]})).X
        array([[7., 0., 1.],
               [3., 0., 0.]])
    """

    columns: tuple[Numeric | Categorical, ...]
    dropped: Mapping[str, str]
    missing: Missing = "impute"

    @classmethod
    def learn(
        cls,
        frame: pd.DataFrame,
        *,
        missing: Missing = "impute",
        categorical: Iterable[str] = (),
        drop: Iterable[str] = (),
    ) -> Self:
        """Determine the encoding of each column of the training table.

        A column is numeric if all its cells are numbers or missing, and categorical otherwise. Constant columns,
        copies of earlier columns, and columns of names that hardly ever repeat are dropped.

        Args:
            frame: The features of the training table.
            missing: ``"impute"`` or ``"error"``; see the class.
            categorical: Columns of numbers or dates that are to be treated as categories.
            drop: Columns to leave out.

        Raises:
            CellError: A column consists of dates, has words among its numbers, or an infinite number.
            InputError: ``missing`` is neither of the two.
        """
        frame = with_plain_names(frame)
        survey = Survey(list(map(str, frame)), missing=missing, categorical=set(categorical), drop=set(drop))
        survey.add(frame)
        return cls(*survey.encodings(frame), missing)

    @property
    def features(self) -> list[str]:
        """Names of the features, one for each column of the matrix."""
        return [feature for column in self.columns for feature in column.features]

    def encode(self, frame: pd.DataFrame) -> Encoded:
        """Return the features of each row. Unused columns are ignored, and the order of columns does not matter.

        Args:
            frame: A table with at least the used columns.

        Raises:
            DataError: A column is missing, or (as a :class:`CellError`) a cell is invalid.
        """
        frame = with_plain_names(frame)
        self.check_columns(list(map(str, frame)))
        encoded = Encoded(np.empty((len(frame), 0)))
        blocks = []
        for column in self.columns:
            cells = Cells.of(frame[column.name])
            if self.missing == "error":
                cells.check_complete(REMEDY)
            blocks.append(column.encode(cells, encoded))
        encoded.X = np.column_stack(blocks)
        return encoded

    def check_columns(self, names: Sequence[str]) -> None:
        """Check that the names include all used columns.

        Raises:
            DataError: Columns are missing; the message names them.
        """
        absent = [column.name for column in self.columns if column.name not in names]
        if absent:
            one = len(absent) == 1
            hint = closest(absent[0], [name for name in names if name not in self.dropped]) if one else ""
            listed = ", ".join(map(repr, absent))
            raise DataError(f"the model needs the column{'s' * (not one)} {listed}, which this table lacks{hint}")

    def described(self) -> dict[str, Any]:
        """Return the encoder as nested dictionaries and lists that JSON can represent."""
        columns = [asdict(column) | {"kind": type(column).__name__.lower()} for column in self.columns]
        return {"columns": columns, "dropped": dict(self.dropped), "missing": self.missing}

    @classmethod
    def from_description(cls, about: Mapping[str, Any]) -> Self:
        """Return the encoder of a description that :meth:`described` has returned.

        Raises:
            DataError: The description is not that of an encoder.
        """
        checked(about, _DESCRIPTION, "the encoder")
        columns: list[Numeric | Categorical] = []
        for described in about["columns"]:
            kind = checked(described.get("kind"), tuple(_COLUMN), "the kind of a column")
            checked(described, _COLUMN[kind], "a column")
            parts = {name: value for name, value in described.items() if name != "kind"}
            if kind == "numeric":
                columns.append(Numeric(**parts))
            else:
                rare = parts.get("rare", None if parts["other"] else ())  # not in files of earlier versions
                parts |= {"categories": tuple(parts["categories"]), "rare": None if rare is None else tuple(rare)}
                columns.append(Categorical(**parts))
        return cls(tuple(columns), dict(about["dropped"]), about["missing"])


def with_plain_names(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with strings as column names.

    Raises:
        InputError: The argument is not a data frame.
        DataError: Two columns have the same name.
    """
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"a table must be a pandas DataFrame, got {type(frame).__name__}")
    names = frame.columns.map(str)
    if names.has_duplicates:
        twice = names[names.duplicated()][0]
        raise DataError(f"more than one column is called {twice!r}; give every column a name of its own")
    return frame.set_axis(names, axis="columns")


_DESCRIPTION = {"columns": [dict], "dropped": {str: str}, "missing": ("impute", "error")}
_COLUMN: dict[str, dict[str, Any]] = {
    "numeric": {
        "kind": str,
        "name": str,
        "median": float,
        "indicator": bool,
        "lowest": Optional(float),
        "highest": Optional(float),
        "counts": Optional(bool),
    },
    "categorical": {
        "kind": str,
        "name": str,
        "categories": [str],
        "other": bool,
        "indicator": bool,
        "rare": Optional([str], null=True),
    },
}


def check_encoder(encoder: TableEncoder, target: str) -> None:
    """Raise a :class:`DataError` if no column is left to predict the target from."""
    if not encoder.columns and not encoder.dropped:
        raise DataError(f"no column besides the target {target!r}; a model needs something to predict from")
    if not encoder.columns:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in encoder.dropped.items())
        raise DataError(f"no column is left to predict from: {reasons}")
