"""Training of an ensemble on rows in memory: networks of all kinds, their weights, and the noise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpgelu.estimators.gaussian_process import fit_process
from mpgelu.estimators.noise import NoiseHead
from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Folds, Rows
from mpgelu.estimators.recipe.groups import Workers, one_thread_all
from mpgelu.estimators.recipe.head import mean_range, train_head
from mpgelu.estimators.recipe.loop import Clock, Group, Task
from mpgelu.estimators.recipe.networks import new_networks
from mpgelu.estimators.recipe.settings import Settings
from mpgelu.estimators.recipe.weights import background, fit_width, mean_weights, stacking_weights
from mpgelu.estimators.scales import LIMIT
from mpgelu.likelihoods import HeavyTailedGaussian, HeteroscedasticGaussian, Likelihood, MeanAndLogVariance
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.native.threads import run_all
from mpgelu.networks import Stack, is_random
from mpgelu.training import Interrupts, RecoveryWarning, training_progress

_AGREEMENT = 0.01  # nats per row by which exact moments may score below diagonal ones and still be preferred
_HELD_AT_ONCE = 1024
_LEAST_WEIGHT = 0.02  # members of a smaller weight are dropped, because they would cost as much as others
_HEAD_SECONDS, _HEAD_SECONDS_OF_ROW = 1.0, 1.2e-4  # part of a time limit that is reserved for noise and weights


class InterruptedWarning(UserWarning):
    """Training was stopped by Ctrl-C; the state so far was kept."""


@dataclass(frozen=True)
class Member:
    """Networks that share one weight in the ensemble: those of a kind, or a Gaussian process.

    Args:
        name: Name of the kind.
        stack: The networks.
        folds: Rows that are held out from each network; ``None`` for a Gaussian process, which has a closed form.
    """

    name: str
    stack: Stack
    folds: Folds | None

    @property
    def rows_left_out(self) -> Folds:
        """The folds of a kind of networks."""
        assert self.folds is not None
        return self.folds


@dataclass(frozen=True)
class Trained:
    """The result of :func:`train`.

    Attributes:
        members: Members with a weight of at least 2 %.
        weights: Weights of all networks, ``(M,)``, summing to one.
        likelihood: Likelihood of their outputs.
        noise: Noise that was estimated from held-out rows; ``None`` with a likelihood of the user.
        spread: Factor c of the shrinkage of the means towards their average; see :class:`Ensemble`.
        moments: Type of moments that predictions propagate.
        score: Mean log density of held-out rows, for the scaled target.
        steps: Number of steps of each kind of effort one.
    """

    members: list[Member]
    weights: Tensor
    likelihood: Likelihood
    noise: NoiseHead | None
    spread: float
    moments: type[Moments]
    score: float
    steps: int

    @property
    def stacks(self) -> list[Stack]:
        """The networks of each member."""
        return [member.stack for member in self.members]

    def stack_of(self, name: str) -> Stack | None:
        """Return a copy of the networks of a member; ``None`` if it was dropped."""
        found = [member.stack for member in self.members if member.name == name]
        return Stack(found[0].unstack()) if found else None

    @property
    def kind_weights(self) -> dict[str, float]:
        """Weight of each member, by name."""
        parts = torch.split(self.weights, [len(stack) for stack in self.stacks])
        return {member.name: float(part.sum()) for member, part in zip(self.members, parts, strict=True)}


def train(
    rows: Rows,
    settings: Settings,
    *,
    start: Trained | None = None,
    checkpoint: Path | None = None,
    progress: bool = False,
    n_jobs: int | None = 1,
) -> Trained:
    """Train the networks of all kinds, then estimate their weights and the noise from held-out rows.

    Args:
        rows: Scaled training data.
        settings: Settings of the training.
        start: A previous result to continue from.
        checkpoint: Folder for the state of the training, from which the same call continues.
        progress: Whether to show a progress bar, if standard error is a terminal.
        n_jobs: Number of kinds that are trained at the same time, see :class:`Workers`; results are bit-identical.

    Raises:
        TrainingError: More than half of the losses of a network were not finite.
        DataError: The checkpoint is damaged, or the folder cannot be written.
    """
    clock, workers = Clock(settings.time_limit), Workers.of(n_jobs)
    likelihood = settings.likelihood or HeteroscedasticGaussian()
    with training_progress(progress) as bar, Interrupts() as interrupts, one_thread_all():
        process = cache(partial(_process, rows, settings))
        if settings.time_limit is not None:
            process()  # before the time that is left is divided, because that of the process cannot be limited
        groups = [_group(position, rows, likelihood, settings, start) for position in range(len(settings.kinds))]
        if checkpoint:
            for group in groups:
                group.keeper = Keeper(checkpoint, group.trainer, rows, settings)
        queue = sorted(groups, key=lambda group: group.trainer.is_divisible)  # idle threads help with the last ones
        seconds = (clock.left - seconds_of_head(len(rows.y), clock)) / _longest(
            [group.task.effort for group in queue], workers.count
        )
        workers.train(queue, rows, seconds, interrupts, bar, first=process)
        members, taken = [], settings.steps
        for kind, group in zip(settings.kinds, groups, strict=True):
            if group.is_trained:
                group.task.stack.requires_grad_(False)
                members.append(Member(str(kind), group.task.stack, group.task.rows_left_out(len(rows.y))))
                taken = min(taken, group.trainer.taken) if kind.effort == 1 else taken
        estimate = partial(weighted, members, rows.judges(), likelihood, settings, process(), taken, interrupts)
        (trained,) = run_all([estimate], workers.threads)
    warn(groups, taken, settings.steps, interrupts)
    return trained


def seconds_of_head(rows: int, clock: Clock) -> float:
    """Return the seconds of a time limit that are reserved for the estimation of noise and weights.

    Args:
        rows: Number of rows from which they are estimated.
        clock: The time limit, of which at most half of the rest is reserved.
    """
    return min(_HEAD_SECONDS + _HEAD_SECONDS_OF_ROW * rows, clock.left / 2)


def _group(position: int, rows: Rows, likelihood: Likelihood, settings: Settings, start: Trained | None) -> Group:
    """Return the networks of a kind before their training; those of a previous result, if it has them."""
    stack = start.stack_of(str(settings.kinds[position])) if start else None
    task = task_of(position, rows.X.shape[1], likelihood, settings, stack)
    return Group(task, task.trainer(len(rows.y)))


def task_of(
    position: int, features: int, likelihood: Likelihood, settings: Settings, stack: Stack | None = None
) -> Task:
    """Return the training task of a kind.

    Args:
        position: Position of the kind in the settings.
        features: Number of features.
        likelihood: Likelihood of the outputs.
        settings: Settings of the training.
        stack: Networks to continue from; ``None`` for new ones.
    """
    kind, seed = settings.kinds[position], settings.seed + position
    return Task(
        title=f"{position + 1} of {len(settings.kinds)}: {kind}",
        stack=stack or new_networks(features, kind, likelihood, settings, seed),
        likelihood=likelihood,
        folds=settings.folds,
        steps=max(1, round(kind.effort * settings.steps)),
        effort=kind.effort,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        beta=settings.beta,
        seed=seed,
        device=settings.device,
    )


def warn(groups: list[Group], taken: int, steps: int, interrupts: Interrupts) -> None:
    """Warn about skipped steps and about an interruption, at the line that called ``fit``.

    Args:
        groups: The networks of each kind.
        taken: Number of steps of the kinds of effort one.
        steps: Number of steps in the settings.
        interrupts: State of Ctrl-C.
    """
    for group in groups:
        if group.is_trained and group.trainer.left_out.any():
            warnings.warn(
                f"fit: {int(group.trainer.left_out.sum())} steps whose loss was not finite were left out, in "
                f"{group.trainer.share_left_out:.1%} of the steps of the network with most of them",
                RecoveryWarning,
                stacklevel=4,
            )
    if interrupts.seen:
        done = sum(group.is_trained for group in groups)
        so_far = f"{taken} of {steps} steps" if done == len(groups) else f"{done} of {len(groups)} kinds of networks"
        warnings.warn(f"fit: interrupted after {so_far}; the state so far was kept", InterruptedWarning, stacklevel=4)


def _longest(efforts: list[float], workers: int) -> float:
    """Return the total effort of the busiest worker, if workers take the kinds in order, each when it is free."""
    done = [0.0] * workers
    for effort in efforts:
        done[done.index(min(done))] += effort
    return max(done)


class _Process(NamedTuple):
    """A Gaussian process as a member of the ensemble.

    Attributes:
        member: The process, conditioned on all rows.
        held: Its cross-validated outputs (mean, log-variance) for each row, ``(rows, 2)``.
        single: Its prediction of each row from all other rows, ``(rows,)``.
    """

    member: Member
    held: Tensor
    single: Tensor


def _process(rows: Rows, settings: Settings) -> _Process | None:
    """Return a Gaussian process that is conditioned on all rows, with cross-validated outputs, if one is wanted."""
    if not settings.process:
        return None
    process, means, single = fit_process(rows.X, rows.y, LIMIT, Folds.of(len(rows.y), settings.folds, settings.seed))
    log_variance = MeanAndLogVariance.of(process(rows.X[:1])).log_variance
    held = MeanAndLogVariance(means, log_variance.expand_as(means)).joined()
    return _Process(Member("Gaussian process", Stack([nn.Sequential(process)]), None), held, single)


def weighted(
    members: list[Member],
    rows: Rows,
    likelihood: Likelihood,
    settings: Settings,
    process: _Process | None,
    taken: int,
    interrupts: Interrupts,
) -> Trained:
    """Estimate weights and noise of trained networks from rows that were held out from them.

    With a likelihood of the user, the weights maximise the log-likelihood of the mixture (:func:`stacking_weights`).
    Otherwise the weights minimise the error of the averaged means (:func:`mean_weights`), a noise head is trained on
    the residuals (:func:`train_head`), spread and tails of the mixture are estimated (:func:`fit_width`), and the
    correction of the noise for averaging is chosen (:meth:`NoiseHead.settle`). Members below 2 % are dropped.

    Args:
        members: Trained networks of each kind.
        rows: Rows with weights for validation, :meth:`Rows.judges`.
        likelihood: Likelihood of the outputs.
        settings: Settings of the training.
        process: Gaussian process, if there is one.
        taken: Number of steps of the kinds of effort one.
        interrupts: Ends the training of the noise head after Ctrl-C.
    """
    moments = settings.moments or _best_moments(members, rows, likelihood)
    if settings.likelihood is not None:
        densities = torch.stack([_densities(member, rows, likelihood, moments) for member in members], 1)
        by_kind, score = stacking_weights(densities, rows.weights)
        kept = _heavy(by_kind)
        if len(kept) < len(members):
            members = [members[i] for i in kept]
            by_kind, score = stacking_weights(densities[:, kept], rows.weights)
        return Trained(members, _by_network(by_kind, members), likelihood, None, 1.0, moments, score, taken)
    limits = mean_range(rows.y)
    held = [_held_out(member, rows.X, moments, lambda outputs, _: _mean(outputs)) for member in members]
    if process is not None:
        members, held = [*members, process.member], [*held, process.held]
    means, own = MeanAndLogVariance.of(torch.stack(held))  # (kinds, rows)
    means = means.clamp(*limits)
    y, row_weights = rows.y.double().numpy(), rows.weights.double().numpy()
    by_kind = torch.as_tensor(mean_weights(means.double().numpy(), y, row_weights), device="cpu")
    kept = _heavy(by_kind)
    members, by_kind = [members[i] for i in kept], by_kind[kept] / by_kind[kept].sum()
    means, own = means[kept], own[kept]
    if process is not None and [member.name for member in members] == [process.member.name]:
        means = process.single.clamp(*limits)[None]  # it predicts new rows from all rows, not from four folds
    constant = settings.noise == "homoscedastic"
    noise, log_variance = train_head(
        rows.X, means, own, rows.y, rows.weights, by_kind, constant, settings.seed, interrupts
    )
    width, score = fit_width(means.double().numpy(), log_variance.double().numpy(), y, by_kind.numpy(), row_weights)
    noise.log_scale += math.log(width.scale)
    noise.spread.fill_(width.spread)
    tails = HeavyTailedGaussian(width.tail_share, width.tail_width, *background(len(rows.y)), width.tail_offset)
    some = _some_of(rows)
    with torch.no_grad():
        values = [_mean(_outputs(m.stack, some.X.expand(len(m.stack), -1, -1), moments)) for m in members]
    noise.settle(some.X, values, some.weights, tails.variance_ratio)
    return Trained(members, _by_network(by_kind, members), tails, noise, width.spread, moments, score, taken)


def _heavy(by_kind: Tensor) -> Tensor:
    """Return the places of weights of at least 2 %, or of the largest one if all have less, as of many kinds."""
    return torch.nonzero(by_kind >= by_kind.max().clamp_max(_LEAST_WEIGHT)).flatten()


def _some_of(rows: Rows) -> Rows:
    """Return at most 512 rows of positive weight, at equal distances."""
    judging = torch.nonzero(rows.weights).flatten()
    some = min(len(judging), _HELD_AT_ONCE // 2)
    at = judging[torch.linspace(0, len(judging) - 1, some, device=judging.device).long()]
    return Rows(rows.X[at], rows.y[at], rows.weights[at])


def _by_network(by_kind: Tensor, members: list[Member]) -> Tensor:
    """Return the weights of all networks, ``(M,)``; those of a member have equal parts of its weight."""
    return torch.cat([(w / len(m.stack)).expand(len(m.stack)) for w, m in zip(by_kind, members, strict=True)])


def _best_moments(members: list[Member], rows: Rows, likelihood: Likelihood) -> type[Moments]:
    """Return the type of moments for predictions: exact ones, unless diagonal ones have a higher held-out score.

    Only networks with random layers are compared. Exact moments are preferred up to a difference of 0.01 nats per row.
    """
    random = [member for member in members if is_random(member.stack.architecture)]
    if not random:
        return FactoredMoments
    scores = []
    for moments in (FactoredMoments, DiagonalMoments):
        densities = [_densities(member, rows, likelihood, moments) for member in random]
        scores.append(stacking_weights(torch.stack(densities, 1), rows.weights)[1])
    exact, diagonal = scores
    return FactoredMoments if exact + _AGREEMENT >= diagonal else DiagonalMoments


def _outputs(stack: Stack, x: Tensor, moments: type[Moments]) -> Moments | Tensor:
    """Return the outputs ``(networks, rows, outputs)`` for features ``(networks, rows, n)``."""
    outputs: Moments | Tensor = stack(moments.certain(x) if is_random(stack.architecture) else x)
    return outputs


def _mean(outputs: Moments | Tensor) -> Tensor:
    """Return the mean of outputs; deterministic ones are their own."""
    return outputs if isinstance(outputs, Tensor) else outputs.mean


def _held_out(
    member: Member, X: Tensor, moments: type[Moments], value: Callable[[Moments | Tensor, Tensor], Tensor]
) -> Tensor:
    """Return a value of the outputs for each row, by the network from which the row is held out, ``(rows, ...)``.

    Args:
        member: The networks.
        X: Scaled features, ``(rows, n)``.
        moments: Type of moments that networks with random layers propagate.
        value: Function from outputs ``(networks, some, outputs)`` and the numbers of their rows ``(networks, some)``
            to values ``(networks, some, ...)``.
    """
    folds = member.rows_left_out
    with torch.no_grad():
        chunks = torch.split(folds.held, _HELD_AT_ONCE, dim=1)
        return folds.gather(torch.cat([value(_outputs(member.stack, X[at], moments), at) for at in chunks], 1))


def _densities(member: Member, rows: Rows, likelihood: Likelihood, moments: type[Moments]) -> Tensor:
    """Return the log density of each target under the network from which its row is held out, ``(rows,)``."""
    return _held_out(
        member, rows.X, moments, lambda outputs, at: likelihood.predictive(outputs, 8).log_prob(rows.y[at])
    )
