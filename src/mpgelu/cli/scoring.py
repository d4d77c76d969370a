"""Functions shared by the commands that predict: ``predict``, ``evaluate`` and ``report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpgelu.cli.shared import Notes
from mpgelu.errors import DataError, InputError

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    import pandas as pd

    from mpgelu.tables import Source
    from mpgelu.tables.model import TableModel


def load_model(path: Path, fast: bool = False) -> TableModel:
    """Return a saved table model.

    Args:
        path: File of the model.
        fast: Whether an ensemble propagates :class:`DiagonalMoments`, which drop the correlations between the units of
            its networks: an approximation that is several times faster. A single network always uses its own moments.
    """
    from mpgelu.moments import DiagonalMoments
    from mpgelu.tables.model import TableModel

    model = TableModel.load(path)
    if fast and len(model.regressor.ensemble_) > 1:
        model.regressor.ensemble_.moment_type = DiagonalMoments
    return model


@contextmanager
def about(source: Source) -> Iterator[None]:
    """Return a context that adds the name of the table, and the line if it is known, to errors that lack them."""
    try:
        with source.located():
            yield
    except DataError as error:
        message = str(error)
        is_named = source.name in message or "cannot write" in message
        raise DataError(message if is_named else f"{source.name}: {message}") from error


def check_level(model: TableModel, level: float) -> None:
    """Raise an error for an invalid level before any work is done.

    Args:
        model: Model that predicts the intervals; a calibrated model does not support levels close to one.
        level: Probability of the intervals.

    Raises:
        InputError: The level is not strictly between 0 and 1, or too large for the number of calibration rows.
    """
    if not 0 < level < 1:
        raise InputError(f"--level: must lie strictly between 0 and 1, got {level:g}; 90 % is 0.9")
    model.regressor.check_level(level)


def predicted(
    model: TableModel, part: pd.DataFrame, level: float, keep: Sequence[str], prefix: str, notes: Notes
) -> pd.DataFrame:
    """Return predictions of some rows, after the input columns that are kept.

    Args:
        model: The model.
        part: The rows.
        level: Probability of the intervals.
        keep: Names of input columns to copy; ``all`` for every column.
        prefix: Prefix of the names of the new columns.
        notes: Receives the unusual cells of the rows.
    """
    kept = _kept(part, keep, prefix)
    encoded = model.encoder.encode(part)
    notes.add(encoded)
    return kept.join(model.predict(encoded, level).add_prefix(prefix).set_index(part.index))


def _kept(part: pd.DataFrame, keep: Sequence[str], prefix: str) -> pd.DataFrame:
    """Return the input columns that are copied to the output.

    Raises:
        DataError: The table has no such column.
        InputError: A new column would have the name of a copied one.
    """
    from mpgelu.tables.model import OUTPUTS
    from mpgelu.tables.source import check_column

    names = list(part) if "all" in keep and "all" not in part else list(dict.fromkeys(keep))
    for name in names:
        check_column(str(name), list(map(str, part)))
    if twice := [name for name in names if name in {prefix + output for output in OUTPUTS}]:
        raise InputError(f"--keep: the table has a column {twice[0]!r} already; give --prefix, for example predicted_")
    return part[names]
