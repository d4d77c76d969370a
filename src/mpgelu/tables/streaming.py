"""Rows of a table that does not fit into memory, for training: looked at once, then passed by in random order."""

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
from mpgelu.tables.cells import Cells
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.encoder import Missing, Numeric, TableEncoder
from mpgelu.tables.source import check_column
from mpgelu.tables.survey import Moments, Reservoir, Survey, check_encoder

MOST_ROWS_IN_MEMORY = 1_000_000
MOST_CELLS_IN_MEMORY = 50_000_000  # rows times columns; some 4 GB while a model of them is fitted
_MOST_SAMPLED = 100_000  # rows by which networks are judged
_MOST_BLOCK = 131_072  # rows
_BYTES = 128e6  # at most, of a sample, and of a block: for tables of many columns
_ROWS_AT_ONCE = 65_536  # that are read and encoded together
_HELD, _CALIBRATION, _TRAINED, _UNKNOWN = 0, 1, 2, 3  # what a row is for

Array = NDArray[np.float64]
TableSource: TypeAlias = "str | os.PathLike[str] | ds.Dataset"


def is_streamed(table: Dataset, stream: bool | None) -> bool:
    """Whether a table is streamed: as asked, or else by its size, which is the same on every machine."""
    return stream if stream is not None else table.rows > MOST_ROWS_IN_MEMORY or table.cells > MOST_CELLS_IN_MEMORY


@dataclass(frozen=True, eq=False)
class StreamedTable:
    """The rows of a table to train on; a :class:`~mpgelu.estimators.recipe.Stream`.

    Args:
        table: The files.
        target_name: Column to predict; rows without it are left out.
        encoder: Turns the other columns into numbers.
        moments: Of the targets of the rows to train on.
        parts: Share of the rows that are held out, and of those that are held out or for calibration.
        seed: Seed of these parts.
        samples: Some rows of each part, encoded.
        unknown: Rows without a target.
        seconds: That the look at all rows took.
    """

    table: Dataset
    target_name: str
    encoder: TableEncoder
    moments: Moments
    parts: tuple[float, float]
    seed: int
    samples: tuple[Block, Block, Block]
    unknown: int
    seconds: float

    @property
    def rows(self) -> int:
        """Rows to train on."""
        return self.moments.count

    @property
    def target(self) -> tuple[float, float]:
        """Mean and standard deviation of the target."""
        return self.moments.mean, self.moments.stddev

    @property
    def sample(self) -> Block:
        """Some of the rows to train on."""
        return self.samples[_TRAINED]

    @property
    def calibration(self) -> Block:
        """Some of the rows to calibrate on."""
        return self.samples[_CALIBRATION]

    @property
    def held(self) -> Block:
        """Some of the rows that are held out."""
        return self.samples[_HELD]

    @cached_property
    def range(self) -> tuple[Array, Array]:
        """Smallest and largest value of each feature."""
        ends: list[tuple[float, float]] = []
        for column in self.encoder.columns:
            numbers = [(column.lowest, column.highest)] if isinstance(column, Numeric) else []
            ends += numbers + [(0.0, 1.0)] * (len(column.features) - len(numbers))
        lowest, highest = np.array(ends).T
        return lowest, highest

    def blocks(self, seed: int) -> Iterator[Block]:
        """All rows once, from row groups in random order, shuffled in a buffer of two blocks."""
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
    """Look at all rows once: what each column is, the scale of the target, and samples.

    Args:
        table: The files.
        target: Name of the column to predict.
        missing: As in :meth:`TableModel.fit`.
        categorical: As in :meth:`TableModel.fit`.
        drop: As in :meth:`TableModel.fit`.
        hold_out: Share of the rows that nothing is learned from.
        calibrate: Share of the others that are kept for calibration.
        seed: Of the samples and of which rows are held out, which is decided by a hash of their numbers.

    Raises:
        DataError: A file cannot be read, or the table cannot be learned from.
    """
    started = time.monotonic()
    names = list(map(str, table.schema.names))
    for name in (target, *categorical, *drop):
        check_column(name, names)
    for option, share in (("hold_out", hold_out), ("calibrate", calibrate)):
        if not 0 <= share < 1:
            raise InputError(f"`{option}`: must be a share of the rows, below 1, got {share:g}")
    if target in drop:
        raise InputError(f"`drop`: {target!r} is the target")
    parts = hold_out, hold_out + (1 - hold_out) * calibrate
    survey = Survey([n for n in names if n != target], missing=missing, categorical=categorical, drop=drop)
    reservoirs = [Reservoir(_most(_MOST_SAMPLED, len(names)), seed) for _ in range(3)]
    moments, unknown = Moments(), 0
    with table.located():
        for frame in table.frames(_most(_ROWS_AT_ONCE, len(names))):
            cells = Cells.of(frame[target])
            values, known = cells.targets(), ~cells.missing
            unknown += int(cells.missing.sum())
            part = np.where(known, part_of(frame.index.to_numpy(), parts, seed), _UNKNOWN)
            moments.add(values[part == _TRAINED])
            for number, reservoir in enumerate(reservoirs):
                reservoir.add(frame, part == number)
            survey.add(_rows(frame, known & (part != _HELD)))
        _check_target(moments, target)
        encoder = survey.encoder(reservoirs[_TRAINED].frame())
    check_encoder(encoder, target)
    held, calibration, trained = (_encoded(reservoir.frame(), target, encoder) for reservoir in reservoirs)
    seconds = time.monotonic() - started
    return StreamedTable(table, target, encoder, moments, parts, seed, (held, calibration, trained), unknown, seconds)


def part_of(numbers: NDArray[np.int64], parts: tuple[float, float], seed: int) -> NDArray[np.int64]:
    """What each row is for, by a hash of its number."""
    return np.searchsorted(parts, uniform(numbers, seed + 1), side="right")


def _most(rows: int, columns: int) -> int:
    return int(min(rows, max(1_000, _BYTES / (8 * columns))))


def _rows(frame: pd.DataFrame, chosen: NDArray[np.bool_]) -> pd.DataFrame:
    return frame if chosen.all() else frame[chosen]


def _encoded(frame: pd.DataFrame, target: str, encoder: TableEncoder) -> Block:
    """The rows of a frame whose target is known, as numbers."""
    cells = Cells.of(frame[target])
    known = _rows(frame, ~cells.missing)
    return Block(encoder.encode(known).X, cells.numbers()[~cells.missing], known.index.to_numpy(dtype=np.int64))


def _shuffled(blocks: list[Block], generator: np.random.Generator) -> Block:
    order = generator.permutation(sum(len(block.y) for block in blocks))
    X, y, numbers = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    return Block(X, y, numbers).at(order)


def _check_target(moments: Moments, target: str) -> None:
    if not moments.count:
        raise DataError(f"no row has a target {target!r}; there is nothing to learn")
    if moments.lowest == moments.highest:
        raise DataError(f"the target {target!r} is {moments.lowest:g} in every row; there is nothing to predict")
