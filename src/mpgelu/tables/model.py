"""Models of tables: from columns of any type to a distribution of the target, saved in one file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
from numpy.typing import NDArray
from torch import Tensor

from mpgelu.errors import DataError, InputError
from mpgelu.estimators.loading import from_description
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.networks import Parts, parts_of
from mpgelu.predictive import Predictive
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.storage.schema import Optional, checked
from mpgelu.tables.cells import Cells
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.encoder import Encoded, Missing, TableEncoder, with_plain_names
from mpgelu.tables.evaluation import Evaluation
from mpgelu.tables.source import check_column
from mpgelu.tables.streaming import StreamedTable, TableSource, is_streamed, surveyed
from mpgelu.tables.survey import check_encoder

OUTPUTS = ("mean", "stddev", "epistemic_std", "aleatoric_std", "lower", "upper")
FEWEST_ROWS = 10
_ROWS_AT_ONCE = 256
_NODES = 8  # of each network's part of the mixture: intervals to 1e-4 standard deviations, a third of the time of 32
_TOLERANCE = 1e-5  # probability by which the ends of an interval may be off

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TableModel:
    """A regressor together with the encoding of the columns of its table.

    Args:
        target: Name of the predicted column.
        encoder: Encoding of the other columns.
        regressor: Regressor that was fitted on the encoded columns.
        rows: Number of training rows.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> table = load_diabetes(as_frame=True, scaled=False).frame
        >>> table["sex"] = table["sex"].map({1: "a", 2: "b"})
        >>> model = TableModel.fit(table[:400], "target", steps=100, random_state=0)
        >>> list(model.predict(table[400:], level=0.9))
        ['mean', 'stddev', 'epistemic_std', 'aleatoric_std', 'lower', 'upper']
    """

    target: str
    encoder: TableEncoder
    regressor: MPGELURegressor
    rows: int

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame | TableSource,
        target: str,
        *,
        missing: Missing = "impute",
        categorical: Iterable[str] = (),
        drop: Iterable[str] = (),
        calibrate: float = 0.0,
        compact: bool = False,
        stream: bool | None = None,
        **settings: Any,
    ) -> Self:
        """Learn to predict one column of a table from the others.

        A table in files of more than 1,000,000 rows or 50 million cells is not read into memory: one pass looks at all
        rows, and training reads them row group by row group, see :meth:`MPGELURegressor.fit_stream`.

        Args:
            frame: the table, of which rows without a target are left out: a data frame, the path of a Parquet file or
                of a folder of them, or a ``pyarrow.dataset.Dataset``.
            target: name of the column to predict.
            missing: ``"impute"`` fills missing cells, ``"error"`` refuses them.
            categorical: columns of numbers to be taken as names.
            drop: columns to leave out.
            calibrate: share of the rows kept from training to calibrate the intervals on, as
                :meth:`MPGELURegressor.calibrate` does.
            compact: distill the ensemble into one network afterwards, as :meth:`MPGELURegressor.distill` does.
            stream: whether files are streamed; ``None`` decides by their size. A data frame never is.
            settings: of :class:`MPGELURegressor`.
        """
        columns: dict[str, Any] = {"missing": missing, "categorical": list(categorical), "drop": list(drop)}
        if not isinstance(frame, str | os.PathLike | ds.Dataset):
            if stream:
                raise InputError("fit: stream is for Parquet files and datasets; a data frame is in memory already")
            known, y = read_target(frame, target)
            encoder = prepare(known, y, target, **columns)
            return cls.train(known, y, target, encoder, calibrate=calibrate, compact=compact, **settings)
        table = Dataset(frame)
        if not is_streamed(table, stream):
            with table.located():
                return cls.fit(table.read(), target, calibrate=calibrate, compact=compact, **columns, **settings)
        found = surveyed(
            table,
            target,
            calibrate=calibrate,
            seed=seed if isinstance(seed := settings.get("random_state"), int) else 0,
            **columns,
        )
        return cls.train_streamed(found, compact=compact, **settings)

    @classmethod
    def train_streamed(cls, table: StreamedTable, *, compact: bool = False, **settings: Any) -> Self:
        """As :meth:`fit`, with a table that has been looked at once and is streamed.

        Args:
            table: The result of :func:`surveyed`.
            compact: as in :meth:`fit`.
            settings: as in :meth:`fit`.
        """
        regressor = MPGELURegressor(**settings).fit_stream(table, spent=table.seconds)
        if compact:
            regressor = regressor.distill(verbose=bool(settings.get("verbose")))
        if len(table.calibration.y):
            regressor.calibrate(table.calibration.X, table.calibration.y)
        return cls(table.target_name, table.encoder, regressor, table.rows)

    @classmethod
    def train(
        cls,
        known: pd.DataFrame,
        y: Array,
        target: str,
        encoder: TableEncoder,
        *,
        calibrate: float = 0.0,
        compact: bool = False,
        **settings: Any,
    ) -> Self:
        """Fit a model as :meth:`fit` does, with a target and columns that have been checked already.

        Args:
            known: Rows with a known target, as :func:`read_target` returns them.
            y: Their targets, ``(rows,)``.
            target: Name of the column to predict.
            encoder: The result of :func:`prepare`.
            calibrate: As in :meth:`fit`.
            compact: As in :meth:`fit`.
            **settings: As in :meth:`fit`.
        """
        X = encoder.encode(known).X
        held, kept = split("calibrate", len(y), calibrate, settings.get("random_state"))
        regressor = MPGELURegressor(**settings).fit(X[kept], y[kept])
        if compact:
            regressor = regressor.distill(verbose=bool(settings.get("verbose")))
        if len(held):
            regressor.calibrate(X[held], y[held])
        return cls(target, encoder, regressor, len(kept))

    def distill(self, rows: pd.DataFrame | Encoded | None = None, **settings: Any) -> Self:
        """Return the same model with one network in place of the ensemble; see :meth:`MPGELURegressor.distill`.

        Args:
            rows: A table with the columns of the training table, or that table encoded; targets are not needed. It is
                required for a model that was read from a file.
            **settings: Arguments of :meth:`MPGELURegressor.distill`.
        """
        encoded = self.encoder.encode(rows) if isinstance(rows, pd.DataFrame) else rows
        return replace(self, regressor=self.regressor.distill(None if encoded is None else encoded.X, **settings))

    @overload
    def predict(self, rows: pd.DataFrame | Encoded, level: float = 0.9) -> pd.DataFrame: ...
    @overload
    def predict(self, rows: TableSource, level: float = 0.9) -> Iterator[pd.DataFrame]: ...
    def predict(
        self, rows: pd.DataFrame | Encoded | TableSource, level: float = 0.9
    ) -> pd.DataFrame | Iterator[pd.DataFrame]:
        """The columns :data:`OUTPUTS`, of standard deviations and the ends of an interval, for each row.

        It is what Dask, Ray Data and Spark need to predict tables in parts, see ``docs/workers.md``.

        Args:
            rows: a table with the columns of the training table, or that table encoded. Of a Parquet file, a folder of
                them or a ``pyarrow.dataset.Dataset`` the predictions come in parts, as the table is read: one frame for
                some thousand rows, whose index counts the rows of the table.
            level: probability of the interval, strictly between 0 and 1.
        """
        if isinstance(rows, str | os.PathLike | ds.Dataset):
            return self._predicted(Dataset(rows), level)
        X = (self.encoder.encode(rows) if isinstance(rows, pd.DataFrame) else rows).X
        parts = np.empty((len(X), len(OUTPUTS)))
        for at, p, ends in self._distributions(X, level) if len(X) else ():  # engines have parts without rows
            moments = (p.mean, p.stddev, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt())
            parts[at] = np.stack([*moments, *ends], 1)
        index = rows.index if isinstance(rows, pd.DataFrame) else None
        return pd.DataFrame(parts, columns=list(OUTPUTS), index=index)

    def _predicted(self, table: Dataset, level: float) -> Iterator[pd.DataFrame]:
        """Predictions of a table in parts."""
        with table.located():
            for part in table.frames():
                yield self.predict(part, level)

    def evaluate(self, rows: Encoded, actual: Array, level: float = 0.9) -> Evaluation:
        """Return predictions together with the observed targets.

        Args:
            rows: Encoded rows.
            actual: Observed targets, ``(rows,)``.
            level: Probability of the intervals.
        """
        parts = [Evaluation.of(actual[at], p, *ends) for at, p, ends in self._distributions(rows.X, level)]
        return Evaluation.concatenate(parts)

    def average(self, actual: Array, level: float = 0.9) -> Evaluation:
        """Return the evaluation of the baseline that predicts the average of the training targets.

        Args:
            actual: Observed targets, ``(rows,)``.
            level: Probability of the intervals.
        """
        ensemble = self.regressor.ensemble_
        return Evaluation.of_average(actual, float(ensemble.target_mean), float(ensemble.target_scale), level)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which :func:`mpgelu.load` reads.

        Args:
            path: File to write.
        """
        arrays, about = self.regressor.described()
        table = {
            "target": self.target,
            "rows": self.rows,
            "encoder": self.encoder.described(),
            "version": version("mpgelu"),
        }
        write_arrays(Path(path), "model", arrays, about | {"table": table})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read the model that :meth:`save` has written.

        Args:
            path: File to read.

        Raises:
            DataError: The file is missing, altered, or not the model of a table.
        """
        model = load(path)
        if not isinstance(model, cls):
            raise DataError(f"{path} is a model of plain numbers, not of a table; read it with mpgelu.load")
        return model

    def _distributions(self, X: Array, level: float) -> Iterator[tuple[slice, Predictive, tuple[Array, Array]]]:
        """Return distributions and intervals, computed for a few rows at a time that fit the processor's cache."""
        self.regressor.check_level(level)
        for at, p in self.regressor.distributions(X, nodes=_NODES, rows_at_once=_ROWS_AT_ONCE):
            yield at, p, self.regressor.interval_of(p, level, _TOLERANCE)


