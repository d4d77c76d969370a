"""The scikit-learn estimator: calibrated regression on tables without choices to make."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators import conformal
from mpgelu.estimators.arguments import plain
from mpgelu.estimators.checks import check_memory, check_target, is_valid
from mpgelu.estimators.distillation import Distilling
from mpgelu.estimators.measurement import ROWS_AT_ONCE, checked_errors
from mpgelu.estimators.predicted import PredictedParts, inputs_of, spans_of
from mpgelu.estimators.recipe import Kind, Noise, Rows, Settings, Trained, settings_of, train
from mpgelu.estimators.scales import robust_scale, target_scales
from mpgelu.estimators.streamed import Streaming
from mpgelu.likelihoods import Likelihood
from mpgelu.moments import Moments
from mpgelu.native.threads import job_count, one_thread_each, run_all
from mpgelu.networks import Parts, parts_of
from mpgelu.predictive import Predictive
from mpgelu.storage.arrays import write_arrays

FAST: dict[str, Any] = {"effort": 0.2}  # a fifth of the time: ``MPGELURegressor(**FAST)``

_NODES, _FLOATS = 32, (np.float64, np.float32)

Array = NDArray[np.float64]


class MPGELURegressor(Streaming, Distilling, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Regression that says how sure it is: an ensemble of networks, predicted without sampling.

    Features are scaled robustly and limited smoothly. Networks of several kinds, which differ in how finely they
    resolve the features, are trained on all folds of the rows but one each. How much each kind counts, how large the
    noise is and how much the networks' disagreement says about their error is learned from the rows that each has not
    seen. The prediction is the mixture of all networks.

    Args:
        hidden: Units of each hidden layer; ``None`` takes two layers of 128, wider ones above 100,000 rows.
        rate: Dropout rate, or several, of which each makes kinds of networks of its own. Networks with dropout are
            trained and predicted by their moments.
        sigma: Standard deviations of the starting frequencies of the periodic embedding of features, one kind of
            networks for each; ``None`` in their place for networks without an embedding.
        brief: Let two kinds of networks that are trained briefly, one of them with dropout, be among the members up to
            1,000,000 rows, and a Gaussian process up to 2,000; what they count is decided by held-out rows.
        folds: Parts of the rows, of which each network leaves out one; ``None`` takes 5.
        network: Builds a network from the number of features, the :class:`Kind` and the number of outputs, instead of
            the default perceptron.
        likelihood: What the outputs of the networks mean. ``None`` is a mean with noise that is learned from held-out
            rows; with another likelihood the networks' outputs are all there is.
        moments: Type of the moments that networks with random layers propagate in predictions; ``None`` takes exact
            ones unless diagonal ones predict the held-out folds better.
        noise: ``"heteroscedastic"``, a noise that depends on the features, or ``"homoscedastic"``.
        effort: Factor of the number of optimiser steps.
        steps: Of the optimiser, for each kind; ``None`` chooses by the number of rows.
        batch_size: Rows in a step; ``None`` chooses by the number of rows.
        learning_rate: Peak of its schedule, a warm-up and half a cosine.
        beta: Rows with a large predictive variance count by its power ``beta`` in the loss, which keeps the mean from
            being neglected where it fits badly; 0 is the plain likelihood.
        time_limit: Seconds that ``fit`` may take; it then takes fewer steps if need be. ``None`` for no limit.
        warm_start: Go on from the networks of the previous ``fit``.
        checkpoint: Folder that keeps the state during ``fit``; the same fit goes on from there after a crash.
        random_state: Seed of folds, starting weights and batches.
        n_jobs: Threads of ``fit``, which trains kinds of networks, and of predictions of many rows, as in scikit-learn;
            ``None`` takes all cores that torch may use. Inside ``joblib.parallel_config`` with a backend of processes
            (loky, Dask, Ray) ``fit`` uses its workers. The bits of a result do not depend on it.
        verbose: Show a progress bar on a terminal.

    Attributes:
        ensemble_: The fitted :class:`Ensemble`, a torch module from raw features to a :class:`Predictive`.
        kind_weights_: Share of each kind of networks in the mixture.
        score_: Mean log density of held-out rows, in the target's unit.
        n_iter_: Steps taken.
        n_features_in_: Number of features.
        feature_names_in_: Their names, if X was a data frame.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = MPGELURegressor(steps=100, random_state=0).fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> lower, upper = model.predict_interval(X[400:], level=0.9)
    """

    _trained: Trained  # of the last fit, from which a warm start goes on

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        *,
        rate: float | Sequence[float] = 0.0,
        sigma: float | Sequence[float | None] | None = (0.4, 1.0),
        brief: bool = True,
        folds: int | None = None,
        network: Callable[[int, Kind, int], nn.Module] | None = None,
        likelihood: Likelihood | None = None,
        moments: type[Moments] | None = None,
        noise: Noise = "heteroscedastic",
        effort: float = 1.0,
        steps: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        beta: float = 0.5,
        time_limit: float | None = None,
        warm_start: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.hidden = hidden
        self.rate = rate
        self.sigma = sigma
        self.brief = brief
        self.folds = folds
        self.network = network
        self.likelihood = likelihood
        self.moments = moments
        self.noise = noise
        self.effort = effort
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.beta = beta
        self.time_limit = time_limit
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the ensemble.

        Args:
            X: Features ``(rows, n)``.
            y: Target ``(rows,)``.
            sample_weight: How much each row counts, ``(rows,)``.
        """
        check_target(y)
        features, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
        counting = weights > 0
        if counting.sum() < 2:
            raise InputError(f"fit: needs at least 2 rows of positive sample_weight, got {counting.sum()}")
        features, target, weights = features[counting], target[counting], weights[counting]
        settings = settings_of(self, *features.shape)
        previous = None
        if self.warm_start and hasattr(self, "_trained"):
            settings, previous = self._continued(settings, features.shape), self._trained
        check_memory(settings, features.shape[1])
        scaling, (target_mean, target_scale) = robust_scale(features), target_scales(target, weights)
        rows = Rows(
            scaling(torch.as_tensor(features)).float(),
            torch.as_tensor((target - target_mean) / target_scale, dtype=torch.float32),
            torch.as_tensor(weights / weights.mean(), dtype=torch.float32),
        )
        folder, show = None if self.checkpoint is None else Path(self.checkpoint), bool(self.verbose)
        trained = train(rows, settings, start=previous, checkpoint=folder, progress=show, n_jobs=self.n_jobs)
        self._trained, self._fitted_with = trained, (settings, features.shape)
        self._keep(trained, scaling, target_mean, target_scale, features)
        return self

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
        """Mean of the target for each row, and its standard deviation if asked for.

        Args:
            X: features ``(rows, n)``.
            return_std: return the standard deviation too.
            input_std: standard deviation of independent measurement errors of the features: one number, one for each
                feature ``(n,)``, or for each row and feature ``(rows, n)``. The prediction is then that of y where
                the true features are X plus such errors: the model's distribution averaged over them, at fixed points.
        """
        mean, stddev = self._by_chunk(X, input_std, 2, lambda p: (p.mean, p.stddev))
        return (mean, stddev) if return_std else mean

    def predict_parts(self, X: ArrayLike, input_std: ArrayLike | None = None) -> PredictedParts:
        """Mean, and the standard deviations from not knowing the function and from noise, of each row.

        Args:
            X: features ``(rows, n)``.
            input_std: as in :meth:`predict`.
        """
        parts = self._by_chunk(
            X, input_std, 2, lambda p: (p.mean, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt())
        )
        return PredictedParts(*parts)

    def predict_distribution(self, X: ArrayLike, input_std: ArrayLike | None = None) -> Predictive:
        """The distribution of the target for each row: density, cdf, quantiles, CRPS, samples.

        It holds some thousand numbers for each row, and tens of thousands with ``input_std``; give many rows in parts.

        Args:
            X: features ``(rows, n)``.
            input_std: as in :meth:`predict`.
        """
        at_once = None if input_std is None else len(np.asarray(X))  # rows differ in their components
        return Predictive.concatenate([p for _, p in self.distributions(X, input_std, rows_at_once=at_once)])

    def distributions(
        self, X: ArrayLike, input_std: ArrayLike | None = None, *, nodes: int = 32, rows_at_once: int | None = None
    ) -> Iterator[tuple[slice, Predictive]]:
        """Distributions of the target, some rows at a time: memory for these and no more.

        Args:
            X: features ``(rows, n)``.
            input_std: as in :meth:`predict`.
            nodes: Components of each network's part of the mixture; the mean and the variances do not depend on it.
            rows_at_once: Rows of each part but the last; fewer by default where features have errors.

        Yields:
            Which rows, and their distributions.
        """
        values, errors = self._checked(X, input_std)
        usual = self.ensemble_.rows_at_once if errors is None else ROWS_AT_ONCE
        for rows in spans_of(len(values), rows_at_once or usual):
            yield rows, self._distribution(values, errors, rows, nodes)

    def predict_quantile(self, X: ArrayLike, q: float | Sequence[float], input_std: ArrayLike | None = None) -> Array:
        """Quantiles of the target, ``(rows,)`` for one probability q and ``(rows, len(q))`` for several.

        Args:
            X: features ``(rows, n)``.
            q: probabilities strictly between 0 and 1.
            input_std: as in :meth:`predict`.
        """
        probabilities = np.atleast_1d(np.asarray(q, dtype=np.float64)).tolist()
        if not all(0 < probability < 1 for probability in probabilities):
            raise InputError(f"predict_quantile: q must lie strictly between 0 and 1, got {q}")
        (quantiles,) = self._by_chunk(X, input_std, _NODES, lambda p: (p.quantile(probabilities),))
        return quantiles if np.ndim(q) else quantiles[:, 0]

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9, input_std: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Lower and upper end of an interval that holds the target with probability ``level``.

        The central interval of the predictive distribution; after :meth:`calibrate`, the conformal one instead.

        Args:
            X: features ``(rows, n)``.
            level: strictly between 0 and 1.
            input_std: as in :meth:`predict`.
        """
        self.check_level(level)
        nodes = _NODES if self.calibration_scores_ is None else 2
        lower, upper = self._by_chunk(X, input_std, nodes, lambda p: self.interval_of(p, level))
        return lower, upper

    def interval_of(self, distribution: Predictive, level: float, tolerance: float = 0.0) -> tuple[Array, Array]:
        """Ends of the interval of :meth:`predict_interval`, from distributions that this model predicted.

        Args:
            distribution: Of some rows, as :meth:`distributions` gives them.
            level: Strictly between 0 and 1.
            tolerance: Probability by which the ends of an interval that is not calibrated may be off.
        """
        if self.calibration_scores_ is None:
            lower, upper = distribution.interval(level, tolerance)
            return lower.numpy(), upper.numpy()
        mean = distribution.mean.numpy()
        width = conformal.quantile(self.calibration_scores_, level) * distribution.stddev.numpy()
        return mean - width, mean + width

    def check_level(self, level: float) -> None:
        """Refuse a level for which this model has no interval.

        Raises:
            InputError: It is not strictly between 0 and 1, or there are too few calibration rows for it.
        """
        if not 0 < level < 1:
            raise InputError(f"predict_interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        check_is_fitted(self, "ensemble_")
        if self.calibration_scores_ is not None:
            conformal.quantile(self.calibration_scores_, level)

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Calibrate the intervals on rows that were not used in ``fit``, by split conformal prediction.

        Afterwards :meth:`predict_interval` is the mean plus or minus a multiple of the predicted standard deviation.
        If the calibration rows and a new row are exchangeable, it holds the new target with probability at least
        ``level``, whatever the distribution of the data and however wrong the model; with n calibration rows without
        ties at most ``level + 1 / (n + 1)``. The guarantee is for the average over rows, not for each.

        Args:
            X: features ``(rows, n)``.
            y: target ``(rows,)``.
        """
        check_is_fitted(self, "ensemble_")
        check_target(y)
        _, target = validate_data(self, X, y, reset=False, dtype=np.float64, y_numeric=True)
        self.calibration_scores_ = conformal.scores(target, *self.predict(X, return_std=True))
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file, to be read by :func:`mpgelu.load`.

        Args:
            path: of the file; a safetensors file that holds arrays and JSON, and no code.
        """
        write_arrays(Path(path), "model", *self.described())

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Arrays, and what JSON must hold beside them, for :func:`from_description`."""
        check_is_fitted(self, "ensemble_")
        arrays, about = self.ensemble_.described()
        if self.calibration_scores_ is not None:
            arrays["calibration_scores"] = torch.as_tensor(self.calibration_scores_)
        about |= {
            "params": {name: plain(value) for name, value in self.get_params().items()},
            "kind_weights": list(self.kind_weights_.items()),
            "score": self.score_,
            "n_iter": self.n_iter_,
            "feature_names": list(map(str, getattr(self, "feature_names_in_", []))),
        }
        return arrays, about

    def _continued(self, settings: Settings, shape: tuple[int, ...]) -> Settings:
        """The settings with the seed of the previous fit, so that each network's held-out rows stay held out."""
        before, shape_before = self._fitted_with
        changed = [name for name in ("kinds", "folds", "noise") if getattr(settings, name) != getattr(before, name)]
        if shape != shape_before:
            changed.append(f"rows and features ({shape_before} before, {shape} now)")
        if changed:
            raise InputError(
                f"fit: warm_start goes on from the previous fit and cannot change {', '.join(changed)}; "
                "set warm_start=False to start anew"
            )
        return replace(settings, seed=before.seed)

    def _checked(self, X: ArrayLike, input_std: ArrayLike | None) -> tuple[Array, Array | None]:
        """Features, float32 ones as they are, and their errors; ``None`` if all of these are zero."""
        if not hasattr(self, "ensemble_"):  # the check takes longer than the networks of one row
            check_is_fitted(self, "ensemble_")
        values = np.asarray(X if is_valid(self, X) else validate_data(self, X, reset=False, dtype=_FLOATS))
        errors = None if input_std is None else checked_errors("predict", input_std, values.shape)
        return values, None if errors is None or not errors.any() else errors

    def _distribution(self, values: Array, errors: Array | None, rows: slice, nodes: int) -> Predictive:
        with torch.no_grad():
            distribution: Predictive = self.ensemble_(*inputs_of(values, errors, rows), nodes)
        return distribution

    def _by_chunk(
        self,
        X: ArrayLike,
        input_std: ArrayLike | None,
        nodes: int,
        summary: Callable[[Predictive], tuple[Any, ...]],
    ) -> tuple[Array, ...]:
        """A summary of every row's distribution, a chunk of rows at a time: memory for the result and no more."""
        values, errors = self._checked(X, input_std)
        spans = spans_of(len(values), self.ensemble_.rows_at_once if errors is None else ROWS_AT_ONCE)
        tasks = [lambda rows=rows: summary(self._distribution(values, errors, rows, nodes)) for rows in spans]
        threads = job_count(self.n_jobs) if len(tasks) > 1 else 1
        with one_thread_each():
            found = run_all(tasks, threads)
        if len(found) == 1:
            return tuple(map(np.ascontiguousarray, found[0]))
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


@parts_of.register
def _(model: MPGELURegressor, caller: str, *, features: int | Sequence[str] | None = None, **_: Any) -> Parts:
    if not hasattr(model, "ensemble_"):
        raise InputError(f"{caller}: the {type(model).__name__} is not fitted; call fit first")
    names = getattr(model, "feature_names_in_", None)
    parts = parts_of(model.ensemble_, caller, features=features if names is None else list(map(str, names)))
    return replace(parts, calibration_scores=model.calibration_scores_)
