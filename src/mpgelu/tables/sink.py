"""Writing a table a part at a time, so that a file is there whole or not at all."""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mpgelu.errors import DataError, InputError
from mpgelu.storage.files import is_special

_NUMBER = "%.8g"
_ENDINGS = ("", ".csv", ".txt", ".parquet")


class Sink:
    """Takes the parts of a table and writes them as CSV, or as Parquet to a file of that ending.

    Used as a context. A file appears under its name when the context ends without an error; until then the parts are
    in a hidden file beside it, which an error removes.

    Args:
        path: of the file; ``None`` or ``"-"`` is standard output, where parts appear as they come.
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
        """The context in which parts can be written."""
        if self.path is None:
            self._text = sys.stdout
            yield self
            sys.stdout.flush()
            return
        check_writable(self.path)
        if is_special(self.path):
            with self._to_file(self.path):
                yield self
            return
        path = self.path.resolve()
        _remove_abandoned(path)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with self._to_file(beside):
                yield self
            beside.replace(path)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from error
        finally:
            beside.unlink(missing_ok=True)

    def write(self, part: pd.DataFrame) -> None:
        """Add rows; all parts have the same columns."""
        if self._text is None:
            self._write_parquet(part)
        else:
            part.to_csv(self._text, index=False, header=self._is_first, float_format=_NUMBER, lineterminator="\n")
        self._is_first = False

    @contextmanager
    def _to_file(self, path: Path) -> Iterator[None]:
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
        if self._writer is None:
            table = pa.Table.from_pandas(part, preserve_index=False)
            self._writer = pq.ParquetWriter(self._place, table.schema)
        else:
            table = pa.Table.from_pandas(part, self._writer.schema, preserve_index=False)
        self._writer.write_table(table)


def check_writable(path: Path, *inputs: str | Path) -> None:
    """Find out before hours of work that a file cannot be written; makes its folder.

    Args:
        path: of the file.
        inputs: files that are read and must not be written over.

    Raises:
        DataError: It cannot.
    """
    if str(path) == "-":
        raise DataError("cannot write this to standard output; give the name of a file")
    if is_special(path):
        return
    if any(path.exists() and Path(other).exists() and path.samefile(other) for other in inputs):
        raise DataError(f"cannot write {path}: it is read by the same command; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error} (making {path.parent})") from error
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a folder; give the name of a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DataError(
            f"cannot write {path}: the folder {path.parent} cannot be written to "
            f"({error.strerror or error}); choose another"
        ) from error


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of this file."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*"):
        process = beside.suffix[1:]
        if process.isdigit() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            beside.unlink(missing_ok=True)
