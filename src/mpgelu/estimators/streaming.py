"""Training of an estimator on rows that need not fit into memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.estimators.checks import check_memory
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import Block, Rows, Stream, Trained, settings_of, train_streamed
from mpgelu.estimators.scales import check_target_unit, robust_scale
from mpgelu.native.threads import job_count
from mpgelu.networks import FeatureScale

Array = NDArray[np.float64]

FEWEST_ROWS = 1_000


class Streaming:
    """The methods of an estimator that train on a stream of rows and set the fitted attributes."""

    checkpoint: Any
    n_jobs: int | None
    verbose: bool | int
    warm_start: bool
    ensemble_: Ensemble
    _features: Array

    def fit_stream(self, stream: Stream, *, spent: float = 0.0) -> Self:
        """Train the ensemble on rows that need not fit into memory; :meth:`TableModel.fit` does so for Parquet files.

        Features are scaled by the quantiles of a sample and by exact ranges. Networks are trained on the blocks of the
        stream. Weights of the kinds and noise are estimated from the sample, with predictions of each row by networks
        that were not trained on it.

        Args:
            stream: The rows; at least 1,000.
            spent: Seconds that have already been spent of ``time_limit``.

        Raises:
            InputError: There are too few rows, or ``warm_start`` is set.
        """
        if self.warm_start:
            raise InputError("fit: warm_start needs the rows in memory; set warm_start=False, or checkpoint to resume")
        if stream.rows < FEWEST_ROWS:
            raise InputError(
                f"fit: {stream.rows} rows are too few for a stream, which needs {FEWEST_ROWS:,}; read them into memory"
            )
        features, (target_mean, target_scale) = stream.sample.X, stream.target
        check_target_unit(target_mean, target_scale)
        settings = replace(settings_of(self, stream.rows, features.shape[1]), process=False)
        check_memory(settings, features.shape[1])
        native.warn_if_missing()
        scaling = robust_scale(np.vstack([features, *stream.range]))  # with the ends, its ranges are exact
        trained = train_streamed(
            stream,
            partial(_scaled, scaling, target_mean, target_scale),
            settings,
            spent=spent,
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint),
            progress=bool(self.verbose),
            threads=job_count(self.n_jobs),
        )
        self.n_features_in_ = features.shape[1]
        self._keep(trained, scaling, target_mean, target_scale, features)
        return self

    def _keep(
        self, trained: Trained, scaling: FeatureScale, target_mean: float, target_scale: float, features: Array
    ) -> None:
        """Set the attributes of a fitted estimator.

        Args:
            trained: Result of the training.
            scaling: Scaling of the features.
            target_mean: Mean of the target.
            target_scale: Scale of the target.
            features: Raw features of the training rows, or of a sample, for :meth:`Distilling.distill`.
        """
        self.ensemble_ = Ensemble(
            trained.stacks,
            trained.weights,
            trained.likelihood,
            scaling,
            torch.tensor(target_mean, dtype=torch.float64, device="cpu"),
            torch.tensor(target_scale, dtype=torch.float64, device="cpu"),
            trained.moments,
            trained.noise,
            trained.spread,
        ).requires_grad_(False)
        self._features = features
        self.kind_weights_ = trained.kind_weights
        self.score_, self.n_iter_ = trained.score - float(np.log(target_scale)), trained.steps
        self.calibration_scores_: Array | None = None


def _scaled(scaling: FeatureScale, target_mean: float, target_scale: float, block: Block) -> Rows:
    """Return a block of raw rows as scaled float32 rows of weight one."""
    y = torch.as_tensor((block.y - target_mean) / target_scale, dtype=torch.float32, device="cpu")
    return Rows(scaling(torch.as_tensor(block.X, device="cpu")).float(), y, torch.ones_like(y))
