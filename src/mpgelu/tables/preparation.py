"""Checks of a training table in memory before training: the target, the columns, and rows that are held out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.errors import DataError, InputError
from mpgelu.tables.cells import Cells, Missing
from mpgelu.tables.encoder import TableEncoder, check_encoder, with_plain_names
from mpgelu.tables.source import check_column

FEWEST_ROWS = 10

Array = NDArray[np.float64]


def prepare(
    known: pd.DataFrame,
    y: Array,
    target: str,
    *,
    missing: Missing,
    categorical: Collection[str],
    drop: Collection[str],
) -> TableEncoder:
    """Check a training table before training, and determine the encoding of its columns.

    Args:
        known: Rows with a known target, as :func:`read_target` returns them.
        y: Their targets, ``(rows,)``.
        target: Name of the column to predict.
        missing: As in :meth:`TableModel.fit`.
        categorical: As in :meth:`TableModel.fit`.
        drop: As in :meth:`TableModel.fit`.

    Raises:
        DataError: The table lacks a named column, or cannot be learned from.
    """
    check_columns(list(map(str, known)), target, categorical, drop)
    if len(y) < FEWEST_ROWS:
        raise DataError(f"{len(y)} row{'s' * (len(y) != 1)} with a target; a model needs at least {FEWEST_ROWS}")
    check_varies(target, y.min(), y.max())
    encoder = TableEncoder.learn(known.drop(columns=target), missing=missing, categorical=categorical, drop=drop)
    check_encoder(encoder, target)
    return encoder


def check_columns(names: list[str], target: str, categorical: Iterable[str], drop: Collection[str]) -> None:
    """Check the columns that the user has named.

    Args:
        names: Names of all columns of the table.
        target: Name of the column to predict.
        categorical: As in :meth:`TableModel.fit`.
        drop: As in :meth:`TableModel.fit`.

    Raises:
        DataError: The table lacks one of them.
        InputError: The target is to be dropped.
    """
    for name in (target, *categorical, *drop):
        check_column(name, names)
    if target in drop:
        raise InputError(f"`drop`: {target!r} is the target")


def check_varies(target: str, lowest: float, highest: float) -> None:
    """Raise a :class:`DataError` if the smallest and the largest value of the target are equal."""
    if lowest == highest:
        raise DataError(f"the target {target!r} is {lowest:g} in every row; there is nothing to predict")


def read_target(frame: pd.DataFrame, target: str) -> tuple[pd.DataFrame, Array]:
    """Return the rows with a known target, and the targets ``(rows,)``.

    Args:
        frame: The table.
        target: Name of the target column.

    Raises:
        DataError: There is no such column, or (as a :class:`CellError`) a target is not a finite number.
    """
    frame = with_plain_names(frame)
    check_column(target, list(map(str, frame)))
    cells = Cells.of(frame[target])
    return frame[~cells.missing], cells.targets()[~cells.missing]


def split(option: str, rows: int, share: float, seed: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of a random share of the rows, and of the others.

    Args:
        option: Name of the share in error messages.
        rows: Number of rows.
        share: Share of the rows, between 0 and 1.
        seed: Seed of the choice; 0 is used for anything but an integer.

    Raises:
        InputError: The share is out of range, or leaves fewer than ten rows on one side.
    """
    held = round(rows * share) if 0 <= share < 1 else -1
    if held < 0 or (share and not FEWEST_ROWS <= held <= rows - FEWEST_ROWS):
        count = f", which is {held} of {rows}" if held >= 0 else ""
        raise InputError(
            f"`{option}`: must be a share of the rows, below 1, that leaves at least {FEWEST_ROWS} on both sides, "
            f"got {share:g}{count}"
        )
    order = np.random.default_rng(seed if isinstance(seed, int) else 0).permutation(rows)
    return np.sort(order[:held]), np.sort(order[held:])
