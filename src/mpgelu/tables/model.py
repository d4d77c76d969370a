"""Models of tables: a regressor with the encoding of its columns, in one file.

A :class:`TableModel` takes tables as users have them, with text, missing cells and columns in any order, and predicts a
distribution of the target for each row. Encoding is learned from the training table (:mod:`mpgelu.tables.encoder`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
from mpgelu.storage.arrays import one_line, read_arrays, write_arrays
from mpgelu.storage.schema import Count, Optional, checked
from mpgelu.tables.cells import Missing
from mpgelu.tables.columns import Encoded
from mpgelu.tables.dataset import Dataset
from mpgelu.tables.encoder import TableEncoder
from mpgelu.tables.evaluation import Evaluation
from mpgelu.tables.preparation import prepare, read_target, split
from mpgelu.tables.streaming import StreamedTable, TableSource, is_streamed, surveyed

OUTPUTS = ("mean", "stddev", "epistemic_std", "aleatoric_std", "lower", "upper")
_ROWS_AT_ONCE = 256
# Components for each network: intervals are accurate to 1e-4 standard deviations in a third of the time of 32 nodes.
_NODES = 8
_TOLERANCE = 1e-5  # largest error of the distribution function at the ends of an interval

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
        """Train a model that predicts one column of a table from the others.

        A table in files with more than 1,000,000 rows or 50 million cells is not read into memory: a first pass over
        all rows determines the encoding, and training then reads the rows by row groups; see
        :meth:`MPGELURegressor.fit_stream`.

        Args:
            frame: The table: a data frame, the path of a Parquet file or of a folder of such files, or a
                ``pyarrow.dataset.Dataset``. Rows without a target are left out.
            target: Name of the column to predict; it must contain numbers.
            missing: ``"impute"`` fills missing cells and adds a feature that marks them, ``"error"`` refuses them.
            categorical: Columns of numbers that are to be treated as categories, such as codes.
            drop: Columns to leave out.
            calibrate: Share of the rows that is not used in training but to calibrate the intervals, as
                :meth:`MPGELURegressor.calibrate` does; 0 for no calibration.
            compact: Whether the ensemble is distilled into one network, as :meth:`MPGELURegressor.distill` does.
            stream: Whether files are streamed; ``None`` decides by their size. A data frame is never streamed.
            **settings: Arguments of :class:`MPGELURegressor`.

        Raises:
            DataError: A named column does not exist, the target is not numeric or constant, or a cell is invalid.
            InputError: An argument is invalid.
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
        """Train a model as :meth:`fit` does on a stream of rows, after the first pass over the table.

        Args:
            table: The result of :func:`surveyed`. The time of the first pass counts towards ``time_limit``.
            compact: As in :meth:`fit`.
            **settings: As in :meth:`fit`.
        """
        fitted = MPGELURegressor(**settings).fit_stream(table, spent=table.seconds)
        regressor = _completed(fitted, compact, table.calibration.X, table.calibration.y)
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
        fitted = MPGELURegressor(**settings).fit(X[kept], y[kept])
        return cls(target, encoder, _completed(fitted, compact, X[held], y[held]), len(kept))

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
        """Predict mean, standard deviations and an interval for each row.

        ``stddev`` is the standard deviation of the target; its square is the sum of the squares of ``epistemic_std``
        (uncertainty about the function) and ``aleatoric_std`` (noise). ``lower`` and ``upper`` are the ends of the
        interval, the calibrated one if the model was calibrated. Dask, Ray Data and Spark can call this method for
        each partition of a table; see ``docs/workers.md``.

        Args:
            rows: A table with the columns of the training table, in any order, or that table encoded; or the path of
                a Parquet file, of a folder of such files, or a ``pyarrow.dataset.Dataset``.
            level: Probability of the interval, strictly between 0 and 1.

        Returns:
            A data frame with the columns :data:`OUTPUTS` and the index of the table. For files and datasets an
            iterator of such data frames, of some thousand rows each, whose index counts the rows from 0.

        Raises:
            DataError: The table lacks a column, or a cell is invalid.
            InputError: The level is out of range.
        """
        if isinstance(rows, str | os.PathLike | ds.Dataset):
            return self._predicted(Dataset(rows), level)
        X = (self.encoder.encode(rows) if isinstance(rows, pd.DataFrame) else rows).X
        parts = np.empty((len(X), len(OUTPUTS)))
        for at, p, ends in self._distributions(X, level) if len(X) else ():  # partitions may have no rows
            moments = (p.mean, p.stddev, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt())
            parts[at] = np.stack([*moments, *ends], 1)
        index = rows.index if isinstance(rows, pd.DataFrame) else None
        return pd.DataFrame(parts, columns=list(OUTPUTS), index=index)

    def _predicted(self, table: Dataset, level: float) -> Iterator[pd.DataFrame]:
        """Yield the predictions of a table in files part by part, as it is read."""
        with table.located():
            for part in table.frames():
                yield self.predict(part, level)

    def evaluate(self, rows: Encoded, actual: Array, level: float = 0.9) -> Evaluation:
        """Return predictions together with the observed targets, of which :meth:`Evaluation.scores` are the scores.

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
        """Yield the rows as a slice, their distributions, and the ends of their intervals, ``(256,)`` or fewer each.

        The chunks are so small that temporaries of the mixtures fit the cache of the processor.
        """
        self.regressor.check_level(level)
        for at, p in self.regressor.distributions(X, nodes=_NODES, rows_at_once=_ROWS_AT_ONCE):
            yield at, p, self.regressor.interval_of(p, level, _TOLERANCE)


def _completed(regressor: MPGELURegressor, compact: bool, X: Array, y: Array) -> MPGELURegressor:
    """Return a fitted regressor, distilled if ``compact``, and calibrated if there are rows for it.

    Args:
        regressor: The fitted regressor.
        compact: Whether the ensemble is distilled into one network.
        X: Features of the calibration rows, ``(rows, n)``.
        y: Their targets, ``(rows,)``.
    """
    if compact:
        regressor = regressor.distill(verbose=bool(regressor.verbose))
    return regressor.calibrate(X, y) if len(y) else regressor


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
    except Exception as error:  # whatever a forged file makes a constructor do
        words = one_line(error) if isinstance(error, DataError) else f"{type(error).__name__}: {one_line(error)}"
        remedy = "" if "fit the model again" in words else "; save it again"
        raise DataError(f"{path} does not describe a model that can be built: {words}{remedy}") from error


def _from_description(arrays: dict[str, Tensor], about: dict[str, Any]) -> MPGELURegressor | TableModel:
    """Return the saved estimator or table model.

    Args:
        arrays: Tensors by name.
        about: Description of the model; a table model has the additional entry ``"table"``.
    """
    regressor = from_description(arrays, about)
    if "table" not in about:
        return regressor
    wanted = {"target": str, "rows": Count(), "encoder": dict, "version": Optional(str)}
    table = checked(about["table"], wanted, "the table")
    encoder = TableEncoder.from_description(table["encoder"])
    if (count := len(encoder.features)) != regressor.n_features_in_:
        raise DataError(f"its columns give {count} features, its networks take {regressor.n_features_in_}")
    return TableModel(table["target"], encoder, regressor, table["rows"])
