"""What all commands that predict have in common."""

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
    """A model of a table; a fast one leaves out correlations inside the networks."""
    from mpgelu.moments import DiagonalMoments
    from mpgelu.tables.model import TableModel

    model = TableModel.load(path)
    if fast and len(model.regressor.ensemble_) > 1:  # one network has no correlations worth leaving out
        model.regressor.ensemble_.moment_type = DiagonalMoments
    return model


@contextmanager
def about(source: Source) -> Iterator[None]:
    """Put the file's name, and line, before errors that do not name them."""
    try:
        with source.located():
            yield
    except DataError as error:
        told = str(error)
        raise DataError(told if source.name in told or "cannot write" in told else f"{source.name}: {told}") from error


def check_level(model: TableModel, level: float) -> None:
    """Refuse a level before any work is done."""
    if not 0 < level < 1:
        raise InputError(f"--level: must lie strictly between 0 and 1, got {level:g}; 90 % is 0.9")
    model.regressor.check_level(level)


def predicted(
    model: TableModel, part: pd.DataFrame, level: float, keep: Sequence[str], prefix: str, notes: Notes
) -> pd.DataFrame:
    """Predictions of some rows beside the input columns that are kept; ``notes`` takes what was unusual about them."""
    kept = _kept(part, keep, prefix)
    encoded = model.encoder.encode(part)
    notes.add(encoded)
    return kept.join(model.predict(encoded, level).add_prefix(prefix).set_index(part.index))


def _kept(part: pd.DataFrame, keep: Sequence[str], prefix: str) -> pd.DataFrame:
    """The input columns that are copied to the output."""
    from mpgelu.tables.model import OUTPUTS
    from mpgelu.tables.source import check_column

    names = list(part) if "all" in keep and "all" not in part else list(dict.fromkeys(keep))
    for name in names:
        check_column(str(name), list(map(str, part)))
    if twice := [name for name in names if name in {prefix + output for output in OUTPUTS}]:
        raise InputError(f"--keep: the table has a column {twice[0]!r} already; give --prefix, for example predicted_")
    return part[names]
