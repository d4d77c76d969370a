"""``mpgelu predict`` from a folder of tables to a folder: resumed, on several processes, with mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from command_line import Command
from houses import QUICK, houses
from mpgelu.cli import folders
from mpgelu.cli.folders import is_folder
from mpgelu.tables.model import OUTPUTS, TableModel


@pytest.fixture
def folder(tmp_path: Path, fitted: TableModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a folder of tables, where we are."""
    fitted.save(tmp_path / "model")
    (tmp_path / "in").mkdir()
    houses(40, seed=1).to_csv(tmp_path / "in" / "a.csv", index=False)
    houses(30, seed=2).to_csv(tmp_path / "in" / "b.csv.gz", index=False)
    houses(20, seed=3).to_parquet(tmp_path / "in" / "c.parquet")
    (tmp_path / "in" / "_SUCCESS").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if not path.name.startswith(".")}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}


def test_each_table_gets_its_predictions(mpgelu: Command, folder: Path, fitted: TableModel) -> None:
    result = mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1, "--level", 0.8, "--keep", "area")
    assert (result.code, result.err) == (0, "")
    assert result.out == "90 rows in 3 tables: out\n"
    assert set(written(folder / "out")) == {"a.csv", "b.csv", "c.parquet"}
    expected = fitted.predict(houses(40, seed=1), level=0.8)
    found = pd.read_csv(folder / "out" / "a.csv")
    assert list(found) == ["area", *OUTPUTS]
    pd.testing.assert_frame_equal(found[list(OUTPUTS)], expected.reset_index(drop=True), rtol=1e-6)
    parquet = pd.read_parquet(folder / "out" / "c.parquet")
    pd.testing.assert_frame_equal(parquet[list(OUTPUTS)], fitted.predict(houses(20, seed=3), level=0.8), rtol=1e-6)


def test_several_processes_write_the_same(mpgelu: Command, folder: Path) -> None:
    assert mpgelu("predict", "model", "in", "-o", "one", "--jobs", 1).code == 0
    assert mpgelu("predict", "model", "in", "-o", "two/", "--jobs", 2).out == "90 rows in 3 tables: two\n"
    assert written(folder / "one") == written(folder / "two")


def test_what_is_done_is_left_alone_and_what_has_changed_is_noticed(
    mpgelu: Command, folder: Path, fitted: TableModel
) -> None:
    arguments = ("predict", "model", "in", "-o", "out", "--jobs", 1)
    mpgelu(*arguments)
    before = times(folder / "out")
    assert mpgelu(*arguments).out == "0 rows in 0 tables, 3 were done before: out\n"
    assert times(folder / "out") == before
    houses(10, seed=4).to_csv(folder / "in" / "a.csv", index=False)  # another table
    (folder / "out" / "b.csv").unlink()  # predictions that are lost
    result = mpgelu(*arguments)
    assert result.out == "40 rows in 2 tables, 1 were done before: out\n"
    assert "out: 1 were of other tables, another model or other options" in result.err
    assert len(pd.read_csv(folder / "out" / "a.csv")) == 10
    assert mpgelu(*arguments, "--level", 0.5).out.startswith("60 rows in 3 tables:")  # other options
    TableModel.fit(houses(), "price", **QUICK | {"random_state": 9}).save(folder / "model")
    assert mpgelu(*arguments, "--level", 0.5).out.startswith("60 rows in 3 tables:")  # another model
    assert mpgelu(*arguments, "--level", 0.5).out.startswith("0 rows")


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe"])
def test_a_record_that_a_kill_cut_short_costs_one_table(mpgelu: Command, folder: Path, damage: bytes) -> None:
    arguments = ("predict", "model", "in", "-o", "out", "--jobs", 1)
    mpgelu(*arguments)
    record = folder / "out" / folders._DONE
    record.write_bytes(record.read_bytes()[:-20] + damage)
    assert mpgelu(*arguments).out == "20 rows in 1 table, 2 were done before: out\n"
    assert len(record.read_bytes().splitlines()) == 3