@parts_of.register
def _(model: TableModel, caller: str, **_: Any) -> Parts:
    parts = parts_of(model.regressor, caller, features=model.encoder.features)
    return replace(parts, feature_names=model.encoder.features, encode=lambda table: model.encoder.encode(table).X)


def load(path: str | os.PathLike[str]) -> Any:
    """Read a model from a file that its ``save`` has written; its predictions are bit-identical.

    Nothing in the file is executed. The networks from which ``warm_start`` would continue are not part of it.

    Args:
        path: File to read.

    Returns:
        An :class:`MPGELURegressor`, or a :class:`TableModel` such as ``mpgelu fit`` writes.

    Raises:
        DataError: The file is missing, not a model, truncated, altered, or from a newer version of this library.
    """
    arrays, about = read_arrays(Path(path), "model")
    try:
        return _from_description(arrays, about)
    except (DataError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        words = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} does not describe a model that can be built: {words}; save it again") from error


def _from_description(arrays: dict[str, Tensor], about: dict[str, Any]) -> MPGELURegressor | TableModel:
    """Return the saved estimator or table model."""
    regressor = from_description(arrays, about)
    if "table" not in about:
        return regressor
    wanted = {"target": str, "rows": int, "encoder": dict, "version": Optional(str)}
    table = checked(about["table"], wanted, "the table")
    encoder = TableEncoder.from_description(table["encoder"])
    if len(encoder.features) != regressor.n_features_in_:
        raise DataError(
            f"its columns give {len(encoder.features)} features, its networks take {regressor.n_features_in_}"
        )
    return TableModel(table["target"], encoder, regressor, table["rows"])


