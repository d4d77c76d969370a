"""Model files from outside: damaged, forged, old. Whatever they hold, the answer is a model or one DataError."""

from __future__ import annotations

import json
import math
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
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
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.tables.model import TableModel

HERE = Path(__file__).parent
OLD = {"regressor": HERE / "regressor.format1", "table": HERE / "table.format1"}  # written by format 1
FIRST = "stacks.0.parameter_0"
SMALL: dict[str, Any] = {"hidden": (2,), "sigma": None, "rate": 0.1, "folds": 2, "diverse": False, "steps": 2}
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


@cache
def files() -> dict[str, Path]:
    """A small model of numbers and one of a table."""
    folder = Path(tempfile.mkdtemp())
    X = np.random.default_rng(0).normal(size=(40, 2))
    regressor = mp.MPGELURegressor(**SMALL, random_state=0).fit(X, X[:, 0]).calibrate(X, X[:, 0])
    regressor.save(folder / "regressor")
    TableModel.fit(houses(40), "price", **SMALL, random_state=0).save(folder / "table")
    return {"regressor": folder / "regressor", "table": folder / "table"}


def parts(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read_arrays(files()[name], "model")


def forged(path: Path, name: str, change: Change) -> None:
    """A file with another content and the right checksum."""
    arrays, about = parts(name)
    change(arrays, about)
    write_arrays(path, "model", arrays, about)


# old files


@pytest.mark.parametrize("name", OLD)
def test_models_of_format_1_are_told_apart(name: str) -> None:
    with pytest.raises(mp.DataError, match=r"saved by a version before 0\.2, .* fit the model again$"):
        mp.load(OLD[name])


# damage


def refused_flips(content: bytes) -> list[int]:
    """Positions at which a flipped bit is found; every bit is flipped at some positions."""
    found = []
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        try:
            storage._parsed(bytes(flipped), Path("flipped"), "model", "")
        except mp.DataError:
            found.append(position)
    return found


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    forged(tmp_path / "whole", "table", lambda *_: None)
    content = (tmp_path / "whole").read_bytes()
    assert refused_flips(content) == list(range(len(content)))
    as_capitals = [i for i, letter in enumerate(content) if letter in b"abcdef"]  # as digits they mean the same
    for position in as_capitals[:64]:
        flipped = content[:position] + content[position : position + 1].upper() + content[position + 1 :]
        with pytest.raises(mp.DataError):
            storage._parsed(flipped, Path("flipped"), "model", "")


def test_every_flipped_byte_of_an_old_file_is_found_but_for_blanks() -> None:
    content = OLD["regressor"].read_bytes()
    harmless = set(range(len(content))) - set(refused_flips(content))
    assert all(content[position : position + 1] in b" \n\t" for position in harmless)


def test_the_checksum_is_verified_before_anything_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, about = parts("regressor")
    path = tmp_path / "file"
    write_arrays(path, "model", arrays, about)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(storage, "load", None)
    monkeypatch.setattr(storage, "_metadata", None)
    with pytest.raises(mp.DataError, match=r"was altered or truncated .*\(its checksum differs\); save it again"):
        mp.load(path)


def test_other_programs_can_read_our_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    arrays, about = parts("regressor")
    write_arrays(tmp_path / "file", "model", arrays, about)
    with safe_open(tmp_path / "file", "pt") as file:
        assert set(file.keys()) == set(arrays)
        assert torch.equal(file.get_tensor("weights"), arrays["weights"])


# forged headers


def header_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def crafted(random: np.random.Generator) -> tuple[object, bytes, int | None]:
    """A header that no program of ours writes."""
    values: list[object] = [
        *(None, True, -1, 2**63, 1e308, "", "x", [], {}, [[]], "[" * 5000, "{", "NaN", "Infinity"),
        *(
            '{"kind": "model"}',
            '{"kind": 1, "format": "a", "about": []}',
            '{"format": 1e9, "kind": "model", "about": {}}',
        ),
        *('{"format": 2, "kind": "model", "about": {}}', "9" * 5000, [2**62, 2**62], [0, 2**62], [-1], [1.5]),
    ]

    def pick() -> object:
        return values[random.integers(len(values))]

    tensor: dict[str, object] = {
        "dtype": ["F32", "F64", "BF16", "F8_E4M3", "U64", "I8", "C64", "Q", 3, None][random.integers(10)],
        "shape": [[2], [0], [], [2**62, 2**62], [0, 2**40], [-1], "x", None][random.integers(8)],
        "data_offsets": [[0, 8], [0, 2**62], [8, 0], [-8, 8], [0], None, [0, 0], [4, 8]][random.integers(8)],
    }
    if random.random() < 0.3:
        del tensor[list(tensor)[random.integers(3)]]
    header: dict[str, object] = {"__metadata__": {"mpgelu": pick(), "sha256": pick()}}
    header |= {str(pick())[:50]: tensor if random.random() < 0.8 else pick()}
    if random.random() < 0.2:
        header["__metadata__"] = pick()
    whole: object = header if random.random() < 0.9 else pick()
    length = None if random.random() < 0.8 else int([0, 1, 2**63, 2**64 - 1, 10, 10**8][random.integers(6)])
    return whole, bytes(8), length


def test_200_crafted_headers_are_refused(tmp_path: Path) -> None:
    path, random = tmp_path / "forged", np.random.default_rng(0)
    for _ in range(200):
        header_file(path, *crafted(random))
        with pytest.raises(mp.DataError) as caught:
            mp.load(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600 + len(str(path))


def test_deep_headers_are_refused(tmp_path: Path) -> None:
    for header in (b'{"__metadata__":' + b"[" * 100_000, b"[" * 100_000, b'{"a":' * 100_000):
        header_file(tmp_path / "deep", header)
        with pytest.raises(mp.DataError):
            mp.load(tmp_path / "deep")
    forged(tmp_path / "deep", "regressor", lambda _, about: about.update(params={"hidden": [2], "rate": []}))
    text = b'{"__metadata__":{"mpgelu":"' + b"[" * 100_000 + b'"}}'
    header_file(tmp_path / "deep", text)
    with pytest.raises(mp.DataError):
        mp.load(tmp_path / "deep")


def test_a_million_tensors_are_refused_before_they_are_made(tmp_path: Path) -> None:
    entries = ",".join(f'"{number:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(100_000))
    for metadata in ('{"mpgelu":"{}"}', '{"checksum":"' + "0" * 64 + '"}'):
        header_file(tmp_path / "many", f'{{"__metadata__":{metadata},{entries}}}'.encode())
        tracemalloc.start()
        with pytest.raises(mp.DataError):
            mp.load(tmp_path / "many")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 5 * (tmp_path / "many").stat().st_size


# forged descriptions, with the right checksum


def set_to(key: str, value: object) -> Change:
    return lambda _, about: about.update({key: value})


def without(key: str) -> Change:
    return lambda _, about: about.pop(key)


def array(key: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda arrays, _: arrays.update({key: value(arrays[key])})


def in_table(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda _, about: change(about["table"])


def in_column(position: int, **values: object) -> Change:
    return in_table(lambda table: table["encoder"]["columns"][position].update(values))


def in_stack(**values: object) -> Change:
    return lambda _, about: about["stacks"][0].update(values)


def in_layer(position: int, **values: object) -> Change:
    return lambda _, about: about["stacks"][0]["network"]["children"][position].update(values)


FORGED: dict[str, tuple[str, Change, str]] = {
    "networks": ("regressor", in_stack(models=10**9), "1 to 100,000 networks of each kind"),
    "more networks": ("regressor", in_stack(models=3), "the array 'weights' has the shape (2,), not (3,)"),
    "no networks": ("regressor", in_stack(models=0), "1 to 100,000 networks of each kind"),
    "no stack": ("regressor", set_to("stacks", []), "1 to 100,000 networks of each kind"),
    "networks in words": ("regressor", in_stack(models="2"), "'models' of an item of 'stacks' of the ensemble must be"),
    "width": ("regressor", in_layer(1, out_features=10**9), "has the shape (2, 2, 2), not (2, 1000000000, 2)"),
    "widest": ("regressor", in_layer(1, out_features=10**18), "does not describe a model that can be built"),
    "negative width": ("regressor", in_layer(1, out_features=-1), "cannot build a layer Linear"),
    "layer": ("regressor", in_layer(1, kind="Liner"), "there is no layer called 'Liner'; did you mean 'Linear'?"),
    "code": ("regressor", in_layer(1, kind="os.system"), "there is no layer called 'os.system'"),
    "setting": ("regressor", in_layer(1, eval="x"), "cannot build a layer Linear"),
    "bias in words": ("regressor", in_layer(1, bias="bogus"), "the layer Linear: its bias cannot be 'bogus'"),
    "bias of lists": ("regressor", in_layer(1, bias=[[[]]]), "the layer Linear: its bias cannot be '[[[]]]'"),
    "no number": ("regressor", in_layer(1, bias=math.nan), "the layer Linear: its bias cannot be 'nan'"),
    "no network": ("regressor", in_stack(network=3), "must name the kind of each layer"),
    "moments": ("regressor", set_to("moments", "bogus"), "there is no type of moments called 'bogus'"),
    "no moments": ("regressor", without("moments"), "'moments' of the ensemble must be a text, got None"),
    "likelihood": ("regressor", set_to("likelihood", {"kind": "x"}), "there is no likelihood called 'x'"),
    "tails": ("regressor", set_to("likelihood", {"kind": "HeavyTailedGaussian", "tail_share": 7}), "cannot build the"),
    "no head": ("regressor", set_to("noise", None), "has no place in it"),
    "correction": ("regressor", lambda _, about: about["noise"].update(by_row="no"), "'by_row' of 'noise' of the"),
    "no parameters": ("regressor", without("params"), "'params' of the model must be fields, got None"),
    "unknown parameter": ("regressor", set_to("params", {"hidden": [2], "x": 1}), "has 'x', which this version"),
    "no score": ("regressor", without("score"), "does not describe a model that can be built"),
    "kinds": ("regressor", set_to("kind_weights", [[1.0]]), "does not describe a model that can be built"),
    "names": ("regressor", set_to("feature_names", ["a"]), "the model has 2 features and 1 names"),
    "no array": ("regressor", lambda arrays, _: arrays.pop(FIRST), f"{FIRST!r} is missing"),
    "no features": ("regressor", lambda arrays, _: arrays.pop("scaling.center"), "'scaling.center' is missing"),
    "an array more": ("regressor", lambda arrays, _: arrays.update(more=torch.ones(1)), "'more' has no place in it"),
    "NaN": ("regressor", array(FIRST, lambda t: t * torch.nan), "holds numbers that are not finite"),
    "shape": ("regressor", array(FIRST, lambda t: t.mT[:, :1]), "has the shape (2, 1, 2), not (2, 2, 2)"),
    "whole numbers": ("regressor", array("weights", lambda t: t.long()), "is of torch.int64, not of floating-point"),
    "rate of one": ("regressor", array("stacks.0.buffer_0", lambda t: t + 1), "a dropout rate is not in [0, 1)"),
    "weights": ("regressor", array("weights", lambda t: 2 * t), "the networks' weights are not shares of one"),
    "scale": ("regressor", array("target_scale", lambda t: -t), "target_scale is not positive"),
    "scores": ("regressor", array("calibration_scores", lambda t: t[None]), "has the shape (1, 40)"),
    "NaN scores": ("regressor", array("calibration_scores", lambda t: t * torch.nan), "are not finite"),
    "table": ("table", set_to("table", 3), "the table must be fields, got 3"),
    "target": ("table", in_table(lambda table: table.pop("target")), "the table lacks 'target'"),
    "encoder": ("table", in_table(lambda table: table.update(encoder={})), "the encoder lacks 'columns'"),
    "missing": (
        "table",
        in_table(lambda table: table["encoder"].update(missing="guess")),
        "'missing' of the encoder must be 'impute' or 'error', got 'guess'",
    ),
    "median": ("table", in_column(0, median=float("nan")), "'median' of a column must be a finite number, got nan"),
    "kind": ("table", in_column(0, kind="date"), "the kind of a column must be 'numeric' or 'categorical', got"),
    "column's field": ("table", in_column(0, eval="x"), "a column has 'eval', which this version does not know"),
    "lowest": ("table", in_column(0, lowest=None), "'lowest' of a column must be a finite number, got None"),
    "categories": ("table", in_column(1, categories=["Oslo"]), "its columns give 7 features, its networks take 9"),
    "category": ("table", in_column(1, categories=["Oslo", 1, None]), "'categories' of a column must be a text, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_forged_descriptions_are_refused(case: str, tmp_path: Path) -> None:
    name, change, message = FORGED[case]
    forged(tmp_path / "forged", name, change)
    tracemalloc.start()
    with pytest.raises(mp.DataError) as caught:
        mp.load(tmp_path / "forged")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'forged'} does not describe a model that can be built: ")
    assert most < 50e6


def test_the_correction_of_the_noise_is_kept(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = mp.MPGELURegressor((4,), steps=20, random_state=0).fit(X, X[:, 0])
    assert model.ensemble_.noise is not None
    deviations = {}
    for by_row in (True, False):
        model.ensemble_.noise.by_row = by_row
        model.save(tmp_path / "model")
        _, deviations[by_row] = mp.load(tmp_path / "model").predict(X, return_std=True)
        with torch.no_grad():
            np.testing.assert_allclose(deviations[by_row], model.ensemble_(torch.tensor(X)).stddev, rtol=1e-4)
    assert (deviations[False] > deviations[True]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_other_types_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    forged(tmp_path / "forged", "regressor", array("weights", lambda t: t.to(dtype)))
    with pytest.raises(mp.DataError, match=f"'weights' is of {dtype}, which no model holds; save it again"):
        mp.load(tmp_path / "forged")


def test_a_description_without_changes_loads(tmp_path: Path) -> None:
    for name in OLD:
        forged(tmp_path / name, name, lambda *_: None)
        assert isinstance(mp.load(tmp_path / name), (TableModel, mp.MPGELURegressor))
