"""The commands on tables, as a person uses them: files, pipes, mistakes, kills."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mpgelu as mp
from command_line import Command, Result
from houses import QUICK, houses
from mpgelu.storage.files import temporary_path
from mpgelu.tables.model import OUTPUTS, TableModel

COMMANDS = (
    "fit",
    "predict",
    "evaluate",
    "report",
    "info",
    "example",
    "export",
    "explain",
    "verify",
    "compare",
    "bench",
)
EFFORT = ("--steps", "40", "--folds", "2", "--hidden", "8")
IN_A_PROCESS = "from mpgelu.cli import main; main()"


@pytest.fixture
def folder(tmp_path: Path, fitted: TableModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and tables, where we are."""
    fitted.save(tmp_path / "model")
    houses().to_csv(tmp_path / "houses.csv", index=False)
    houses(40, seed=1).to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# the way through


def test_fit_predict_evaluate_report_info(mpgelu: Command, folder: Path) -> None:
    result = mpgelu("fit", "houses.csv", "--target", "price", "-o", "out/m", *EFFORT)
    assert (result.code, result.err) == (0, "")
    assert "houses.csv: 300 rows, 7 columns" in result.out
    for line in ("area     number", "city     3 categories", "country  not used: is 'Norway' in every row"):
        assert line in result.out
    assert re.search(r"cross-validated log-likelihood -\d\.\d+ \(predicting the average: -\d\.\d+\)", result.out)
    assert names(folder / "out") == {"m"}

    result = mpgelu("predict", "out/m", "new.csv", "-o", "out.csv", "--level", "0.5")
    assert result == Result(0, "40 rows: out.csv\n", "")
    predicted = pd.read_csv("out.csv")
    assert tuple(predicted) == OUTPUTS
    expected = TableModel.load("out/m").predict(houses(40, seed=1), 0.5)
    np.testing.assert_allclose(predicted, expected, rtol=1e-7)

    result = mpgelu("evaluate", "out/m", "new.csv", "-o", "scores.json")
    assert (result.code, result.err) == (0, "")
    scores = json.loads(Path("scores.json").read_text())
    assert scores["rows"] == 40
    assert f"{100 * scores['model']['coverage']:.1f} %" in result.out
    assert scores["average"]["r2"] < 0.1 < scores["model"]["r2"]
    for name in ("RMSE", "MAE", "R²", "log-likelihood", "CRPS", "coverage of 90 % intervals", "mean width"):
        assert name in result.out

    result = mpgelu("report", "out/m", "new.csv", "-o", "report.html")
    assert (result.code, result.err) == (0, "")
    assert "<h1>Predicting price</h1>" in Path("report.html").read_text(encoding="utf-8")

    result = mpgelu("info", "out/m")
    assert (result.code, result.err) == (0, "")
    assert "predicts price" in result.out
    assert "year     number, some missing" in result.out
    assert "members: " in result.out
    assert names(folder) == {"model", "houses.csv", "new.csv", "out", "out.csv", "scores.json", "report.html"}


