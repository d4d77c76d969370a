"""Construction of a fitted estimator from the content of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mpgelu.errors import DataError
from mpgelu.estimators.arguments import arguments
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.storage.arrays import check_arrays
from mpgelu.storage.schema import checked

_DESCRIPTION = {
    "params": {str: object},
    "kind_weights": [[object]],
    "score": object,  # any number, also minus infinity
    "n_iter": int,
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
    if unknown := about["params"].keys() - MPGELURegressor().get_params().keys():
        raise DataError(f"the model has a parameter {min(unknown)!r}, which this version does not know")
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
    return model
