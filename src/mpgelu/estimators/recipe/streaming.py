"""Training of the ensemble on a stream of rows, as :mod:`~mpgelu.estimators.recipe.training` does on rows in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.estimators.hashing import uniform
from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Folds, Rows
from mpgelu.estimators.recipe.groups import one_thread_all
from mpgelu.estimators.recipe.loop import AT_ONCE, Clock, Group, Pace
from mpgelu.estimators.recipe.settings import Settings
from mpgelu.estimators.recipe.steps import ExpectedLoss, Steps
from mpgelu.estimators.recipe.training import Member, Trained, seconds_of_head, task_of, warn, weighted
from mpgelu.likelihoods import HeteroscedasticGaussian, Likelihood
from mpgelu.native.threads import run_all
from mpgelu.training import Interrupts, training_progress

if TYPE_CHECKING:
    from rich.progress import Progress

Array = NDArray[np.float64]


class Block(NamedTuple):
    """Some rows in random order.

    Attributes:
        X: Raw features, ``(rows, n)``.
        y: Targets, ``(rows,)``.
        numbers: Numbers of the rows in all data, ``(rows,)``.
    """

    X: Array
    y: Array
    numbers: NDArray[np.int64]

    def at(self, places: NDArray[np.int64] | slice) -> Block:
        """Return some of the rows, by their positions in the block."""
        return Block(self.X[places], self.y[places], self.numbers[places])


class Stream(Protocol):
    """Training rows that need not fit into memory, as :meth:`MPGELURegressor.fit_stream` takes them.

    Statistics are those of all rows; they are needed before training. Rows are identified by their numbers.
    """

    @property
    def rows(self) -> int:
        """Number of rows."""

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
        """Yield all rows once, in a random order that depends on the seed."""


def fold_of(numbers: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row, ``(rows,)``, from a hash of its number.

    Args:
        numbers: Numbers of the rows, ``(rows,)``.
        folds: Number of folds.
        seed: Seed of the hash.
    """
    return (uniform(numbers, seed) * folds).astype(np.int64)


def held_out(numbers: NDArray[np.int64], folds: int, seed: int) -> Folds:
    """Return the held-out rows of a sample as :class:`Folds`, without training rows.

    Args:
        numbers: Numbers of the rows of the sample, ``(rows,)``.
        folds: Number of folds.
        seed: Seed of the assignment to folds.

    Raises:
        InputError: A fold has no row in the sample.
    """
    fold = fold_of(numbers, folds, seed)
    held = [np.flatnonzero(fold == k) for k in range(folds)]
    if not all(map(len, held)):
        raise InputError(f"fit: {folds} folds of {len(numbers)} rows leave one empty; take fewer folds or more rows")
    return Folds.padded([np.empty(0, dtype=np.int64)] * folds, held)


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
    """Train the networks of all kinds on the blocks of a stream, then estimate weights and noise from its sample.

    The fold of a row is a hash of its number, and the network from which this fold is held out is never trained on the
    row. Every row of the sample is therefore predicted by networks that were not trained on it, as in :func:`train`.
    There are three differences to rows in memory: the order of rows is random only within the buffer of the stream;
    weights and noise are estimated from the sample; there is no Gaussian process. A run that is resumed from a
    checkpoint reads the remaining rows in another order.

    Args:
        stream: The rows.
        scaled: Function from blocks of raw rows to scaled rows.
        settings: Settings of the training.
        spent: Seconds that have already been spent of the time limit.
        checkpoint: As in :func:`train`.
        progress: As in :func:`train`.
        threads: Number of kinds that are trained at the same time.
    """
    clock = Clock(settings.time_limit, time.monotonic() - spent)
    judges, likelihood = scaled(stream.sample), settings.likelihood or HeteroscedasticGaussian()
    with training_progress(progress) as bar, Interrupts() as interrupts, one_thread_all():
        groups = [_group(position, stream, judges, likelihood, settings) for position in range(len(settings.kinds))]
        if checkpoint:
            for group in groups:
                group.keeper = Keeper(checkpoint, group.trainer, judges, settings)
        seconds = clock.left - seconds_of_head(len(judges.y), clock)
        with ExitStack() as devices:
            for group in groups:
                devices.enter_context(group.on_device())
            _run(groups, stream, scaled, settings, seconds, interrupts, bar, threads)
        for group in groups:
            group.task.stack.requires_grad_(False)
        taken = min(group.trainer.taken for group in groups if group.task.effort == 1)
        members = [
            Member(str(kind), group.task.stack, held_out(stream.sample.numbers, settings.folds, group.task.seed))
            for kind, group in zip(settings.kinds, groups, strict=True)
        ]
        trained = weighted(members, judges.judges(), likelihood, settings, None, taken, interrupts)
    warn(groups, taken, settings.steps, interrupts)
    return trained


