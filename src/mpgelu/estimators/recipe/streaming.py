"""Training on rows that pass by: everything of :mod:`~mpgelu.estimators.recipe.training` but the rows in memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from threadpoolctl import threadpool_limits
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.estimators.hashing import uniform
from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Folds, Rows
from mpgelu.estimators.recipe.loop import Clock, warn_of_steps_left_out
from mpgelu.estimators.recipe.networks import new_networks
from mpgelu.estimators.recipe.settings import Kind, Settings
from mpgelu.estimators.recipe.steps import Steps, expected_loss, learning_rate
from mpgelu.estimators.recipe.training import InterruptedWarning, Member, Trained, seconds_of_head, weighted
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.native.threads import one_thread_each, run_all
from mpgelu.training import Interrupts, training_progress

Array = NDArray[np.float64]


class Block(NamedTuple):
    """Some rows in random order.

    Args:
        X: Features ``(rows, n)``.
        y: Targets ``(rows,)``.
        numbers: Numbers of the rows in the whole of the data, ``(rows,)``.
    """

    X: Array
    y: Array
    numbers: NDArray[np.int64]


class Stream(Protocol):
    """Rows to train on that need not fit into memory."""

    @property
    def rows(self) -> int:
        """How many there are."""

    @property
    def sample(self) -> Block:
        """A uniform random sample that fits into memory."""

    @property
    def range(self) -> tuple[Array, Array]:
        """Smallest and largest value of each feature in all rows, ``(n,)`` each."""

    @property
    def target(self) -> tuple[float, float]:
        """Mean and standard deviation of all targets."""

    def blocks(self, seed: int) -> Iterator[Block]:
        """All rows once, in a random order that belongs to the seed."""


@dataclass
class _Learner:
    """The networks of one kind in training."""

    kind: Kind
    member: Member
    trainer: Steps
    keeper: Keeper | None
    seed: int
    left_out: Tensor

    def steps_until(self, position: int) -> int:
        """How many steps this kind has taken when one of full effort has taken ``position``."""
        return max(1, round(self.kind.effort * position))


def fold_of(numbers: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.int64]:
    """Which fold each row belongs to, by a hash of its number; the network of that fold does not train on it."""
    return (uniform(numbers, seed) * folds).astype(np.int64)


def held_out(numbers: NDArray[np.int64], folds: int, seed: int) -> Folds:
    """The folds of a sample, as :class:`Folds` has them; which rows the networks trained on is not part of it.

    Raises:
        InputError: A fold has no row in the sample.
    """
    fold = fold_of(numbers, folds, seed)
    held = [np.flatnonzero(fold == k) for k in range(folds)]
    if not all(map(len, held)):
        raise InputError(f"fit: {folds} folds of {len(numbers)} rows leave one empty; take fewer folds or more rows")
    longest = max(map(len, held))
    counts = np.stack([np.arange(longest) < len(rows) for rows in held])
    padded = np.stack([np.resize(rows, longest) for rows in held])
    return Folds(torch.empty(folds, 0, dtype=torch.long), torch.as_tensor(padded), torch.as_tensor(counts))


def train_streamed(
    stream: Stream,
    scaled: Callable[[Block], Rows],
    settings: Settings,
    *,
    spent: float = 0.0,
    checkpoint: Path | None = None,
    progress: bool = False,
    threads: int = 1,
) -> Trained:
    """Train the networks of every kind on blocks of rows as they come, then weigh them by a sample.

    A row belongs to a fold by a hash of its number, and the network that leaves out this fold never trains on it. So
    every row of the sample is judged by networks that have not seen it, as in :func:`train`. Differences: the order of
    the rows is random within the blocks of the stream; the weights and the noise are learned from the sample; there is
    no Gaussian process. A fit that is resumed from a checkpoint meets the remaining rows in a new order.

    Args:
        stream: The rows.
        scaled: Brings raw rows to the networks' scale.
        settings: See :class:`Settings`.
        spent: Seconds of the time limit that are over, for looking at the rows.
        checkpoint: As in :func:`train`.
        progress: As in :func:`train`.
        threads: As in :func:`train`.
    """
    clock = Clock(settings.time_limit)
    clock.started -= spent
    judges = scaled(stream.sample)
    learners = _learners(stream, judges, settings, checkpoint)
    with (
        training_progress(progress) as bar,
        Interrupts() as interrupts,
        one_thread_each(),
        threadpool_limits(1, "blas"),
    ):
        seconds = clock.left - seconds_of_head(len(judges.y), clock)
        _run(learners, stream, scaled, settings, seconds, interrupts, bar, threads)
        taken = min(learner.trainer.taken for learner in learners if learner.kind.effort == 1)
        for learner in learners:
            learner.member.stack.requires_grad_(False)
            warn_of_steps_left_out(learner.left_out, max(1, learner.trainer.taken))
        members, likelihood = [learner.member for learner in learners], settings.likelihood or HeteroscedasticGaussian()
        trained = weighted(members, judges.judges(), likelihood, settings, None, taken, interrupts)
    if interrupts.seen:
        warnings.warn(
            f"fit: interrupted after {taken} of {settings.steps} steps; the state so far was kept",
            InterruptedWarning,
            stacklevel=3,
        )
    return trained


def _learners(stream: Stream, judges: Rows, settings: Settings, checkpoint: Path | None) -> list[_Learner]:
    """Networks of every kind, with what trains them."""
    likelihood = settings.likelihood or HeteroscedasticGaussian()
    trained_on = stream.rows - stream.rows // settings.folds
    learners = []
    for place, kind in enumerate(settings.kinds):
        seed = settings.seed + place
        stack = new_networks(judges.X.shape[1], kind, likelihood, settings, seed)
        trainer = Steps(stack, expected_loss(stack, likelihood, settings.beta, trained_on))
        member = Member(str(kind), stack, held_out(stream.sample.numbers, settings.folds, seed))
        keeper = Keeper(checkpoint, trainer, judges, settings) if checkpoint else None
        learners.append(_Learner(kind, member, trainer, keeper, seed, torch.zeros(settings.folds, dtype=torch.long)))
    return learners


def _run(
    learners: list[_Learner],
    stream: Stream,
    scaled: Callable[[Block], Rows],
    settings: Settings,
    seconds: float,
    interrupts: Interrupts,
    bar: Progress,
    threads: int,
) -> None:
    """Give every block to every kind until the steps are taken or the time is over."""
    started = time.monotonic()
    position = min(int(learner.trainer.taken / learner.kind.effort) for learner in learners)  # steps of a full effort
    task = bar.add_task("all networks", total=settings.steps, completed=position, loss=float("nan"))

    def is_over() -> bool:
        return position >= settings.steps or interrupts.seen or time.monotonic() - started >= seconds

    while not is_over():
        for block in stream.blocks(settings.seed + position):
            rows, indices = scaled(block), [_batches(block.numbers, learner, settings) for learner in learners]
            position = min(settings.steps, position + min(found.shape[1] for found in indices))
            tasks = [
                partial(_take, learner, at, rows, settings, position, started, seconds, interrupts)
                for learner, at in zip(learners, indices, strict=True)
            ]
            losses = run_all(tasks, threads)
            bar.update(task, completed=position, loss=losses[0])
            for learner in learners:
                if learner.keeper:
                    learner.keeper.write_now_and_then()
            if is_over():
                break
    for learner in learners:
        if learner.keeper:
            learner.keeper.write()


def _take(
    learner: _Learner,
    batches: Tensor,
    rows: Rows,
    settings: Settings,
    position: int,
    started: float,
    seconds: float,
    interrupts: Interrupts,
) -> float:
    """The steps of one kind on one block, one at least in all; the mean loss of the last."""
    trainer, steps = learner.trainer, learner.steps_until(settings.steps)
    loss = float("nan")
    for at in batches.unbind(1)[: max(0, learner.steps_until(position) - trainer.taken)]:
        elapsed = (time.monotonic() - started) / seconds
        if interrupts.seen or (elapsed >= 1 and trainer.taken):
            break
        rate = learning_rate(settings.learning_rate, min(max((trainer.taken + 1) / steps, elapsed), 1.0))
        losses = trainer.step(rows.X[at], rows.y[at], rows.weights[at], rate)
        learner.left_out += ~torch.isfinite(losses)
        loss = float(losses.nanmean())
    return loss


def _batches(numbers: NDArray[np.int64], learner: _Learner, settings: Settings) -> Tensor:
    """Places in the block of the rows of every batch of every network, ``(networks, batches, rows)``.

    Every network has the rows of the block that it does not leave out, in an order of its own; networks take equally
    many batches, so that one may miss some rows.
    """
    fold = fold_of(numbers, settings.folds, learner.seed)
    random = np.random.default_rng((learner.seed, learner.trainer.taken))
    rows = [random.permutation(np.flatnonzero(fold != k)) for k in range(settings.folds)]
    shortest = min(map(len, rows))
    size = max(1, min(settings.batch_size, shortest))
    count = shortest // size
    kept = np.stack([of_network[: count * size] for of_network in rows])
    return torch.as_tensor(kept).view(settings.folds, count, size)
