"""Reading of Parquet files and Arrow datasets in parts of bounded size, in order or in random order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from mpgelu.errors import DataError, InputError
from mpgelu.tables.source import PARQUET, ROWS_AT_ONCE, Source, columns_of, naming, to_frame

_ENDINGS = (".parquet", ".parq", ".pq")
_MOST_OPEN = 16  # largest number of row groups that are interleaved
_BYTES_OPEN = 128e6  # largest size of the interleaved row groups together, unless they are two


@dataclass(frozen=True)
class RowGroup:
    """Rows that are stored together, the unit in which a dataset is shuffled.

    Args:
        fragment: Arrow fragment that reads the rows.
        file: Name of the file.
        first: Number of the first row in the dataset, from 0.
        first_in_file: Number of the first row in the file, from 0.
        rows: Number of rows.
        size: Size in bytes before compression; 0 if unknown.
    """

    fragment: ds.Fragment
    file: str
    first: int
    first_in_file: int
    rows: int
    size: int


class Dataset(Source):
    """A table in Parquet files that is read in parts of bounded size; errors name the file, the column and the row.

    The files of a folder and of its subfolders are read in the order of their names. A subfolder ``key=value`` adds the
    column ``key`` (Hive partitioning). All files must have the same columns; numeric types may differ between files.

    Args:
        source: Path of a Parquet file or of a folder of such files, or an Arrow dataset in any format.

    Attributes:
        schema: Arrow schema of all files together.
        groups: The row groups in order.
        rows: Number of rows.

    Raises:
        DataError: There are no rows, a file is damaged, or the files have different columns.
        InputError: The Arrow dataset has a filter or a projection.
    """

    def __init__(self, source: str | os.PathLike[str] | ds.Dataset) -> None:
        is_path = not isinstance(source, ds.Dataset)
        super().__init__(os.fspath(source) if is_path else "dataset")
        if is_path and self.path.is_file() and not is_parquet(self.path):
            raise DataError(
                f"{self.name} is not a Parquet file; a data frame is fitted with pandas.read_csv and the like"
            )
        dataset = _opened(self.path) if is_path else source
        self.schema, self.groups = _surveyed(dataset, self.name)
        self._check_names(self.schema.names)
        self.rows = sum(group.rows for group in self.groups)
        if not self.rows:
            raise DataError(f"{self.name} has no rows")

    @property
    def cells(self) -> int:
        """Number of cells: rows times columns."""
        return self.rows * len(self.schema)

    def frames(self, rows: int = ROWS_AT_ONCE) -> Iterator[pd.DataFrame]:
        """Yield the parts of the table in order; the index counts rows from 0.

        Args:
            rows: Largest number of rows in a part.

        Raises:
            DataError: A file cannot be read.
        """
        with self.located():
            for group in self.groups:
                for part in self._read(group, rows):
                    self.fraction_read = (int(part.index[-1]) + 1) / self.rows
                    yield part

    def shuffled(self, generator: np.random.Generator, rows: int = ROWS_AT_ONCE) -> Iterator[pd.DataFrame]:
        """Yield the parts of the table from row groups in random order, several of which are interleaved.

        The index contains the numbers of the rows in the table. Rows within a part are in the order of the file; a
        caller that needs them shuffled has to shuffle several parts together.

        Args:
            generator: Source of the random order.
            rows: Largest number of rows in a part.

        Raises:
            DataError: A file cannot be read.
        """
        waiting = [self.groups[at] for at in generator.permutation(len(self.groups))]
        largest = max(group.size for group in self.groups)
        open_at_once = int(np.clip(_BYTES_OPEN / max(1, largest), 2, _MOST_OPEN))
        opened: list[Iterator[pd.DataFrame]] = []
        with self.located():
            while waiting or opened:
                while waiting and len(opened) < open_at_once:
                    opened.append(self._read(waiting.pop(), rows))
                chosen = opened[int(generator.integers(len(opened)))]
                part = next(chosen, None)
                if part is None:
                    opened.remove(chosen)
                else:
                    yield part

    def _read(self, group: RowGroup, rows: int) -> Iterator[pd.DataFrame]:
        """Yield the rows of one row group in parts of at most ``rows`` rows."""
        start = group.first
        with naming(group.file):
            batches = group.fragment.to_batches(
                schema=self.schema,
                batch_size=rows,
                batch_readahead=1,
                fragment_readahead=1,
                use_threads=False,
                fragment_scan_options=_checking(group.fragment),
            )
            for batch in batches:
                if batch.num_rows:
                    yield to_frame(batch, start)
                start += batch.num_rows
        if start != group.first + group.rows:
            raise DataError(f"cannot read {group.file}: {start - group.first} rows where {group.rows} should be")

    def _located(self, column: str, row: int | None) -> str:
        """Return file, column and row number in the file of a cell of the table."""
        for group in self.groups:
            if row is not None and group.first <= row < group.first + group.rows:
                return f"{group.file}, column {column!r}, row {row - group.first + group.first_in_file + 1}"
        return f"{self.name}, column {column!r}"


def is_parquet(path: Path) -> bool:
    """Return whether a path is a folder, or a file that starts with the magic bytes of Parquet."""
    if not path.is_file():
        return path.is_dir()
    with path.open("rb") as stream:
        return stream.read(len(PARQUET)) == PARQUET


def _opened(path: Path) -> ds.Dataset:
    """Return the Parquet files at a path as an Arrow dataset.

    Raises:
        DataError: There is no Parquet file, or the first one is damaged.
    """
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; correct the path")
    files = [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS and file.is_file())
        files = sorted(file for file in found if not file.name.startswith((".", "_")))
        if not files:
            raise DataError(f"{path} holds no Parquet file (name.parquet); write the table there as Parquet")
    base = str(path if path.is_dir() else path.parent)
    with naming(str(files[0])):  # Arrow takes the schema from the first file, and opens the others later
        return ds.dataset(list(map(str, files)), format="parquet", partitioning="hive", partition_base_dir=base)


def _surveyed(dataset: ds.Dataset, name: str) -> tuple[pa.Schema, list[RowGroup]]:
    """Return the schema of all files together, and their row groups in order.

    Args:
        dataset: The files.
        name: Name of the table, for error messages.
    """
    try:
        fragments = list(dataset.get_fragments())
    except ValueError as error:
        raise InputError(
            f"{name}: a dataset with a filter or other columns than its files cannot be streamed ({error}); "
            "write what it gives to Parquet files, with pyarrow.dataset.write_dataset"
        ) from error
    if not fragments:
        raise DataError(f"{name} has no files")
    groups: list[RowGroup] = []
    schema, first_file, first = columns_of(fragments[0].physical_schema), "", 0
    for fragment in fragments:
        file = str(getattr(fragment, "path", "")) or name
        with naming(file):
            schema = _joined(schema, columns_of(fragment.physical_schema), file, first_file or file)
            first_in_file = 0
            for part, rows, size in _units(fragment):
                groups.append(RowGroup(part, file, first, first_in_file, rows, size))
                first, first_in_file = first + rows, first_in_file + rows
        first_file = first_file or file
    folders = [field for field in columns_of(dataset.schema) if field.name not in schema.names]
    return pa.schema([*schema, *folders]), groups


def _units(fragment: ds.Fragment) -> Iterator[tuple[ds.Fragment, int, int]]:
    """Yield fragment, number of rows and number of bytes of each row group; a file of another format is one group."""
    if not isinstance(fragment, ds.ParquetFileFragment):
        yield fragment, fragment.count_rows(), 0
        return
    for part in fragment.split_by_row_group():
        (group,) = part.row_groups
        yield part, group.num_rows, group.total_byte_size


def _checking(fragment: ds.Fragment) -> ds.ParquetFragmentScanOptions | None:
    """Return options that verify the checksums of pages, if the file has them; ``None`` keeps options of the caller."""
    if not isinstance(fragment, ds.ParquetFileFragment):
        return None
    unchanged = fragment.format.default_fragment_scan_options == ds.ParquetFragmentScanOptions()
    return ds.ParquetFragmentScanOptions(page_checksum_verification=True) if unchanged else None


def _joined(schema: pa.Schema, other: pa.Schema, file: str, first_file: str) -> pa.Schema:
    """Return a schema with the columns of two files, whose types can represent the values of both.

    Args:
        schema: Schema of the earlier files.
        other: Schema of the next file.
        file: Name of the next file, for error messages.
        first_file: Name of the first file, for error messages.

    Raises:
        DataError: The names of the columns differ, or there is no common type.
    """
    if differing := sorted(set(schema.names) ^ set(other.names)):
        has, lacks = (file, first_file) if differing[0] in other.names else (first_file, file)
        raise DataError(f"{lacks} lacks the column {differing[0]!r}, which {has} has; all files need the same columns")
    for field in schema:
        try:
            pa.unify_schemas([pa.schema([field]), pa.schema([other.field(field.name)])], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{file}: the column {field.name!r} is of type {other.field(field.name).type}, and in {first_file} of "
                f"{field.type}; write all files with the same types"
            ) from error
    return pa.unify_schemas([schema, other], promote_options="permissive")
