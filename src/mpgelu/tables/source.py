"""Reading of CSV and Parquet tables, from a file or standard input, in parts of bounded size."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import IO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mpgelu.errors import DataError, closest
from mpgelu.tables.cells import CellError

ROWS_AT_ONCE = 8192
PARQUET, _GZIP, _ZIP = b"PAR1", b"\x1f\x8b", b"PK\x03\x04"  # first bytes of a file
_DELIMITERS = (";", "\t", "|", ",")
_HEADER_BYTES = 4096
# Messages of pandas.
_RAGGED = re.compile(r"Expected (?P<wanted>\d+) fields in line (?P<line>\d+), saw (?P<cells>\d+)")
_OPENED = re.compile(r"EOF inside string starting at row (?P<row>\d+)")


class Source:
    """A table that is read in parts of bounded size; errors name the file, the column and the line.

    The format is recognised by the first bytes: Parquet, gzip, or otherwise CSV in UTF-8 with a header line.

    Args:
        path: File to read; ``"-"`` is standard input.
        delimiter: Delimiter between the cells of a CSV file.
    """

    def __init__(self, path: str | Path, delimiter: str = ",") -> None:
        self.path = Path(path)
        self.is_standard_input = str(path) == "-"
        self.name = "standard input" if self.is_standard_input else str(path)
        self.delimiter = delimiter
        self.fraction_read: float | None = None  # None while unknown

    def read(self) -> pd.DataFrame:
        """Return the whole table as one data frame; see :meth:`frames`."""
        return pd.concat(list(self.frames()))

    def frames(self, rows: int = ROWS_AT_ONCE) -> Iterator[pd.DataFrame]:
        """Iterate over parts of the table, at least one; the index counts rows from 0.

        Cells of a CSV file are returned as text; a line with too few cells has empty ones at its end. Columns of a
        Parquet file keep their type.

        Args:
            rows: Number of rows in a part.

        Raises:
            DataError: The file cannot be read, has no rows, or has an invalid header or line.
        """
        with self.located(), self._opened() as stream:
            start = stream.peek(4)[:4]
            if start.startswith(_ZIP):
                raise DataError(f"{self.name} is a zip or spreadsheet file; save the table as CSV or Parquet")
            is_parquet = start.startswith(PARQUET)
            parts = self._parquet(stream, rows) if is_parquet else self._csv(stream, start.startswith(_GZIP), rows)
            count = 0
            for part in parts:
                count += len(part)
                if len(part):
                    yield part
            if not count:
                raise DataError(f"{self.name} has no rows below its header" if start else f"{self.name} is empty")

    @contextmanager
    def located(self) -> Iterator[None]:
        """Return a context in which an error in a cell becomes a :class:`DataError` that names file and line."""
        try:
            yield
        except CellError as error:
            raise DataError(f"{self._located(error.column, error.row)}: {error.problem}") from error

    def _located(self, column: str, row: int | None) -> str:
        """Return the place of a cell, or of a column if there is no row, for an error message."""
        name = f"{self.name}, column {column!r}"
        if row is None:
            return name
        line = self._line_of(row)
        return f"{name}, row {row + 1}" if line is None else f"{name}, line {line}"

    def _line_of(self, row: int) -> int | None:
        """Return the number of the last line of a row in a CSV file, in which lines may be blank or part of a cell.

        Args:
            row: Number of the row from 0.

        Returns:
            The number from 1; ``None`` if the table is not a file of this extension, or is not text after all.
        """
        if self.is_standard_input or self.path.suffix.lower() != ".csv":
            return None
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as stream:
                reader = csv.reader(stream, delimiter=self.delimiter, skipinitialspace=True)
                lines = (reader.line_num for record in reader if len(record) > 1 or "".join(record).strip())
                return next(islice(lines, row + 1, None), None)
        except (UnicodeDecodeError, csv.Error):
            return None

    @contextmanager
    def _opened(self) -> Iterator[BufferedReader]:
        """Open the file or standard input as a stream of bytes."""
        if self.is_standard_input and sys.stdin is None:
            raise DataError("standard input is closed; send a table to it, or give the name of a file")
        if not self.is_standard_input and not self.path.exists():
            raise DataError(f"there is no file {self.name}; correct the path")
        try:
            if self.is_standard_input:
                yield sys.stdin.buffer  # type: ignore[misc]  # typed as any binary stream
            else:
                with self.path.open("rb") as stream:
                    yield stream
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror or error}") from error

    def _csv(self, stream: BufferedReader, is_compressed: bool, rows: int) -> Iterator[pd.DataFrame]:
        """Iterate over parts of a CSV stream."""
        content: IO[bytes] = gzip.GzipFile(fileobj=stream) if is_compressed else stream  # type: ignore[assignment]
        size = None if self.is_standard_input else self.path.stat().st_size
        start, header = b"", list[str]()
        try:
            start = content.peek(_HEADER_BYTES)[:_HEADER_BYTES]  # type: ignore[attr-defined]
            # Without a header for pandas, the first line fixes the number of cells, and nothing is renamed.
            reader = pd.read_csv(
                content,
                header=None,
                sep=self.delimiter,
                dtype=str,
                keep_default_na=False,
                skipinitialspace=True,
                chunksize=rows,
                encoding="utf-8-sig",
            )
            for part in reader:
                if not header:
                    header = [str(name).strip() for name in part.iloc[0]]
                    self._check_header(header)
                    part = part.iloc[1:]
                part = part.set_axis(header, axis="columns").set_axis(part.index - 1, axis="index")
                self.fraction_read = stream.tell() / size if size else None
                yield part
        except UnicodeDecodeError as error:
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                remedy = "convert it, for example with iconv -f utf-16 -t utf-8"
                raise DataError(f"{self.name} is text in UTF-16; {remedy}") from error
            raise DataError(
                f"{self.name} is neither Parquet nor text in UTF-8; text in another encoding can be converted, "
                "for example with iconv -f latin1 -t utf-8"
            ) from error
        except pd.errors.EmptyDataError as error:
            raise DataError(f"{self.name} is empty") from error
        except (ValueError, EOFError, OSError, zlib.error) as error:
            self._check_delimiter(start.decode("utf-8-sig", errors="replace"))
            if ragged := _RAGGED.fullmatch(_one_line(error)):
                raise DataError(
                    f"{self.name}, line {ragged['line']}: {ragged['cells']} cells, but the first line has "
                    f"{ragged['wanted']}; put cells that contain {self.delimiter!r} in double quotes"
                ) from error
            if opened := _OPENED.fullmatch(_one_line(error)):
                line = int(opened["row"]) + 1
                raise DataError(
                    f"{self.name}: a cell that begins with a double quote, about line {line}, has no end; "
                    "close the quote, or write one that is part of the text twice"
                ) from error
            raise DataError(f"cannot read {self.name}: {_one_line(error)}") from error

    def _parquet(self, stream: BufferedReader, rows: int) -> Iterator[pd.DataFrame]:
        """Iterate over parts of a Parquet file."""
        with naming(self.name):
            content = BytesIO(stream.read()) if self.is_standard_input else stream
            file = pq.ParquetFile(content, page_checksum_verification=True)
            total, start = file.metadata.num_rows, 0
            for batch in file.iter_batches(rows):
                part = to_frame(batch, start)
                start += len(part)
                self.fraction_read = start / total
                self._check_names(list(map(str, part)))
                yield part

    def _check_header(self, header: list[str]) -> None:
        """Raise if the first line is not a line of column names."""
        if len(header) == 1:
            self._check_delimiter(header[0])
        self._check_names(header)
        if all(pd.notna(pd.to_numeric(pd.Series(header), errors="coerce"))):
            raise DataError(f"{self.name} begins with numbers, {header[:3]}; add a first line with the columns' names")

    def _check_delimiter(self, text: str) -> None:
        """Raise if another delimiter would split the first line."""
        header = next(iter(text.splitlines()), "")
        for delimiter in _DELIMITERS:
            if delimiter in header and self.delimiter not in header:
                shown = "tab" if delimiter == "\t" else delimiter
                raise DataError(
                    f"{self.name} has one column, {header[:100]!r}; its delimiter looks like {shown!r}: "
                    f"give `delimiter` {shown!r}"
                )

    def _check_names(self, names: list[str]) -> None:
        """Raise if a column has no name, or two have the same."""
        if "" in names:
            raise DataError(
                f"{self.name}: column {names.index('') + 1} has no name in the first line; name it, or leave it out"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{self.name} has more than one column {twice[0]!r}; give every column a name of its own")


def to_frame(batch: pa.RecordBatch, start: int) -> pd.DataFrame:
    """Return rows of Arrow as a data frame.

    Args:
        batch: The rows.
        start: Number of the first row, from which the index counts.
    """
    schema = columns_of(batch.schema)
    plain = pa.schema([field.with_type(_PLAIN.get(str(field.type), field.type)) for field in schema])
    frame: pd.DataFrame = batch.select(schema.names).cast(plain).to_pandas(types_mapper=pd.ArrowDtype)
    return frame.set_axis(pd.RangeIndex(start, start + len(frame)), axis="index")


_PLAIN = {"string_view": pa.string(), "binary_view": pa.binary()}  # types that pandas lacks, and their replacement


def columns_of(schema: pa.Schema) -> pa.Schema:
    """Return a schema without metadata, and without columns in which pandas has stored the index of a data frame."""
    return pa.schema([field for field in schema if not field.name.startswith("__index_level_")])


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Return a context in which errors of Arrow and of the system become a :class:`DataError` that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {file}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the message of an exception of pandas or Arrow as one line."""
    words = " ".join(str(error).split())
    return words.removeprefix("Error tokenizing data. C error: ") or type(error).__name__


def check_column(name: str, names: list[str]) -> None:
    """Raise a :class:`DataError` if a column does not exist; the message suggests a similar name."""
    if name not in names:
        shown = ", ".join(names if len(names) <= 12 else [*names[:9], "...", *names[-2:]])  # targets are often last
        raise DataError(f"there is no column {name!r}{closest(name, names) or f'; the columns are {shown}'}")
