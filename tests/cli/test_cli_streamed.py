"""The command line on folders of Parquet files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from command_line import Command
from houses import houses
from mpgelu.tables import streaming
from mpgelu.tables.model import TableModel

EFFORT = ("--steps", "40", "--folds", "2", "--hidden", "8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        path = tmp_path / "data" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        frame = houses(700, number)
        frame.loc[:9, "price"] = None
        frame.to_parquet(path, row_group_size=300, index=False)
    houses(40, 7).to_csv("new.csv", index=False)
    return tmp_path


def test_from_a_folder_to_predictions(mpgelu: Command, folder: Path) -> None:
    fitted = mpgelu("fit", "data", "-t", "price", "-o", "m", "--stream", "--hold-out", "0.2", *EFFORT)
    assert fitted.code == 0, fitted.err
    assert "data: 1,400 rows, 7 columns, streamed" in fitted.out
    assert "city     3 categories" in fitted.out
    assert "rows kept from training:" in fitted.out
    assert "20 rows without 'price' are left out" in fitted.err
    assert 1000 < TableModel.load("m").rows < 1200
    done = mpgelu("predict", "m", "data", "-o", "out.parquet", "--keep", "id")
    assert done.out.endswith("1,400 rows: out.parquet\n")
    assert len(pd.read_parquet("out.parquet")) == 1400
    scored = mpgelu("evaluate", "m", "data")
    assert "data: 1,380 rows, target price" in scored.out


def test_large_files_are_streamed_unless_told_otherwise(
    mpgelu: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MOST_ROWS_IN_MEMORY", 600)
    for source, more, streamed in (
        ("data", (), True),
        ("data/0.parquet", (), False),
        ("data", ("--no-stream",), False),
    ):
        fitted = mpgelu("fit", source, "-t", "price", "-o", "m", *more, *EFFORT)
        if source.endswith("parquet"):
            assert "690 rows are too few for a stream" in fitted.err
            continue
        assert (fitted.code, "streamed (see --no-stream)" in fitted.out) == (0, streamed)


def test_what_cannot_be_streamed(mpgelu: Command, folder: Path) -> None:
    asked = mpgelu("fit", "new.csv", "-t", "price", "-o", "m", "--stream")
    assert asked.code == 2
    assert "--stream: new.csv is not a Parquet file or a folder of them; a CSV file can be converted" in asked.err
    (folder / "none").mkdir()
    asked = mpgelu("fit", "none", "-t", "price", "-o", "m")
    assert (asked.code, asked.err) == (
        2,
        "error: none holds no Parquet file (name.parquet); write the table there as Parquet\n",
    )
    houses(50).drop(columns="city").to_parquet("data/2.parquet", index=False)
    asked = mpgelu("fit", "data", "-t", "price", "-o", "m")
    assert "error: data/2.parquet lacks the column 'city', which data/0.parquet has" in asked.err
