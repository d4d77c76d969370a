"""Models of tables that are streamed from Parquet files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest

import mpgelu as mp
from houses import houses
from mpgelu.errors import DataError, InputError
from mpgelu.tables import streaming
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.encoder import TableEncoder
from mpgelu.tables.model import TableModel
from mpgelu.tables.streaming import is_streamed, part_of, surveyed

QUICK: dict[str, Any] = {"steps": 60, "folds": 2, "sigma": None, "hidden": (8,), "diverse": False, "random_state": 0}
QUICK |= {"noise": "homoscedastic"}  # whose head need not be trained
COLUMNS: dict[str, Any] = {"missing": "impute", "categorical": [], "drop": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    for number in range(3):
        frame = houses(500, number)
        frame.loc[::50, "price"] = None
        frame.to_parquet(folder / f"{number}.parquet", row_group_size=200, index=False)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> pd.DataFrame:
    return Dataset(folder).read()


@pytest.fixture(scope="module")
def model(folder: Path) -> TableModel:
    return TableModel.fit(folder, "price", stream=True, **QUICK | {"steps": 200})


def test_it_learns_from_all_files(model: TableModel, whole: pd.DataFrame) -> None:
    known = whole.dropna(subset="price")
    assert model.rows == len(known) == 1470
    new = houses(400, seed=9)
    scores = model.evaluate(model.encoder.encode(new), new["price"].to_numpy()).scores()
    assert scores["r2"] > 0.9
    assert 0.8 < scores["coverage"] < 0.98
    assert model.encoder.described() == TableEncoder.learn(known.drop(columns="price")).described()


def test_small_files_are_read_and_give_the_bits_of_a_data_frame(folder: Path, whole: pd.DataFrame) -> None:
    wanted = TableModel.fit(whole, "price", **QUICK).predict(whole[:20])
    for source in (folder, ds.dataset(folder)):
        pd.testing.assert_frame_equal(TableModel.fit(source, "price", **QUICK).predict(whole[:20]), wanted)


def test_what_is_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Dataset(folder)
    assert [is_streamed(table, stream) for stream in (None, True, False)] == [False, True, False]
    for name, most in (("MOST_ROWS_IN_MEMORY", 1499), ("MOST_CELLS_IN_MEMORY", 1500 * 7 - 1)):
        with monkeypatch.context() as patched:
            patched.setattr(streaming, name, most)
            assert is_streamed(table, None)
            patched.setattr(streaming, name, most + 1)
            assert not is_streamed(table, None)


def test_predictions_come_in_parts(model: TableModel, folder: Path, whole: pd.DataFrame) -> None:
    parts = list(model.predict(folder, level=0.8))
    assert len(parts) > 3
    pd.testing.assert_frame_equal(pd.concat(parts), model.predict(whole, level=0.8))
    with pytest.raises(DataError, match="no file or folder"):
        model.predict("nowhere")


def test_it_is_saved_and_calibrated(folder: Path, tmp_path: Path, whole: pd.DataFrame) -> None:
    model = TableModel.fit(os.fspath(folder), "price", stream=True, calibrate=0.3, **QUICK)
    scores = model.regressor.calibration_scores_
    assert scores is not None
    assert model.rows + len(scores) == 1470
    assert 0.25 < len(scores) / 1470 < 0.35
    model.save(tmp_path / "m")
    pd.testing.assert_frame_equal(mp.load(tmp_path / "m").predict(whole[:9]), model.predict(whole[:9]))


def test_a_survey_of_the_rows(folder: Path, whole: pd.DataFrame) -> None:
    found = surveyed(Dataset(folder), "price", **COLUMNS, hold_out=0.2, calibrate=0.25, seed=5)
    part = part_of(whole.index.to_numpy(), found.parts, 5)
    known = whole["price"].notna().to_numpy()
    for number, sample in enumerate(found.samples):
        assert sample.numbers.tolist() == np.flatnonzero((part == number) & known).tolist()
    y = whole["price"].to_numpy(dtype=float)[(part == 2) & known]
    assert found.rows == len(y)
    assert found.unknown == 30
    np.testing.assert_allclose(found.target, (y.mean(), y.std()))
    X = found.encoder.encode(whole[known & (part > 0)]).X
    np.testing.assert_array_equal(found.range, (X.min(0), X.max(0)))


def test_blocks_have_every_row_to_train_on_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_MOST_BLOCK", 300)
    monkeypatch.setattr(streaming, "_ROWS_AT_ONCE", 64)
    found = surveyed(Dataset(folder), "price", **COLUMNS, hold_out=0.2, seed=5)
    blocks = list(found.blocks(0))
    assert len(blocks) > 2
    numbers = np.concatenate([block.numbers for block in blocks])
    assert sorted(numbers) == sorted(found.sample.numbers)
    order = np.argsort(numbers)
    np.testing.assert_array_equal(np.concatenate([block.y for block in blocks])[order], found.sample.y)
    np.testing.assert_array_equal(np.concatenate([block.X for block in blocks])[order], found.sample.X)
    first = blocks[0].numbers
    assert np.abs(np.corrcoef(np.arange(len(first)), first)[0, 1]) < 0.3  # shuffled
    assert (first != next(found.blocks(1)).numbers[: len(first)]).any()


def test_a_sample_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_MOST_SAMPLED", 100)
    assert len(surveyed(Dataset(folder), "price", **COLUMNS).sample.y) == 100


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"price": "cheap"}, r"2\.parquet: the column 'price' is of type .*string"),
        ({"price": np.inf}, r"2\.parquet, column 'price', row 1: 'inf' is infinite"),
        ({"area": np.inf}, r"2\.parquet, column 'area', row 2: 'inf' is infinite"),
    ],
)
def test_what_is_wrong_names_the_file(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    for number in range(3):
        frame = houses(500, number)
        frame = frame.assign(**change) if number == 2 else frame
        if "area" in change:
            frame.loc[0, "price"] = None  # a row that is left out may hold anything
        frame.to_parquet(tmp_path / f"{number}.parquet", index=False)
    with pytest.raises(DataError, match=wrong):
        TableModel.fit(tmp_path, "price", stream=True, **QUICK)


def test_targets_that_cannot_be_predicted(tmp_path: Path) -> None:
    frame = houses(50)
    for target, wrong in (
        ("city", r"column 'city': holds text such as"),
        ("rooms", "there is no column 'rooms'"),
        ("country", "holds text such as 'Norway'"),
    ):
        frame.to_parquet(tmp_path / "t.parquet", index=False)
        with pytest.raises(DataError, match=wrong):
            TableModel.fit(tmp_path, target, stream=True, **QUICK)
    for values, wrong in ((None, "no row has a target"), (3.0, "the target 'price' is 3 in every row")):
        frame.assign(price=pd.Series([values] * 50, dtype=float)).to_parquet(tmp_path / "t.parquet", index=False)
        with pytest.raises(DataError, match=wrong):
            TableModel.fit(tmp_path, "price", stream=True, **QUICK)
    frame[["price", "country"]].to_parquet(tmp_path / "t.parquet", index=False)
    with pytest.raises(DataError, match=r"no column is left to predict from: 'country' is 'Norway' in every row"):
        TableModel.fit(tmp_path, "price", stream=True, **QUICK)
    with pytest.raises(InputError, match="`calibrate`: must be a share"):
        TableModel.fit(tmp_path, "price", stream=True, calibrate=1.5, **QUICK)


def test_an_index_that_pandas_kept_in_parquet_is_not_a_column(tmp_path: Path) -> None:
    frame = houses(300)
    frame.sample(150, random_state=0).to_parquet(tmp_path / "a.parquet")  # with a column of the index
    frame[:150].to_parquet(tmp_path / "b.parquet", index=False)
    table = Dataset(tmp_path)
    assert table.cells == frame.size
    assert list(table.read()) == list(frame)
    assert set(surveyed(table, "price", **COLUMNS).encoder.features) == set(
        TableEncoder.learn(table.read().drop(columns="price")).features
    )


def test_an_unknown_treatment_of_missing_cells(folder: Path) -> None:
    with pytest.raises(InputError, match=r"`missing`: must be 'impute' or 'error', got 'drop'"):
        TableModel.fit(folder, "price", stream=True, missing="drop", **QUICK)  # type: ignore[arg-type]


def test_a_data_frame_is_not_streamed() -> None:
    with pytest.raises(InputError, match="a data frame is in memory already"):
        TableModel.fit(houses(50), "price", stream=True, **QUICK)
