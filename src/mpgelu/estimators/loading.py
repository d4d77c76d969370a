"""Construction of a fitted estimator from the content of its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpgelu.errors import DataError
from mpgelu.estimators.arguments import arguments
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.native.threads import one_thread_each
from mpgelu.storage.arrays import check_arrays
from mpgelu.storage.schema import Count, Either, Optional, checked

_LIST_OR_ONE = Either((float, [Either((float, (None,)))]))
_SWITCH = Either((bool, int))  # Python takes a number for a truth value
_COUNT = Count(1)
_PARAMS = {
    "hidden": Optional([_COUNT], null=True),
    "rate": Optional(_LIST_OR_ONE),
    "sigma": Optional(_LIST_OR_ONE, null=True),
    "diverse": Optional(_SWITCH),
    "folds": Optional(_COUNT, null=True),
    "network": Optional((None,)),
    "likelihood": Optional({"likelihood": {"kind": str, str: object}}, null=True),
    "moments": Optional({"moments": str}, null=True),
    "noise": Optional(("heteroscedastic", "homoscedastic")),
    "effort": Optional(float),
    "steps": Optional(_COUNT, null=True),
    "batch_size": Optional(_COUNT, null=True),
    "learning_rate": Optional(float),
    "beta": Optional(float),
    "time_limit": Optional(float, null=True),
    "warm_start": Optional(_SWITCH),
    "checkpoint": Optional(str, null=True),
    "random_state": Optional(int, null=True),
    "n_jobs": Optional(Either((Count(1), Count(-(2**20), -1))), null=True),
    "device": Optional(str),
    "verbose": Optional(_SWITCH),
}
_DESCRIPTION = {
    "params": _PARAMS,
    "kind_weights": [[str, float]],
    "score": Either((float, (-math.inf,))),
    "n_iter": Count(),
    "feature_names": [str],
}


def from_description(arrays: dict[str, Tensor], about: Mapping[str, Any]) -> MPGELURegressor:
    """Return the model of a description.

    Args:
        arrays: Arrays that :meth:`MPGELURegressor.described` returned.
        about: Description that :meth:`MPGELURegressor.described` returned.

    Raises:
        DataError: The description is not one of a model, or the arrays do not fit it.
    """
    arrays = dict(arrays)
    if "kind_weights" not in about:
        raise DataError("it was saved by a version before 0.2, whose networks were other ones; fit the model again")
    checked({name: about.get(name) for name in _DESCRIPTION}, _DESCRIPTION, "the model")
    model = MPGELURegressor(**arguments(about["params"]))
    scores = arrays.pop("calibration_scores", None)
    model.ensemble_ = Ensemble.from_description(arrays, about)
    if scores is not None:
        check_arrays({"calibration_scores": scores}, {"calibration_scores": (scores.numel(),)})
    if len(about["feature_names"]) not in (0, len(arrays["scaling.center"])):
        raise DataError(
            f"the model has {len(arrays['scaling.center'])} features and {len(about['feature_names'])} names"
        )
    model.calibration_scores_ = None if scores is None else scores.numpy()
    model.kind_weights_ = dict(about["kind_weights"])
    model.score_, model.n_iter_ = float(about["score"]), about["n_iter"]
    model.n_features_in_ = len(arrays["scaling.center"])
    if about["feature_names"]:
        model.feature_names_in_ = np.array(about["feature_names"], dtype=object)
    _check_predictions(model)
    return model


def _check_predictions(model: MPGELURegressor) -> None:
    """Check that the model predicts finite numbers for a typical row and for both ends of the training data.

    This finds what no schema can: layers that do not fit each other, the features or the likelihood, and numbers that
    overflow. It costs little, because it prepares the arrays that the first prediction needs anyway.

    Raises:
        DataError: A prediction is not finite, or has another shape.
    """
    scaling = model.ensemble_.scaling
    rows = torch.stack([scaling.center, scaling.lower, scaling.upper]).double()
    with torch.no_grad(), one_thread_each():
        predicted = model.ensemble_(rows)
        mean, parts = predicted.mean, (predicted.epistemic_variance, predicted.aleatoric_variance)
        ends = map(torch.from_numpy, model.interval_of(predicted, 0.5))
    if any(value.shape != mean.shape or not value.isfinite().all() for value in (mean, *parts, *ends)):
        raise DataError("its predictions are not finite numbers, one for each row")
    if mean.shape != (len(rows),) or any((part < 0).any() for part in parts):
        raise DataError("its predictions are not one mean and two variances for each row")
