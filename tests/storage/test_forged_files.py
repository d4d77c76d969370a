"""Model files with one forged value: each is refused with one DataError, or gives a model that predicts numbers."""

from __future__ import annotations

import copy
import math
import resource
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpgelu as mp
from houses import houses
from mpgelu.storage import arrays as storage
from mpgelu.storage.arrays import read_arrays
from mpgelu.tables import model as loading
from mpgelu.tables.model import TableModel

KINDS = ("default", "compact", "table")
SMALL: dict[str, Any] = {"hidden": (2,), "folds": 2, "steps": 2, "random_state": 0}  # all kinds of networks
ROWS = np.random.default_rng(1).normal(size=(3, 2))
HUGE = (10**9, 10**30)
MISSING = object()  # stands for a field that is left out
Way = tuple[Any, ...]


@cache
def files() -> dict[str, Path]:
    """A small model of each kind: calibrated, distilled, of a table."""
    folder = Path(tempfile.mkdtemp())
    X = np.random.default_rng(0).normal(size=(40, 2))
    model = mp.MPGELURegressor(**SMALL).fit(X, X[:, 0])
    model.distill(X, steps=5).save(folder / "compact")
    model.calibrate(X, X[:, 0]).save(folder / "default")
    TableModel.fit(houses(40), "price", **SMALL).save(folder / "table")
    return {kind: folder / kind for kind in KINDS}


def walk(value: Any, way: Way = ()) -> Iterator[Way]:
    """The way to everything inside a description; of a long list to its first and last item."""
    if way:
        yield way
    if isinstance(value, dict):
        for key, part in value.items():
            yield from walk(part, (*way, key))
    elif isinstance(value, list):
        for place in sorted({0, len(value) - 1} if value else {}):
            yield from walk(value[place], (*way, place))


def at(value: Any, way: Way) -> Any:
    for key in way:
        value = value[key]
    return value


def others(value: Any) -> list[Any]:
    """Values of other types and sizes than the one that a file holds."""
    found: list[Any] = [None, True, -1, *HUGE, 1e308, math.nan, math.inf, "bogus", [], {}, [1], MISSING]
    if type(value) is int:
        found += [value + 1, value - 1, float(value), str(value)]
    if isinstance(value, float):
        found += [-value, str(value)]
    if isinstance(value, str):
        found += [f"{value}x", [value]]
    if isinstance(value, list):
        found += [value[:-1], value + value[-1:], value[::-1]]
    if isinstance(value, dict):
        found += [{**value, "more": 1}]
    return found


def changed(about: dict[str, Any], way: Way, value: Any) -> dict[str, Any]:
    forged = copy.deepcopy(about)
    place = at(forged, way[:-1])
    if value is MISSING:
        del place[way[-1]]
    else:
        place[way[-1]] = value
    return forged


def outcome(arrays: dict[str, Tensor], about: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is wrong with the answer to a description; empty if it is an error in one line, or a model that predicts."""
    monkeypatch.setattr(loading, "read_arrays", lambda path, kind: (dict(arrays), about))
    try:
        model = mp.load("forged")
    except mp.DataError as error:
        return "" if "\n" not in str(error) and len(str(error)) < 1000 else f"long message: {error}"
    except Exception as error:  # the very thing this test looks for
        return f"load: {error!r}"
    if isinstance(model, TableModel):  # other columns may be another model, but rows of the right ones are encoded
        frame = houses(3)
        if any(column.name not in frame for column in model.encoder.columns):
            return ""
        rows = model.encoder.encode(frame).X
        model = model.regressor
    else:
        rows = ROWS if model.n_features_in_ == 2 else np.zeros((3, model.n_features_in_))
    model.__dict__.pop("feature_names_in_", None)
    try:
        numbers = (*model.predict(rows, return_std=True), *model.predict_interval(rows, 0.5))
    except Exception as error:  # a model that was loaded must not fail later
        return f"predict: {error!r}"
    return "" if all(n.shape == (3,) and np.isfinite(n).all() for n in numbers) else f"predicted {numbers}"


def ways(kind: str, about: dict[str, Any]) -> list[Way]:
    """What is to be changed; of a table what the other kinds do not have."""
    return [way for way in walk(about) if kind != "table" or way[0] == "table"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_value_is_refused_or_harmless(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, about = read_arrays(files()[kind], "model")
    assert outcome(arrays, about, monkeypatch) == ""
    wrong = []
    for way in ways(kind, about):
        for value in others(at(about, way)):
            if value is MISSING and isinstance(way[-1], int):
                continue  # shorter lists are among the values of the list
            if found := outcome(arrays, changed(about, way, value), monkeypatch):
                wrong.append((way, "missing" if value is MISSING else value, found))
    assert not wrong


def other_arrays(array: Tensor) -> dict[str, Tensor]:
    return {
        "NaN": array * torch.nan,
        "infinite": torch.full_like(array, torch.inf),
        "whole numbers": array.long(),
        "truth values": array.bool(),
        "halves": array.half(),
        "another precision": array.float() if array.dtype == torch.float64 else array.double(),
        "negative": -array,
        "zero": torch.zeros_like(array),
        "huge": torch.full_like(array, 1e30),
        "a dimension more": array[None],
        "more": torch.cat([array, array]) if array.dim() else array.repeat(2),
        "fewer": array[:-1] if array.dim() else array[None][:0],
        "transposed": array.mT.contiguous() if array.dim() > 1 else array.reshape(-1, 1),
        "none": array.flatten()[:0],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_array_is_refused_or_harmless(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, about = read_arrays(files()[kind], "model")
    wrong = []
    for name, array in arrays.items():
        for what, other in other_arrays(array).items():
            if found := outcome({**arrays, name: other}, about, monkeypatch):
                wrong.append((name, what, found))
        if outcome({key: held for key, held in arrays.items() if key != name}, about, monkeypatch):
            wrong.append((name, "missing", "not refused"))
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_forged_sizes_allocate_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, about = read_arrays(files()[kind], "model")
    assert outcome(arrays, about, monkeypatch) == ""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way in walk(about):
        for value in HUGE if type(at(about, way)) is int else ():
            assert outcome(arrays, changed(about, way, value), monkeypatch) == ""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


@pytest.mark.parametrize("components", [1, 5, 7, 10**9, 2.5, 0])
def test_another_number_of_components_is_refused_at_load(components: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, about = read_arrays(files()["compact"], "model")
    forged = changed(about, ("likelihood", "components"), components)
    monkeypatch.setattr(loading, "read_arrays", lambda path, kind: (arrays, forged))
    with pytest.raises(
        mp.DataError, match=r"forged does not describe a model that can be built: .*(outputs|components)"
    ):
        mp.load("forged")


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes_of_every_kind_are_found(kind: str) -> None:
    content = files()[kind].read_bytes()
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(mp.DataError):
            storage._parsed(bytes(flipped), Path("flipped"), "model", "")
