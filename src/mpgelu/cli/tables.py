"""``mpgelu fit``, ``predict``, ``evaluate``, ``report``, ``info`` and ``example``: models of tables.

The docstring of a command is its help text. Modules that import torch are imported inside the commands, so that
``mpgelu --help`` answers at once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpgelu.cli.fitting import fit_read, fit_streamed, to_stream
from mpgelu.cli.folders import Asked, is_folder, predict_folder
from mpgelu.cli.printing import print_columns, print_scores, print_training
from mpgelu.cli.scoring import about, check_level, load_model, predicted
from mpgelu.cli.shared import (
    Compact,
    Delimiter,
    Model,
    Notes,
    Seed,
    left_out,
    one_line_warnings,
    open_table,
    print_installation,
    rows_progress,
    warn,
)
from mpgelu.errors import DataError, InputError

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    import pandas as pd

    from mpgelu.tables import Source
    from mpgelu.tables.evaluation import Evaluation
    from mpgelu.tables.model import TableModel


class Missing(StrEnum):
    """Treatment of missing cells: fill them and add a column that marks them, or refuse the table."""

    impute = "impute"
    error = "error"


Table = Annotated[str, typer.Argument(metavar="TABLE", help="CSV or Parquet file, or a folder of Parquet; - is stdin.")]
Level = Annotated[float, typer.Option(help="Probability of the intervals.")]


def fit(
    table: Table,
    target: Annotated[str, typer.Option("--target", "-t", help="Column to predict.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the model.")] = Path("model.mpgelu"),
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be given again.")] = None,
    categorical: Annotated[
        list[str] | None, typer.Option(help="Column of numbers that are names, such as codes; may be given again.")
    ] = None,
    missing: Annotated[
        Missing, typer.Option(help="Fill missing cells and mark that they were, or refuse them.")
    ] = Missing.impute,
    hold_out: Annotated[float, typer.Option(help="Share of the rows to keep from training and score on.")] = 0.0,
    calibrate: Annotated[
        float, typer.Option(help="Share of the rows to calibrate the intervals on, for guaranteed coverage; e.g. 0.2.")
    ] = 0.0,
    fast: Annotated[
        bool, typer.Option("--fast", help="Train with fewer steps and half the networks: good for a first look.")
    ] = False,
    compact: Compact = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training. Default: by the number of rows.")] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, help="Parts of the rows; each network leaves out one of them. Default: 10.")
    ] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Units of each hidden layer. Default: 128,128, more above 100,000 rows.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that training may take; it takes fewer steps if need be.")
    ] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="Where the networks are trained, as cuda.")] = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder that keeps the state; the same command goes on from there.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Train on Parquet files without reading them whole. Default: if big."
        ),
    ] = None,
    delimiter: Delimiter = ",",
) -> None:
    """Train a model that predicts one column of a table from the others, with its uncertainty.

    Text columns become categories, missing cells are filled and marked, constant and duplicate columns are left out;
    the treatment of each column is printed.

    Example: mpgelu fit houses.csv --target price -o houses.mpgelu
    """
    from mpgelu.estimators.regressor import FAST
    from mpgelu.storage.files import check_writable

    layers = None if hidden is None else _layers(hidden)
    check_writable(output, table)
    if checkpoint is not None:
        check_writable(checkpoint / "training")
    source = open_table(table, delimiter)
    given = {name: value for name, value in (("steps", steps), ("folds", folds)) if value is not None}
    settings: dict[str, Any] = {"hidden": layers, "time_limit": time_limit, "checkpoint": checkpoint}
    settings |= {"random_state": seed, "device": device, "verbose": True} | (FAST if fast else {}) | given
    asked: dict[str, Any] = {"missing": missing.value, "categorical": categorical or [], "drop": drop or []}
    with about(source), one_line_warnings():
        shares = {"hold_out": hold_out, "calibrate": calibrate}
        files = to_stream(source, stream)
        if files is None:
            fit_read(source, target, output, compact, seed, settings, **asked, **shares)
        else:
            fit_streamed(files, target, output, compact, seed, settings, **asked, **shares)
    typer.echo(f"\nmodel: {output} ({output.stat().st_size / 1e6:.2f} MB)")
    typer.echo(f"next:  mpgelu predict {output} TABLE -o predictions.csv")


def predict(
    model: Model,
    table: Table,
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="CSV file, or Parquet if it ends in .parquet, or a folder; - is stdout."),
    ] = "-",
    level: Level = 0.9,
    keep: Annotated[
        list[str] | None, typer.Option(help="Input column to copy to the output, or 'all'; may be given again.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Put before the names of the new columns.")] = "",
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out correlations inside the networks: faster, and less exact.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=-1, help="Processes for a folder of tables; -1 takes all cores.")] = -1,
    delimiter: Delimiter = ",",
) -> None:
    """Predict every row of a table, of any length, in bounded memory.

    If both TABLE and --output are folders, each table is predicted into a file of the same name, on all cores. After
    an interruption the same command continues; tables that are finished and have not changed are skipped.

    New columns: mean; stddev, the standard deviation; epistemic_std and aleatoric_std, the standard deviations due to
    limited knowledge of the function and due to noise (their squares add up to the square of stddev); lower and upper,
    the ends of the interval. Columns the model does not use are ignored.

    Example: mpgelu predict houses.mpgelu new.csv -o predictions.csv --level 0.9 --keep id
    """
    from mpgelu.storage.files import check_writable
    from mpgelu.tables import Sink

    if Path(table).is_dir() and is_folder(output):
        predict_folder(model, Path(table), Path(output), Asked(level, tuple(keep or ()), prefix, fast, delimiter), jobs)
        return
    sink = Sink(output)
    if sink.path is not None:
        check_writable(sink.path, model, table)
    fitted = load_model(model, fast)
    check_level(fitted, level)
    source, notes, rows = open_table(table, delimiter), Notes(), 0
    with about(source), sink.opened(), _progress(source, hidden=sink.path is None and sys.stdout.isatty()) as parts:
        for part in parts:
            sink.write(predicted(fitted, part, level, keep or [], prefix, notes))
            rows += len(part)
    notes.print(source.name)
    if sink.path is not None:
        typer.echo(f"{rows:,} row{'s' * (rows != 1)}: {sink.path}")


def evaluate(
    model: Model,
    table: Table,
    level: Level = 0.9,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the numbers to this JSON file.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="As in predict.")] = False,
    delimiter: Delimiter = ",",
) -> None:
    """Score a model on rows whose target is known, and compare it with predicting the average of the training data.

    Example: mpgelu evaluate houses.mpgelu test.csv
    """
    from mpgelu.storage.files import check_writable, write_atomically

    if output is not None:
        check_writable(output, model, table)
    fitted = load_model(model, fast)
    check_level(fitted, level)
    source = open_table(table, delimiter)
    with about(source), _progress(source) as parts:
        evaluation = _evaluated(fitted, parts, level, source)
    typer.echo(f"{source.name}: {len(evaluation.actual):,} rows, target {fitted.target}")
    scores = print_scores(fitted, evaluation, level)
    if output is not None:
        known = {of: {name: v if math.isfinite(v) else None for name, v in part.items()} for of, part in scores.items()}
        write_atomically(output, json.dumps({"rows": len(evaluation.actual), "level": level, **known}, indent=1))


def report(
    model: Model,
    table: Table,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file; one page, readable offline.")] = Path(
        "report.html"
    ),
    level: Level = 0.9,
    fast: Annotated[bool, typer.Option("--fast", help="As in predict.")] = False,
    delimiter: Delimiter = ",",
) -> None:
    """Write a page about the quality of a model on rows whose target is known, and about where it is unreliable.

    Example: mpgelu report houses.mpgelu test.csv -o report.html
    """
    import pandas as pd

    from mpgelu.storage.files import check_writable, write_atomically
    from mpgelu.tables.report import page

    check_writable(output, model, table)
    fitted = load_model(model, fast)
    check_level(fitted, level)
    source, frames = open_table(table, delimiter), list[pd.DataFrame]()
    with about(source), _progress(source) as parts:
        evaluation = _evaluated(fitted, parts, level, source, frames)
    write_atomically(output, page(fitted, pd.concat(frames), evaluation, level, source.name, str(model)))
    typer.echo(f"report: {output} ({output.stat().st_size / 1e6:.1f} MB); open it in a browser")


def info(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="File written by mpgelu fit.")] = None,
) -> None:
    """Print what a model predicts, from which columns, and how it was trained; without a model, what is installed.

    Example: mpgelu info houses.mpgelu
    """
    if model is None:
        print_installation()
        return
    fitted = load_model(model)
    typer.echo(f"{model}: predicts {fitted.target}\nfrom the columns")
    print_columns(fitted.encoder)
    typer.echo(f"missing cells: {'filled' if fitted.encoder.missing == 'impute' else 'refused'}")
    typer.echo(f"members: {len(fitted.regressor.ensemble_)} in all")
    typer.echo("\n".join(f"  {share:5.0%}  {kind}" for kind, share in fitted.regressor.kind_weights_.items()))
    print_training(fitted)


def example(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write train.csv and new.csv.")] = Path(),
) -> None:
    """Write a small real table to try the other commands on: the disease progression of 442 diabetes patients.

    Example: mpgelu example data
    """
    import numpy as np
    import pandas as pd

    from mpgelu.research.datasets import load_diabetes
    from mpgelu.storage.files import write_atomically

    data = load_diabetes()
    frame = pd.DataFrame(data.X, columns=list(data.feature_names)).assign(**{data.target_name: data.y})
    frame["sex"] = np.where(frame["sex"] == 1, "first", "second")  # the source does not say which is which
    frame = frame.sample(frac=1, random_state=0)
    for name, rows in (("train.csv", frame[:-100]), ("new.csv", frame[-100:])):
        write_atomically(folder / name, rows.to_csv(index=False))
        typer.echo(f"{len(rows)} rows: {folder / name}")
    typer.echo(f"next: mpgelu fit {folder / 'train.csv'} --target {data.target_name} --fast -o diabetes.mpgelu")


@contextmanager
def _progress(source: Source, hidden: bool = False) -> Iterator[Iterator[pd.DataFrame]]:
    """Return a context with the parts of a table, and with a progress bar if standard error is a terminal.

    Args:
        source: The table.
        hidden: Whether to show no bar, because the output goes to the same terminal.
    """
    with rows_progress(hidden=hidden) as progress:
        task = progress.add_task("", total=None, rows=0)

        def parts() -> Iterator[pd.DataFrame]:
            rows = 0
            for part in source.frames():
                yield part
                rows += len(part)
                fraction = source.fraction_read
                progress.update(task, total=fraction and 1, completed=fraction or 0, rows=rows)

        yield parts()


def _evaluated(
    model: TableModel,
    parts: Iterable[pd.DataFrame],
    level: float,
    source: Source,
    seen: list[pd.DataFrame] | None = None,
) -> Evaluation:
    """Return the predictions and targets of the rows whose target is known, and print warnings about unusual cells.

    Args:
        model: The model.
        parts: Parts of the table.
        level: Probability of the intervals.
        source: The table, for its name.
        seen: Receives the scored rows of each part, if given.

    Raises:
        DataError: No row has a known target.
    """
    from mpgelu.tables.evaluation import Evaluation
    from mpgelu.tables.preparation import read_target

    notes, found, unknown = Notes(), [], 0
    for part in parts:
        known, actual = read_target(part, model.target)
        unknown += len(part) - len(known)
        if seen is not None:
            seen.append(known)
        encoded = model.encoder.encode(known)
        notes.add(encoded)
        if len(known):
            found.append(model.evaluate(encoded, actual, level))
    if not found:
        raise DataError(f"no row has a target {model.target!r}; there is nothing to compare with")
    notes.print(source.name)
    if unknown:
        warn(f"{source.name}: {left_out(unknown, model.target)}")
    return Evaluation.concatenate(found)


def _layers(text: str) -> tuple[int, ...]:
    """Return the sizes of the hidden layers, from numbers separated by commas."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 1:
        raise InputError(f"--hidden: wants whole numbers separated by commas, such as 128,128, got {text!r}")
    return layers
