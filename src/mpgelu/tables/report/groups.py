"""Groups of rows by one column at a time, to find where a model is least certain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.tables.cells import Cells
from mpgelu.tables.columns import Numeric
from mpgelu.tables.encoder import TableEncoder
from mpgelu.tables.evaluation import compact

_PARTS = 5
_LONGEST_NAME = 28


@dataclass(frozen=True)
class Group:
    """Rows with a common property.

    Args:
        name: The common property.
        rows: Number of rows.
        ratio: Mean predicted standard deviation of the group, relative to that of all rows.
    """

    name: str
    rows: int
    ratio: float


def least_sure_groups(
    frame: pd.DataFrame, encoder: TableEncoder, stddev: NDArray[np.float64], most: int = 8
) -> list[Group]:
    """Return the groups with the largest standard deviation, in descending order; at most two for each column.

    Args:
        frame: The rows.
        encoder: The encoding of the columns.
        stddev: Predicted standard deviation of each row.
        most: Number of groups.
    """
    fewest = max(5, len(frame) // 50)
    found = []
    for column in encoder.columns:
        cells = Cells.of(frame[column.name])
        kinds = _fifths(cells) if isinstance(column, Numeric) else _categories(cells)
        groups = [
            Group(_short(name), int(rows.sum()), float(stddev[rows].mean() / stddev.mean()))
            for name, rows in kinds
            if rows.sum() >= fewest
        ]
        found += sorted(groups, key=lambda group: -group.ratio)[:2]
    return [group for group in sorted(found, key=lambda group: -group.ratio) if group.ratio > 1][:most]


def _fifths(cells: Cells) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield name and rows of up to five groups between quintiles of the values, and of the rows without a value."""
    values = cells.values
    if cells.missing.any():
        yield f"{cells.name} missing", cells.missing
    if cells.missing.all():
        return
    edges = np.unique(np.nanquantile(values, np.linspace(0, 1, _PARTS + 1)))
    for low, high in pairwise(edges):
        last = high == edges[-1]
        rows = (values >= low) & ((values <= high) if last else (values < high))
        if low == edges[0] and last:
            continue  # all rows
        if low == edges[0]:
            yield f"{cells.name} below {compact(high)}", rows
        elif last:
            yield f"{cells.name} from {compact(low)}", rows
        else:
            yield f"{cells.name} {compact(low)} to {compact(high)}", rows


def _categories(cells: Cells) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield one group of rows for each category, and one for missing cells."""
    text = cells.categories()
    for category in text.unique():
        name = f"{cells.name} {category}" if category else f"{cells.name} missing"
        yield name, (text == category).to_numpy(dtype=bool)


def _short(name: str) -> str:
    """Return a name shortened to the space of a label."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
