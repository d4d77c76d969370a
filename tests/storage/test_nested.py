"""Nested values through arrays and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mpgelu import DataError, InputError
from mpgelu.storage.nested import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int32, torch.bool])
def test_tensors_come_back_in_their_type(dtype: torch.dtype) -> None:
    value = (torch.arange(6).view(2, 3) * 37 % 7).to(dtype)
    arrays, text = pack([value.mT], "it")
    (found,) = unpack(arrays, json.loads(json.dumps(text)))
    assert found.dtype == dtype
    assert torch.equal(found, value.mT)


def test_structure_comes_back() -> None:
    value: Any = {"a": [1, 2.5, None, True, "x", float("inf")], "b": ({}, (), []), 3: {0: {"step": -1}}}
    arrays, text = pack(value, "it")
    assert not arrays
    assert unpack(arrays, json.loads(json.dumps(text))) == value


def test_tensors_are_copied() -> None:
    value = torch.ones(2)
    arrays, _ = pack({"one": value, "two": value}, "it")
    value += 1
    assert all(torch.equal(tensor, torch.ones(2)) for tensor in arrays.values())
    assert len(arrays) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"f": [len]}, r"it\['f'\]\[0\] holds a builtin_function_or_method"),
        ([torch.ones(1, dtype=torch.complex64)], r"it\[0\] holds a tensor of torch.complex64"),
    ],
)
def test_what_no_file_keeps_is_named(value: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        pack(value, "it")


@pytest.mark.parametrize(
    "text",
    [{"tensor": "7", "dtype": "float32"}, {"tensor": "0", "dtype": "string"}, {"items": [1]}, {"tuple": 1}, {"x": 1}],
)
def test_other_json_is_refused(text: Any) -> None:
    with pytest.raises(DataError, match="neither a tensor, a tuple nor a mapping"):
        unpack({"0": torch.ones(1)}, [text])