def _group(position: int, stream: Stream, judges: Rows, likelihood: Likelihood, settings: Settings) -> Group:
    """Return the networks of a kind before their training."""
    task = task_of(position, judges.X.shape[1], likelihood, settings)
    held_out(stream.sample.numbers, task.folds, task.seed)  # raises for an empty fold before training
    trained = stream.rows - stream.rows // task.folds
    trainer = Steps(task.stack, ExpectedLoss(task.stack, likelihood, task.beta, trained))
    return Group(task, trainer)


def _run(
    groups: list[Group],
    stream: Stream,
    scaled: Callable[[Block], Rows],
    settings: Settings,
    seconds: float,
    interrupts: Interrupts,
    bar: Progress,
    threads: int,
) -> None:
    """Train all kinds on the blocks of the stream, until the steps are taken, the time is over, or Ctrl-C.

    Args:
        groups: Networks of each kind, which are trained in place.
        stream: The rows, read as often as necessary.
        scaled: Function from blocks of raw rows to scaled rows.
        settings: Settings of the training.
        seconds: Duration of the training.
        interrupts: Ends the training after Ctrl-C.
        bar: Progress bar.
        threads: Number of kinds that are trained at the same time.
    """
    clock = Clock(seconds)
    paces = [Pace(g.task.learning_rate, g.task.steps, seconds, g.trainer.taken) for g in groups]
    position = min(int(group.trainer.taken / group.task.effort) for group in groups)  # in steps of effort one
    bars = bar.add_task("all networks", total=settings.steps, completed=position, loss=float("nan"))

    def is_over() -> bool:
        return position >= settings.steps or interrupts.seen or clock.left <= 0

    while not is_over():
        for block in stream.blocks(settings.seed + position):
            rows, batches = scaled(block).to(settings.device), [_batches(block.numbers, group) for group in groups]
            position = min(settings.steps, position + min(found.shape[1] for found in batches))
            tasks = [
                partial(_take, group, pace, at, rows, position, interrupts)
                for group, pace, at in zip(groups, paces, batches, strict=True)
            ]
            losses = run_all(tasks, threads)
            bar.update(bars, completed=position, loss=losses[0])
            for group in groups:
                if group.keeper:
                    group.keeper.write_now_and_then()
            if is_over():
                break
    for group in groups:
        group.finish()


def _take(group: Group, pace: Pace, batches: Tensor, rows: Rows, position: int, interrupts: Interrupts) -> float:
    """Take the steps of one kind on one block, and return the mean loss of the last step.

    Args:
        group: Networks of the kind.
        pace: Their learning rates.
        batches: Positions of rows in the block, ``(networks, batches, rows)``.
        rows: The block.
        position: Number of steps of a kind of effort one at the end of the block.
        interrupts: Ends the training after Ctrl-C.
    """
    trainer, loss = group.trainer, float("nan")
    until, first = max(1, round(group.task.effort * position)), trainer.taken
    while not interrupts.seen:
        done = trainer.taken - first
        rates = pace.rates(trainer.taken, min(AT_ONCE, until - trainer.taken, batches.shape[1] - done))
        if not rates:
            break
        losses = trainer.take(rows, batches[:, done : done + len(rates)], rates)
        loss = float(losses.nanmean())
    return loss


def _batches(numbers: NDArray[np.int64], group: Group) -> Tensor:
    """Return the positions in a block of the rows of all batches, ``(networks, batches, rows)``.

    Every network takes the rows of the block outside its fold in an order of its own. All networks take the same number
    of batches, so that some rows may be missed.

    Args:
        numbers: Numbers of the rows of the block, ``(rows,)``.
        group: Networks of the kind.
    """
    task = group.task
    fold = fold_of(numbers, task.folds, task.seed)
    random = np.random.default_rng((task.seed, group.trainer.taken))
    rows = [random.permutation(np.flatnonzero(fold != k)) for k in range(task.folds)]
    shortest = min(map(len, rows))
    size = max(1, min(task.batch_size, shortest))
    count = shortest // size
    kept = np.stack([of_network[: count * size] for of_network in rows])
    return torch.as_tensor(kept, device=task.device).view(task.folds, count, size)
