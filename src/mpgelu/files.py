"""Writing files so that nobody ever reads half of one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from mpgelu.errors import DataError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there: readers see the old version or the new one, whole.

    The folder is made if it is not there.

    Args:
        path: the file.
        content: text, written as UTF-8 with its line ends unchanged, or bytes.

    Raises:
        DataError: The file cannot be written; an older version of it stays as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"write_atomically: cannot write {path}: {error.strerror or error}") from error
