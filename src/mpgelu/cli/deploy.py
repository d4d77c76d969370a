"""``mpgelu distill``, ``mpgelu export``, ``mpgelu explain`` and ``mpgelu verify``: uses of a trained model.

The docstring of a command is its help text.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpgelu.cli.shared import Delimiter, Model, Notes, Seed, one_line_warnings, open_table, rows_progress, warn
from mpgelu.errors import DataError, InputError

if TYPE_CHECKING:
    import pandas as pd

    from mpgelu.estimators.regressor import MPGELURegressor
    from mpgelu.tables.model import TableModel

Table = Annotated[Path, typer.Argument(metavar="TABLE", help="CSV or Parquet file with the model's columns.")]
InputStd = Annotated[
    str | None, typer.Option(help="Standard deviations of measurement errors: column=value pairs separated by commas.")
]
_ROWS_EXPLAINED = 32  # between two steps of the progress bar
_PICTURES = (".png", ".pdf", ".svg", ".jpg")
_MEANINGS = {
    "noise": "of the target itself, as far as the model can tell",
    "disagreement": "the networks of the model predict differently",
    "distance": "features outside the range of the training data",
    "dropout": "units that are left out at random",
    "mpgelu": "units that may be on or off",
    "weights": "weights that are random",
    "input": "errors of the features, as --input-std says",
}


def distill(
    model: Model,
    data: Annotated[
        Path | None, typer.Argument(metavar="TABLE", help="Rows to learn from: the training table, or rows like it.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the small model.")] = Path("small.mpgelu"),
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training. Default: by the number of rows.")] = None,
    seed: Seed = 0,
    delimiter: Delimiter = ",",
) -> None:
    """Distill a model into a single network that predicts approximately the same distribution, many times faster.

    A model file does not contain the rows that the model was trained on, so give them, or others of the same kind; the
    target column is not used. mpgelu fit --compact trains and distills with one command.

    Example: mpgelu distill houses.mpgelu houses.csv -o small.mpgelu
    """
    from mpgelu.storage.files import check_writable
    from mpgelu.tables.model import TableModel, load

    if data is None:
        raise InputError(
            "distill: a model file does not hold the rows that it was trained on; give the training table, or rows "
            f"like it: mpgelu distill {model} TABLE -o {output}"
        )
    check_writable(output, model, data)
    loaded = load(model)
    regressor, table = _read(loaded, data, delimiter)
    rows = table if hasattr(regressor, "feature_names_in_") else table.to_numpy()
    small = regressor.distill(rows, random_state=seed, verbose=True, steps=steps)
    (replace(loaded, regressor=small) if isinstance(loaded, TableModel) else small).save(output)
    sizes = [f"{path} ({path.stat().st_size / 1e6:.2f} MB)" for path in (output, model)]
    typer.echo(f"{len(table):,} rows; the network loses about {regressor.score_ - small.score_:.3f} nats a row")
    typer.echo(f"model: {sizes[0]}, from {sizes[1]}")
    if regressor.calibration_scores_ is not None:
        warn("the intervals of the small model are not calibrated; mpgelu fit --compact --calibrate does that")


def export(
    model: Model,
    onnx: Annotated[Path, typer.Option(help="The file to write.")],
    quantiles: Annotated[str, typer.Option(help="Their probabilities, separated by commas.")] = "0.05,0.5,0.95",
) -> None:
    """Write a model as an ONNX graph, from raw features to mean, stddev and quantiles; it runs without torch.

    Example: mpgelu export model.mpgelu --onnx model.onnx
    """
    from mpgelu.export import export_onnx
    from mpgelu.storage.files import check_writable
    from mpgelu.tables.model import TableModel, load

    try:
        q = [float(number) for number in quantiles.split(",") if number.strip()]
    except ValueError:
        raise InputError(f"--quantiles: wants numbers separated by commas, got {quantiles!r}") from None
    check_writable(onnx, model)
    loaded = load(model)
    with one_line_warnings():
        export_onnx(loaded, onnx, q)
    typer.echo(f"graph: {onnx}")
    if isinstance(loaded, TableModel):
        count = len(loaded.encoder.features)
        typer.echo(f"It takes the {count} encoded columns; its metadata say how to make them: docs/deploy.md.")


def explain(
    model: Model,
    data: Table,
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV file: a line for each row and source.")],
    plot: Annotated[Path | None, typer.Option(help="Picture of some rows, and of the ranking of the sources.")] = None,
    input_std: InputStd = None,
    delimiter: Delimiter = ",",
) -> None:
    """Decompose the variance of each prediction by its sources: noise, features, layers, disagreement of networks.

    Rows are counted from 1 below the header.

    Example: mpgelu explain model.mpgelu data.csv -o sources.csv --plot sources.png --input-std age=0.5
    """
    import numpy as np

    from mpgelu.inspect import plot_attribution
    from mpgelu.storage.files import check_writable, write_atomically
    from mpgelu.tables.model import load

    check_writable(output, model, data)
    if plot is not None:
        check_writable(plot, model, data)
        if plot.suffix.lower() not in _PICTURES or plot == output:
            raise InputError(f"--plot: wants another file that ends in {', '.join(_PICTURES)}, got {plot}")
    regressor, table = _read(load(model), data, delimiter)
    errors = None if input_std is None else _errors(input_std, list(table.columns))
    frame = _attributed(regressor, table, errors)
    frame["row"] += 1  # as people count the lines of a file, and as the report does
    write_atomically(output, frame.to_csv(index=False))
    typer.echo(f"sources: {output}")
    known = np.isfinite(frame.groupby("row").variance.transform("sum"))
    if not known.all():
        warn(f"{frame[~known].row.nunique():,} rows have an infinite variance, so far are they from the training data")
    if plot is not None:
        image = BytesIO()
        plot_attribution(frame[known]).savefig(image, dpi=150, format=plot.suffix[1:].lower())
        write_atomically(plot, image.getvalue())
        typer.echo(f"figure:  {plot}")
    shares = frame[known].groupby("kind").variance.sum().sort_values(ascending=False) / frame[known].variance.sum()
    for kind, share in shares.items():
        typer.echo(f"{kind!s:14}{share:6.1%} of the variance of all rows: {_MEANINGS[str(kind)]}")


def _attributed(model: MPGELURegressor, table: pd.DataFrame, errors: list[float] | None) -> pd.DataFrame:
    """Return the sources of all rows, with a progress bar, since measurement errors take long.

    Args:
        model: The estimator.
        table: Its features.
        errors: Standard deviation of the error of each feature.
    """
    import pandas as pd

    from mpgelu.inspect import attribute

    names, found = list(table.columns), []
    with rows_progress() as progress:
        task = progress.add_task("", total=len(table), rows=0)
        for start in range(0, len(table), _ROWS_EXPLAINED):
            part = table.iloc[start : start + _ROWS_EXPLAINED]
            sources = attribute(model, part, input_std=errors, features=names)
            found.append(sources.assign(row=sources["row"] + start))
            progress.update(task, completed=start + len(part), rows=start + len(part))
    return pd.concat(found, ignore_index=True)


def verify(
    model: Model,
    data: Table,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to check, spread over the file.")] = 12,
    draws: Annotated[
        int | None, typer.Option(min=100, help="Samples for each row. Default: 20000, or as needed.")
    ] = None,
    networks: Annotated[int, typer.Option(min=1, help="Number of networks to check, by weight.")] = 3,
    input_std: InputStd = None,
    delimiter: Delimiter = ",",
) -> None:
    """Compare the moments of a model with samples of its networks, layer by layer; exit code 1 if they disagree.

    With --input-std, predictions for features with such errors are also compared with averages over random inputs.

    Example: mpgelu verify model.mpgelu data.csv --input-std age=0.5
    """
    import numpy as np

    from mpgelu.inspect.audit import verify as audit
    from mpgelu.tables.model import load

    regressor, table = _read(load(model), data, delimiter)
    chosen = np.unique(np.linspace(0, len(table) - 1, min(rows, len(table))).round().astype(int))
    errors = None if input_std is None else _errors(input_std, list(table.columns))
    found = audit(regressor, table.iloc[chosen], draws=draws, networks=networks, input_std=errors)
    typer.echo(f"{found}\n\n{found.words()}")
    if not found.passed:
        raise typer.Exit(1)


def _read(model: TableModel | MPGELURegressor, data: Path, delimiter: str) -> tuple[MPGELURegressor, pd.DataFrame]:
    """Return the estimator of a model, and its features read from a table.

    Args:
        model: A table model, or an estimator.
        data: File of the table.
        delimiter: Delimiter of a CSV file.

    Returns:
        The estimator, and a data frame with its features, encoded as in training.

    Raises:
        DataError: The table lacks a column of the model.
    """
    import pandas as pd

    from mpgelu.tables.cells import Cells
    from mpgelu.tables.model import TableModel

    source = open_table(str(data), delimiter)
    frame = source.read()
    if isinstance(model, TableModel):
        with source.located():
            encoded = model.encoder.encode(frame)
        notes = Notes()
        notes.add(encoded)
        notes.print(source.name)
        return model.regressor, pd.DataFrame(encoded.X, columns=model.encoder.features)
    names = list(getattr(model, "feature_names_in_", frame.columns[: model.n_features_in_]))
    if missing := [name for name in names if name not in frame]:
        raise DataError(f"{data} has no column {missing[0]!r}; the model wants {', '.join(map(str, names))}")
    with source.located():
        features = pd.DataFrame({name: Cells.of(frame[name]).complete() for name in names})
    return model, features


def _errors(text: str, names: list[str]) -> list[float]:
    """Return the standard deviation of the error of each feature, zero for those that are not named.

    Args:
        text: Pairs ``feature=value`` separated by commas.
        names: Names of all features.

    Raises:
        InputError: A pair is malformed, or names an unknown feature.
    """
    from mpgelu.errors import closest

    errors = dict.fromkeys(names, 0.0)
    for part in text.split(","):
        name, sign, value = part.rpartition("=")  # a name may contain the sign, too
        try:
            number = float(value if sign else "")
        except ValueError:
            raise InputError(f"--input-std: wants pairs such as {names[0]}=0.1, got {part!r}") from None
        if (name := name.strip()) not in errors:
            listed = ", ".join(names[:10]) + ", ..." * (len(names) > 10)
            raise InputError(f"--input-std: no feature {name!r}{closest(name, names) or f'; there are {listed}'}")
        errors[name] = number
    return [errors[name] for name in names]
