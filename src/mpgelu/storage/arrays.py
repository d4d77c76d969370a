"""Arrays and a description of them in one file that is written whole, checked when read, and never executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load, save
from torch import Tensor

from mpgelu.errors import DataError
from mpgelu.storage.files import write_atomically

FORMAT = 1  # raised when a file can no longer be read by older versions of this library
_KEY = "mpgelu"


def write_arrays(path: Path, kind: str, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file whose metadata hold the description and a checksum of everything.

    Args:
        path: of the file.
        kind: what the file is, for example ``"model"``.
        arrays: the tensors.
        about: anything that JSON can hold.
    """
    arrays = {name: tensor.detach().contiguous() for name, tensor in arrays.items()}
    text = json.dumps({"kind": kind, "format": FORMAT, "about": about}, sort_keys=True)
    write_atomically(path, save(arrays, {_KEY: text, "sha256": _digest(arrays, text)}))


def read_arrays(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_arrays` wrote: the tensors and the description.

    Raises:
        DataError: There is no such file, it is not one of ours, of another kind, newer, truncated or altered.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give the path of a saved {kind}")
    try:
        content = path.read_bytes()
        arrays = load(content)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (safetensors.SafetensorError, ValueError) as error:
        if content and b"\0" not in content[:8]:  # where the length of the header would be
            raise DataError(f"{path} is text or a table, not a saved {kind}") from error
        raise DataError(f"{path} is not a saved {kind}, or is truncated ({error}); save it again") from error
    metadata = _metadata(content)
    if _KEY not in metadata:
        raise DataError(f"{path} holds arrays but not a {kind} saved by this library")
    text = metadata[_KEY]
    described = json.loads(text)
    if described["format"] > FORMAT:
        raise DataError(f"{path} has format {described['format']}, this version reads up to {FORMAT}; update mpgelu")
    if metadata.get("sha256") != _digest(arrays, text):
        raise DataError(f"{path} was altered after it was saved (its checksum differs); save it again")
    if described["kind"] != kind:
        raise DataError(f"{path} is a saved {described['kind']}, not a {kind}")
    return arrays, described["about"]


def _metadata(content: bytes) -> dict[str, str]:
    """The texts in the header of a safetensors file, whose length stands in its first eight bytes."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return found


def _digest(arrays: Mapping[str, Tensor], text: str) -> str:
    digest = sha256(text.encode())
    for name in sorted(arrays):
        tensor = arrays[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
