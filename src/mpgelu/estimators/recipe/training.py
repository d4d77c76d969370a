"""The whole of a training run: folds, networks, steps, weights."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpgelu.errors import TrainingError
from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Batches, Folds
from mpgelu.estimators.recipe.networks import new_networks
from mpgelu.estimators.recipe.settings import Covariance, Settings
from mpgelu.estimators.recipe.steps import Steps, learning_rates, make_steps
from mpgelu.estimators.recipe.weights import choose, held_out_score, narrow_noise
from mpgelu.networks import Stack
from mpgelu.training import Best, Interrupts, RecoveryWarning, training_progress

_STEPS_AT_ONCE = 50
_MOST_ENTRIES = 2**25  # of the features of so many steps
_MOST_LEFT_OUT = 0.5  # share of the steps of a network that may be left out because their loss is not finite
_LOOKS = 40  # times that held-out rows are scored during training


class InterruptedWarning(UserWarning):
    """Training was stopped by Ctrl-C; the state so far was kept."""


@dataclass(frozen=True)
class Trained:
    """The result of :func:`train`.

    Attributes:
        stack: the networks with a weight worth keeping.
        weights: of these networks, ``(M,)``, summing to one.
        covariance: moments to predict with.
        rate_weights: weight of each rate, over all its networks.
        score: mean log density of held-out rows under the mixture of the networks that have not seen them.
        losses: training loss at each look, ``(looks, rates * members)``.
        networks: all networks at the end of training, from which another fit may go on.
        steps: taken.
        interrupted: whether Ctrl-C ended the training.
    """

    stack: Stack
    weights: Tensor
    covariance: Covariance
    rate_weights: dict[float, float]
    score: float
    losses: Tensor
    networks: Stack
    steps: int
    interrupted: bool


def train(
    X: Tensor,
    y: Tensor,
    row_weights: Tensor,
    settings: Settings,
    *,
    start: Stack | None = None,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> Trained:
    """Train all networks as one, then weight them by how well they predict the rows they have not seen.

    Args:
        X: standardised features ``(rows, n)``.
        y: standardised targets ``(rows,)``.
        row_weights: ``(rows,)``, of mean one.
        settings: see :class:`Settings`.
        start: networks to go on from, as many as there are rates times members.
        checkpoint: folder that keeps the state during training, and from which the same call goes on.
        progress: show a progress bar when the standard error is a terminal.
    """
    folds = Folds.of(len(y), settings)
    stack = Stack(start.unstack() if start else new_networks(X.shape[1], settings))
    trainer = make_steps(stack, settings, folds.trained.shape[1])
    best = Best(stack, torch.Size([len(stack)]), None)
    keeper = Keeper(checkpoint, trainer, best, (X, y, row_weights), settings) if checkpoint else None
    losses, interrupted = _loop(trainer, best, folds, (X, y, row_weights), settings, keeper, progress)
    networks = Stack(stack.unstack())
    copies = [networks]
    if best.seen:
        best.restore()
        copies.append(stack)
    covariance, stacking = choose(copies, folds, (X, y, row_weights), settings)
    by_rate = stacking.weights.view(-1, len(settings.rates)).sum(0).tolist()
    weights = (stacking.weights / settings.members).repeat_interleave(settings.members)
    members = [member for copy in copies for member in copy.unstack()]
    kept = torch.nonzero(weights).flatten()
    chosen = Stack([members[i] for i in kept])
    narrow_noise(chosen, weights[kept], settings.members, X, covariance)
    return Trained(
        stack=chosen,
        weights=weights[kept],
        covariance=covariance,
        rate_weights=dict(zip(settings.rates, by_rate, strict=True)),
        score=stacking.score,
        losses=losses,
        networks=networks,
        steps=trainer.taken,
        interrupted=interrupted,
    )


def _loop(
    trainer: Steps,
    best: Best,
    folds: Folds,
    data: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
    keeper: Keeper | None,
    progress: bool,
) -> tuple[Tensor, bool]:
    """All steps, with a look at the held-out rows now and then; the losses of each look."""
    X, y, weights = data
    rates = learning_rates(settings)
    size, look = min(settings.batch_size, folds.trained.shape[1]), max(1, settings.steps // _LOOKS)
    batches = Batches(folds, size, settings.seed)
    at_once = min(_STEPS_AT_ONCE, max(1, _MOST_ENTRIES // (len(folds.trained) * size * X.shape[1])))
    patience = math.inf if settings.patience is None else settings.patience
    losses: list[Tensor] = []
    left_out = torch.zeros(len(folds.trained), dtype=torch.long)
    with training_progress(progress) as bar, Interrupts() as interrupts:
        task = bar.add_task("training", total=settings.steps, completed=trainer.taken, loss=float("nan"))
        while trainer.taken < settings.steps and best.epochs_without_improvement * look < patience:
            if interrupts.seen:
                warnings.warn(
                    f"fit: interrupted after {trainer.taken} of {settings.steps} steps; the state so far was kept",
                    InterruptedWarning,
                    stacklevel=4,
                )
                break
            first = trainer.taken
            count = min(at_once, look - first % look, settings.steps - first)
            rows = batches.rows(first, count)
            seen = trainer.steps(X[rows], y[rows], weights[rows], rates[first : first + count])
            left_out += (~torch.isfinite(seen)).sum(1)
            bar.update(task, completed=trainer.taken, loss=float(seen.nanmean()))
            if trainer.taken % look == 0:
                losses.append(seen.mean(1))
                best.see(-held_out_score(best.network, folds, X, y, weights, settings))
            if keeper:
                keeper.write_now_and_then()
    if keeper:
        keeper.write()
    _warn_of_steps_left_out(left_out, settings.steps)
    return _stacked(losses, y, len(folds.held)), interrupts.seen


def _warn_of_steps_left_out(left_out: Tensor, steps: int) -> None:
    share = float(left_out.max()) / steps
    if share > _MOST_LEFT_OUT:
        raise TrainingError(
            f"fit: the loss was not finite in {share:.0%} of the steps of a network; "
            "lower learning_rate or check the data for extreme values"
        )
    if left_out.any():
        warnings.warn(
            f"fit: {int(left_out.sum())} steps whose loss was not finite were left out, in {share:.1%} of the steps of "
            "the network with most of them",
            RecoveryWarning,
            stacklevel=5,
        )


def _stacked(losses: list[Tensor], like: Tensor, networks: int) -> Tensor:
    return torch.stack(losses) if losses else like.new_empty(0, networks)
