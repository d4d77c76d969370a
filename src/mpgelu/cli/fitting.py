"""The training of ``mpgelu fit``, on a table in memory or on a stream of rows of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mpgelu.cli.printing import print_columns, print_scores, print_training
from mpgelu.cli.shared import left_out, warn
from mpgelu.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    from mpgelu.tables import Source
    from mpgelu.tables.dataset import Dataset


def to_stream(source: Source, stream: bool | None) -> Dataset | None:
    """Return the files of a table that is to be streamed, or ``None`` for a table that is read into memory.

    Args:
        source: The table.
        stream: Whether to stream; ``None`` streams tables that are large
            (:func:`mpgelu.tables.streaming.is_streamed`).

    Raises:
        InputError: ``stream`` is true for a table that is not in Parquet files.
    """
    from mpgelu.tables.dataset import Dataset, is_parquet
    from mpgelu.tables.streaming import is_streamed

    if not isinstance(source, Dataset) and (source.is_standard_input or not is_parquet(source.path)):
        if stream:
            raise InputError(
                f"--stream: {source.name} is not a Parquet file or a folder of them; a CSV file can be converted, for "
                "example with pyarrow: pyarrow.dataset.write_dataset(pyarrow.dataset.dataset('table.csv', "
                "format='csv'), 'folder', format='parquet')"
            )
        return None
    if stream is False and not isinstance(source, Dataset):
        return None
    files = source if isinstance(source, Dataset) else Dataset(source.path)
    return files if is_streamed(files, stream) else None


def fit_read(
    source: Source,
    target: str,
    output: Path,
    compact: bool,
    seed: int,
    settings: dict[str, Any],
    *,
    hold_out: float,
    calibrate: float,
    **options: Any,
) -> None:
    """Read a table, train a model on it, save it, and print its scores.

    Args:
        source: The table.
        target: Name of the column to predict.
        output: File of the model.
        compact: Whether to distill the ensemble into one network.
        seed: Seed of the choice of rows; the seed of the estimator is among the settings.
        settings: Arguments of the estimator.
        hold_out: Share of the rows that is held out from training, and scored.
        calibrate: Share of the other rows that is used for the calibration of intervals.
        **options: Further arguments of :func:`~mpgelu.tables.preparation.prepare`.
    """
    from mpgelu.tables.model import TableModel
    from mpgelu.tables.preparation import prepare, read_target, split

    frame = source.read()
    known, y = read_target(frame, target)
    encoder = prepare(known, y, target, **options)  # all rows, so that errors are reported before training starts
    held, kept = split("hold_out", len(known), hold_out, seed)
    split("calibrate", len(kept), calibrate, seed)
    if len(held):
        encoder = prepare(known.iloc[kept], y[kept], target, **options)
    if len(known) < len(frame):
        warn(left_out(len(frame) - len(known), target))
    typer.echo(f"{source.name}: {len(frame):,} rows, {frame.shape[1]} columns")
    print_columns(encoder)
    rows = known.iloc[kept], y[kept]
    model = TableModel.train(*rows, target, encoder, calibrate=calibrate, compact=compact, **settings)
    model.save(output)
    print_training(model)
    if len(held):
        evaluation = model.evaluate(model.encoder.encode(known.iloc[held]), y[held])
        typer.echo(f"\non {len(held)} rows kept from training:")
        print_scores(model, evaluation, 0.9)


def fit_streamed(
    table: Dataset,
    target: str,
    output: Path,
    compact: bool,
    seed: int,
    settings: dict[str, Any],
    **options: Any,
) -> None:
    """Train a model on a stream of rows, save it, and print its scores.

    Args:
        table: The Parquet files.
        target: Name of the column to predict.
        output: File of the model.
        compact: Whether to distill the ensemble into one network.
        seed: Seed of the choice of rows; the seed of the estimator is among the settings.
        settings: Arguments of the estimator.
        **options: Further arguments of :func:`~mpgelu.tables.streaming.surveyed`.
    """
    from mpgelu.tables.columns import Encoded
    from mpgelu.tables.model import TableModel
    from mpgelu.tables.streaming import surveyed

    typer.echo(f"{table.name}: {table.rows:,} rows, {len(table.schema)} columns, streamed (see --no-stream)")
    found = surveyed(table, target, seed=seed, **options)
    if found.unknown:
        warn(left_out(found.unknown, target))
    print_columns(found.encoder)
    model = TableModel.train_streamed(found, compact=compact, **settings)
    model.save(output)
    print_training(model)
    if len(found.held.y):
        typer.echo(f"\non {len(found.held.y):,} rows kept from training:")
        print_scores(model, model.evaluate(Encoded(found.held.X), found.held.y), 0.9)
