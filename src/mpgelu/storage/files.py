"""Atomic writing of files: readers see either the old or the new version, never a part."""

from __future__ import annotations

import glob
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpgelu.errors import DataError, InputError

_HOST = platform.node() or "localhost"  # computers that share a folder have processes of the same numbers


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text of a file between the marks ``<!-- name:start -->`` and ``<!-- name:end -->``.

    Args:
        path: File to change, for example a README.
        name: Name in the marks.
        text: Text to insert between them, on lines of its own.

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
    """Return whether a path is a device or a pipe, such as ``/dev/null``, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it, so that readers see the old or the new version as a whole.

    Folders, links and devices are treated as in :func:`replacing`.

    Args:
        path: File to write.
        content: Text, written as UTF-8 with unchanged line ends, or bytes.

    Raises:
        DataError: The file cannot be written; an older version is left unchanged.
    """
    with replacing(path) as place, place.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        if place != path:  # a device cannot be synchronised
            os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Return a context with a temporary path for the new version of a file, which is renamed when the context ends.

    An error in the context removes the new version and leaves the old one unchanged. Missing folders are created. A
    symbolic link stays, and its target is replaced. The path of a device or a pipe is returned as it is.

    Args:
        path: The file to replace.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        if is_special(path):
            yield path
            return
        target = path.resolve()
        temporary = temporary_path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, glob.escape(target.name))
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def temporary_path(path: Path) -> Path:
    """Return a hidden name in the folder of a file, unique to this computer, process and thread."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{threading.get_ident()}")


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove temporary files that terminated processes of this computer left behind.

    Args:
        folder: Folder of the files.
        pattern: Glob pattern of the names of the final files.
    """
    for temporary in folder.glob(f".{pattern}.{glob.escape(_HOST)}.*.*"):
        process, thread = temporary.name.split(".")[-2:]
        if process.isdigit() and thread.isdigit() and not _is_running(int(process)):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path, *inputs: str | Path) -> None:
    """Check before a long computation that a file can be written, and create its folder.

    Args:
        path: File that will be written.
        *inputs: Files that are read and must not be overwritten.

    Raises:
        DataError: The file cannot be written, is standard output, or is one of the inputs.
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


def _is_running(process: int) -> bool:
    """Return whether a process of this number exists on this computer."""
    try:
        os.kill(process, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process of another user
        pass
    return True
