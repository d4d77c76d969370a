"""A model of a table, from columns to distributions, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mpgelu as mp
from houses import QUICK, houses
from mpgelu.tables.model import OUTPUTS, TableModel
from mpgelu.tables.preparation import split


@pytest.fixture(scope="module")
def model() -> TableModel:
    return TableModel.fit(houses(), "price", **QUICK | {"steps": 400})


def test_the_columns_of_a_prediction(model: TableModel) -> None:
    new = houses(200, seed=1)
    predicted = model.predict(new, level=0.8)
    assert tuple(predicted) == OUTPUTS
    assert predicted.index.equals(new.index)
    np.testing.assert_allclose(
        predicted["stddev"] ** 2, predicted["epistemic_std"] ** 2 + predicted["aleatoric_std"] ** 2
    )
    X = model.encoder.encode(new).X
    mean, stddev = model.regressor.predict(X, return_std=True)
    np.testing.assert_allclose(predicted["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(predicted["stddev"], stddev, rtol=1e-6)
    lower, upper = model.regressor.predict_interval(X, 0.8)
    assert np.abs(predicted["lower"] - lower).max() < 1e-3 * stddev.min()
    assert np.abs(predicted["upper"] - upper).max() < 1e-3 * stddev.min()


def test_it_learns_from_names_and_numbers(model: TableModel) -> None:
    new = houses(500, seed=2)
    actual = new["price"].to_numpy()
    evaluation = model.evaluate(model.encoder.encode(new), actual)
    ours, average = evaluation.scores(), model.average(actual).scores()
    assert ours["r2"] > 0.9
    assert ours["crps"] < 0.5 * average["crps"]
    assert ours["log_likelihood"] > average["log_likelihood"] + 0.5
    assert 0.8 < ours["coverage"] < 0.98
    in_oslo = (new["city"] == "Oslo").to_numpy()
    assert evaluation.aleatoric_std[in_oslo].mean() > 1.3 * evaluation.aleatoric_std[~in_oslo].mean()


def test_columns_and_what_became_of_them(model: TableModel) -> None:
    told = {column.name: column.summary for column in model.encoder.columns}
    assert told == {
        "area": "number",
        "city": "3 categories",
        "year": "number, some missing",
        "garage": "2 categories, some missing",
    }
    assert set(model.encoder.dropped) == {"id", "country"}


def test_a_saved_model_predicts_the_same_bits(model: TableModel, tmp_path: Path) -> None:
    new = houses(50, seed=3)
    model.save(tmp_path / "model")
    loaded = mp.load(tmp_path / "model")
    assert isinstance(loaded, TableModel)
    pd.testing.assert_frame_equal(loaded.predict(new), model.predict(new), check_exact=True)
    assert (loaded.target, loaded.rows, loaded.encoder) == (model.target, model.rows, model.encoder)
    assert TableModel.load(tmp_path / "model").encoder == model.encoder


def test_a_model_of_plain_numbers_is_not_one_of_a_table(model: TableModel, tmp_path: Path) -> None:
    model.regressor.save(tmp_path / "bare")
    with pytest.raises(mp.DataError, match=r"is a model of plain numbers, not of a table; read it with mpgelu.load"):
        TableModel.load(tmp_path / "bare")


def test_calibrated_intervals_hold_what_they_promise(tmp_path: Path) -> None:
    model = TableModel.fit(houses(400), "price", calibrate=0.25, **QUICK | {"steps": 20})  # hardly trained
    assert model.rows == 300
    new = houses(400, seed=4)
    model.save(tmp_path / "model")
    predicted = TableModel.load(tmp_path / "model").predict(new, 0.9)
    inside = (predicted["lower"] <= new["price"]) & (new["price"] <= predicted["upper"])
    assert 0.84 < inside.mean() < 0.97
    lower, _ = model.regressor.predict_interval(model.encoder.encode(new).X, 0.9)
    np.testing.assert_allclose(predicted["lower"], lower, rtol=1e-6)


def test_frames_with_any_names_and_index() -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), index=pd.date_range("2024-01-01", periods=40))
    model = TableModel.fit(frame, "2", **QUICK | {"steps": 5})
    predicted = model.predict(frame)
    assert predicted.index.equals(frame.index)
    assert model.encoder.features == ["0", "1"]


def test_rows_without_a_target_are_left_out() -> None:
    frame = houses(60)
    frame.loc[3:12, "price"] = np.nan
    assert TableModel.fit(frame, "price", **QUICK | {"steps": 5}).rows == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.assign(price=3.0), "the target 'price' is 3 in every row; there is nothing to predict"),
        (lambda t: t.head(1), "1 row with a target; a model needs at least 10"),
        (lambda t: t[["price"]], "no column besides the target 'price'"),
        (lambda t: t[["price", "country"]], "no column is left to predict from: 'country' is 'Norway' in every row"),
        (lambda t: t.rename(columns={"price": "Price"}), "there is no column 'price'; did you mean 'Price'?"),
        (lambda t: t.assign(price="dear"), "column 'price': holds text such as 'dear'; this is regression, which"),
        (lambda t: t.assign(price=[True, False] * 15), "column 'price': holds text such as 'True'; this is regression"),
        (lambda t: t.assign(price="2024-01-31"), "column 'price': holds dates or times such as '2024-01-31'; this is"),
        (
            lambda t: t.assign(price="1,5"),
            "column 'price', row 1: '1,5' has a comma; write decimals with a point, and thousands without a separator",
        ),
        (lambda t: t.assign(price="$5"), "column 'price', row 1: '$5' is a number with a sign of its unit; write the"),
        (lambda t: pd.concat([t, t.area], axis=1), "more than one column is called 'area'; give every column a name"),
        (lambda t: t.assign(price=np.inf), "column 'price', row 1: 'inf' is infinite"),
    ],
    ids=range(12),
)
def test_tables_that_nothing_can_be_learned_from(change: object, message: str) -> None:
    assert callable(change)
    with pytest.raises(mp.DataError) as caught:
        TableModel.fit(change(houses(30)), "price")
    assert message in str(caught.value)


@pytest.mark.parametrize("share", [-0.1, 0.01, 0.99, 1.0, np.nan, np.inf])
def test_shares_that_leave_too_few_rows(share: float) -> None:
    with pytest.raises(mp.InputError, match="`hold_out`: must be a share of the rows"):
        split("hold_out", 100, share, 0)


def test_a_split_takes_every_row_once() -> None:
    held, kept = split("calibrate", 100, 0.3, 5)
    assert len(held) == 30
    assert sorted([*held, *kept]) == list(range(100))


def test_a_level_is_a_probability(model: TableModel) -> None:
    with pytest.raises(mp.InputError, match="level must lie strictly between 0 and 1, got 90"):
        model.predict(houses(3), level=90)


def test_arguments_are_named_as_in_python() -> None:
    with pytest.raises(mp.InputError, match=r"^`drop`: 'price' is the target$"):
        TableModel.fit(houses(30), "price", drop=["price"])
    with pytest.raises(mp.DataError, match="leave the column out with `drop` 'sold'"):
        TableModel.fit(houses(30).assign(sold=pd.date_range("2024-01-31", periods=30)), "price")
    with pytest.raises(mp.InputError, match="a table must be a pandas DataFrame, got dict"):
        TableModel.fit({"price": [1]}, "price")


def test_predictions_are_those_of_the_estimator(model: TableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = mp.MPGELURegressor.distributions

    def distributions(self: mp.MPGELURegressor, *arguments: Any, **settings: Any) -> Any:
        asked.append(settings)
        return real(self, *arguments, **settings)

    monkeypatch.setattr(mp.MPGELURegressor, "distributions", distributions)
    model.predict(houses(3))
    assert asked == [{"nodes": 8, "rows_at_once": 256}]


def test_a_number_far_out_is_predicted_as_not_known(model: TableModel) -> None:
    predicted = model.predict(houses(3).assign(area=[1.0, 1e40, 2.0]))
    assert np.isfinite(predicted.to_numpy()).all()
    assert predicted.epistemic_std[1] > 5 * predicted.aleatoric_std[1]
