"""Atomic writing of files: readers see either the old or the new version, never a part."""

from __future__ import annotations

import glob
import os
import platform
import tempfile
import threading
from pathlib import Path

from mpgelu.errors import DataError, InputError

_HOST = platform.node() or "localhost"  # folders may be shared by computers, whose processes have the same numbers


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

    Missing folders are created. A symbolic link stays, and its target is replaced.

    Args:
        path: File to write.
        content: Text, written as UTF-8 with unchanged line ends, or bytes.

    Raises:
        DataError: The file cannot be written; an older version is left unchanged.
    """
    content = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # what a link points to is replaced, not the link
    beside = beside_its_place(target)
    try:
        if is_special(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, glob.escape(target.name))
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


def beside_its_place(path: Path) -> Path:
    """Return a hidden temporary name in the same folder, unique to this computer, process and thread."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{threading.get_ident()}")


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove temporary files that terminated processes of this computer left behind.

    Args:
        folder: Folder of the files.
        pattern: Glob pattern of the names of the final files.
    """
    for beside in folder.glob(f".{pattern}.{glob.escape(_HOST)}.*.*"):
        process, thread = beside.name.split(".")[-2:]
        if process.isdigit() and thread.isdigit() and not _is_running(int(process)):
            beside.unlink(missing_ok=True)


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
    except PermissionError:  # of another user
        return True
    return True
