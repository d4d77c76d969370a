"""Files of arrays: what comes back, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpgelu import DataError
from mpgelu.storage import arrays
from mpgelu.storage.arrays import read_arrays, write_arrays

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True), "c": torch.zeros(0), "d": torch.eye(3).mT}


def test_arrays_come_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_arrays(path, "model", TENSORS, {"x": [1, None, "ä"]})
    tensors, about = read_arrays(path, "model")
    assert about == {"x": [1, None, "ä"]}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file"
    write_arrays(path, "model", TENSORS, {})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"is not a saved model, or is truncated|was altered or truncated"):
        read_arrays(path, "model")


def test_altered_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_arrays(path, "model", TENSORS, {"steps": 1})
    content = path.read_bytes()
    numbers = bytearray(content)
    numbers[-1] ^= 1
    for altered in (bytes(numbers), content.replace(b"steps", b"stepz")):
        path.write_bytes(altered)
        with pytest.raises(DataError, match="was altered or truncated after it was saved"):
            read_arrays(path, "model")


def test_newer_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "FORMAT", 99)
    write_arrays(tmp_path / "file", "model", TENSORS, {})
    monkeypatch.undo()
    with pytest.raises(DataError, match="has format 99, this version reads up to 2; update mpgelu"):
        read_arrays(tmp_path / "file", "model")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_arrays(tmp_path / "nothing", "model")
    with pytest.raises(DataError, match="is a folder, not a file"):
        read_arrays(tmp_path, "model")
    save_file({"x": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(DataError, match="holds arrays but not a model"):
        read_arrays(tmp_path / "other", "model")
    (tmp_path / "text").write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match="is text or a table, not a saved model"):
        read_arrays(tmp_path / "text", "model")
    write_arrays(tmp_path / "state", "checkpoint", TENSORS, {})
    with pytest.raises(DataError, match="is a saved checkpoint, not a model"):
        read_arrays(tmp_path / "state", "model")
