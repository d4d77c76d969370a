"""The scikit-learn estimator: regression with predictive distributions, with defaults for all settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.estimators.arguments import plain
from mpgelu.estimators.checks import check_memory, check_target, explained
from mpgelu.estimators.distillation import Distilling
from mpgelu.estimators.predicting import Predicting
from mpgelu.estimators.recipe import Kind, Noise, Rows, Settings, Trained, settings_of, train
from mpgelu.estimators.scales import robust_scale, target_scales
from mpgelu.estimators.streaming import Streaming
from mpgelu.likelihoods import Likelihood
from mpgelu.moments import Moments
from mpgelu.networks import Parts, parts_of
from mpgelu.storage.arrays import write_arrays

# Settings that train in a fifth of the time, in a third for small tables: ``MPGELURegressor(**FAST)``.
FAST: dict[str, Any] = {"folds": 5, "effort": 0.4}


class MPGELURegressor(Predicting, Streaming, Distilling, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""Regression with predictive distributions: a weighted ensemble of networks, evaluated without sampling.

    The predictive distribution is the mixture of the distributions of all networks,

    .. math:: p(y \mid x) = \sum_k w_k\, p_k(y \mid x),

    with means that are moved towards their average; see :class:`Ensemble`. ``fit`` proceeds as follows:

    1. Features are centred at their median, scaled robustly and limited smoothly; the target is standardised.
    2. Networks of several kinds, which differ in their rates, embeddings and nonlinearities, are trained by
       cross-validation: of each kind, one network for each fold, on the rows outside that fold.
    3. The weights of the kinds, the noise and the shrinkage of the networks are estimated from the predictions of rows
       by the networks that were not trained on them.

    Args:
        hidden: Number of units of each hidden layer; ``None`` for two layers of 128, wider above 100,000 rows.
        rate: Dropout rate, or several; each rate is a kind of networks. Moments are propagated through networks with
            dropout, in training and in prediction.
        sigma: Standard deviation of the initial frequencies of the periodic embedding of features, or several; each is
            a kind of networks. ``None`` among them is a kind without an embedding.
        diverse: Whether other members are added: piecewise linear networks for up to 100,000 rows, two kinds with a
            short training, one of them with dropout, for up to 1,000,000, and a Gaussian process for up to 2,000. Their
            weights are estimated like those of others.
        folds: Number of folds of the cross-validation; ``None`` for 10, and for 5 above 100,000 rows.
        network: Function from the number of features, the :class:`Kind` and the number of outputs to a network;
            ``None`` for the default perceptron.
        likelihood: Likelihood of the outputs of the networks. ``None`` is a mean with noise that is estimated from
            held-out rows; with another likelihood the distribution of a network depends on its own outputs alone.
        moments: Type of the moments that predictions propagate through networks with random layers; ``None`` for exact
            ones, or diagonal ones if these have the higher log-likelihood on held-out rows.
        noise: ``"heteroscedastic"`` for a noise variance that depends on the features, or ``"homoscedastic"``.
        effort: Factor of the number of optimiser steps.
        steps: Number of optimiser steps of each kind; ``None`` for a number that depends on the number of rows.
        batch_size: Number of rows in a step; ``None`` for a number that depends on the number of rows.
        learning_rate: Largest learning rate of the schedule, a linear warm-up followed by half a cosine.
        beta: Exponent :math:`\beta` of the weight :math:`v^\beta` of a row with predictive variance v in the loss, as
            in the beta-NLL of Seitzer et al. (2022). Rows that are fitted badly then keep their influence on the mean;
            0 is the plain likelihood.
        time_limit: Largest duration of ``fit`` in seconds, to which the number of steps is adapted; ``None`` for no
            limit.
        warm_start: Whether ``fit`` continues from the networks of the previous call.
        checkpoint: Folder for the state of ``fit``, from which the same call continues after a crash.
        random_state: Seed of folds, initial weights and batches.
        n_jobs: Number of threads of ``fit`` and of predictions, as in scikit-learn; ``None`` for as many as torch uses.
            Inside ``joblib.parallel_config`` with a backend of processes (loky, Dask, Ray), ``fit`` uses its workers.
            Results are bit-identical for any number.
        device: Device on which ``fit`` trains the networks, for example ``"cuda"``. Scaling, noise and predictions are
            computed on the CPU; ``ensemble_.to(device)`` is the fitted model on another device.
        verbose: Whether to show a progress bar on a terminal.

    Attributes:
        ensemble_: The fitted :class:`Ensemble`, a torch module from raw features to a :class:`Predictive`.
        kind_weights_: Weight of each kind of networks in the mixture, by name.
        score_: Mean log density of held-out rows, in nats, for the target in its own unit.
        n_iter_: Number of optimiser steps.
        calibration_scores_: Sorted conformity scores, ``None`` before :meth:`calibrate`.
        n_features_in_: Number of features.
        feature_names_in_: Names of the features, if ``X`` was a data frame.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = MPGELURegressor(steps=100, random_state=0).fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> lower, upper = model.predict_interval(X[400:], level=0.9)
    """

    _trained: Trained  # the result of the last fit, from which a warm start continues

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        *,
        rate: float | Sequence[float] = 0.0,
        sigma: float | Sequence[float | None] | None = (0.4, 1.0),
        diverse: bool = True,
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
        device: str | torch.device = "cpu",
        verbose: bool | int = False,
    ) -> None:
        self.hidden = hidden
        self.rate = rate
        self.sigma = sigma
        self.diverse = diverse
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
        self.device = device
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train the ensemble.

        Args:
            X: Features, ``(rows, n)``, finite.
            y: Target, ``(rows,)``, finite.
            sample_weight: Weights of the rows in the loss, ``(rows,)``, not negative. They are divided by their mean;
                rows of weight zero are left out.

        Raises:
            InputError: The data or an argument of the estimator are invalid.
            TrainingError: The loss stays non-finite.
        """
        check_target(y)
        with explained(X):
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
        native.warn_if_missing()
        scaling, (target_mean, target_scale) = robust_scale(features), target_scales(target, weights)
        rows = Rows(
            scaling(torch.as_tensor(features, device="cpu")).float(),
            torch.as_tensor((target - target_mean) / target_scale, dtype=torch.float32, device="cpu"),
            torch.as_tensor(weights / weights.mean(), dtype=torch.float32, device="cpu"),
        )
        folder, show = None if self.checkpoint is None else Path(self.checkpoint), bool(self.verbose)
        trained = train(rows, settings, start=previous, checkpoint=folder, progress=show, n_jobs=self.n_jobs)
        self._trained, self._fitted_with = trained, (settings, features.shape)
        self._keep(trained, scaling, target_mean, target_scale, features)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file, which :func:`mpgelu.load` reads.

        Args:
            path: File to write, in the safetensors format: arrays and JSON, no code.

        Raises:
            DataError: The file cannot be written.
        """
        write_arrays(Path(path), "model", *self.described())

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the arrays of the model by name, and a description in JSON, for :func:`from_description`."""
        check_is_fitted(self, "ensemble_")
        arrays, about = self.ensemble_.described()
        if self.calibration_scores_ is not None:
            arrays["calibration_scores"] = torch.as_tensor(self.calibration_scores_, device="cpu")
        about |= {
            "params": {name: plain(value) for name, value in self.get_params().items()},
            "kind_weights": list(self.kind_weights_.items()),
            "score": self.score_,
            "n_iter": self.n_iter_,
            "feature_names": list(map(str, getattr(self, "feature_names_in_", []))),
        }
        return arrays, about

    def _continued(self, settings: Settings, shape: tuple[int, ...]) -> Settings:
        """Return the settings for a warm start, with the seed of the previous fit.

        The same seed gives the same folds, so that rows that were held out from a network stay held out.

        Args:
            settings: Settings of this fit.
            shape: Shape of its features.

        Raises:
            InputError: Kinds, folds, noise or the shape of the data differ from the previous fit.
        """
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


@parts_of.register
def _(model: MPGELURegressor, caller: str, *, features: int | Sequence[str] | None = None, **_: Any) -> Parts:
    if not hasattr(model, "ensemble_"):
        raise InputError(f"{caller}: the {type(model).__name__} is not fitted; call fit first")
    names = getattr(model, "feature_names_in_", None)
    parts = parts_of(model.ensemble_, caller, features=features if names is None else list(map(str, names)))
    return replace(parts, calibration_scores=model.calibration_scores_)