def test_a_kill_keeps_what_is_done_and_the_next_run_goes_on(mpgelu: Command, folder: Path) -> None:
    long = pd.concat([houses(500, seed=7)] * 400)
    long.to_csv(folder / "in" / "z.csv", index=False)
    command = [sys.executable, "-c", "from mpgelu.cli import main; main()"]
    with subprocess.Popen([*command, "predict", "model", "in", "-o", "out", "--jobs", "1"]) as process:
        while not (folder / "out" / "c.parquet").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
    assert set(written(folder / "out")) == {"a.csv", "b.csv", "c.parquet"}
    houses(15, seed=8).to_csv(folder / "in" / "z.csv", index=False)
    assert mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1).out.startswith("15 rows in 1 table, 3 were done")
    assert not [path for path in (folder / "out").iterdir() if path.name.startswith(".z")]


def test_an_error_names_the_file_and_keeps_the_others(mpgelu: Command, folder: Path) -> None:
    houses(5).drop(columns="area").to_csv(folder / "in" / "bad.csv", index=False)
    result = mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1)
    assert result.code == 2
    assert result.err.startswith("error: in/bad.csv: ")
    assert "'area'" in result.err
    assert result.err.count("\n") == 1
    assert "bad.csv" not in written(folder / "out")
    (folder / "in" / "bad.csv").unlink()
    assert mpgelu("predict", "model", "in", "-o", "out", "--jobs", 2).code == 0
    assert len(written(folder / "out")) == 3


def test_an_error_in_another_process_is_one_line(mpgelu: Command, folder: Path) -> None:
    (folder / "in" / "bad.csv").write_text("area,area\n1,2\n")
    result = mpgelu("predict", "model", "in", "-o", "out", "--jobs", 2)
    assert result.code == 2
    assert result.err == "error: in/bad.csv has more than one column 'area'; give every column a name of its own\n"


def test_mistakes(mpgelu: Command, folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "twice").mkdir()
    for name in ("a.csv", "a.csv.gz"):
        houses(5).to_csv(folder / "twice" / name, index=False)
    for arguments, message in (
        (("in", "-o", "in"), "cannot write predictions to in: it is the folder of the tables; choose another"),
        (("empty", "-o", "out"), "empty has no file that ends in .parquet, .csv, .csv.gz, .txt"),
        (("twice", "-o", "out"), "twice/a.csv.gz and twice/a.csv would both be predicted into out/a.csv; rename one"),
        (("in", "-o", "out", "--level", "90"), "--level: must lie strictly between 0 and 1, got 90"),
    ):
        result = mpgelu("predict", "model", *arguments)
        assert result.code == 2
        assert message in result.err
    assert not (folder / "out").exists()


def test_other_entries_are_told(mpgelu: Command, folder: Path) -> None:
    (folder / "in" / "notes.json").touch()
    (folder / "in" / "deeper").mkdir()
    result = mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1)
    assert result.code == 0
    assert "in: 2 entries are not tables and are left out (folder 1, .json 1)" in result.err


def test_a_killed_process_is_told_in_words(mpgelu: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    def killed(*_: object) -> None:
        raise TerminatedWorkerError

    monkeypatch.setattr(folders, "_predict", killed)
    result = mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1)
    assert result.code == 2
    assert "a process was killed" in result.err


def test_the_record_is_json_lines(mpgelu: Command, folder: Path) -> None:
    mpgelu("predict", "model", "in", "-o", "out", "--jobs", 1)
    lines = (folder / "out" / folders._DONE).read_text().splitlines()
    assert sorted(json.loads(line)["file"] for line in lines) == ["a.csv", "b.csv", "c.parquet"]


def test_which_names_are_folders(tmp_path: Path) -> None:
    (tmp_path / "there.csv").mkdir()
    assert is_folder(str(tmp_path / "there.csv"))
    assert is_folder("new")
    assert is_folder("new.d/")
    assert not is_folder("file.csv")
    assert not is_folder("file.parquet")
    assert not is_folder("-")
