"""Writing files so that nobody ever reads half of one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from mpgelu.errors import DataError, InputError


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what a file holds between the marks ``<!-- name:start -->`` and ``<!-- name:end -->``.

    Args:
        path: for example a README.
        name: of the marks.
        text: to stand between them, on lines of its own.

    Raises:
        InputError: The file has no such marks.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    content = path.read_text(encoding="utf-8")
    if start not in content or end not in content:
        raise InputError(f"{name}: {path} has no marks {start} and {end} to write the table between")
    before, after = content[: content.index(start)], content[content.index(end) :]
    write_atomically(path, f"{before}{start}\n{text}\n{after}")


def is_special(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as ``/dev/null``, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there: readers see the old version or the new one, whole.

    The folder is made if it is not there.

    Args:
        path: the file.
        content: text, written as UTF-8 with its line ends unchanged, or bytes.

    Raises:
        DataError: The file cannot be written; an older version of it stays as it was.
    """
    content = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # what a link points to is replaced, not the link
    beside = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        if is_special(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
