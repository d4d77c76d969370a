"""Reading Parquet files, folders and datasets of Arrow, in order and shuffled; what is wrong names the file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from houses import houses
from mpgelu.errors import DataError, InputError
from mpgelu.tables.cells import CellError
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.sink import Sink
from mpgelu.tables.source import Source


def write(frame: pd.DataFrame, path: Path, rows: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path, row_group_size=rows, index=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write(houses(100, number), tmp_path / "data" / f"{number}.parquet")
    return tmp_path / "data"


def test_a_folder_is_its_files_in_order(folder: Path) -> None:
    table = Dataset(folder)
    whole = pd.concat([pd.read_parquet(path) for path in sorted(folder.iterdir())], ignore_index=True)
    assert (table.rows, table.cells, len(table.groups)) == (300, 300 * 7, 9)
    read = table.read()
    assert list(read.index) == list(range(300))
    assert table.fraction_read == 1
    for name in whole:
        assert read[name].astype("str").tolist() == whole[name].astype(read[name].dtype).astype("str").tolist()


def test_a_file_a_dataset_and_a_table_in_memory_are_the_same(folder: Path) -> None:
    wanted = Dataset(folder / "0.parquet").read()
    for other in (
        str(folder / "0.parquet"),
        ds.dataset(folder / "0.parquet"),
        ds.dataset(pq.read_table(folder / "0.parquet")),
    ):
        pd.testing.assert_frame_equal(Dataset(other).read(), wanted)


def test_shuffled_has_every_row_once_with_its_number(folder: Path) -> None:
    table = Dataset(folder)
    whole = table.read()
    parts = list(table.shuffled(np.random.default_rng(0), 16))
    found = pd.concat(parts)
    assert not found.index.is_monotonic_increasing
    pd.testing.assert_frame_equal(found.sort_index(), whole)
    again = pd.concat(list(table.shuffled(np.random.default_rng(0), 16)))
    other = pd.concat(list(table.shuffled(np.random.default_rng(1), 16)))
    assert (again.index == found.index).all()
    assert (other.index != found.index).any()


def test_row_groups_are_read_in_turns(folder: Path) -> None:
    """A file that is sorted must not pass by in its order: parts of one row group are spread."""
    order = [int(part.index[0]) // 40 for part in Dataset(folder).shuffled(np.random.default_rng(0), 10)]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes > 15  # 8 if row groups came one after the other


def test_numbers_of_other_types_and_columns_of_folders(tmp_path: Path) -> None:
    write(pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}), tmp_path / "d" / "year=2023" / "x.parquet")
    write(pd.DataFrame({"b": [2, 3], "a": [None, 2.5]}), tmp_path / "d" / "year=2024" / "y.parquet")
    frame = Dataset(tmp_path / "d").read()
    assert frame["a"].tolist()[:2] == [1, 2]
    assert (pd.isna(frame["a"].iloc[2]), frame["a"].iloc[3]) == (True, 2.5)
    assert frame["year"].tolist() == [2023, 2023, 2024, 2024]


def test_what_is_wrong_names_the_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file or folder .*nowhere"):
        Dataset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"empty holds no Parquet file \(name.parquet\)"):
        Dataset(tmp_path / "empty")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"t\.csv is not a Parquet file"):
        Dataset(tmp_path / "t.csv")
    write(houses(0), tmp_path / "none" / "a.parquet")
    with pytest.raises(DataError, match="none has no rows"):
        Dataset(tmp_path / "none")
    with pytest.raises(InputError, match=r"with a filter .*write_dataset"):
        Dataset(ds.dataset(folder).filter(ds.field("area") > 100))


def test_files_that_differ(folder: Path) -> None:
    write(houses(100).drop(columns="city"), folder / "3.parquet")
    with pytest.raises(DataError, match=r"3.parquet lacks the column 'city', which .*0.parquet has"):
        Dataset(folder)
    write(houses(100).assign(more=1), folder / "3.parquet")
    with pytest.raises(DataError, match=r"0.parquet lacks the column 'more', which .*3.parquet has"):
        Dataset(folder)
    write(houses(100).assign(area="large"), folder / "3.parquet")
    with pytest.raises(
        DataError, match=r"3.parquet: the column 'area' is of type .*string, and in .*0.parquet of double"
    ):
        Dataset(folder)


@pytest.mark.parametrize("where", ["footer", "page"])
def test_a_damaged_file_in_the_middle(folder: Path, where: str) -> None:
    path = folder / "1.parquet"
    content = bytearray(path.read_bytes())
    if where == "footer":
        path.write_bytes(content[:-30])
    else:
        content[4:400] = b"\xff" * 396
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*1\.parquet"):
        Dataset(folder).read()


@pytest.mark.parametrize("kind", ["folder", "file", "dataset", "frame"])
def test_zeros_in_a_page_do_not_pass_for_numbers(tmp_path: Path, kind: str) -> None:
    frame = pd.DataFrame({"a": np.arange(1.0, 1001.0), "b": 1.0})
    path = tmp_path / "t.parquet"
    table = pa.Table.from_pandas(frame, preserve_index=False)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    zero_numbers(path)
    source = ds.dataset(path) if kind == "dataset" else tmp_path if kind == "folder" else path
    with pytest.raises(DataError, match=r"^cannot read .*t\.parquet: [^\n]*CRC[^\n]*$"):
        (Source(path) if kind == "frame" else Dataset(source)).read()


def test_predictions_in_parquet_are_checked_when_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with Sink(path).opened() as sink:
        sink.write(pd.DataFrame({"a": np.arange(1.0, 1001.0)}))
    zero_numbers(path)
    with pytest.raises(DataError, match=r"cannot read .*t\.parquet: .*CRC"):
        Source(path).read()


def zero_numbers(path: Path) -> None:
    """Overwrite some stored numbers of a Parquet file with zeros."""
    content = bytearray(path.read_bytes())
    content[1000:1064] = bytes(64)
    path.write_bytes(content)


def test_an_error_in_a_cell_names_its_file_and_row(folder: Path) -> None:
    read = Dataset(folder)
    with pytest.raises(DataError, match=r"1\.parquet, column 'area', row 51: bad"), read.located():
        raise CellError("bad", "area", 150)
    with pytest.raises(DataError, match=r"data, column 'area': bad"), read.located():
        raise CellError("bad", "area")
