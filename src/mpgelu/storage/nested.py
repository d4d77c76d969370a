"""Nested values with tensors in them, such as the state of an optimiser, as arrays and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import DataError, InputError

_PLAIN = (str, int, float, bool, type(None))
_HELD = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtype in the file, which represents every value
_HELD |= dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), torch.int64)
_HELD |= {dtype: dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _HELD}


def pack(value: Any, name: str) -> tuple[dict[str, Tensor], Any]:
    """Separate a nested value into tensors of the dtypes that files support, and JSON for the rest.

    Args:
        value: Dictionaries, lists and tuples of numbers, texts, ``None`` and tensors.
        name: What the value is, for errors.

    Returns:
        Copies of the tensors by number, on the CPU, and JSON for :func:`unpack`.

    Raises:
        InputError: The value contains an object of another type.

    Example:
        >>> arrays, text = pack({"betas": (0.9, 0.99), "state": {0: torch.ones(2)}}, "the optimiser")
        >>> unpack(arrays, text)
        {'betas': (0.9, 0.99), 'state': {0: tensor([1., 1.])}}
    """
    arrays: dict[str, Tensor] = {}

    def packed(part: Any, place: str) -> Any:
        if isinstance(part, Tensor) and part.dtype in _HELD:
            key = str(len(arrays))
            arrays[key] = part.detach().to("cpu", _HELD[part.dtype], copy=True).contiguous()
            return {"tensor": key, "dtype": str(part.dtype).removeprefix("torch.")}
        if isinstance(part, Mapping):
            return {"items": [[packed(key, place), packed(held, f"{place}[{key!r}]")] for key, held in part.items()]}
        if type(part) in (list, tuple):
            held = [packed(item, f"{place}[{position}]") for position, item in enumerate(part)]
            return held if type(part) is list else {"tuple": held}
        if type(part) not in _PLAIN:
            what = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise InputError(f"{place} holds {what}, which no file of this library can keep")
        return part

    return arrays, packed(value, name)


def unpack(arrays: Mapping[str, Tensor], text: Any) -> Any:
    """Return the value that :func:`pack` has separated.

    Args:
        arrays: The tensors.
        text: The JSON.

    Raises:
        DataError: The JSON is not of the form that :func:`pack` returns.
    """
    if isinstance(text, list):
        return [unpack(arrays, item) for item in text]
    if not isinstance(text, dict):
        return text
    match text:
        case {"tensor": str(key), "dtype": str(dtype)} if key in arrays and dtype in _DTYPES:
            return arrays[key].to(_DTYPES[dtype])
        case {"tuple": list(items)}:
            return tuple(unpack(arrays, item) for item in items)
        case {"items": list(pairs)} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {unpack(arrays, key): unpack(arrays, held) for key, held in pairs}
    raise DataError(f"it has a part {str(text)[:60]!r}, which is neither a tensor, a tuple nor a mapping")
