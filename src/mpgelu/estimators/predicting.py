"""Predictions of a fitted estimator, computed in chunks of rows on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted, validate_data

from mpgelu.errors import InputError
from mpgelu.estimators import conformal
from mpgelu.estimators.checks import check_target, is_valid
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.measurement import ROWS_AT_ONCE, checked_errors
from mpgelu.native.threads import job_count, one_thread_each, run_all
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import NODES

_FLOATS = (np.float64, np.float32)

Array = NDArray[np.float64]


class PredictedParts(NamedTuple):
    """Mean and the two parts of the standard deviation of each row, in the unit of the target, each ``(rows,)``.

    The parts add as variances: ``stddev**2 == epistemic_std**2 + aleatoric_std**2``.

    Attributes:
        mean: Mean of the target.
        epistemic_std: Standard deviation due to uncertainty about the function; more rows of this kind reduce it.
        aleatoric_std: Standard deviation of the noise, which more rows do not reduce.
    """

    mean: NDArray[np.float64]
    epistemic_std: NDArray[np.float64]
    aleatoric_std: NDArray[np.float64]


class Predicting:
    """The prediction methods of an estimator with a fitted :class:`Ensemble`.

    All of them are summaries of the same distribution, the mixture of all networks, for which they are exact. Results
    are float64 in the unit of the target and do not depend on the number of threads, nor on how rows are divided into
    chunks.
    """

    ensemble_: Ensemble
    calibration_scores_: Array | None
    n_jobs: int | None

    @overload
    def predict(
        self, X: ArrayLike, return_std: Literal[False] = False, input_std: ArrayLike | None = None
    ) -> Array: ...
    @overload
    def predict(
        self, X: ArrayLike, return_std: Literal[True], input_std: ArrayLike | None = None
    ) -> tuple[Array, Array]: ...
    def predict(
        self, X: ArrayLike, return_std: bool = False, input_std: ArrayLike | None = None
    ) -> Array | tuple[Array, Array]:
        """Return the mean of the target for each row, and optionally its standard deviation.

        Args:
            X: Features, ``(rows, n)``.
            return_std: Whether to return the standard deviation, too.
            input_std: Standard deviations of independent Gaussian measurement errors of the features, in their units:
                one number, one for each feature ``(n,)``, or one for each row and feature ``(rows, n)``. The predicted
                distribution is then the average of the model's distribution over the possible true features, by
                quadrature at fixed points (:mod:`mpgelu.estimators.measurement`).

        Returns:
            The means ``(rows,)``; with ``return_std`` a pair of means and standard deviations.

        Raises:
            InputError: ``input_std`` has another shape, or is negative.
        """
        mean, stddev = self._by_chunk(X, input_std, 2, lambda p: (p.mean, p.stddev))
        return (mean, stddev) if return_std else mean

    def predict_parts(self, X: ArrayLike, input_std: ArrayLike | None = None) -> PredictedParts:
        """Return the mean of each row, and its epistemic and aleatoric standard deviations.

        Args:
            X: Features, ``(rows, n)``.
            input_std: As in :meth:`predict`; the contribution of measurement errors is epistemic.
        """
        parts = self._by_chunk(
            X, input_std, 2, lambda p: (p.mean, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt())
        )
        return PredictedParts(*parts)

    def predict_distribution(self, X: ArrayLike, input_std: ArrayLike | None = None) -> Predictive:
        """Return the distribution of the target for each row, with density, cdf, quantiles, CRPS and samples.

        The distribution consists of several thousand numbers for each row, and of tens of thousands with
        ``input_std``. For many rows use :meth:`distributions`, which bounds the memory.

        Args:
            X: Features, ``(rows, n)``.
            input_std: As in :meth:`predict`.

        Example:
            >>> from sklearn.datasets import load_diabetes
            >>> from mpgelu import MPGELURegressor
            >>> X, y = load_diabetes(return_X_y=True)
            >>> model = MPGELURegressor(steps=10, random_state=0).fit(X[:400], y[:400])
            >>> distribution = model.predict_distribution(X[400:])
            >>> distribution.probability_above(150.0).shape, distribution.quantile([0.1, 0.5, 0.9]).shape
            (torch.Size([42]), torch.Size([42, 3]))
        """
        at_once = None if input_std is None else len(np.asarray(X))  # numbers of components differ between rows
        return Predictive.concatenate([p for _, p in self.distributions(X, input_std, rows_at_once=at_once)])

    def distributions(
        self, X: ArrayLike, input_std: ArrayLike | None = None, *, nodes: int = NODES, rows_at_once: int | None = None
    ) -> Iterator[tuple[slice, Predictive]]:
        """Yield the distributions of the target for chunks of rows, in bounded memory.

        Args:
            X: Features, ``(rows, n)``.
            input_std: As in :meth:`predict`.
            nodes: Number of components of the mixture for each network; mean and variances do not depend on it.
            rows_at_once: Number of rows in each chunk but the last. The default fits the cache of the processor, with
                fewer rows if the features have errors.

        Yields:
            The rows as a slice, and their distributions.
        """
        values, errors = self._checked(X, input_std)
        usual = self.ensemble_.rows_at_once if errors is None else ROWS_AT_ONCE
        for rows in spans_of(len(values), rows_at_once or usual):
            yield rows, self._distribution(values, errors, rows, nodes)

    def predict_quantile(self, X: ArrayLike, q: float | Sequence[float], input_std: ArrayLike | None = None) -> Array:
        """Return quantiles of the target.

        Args:
            X: Features, ``(rows, n)``.
            q: One probability or several, strictly between 0 and 1.
            input_std: As in :meth:`predict`.

        Returns:
            The quantiles, ``(rows,)`` for one probability and ``(rows, len(q))`` for several.

        Raises:
            InputError: A probability is out of range.
        """
        if np.ndim(q) > 1:
            raise InputError(f"predict_quantile: q must be one probability or a list of them, got {q}")
        probabilities = np.atleast_1d(np.asarray(q, dtype=np.float64)).tolist()
        if not all(0 < probability < 1 for probability in probabilities):
            raise InputError(f"predict_quantile: q must lie strictly between 0 and 1, got {q}")
        (quantiles,) = self._by_chunk(X, input_std, NODES, lambda p: (p.quantile(probabilities),))
        return quantiles if np.ndim(q) else quantiles[:, 0]

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, input_std: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Return the ends of an interval that contains the target with probability ``level``.

        It is the central interval of the predictive distribution, between the quantiles at ``(1 - level) / 2`` and
        ``(1 + level) / 2``; after :meth:`calibrate` it is the conformal interval.

        Args:
            X: Features, ``(rows, n)``.
            level: Probability, strictly between 0 and 1.
            input_std: As in :meth:`predict`.

        Returns:
            Lower and upper ends, ``(rows,)`` each.

        Raises:
            InputError: The level is out of range, or requires more calibration rows.
        """
        self.check_level(level)
        nodes = NODES if self.calibration_scores_ is None else 2
        lower, upper = self._by_chunk(X, input_std, nodes, lambda p: self.interval_of(p, level))
        return lower, upper

    def interval_of(self, distribution: Predictive, level: float, tolerance: float = 0.0) -> tuple[Array, Array]:
        """Return the interval of :meth:`predict_interval` for distributions that this model has predicted.

        Args:
            distribution: Distributions of some rows, as :meth:`distributions` yields them.
            level: Probability, strictly between 0 and 1.
            tolerance: Largest error of the distribution function at the ends of an interval without calibration; 0 for
                rounding error.

        Returns:
            Lower and upper ends, ``(rows,)`` each.
        """
        if self.calibration_scores_ is None:
            lower, upper = distribution.interval(level, tolerance)
            return lower.numpy(), upper.numpy()
        mean = distribution.mean.numpy()
        width = conformal.quantile(self.calibration_scores_, level) * distribution.stddev.numpy()
        return mean - width, mean + width

    def check_level(self, level: float) -> None:
        """Check that this model can predict intervals of a level.

        Raises:
            InputError: The level is not strictly between 0 and 1, or there are too few calibration rows for it.
        """
        if not 0 < level < 1:
            raise InputError(f"predict_interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        self._check_fitted()
        if self.calibration_scores_ is not None:
            conformal.quantile(self.calibration_scores_, level)

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> Self:
        r"""Calibrate the intervals on rows that were not used in ``fit``, by split conformal prediction.

        Afterwards :meth:`predict_interval` is :math:`\mu(x) \pm q\, \sigma(x)` with the predicted mean and standard
        deviation, and with q the score of rank :math:`\lceil (n + 1)\, \text{level} \rceil` among the n scores
        :math:`|y - \mu| / \sigma` of the calibration rows. If the calibration rows and a new row are exchangeable, the
        interval contains the new target with a probability between ``level`` and, without ties,
        ``level + 1 / (n + 1)``, for any distribution of the data and any error of the model. The guarantee holds on
        average over rows, not conditionally on the features.

        Args:
            X: Features, ``(rows, n)``.
            y: Target, ``(rows,)``.
        """
        check_is_fitted(self, "ensemble_")
        check_target(y)
        _, target = validate_data(self, X, y, reset=False, dtype=np.float64, y_numeric=True)
        self.calibration_scores_ = conformal.scores(target, *self.predict(X, return_std=True))
        return self

    def _check_fitted(self) -> None:
        """Raise scikit-learn's error before ``fit``; its own check takes longer than the networks of one row."""
        if not hasattr(self, "ensemble_"):
            check_is_fitted(self, "ensemble_")

    def _checked(self, X: ArrayLike, input_std: ArrayLike | None) -> tuple[Array, Array | None]:
        """Return the validated features, float32 or float64, and their errors, ``None`` if all errors are zero."""
        self._check_fitted()
        values = np.asarray(X if is_valid(self, X) else validate_data(self, X, reset=False, dtype=_FLOATS))
        errors = None if input_std is None else checked_errors("predict", input_std, values.shape)
        return values, None if errors is None or not errors.any() else errors

    def _distribution(self, values: Array, errors: Array | None, rows: slice, nodes: int) -> Predictive:
        """Return the distributions of some rows."""
        x = torch.tensor(values[rows], dtype=torch.float64, device="cpu")
        with torch.no_grad():
            stds = None if errors is None else torch.tensor(errors[rows], device="cpu")
            distribution: Predictive = self.ensemble_(x, stds, nodes)
        return distribution

    def _by_chunk(
        self,
        X: ArrayLike,
        input_std: ArrayLike | None,
        nodes: int,
        summary: Callable[[Predictive], tuple[Any, ...]],
    ) -> tuple[Array, ...]:
        """Return a summary of the distribution of each row, computed in chunks of rows on ``n_jobs`` threads.

        Args:
            X: Features, ``(rows, n)``.
            input_std: As in :meth:`predict`.
            nodes: Number of components of the mixture for each network.
            summary: Function from the distributions of a chunk to arrays or tensors, ``(rows, ...)`` each.

        Returns:
            The arrays of all rows.
        """
        values, errors = self._checked(X, input_std)
        spans = spans_of(len(values), self.ensemble_.rows_at_once if errors is None else ROWS_AT_ONCE)
        tasks = [lambda rows=rows: summary(self._distribution(values, errors, rows, nodes)) for rows in spans]
        threads = job_count(self.n_jobs) if len(tasks) > 1 else 1
        with one_thread_each():
            found = run_all(tasks, threads)
        if len(found) == 1:
            return tuple(map(np.ascontiguousarray, found[0]))
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def spans_of(count: int, size: int) -> list[slice]:
    """Return slices that divide ``count`` rows into chunks of ``size``."""
    return [slice(start, start + size) for start in range(0, count, size)]
