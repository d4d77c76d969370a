"""Checks of data and memory before training and prediction."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from mpgelu.errors import InputError
from mpgelu.estimators.recipe import Settings


def check_target(y: ArrayLike) -> None:
    """Raise an :class:`InputError` if the target contains text; scikit-learn checks everything else about it."""
    for value in np.ravel(np.asarray(y)) if np.asarray(y).dtype.kind in "OUS" else ():
        if isinstance(value, (str, bytes)):
            try:
                float(value)
            except ValueError:
                raise InputError(
                    f"fit: this is regression, which predicts a number, and y holds text such as {str(value)!r}; "
                    "give numbers (yes and no as 1 and 0), or take a classifier"
                ) from None
    if np.asarray(y).dtype.kind in "US":
        raise InputError("fit: y holds numbers that are written as text; convert them with np.asarray(y, dtype=float)")


@contextmanager
def explained(X: Any) -> Iterator[None]:
    """Return a context in which an error about text, dates or missing cells names the column and a remedy.

    Args:
        X: The features that are validated in the context.

    Raises:
        InputError: A column of a data frame holds text, dates or missing cells; other errors pass unchanged.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        for name, column in X.items() if isinstance(X, pd.DataFrame) else ():
            if column.dtype.kind in "mM":
                raise InputError(
                    f"MPGELURegressor: wants numbers, and column {name!r} of X holds dates or times; turn it into "
                    "numbers such as year, month, weekday or days since a start"
                ) from error
            wrong = pd.to_numeric(column, errors="coerce").isna()
            if wrong.any():
                cell = column[wrong].iloc[0]
                what = "a missing cell" if pd.isna(cell) else f"{str(cell)!r}"
                raise InputError(
                    f"MPGELURegressor: wants numbers, and column {name!r} of X holds {what}; fill and encode it, or "
                    "take mpgelu.TableModel, which accepts text and missing cells"
                ) from error
        raise


def check_memory(settings: Settings, features: int) -> None:
    """Check that the parameters of the networks fit into the memory of the machine.

    The estimate counts five float32 numbers for each weight of all folds of the largest kind: the weight, its gradient,
    the two moments of Adam, and a copy. Activations are not included.

    Args:
        settings: Settings of the training.
        features: Number of features.

    Raises:
        InputError: The parameters need more memory than the machine has.
    """
    weights = 0
    for kind in settings.kinds:
        inputs = features if kind.sigma is None else 4 * features  # an embedding adds three numbers to each feature
        pairs = itertools.pairwise([inputs, *kind.hidden, 2])
        weights = max(weights, sum((before + 1) * after for before, after in pairs))
    needed = 4 * 5 * settings.folds * weights
    if needed > (available := _memory()):
        raise InputError(
            f"fit: {settings.folds} networks with {weights:,} weights each would take about {needed / 1e9:,.0f} GB of "
            f"memory, and this machine has {available / 1e9:,.0f}; choose smaller hidden layers"
        )


def _memory() -> float:
    """Return the memory of the machine in bytes, infinite if the system does not report it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return math.inf
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def is_valid(estimator: Any, X: ArrayLike) -> bool:
    """Return whether ``validate_data`` of scikit-learn would return ``X`` unchanged and without a warning.

    The full validation takes longer than the prediction of one row. The check recognises finite numpy arrays of float32
    or float64 with the right number of features, for estimators that were fitted without feature names.

    Args:
        estimator: A fitted estimator.
        X: Features.
    """
    if type(X) is not np.ndarray or X.dtype not in (np.float64, np.float32) or X.ndim != 2 or not len(X):
        return False
    named = hasattr(estimator, "feature_names_in_")  # then scikit-learn warns of features without names
    return not named and X.shape[1] == estimator.n_features_in_ and bool(np.isfinite(X).all())
