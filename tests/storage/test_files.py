"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpgelu.errors import DataError
from mpgelu.storage.files import is_special, write_atomically


@pytest.mark.parametrize(
    ("content", "written"), [("\N{EN DASH}\n\r\n", b"\xe2\x80\x93\n\r\n"), (b"\x89PNG\r\n\x00", b"\x89PNG\r\n\x00")]
)
def test_text_and_bytes(tmp_path: Path, content: str | bytes, written: bytes) -> None:
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, "something longer that was there before")
    write_atomically(path, content)
    assert path.read_bytes() == written
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("owner", "method"), [(os, "fsync"), (Path, "replace")])
def test_a_failure_leaves_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, method: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(DataError, match=r"cannot write .*file: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen, replace = tmp_path / "file", [], Path.replace
    write_atomically(path, "old")

    def look(self: Path, target: Path) -> Path:
        seen.append(path.read_text())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    write_atomically(path, "new")
    assert [*seen, path.read_text()] == ["old", "new"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*below"):
        write_atomically(tmp_path / "file" / "below", "")


def test_devices_and_pipes_are_written_to_and_links_followed(tmp_path: Path) -> None:
    write_atomically(Path("/dev/null"), "gone")
    assert is_special(Path("/dev/null"))
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2
