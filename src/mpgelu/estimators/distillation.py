"""One network in the place of an ensemble: it learns the ensemble's distribution, and how sure the ensemble is.

rows -> the ensemble's distribution there -> values that stand for it -> one network with a mixture head
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.lesson import VALUES, Lesson, made_rows, spread_values
from mpgelu.estimators.pupil import compact_network, train
from mpgelu.estimators.recipe.networks import single_precision
from mpgelu.likelihoods import GaussianMixture
from mpgelu.networks import Stack

Array = NDArray[np.float64]

COMPACT = "compact network"  # the name of its kind

_STEPS, _MOST_STEPS = 2_800, 20_000  # for few rows, for many
_FEW_ROWS, _GROWTH = 300, 0.4  # rows that are few; power of the number of rows that the steps grow with
_MADE_ROWS, _MOST_GIVEN = 20_000, 30_000  # rows that are made; given rows that are looked at
_JUDGED = 1024  # given rows at which the loss is estimated


class Distilling:
    """What an estimator with an ``ensemble_`` needs to be distilled; its ``fit`` keeps the features of its rows."""

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
        hidden: Sequence[int] = (128, 128, 128),
        components: int = 6,
        steps: int | None = None,
        random_state: int = 0,
        verbose: bool = False,
    ) -> Self:
        """An estimator like this one whose ensemble is one network: faster, smaller, and nearly as good.

        The network learns the distribution that the ensemble predicts, as a mixture of Gaussians
        (:class:`mpgelu.GaussianMixture`), and the epistemic part of its variance, as the variance of its own random
        weights. It is trained at the training rows, at rows between near neighbours, and at rows outside. Far from the
        data it is as wide as the ensemble, by the same formula (:class:`mpgelu.networks.FeatureScale`).

        Everything that this estimator does, the new one does. Its intervals are not calibrated; call ``calibrate`` on
        it. Its ``score_`` is an estimate: this one's, less what the network loses at the given rows.

        Args:
            X_unlabelled: Features ``(rows, n)`` of further rows like those that will be predicted; no targets are
                needed. A model that was read from a file has forgotten its training rows, and needs them.
            hidden: Units of each hidden layer.
            components: Of the mixture.
            steps: Of the optimiser; by default 2,800 for 300 rows, 5,000 for 1,400, 10,000 for 7,500, at most 20,000.
            random_state: Seed of made rows, starting weights and batches.
            verbose: Show a progress bar on a terminal.

        Raises:
            InputError: There are no rows to learn from.
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
        steps = default_steps(len(rows)) if steps is None else steps
        network, loss = distilled(self.ensemble_, rows, tuple(hidden), components, steps, random_state, verbose)
        compact = copy.copy(self)
        for name in ("_features", "_trained", "_fitted_with"):
            compact.__dict__.pop(name, None)
        compact.ensemble_, compact.n_iter_ = network, steps
        compact.kind_weights_, compact.score_ = {COMPACT: 1.0}, self.score_ - loss
        compact.calibration_scores_ = None
        return compact


def default_steps(rows: int) -> int:
    """Steps of the optimiser that take about a third of the time of the fit to so many rows."""
    growth: float = max(1.0, rows / _FEW_ROWS) ** _GROWTH
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
    """An ensemble of one network that predicts what another ensemble does, and what it loses by that.

    Args:
        ensemble: The teacher.
        X: Raw features ``(rows, n)`` of rows to learn from.
        hidden: Units of each hidden layer.
        components: Of the mixture.
        steps: Of the optimiser.
        seed: Of made rows, starting weights and batches.
        progress: Show a progress bar on a terminal.

    Returns:
        The ensemble, and its Kullback-Leibler divergence from the teacher, averaged over the given rows.
    """
    if steps < 1 or not hidden or min(hidden) < 1:
        raise InputError(f"distill: needs a step and a hidden unit at least, got steps={steps} and hidden={hidden}")
    rng = np.random.default_rng(seed)
    if len(X) > _MOST_GIVEN:
        X = X[rng.permutation(len(X))[:_MOST_GIVEN]]
    rows = torch.as_tensor(np.concatenate([X, made_rows(X, ensemble.scaling, _MADE_ROWS, rng)]))
    teacher = _in_standard_units(ensemble)
    lesson = Lesson.of(teacher, rows, len(X), seed)
    likelihood = GaussianMixture(components)
    with single_precision(seed):
        network = compact_network(X.shape[1], hidden, likelihood)
        train(network, lesson, steps, seed, progress)
    compact = Ensemble(
        [Stack([network])],
        torch.ones(1, dtype=torch.float64),
        likelihood,
        copy.deepcopy(ensemble.scaling),
        ensemble.target_mean.clone(),
        ensemble.target_scale.clone(),
    ).requires_grad_(False)
    return compact, _divergence(teacher, _in_standard_units(compact), rows[: len(X)][:_JUDGED], seed)


def _in_standard_units(ensemble: Ensemble) -> Ensemble:
    """The same networks for a target of scale one, without what the distance from the data adds."""
    scaling = copy.deepcopy(ensemble.scaling)
    scaling.reach.zero_()
    zero, one = (torch.tensor(number, dtype=torch.float64) for number in (0.0, 1.0))
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
    """Mean difference of the log densities at values of the teacher's distribution."""
    with torch.no_grad():
        ours, theirs = (model(rows, None, VALUES) for model in (pupil, teacher))
        (values,) = spread_values(theirs, VALUES, torch.Generator().manual_seed(seed + 1))
        differences = [theirs.log_prob(y) - ours.log_prob(y) for y in values.unbind(1)]
    return torch.stack(differences).mean().item()
