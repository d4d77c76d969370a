"""The command: what is run, what is skipped, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from made_up import publish
from mpgelu.cli.compare import _by_size
from mpgelu.cli.compare import compare as command
from mpgelu.errors import DataError, InputError
from mpgelu.research.compare import neural_peers
from mpgelu.research.compare import run as runs
from mpgelu.research.compare.methods import METHODS, Recipe
from mpgelu.research.compare.run import Task
from mpgelu.research.store import Store

Command = Callable[..., Result]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command on the made-up data set."""
    app = typer.Typer()
    app.command()(command)
    data = publish(tmp_path / "data", monkeypatch, splits=7)
    monkeypatch.setattr(neural_peers, "_SHORT", (16, 20))

    def run(*arguments: object, output: Path = tmp_path / "out") -> Result:
        options = ["--data", data, "--output", output, "--datasets", "yacht", *arguments]
        return CliRunner().invoke(app, [*map(str, options)])

    return run


def test_from_arguments_to_tables_and_again(compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compare("--methods", "mc-dropout,deep-ensemble", "--splits", "5-6")
    assert result.exit_code == 0
    assert result.stdout == f"tables: {tmp_path / 'out' / 'compare.md'}\n"
    done = [(record["method"], record["split"]) for record in Store(tmp_path / "out" / "records.jsonl")]
    assert done == [("mc-dropout", 5), ("mc-dropout", 6), ("deep-ensemble", 5), ("deep-ensemble", 6)]
    before = (tmp_path / "out" / "compare.md").read_text()
    (tmp_path / "out" / "compare.md").unlink()
    monkeypatch.setattr(runs, "evaluate", None)
    assert compare("--tables-only").exit_code == 0
    assert compare("--methods", "mc-dropout", "--splits", "5-6").exit_code == 0
    assert (tmp_path / "out" / "compare.md").read_text() == before


@pytest.mark.parametrize(
    ("text", "splits"),
    [("2", [0, 1]), ("1-2", [1, 2]), ("6-19", [6]), ("report", [5, 6]), ("development", [0, 1, 2, 3, 4])],
)
def test_which_splits(text: str, splits: list[int], compare: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Task] = []

    def stop(tasks: list[Task], *arguments: object, **options: object) -> None:
        wanted.extend(tasks)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", stop)
    result = compare("--methods", "mc-dropout", "--splits", text)
    assert [task.split for task in wanted] == splits
    assert result.exit_code == 130
    assert result.stderr.startswith("stopped; what was finished is in")


def test_a_missing_package_is_skipped_in_one_line(compare: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "ngboost", Recipe("ngboost", METHODS["ngboost"].build, "no_such_module", "ngboost"))
    result = compare("--methods", "ngboost,mc-dropout", "--splits", "5-5")
    skipped, done = result.stderr.splitlines()
    assert skipped == "ngboost skipped: ngboost is not installed; pip install 'mpgelu[compare]' brings it"
    assert done.startswith("1 of 1 done")
    result = compare("--methods", "ngboost")
    assert isinstance(result.exception, InputError)
    assert "none of the chosen methods is installed" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--datasets", "yatch"], "--datasets: unknown 'yatch'; choose from boston,"),
        (["--methods", "mc-dropout,magic"], "--methods: unknown 'magic'; choose from mpgelu,"),
        (
            ["--splits", "few"],
            "--splits: wants 'report', 'development', a range such as 0-19 or a number of splits, got 'few'",
        ),
        (["--splits", "5-2"], "--splits: '5-2' is not within the 20 published splits, 0-19"),
        (["--splits", "21"], "--splits: '21' is not within"),
        (["--splits", "-3"], "--splits: wants 'report'"),
        (["--tables-only"], "compare: no records of report splits in"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, compare: Command) -> None:
    error = compare(*arguments).exception
    assert isinstance(error, InputError | DataError)
    assert str(error).startswith(message)
    assert "\n" not in str(error)


def test_a_folder_that_cannot_be_made_is_refused_before_training(compare: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = compare("--methods", "mc-dropout", output=tmp_path / "file" / "out").exception
    assert isinstance(error, InputError)
    assert str(error).startswith("--output: cannot create the folder")


def test_the_readme_gets_a_summary_and_the_docs_every_set(compare: Command, tmp_path: Path) -> None:
    for option, head in (("--readme", "|  | CRPS | RMSE |"), ("--docs", "| CRPS | ensemble |")):
        page = tmp_path / "page.md"
        parts = "<!-- parts:start -->\n<!-- parts:end -->\n"  # what the parts of the default buy
        page.write_text(f"before\n<!-- compare:start -->\nold\n<!-- compare:end -->\nafter\n{parts}")
        assert compare("--methods", "mc-dropout", "--splits", "5-6", option, page).exit_code == 0
        text = page.read_text()
        assert text.startswith(f"before\n<!-- compare:start -->\n{head}")
        assert "old" not in text
        assert "<!-- compare:end -->\nafter\n<!-- parts:start -->\n" in text


def test_sets_are_run_smallest_first() -> None:
    assert _by_size("first")[:2] == ["yacht", "boston"]
    assert _by_size("second")[0] == "concreteslump"
    assert _by_size("all")[-1] == "keggdirected"
    assert len(_by_size("all")) == 20
    assert set(_by_size("small")) >= {"wine", "airfoil"}
    assert "parkinsons" not in _by_size("small")
