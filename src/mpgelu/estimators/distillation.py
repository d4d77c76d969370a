"""Distillation of an ensemble into one network that predicts its distribution and its epistemic variance.

rows -> distributions of the ensemble -> quadrature values of them -> one network with a mixture head
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.lesson import VALUES, Lesson, made_rows, spread_values
from mpgelu.estimators.pupil import adopt, compact_network, train
from mpgelu.estimators.recipe.networks import single_precision
from mpgelu.layers import MPGELU, Periodic, ReLU
from mpgelu.likelihoods import GaussianMixture
from mpgelu.networks import Stack

Array = NDArray[np.float64]

COMPACT = "compact network"  # name of the distilled network in kind_weights_

_STEPS, _MOST_STEPS = 2_400, 40_000  # number of steps for up to _FEW_ROWS rows, and at most
_FEW_ROWS, _MANY_ROWS = 300, 7_000  # the steps grow as the root of the rows between, and linearly beyond
_HIDDEN, _HIDDEN_OF_MANY = (128, 128, 128), (192, 192, 128)  # for up to _MANY_ROWS rows, and for more
_MADE_ROWS, _MADE_OF_GIVEN, _MOST_MADE = 20_000, 8, 80_000  # smallest number of synthetic rows, per given row, largest
_MOST_GIVEN = 30_000
_LARGE_LOSS = 0.5  # nats per row, from which on a network is not worth having
_JUDGED = 1024  # given rows at which the divergence is estimated


class Distilling:
    """The method :meth:`distill` of an estimator with a fitted :class:`Ensemble`."""

    ensemble_: Ensemble
    score_: float
    n_iter_: int
    kind_weights_: dict[str, float]
    calibration_scores_: Array | None
    _features: Array

    def distill(
        self,
        X_unlabelled: ArrayLike | None = None,
        *,
        hidden: Sequence[int] | None = None,
        components: int = 6,
        steps: int | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> Self:
        """Return a copy of this estimator whose ensemble is a single network, which is faster and smaller.

        The network approximates the distribution that the ensemble predicts by a mixture of Gaussians
        (:class:`mpgelu.GaussianMixture`), and its epistemic variance by the variance of its own random weights. It is
        trained on predictions of the ensemble at the training rows, at synthetic rows between near neighbours, and at
        rows outside the data. Outside the range of the training data both have the same additional variance
        (:meth:`mpgelu.networks.FeatureScale.extrapolation`).

        The new estimator has all methods of this one. Its intervals are not calibrated; call ``calibrate`` again. Its
        ``score_`` is an estimate, the score of this estimator minus the mean Kullback-Leibler divergence at given rows.

        Args:
            X_unlabelled: Features of further rows of the kind that will be predicted, ``(rows, n)``, without targets.
                They are required for a model that was read from a file, which does not contain the training rows.
            hidden: Number of units of each hidden layer; ``None`` for three layers of 128, the first two of which have
                192 for more than 7,000 rows.
            components: Number of components of the mixture.
            steps: Number of optimiser steps; the default is 2,400 for 300 rows, 5,200 for 1,400, 11,600 for 7,000,
                17,700 for 10,700, and at most 40,000.
            random_state: Seed of synthetic rows, initial weights and batches.
            verbose: Whether to show a progress bar on a terminal.

        Raises:
            InputError: There are no rows to train on, or an argument is invalid.
        """
        check_is_fitted(self, "ensemble_")
        given = [self._features] if hasattr(self, "_features") else []
        if X_unlabelled is not None:
            given.append(validate_data(self, X_unlabelled, reset=False, dtype=np.float64))
        if not given:
            raise InputError(
                "distill: a model from a file does not hold the rows that it was trained on; give rows like them, "
                "such as the training table: distill(X_unlabelled=X), targets are not needed"
            )
        rows = np.concatenate(given)
        default = steps is None
        steps = default_steps(len(rows)) if steps is None else steps
        if hidden is None:
            hidden = _HIDDEN if len(rows) <= _MANY_ROWS else _HIDDEN_OF_MANY
        network, loss = distilled(self.ensemble_, rows, tuple(hidden), components, steps, random_state, verbose)
        if default and loss > _LARGE_LOSS:
            warnings.warn(
                f"distill: the network predicts {loss:.2f} nats per row worse than the ensemble; keep the ensemble, or "
                f"take more than {steps:,} steps",
                UserWarning,
                stacklevel=2,
            )
        compact = copy.copy(self)
        for name in ("_features", "_trained", "_fitted_with"):
            compact.__dict__.pop(name, None)
        compact.ensemble_, compact.n_iter_ = network, steps
        compact.kind_weights_, compact.score_ = {COMPACT: 1.0}, self.score_ - loss
        compact.calibration_scores_ = None
        return compact


def default_steps(rows: int) -> int:
    """Return the default number of steps for a number of given rows."""
    growth = math.sqrt(min(max(rows, _FEW_ROWS), _MANY_ROWS) / _FEW_ROWS) * max(1.0, rows / _MANY_ROWS)
    return min(round(_STEPS * growth), _MOST_STEPS)


def distilled(
    ensemble: Ensemble,
    X: Array,
    hidden: tuple[int, ...],
    components: int,
    steps: int,
    seed: int,
    progress: bool = False,
) -> tuple[Ensemble, float]:
    """Return an ensemble of one network that approximates another ensemble, and its loss.

    Args:
        ensemble: The ensemble to approximate.
        X: Raw features of the given rows, ``(rows, n)``.
        hidden: Number of units of each hidden layer.
        components: Number of components of the mixture.
        steps: Number of optimiser steps.
        seed: Seed of synthetic rows, initial weights and batches.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The new ensemble, and an estimate of its Kullback-Leibler divergence from the given one in nats per row.

    Raises:
        InputError: There is no step or no hidden unit.
    """
    if steps < 1 or not hidden or min(hidden) < 1:
        raise InputError(f"distill: needs a step and a hidden unit at least, got steps={steps} and hidden={hidden}")
    rng = np.random.default_rng(seed)
    if len(X) > _MOST_GIVEN:
        X = X[rng.permutation(len(X))[:_MOST_GIVEN]]
    count = min(max(_MADE_ROWS, _MADE_OF_GIVEN * len(X)), _MOST_MADE)
    between, outside = made_rows(X, ensemble.scaling, count, rng)
    rows = torch.as_tensor(np.concatenate([X, between, outside]), device="cpu")
    teacher = _in_standard_units(ensemble)
    lesson = Lesson.of(teacher, rows, len(X), seed, len(outside))
    likelihood = GaussianMixture(components)
    with single_precision(seed):
        network = compact_network(X.shape[1], hidden, likelihood, lesson.unit)
    if (member := _heaviest_member(ensemble)) is not None:
        adopt(network, member)
    train(network, lesson, steps, seed, progress)  # outside, for a default device slows down every operation
    compact = Ensemble(
        [Stack([network])],
        torch.ones(1, dtype=torch.float64, device="cpu"),
        likelihood,
        copy.deepcopy(ensemble.scaling),
        ensemble.target_mean.clone(),
        ensemble.target_scale.clone(),
    ).requires_grad_(False)
    return compact, _divergence(teacher, _in_standard_units(compact), rows[: len(X)][:_JUDGED], seed)


def _heaviest_member(ensemble: Ensemble) -> nn.Module | None:
    """Return the network of the largest weight among smooth ones with a periodic embedding; ``None`` without one."""
    stacks = ensemble.each_stack()
    weights = torch.split(ensemble.weights, [len(stack) for stack in stacks])
    found = [
        (float(part.max()), stack.unstack()[int(part.argmax())])
        for part, stack in zip(weights, stacks, strict=True)
        if isinstance(next(stack.architecture.children(), None), Periodic)
        and not any(isinstance(layer, (MPGELU, ReLU)) for layer in stack.architecture.modules())
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _in_standard_units(ensemble: Ensemble) -> Ensemble:
    """Return an ensemble with the same networks for a target of scale one, without the variance of extrapolation."""
    scaling = copy.deepcopy(ensemble.scaling)
    scaling.reach.zero_()
    zero, one = (torch.tensor(number, dtype=torch.float64, device="cpu") for number in (0.0, 1.0))
    return Ensemble(
        ensemble.each_stack(),
        ensemble.weights,
        ensemble.likelihood,
        scaling,
        zero,
        one,
        ensemble.moment_type,
        ensemble.noise,
        float(ensemble.spread),
    )


def _divergence(teacher: Ensemble, pupil: Ensemble, rows: Tensor, seed: int) -> float:
    """Return an estimate of the mean Kullback-Leibler divergence of the pupil from the teacher.

    It is the mean difference of the log densities at quadrature values of the distributions of the teacher.

    Args:
        teacher: The given ensemble.
        pupil: The new ensemble.
        rows: Raw features, ``(rows, n)``.
        seed: Seed of the values.
    """
    with torch.no_grad():
        ours, theirs = (model(rows, None, VALUES) for model in (pupil, teacher))
        (values,) = spread_values(theirs, VALUES, torch.Generator().manual_seed(seed + 1))
        differences = [theirs.log_prob(y) - ours.log_prob(y) for y in values.unbind(1)]
    return torch.stack(differences).mean().item()
