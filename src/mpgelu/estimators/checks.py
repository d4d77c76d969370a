"""Checks of data and memory before training, with errors in words."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpgelu.errors import InputError
from mpgelu.estimators.recipe import Settings


def check_target(y: ArrayLike) -> None:
    """Refuse a target of text, in words of this library; everything else about it is for scikit-learn to check."""
    for value in np.ravel(np.asarray(y)) if np.asarray(y).dtype.kind in "OUS" else ():
        if isinstance(value, (str, bytes)):
            try:
                float(value)
            except ValueError:
                raise InputError(
                    f"fit: this is regression, which predicts a number, and y holds text such as {str(value)!r}; "
                    "give numbers (yes and no as 1 and 0), or take a classifier"
                ) from None


def check_memory(settings: Settings, features: int) -> None:
    """Refuse networks that cannot fit into this machine, before the system runs out of memory and kills at random."""
    weights = 0
    for kind in settings.kinds:
        inputs = features if kind.sigma is None else 4 * features  # an embedding puts three numbers beside each feature
        pairs = itertools.pairwise([inputs, *kind.hidden, 2])
        weights = max(weights, sum((before + 1) * after for before, after in pairs))
    needed = 4 * 5 * settings.folds * weights  # weights, gradients, Adam's moments, and a copy
    if needed > (available := _memory()):
        raise InputError(
            f"fit: {settings.folds} networks with {weights:,} weights each would take about {needed / 1e9:,.0f} GB of "
            f"memory, and this machine has {available / 1e9:,.0f}; choose smaller hidden layers"
        )


def _memory() -> float:
    """Bytes of memory of this machine, infinite if the system does not report them."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def is_valid(estimator: Any, X: ArrayLike) -> bool:
    """Whether ``validate_data`` of scikit-learn, which takes longer than a prediction of one row, would return X as is.

    Args:
        estimator: It has been fitted.
        X: Features; an array of finite float numbers, of which there are as many in a row as ``fit`` has seen.
    """
    if type(X) is not np.ndarray or X.dtype not in (np.float64, np.float32) or X.ndim != 2 or not len(X):
        return False
    named = hasattr(estimator, "feature_names_in_")  # then scikit-learn warns of features without names
    return not named and X.shape[1] == estimator.n_features_in_ and bool(np.isfinite(X).all())
