"""The scikit-learn estimator: calibrated regression on tables without choices to make."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.estimators import conformal
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import FEWEST_FOLDS, Covariance, Noise, Settings, train
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.networks import Stack
from mpgelu.predictive import Predictive
from mpgelu.storage.arrays import write_arrays

RATES = (1e-7, 1e-4, 1.5e-3, 8e-3, 3e-2, 1e-1)  # from almost none, for data without noise, to what few noisy rows need
FAST: dict[str, Any] = {"steps": 2_000}  # a fifth of the time, or less: ``MPGELURegressor(**FAST)``
_ROWS_AT_ONCE = 1024
_FARTHEST = 1e15  # standard deviations from the training data, beyond which float32 would overflow in the networks
_SMALLEST_SCALE = 1e-12  # relative to the mean: a feature that varies less is constant
_BATCH_SIZES = (32, 256)
# So many networks for each rate up to so many rows: the fewer rows, the more it costs to leave some out of each.
_MEMBERS = ((399, 10), (1_999, 8), (math.inf, 5))
_STEPS = ((4_999, 10_000), (math.inf, 15_000))
_ROWS_PER_BATCH_ROW = 128

Array = NDArray[np.float64]


class MPGELURegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Regression that says how sure it is: a stacked ensemble of MP-GELU networks, predicted without sampling.

    Features and target are standardised. Networks of several dropout rates are trained as one program, each on all
    folds of the rows but one. Their weights in the ensemble are those that predict the held-out folds best, so that
    the rate, and when to stop, need not be chosen. The prediction is the mixture of all networks.

    Args:
        hidden: units of each hidden layer.
        rate: dropout rate; ``None`` stacks networks of :data:`RATES`, a sequence those of the given rates.
        members: networks for each rate, each of which leaves out another fold of the rows; ``None`` takes 5, but 8
            below 2,000 rows and 10 below 400, of which a fifth is too much to leave out.
        covariance: ``"exact"`` or ``"diagonal"`` moments in predictions; diagonal ones are several times faster.
            ``"auto"`` takes exact ones unless they predict the held-out folds worse.
        train_covariance: ``"exact"`` or ``"diagonal"`` moments in training; exact ones take several times as long.
        noise: ``"heteroscedastic"``, a noise that depends on the features, or ``"homoscedastic"``.
        gaussian_weights: make the weights random too, trained with their Kullback-Leibler term; slower.
        steps: of the optimiser; ``None`` takes 10,000, and 15,000 from 5,000 rows on.
        max_epochs: fewer steps if they would pass through the rows more often.
        batch_size: rows in a step; ``None`` takes 32 to 256, more for more rows.
        learning_rate: peak of its schedule, a warm-up and half a cosine.
        beta: rows with a large predictive variance count by its power ``beta`` in the loss, which keeps the mean from
            being neglected where it fits badly; 0 is the plain likelihood.
        early_stopping: end the training when no network has improved on its held-out rows for a fifth of the steps.
        warm_start: go on from the networks of the previous ``fit``.
        checkpoint: folder that keeps the state during ``fit``; the same fit goes on from there after a crash.
        random_state: seed of folds, starting weights and batches.
        verbose: show a progress bar on a terminal.

    Attributes:
        ensemble_: the fitted :class:`Ensemble`, a torch module from raw features to a :class:`Predictive`.
        rate_weights_: share of each dropout rate in the mixture.
        score_: mean log density of held-out rows, in the target's unit. New rows score a little lower, by some
            hundredths for hundreds of rows and more for fewer: the ensemble was weighted by the same rows.
        n_iter_: steps taken.
        n_features_in_: number of features.
        feature_names_in_: their names, if X was a data frame.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = MPGELURegressor(steps=300, random_state=0).fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> lower, upper = model.predict_interval(X[400:], level=0.9)
    """

    networks_: Stack  # all networks of the last fit, from which a warm start goes on

    def __init__(
        self,
        hidden: Sequence[int] = (48, 48),
        *,
        rate: float | Sequence[float] | None = None,
        members: int | None = None,
        covariance: Covariance | Literal["auto"] = "auto",
        train_covariance: Covariance = "diagonal",
        noise: Noise = "heteroscedastic",
        gaussian_weights: bool = False,
        steps: int | None = None,
        max_epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        beta: float = 0.5,
        early_stopping: bool = False,
        warm_start: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.hidden = hidden
        self.rate = rate
        self.members = members
        self.covariance = covariance
        self.train_covariance = train_covariance
        self.noise = noise
        self.gaussian_weights = gaussian_weights
        self.steps = steps
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.beta = beta
        self.early_stopping = early_stopping
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the ensemble.

        Args:
            X: features ``(rows, n)``.
            y: target ``(rows,)``.
            sample_weight: how much each row counts, ``(rows,)``.
        """
        features, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
        counting = weights > 0
        if counting.sum() < 2:
            raise InputError(f"fit: needs at least 2 rows of positive sample_weight, got {counting.sum()}")
        features, target, weights = features[counting], target[counting], weights[counting]
        settings = self._settings(len(target))
        previous = None
        if self.warm_start and hasattr(self, "networks_"):
            settings, previous = self._continued(settings, features.shape), self.networks_
        feature_mean, feature_scale = _scales(features, weights)
        target_mean, target_scale = _scales(target, weights)
        trained = train(
            torch.as_tensor((features - feature_mean) / feature_scale, dtype=torch.float32),
            torch.as_tensor((target - target_mean) / target_scale, dtype=torch.float32),
            torch.as_tensor(weights / weights.mean(), dtype=torch.float32),
            settings,
            start=previous,
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint),
            progress=bool(self.verbose),
        )
        self.ensemble_ = Ensemble(
            trained.stack,
            HeteroscedasticGaussian(),
            trained.weights,
            torch.as_tensor(feature_mean),
            torch.as_tensor(feature_scale),
            torch.as_tensor(target_mean),
            torch.as_tensor(target_scale),
            trained.covariance,
        ).requires_grad_(False)
        self.networks_ = trained.networks
        self._fitted_with = settings, features.shape
        self.rate_weights_ = trained.rate_weights
        self.score_ = trained.score - float(np.log(target_scale))
        self.n_iter_ = trained.steps
        self.calibration_scores_: Array | None = None
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
                feature ``(n,)``, or for each row and feature ``(rows, n)``. They are propagated with exact covariance.
        """
        mean, stddev = self._by_chunk(X, input_std, 2, lambda p: (p.mean, p.stddev))
        return (mean, stddev) if return_std else mean

    def predict_parts(self, X: ArrayLike, input_std: ArrayLike | None = None) -> tuple[Array, Array, Array]:
        """Mean, epistemic variance (not knowing the function) and aleatoric variance (noise) of each row.

        Args:
            X: features ``(rows, n)``.
            input_std: as in :meth:`predict`.
        """
        means, epistemics, aleatorics = self._by_chunk(
            X, input_std, 2, lambda p: (p.mean, p.epistemic_variance, p.aleatoric_variance)
        )
        return means, epistemics, aleatorics

    def predict_distribution(self, X: ArrayLike, input_std: ArrayLike | None = None) -> Predictive:
        """The distribution of the target for each row: density, cdf, quantiles, CRPS, samples.

        It holds some hundred numbers for each row; give millions of rows in parts.

        Args:
            X: features ``(rows, n)``.
            input_std: as in :meth:`predict`.
        """
        with torch.no_grad():
            parts = [self.ensemble_(*inputs) for _, inputs in self._chunks(*self._checked(X, input_std))]
        return Predictive.concatenate(parts)

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
        if not 0 < level < 1:
            raise InputError(f"predict_interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        check_is_fitted(self, "ensemble_")
        if self.calibration_scores_ is None:
            quantiles = self.predict_quantile(X, [(1 - level) / 2, (1 + level) / 2], input_std)
            return quantiles[:, 0], quantiles[:, 1]
        mean, stddev = self.predict(X, return_std=True, input_std=input_std)
        width = conformal.quantile(self.calibration_scores_, level) * stddev
        return mean - width, mean + width

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
        features, target = validate_data(self, X, y, reset=False, dtype=np.float64, y_numeric=True)
        mean, epistemic, aleatoric = self.predict_parts(features)
        self.calibration_scores_ = conformal.scores(target, mean, np.sqrt(epistemic + aleatoric))
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
            "params": {name: _plain(value) for name, value in self.get_params().items()},
            "rate_weights": list(self.rate_weights_.items()),
            "score": self.score_,
            "n_iter": self.n_iter_,
            "feature_names": list(map(str, getattr(self, "feature_names_in_", []))),
        }
        return arrays, about

    def _settings(self, rows: int) -> Settings:
        rates = tuple(np.atleast_1d(np.asarray(RATES if self.rate is None else self.rate, dtype=np.float64)).tolist())
        if not rates or not all(0 <= rate < 1 for rate in rates) or len(set(rates)) < len(rates):
            raise InputError(f"MPGELURegressor: rate must be in [0, 1), or different such numbers, got {self.rate!r}")
        if not isinstance(self.hidden, Iterable) or not all(_is_positive(width) for width in self.hidden):
            raise InputError(f"MPGELURegressor: hidden must be units of each layer, as (48, 48), got {self.hidden!r}")
        if self.checkpoint is not None and not isinstance(self.random_state, numbers.Integral):
            raise InputError(
                "MPGELURegressor: checkpoint needs a whole number as random_state, by which a fit that is resumed is "
                f"known to be the same, got {self.random_state!r}"
            )
        for name in ("steps", "members", "max_epochs", "batch_size"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not self.learning_rate > 0 or not self.beta >= 0:
            raise InputError(
                f"MPGELURegressor: learning_rate must be positive and beta not negative, "
                f"got {self.learning_rate} and {self.beta}"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                raise InputError(f"MPGELURegressor: {name} must be {wanted}, got {getattr(self, name)!r}")
        members = min(self.members or _for_rows(rows, _MEMBERS), rows)
        batch_size = self.batch_size or int(np.clip(rows // _ROWS_PER_BATCH_ROW, *_BATCH_SIZES))
        steps = int(self.steps or _for_rows(rows, _STEPS))
        if self.max_epochs is not None:
            trained = rows - -(-rows // max(FEWEST_FOLDS, members))  # each network leaves out a fold
            steps = min(steps, int(self.max_epochs) * -(-trained // batch_size))
        return Settings(
            hidden=tuple(int(width) for width in self.hidden),
            rates=rates,
            members=members,
            steps=steps,
            batch_size=batch_size,
            learning_rate=float(self.learning_rate),
            beta=float(self.beta),
            noise=self.noise,
            gaussian_weights=bool(self.gaussian_weights),
            train_covariance=self.train_covariance,
            covariance=self.covariance,
            patience=max(1, steps // 5) if self.early_stopping else None,
            seed=int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max)),
        )

    def _continued(self, settings: Settings, shape: tuple[int, ...]) -> Settings:
        """The settings with the seed of the previous fit, so that each network's held-out rows stay held out."""
        before, shape_before = self._fitted_with
        same = ("hidden", "rates", "members", "noise", "gaussian_weights")
        changed = [name for name in same if getattr(settings, name) != getattr(before, name)]
        if shape != shape_before:
            changed.append(f"rows and features ({shape_before} before, {shape} now)")
        if changed:
            raise InputError(
                f"fit: warm_start goes on from the previous fit and cannot change {', '.join(changed)}; "
                "set warm_start=False to start anew"
            )
        return replace(settings, seed=before.seed)

    def _checked(self, X: ArrayLike, input_std: ArrayLike | None) -> tuple[Array, Array | None]:
        """Features, float32 ones as they are, and their errors."""
        check_is_fitted(self, "ensemble_")
        values = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        return values, None if input_std is None else _errors(input_std, values.shape)

    def _chunks(self, values: Array, errors: Array | None) -> Iterator[tuple[slice, tuple[Tensor, Tensor | None]]]:
        """Some rows at a time, and what the ensemble takes for them."""
        mean, scale = self.ensemble_.feature_mean.numpy(), self.ensemble_.feature_scale.numpy()
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            chunk = np.array(values[rows], dtype=np.float64)
            with np.errstate(over="ignore"):
                far = np.argwhere(np.abs(chunk - mean) > _FARTHEST * scale)
            if len(far):
                row, column = far[0]
                raise InputError(
                    f"predict: X[{start + row}, {column}] is {chunk[row, column]:g}, more than {_FARTHEST:g} standard "
                    "deviations from the training data; correct it"
                )
            yield rows, (torch.from_numpy(chunk), None if errors is None else torch.tensor(errors[rows]))

    def _by_chunk(
        self,
        X: ArrayLike,
        input_std: ArrayLike | None,
        nodes: int,
        summary: Callable[[Predictive], tuple[Tensor, ...]],
    ) -> tuple[Array, ...]:
        """A summary of every row's distribution, a chunk of rows at a time: memory for the result and no more."""
        values, errors = self._checked(X, input_std)
        results: tuple[Array, ...] = ()
        with torch.no_grad():
            for rows, inputs in self._chunks(values, errors):
                parts = summary(self.ensemble_(*inputs, nodes))
                results = results or tuple(np.empty((len(values), *part.shape[1:])) for part in parts)
                for result, part in zip(results, parts, strict=True):
                    result[rows] = part.numpy()
        return results


def from_description(arrays: dict[str, Tensor], about: Mapping[str, Any]) -> MPGELURegressor:
    """The model that :meth:`MPGELURegressor.described` described."""
    arrays = dict(arrays)
    model = MPGELURegressor(**about["params"])
    scores = arrays.pop("calibration_scores", None)
    model.ensemble_ = Ensemble.from_description(arrays, about)
    model.calibration_scores_ = None if scores is None else scores.numpy()
    model.rate_weights_ = dict(about["rate_weights"])
    model.score_, model.n_iter_ = about["score"], about["n_iter"]
    model.n_features_in_ = len(arrays["feature_mean"])
    if about["feature_names"]:
        model.feature_names_in_ = np.array(about["feature_names"], dtype=object)
    return model


def _plain(value: object) -> object:
    """An argument as JSON holds it; a generator of random numbers is not kept."""
    if isinstance(value, np.random.RandomState):
        return None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list, np.ndarray)) else value


_NODES = 32
_CHOICES = {
    "covariance": ("auto", "exact", "diagonal"),
    "train_covariance": ("exact", "diagonal"),
    "noise": ("heteroscedastic", "homoscedastic"),
}


def _for_rows(rows: int, table: Sequence[tuple[float, int]]) -> int:
    return next(value for most, value in table if rows <= most)


def _is_positive(value: object) -> bool:
    return isinstance(value, numbers.Integral) and int(value) >= 1


def _check_positive(name: str, value: object) -> None:
    if not _is_positive(value):
        raise InputError(f"MPGELURegressor: {name} must be a whole number of at least 1, got {value!r}")


def _scales(values: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted mean and standard deviation of each column; a constant one has scale one."""
    mean = np.average(values, axis=0, weights=weights)
    largest = np.abs(values - mean).max(axis=0)
    constant = largest <= _SMALLEST_SCALE * np.abs(mean)
    largest = np.where(constant, 1.0, largest)  # first in units of it, whose squares neither overflow nor vanish
    scale = largest * np.sqrt(np.average(((values - mean) / largest) ** 2, axis=0, weights=weights))
    if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
        raise InputError("fit: values are too large: their differences overflow; rescale the data")
    return mean, np.where(constant, 1.0, scale)


def _errors(input_std: ArrayLike, shape: tuple[int, ...]) -> Array:
    errors = np.asarray(input_std, dtype=np.float64)
    if errors.shape not in ((), shape[1:], shape):
        raise InputError(
            f"predict: input_std must be a number, one for each feature {shape[1:]} or one for each entry {shape}, "
            f"got shape {errors.shape}"
        )
    if not (np.isfinite(errors).all() and (errors >= 0).all()):
        raise InputError("predict: input_std must be finite and not negative; it is a standard deviation")
    return np.broadcast_to(errors, shape)
