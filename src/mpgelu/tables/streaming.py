"""Training data from a table that does not fit into memory.

A first pass over all rows (:func:`surveyed`) determines the encoding of the columns and the scale of the target, and
draws samples. Training then reads all rows once per epoch, in random order, in blocks (:class:`StreamedTable`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
from numpy.typing import NDArray

from mpgelu.errors import DataError, InputError
from mpgelu.estimators.hashing import uniform
from mpgelu.estimators.recipe import Block
from mpgelu.tables.cells import Cells, Missing
from mpgelu.tables.columns import Numeric
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.encoder import TableEncoder, check_encoder
from mpgelu.tables.preparation import check_columns, check_varies
from mpgelu.tables.sampling import Reservoir, RunningStatistics
from mpgelu.tables.survey import Survey

MOST_ROWS_IN_MEMORY = 1_000_000
MOST_CELLS_IN_MEMORY = 50_000_000  # rows times columns; training on them takes about 4 GB
_MOST_SAMPLED = 100_000  # rows of each sample
_MOST_BLOCK = 131_072  # rows of a block
_BYTES = 128e6  # largest size of a sample or a block; it limits the rows of tables with many columns
_ROWS_AT_ONCE = 65_536  # rows that are read and encoded together
_HELD, _CALIBRATION, _TRAINED, _UNKNOWN = 0, 1, 2, 3  # parts of the table: held out, calibration, training, no target

Array = NDArray[np.float64]
TableSource: TypeAlias = "str | os.PathLike[str] | ds.Dataset"


def is_streamed(table: Dataset, stream: bool | None) -> bool:
    """Return whether a table is streamed.

    Args:
        table: The files.
        stream: The choice of the user; ``None`` streams tables with more than 1,000,000 rows or 50 million cells. The
            limits do not depend on the memory of the machine, so that results are reproducible.
    """
    return stream if stream is not None else table.rows > MOST_ROWS_IN_MEMORY or table.cells > MOST_CELLS_IN_MEMORY


@dataclass(frozen=True, eq=False)
class StreamedTable:
    """The training rows of a table in files; it implements :class:`~mpgelu.estimators.recipe.Stream`.

    Args:
        table: The files.
        target_name: Name of the column to predict; rows without a target are left out.
        encoder: Encoding of the other columns.
        statistics: Statistics of the targets of the rows to train on.
        parts: Share of the rows that are held out, and share of those that are held out or used for calibration.
        seed: Seed of the assignment of rows to parts.
        samples: Encoded samples of the rows that are held out, for calibration and for training.
        unknown: Number of rows without a target.
        seconds: Duration of the first pass over all rows.
    """

    table: Dataset
    target_name: str
    encoder: TableEncoder
    statistics: RunningStatistics
    parts: tuple[float, float]
    seed: int
    samples: tuple[Block, Block, Block]
    unknown: int
    seconds: float

    @property
    def rows(self) -> int:
        """Number of training rows."""
        return self.statistics.count

    @property
    def target(self) -> tuple[float, float]:
        """Mean and standard deviation of the training targets."""
        return self.statistics.mean, self.statistics.stddev

    @property
    def sample(self) -> Block:
        """A sample of the training rows, at most 100,000."""
        return self.samples[_TRAINED]

    @property
    def calibration(self) -> Block:
        """A sample of the rows for calibration, at most 100,000."""
        return self.samples[_CALIBRATION]

    @property
    def held(self) -> Block:
        """A sample of the rows that are held out, at most 100,000."""
        return self.samples[_HELD]

    @cached_property
    def range(self) -> tuple[Array, Array]:
        """Smallest and largest value of each feature, ``(n,)`` each."""
        ends: list[tuple[float, float]] = []
        for column in self.encoder.columns:
            numbers = [(column.lowest, column.highest)] if isinstance(column, Numeric) else []
            ends += numbers + [(0.0, 1.0)] * (len(column.features) - len(numbers))
        lowest, highest = np.array(ends).T
        return lowest, highest

    def blocks(self, seed: int) -> Iterator[Block]:
        """Yield all training rows once, in blocks.

        Row groups are read in random order, and rows are shuffled in a buffer of two blocks. The order is not uniform
        over all permutations, but rows of a block come from many row groups.

        Args:
            seed: Seed of the order, different in each epoch.
        """
        generator = np.random.default_rng(seed)
        size = _most(_MOST_BLOCK, len(self.encoder.features))
        buffer: list[Block] = []
        for frame in self.table.shuffled(generator, _most(_ROWS_AT_ONCE, len(self.table.schema))):
            part = part_of(frame.index.to_numpy(), self.parts, self.seed)
            buffer.append(_encoded(_rows(frame, part == _TRAINED), self.target_name, self.encoder))
            if sum(len(block.y) for block in buffer) >= 2 * size:
                mixed = _shuffled(buffer, generator)
                yield mixed.at(slice(size))
                buffer = [mixed.at(slice(size, None))]
        if buffer and len((rest := _shuffled(buffer, generator)).y):
            yield rest


def surveyed(
    table: Dataset,
    target: str,
    *,
    missing: Missing,
    categorical: Collection[str],
    drop: Collection[str],
    hold_out: float = 0.0,
    calibrate: float = 0.0,
    seed: int = 0,
) -> StreamedTable:
    """Read all rows once to determine the encoding of the columns and the scale of the target, and to draw samples.

    Args:
        table: The files.
        target: Name of the column to predict.
        missing: As in :meth:`TableModel.fit`.
        categorical: As in :meth:`TableModel.fit`.
        drop: As in :meth:`TableModel.fit`.
        hold_out: Share of the rows that is held out for evaluation; the encoding does not depend on them.
        calibrate: Share of the other rows that is used for calibration instead of training.
        seed: Seed of the samples and of the assignment of rows to parts, which is a hash of their numbers.

    Raises:
        DataError: A file cannot be read, a named column does not exist, or the target is constant or not numeric.
        InputError: A share is out of range.
    """
    started = time.monotonic()
    names = list(map(str, table.schema.names))
    check_columns(names, target, categorical, drop)
    for option, share in (("hold_out", hold_out), ("calibrate", calibrate)):
        if not 0 <= share < 1:
            raise InputError(f"`{option}`: must be a share of the rows, below 1, got {share:g}")
    parts = hold_out, hold_out + (1 - hold_out) * calibrate
    survey = Survey([n for n in names if n != target], missing=missing, categorical=categorical, drop=drop)
    reservoirs = [Reservoir(_most(_MOST_SAMPLED, len(names)), seed) for _ in range(3)]
    statistics, unknown = RunningStatistics(), 0
    with table.located():
        for frame in table.frames(_most(_ROWS_AT_ONCE, len(names))):
            cells = Cells.of(frame[target])
            values, known = cells.targets(), ~cells.missing
            unknown += int(cells.missing.sum())
            part = np.where(known, part_of(frame.index.to_numpy(), parts, seed), _UNKNOWN)
            statistics.add(values[part == _TRAINED])
            for number, reservoir in enumerate(reservoirs):
                reservoir.add(frame, part == number)
            survey.add(_rows(frame, known & (part != _HELD)))
        if not statistics.count:
            raise DataError(f"no row has a target {target!r}; there is nothing to learn")
        check_varies(target, statistics.lowest, statistics.highest)
        encoder = TableEncoder(*survey.encodings(reservoirs[_TRAINED].frame()), missing)
    check_encoder(encoder, target)
    held, calibration, trained = (_encoded(reservoir.frame(), target, encoder) for reservoir in reservoirs)
    seconds = time.monotonic() - started
    return StreamedTable(
        table, target, encoder, statistics, parts, seed, (held, calibration, trained), unknown, seconds
    )


def part_of(numbers: NDArray[np.int64], parts: tuple[float, float], seed: int) -> NDArray[np.int64]:
    """Return the part to which each row belongs: 0 held out, 1 calibration, 2 training.

    Args:
        numbers: Numbers of the rows in the table, ``(rows,)``.
        parts: Cumulative shares of the first two parts.
        seed: Seed of the hash of a number, by which a row is assigned independently of how the table is read.
    """
    return np.searchsorted(parts, uniform(numbers, seed + 1), side="right")


def _most(rows: int, columns: int) -> int:
    """Return a number of rows, reduced so that as many float64 columns take at most 128 MB."""
    return int(min(rows, max(1_000, _BYTES / (8 * columns))))


def _rows(frame: pd.DataFrame, chosen: NDArray[np.bool_]) -> pd.DataFrame:
    """Return the chosen rows, without a copy if all are chosen."""
    return frame if chosen.all() else frame[chosen]


def _encoded(frame: pd.DataFrame, target: str, encoder: TableEncoder) -> Block:
    """Return the rows of a frame with a known target, encoded."""
    cells = Cells.of(frame[target])
    known = _rows(frame, ~cells.missing)
    return Block(encoder.encode(known).X, cells.numbers()[~cells.missing], known.index.to_numpy(dtype=np.int64))


def _shuffled(blocks: list[Block], generator: np.random.Generator) -> Block:
    """Return the rows of all blocks as one block in random order."""
    order = generator.permutation(sum(len(block.y) for block in blocks))
    X, y, numbers = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    return Block(X, y, numbers).at(order)
