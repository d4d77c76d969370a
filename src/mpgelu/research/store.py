"""An append-only store of results, one JSON object per line, that survives being killed at any moment.

A record is on disk before `Store.append` returns: one `os.write` to an `O_APPEND` descriptor, then `fsync`.
A process killed in between can leave at most one torn line, the last. Readers ignore it, and the next append
cuts it off. Several processes may append to one file: each holds `fcntl.flock` on it while it repairs and
writes, and readers share the lock. This needs POSIX, and a file system whose `flock` reaches all of them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mpgelu.errors import DataError, InputError

_BLOCK = 1 << 16

Record = dict[str, Any]
Key = tuple[Hashable, ...]


class Store:
    """Records in a JSON-lines file, told apart by the fields that identify them.

    JSON has no NaN and no infinity. Both are stored as `null`, which reads back as `None` in a record and as
    NaN in a numeric column of `frame`: a metric that is not finite could not be measured. NumPy scalars
    become Python's.

    The object holds no open file, so that it can be pickled to workers.

    Args:
        path: The file. It and its folder are made by the first append.
        identity: The fields that together name a unit of work, for `key`, `keys` and `has`.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Sequence[str] = ()) -> None:
        """Remember where the records are; nothing is read or made yet."""
        self.path = Path(path)
        self.identity = tuple(identity)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and return when it is on disk.

        It does not ask whether the record is there already: see `has`.

        Raises:
            InputError: The record lacks an identity field or holds something JSON cannot.
            DataError: The file could not be written, as on a full disk.
        """
        self.key(record)
        line = _encode(record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_EX) as descriptor:
                _repair(descriptor)
                _write(descriptor, line)
        except OSError as error:
            raise DataError(f"Store.append: cannot write to {self.path}: {error}; mend this and run again") from error

    def records(self) -> list[Record]:
        """All records, in the order they were appended; none if there is no file yet.

        Raises:
            DataError: The file cannot be read, or a line other than the last is not a JSON object.
        """
        lines = self._read().splitlines()
        records = [_decode(line) for line in lines]
        if records and records[-1] is None:
            records.pop()
        if None in records:
            number = records.index(None) + 1
            raise DataError(
                f"Store.records: {self.path}, line {number}: wanted a JSON object, found "
                f"{lines[number - 1][:40]!r}; only the last line may be torn: mend or delete this one by hand"
            )
        return [record for record in records if record is not None]

    def __iter__(self) -> Iterator[Record]:
        """Iterate over `records()`."""
        return iter(self.records())

    def key(self, record: Mapping[str, Any]) -> Key:
        """The values of the identity fields, as they would read back from the file.

        Raises:
            InputError: An identity field is missing.
        """
        missing = [field for field in self.identity if field not in record]
        if missing:
            raise InputError(f"Store.key: the record lacks {missing}; the identifying fields are {list(self.identity)}")
        return tuple(_plain(record[field]) for field in self.identity)

    def keys(self) -> set[Key]:
        """The identity keys of all records.

        It reads the file once. Who asks about many units of work takes the set and asks that.
        """
        return {self.key(record) for record in self}

    def has(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record with the same identity fields is stored, whatever its other fields."""
        return self.key(record) in self.keys()

    def frame(self) -> pd.DataFrame:
        """All records as a table, one column per field; a field a record lacks is missing there."""
        return pd.DataFrame(self.records())

    def _read(self) -> bytes:
        try:
            with _locked(self.path, os.O_RDONLY, fcntl.LOCK_SH):
                return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise DataError(f"Store: cannot read {self.path}: {error.strerror}; mend this and run again") from error


@contextmanager
def _locked(path: Path, flags: int, lock: int) -> Iterator[int]:
    """A descriptor of the file, locked until the block ends; closing it gives the lock back."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, lock)
        yield descriptor
    finally:
        os.close(descriptor)


def _repair(descriptor: int) -> None:
    """Make the file end with a whole line: cut a torn one off, end one that lacks only its newline."""
    start, line = _last_line(descriptor)
    if line and _decode(line) is None:
        os.ftruncate(descriptor, start)
    elif line and not line.endswith(b"\n"):
        os.write(descriptor, b"\n")


def _last_line(descriptor: int) -> tuple[int, bytes]:
    """Return position and content of the last line, which is searched for backwards from the end of the file."""
    start, tail = os.fstat(descriptor).st_size, b""
    while start > 0 and b"\n" not in tail[:-1]:
        step = min(_BLOCK, start)
        start -= step
        tail = os.pread(descriptor, step, start) + tail
    cut = tail[:-1].rfind(b"\n") + 1
    return start + cut, tail[cut:]


def _write(descriptor: int, line: bytes) -> None:
    """Write a line at once, and to the disk itself; part of a line is an error, left for `_repair`."""
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
    except TypeError as error:
        raise InputError(f"Store.append: {error}; give numbers, strings, lists and dicts") from error


def _decode(line: bytes) -> Record | None:
    """The record in a line, or None if it is not a whole JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: Any) -> Any:
    """The value in JSON's types; a float that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
