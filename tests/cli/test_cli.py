"""The command line, from arguments to files, exit codes and what stands on the screen."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Command
from made_up import SPLITS, publish
from mpgelu.cli import shared
from mpgelu.research.paper import runner, uci
from mpgelu.research.store import Store

TABLES = [
    "agreement.csv",
    "paired.csv",
    "summary.md",
    "tables.csv",
    *(f"table_{n}.{end}" for n in (1, 2, 3, 4) for end in ("md", "tex")),
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return publish(tmp_path / "data", monkeypatch)


def uci_command(data: Path, output: Path, *more: object) -> list[object]:
    """A short run; what is given replaces its options."""
    effort = {"--tables": "4", "--epochs": "2", "--splits": "2", "--grid-splits": "1"}
    options = {"--datasets": "yacht", **effort, "--data": data, "-o": output}
    kept = [part for name, value in options.items() if name not in more for part in (name, value)]
    return ["reproduce", "uci", *kept, *more]


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Help


@pytest.mark.parametrize("command", ["toy", "uci"])
def test_help_has_an_example_and_whole_names(command: str, mpgelu: Command) -> None:
    result = mpgelu("reproduce", command, "--help")
    assert result.code == 0
    assert f"Example: mpgelu reproduce {command} " in result.out
    assert "--output" in result.out
    assert ("--full-relu-splits" in result.out) == (command == "uci")


def test_the_package_runs_as_a_program() -> None:
    result = subprocess.run([sys.executable, "-m", "mpgelu", "--help"], capture_output=True, text=True, check=True)
    assert "Neural networks that say how sure they are" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "x.csv", "--target", "y", "-o", "m", "--steps", "0"], "Invalid value for '--steps'"),
        (["fit"], "Missing argument 'TABLE'"),
        (["predict", "--nonsense"], "No such option: --nonsense"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_wrong_calls_are_two_lines(arguments: list[str], message: str, mpgelu: Command) -> None:
    result = mpgelu(*arguments)
    assert result.code == 2
    first, second = result.err.splitlines()
    assert first.startswith(f"error: {message}")
    assert second.startswith("see: mpgelu")
    assert second.endswith("--help")
    assert not result.out


@pytest.mark.parametrize("arguments", [[], ["reproduce"]])
def test_no_command_shows_the_help(arguments: list[str], mpgelu: Command) -> None:
    result = mpgelu(*arguments)
    assert result.code == 2
    assert "Commands:" in result.out + result.err


# The toy problem


def test_reproduce_toy(mpgelu: Command, tmp_path: Path) -> None:
    result = mpgelu("reproduce", "toy", "--epochs", 3, "-o", tmp_path / "new" / "toy")
    assert (result.code, result.err) == (0, "")
    assert (tmp_path / "new" / "toy" / "toy.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "new" / "toy" / "toy.json").read_text())
    assert str(tmp_path / "new" / "toy" / "toy.png") in result.out
    for title, name in (("ReLU", "relu"), ("MP-GELU", "mpgelu")):
        (line,) = (line for line in result.out.splitlines() if title in line)
        assert all(f"{value:.3f}" in line for value in numbers[name].values())


# The tables


def test_reproduce_uci_and_again(mpgelu: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    first = mpgelu(*uci_command(data, output))
    assert (first.code, first.err) == (0, "")
    files = written(output)
    assert sorted(files) == sorted([*TABLES, "records.jsonl"])
    records = Store(output / "records.jsonl").records()
    assert Counter(record["kind"] for record in records) == {"validation": 8, "test": 4, "runtime": 2}
    assert "Yacht MP-GELU (2), Yacht ReLU (2)" in files["table_4.md"].decode()
    assert first.out.startswith(files["summary.md"].decode())
    assert "Of 72 cells 0 have all published splits, 70 have none and 2 some." in first.out
    assert "## Is the difference between MP-GELU and ReLU more than chance?" in first.out

    monkeypatch.setattr(uci, "fit", None)  # nothing is left to train
    second = mpgelu(*uci_command(data, output))
    assert second == first
    assert written(output) == files


def test_tables_only(mpgelu: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    mpgelu(*uci_command(data, output))
    files = written(output)
    for name in TABLES:
        (output / name).unlink()
    monkeypatch.setattr(uci, "fit", None)
    result = mpgelu("reproduce", "uci", "--tables-only", "-o", output)
    assert (result.code, result.err) == (0, "")
    assert written(output) == files


@pytest.mark.parametrize(("variant", "rate"), [("relu_input", 0.05), ("gelu_hidden", 0.0)])
def test_a_variant_is_run_beside_the_papers_networks(
    variant: str, rate: float, mpgelu: Command, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    chosen = ("--variant", variant, *(("--rate", rate) if rate else ()))
    early = mpgelu(*uci_command(data, output, *chosen))
    assert early.code != 0
    assert "run the command without --variant first" in early.err
    mpgelu(*uci_command(data, output))
    before = written(output)
    result = mpgelu(*uci_command(data, output, *chosen))
    assert (result.code, result.err) == (0, "")
    after = written(output)
    assert after["records.jsonl"] == before["records.jsonl"]
    assert after["tables.csv"] == before["tables.csv"]
    records = Store(output / f"{variant}.jsonl").records()
    assert {(r["kind"], r["nonlinearity"], r["rate"]) for r in records} == {("test", variant, rate)}
    assert f",{variant},nll," in after["paired.csv"].decode()


def test_what_is_run(mpgelu: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def run(*arguments: object, **options: object) -> None:
        asked.append((arguments, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("MPGELU_DATA", "some/folder")
    what = ("--datasets", "yacht, wine,yacht", "--tables", "4,2,4", "--seeds", "1,1")
    how = ("--splits", 5, "--grid-splits", 2, "--full-relu-splits", 3, "--borrow-rate", "--epochs", 7, "--rate", 0.1)
    where = ("--jobs", 3, "--backend", "dask", "--scheduler", "tcp://here:1")
    assert mpgelu("reproduce", "uci", "-o", tmp_path, *what, *how, *where).code == 130
    (((chosen, effort, path), options),) = asked
    assert chosen == list(uci.cells(["yacht", "wine"], [4, 2], [1]))
    assert effort == uci.Effort(splits=5, grid_splits=2, full_relu_splits=3, borrow_rate=True, epochs=7, rate=0.1)
    assert path == tmp_path / "records.jsonl"
    assert options == {"data": "some/folder", "jobs": 3, "backend": "dask", "scheduler": "tcp://here:1"}


@pytest.mark.parametrize(("name", "count"), [("all", 9), ("small", 5)])
def test_groups_of_data_sets(name: str, count: int) -> None:
    assert len(shared.uci_names(name)) == count
    assert ("protein" in shared.uci_names(name)) == (name == "all")


# Errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--datasets", "botson"], "--datasets: unknown 'botson'; choose from boston, concrete,"),
        (["--datasets", "yacht,"], "--datasets: unknown ''; choose from"),
        (["--tables", "2,5"], "--tables: 5 is not between 1 and 4"),
        (["--tables", "two"], "--tables: wants whole numbers separated by commas, got 'two'"),
        (["--seeds", "-1"], "--seeds: -1 is not between 0 and"),
        (["--data", "nowhere"], "there is no folder"),
        (["--backend", "threads"], "backend must be one of loky, dask, ray, got 'threads'"),
        (["--tables-only"], "no records in"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_line(more: list[str], message: str, mpgelu: Command, data: Path, tmp_path: Path) -> None:
    result = mpgelu(*uci_command(data, tmp_path / "out", *more))
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("more", [["--splits", "0"], ["--epochs", "two"], ["--jobs", "0"], ["--speed", "3"]])
def test_options_that_cannot_be_parsed(more: list[str], mpgelu: Command, data: Path, tmp_path: Path) -> None:
    result = mpgelu(*uci_command(data, tmp_path / "out", *more))
    assert result.code == 2
    wrong, advice = result.err.splitlines()
    assert more[0] in wrong
    assert advice == "see: mpgelu reproduce uci --help"
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--readme", "nowhere.md"), "--readme: there is no file nowhere.md; the table is written between"),
        (("compare", "--readme", "nowhere.md"), "--readme: there is no file nowhere.md; the table is written between"),
        (("reproduce", "toy", "--docs", "nowhere.md"), "--docs: there is no file nowhere.md; the table is written"),
        (("bench", "--sections", "counts", "--readme", "file"), "--readme: its table is that of the section inference"),
        (("bench", "--quick", "-o", "file/x"), "--output: cannot create the folder file/x: Not a directory"),
    ],
    ids=range(5),
)
def test_what_a_measurement_could_not_write_is_found_before(
    arguments: tuple[str, ...], message: str, mpgelu: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = mpgelu(*arguments)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def file_above(output: Path) -> None:
    output.parent.mkdir()
    output.parent.rmdir()
    output.parent.touch()


def folder_in_the_place_of_records(output: Path) -> None:
    (output / "records.jsonl").mkdir(parents=True)


def folder_in_the_place_of_a_figure(output: Path) -> None:
    (output / "toy.png").mkdir(parents=True)


@pytest.mark.parametrize(
    ("command", "spoil", "message"),
    [
        ("uci", file_above, "cannot create the folder"),
        ("uci", folder_in_the_place_of_records, "cannot read"),
        ("toy", file_above, "cannot create the folder"),
        ("toy", folder_in_the_place_of_a_figure, "cannot write"),
    ],
)
def test_an_output_folder_that_cannot_be_used(
    command: str, spoil: Callable[[Path], None], message: str, mpgelu: Command, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "place" / "out"
    spoil(output)
    toy = ["reproduce", "toy", "--epochs", 1, "-o", output]
    result = mpgelu(*(toy if command == "toy" else uci_command(data, output)))
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert message in line


def test_a_folder_without_permission_is_refused_before_training(
    mpgelu: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, *mode: path != tmp_path / "out")  # an administrator may write there
    result = mpgelu(*uci_command(data, tmp_path / "out"))
    assert (result.code, result.err.splitlines()) == (
        2,
        [f"error: --output: the folder {tmp_path / 'out'} cannot be written to; choose another"],
    )


# Ctrl-C


def test_ctrl_c_stops_cleanly(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    effort = ["--tables", "4,3,2,1", "--splits", SPLITS, "--grid-splits", SPLITS, "--epochs", 2000]
    arguments = map(str, uci_command(data, output, *effort))
    code = "import sys; from mpgelu import cli; from mpgelu.research.paper import uci; uci._STACK = 1; cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends the signal to every process of the command
    )
    try:
        wait_for(output / "records.jsonl", process)
        out, err = pressed_until_it_stops(process)
    finally:
        process.kill()
    assert process.returncode == 130
    (line,) = err.splitlines()
    assert line == f"stopped; what was finished is in {output / 'records.jsonl'}, the same command goes on from there"
    assert out == ""
    records = Store(output / "records.jsonl").records()
    assert 0 < len(records) < SPLITS * 5 * 8
    assert all(record["epochs"] == 2000 for record in records)


def pressed_until_it_stops(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C, and once more if nothing happens: Python drops an interrupt that falls into a finaliser."""
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=15)
    raise AssertionError("two interrupts did not stop it")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (path.is_file() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