def test_scores_of_one_row_are_json(mpgelu: Command, folder: Path) -> None:
    houses(1, seed=1).to_csv("one.csv", index=False)
    assert mpgelu("evaluate", "model", "one.csv", "-o", "scores.json").code == 0
    scores = json.loads(Path("scores.json").read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    assert scores["model"]["r2"] is None


def test_rows_kept_for_scores_and_for_calibration(mpgelu: Command, folder: Path) -> None:
    result = mpgelu("fit", "houses.csv", "-t", "price", "--hold-out", "0.2", "--calibrate", "0.25", *EFFORT)
    assert (result.code, result.err) == (0, "")
    assert "trained on 180 rows" in result.out
    assert "intervals calibrated on 60 further rows" in result.out
    assert "on 60 rows kept from training" in result.out
    assert (folder / "model.mpgelu").exists()
    result = mpgelu("predict", "model.mpgelu", "new.csv", "--level", "0.99")
    assert (result.code, result.out) == (2, "")
    assert "level 0.99 needs at least 99 calibration rows, there are 60" in result.err


def test_the_same_seed_gives_the_same_model(mpgelu: Command, folder: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert mpgelu("fit", "houses.csv", "-t", "price", "-o", name, "--seed", seed, *EFFORT).code == 0
    first, second, other = (mpgelu("predict", name, "new.csv").out for name in "abc")
    assert first == second
    assert first != other


def test_fast_and_steps(mpgelu: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def train(*arguments: object, **settings: object) -> TableModel:
        asked.append(settings)
        return TableModel.load(folder / "model")

    monkeypatch.setattr(TableModel, "train", train)
    for more in (
        [],
        ["--fast"],
        ["--fast", "--steps", "7", "--folds", "3"],
        ["--checkpoint", "c", "--hidden", "5,6", "--folds", "2", "--time-limit", "9"],
    ):
        assert mpgelu("fit", "houses.csv", "-t", "price", "-o", "m", *more).code == 0
    assert [settings.get("steps") for settings in asked] == [None, None, 7, None]
    assert [settings.get("effort") for settings in asked] == [None, 0.4, 0.4, None]
    assert [settings.get("folds") for settings in asked] == [None, 5, 3, 2]  # asked for, before those of --fast
    assert asked[3]["checkpoint"] == Path("c")
    assert (asked[3]["hidden"], asked[3]["time_limit"], asked[3]["verbose"]) == ((5, 6), 9, True)


def test_an_example_to_try(mpgelu: Command, folder: Path) -> None:
    assert mpgelu("example", "data").code == 0
    train, new = pd.read_csv("data/train.csv"), pd.read_csv("data/new.csv")
    assert (len(train), len(new)) == (342, 100)
    assert set(train["sex"]) == {"first", "second"}
    assert mpgelu("fit", "data/train.csv", "-t", "progression", "-o", "d", *EFFORT).code == 0
    assert mpgelu("evaluate", "d", "data/new.csv").code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, mpgelu: Command) -> None:
    result = mpgelu(command, "--help")
    assert result.code == 0
    assert f"Example: mpgelu {command} " in result.out


@pytest.mark.parametrize(("group", "shown"), [((), "fit houses.csv"), (("reproduce",), "reproduce toy")])
def test_help_of_all_commands_shows_an_example(group: tuple[str, ...], shown: str, mpgelu: Command) -> None:
    assert f"Example: mpgelu {shown}" in mpgelu(*group, "--help").out


def test_help_says_what_the_columns_are(mpgelu: Command) -> None:
    text = " ".join(mpgelu("predict", "--help").out.split())
    assert "epistemic_std and aleatoric_std, the standard deviations due to limited knowledge" in text


# predicting


def test_standard_input_to_standard_output(mpgelu: Command, folder: Path) -> None:
    plain = mpgelu("predict", "model", "new.csv")
    assert plain.code == 0
    assert mpgelu("predict", "model", "-", given=Path("new.csv").read_bytes()) == plain
    assert mpgelu("predict", "model", "-", "-o", "-", given=Path("new.csv").read_bytes()) == plain
    pd.read_csv("new.csv").to_parquet("new.parquet")
    assert mpgelu("predict", "model", "-", given=Path("new.parquet").read_bytes()) == plain
    assert mpgelu("predict", "model", "new.parquet") == plain
    assert plain.out.splitlines()[0] == ",".join(OUTPUTS)
    assert len(plain.out.splitlines()) == 41
    assert mpgelu("fit", "-", "-t", "price", "-o", "m", *EFFORT, given=Path("houses.csv").read_bytes()).code == 0
    result = mpgelu("evaluate", "m", "-", given=b"area,city,year,garage,price\n1,Oslo,x,no,3\n")
    assert result.err == "error: standard input, column 'year', row 1: 'x' is not a number\n"


def test_input_columns_can_be_kept(mpgelu: Command, folder: Path) -> None:
    some = mpgelu("predict", "model", "new.csv", "--keep", "id", "--keep", "city", "--prefix", "p_")
    assert some.out.splitlines()[0] == "id,city,p_mean,p_stddev,p_epistemic_std,p_aleatoric_std,p_lower,p_upper"
    assert some.out.splitlines()[1].startswith("house 0,")
    every = mpgelu("predict", "model", "new.csv", "--keep", "all", "-o", "all.parquet")
    assert every == Result(0, "40 rows: all.parquet\n", "")
    kept = pd.read_parquet("all.parquet")
    assert list(kept) == [*pd.read_csv("new.csv"), *OUTPUTS]
    assert kept["area"].tolist() == pd.read_csv("new.csv", dtype=str)["area"].tolist()  # as it was written
    assert kept["mean"].dtype == np.float64


def test_other_columns_and_orders_do_not_matter(mpgelu: Command, folder: Path) -> None:
    plain = mpgelu("predict", "model", "new.csv")
    frame = pd.read_csv("new.csv")
    frame = frame[list(frame)[::-1]].drop(columns=["price", "id", "country"]).assign(note="2024-01-01")
    frame.to_csv("other.csv", index=False)
    assert mpgelu("predict", "model", "other.csv") == plain


def test_unseen_categories_and_new_gaps_are_told_once(
    mpgelu: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = houses(40, seed=1)
    frame.loc[3:7, "city"] = "Narvik"
    frame.loc[9:10, "area"] = np.nan
    frame.loc[11, "area"] = 1000
    frame.to_csv("odd.csv", index=False)
    monkeypatch.setattr("mpgelu.tables.source.Source.frames.__defaults__", (8,))
    result = mpgelu("predict", "model", "odd.csv", "-o", "out.csv")
    assert result.code == 0
    first, second, third = result.err.splitlines()
    assert first.startswith("warning: odd.csv: 5 cells hold a category that training did not have")
    assert first.endswith("(city 5)")
    assert second.startswith("warning: odd.csv: 2 cells are missing in columns")
    assert second.endswith("(area 2)")
    assert third.startswith("warning: odd.csv: 1 cells are far outside the range that training had")
    assert third.endswith("(area 1)")
    assert result.out == "40 rows: out.csv\n"


def test_rows_without_a_target_are_told(mpgelu: Command, folder: Path) -> None:
    houses(40, seed=1).assign(price=[1.0, np.nan] * 20).to_csv("half.csv", index=False)
    for command in (("evaluate", "model", "half.csv"), ("report", "model", "half.csv")):
        result = mpgelu(*command)
        assert (result.code, result.err) == (0, "warning: half.csv: 20 rows without 'price' are left out\n")


def test_the_version(mpgelu: Command) -> None:
    result = mpgelu("--version")
    assert (result.code, result.out, result.err) == (0, f"mpgelu {mp.__version__}\n", "")


def test_fast_predictions_are_close(mpgelu: Command, folder: Path) -> None:
    random = QUICK | {"rate": 0.1, "diverse": False, "moments": mp.FactoredMoments}
    TableModel.fit(houses(), "price", **random).save("exact")
    exact, fast = (
        pd.read_csv(io.StringIO(mpgelu("predict", "exact", "new.csv", *more).out)) for more in ([], ["--fast"])
    )
    np.testing.assert_allclose(fast["mean"], exact["mean"], atol=0.2 * exact["stddev"].mean())
    assert not np.allclose(fast["stddev"], exact["stddev"])


def test_another_delimiter(mpgelu: Command, folder: Path) -> None:
    plain = mpgelu("predict", "model", "new.csv")
    for delimiter, name in ((";", ";"), ("\t", "tab")):
        pd.read_csv("new.csv").to_csv("other.csv", index=False, sep=delimiter)
        assert mpgelu("predict", "model", "other.csv", "--delimiter", name) == plain


# mistakes


def spoilt(old: str, new: str) -> Callable[[], None]:
    """Replace the first occurrence in a table."""

    def spoil() -> None:
        path = Path("houses.csv")
        path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")

    return spoil


def written(name: str, content: str) -> Callable[[], None]:
    def write() -> None:
        Path(name).write_text(content, encoding="utf-8")

    return write


def column(name: str, values: Any, rows: int = 300) -> Callable[[], None]:
    def write() -> None:
        houses(rows).assign(**{name: values}).to_csv("houses.csv", index=False)

    return write


def nothing() -> None:
    return None


FIT = ("fit", "houses.csv", "--target", "price", "-o", "m", *EFFORT)
TO = (*FIT[:4], *EFFORT, "-o")  # and where to
MANY = written("houses.csv", ",".join(f"c{i}" for i in range(20)) + "\n" + ",".join("1" * 20) + "\n")
DATES = pd.date_range("2024-01-01", periods=300).strftime("%d.%m.%Y")

MISTAKES: dict[str, tuple[Callable[[], None], tuple[str, ...], str]] = {
    "no file": (nothing, ("fit", "hauses.csv", "-t", "price"), "there is no file hauses.csv; correct the path"),
    "a folder": (nothing, ("fit", ".", "-t", "price"), ". holds no Parquet file"),
    "empty file": (written("houses.csv", ""), FIT, "houses.csv is empty"),
    "only a header": (written("houses.csv", "a,price\n"), FIT, "houses.csv has no rows below its header"),
    "no header": (written("houses.csv", "1,2\n3,4\n"), FIT, "houses.csv begins with numbers"),
    "wrong delimiter": (written("houses.csv", "a;price\n1;2\n"), FIT, "its delimiter looks like ';': give --delimiter"),
    "two characters": (nothing, (*FIT, "--delimiter", "::"), "--delimiter: wants one ASCII character, or 'tab'"),
    "no such target": (nothing, ("fit", "houses.csv", "--target", "prise"), "no column 'prise'; did you mean 'price'?"),
    "nothing like it": (nothing, ("fit", "houses.csv", "--target", "zzz"), "the columns are id, area, city,"),
    "nothing like it among many": (MANY, ("fit", "houses.csv", "--target", "zzz"), "c7, c8, ..., c18, c19"),
    "text in a number": (
        spoilt("house 2,", "house 2,big"),
        FIT,
        "houses.csv, column 'area', line 4: 'big",
    ),
    "text in the target": (
        column("price", ["dear"] + [1.5] * 299),
        FIT,
        "houses.csv, column 'price', line 2: 'dear' is not a number",
    ),
    "text as the target": (
        column("price", ["yes", "no"] * 150),
        FIT,
        "houses.csv, column 'price': holds text such as 'yes'; this is regression, which predicts a number: choose",
    ),
    "infinite": (column("area", [1, np.inf] + [2] * 298), FIT, "houses.csv, column 'area', line 3: 'inf' is infinite"),
    "one row": (column("id", "x", 1), FIT, "houses.csv: 1 row with a target; a model needs at least 10"),
    "one column": (
        written("houses.csv", "price\n" + "\n".join(map(str, range(20)))),
        FIT,
        "houses.csv: no column besides the target 'price'",
    ),
    "constant target": (column("price", 7), FIT, "houses.csv: the target 'price' is 7 in every row"),
    "dates": (column("sold", DATES), FIT, "houses.csv, column 'sold': holds dates or times such as '01.01.2024'; turn"),
    "missing refused": (nothing, (*FIT, "--missing", "error"), "houses.csv, column 'year', line"),
    "unknown drop": (nothing, (*FIT, "--drop", "aera"), "there is no column 'aera'; did you mean 'area'?"),
    "dropped target": (nothing, (*FIT, "--drop", "price"), "--drop: 'price' is the target"),
    "ragged": (spoilt("house 5,", "house 5,,,,"), FIT, "houses.csv, line 7: 10 cells, but the first line has 7"),
    "digits": (nothing, (*FIT[:-2], "--hidden", "9" * 5000), "--hidden: wants whole numbers separated by commas"),
    "layers": (nothing, (*FIT[:-2], "--hidden", "8;8"), "--hidden: wants whole numbers separated by commas"),
    "hold-out": (nothing, (*FIT, "--hold-out", "20"), "--hold-out: must be a share of the rows"),
    "checkpoint": (nothing, (*FIT, "--checkpoint", "new.csv"), "cannot write new.csv/training"),
    "calibrate": (nothing, (*FIT, "--calibrate", "0.001"), "--calibrate: must be a share of the rows"),
    "model into a folder": (nothing, (*TO, "."), "cannot write .: it is a folder"),
    "model below a file": (nothing, (*TO, "new.csv/m"), "cannot write new.csv/m"),
    "not a model": (nothing, ("predict", "new.csv", "new.csv"), "new.csv is text or a table, not a saved model"),
    "table first": (nothing, ("predict", "houses.csv", "model"), "houses.csv is text or a table, not a saved"),
    "output is the table": (nothing, ("predict", "model", "new.csv", "-o", "./new.csv"), "it is read by the same"),
    "output is the model": (nothing, ("report", "model", "new.csv", "-o", "model"), "it is read by the same command"),
    "model is the table": (nothing, (*TO, "houses.csv"), "cannot write houses.csv: it is read by the same"),
    "scores to standard output": (nothing, ("evaluate", "model", "new.csv", "-o", "-"), "give the name of a file"),
    "output is a sheet": (nothing, ("predict", "model", "new.csv", "-o", "o.xlsx"), "ends in .csv or .parquet"),
    "decimal comma": (
        written("new.csv", 'area,city,year,garage\n"50,5",Oslo,1990,yes\n'),
        ("predict", "model", "new.csv"),
        "new.csv, column 'area', line 2: '50,5' has a comma; write decimals with a point, and thousands without "
        "a separator",
    ),
    "another delimiter in cells": (
        written("new.csv", "area;city\n50;Oslo\n50,5;Oslo\n"),
        ("predict", "model", "new.csv"),
        "its delimiter looks like ';': give --delimiter ';'",
    ),
    "no model": (nothing, ("predict", "modle", "new.csv"), "modle does not exist"),
    "columns lack": (
        written("new.csv", "city,price,Area\nOslo,1,2\n"),
        ("predict", "model", "new.csv", "-o", "out.csv"),
        "new.csv: the model needs the columns 'area', 'year', 'garage', which this table lacks",
    ),
    "text when predicting": (
        written("new.csv", "area,city,year,garage\n50,Oslo,1990,yes\n\n60,Oslo,old,no\n"),
        ("predict", "model", "new.csv", "-o", "out.csv"),
        "new.csv, column 'year', line 4: 'old' is not a number",
    ),
    "level": (nothing, ("predict", "model", "new.csv", "--level", "90"), "--level: must lie strictly between 0 and 1"),
    "keep": (nothing, ("predict", "model", "new.csv", "--keep", "identity"), "new.csv: there is no column 'identity'"),
    "names twice": (
        column("mean", 1),
        ("predict", "model", "houses.csv", "--keep", "all"),
        "--keep: the table has a column 'mean' already; give --prefix",
    ),
    "output is a folder": (nothing, ("predict", "model", "new.csv", "-o", "."), "cannot write .: it is a folder"),
    "output below a file": (nothing, ("predict", "model", "new.csv", "-o", "new.csv/o"), "cannot write new.csv/o"),
    "no target to evaluate": (
        written("new.csv", "area,city,year,garage\n50,Oslo,1990,yes\n"),
        ("evaluate", "model", "new.csv"),
        "new.csv: there is no column 'price'",
    ),
    "empty target": (
        written("new.csv", "area,city,year,garage,price\n50,Oslo,1990,yes,\n"),
        ("report", "model", "new.csv"),
        "new.csv: no row has a target 'price'",
    ),
    "report into a folder": (nothing, ("report", "model", "new.csv", "-o", "."), "cannot write .: it is a folder"),
    "scores below a file": (nothing, ("evaluate", "model", "new.csv", "-o", "model/s"), "cannot write model/s"),
    "info of a table": (nothing, ("info", "new.csv"), "new.csv is text or a table, not a saved model"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(mistake: str, mpgelu: Command, folder: Path) -> None:
    prepare, arguments, message = MISTAKES[mistake]
    prepare()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = mpgelu(*arguments)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_error_late_in_a_table_keeps_the_old_output(
    mpgelu: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = houses(40, seed=1)
    frame["area"] = frame["area"].astype(object)
    frame.loc[37, "area"] = "large"
    frame.to_csv("odd.csv", index=False)
    Path("out.csv").write_text("old")
    monkeypatch.setattr("mpgelu.tables.source.Source.frames.__defaults__", (8,))
    before = names(folder)
    result = mpgelu("predict", "model", "odd.csv", "-o", "out.csv")
    assert (result.code, result.err) == (2, "error: odd.csv, column 'area', line 39: 'large' is not a number\n")
    assert names(folder) == before
    assert Path("out.csv").read_text() == "old"


# processes


def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-c", IN_A_PROCESS, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


def test_a_pipe_has_no_control_characters_and_may_close_early(folder: Path) -> None:
    houses(5000, seed=2).to_csv("many.csv", index=False)
    with Path("many.csv").open("rb") as table:
        process = start("predict", "model", "-", stdin=table, stdout=subprocess.PIPE)
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert len(out.splitlines()) == 5001
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", out)
    with Path("many.csv").open("rb") as table:
        process = start("predict", "model", "-", stdin=table, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate()
    assert b"Traceback" not in err


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_a_kill_leaves_the_old_file_whole(command: str, folder: Path) -> None:
    houses(30_000, seed=2).to_csv("many.csv", index=False)
    Path("out").write_text("old")
    arguments = {
        "fit": ("fit", "many.csv", "-t", "price", "-o", "out", "--steps", 100_000),
        "predict": ("predict", "model", "many.csv", "-o", "out"),
    }[command]
    process = start(*arguments, stdout=subprocess.PIPE)
    if command == "fit":
        assert process.stdout is not None
        while b"country" not in process.stdout.readline():
            assert process.poll() is None
    else:
        while not any(path.name.startswith(".out.") and path.stat().st_size for path in folder.iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert Path("out").read_text() == "old"


def test_what_a_kill_left_is_removed_by_the_next_run(mpgelu: Command, folder: Path) -> None:
    ours = Path(temporary_path(Path("out.csv")).name + "1")  # of another thread
    dead = Path(ours.name.replace(f".{os.getpid()}.", ".999999999."))
    for path in (ours, dead):
        path.touch()
    assert mpgelu("predict", "model", "new.csv", "-o", "out.csv").code == 0
    assert ours.exists()
    assert not dead.exists()


# options


@pytest.mark.parametrize(
    ("arguments", "option", "problem"),
    [
        (("fit", "x", "--target", "a", "-t", "b"), "'--target' / '-t'", "it is given 2 times; give it once"),
        (("predict", "m", "x", "--level", "0.5", "--level", "0.5"), "'--level'", "it is given 2 times; give it once"),
        (("reproduce", "uci", "--rate", "0.1", "--rate=0.2"), "'--rate'", "it is given 2 times; give it once"),
        (("fit", "x", "--target", "a", "--hold-out", "nan"), "'--hold-out'", "nan is not a finite number"),
        (("predict", "m", "x", "--level", "inf"), "'--level'", "inf is not a finite number"),
        (("fit", "x", "--target", "a", "--seed", "9" * 30), "'--seed'", "4294967295"),
        (("reproduce", "toy", "--seed", "9" * 30), "'--seed'", "4294967295"),
    ],
    ids=range(7),
)
def test_options_that_cannot_be_meant(
    arguments: tuple[str, ...], option: str, problem: str, mpgelu: Command, folder: Path
) -> None:
    result = mpgelu(*arguments)
    assert (result.code, result.out) == (2, "")
    wrong, advice = result.err.splitlines()
    assert wrong.startswith(f"error: Invalid value for {option}: ")
    assert wrong.endswith(problem)
    assert advice.startswith("see: mpgelu ")


@pytest.mark.parametrize("more", [("--hidden", "1000000000"), ("--hidden", "1000000,1000000")])
def test_networks_larger_than_the_machine_are_refused(more: tuple[str, ...], mpgelu: Command, folder: Path) -> None:
    result = mpgelu("fit", "houses.csv", "-t", "price", "--folds", 2, *more)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert "GB of memory, and this machine has" in line


def test_options_that_may_be_given_again_and_flags(mpgelu: Command, folder: Path) -> None:
    result = mpgelu("predict", "model", "new.csv", "--fast", "--fast", "--keep", "id", "--keep", "city")
    assert (result.code, result.err) == (0, "")


def test_columns_of_any_parquet_type(mpgelu: Command, folder: Path) -> None:
    plain = mpgelu("predict", "model", "new.csv")
    frame = houses(40, seed=1)
    as_texts = {
        "string_view": pa.string_view(),
        "large": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }
    for name, kind in as_texts.items():
        columns = {key: pa.array(column) for key, column in frame.items()}
        columns |= {
            key: pa.array(frame[key].where(frame[key].notna(), None), pa.string()) for key in ("city", "garage")
        }
        columns |= {key: columns[key].cast(kind) for key in ("city", "garage")}
        pq.write_table(pa.table(columns), f"{name}.parquet")
        assert mpgelu("predict", "model", f"{name}.parquet") == plain
        assert mpgelu("predict", "model", f"{name}.parquet", "--keep", "all").code == 0


def test_bytes_that_are_no_text_are_named(mpgelu: Command, folder: Path) -> None:
    frame = houses(40)
    for name, kind in (("binary", pa.binary()), ("view", pa.binary_view())):
        columns = {
            "price": pa.array(frame.price),
            "area": pa.array(frame.area),
            "b": pa.array([b"x", b"\xff"] * 20, kind),
        }
        pq.write_table(pa.table(columns), f"{name}.parquet")
        result = mpgelu("fit", f"{name}.parquet", "-t", "price")
        assert (result.code, result.out) == (2, "")
        assert f"{name}.parquet, column 'b': holds binary[pyarrow], not numbers or text" in result.err
        assert "leave it out with --drop 'b'" in result.err


def test_a_full_device_named_as_output_is_one_line(mpgelu: Command, folder: Path) -> None:
    assert mpgelu("predict", "model", "new.csv", "-o", "/dev/full").err == (
        "error: cannot write /dev/full: No space left on device\n"
    )


# closed and full


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("info", "model"), ("predict", "model", "new.csv"), ("--help",)])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...], folder: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate()
    assert (process.returncode, err) == (74, b"error: standard output: No space left on device\n")


@pytest.mark.parametrize(
    ("descriptor", "arguments", "code", "message"),
    [
        ("1>&-", "info model", 74, b"error: standard output is closed; send it to a file or to /dev/null\n"),
        ("1>&-", "predict model new.csv", 74, b"error: standard output is closed; send it to a file or to /dev/null\n"),
        ("0<&-", "predict model -", 2, b"error: standard input is closed; send a table to it, or give the name of"),
        ("2>&-", "predict model new.csv -o out.csv", 0, b""),
        ("2>&-", "predict model nowhere.csv", 2, b""),
    ],
)
def test_closed_streams_are_one_line(descriptor: str, arguments: str, code: int, message: bytes, folder: Path) -> None:
    command = f"{sys.executable} -c '{IN_A_PROCESS}' {arguments} {descriptor}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == bool(message)


def test_a_reader_that_wants_no_more_ends_the_command(folder: Path) -> None:
    houses(20_000, seed=2).to_csv("many.csv", index=False)
    process = start("predict", "model", "many.csv", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")
