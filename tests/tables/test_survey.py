"""One pass over a table finds what looking at all of it at once finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from houses import houses
from mpgelu.tables import survey as module
from mpgelu.tables.cells import CellError, Missing
from mpgelu.tables.encoder import TableEncoder
from mpgelu.tables.sampling import Reservoir, RunningStatistics
from mpgelu.tables.survey import Survey


def encoder_of(frame: pd.DataFrame, size: int = 37, missing: Missing = "impute", **options: Any) -> TableEncoder:
    """By parts of so many rows, with all rows as the sample."""
    given: dict[str, Any] = {"categorical": [], "drop": []} | options
    survey = Survey(list(map(str, frame)), missing=missing, **given)
    for start in range(0, len(frame), size):
        survey.add(frame[start : start + size])
    return TableEncoder(*survey.encodings(frame), missing)


def test_columns_are_what_the_whole_table_says() -> None:
    frame = houses(500).drop(columns="price")
    frame["copy"], frame["again"] = frame["area"], frame["city"]
    frame["number"] = np.arange(500)
    frame["code"] = np.arange(500) % 5
    frame["empty"], frame["rare"] = None, ["x"] * 498 + ["late"] * 2
    frame["text"] = frame["area"].map("{:.0f}".format)
    choices: list[dict[str, Any]] = [{}, {"categorical": ["code"], "drop": ["garage"]}]
    for options in choices:
        found, wanted = encoder_of(frame, **options), TableEncoder.learn(frame, **options)
        assert found.described() == wanted.described()
    assert {column.name: column.summary for column in found.columns}["rare"] == "1 category and others"


def test_a_category_that_comes_late_has_a_feature() -> None:
    frame = pd.DataFrame({"kind": ["a"] * 300 + ["b"] * 300 + ["new"] * 3})
    assert encoder_of(frame).features == ["kind = a", "kind = b", "kind = new"]


def test_texts_beyond_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TEXTS", 50)
    names = [f"name {i}" for i in range(400)]
    assert encoder_of(pd.DataFrame({"n": names, "x": range(400)})).dropped["n"].startswith("hardly a text")
    frequent = pd.DataFrame({"n": [name for pair in zip(names, ["often"] * 400, strict=True) for name in pair]})
    assert encoder_of(frequent).features == ["n = often", "n other"]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([1.0] * 70 + [np.inf], "row 71: 'inf' is infinite or too large"),
        (["1"] * 70 + ["big"], "row 71: 'big' is not a number, as most of this column are"),
        (["1"] * 70 + ["1e999"], "infinite or too large"),
        (["2024-01-31", "2024-02-01"] * 40, "holds dates or times such as '2024-01-31'"),
        ([20240131, 20240201] * 40, "holds dates or times such as '20240131'"),
        (["1,5", "2,5"] * 40, "'1,5' has a comma"),
        (["1,384", "12,000,000.5"] * 40, "'1,384' has a comma; write decimals with a point, and thousands without"),
        (["1.384,5", "2.000,0"] * 40, "'1.384,5' has a comma"),
        (["3%", "12.5 %"] * 40, "'3%' is a number with a sign of its unit; write the number alone, or give `categ"),
        (["$1,384", "-€5.20"] * 40, "row 1: '.1,384' is a number with a sign of its unit"),
    ],
)
def test_what_cannot_be_learned_from(values: list[Any], wrong: str) -> None:
    with pytest.raises(CellError, match=wrong):
        encoder_of(pd.DataFrame({"a": values}))


def test_missing_cells_can_be_refused() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0] * 40 + [np.nan]})
    with pytest.raises(CellError, match="row 81: missing value"):
        encoder_of(frame, missing="error")


def test_statistics_of_parts_are_those_of_all() -> None:
    values = np.random.default_rng(0).normal(1e6, 1e-3, 1000)
    statistics = RunningStatistics()
    for part in np.split(values, [0, 1, 7, 400]):
        statistics.add(part)
    assert (statistics.count, statistics.lowest, statistics.highest) == (1000, values.min(), values.max())
    assert statistics.mean == pytest.approx(values.mean(), rel=1e-14)
    assert statistics.stddev == pytest.approx(values.std(), rel=1e-6)


def test_a_reservoir_is_uniform_and_does_not_depend_on_the_parts() -> None:
    frame = pd.DataFrame({"a": np.arange(10_000)})
    samples = []
    for size in (10_000, 77):
        reservoir = Reservoir(500, seed=3)
        for start in range(0, 10_000, size):
            reservoir.add(frame[start : start + size])
        samples.append(reservoir.frame())
    assert len(samples[0]) == 500
    pd.testing.assert_frame_equal(samples[0], samples[1])
    counts = np.histogram(samples[0]["a"], 10, (0, 10_000))[0]
    assert ((counts - 50) ** 2 / 50).sum() < 27.9  # a thousandth of chance, 9 degrees of freedom


def test_texts_that_were_forgotten_are_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TEXTS", 50)
    frame = pd.DataFrame({"text": ["often"] * 5 + [f"once {place}" for place in range(60)]})
    (column,) = TableEncoder.learn(frame).columns
    assert column.features == ["text = often", "text other"]
    encoded = TableEncoder.learn(frame).encode(pd.DataFrame({"text": ["often", "once 3", "new"]}))
    assert encoded.X.tolist() == [[1, 0], [0, 1], [0, 1]]
    assert not encoded.unseen  # whether a text is new is not known any more
