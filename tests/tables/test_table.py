"""Reading tables, turning columns into numbers, writing tables whole."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mpgelu.errors import DataError, InputError
from mpgelu.storage.files import check_writable
from mpgelu.tables import CellError, Sink, Source, TableEncoder
from mpgelu.tables.cells import Cells


def table(**columns: Any) -> pd.DataFrame:
    """Cells of text, as a CSV file has them."""
    return pd.DataFrame({name: [str(cell) for cell in cells] for name, cells in columns.items()}, dtype="str")


def saved(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# reading


def test_cells_stay_the_text_they_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.csv", "\ufeffid,city, note\n007,Paris\n\n1e3,NA, 'a'\n")
    frame = Source(path).read()
    assert frame.columns.tolist() == ["id", "city", "note"]
    assert frame.to_numpy().tolist() == [["007", "Paris", ""], ["1e3", "NA", "'a'"]]
    assert frame.index.tolist() == [0, 1]


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_parts_are_the_whole(rows: int, tmp_path: Path) -> None:
    whole = pd.DataFrame({"a": np.arange(11), "b": list("abcdefghijk")})
    whole.to_csv(tmp_path / "t.csv", index=False)
    whole.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        source = Source(tmp_path / name)
        parts = list(source.frames(rows))
        assert max(map(len, parts)) <= rows
        joined = pd.concat(parts)
        assert joined.index.tolist() == list(range(11))
        assert joined.astype("str").to_numpy().tolist() == whole.astype("str").to_numpy().tolist()
        assert source.fraction_read == 1


def test_what_a_file_is_does_not_depend_on_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame({"a": [1.5, 2], "b": ["x", "y"]})
    frame.to_parquet(tmp_path / "p")
    for content in ((tmp_path / "p").read_bytes(), b"a,b\n1.5,x\n2.0,y\n", gzip.compress(b"a,b\n1.5,x\n2.0,y\n")):
        path = saved(tmp_path / "data.txt", content)
        assert Source(path).read().astype("str").to_numpy().tolist() == [["1.5", "x"], ["2.0", "y"]]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
        assert len(Source("-").read()) == 2


def test_an_index_that_pandas_kept_in_parquet_is_not_a_column(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2]}, index=[5, 7]).to_parquet(tmp_path / "t.parquet")
    assert Source(tmp_path / "t.parquet").read().columns.tolist() == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.csv is empty"),
        ("\n\n", "t.csv is empty"),
        ("a,b\n", "t.csv has no rows below its header"),
        ("a;b\n1;2\n", "t.csv has one column, 'a;b'; its delimiter looks like ';': give `delimiter` ';'"),
        ("a\tb\n1\t2\n", "its delimiter looks like 'tab': give `delimiter` 'tab'"),
        (
            "a,b\n1,2\n1,2,3\n",
            "t.csv, line 3: 3 cells, but the first line has 2; put cells that contain ',' in double quotes",
        ),
        ("a,b\n1,2,3\n", "t.csv, line 2: 3 cells, but the first line has 2"),
        ("a,a\n1,2\n", "has more than one column 'a'"),
        (",b\n1,2\n", "column 1 has no name in the first line"),
        ("1.5,2\n1,2\n", "begins with numbers, .* add a first line"),
        (b"a,b\n\xff\xfe,2\n", "neither Parquet nor text in UTF-8"),
        (
            "a,b\n1,2\n".encode("utf-16"),
            "t.csv is text in UTF-16; convert it, for example with iconv -f utf-16 -t utf-8",
        ),
        (b"PK\x03\x04more", "is a zip or spreadsheet file"),
        (b"PAR1more", "cannot read .*t.csv: "),
        ('a,b\n"1,2\n', "t.csv: a cell that begins with a double quote, about line 2, has no end; close the quote"),
        (b"\x1f\x8bmore", "cannot read .*t.csv: "),
    ],
    ids=range(16),
)
def test_what_is_not_a_table_is_named(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Source(saved(tmp_path / "t.csv", content)).read()
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        Source(tmp_path / "nowhere.csv").read()
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
        Source(tmp_path).read()


# what a column is


@pytest.mark.parametrize(
    "cells",
    [
        ["2024-01-05", "2023-12-31"],
        ["2024-01-05 10:30", "2023-12-31T01:02:03Z"],
        ["05/01/2024", "31.12.2023"],
        ["5 Jan 2024", "31-Dec-23"],
        ["January 5, 2024", "Dec 31 2023"],
        ["10:30", "11:45:00"],
    ],
)
def test_dates_are_refused_with_advice(cells: list[str]) -> None:
    with pytest.raises(CellError, match=r"column 'when': holds dates or times such as .*weekday.*`drop` 'when'"):
        TableEncoder.learn(table(a=range(20), when=cells * 10))
    assert TableEncoder.learn(table(a=range(20), when=cells * 10), drop=["when"]).features == ["a"]
    _, when = TableEncoder.learn(table(a=range(20), when=cells * 10), categorical=["when"]).columns
    assert when.summary == "2 categories"


def test_dates_of_parquet_are_refused(tmp_path: Path) -> None:
    days = pd.date_range("2024-01-01", periods=10)
    pd.DataFrame({"a": range(10), "when": days, "day": days.date}).to_parquet(tmp_path / "t.parquet")
    frame = Source(tmp_path / "t.parquet").read()
    for name in ("when", "day"):
        with pytest.raises(CellError, match=f"column '{name}': holds dates"):
            TableEncoder.learn(frame[["a", name]])


@pytest.mark.parametrize("cells", [["1-2", "3-4"], ["v1.2", "v3"], ["12 Main Street", "8 Mill Road"], ["May", "June"]])
def test_words_that_look_a_little_like_dates_are_categories(cells: list[str]) -> None:
    assert TableEncoder.learn(table(a=range(20), word=cells * 10)).columns[1].summary == "2 categories"


def test_braces_in_the_name_of_a_column() -> None:
    with pytest.raises(CellError, match=r"'b' is not a number.* give `categorical` '\{price\}' if these are names"):
        TableEncoder.learn(table(**{"{price}": ["1", "b", "3", "4", "5"]}))


def test_words_among_numbers_are_refused_by_row() -> None:
    with pytest.raises(CellError, match=r"column 'a', row 3: 'twelve' is not a number.*`categorical` 'a'"):
        TableEncoder.learn(table(a=["1", "2", "twelve", "4", "5"]))
    with pytest.raises(CellError, match=r"column 'a', row 1: '1,5' has a comma"):
        TableEncoder.learn(table(a=["1,5", "2,5", "3", "4,5"]))
    with pytest.raises(CellError, match=r"column 'a', row 2: '-inf' is infinite or too large"):
        TableEncoder.learn(table(a=["1", "-inf", "3"]))
    assert TableEncoder.learn(table(a=["1", "2", "3+"] * 3), categorical=["a"]).features == ["a = 1", "a = 2", "a = 3+"]


def test_columns_that_say_nothing_are_left_out_with_a_reason() -> None:
    encoder = TableEncoder.learn(
        table(
            a=range(10),
            same=["x"] * 10,
            empty=["", "NA"] * 5,
            again=[f"{i}.0" for i in range(10)],
            name=[f"row {i}" for i in range(10)],
            kind=["u", "v"] * 5,
            kind_again=["u", "v"] * 5,
        )
    )
    assert [column.name for column in encoder.columns] == ["a", "kind"]
    assert encoder.dropped == {
        "same": "is 'x' in every row",
        "empty": "is empty",
        "again": "is a copy of 'a'",
        "name": "hardly a text in it occurs twice, as in a column of names or numbers of the rows",
        "kind_again": "is a copy of 'kind'",
    }


def test_a_column_that_is_constant_or_missing_is_kept() -> None:
    assert TableEncoder.learn(table(a=["5", ""] * 5)).features == ["a", "a missing"]
    assert TableEncoder.learn(table(a=["x", ""] * 5)).features == ["a = x", "a missing"]


# encoding


def test_missing_numbers_become_the_median_and_are_marked() -> None:
    encoder = TableEncoder.learn(table(a=["1", "2", "9", "NA", "?", ""], b=["1", "2", "3", "4", "", "5"]))
    encoded = encoder.encode(table(b=["", "7"], a=["nan", " 4 "]))
    assert encoder.features == ["a", "a missing", "b"]  # one gap is too little to learn from
    assert encoded.X.tolist() == [[2, 1, 3], [4, 0, 7]]
    assert (encoded.filled, encoded.unseen) == ({"b": 1}, {})


def test_categories_beyond_the_most_frequent_are_others() -> None:
    often = [f"c{i:02}" for i in range(60) for _ in range(3 + (i < 50))]
    encoder = TableEncoder.learn(table(c=[*often, "rare"]))
    assert encoder.features == [*(f"c = c{i:02}" for i in range(50)), "c other"]
    encoded = encoder.encode(table(c=["c07", "c55", "rare", "new"]))
    assert encoded.X.argmax(1).tolist() == [7, 50, 50, 50]
    assert encoded.X.sum(1).tolist() == [1, 1, 1, 1]
    assert encoded.unseen == {"c": 1}  # rare ones were seen


def test_too_many_rare_categories_to_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpgelu.tables.columns._MOST_REMEMBERED", 2)
    encoder = TableEncoder.learn(table(c=["x", "x", "x", "rare", "odd"]))
    assert not encoder.encode(table(c=["new"])).unseen


def test_numbers_far_outside_the_training_range_are_counted() -> None:
    encoder = TableEncoder.learn(table(a=["10", "20", "15"], b=["1", "2", "3"]))
    encoded = encoder.encode(table(a=["0", "-1", "30", "31", ""], b=["2"] * 5))
    assert encoded.far == {"a": 2}


@pytest.mark.parametrize(
    ("values", "is_hinted"),
    [
        (range(1000, 1120), True),
        (range(1000, 1360, 3), False),  # its range is much longer than the table
        (range(99), False),  # too few to tell
        ([*range(119), 118], False),
        ([*range(119), 0.5], False),
    ],
)
def test_numbers_of_the_rows_are_hinted_at(values: Any, is_hinted: bool) -> None:
    (column,) = TableEncoder.learn(table(id=[str(value) for value in values])).columns
    assert ("a number of the row? then drop it" in column.summary) == is_hinted


def test_dates_written_as_numbers_are_dates() -> None:
    days = pd.date_range("2022-01-28", periods=40).strftime("%Y%m%d")
    with pytest.raises(CellError, match="column 'day': holds dates or times such as '20220128'; turn them into"):
        TableEncoder.learn(table(day=days))
    assert TableEncoder.learn(table(day=[*days, "20220232"])).features == ["day"]  # no date


def test_encoders_of_earlier_versions() -> None:
    encoder = TableEncoder.learn(table(a=["1", "2", "3"], c=["x", "x", "x"], d=["u", "v", ""]))
    about = encoder.described()
    for column in about["columns"]:
        for name in ("lowest", "highest", "counts", "rare"):
            column.pop(name, None)
    earlier = TableEncoder.from_description(about)
    encoded = earlier.encode(table(a=["1e9"], c=["z"], d=["u"]))
    assert (encoded.far, encoded.X[0, 0]) == ({}, 1e9)


def test_unseen_categories_are_counted_and_are_none_of_the_known() -> None:
    encoder = TableEncoder.learn(table(c=["x", "y", "x"] * 3, d=["u", "v", ""] * 3))
    encoded = encoder.encode(table(c=["y", "z", "", "z"], d=["", "w", "u", "v"]))
    assert encoder.features == ["c = x", "c = y", "d = u", "d = v", "d missing"]
    assert encoded.X.tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert (encoded.unseen, encoded.filled) == ({"c": 2, "d": 1}, {"c": 1})


def test_csv_and_parquet_encode_the_same(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"n": [1.5, None, 3, 4] * 3, "i": range(12), "c": ["a", "b", None, "b"] * 3, "t": [True, False] * 6}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    encoders = [TableEncoder.learn(Source(tmp_path / name).read()) for name in ("t.csv", "t.parquet")]
    assert encoders[0] == encoders[1]
    matrices = [encoders[0].encode(Source(tmp_path / name).read()).X for name in ("t.csv", "t.parquet")]
    np.testing.assert_array_equal(matrices[0], matrices[1])
    np.testing.assert_array_equal(encoders[0].encode(frame).X, matrices[0])


def test_missing_cells_can_be_refused() -> None:
    with pytest.raises(CellError, match="column 'a', row 2: missing value; fill it in"):
        TableEncoder.learn(table(a=["1", "", "3"]), missing="error")
    encoder = TableEncoder.learn(table(a=["1", "2", "3"]), missing="error")
    with pytest.raises(CellError, match="column 'a', row 1: missing value"):
        encoder.encode(table(a=["?"]))
    with pytest.raises(InputError, match="`missing`: must be 'impute' or 'error', got 'nonsense'"):
        TableEncoder.learn(table(a=["1", "2", "3"]), missing="nonsense")  # type: ignore[arg-type]


def test_columns_that_lack_are_named_and_others_ignored() -> None:
    encoder = TableEncoder.learn(table(area=range(5), rooms=range(5, 10), same=["x"] * 5))
    assert encoder.encode(table(more=["?"], rooms=["1"], area=["2"])).X.tolist() == [[2, 1]]
    with pytest.raises(DataError, match="needs the column 'area', which this table lacks; did you mean 'Area'"):
        encoder.encode(table(Area=["1"], rooms=["1"]))
    with pytest.raises(DataError, match="needs the columns 'area', 'rooms', which"):
        encoder.encode(table(x=["1"]))


def test_a_word_in_a_column_of_numbers_is_named() -> None:
    encoder = TableEncoder.learn(table(a=range(5)))
    frame = table(a=["1", "many"]).set_axis([100, 101])
    with pytest.raises(CellError, match="column 'a', row 102: 'many' is not a number"):
        encoder.encode(frame)


def test_a_description_gives_the_same_encoder() -> None:
    encoder = TableEncoder.learn(
        table(a=["1", "2", "", "", "", "5"], c=["x", "y"] * 3, same=["1"] * 6), missing="impute"
    )
    assert TableEncoder.from_description(encoder.described()) == encoder


def test_numbers_keep_their_digits() -> None:
    values = ["0.1", "123456789.123456789", "1e-300", "-0"]
    assert Cells.of(table(a=values)["a"]).numbers().tolist() == [float(value) for value in values]


# writing


@pytest.mark.parametrize("name", ["o.csv", "o.parquet"])
def test_parts_are_written_as_one_table(name: str, tmp_path: Path) -> None:
    with Sink(tmp_path / "new" / name).opened() as sink:
        for start in (0, 2):
            sink.write(pd.DataFrame({"id": [f"0{start}", "x"], "mean": [start / 3, 1e9 + 0.5]}))
            assert not (tmp_path / "new" / name).exists()
    frame = Source(tmp_path / "new" / name).read()
    assert frame["id"].tolist() == ["00", "x", "02", "x"]
    np.testing.assert_allclose(frame["mean"].astype(float), [0, 1e9 + 0.5, 2 / 3, 1e9 + 0.5], rtol=1e-7)
    assert names(tmp_path / "new") == [name]


@pytest.mark.parametrize("name", ["o.csv", "o.parquet"])
def test_an_error_leaves_the_old_file_and_no_other(name: str, tmp_path: Path) -> None:
    saved(tmp_path / name, "old")

    def fail() -> None:
        with Sink(tmp_path / name).opened() as sink:
            sink.write(pd.DataFrame({"a": [1]}))
            raise DataError("stop")

    with pytest.raises(DataError, match="stop"):
        fail()
    assert names(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "old"


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    saved(tmp_path / "file", "")
    for path, message in ((tmp_path, "it is a folder"), (tmp_path / "file" / "o.csv", "cannot write .*o.csv")):
        with pytest.raises(DataError, match=message):
            check_writable(path)


def test_sinks_that_are_devices_or_links(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    for path in (Path("/dev/null"), tmp_path / "link.csv"):
        with Sink(path).opened() as sink:
            sink.write(table(a=["1"]))
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "a\n1\n"


@pytest.mark.parametrize(
    ("content", "delimiter", "place"),
    [
        ('y;t\n1;"u\nv"\n2;w\n\n3;x\nbad;z\n', ";", "line 7"),
        ('y, t\n1, "u\nv"\n2, w\n3, x\nbad, 3\n', ",", "line 6"),
        ("y,t\n1," + 200_000 * "a" + "\n2,w\n3,x\nbad,z\n", ",", "row 4"),  # more than the csv module reads
        ('y\n""\n1\n2\n3\nbad\n', ",", "row 5"),
        (gzip.compress(b"y,t\n1,u\n2,w\n3,x\nbad,z\n"), ",", "row 4"),
    ],
    ids=["another delimiter", "blanks", "a large cell", "an empty cell", "gzip"],
)
def test_a_cell_is_located(content: str | bytes, delimiter: str, place: str, tmp_path: Path) -> None:
    source = Source(saved(tmp_path / "a.csv", content), delimiter)
    with pytest.raises(DataError, match=f", column 'y', {place}: 'bad' is not a number"), source.located():
        Cells.of(source.read()["y"]).numbers()


def test_a_cell_of_parquet_under_another_name_is_located(tmp_path: Path) -> None:
    table(y=["1", "bad"]).to_parquet(tmp_path / "a.csv")
    source = Source(tmp_path / "a.csv")
    with pytest.raises(DataError, match=", row 2: 'bad' is not a number"), source.located():
        Cells.of(source.read()["y"]).numbers()


def test_a_gzip_file_that_is_damaged(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"a,b\n" + b"1,2\n" * 1000))
    content[30:40] = b"x" * 10
    (tmp_path / "t.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*csv\.gz"):
        Source(tmp_path / "t.csv.gz").read()
