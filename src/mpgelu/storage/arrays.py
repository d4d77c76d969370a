"""Arrays and their description in one file that is written atomically, verified when read, and never executed.

The format is safetensors: eight bytes with the length of the header, the header (JSON), the data. The header starts
with the checksum at a fixed position, so that a file is verified before any of it is parsed::

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
_LENGTH = 8  # number of bytes that contain the length of the header
_METADATA = '{"__metadata__":'
_OPENING = f'{_METADATA}{{"checksum":"'.encode()
_START = _LENGTH + len(_OPENING)  # position of the checksum
_NO_CHECKSUM = b"0" * 64
_LONGEST_LIST = 2**20  # characters of the header that list the tensors: about ten thousand of them
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)


def write_arrays(path: Path, kind: str, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file whose metadata contain the description and a checksum of the whole file.

    Args:
        path: File to write.
        kind: Kind of the file, for example ``"model"``.
        arrays: Tensors of float32, float64, int64 or bool by name.
        about: Description, anything that JSON can represent.

    Raises:
        DataError: The file cannot be written.
    """
    arrays = {name: tensor.detach().contiguous() for name, tensor in arrays.items()}
    text = json.dumps({"kind": kind, "format": FORMAT, "about": about}, sort_keys=True)
    write_atomically(path, _sealed(save(arrays, {_KEY: text})))


def read_arrays(path: Path, kind: str, remedy: str = "save it again") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the description that :func:`write_arrays` has written.

    The checksum is verified first. It detects damage, not forgery, since anyone who writes a file can compute its
    checksum. Therefore no more than a multiple of the length of the file is allocated, and the caller checks the
    content of the description with :func:`check_arrays` and :func:`mpgelu.storage.schema.checked`.

    Args:
        path: File to read.
        kind: Expected kind of the file.
        remedy: What to do about a damaged file, used as the end of the error message.

    Returns:
        The tensors by name, and the description.

    Raises:
        DataError: The file does not exist, is not a file of this library, is of another kind or a newer format, or was
            truncated or altered.
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
    """Return tensors and description from the content of a file."""
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
        raise DataError(f"{path} is not a saved {kind}, or is truncated ({one_line(error)}); {remedy}") from error
    if described["kind"] != kind:
        raise DataError(f"{path} is a saved {described['kind']}, not a {kind}")
    return arrays, described["about"]


def check_arrays(arrays: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check names, shapes and values of the arrays of a file.

    Args:
        arrays: Tensors of :func:`read_arrays`.
        shapes: Expected shape of each tensor by name.

    Raises:
        DataError: An array is missing or unknown, has another shape, is not floating-point, or is not finite.
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
    """Return a safetensors file with its checksum at the start of the header."""
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.loads(content[_LENGTH:end])
    metadata = {"checksum": _NO_CHECKSUM.decode(), **header.pop("__metadata__")}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the numbers after it
    content = len(text).to_bytes(_LENGTH, "little") + text + content[end:]
    return content[:_START] + _checksum(content) + content[_START + len(_NO_CHECKSUM) :]


def _checksum(content: bytes) -> bytes:
    """Return the SHA-256 of a file with zeros in place of the checksum."""
    digest = sha256(content[:_START] + _NO_CHECKSUM)
    digest.update(memoryview(content)[_START + len(_NO_CHECKSUM) :])
    return digest.hexdigest().encode()


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata at the start of the header; the rest is bounded in length, and not parsed.

    Raises:
        ValueError: The header is missing or truncated, or lists too many tensors.
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
    """Return the checksum of files of format 1, which is stored among the metadata."""
    digest = sha256(text.encode())
    for name in sorted(arrays):
        tensor = arrays[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def one_line(error: Exception) -> str:
    """Return the message of an error as one line of at most 300 characters; torch adds the stack of its C++ code."""
    return " ".join(str(error).split())[:300]
