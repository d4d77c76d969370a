"""Settings of the training from the arguments of the estimator and the size of the table.

The defaults were chosen on development splits of the UCI data sets, and extrapolate by powers of the number of rows.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from mpgelu.errors import InputError
from mpgelu.estimators.recipe.networks import default_network
from mpgelu.estimators.recipe.settings import Kind, Settings
from mpgelu.likelihoods import check_likelihood
from mpgelu.moments import check_moment_type

_FOLDS, _FOLDS_OF_MANY = 10, 5  # for up to _MANY_ROWS rows of the table, and for more
_MOST_OF_PROCESS = 2_000  # largest number of rows with a Gaussian process, whose cost is cubic
_EPOCHS = 256  # largest number of epochs
_ROWS_SEEN = 1_790_000  # rows of the table times epochs, for up to _ROWS_OF_THAT rows
_ROWS_OF_THAT = 7_000
_GROWTH = 0.67  # exponent of the growth of that number with the rows of the table
_COARSE = 0.05  # sigma of an embedding that is almost linear in the feature
_KINKED = 0.2  # sigma of the embedding of piecewise linear networks
_BATCH_SIZES = ((299, 32), (1_499, 64), (4_999, 128), (math.inf, 256))  # (largest number of rows, batch size)
_FEWEST_STEPS = 50
_WIDTH = 128  # units of both hidden layers, for up to _MANY_ROWS rows of the table
_MANY_ROWS = 100_000  # from where on networks are wider and fewer, and batches larger
_WIDTH_GROWTH = 0.15  # exponent of the growth of the width with the rows of the table
_MOST_OF_BRIEF = 1_000_000  # largest number of rows with briefly trained networks
_NOISES = ("heteroscedastic", "homoscedastic")


def settings_of(estimator: Any, rows: int, features: int) -> Settings:
    """Return the settings of the training.

    Args:
        estimator: An :class:`MPGELURegressor`, whose arguments are checked here.
        rows: Number of rows.
        features: Number of features.

    Raises:
        InputError: An argument is out of its range; the message names it.
    """
    for name in ("steps", "folds", "batch_size"):
        if (value := getattr(estimator, name)) is not None and not _is_positive(value):
            raise InputError(f"MPGELURegressor: {name} must be a whole number of at least 1, got {value!r}")
    for name in ("learning_rate", "effort", "time_limit"):
        if (value := getattr(estimator, name)) is not None and not 0 < value < math.inf:
            raise InputError(f"MPGELURegressor: {name} must be positive, got {value!r}")
    if not 0 <= estimator.beta < math.inf:
        raise InputError(f"MPGELURegressor: beta must not be negative, got {estimator.beta}")
    if estimator.noise not in _NOISES:
        wanted = " or ".join(map(repr, _NOISES))
        raise InputError(f"MPGELURegressor: noise must be {wanted}, got {estimator.noise!r}")
    if estimator.moments is not None:
        check_moment_type("MPGELURegressor", estimator.moments)
    if estimator.likelihood is not None:
        check_likelihood("MPGELURegressor", estimator.likelihood)
    if estimator.network is not None and not callable(estimator.network):
        raise InputError(
            "MPGELURegressor: network must be a function (features, kind, outputs) that returns a new network, got "
            f"{estimator.network!r}"
        )
    if estimator.checkpoint is not None and not isinstance(estimator.random_state, numbers.Integral):
        raise InputError(
            "MPGELURegressor: checkpoint needs a whole number as random_state, by which a fit that is resumed is "
            f"known to be the same, got {estimator.random_state!r}"
        )
    folds = min(int(estimator.folds or (_FOLDS if rows <= _MANY_ROWS else _FOLDS_OF_MANY)), rows)
    if folds < 2:
        raise InputError(f"MPGELURegressor: folds must be at least 2, got {folds}; one of them is left out in turn")
    trained = rows - -(-rows // folds)
    batch_size = min(int(estimator.batch_size or _batch_size(rows)), trained)
    steps = estimator.steps or max(_FEWEST_STEPS, round(_epochs(rows, features) * (trained / batch_size)))
    return Settings(
        kinds=_kinds(estimator, rows),
        process=estimator.likelihood is None and estimator.diverse and rows <= _MOST_OF_PROCESS,
        folds=folds,
        steps=max(1, round(steps * estimator.effort)),
        batch_size=batch_size,
        learning_rate=float(estimator.learning_rate),
        beta=float(estimator.beta),
        noise=estimator.noise,
        network=estimator.network or default_network,
        likelihood=estimator.likelihood,
        moments=estimator.moments,
        time_limit=estimator.time_limit,
        seed=int(check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max)),
        device=_device(estimator.device),
    )


def _epochs(rows: int, features: int) -> float:
    r"""Return the number of epochs: 256 for small tables, fewer for large ones.

    The product of rows and epochs is at most :math:`1\,790\,000 \max(1, r / 7000)^{0.67}` for r rows of the table,
    divided by the measured cost of a row relative to one with eight features, if that is larger.
    """
    seen = _ROWS_SEEN * max(1.0, rows / _ROWS_OF_THAT) ** _GROWTH
    cost = (2.2 + 0.16 * features) / (2.2 + 0.16 * 8)
    return float(min(_EPOCHS, seen / max(1.0, cost) / rows))


def _batch_size(rows: int) -> int:
    """Return the batch size: 32 to 256 for up to 100,000 rows of the table, then doubled for each factor of ten."""
    size = next(size for most, size in _BATCH_SIZES if rows <= most)
    return size << round(math.log10(max(1.0, rows / _MANY_ROWS)))


def _hidden(rows: int) -> tuple[int, int]:
    """Return the units of both hidden layers: 128 for up to 100,000 rows of the table, then more, in steps of 32."""
    width = _WIDTH * max(1.0, rows / _MANY_ROWS) ** _WIDTH_GROWTH
    return (32 * round(width / 32),) * 2


def _kinds(estimator: Any, rows: int) -> tuple[Kind, ...]:
    """Return one kind of networks for each rate and sigma, and other ones: piecewise linear, or trained briefly.

    Raises:
        InputError: ``hidden``, ``rate`` or ``sigma`` is invalid.
    """
    hidden = _hidden(rows) if estimator.hidden is None else estimator.hidden
    rates, sigmas = _listed(estimator.rate), _listed(estimator.sigma)
    if not isinstance(hidden, Iterable) or not all(_is_positive(width) for width in hidden):
        raise InputError(f"MPGELURegressor: hidden must be units of each layer, as (128, 128), got {hidden!r}")
    if not rates or not all(_is_number(rate) and 0 <= rate < 1 for rate in rates):
        raise InputError(f"MPGELURegressor: rate must be in [0, 1), or several such numbers, got {estimator.rate!r}")
    if not sigmas or not all(sigma is None or (_is_number(sigma) and 0 < sigma < math.inf) for sigma in sigmas):
        raise InputError(f"MPGELURegressor: sigma must be positive numbers or None, got {estimator.sigma!r}")
    widths = tuple(int(width) for width in hidden)
    kinds = tuple(
        Kind(widths, float(rate), None if sigma is None else float(sigma)) for rate in rates for sigma in sigmas
    )
    if len(set(kinds)) < len(kinds):
        raise InputError(f"MPGELURegressor: rate and sigma name a kind of networks twice: {estimator.rate!r}, {sigmas}")
    if estimator.diverse and rows <= _MANY_ROWS:
        kinds += (Kind(widths, 0.0, _KINKED, smooth=False),)
    if estimator.diverse and rows <= _MOST_OF_BRIEF:
        kinds += Kind(widths, 0.0, _COARSE, 1 / 6), Kind(widths, 0.1, None, 1 / 8)
    return kinds


def _device(wanted: Any) -> torch.device:
    """A device that holds values on this machine."""
    try:
        device = torch.zeros((), device=wanted).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"MPGELURegressor: cannot use device {str(wanted)!r} here: {reason}") from None
    if device.type == "meta":
        raise InputError("MPGELURegressor: device 'meta' holds no values and cannot train; choose 'cpu' or 'cuda'")
    return device


def _listed(value: Any) -> list[Any]:
    """Return an iterable as a list, and anything else as a list of one."""
    return list(value) if isinstance(value, Iterable) else [value]


def _is_number(value: object) -> bool:
    """Return whether a value is a real number, also of numpy."""
    return isinstance(value, numbers.Real)


def _is_positive(value: object) -> bool:
    """Return whether a value is an integer of at least one, also of numpy."""
    return isinstance(value, numbers.Integral) and int(value) >= 1
