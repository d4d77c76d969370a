"""Writing of tables in parts, such that a file appears as a whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mpgelu.errors import InputError
from mpgelu.storage.files import check_writable, replacing

_NUMBER = "%.8g"  # format of floating-point numbers in CSV
_ENDINGS = ("", ".csv", ".txt", ".parquet")


class Sink:
    """A writer of tables in parts, as CSV with 8 significant digits, or as Parquet to a file with that extension.

    The parts are written in the context :meth:`opened`. The file appears under its name when the context ends without
    an error; until then the parts are in a hidden file in the same folder, which is removed on errors.

    Args:
        path: File to write; ``None`` or ``"-"`` is standard output, where parts appear immediately.

    Raises:
        InputError: The file has an unknown extension.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None or str(path) == "-" else Path(path)
        if self.path is not None and self.path.suffix.lower() not in _ENDINGS:
            raise InputError(f"cannot write {self.path}: give a name that ends in .csv or .parquet")
        self._writer: pq.ParquetWriter | None = None
        self._text: TextIO | None = None
        self._is_first = True

    @contextmanager
    def opened(self) -> Iterator[Sink]:
        """Return the context in which parts can be written.

        Raises:
            DataError: The file cannot be written.
        """
        if self.path is None:
            self._text = sys.stdout
            yield self
            self._text.flush()
            return
        check_writable(self.path)
        with replacing(self.path) as place, self._to_file(place):
            yield self

    def write(self, part: pd.DataFrame) -> None:
        """Append rows.

        Args:
            part: The rows; all parts must have the same columns. The index is not written.
        """
        if self._text is None:
            self._write_parquet(part)
        else:
            part.to_csv(self._text, index=False, header=self._is_first, float_format=_NUMBER, lineterminator="\n")
        self._is_first = False

    @contextmanager
    def _to_file(self, path: Path) -> Iterator[None]:
        """Return a context in which parts are written to a file, in the format of the extension of the final one."""
        if self.path is not None and self.path.suffix.lower() == ".parquet":
            self._place = path
            try:
                path.touch()
                yield
            finally:
                if self._writer is not None:
                    self._writer.close()
        else:
            with path.open("w", encoding="utf-8", newline="") as self._text:
                yield

    def _write_parquet(self, part: pd.DataFrame) -> None:
        """Append rows to a Parquet file, with the schema of the first part."""
        if self._writer is None:
            table = pa.Table.from_pandas(part, preserve_index=False)
            self._writer = pq.ParquetWriter(self._place, table.schema, write_page_checksum=True)
        else:
            table = pa.Table.from_pandas(part, self._writer.schema, preserve_index=False)
        self._writer.write_table(table)