def prepare(
    known: pd.DataFrame,
    y: Array,
    target: str,
    *,
    missing: Missing,
    categorical: Collection[str],
    drop: Collection[str],
) -> TableEncoder:
    """Check a training table before training, and determine the encoding of its columns.

    Args:
        known: Rows with a known target, as :func:`read_target` returns them.
        y: Their targets, ``(rows,)``.
        target: Name of the column to predict.
        missing: As in :meth:`TableModel.fit`.
        categorical: As in :meth:`TableModel.fit`.
        drop: As in :meth:`TableModel.fit`.

    Raises:
        DataError: The table lacks a named column, or cannot be learned from.
    """
    names = list(map(str, known))
    for name in (*categorical, *drop):
        check_column(name, names)
    if target in drop:
        raise InputError(f"`drop`: {target!r} is the target")
    if len(y) < FEWEST_ROWS:
        raise DataError(f"{len(y)} row{'s' * (len(y) != 1)} with a target; a model needs at least {FEWEST_ROWS}")
    if np.ptp(y) == 0:
        raise DataError(f"the target {target!r} is {y[0]:g} in every row; there is nothing to predict")
    encoder = TableEncoder.learn(known.drop(columns=target), missing=missing, categorical=categorical, drop=drop)
    check_encoder(encoder, target)
    return encoder


def read_target(frame: pd.DataFrame, target: str) -> tuple[pd.DataFrame, Array]:
    """Return the rows with a known target, and the targets ``(rows,)``.

    Args:
        frame: The table.
        target: Name of the target column.

    Raises:
        DataError: There is no such column, or (as a :class:`CellError`) a target is not a finite number.
    """
    frame = with_plain_names(frame)
    check_column(target, list(map(str, frame)))
    cells = Cells.of(frame[target])
    return frame[~cells.missing], cells.targets()[~cells.missing]


def split(option: str, rows: int, share: float, seed: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of a random share of the rows, and of the others.

    Args:
        option: Name of the share in error messages.
        rows: Number of rows.
        share: Share of the rows, between 0 and 1.
        seed: Seed of the choice.
    """
    held = round(rows * share) if 0 <= share < 1 else -1
    if held < 0 or (share and not FEWEST_ROWS <= held <= rows - FEWEST_ROWS):
        count = f", which is {held} of {rows}" if held >= 0 else ""
        raise InputError(
            f"`{option}`: must be a share of the rows, below 1, that leaves at least {FEWEST_ROWS} on both sides, "
            f"got {share:g}{count}"
        )
    order = np.random.default_rng(seed if isinstance(seed, int) else 0).permutation(rows)
    return np.sort(order[:held]), np.sort(order[held:])
