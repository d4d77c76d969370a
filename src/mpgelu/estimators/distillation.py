"""One network in the place of an ensemble: it learns the ensemble's distribution, and how sure the ensemble is.

rows -> the ensemble's distribution there -> values that stand for it -> one network with a mixture head
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import cKDTree
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe.networks import single_precision
from mpgelu.estimators.recipe.steps import learning_rate
from mpgelu.layers import Beside, GaussianLinear, Linear, Periodic, Scale, SiLU
from mpgelu.likelihoods import GaussianMixture
from mpgelu.moments import FactoredMoments
from mpgelu.networks import FeatureScale, Stack
from mpgelu.predictive import Predictive
from mpgelu.training import training_progress

Array = NDArray[np.float64]

COMPACT = "compact network"  # the name of its kind

_STEPS = 2_500
_MADE_ROWS, _MOST_GIVEN = 10_000, 30_000  # rows that are made; given rows that are looked at
_GIVEN_SHARE = 0.1  # of a batch
_NEIGHBOURS, _MOST_NEIGHBOURS_OF = 10, 10_000  # of a row; rows among which they are searched for
_WHOLLY = 0.5  # share of the made rows whose features are exchanged wholly
_OUTSIDE, _FARTHEST = 0.1, 3.0  # share of the made rows that are moved away, and by how many standard deviations
_BATCH, _VALUES, _SETS = 256, 4, 8  # rows of a step, values that stand for a row's distribution, sets of such values
_PEAK, _CLIP, _BETAS = 1e-2, 5.0, (0.9, 0.98)
_SPEEDS = {"frequency": 3.0, "phase": 3.0, "log_weight_variance": 5.0, "log_bias_variance": 5.0}
_SIGMA = 0.4  # of the frequencies, see Periodic
_EPISTEMIC_WEIGHT, _MEAN_WEIGHT = 0.1, 2.0  # of their terms of the loss
_LEAST_SHARE = 1e-6  # of the variance that counts as epistemic
_AT_ONCE = 1024
_SHOWN_EVERY = 20  # steps between two updates of the progress bar
_GOLDEN = (math.sqrt(5) - 1) / 2


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
        hidden: Sequence[int] = (96, 96),
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
            steps: Of the optimiser; 2,500 by default.
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
        steps = _STEPS if steps is None else steps
        network, loss = distilled(
            self.ensemble_, np.concatenate(given), tuple(hidden), components, steps, random_state, verbose
        )
        compact = copy.copy(self)
        for name in ("_features", "_trained", "_fitted_with"):
            compact.__dict__.pop(name, None)
        compact.ensemble_, compact.n_iter_ = network, steps
        compact.kind_weights_, compact.score_ = {COMPACT: 1.0}, self.score_ - loss
        compact.calibration_scores_ = None
        return compact


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
        _train(network, lesson, steps, seed, progress)
    compact = Ensemble(
        [Stack([network])],
        torch.ones(1, dtype=torch.float64),
        likelihood,
        copy.deepcopy(ensemble.scaling),
        ensemble.target_mean.clone(),
        ensemble.target_scale.clone(),
    ).requires_grad_(False)
    return compact, _divergence(teacher, _in_standard_units(compact), rows[: len(X)][:_AT_ONCE], seed)


def compact_network(features: int, hidden: Sequence[int], likelihood: GaussianMixture) -> nn.Sequential:
    """A perceptron after a periodic embedding, sure of everything but the location of its mixture.

    Only the weights of the location are random, so moments begin at the last layer: the network costs what a plain one
    does, and diagonal moments are as exact as full ones.

    Args:
        features: Number of scaled features.
        hidden: Units of each hidden layer.
        likelihood: What the outputs mean.
    """
    embedding = Periodic(features, sigma=_SIGMA)
    modules: list[nn.Module] = [embedding, Scale(embedding.out_features)]
    before = embedding.out_features
    for after in hidden:
        layer = Linear(before, after)
        nn.init.normal_(layer.weight, 0, math.sqrt(2 / before))
        nn.init.normal_(layer.bias, 0, 0.3)
        modules += [layer, SiLU()]
        before = after
    location = GaussianLinear(before, 1, initial_variance=0.01 / before)
    shape = Linear(before, likelihood.outputs - 1)
    weight, bias = torch.randn(likelihood.outputs, before) / math.sqrt(before), torch.zeros(likelihood.outputs)
    likelihood.initialise(weight, bias)
    with torch.no_grad():
        for part, chosen in ((location, slice(0, 1)), (shape, slice(1, None))):
            part.weight.copy_(weight[chosen])
            part.bias.copy_(bias[chosen])
    return nn.Sequential(*modules, Beside(location, shape))


# Rows and what the teacher says about them


@dataclass(frozen=True)
class Lesson:
    """What a teacher predicts, in units of the target's scale.

    Args:
        z: Scaled features ``(rows, n)``.
        values: Sets of values that stand for each row's distribution, ``(sets, rows, values)``.
        mean: ``(rows,)``.
        epistemic: Variance from not knowing the function, ``(rows,)``.
        variance: The whole variance, ``(rows,)``.
        given: How many of the rows, the first, are given ones.
    """

    z: Tensor
    values: Tensor
    mean: Tensor
    epistemic: Tensor
    variance: Tensor
    given: int

    @classmethod
    def of(cls, teacher: Ensemble, rows: Tensor, given: int, seed: int) -> Lesson:
        """Ask a teacher about raw features ``(rows, n)``."""
        generator = torch.Generator().manual_seed(seed)
        parts: list[tuple[Tensor, ...]] = []
        for some in torch.split(rows, _AT_ONCE):
            with torch.no_grad():
                p = teacher(some, None, _VALUES)
            values = torch.stack([spread_values(p, _VALUES, generator) for _ in range(_SETS)], 1)
            parts.append((values, p.mean, p.epistemic_variance, p.variance))
        values, mean, epistemic, variance = (torch.cat(part).float() for part in zip(*parts, strict=True))
        variance = variance.clamp_min(torch.finfo(torch.float32).tiny)
        epistemic = torch.maximum(epistemic, _LEAST_SHARE * variance)  # of one sure network there is none
        return cls(teacher.scaling(rows).float(), values.movedim(1, 0), mean, epistemic, variance, given)


def spread_values(distribution: Predictive, count: int, generator: torch.Generator) -> Tensor:
    """Values that stand for each row's distribution, ``(rows, count)``: a randomly shifted lattice of points.

    The first coordinate of a point chooses the component, the second the place in it. An average over the values has
    the expectation under the distribution as its mean, and far less variance than one over independent draws.

    Args:
        distribution: Of the rows, ``(rows,)``.
        count: Values of a row.
        generator: Source of the shifts.
    """
    rows, dtype = distribution.means.shape[0], distribution.means.dtype
    shifts = torch.rand(2, rows, 1, generator=generator, dtype=dtype)
    places = torch.arange(count, dtype=dtype)
    which, where = (places + shifts[0]) / count, (places * _GOLDEN + shifts[1]) % 1
    steps = distribution.log_weights.exp().expand_as(distribution.means).cumsum(-1)
    component = torch.searchsorted(steps / steps[:, -1:], which).clamp_max(steps.shape[-1] - 1)
    deviation = torch.special.ndtri(where.clamp(1e-9, 1 - 1e-9))
    values: Tensor = distribution.variances.gather(1, component).sqrt() * deviation
    return values + distribution.means.gather(1, component)


def made_rows(X: Array, scaling: FeatureScale, count: int, rng: np.random.Generator) -> Array:
    """Rows like given ones: half of the features are moved part of the way to a near neighbour, some rows outside.

    Args:
        X: Raw features ``(rows, n)``.
        scaling: In whose units neighbours are near.
        count: How many to make.
        rng: Source of randomness.
    """
    known = X[rng.permutation(len(X))[:_MOST_NEIGHBOURS_OF]]
    z = scaling(torch.as_tensor(known)).numpy()
    count_of_near = min(_NEIGHBOURS, len(known) - 1)
    base = rng.integers(len(known), size=count)
    rows = known[base]
    if count_of_near:
        near = np.asarray(cKDTree(z).query(z, count_of_near + 1)[1])[:, 1:]
        other = known[near[base, rng.integers(count_of_near, size=count)]]
        part = np.where(rng.random((count, 1)) < _WHOLLY, 1.0, rng.random((count, 1)))  # whole steps keep codes codes
        moved = (rng.random(rows.shape) < 0.5) * part
        rows = rows + moved * (other - rows)
    outside = rng.random((count, 1)) < _OUTSIDE
    chosen = rng.random(rows.shape) < rng.random((count, 1))  # few features of some rows, most of others
    distance = rng.standard_normal(rows.shape) * known.std(axis=0) * rng.uniform(0, _FARTHEST, (count, 1))
    made: Array = np.where(outside & chosen, rows + distance, rows)
    return made


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
        ours, theirs = (model(rows, None, _VALUES) for model in (pupil, teacher))
        values = spread_values(theirs, _VALUES, torch.Generator().manual_seed(seed + 1))
        differences = [theirs.log_prob(y) - ours.log_prob(y) for y in values.unbind(1)]
    return torch.stack(differences).mean().item()


# Training


def loss_of(location: Tensor, variance: Tensor, shape: Tensor, lesson: Lesson, at: Tensor, step: int) -> Tensor:
    """Cross entropy of the distributions, and the distances of their means and of their epistemic variances, ``()``.

    The log density is that of ``GaussianMixture.predictive`` for these moments, without its checks.

    Args:
        location: Mean of the location of each row, ``(rows, 1)``.
        variance: Variance of the location, ``(rows, 1)``.
        shape: The other outputs, which are known, ``(rows, 3 K)``.
        lesson: What the teacher predicts.
        at: Which rows of the lesson these are, ``(rows,)``.
        step: Chooses the values that stand for the teacher's distribution.
    """
    logits, offsets, log_noises = shape.chunk(3, -1)
    log_weights, means, variances = logits.log_softmax(-1), location + offsets, variance + log_noises.exp()
    errors = lesson.values[step % _SETS, at].unsqueeze(-1) - means.unsqueeze(1)  # (rows, values, K)
    heights = (log_weights - 0.5 * variances.log()).unsqueeze(1)
    log_densities = torch.logsumexp(heights - 0.5 * errors.square() / variances.unsqueeze(1), -1)
    mean = (log_weights.exp() * means).sum(-1)
    of_mean = ((mean - lesson.mean[at]).square() / lesson.variance[at]).mean()
    of_epistemic = (variance.squeeze(-1).log() - lesson.epistemic[at].log()).square().mean()
    cross_entropy = 0.5 * math.log(2 * math.pi) - log_densities.mean()
    return cross_entropy + _EPISTEMIC_WEIGHT * of_epistemic + _MEAN_WEIGHT * of_mean


def _train(network: nn.Sequential, lesson: Lesson, steps: int, seed: int, progress: bool) -> None:
    """Adam, with a learning rate that falls to zero; a step that is not finite is left out."""
    trunk, (of_location, of_shape) = network[:-1], network[-1].children()
    generator = torch.Generator().manual_seed(seed)
    parameters, optimizer = list(network.parameters()), _optimizer(network)
    of_given = round(_GIVEN_SHARE * _BATCH)
    with training_progress(progress) as bar, torch.enable_grad():
        task = bar.add_task(COMPACT, total=steps, loss=math.nan)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = group["speed"] * learning_rate(_PEAK, (step + 1) / steps)
            at = torch.randint(len(lesson.z), (_BATCH,), generator=generator)
            at[:of_given] = torch.randint(lesson.given, (of_given,), generator=generator)
            features = trunk(lesson.z[at])
            location = of_location(FactoredMoments.certain(features))
            loss = loss_of(location.mean, location.variance, of_shape(features), lesson, at, step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if nn.utils.clip_grad_norm_(parameters, _CLIP).isfinite():
                optimizer.step()
            if step % _SHOWN_EVERY == 0:
                bar.update(task, completed=step, loss=loss.item())


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Adam with a group for each of the speeds."""
    named = dict(network.named_parameters())
    speeds = {name: _SPEEDS.get(name.rpartition(".")[2], 1.0) for name in named}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if speeds[name] == speed], "speed": speed}
        for speed in sorted(set(speeds.values()))
    ]
    return torch.optim.Adam(groups, lr=_PEAK, betas=_BETAS, fused=True)
