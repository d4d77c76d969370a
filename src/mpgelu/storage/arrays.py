"""Arrays and a description of them in one file that is written whole, checked when read, and never executed.

A file is a safetensors file: eight bytes with the length of the header, the header (JSON), the numbers. The
header opens with the checksum, at a fixed place, so that the file can be verified before any of it is parsed::

    {"__metadata__":{"checksum":"<sha256 of the file, with zeros in this place>","mpgelu":"<description>"}, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from mpgelu.errors import DataError
from mpgelu.storage.files import write_atomically
from mpgelu.storage.schema import checked

FORMAT = 2  # raised when a file can no longer be read by older versions of this library
_KEY = "mpgelu"
_LENGTH = 8  # bytes of the header's length
_METADATA = '{"__metadata__":'
_OPENING = f'{_METADATA}{{"checksum":"'.encode()
_START = _LENGTH + len(_OPENING)  # of the checksum
_NO_CHECKSUM = b"0" * 64
_LONGEST_LIST = 2**20  # characters of the header that list the tensors: about ten thousand of them
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


def write_arrays(path: Path, kind: str, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file whose metadata hold the description and a checksum of everything.

    Args:
        path: File to write.
        kind: What the file is, for example ``"model"``.
        arrays: The tensors, of float32, float64, int64 or bool.
        about: Anything that JSON can hold.
    """
    arrays = {name: tensor.detach().contiguous() for name, tensor in arrays.items()}
    text = json.dumps({"kind": kind, "format": FORMAT, "about": about}, sort_keys=True)
    write_atomically(path, _sealed(save(arrays, {_KEY: text})))


def read_arrays(path: Path, kind: str, remedy: str = "save it again") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_arrays` wrote: the tensors and the description.

    The checksum is verified first. It detects damage, not forgery: whoever writes a file can write its checksum
    too. So nothing is allocated beyond a multiple of the file's length, and what the description says is for the caller
    to check, with :func:`check_arrays` and :func:`mpgelu.storage.schema.checked`.

    Args:
        path: File to read.
        kind: What the file should be.
        remedy: What to do about a damaged file, as the end of a sentence.

    Raises:
        DataError: There is no such file, it is not one of ours, of another kind, newer, truncated or altered.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give the path of a saved {kind}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return _parsed(content, path, kind, remedy)


def _parsed(content: bytes, path: Path, kind: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description from what a file holds."""
    is_sealed = content[_LENGTH:_START] == _OPENING
    altered = DataError(f"{path} was altered or truncated after it was saved (its checksum differs); {remedy}")
    if is_sealed and _checksum(content) != content[_START : _START + len(_NO_CHECKSUM)]:
        raise altered
    try:
        metadata = _metadata(content)
        text = metadata.get(_KEY)
        if text is None:
            raise DataError(f"{path} holds arrays but not a {kind} saved by this library")
        described = json.loads(text)
        checked(described, {"kind": str, "format": int, "about": dict}, "the header")
        if described["format"] > FORMAT:
            newest = f"this version reads up to {FORMAT}; update mpgelu"
            raise DataError(f"{path} has format {described['format']}, {newest}")
        arrays = load(content)
        if wrong := [name for name, tensor in arrays.items() if tensor.dtype not in _DTYPES]:
            raise DataError(f"{path}: {wrong[0]!r} is of {arrays[wrong[0]].dtype}, which no {kind} holds; {remedy}")
        if not is_sealed and metadata.get("sha256") != _digest_of_format_1(arrays, text):
            raise altered
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:  # or RecursionError
        if content and b"\0" not in content[:_LENGTH]:  # a header is never so long
            raise DataError(f"{path} is text or a table, not a saved {kind}") from error
        raise DataError(f"{path} is not a saved {kind}, or is truncated ({_one_line(error)}); {remedy}") from error
    if described["kind"] != kind:
        raise DataError(f"{path} is a saved {described['kind']}, not a {kind}")
    return arrays, described["about"]


def check_arrays(arrays: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that arrays from a file are the wanted ones: names, shapes, floating-point and finite.

    Args:
        arrays: Tensors of :func:`read_arrays`.
        shapes: The wanted shape of each.

    Raises:
        DataError: They are not.
    """
    if missing := shapes.keys() - arrays.keys():
        raise DataError(f"the array {min(missing)!r} is missing")
    if unknown := arrays.keys() - shapes.keys():
        raise DataError(f"the array {min(unknown)!r} has no place in it")
    for name, shape in shapes.items():
        tensor = arrays[name]
        if tuple(tensor.shape) != tuple(shape):
            raise DataError(f"the array {name!r} has the shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if not tensor.is_floating_point():
            raise DataError(f"the array {name!r} is of {tensor.dtype}, not of floating-point numbers")
        if not tensor.isfinite().all():
            raise DataError(f"the array {name!r} holds numbers that are not finite")


def _sealed(content: bytes) -> bytes:
    """A safetensors file with its checksum at the start of its header."""
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.loads(content[_LENGTH:end])
    metadata = {"checksum": _NO_CHECKSUM.decode(), **header.pop("__metadata__")}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the numbers after it
    content = len(text).to_bytes(_LENGTH, "little") + text + content[end:]
    return content[:_START] + _checksum(content) + content[_START + len(_NO_CHECKSUM) :]


def _checksum(content: bytes) -> bytes:
    """SHA-256 of a file, with zeros in place of the checksum itself."""
    digest = sha256(content[:_START] + _NO_CHECKSUM)
    digest.update(memoryview(content)[_START + len(_NO_CHECKSUM) :])
    return digest.hexdigest().encode()


def _metadata(content: bytes) -> dict[str, str]:
    """The texts at the start of the header; what follows them is bounded, and left to safetensors.

    Raises:
        ValueError: There is no such header, or it lists too many tensors.
    """
    length = int.from_bytes(content[:_LENGTH], "little")
    if len(content) < _LENGTH or length > len(content) - _LENGTH:
        raise ValueError("it ends within its header")
    header = content[_LENGTH : _LENGTH + length].decode()
    if not header.startswith(_METADATA):
        if header.startswith("{"):
            return {}
        raise ValueError("it has no header")
    metadata, end = json.JSONDecoder().raw_decode(header, len(_METADATA))
    if len(header) - end > _LONGEST_LIST:
        raise ValueError(f"it lists more than {_LONGEST_LIST} characters of tensors")
    if not isinstance(metadata, dict):
        raise ValueError("its header holds no texts")
    return metadata


def _digest_of_format_1(arrays: Mapping[str, Tensor], text: str) -> str:
    """The checksum of files of format 1, which stands among the texts of the header."""
    digest = sha256(text.encode())
    for name in sorted(arrays):
        tensor = arrays[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
