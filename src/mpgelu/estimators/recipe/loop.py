"""The training loop of all networks of a kind, with time limit, checkpoints and Ctrl-C."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Batches, Folds, Rows
from mpgelu.estimators.recipe.steps import ExpectedLoss, Steps, learning_rate
from mpgelu.likelihoods import Likelihood
from mpgelu.networks import Stack
from mpgelu.training import Interrupts

if TYPE_CHECKING:
    from rich.progress import Progress

AT_ONCE = 20  # steps between two updates of the progress bar, and two looks for Ctrl-C


@dataclass
class Clock:
    """The time limit of a training run.

    Args:
        limit: Duration in seconds after which training must end; ``None`` for no limit.
        started: Time of the start on the monotonic clock.
    """

    limit: float | None
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without a limit."""
        return float("inf") if self.limit is None else self.started + self.limit - time.monotonic()


class Pace:
    """The learning rates of a run that ends after a number of steps or a duration, whichever is first.

    The schedule depends on the larger of the fractions of steps and of time that have passed, so that it falls to zero
    in either case. The duration of the next step is estimated by the mean of those before.

    Args:
        peak: Largest learning rate of the schedule, :func:`learning_rate`.
        steps: Number of steps of the run.
        seconds: Duration of the run from now on; at least one step is taken, also if nothing is left.
        taken: Number of steps that were taken before.
    """

    def __init__(self, peak: float, steps: int, seconds: float, taken: int) -> None:
        self.peak, self.steps, self.seconds, self.first = peak, steps, max(seconds, 1e-9), taken
        self.started = time.monotonic()

    def rates(self, taken: int, most: int) -> list[float]:
        """Return the learning rates of the next steps; none if the run has ended.

        Args:
            taken: Number of steps that were taken.
            most: Largest number of rates. Under a time limit there is only one for the first step, whose duration is
                not known.
        """
        elapsed, since = time.monotonic() - self.started, taken - self.first
        if not since and self.seconds < math.inf:
            most = 1
        rates: list[float] = []
        for step in range(1, min(most, self.steps - taken) + 1):
            passed = (elapsed + step * elapsed / max(since, 1)) / self.seconds
            if passed >= 1 and since + step > 1:
                break
            rates.append(learning_rate(self.peak, min(max((taken + step) / self.steps, passed), 1.0)))
        return rates


@dataclass(frozen=True)
class Task:
    """The training of a group, without its rows; it can be sent to another process.

    Args:
        title: Title of the progress bar.
        stack: The networks, which are trained in place.
        likelihood: Likelihood of their outputs.
        folds: Number of folds, one of which is held out from each network.
        steps: Number of optimiser steps.
        effort: Number of steps relative to that of the longest groups.
        batch_size: Number of rows in a step.
        learning_rate: Largest learning rate of the schedule.
        beta: Exponent of the weights of rows, see :class:`ExpectedLoss`.
        seed: Seed of the folds and of the order of the rows.
        device: Device on which the networks are trained; before and after, they are on the CPU.
    """

    title: str
    stack: Stack
    likelihood: Likelihood
    folds: int
    steps: int
    effort: float
    batch_size: int
    learning_rate: float
    beta: float
    seed: int
    device: torch.device

    def trainer(self, rows: int) -> Steps:
        """Return the optimiser of the networks for a number of rows."""
        trained = self.rows_left_out(rows).trained.shape[1]
        return Steps(self.stack, ExpectedLoss(self.stack, self.likelihood, self.beta, trained))

    def rows_left_out(self, rows: int) -> Folds:
        """Return the folds for a number of rows."""
        return Folds.of(rows, self.folds, self.seed)


@dataclass
class Group:
    """A task with the state of its training.

    Args:
        task: The task.
        trainer: Optimiser of its networks.
        keeper: Writes checkpoints; ``None`` without them.
        is_trained: Whether the training has ended.
    """

    task: Task
    trainer: Steps
    keeper: Keeper | None = None
    is_trained: bool = False

    def train(self, rows: Rows, seconds: float, interrupts: Interrupts, bar: Progress) -> None:
        """Train the group in this process, for all its steps or as many as fit into the time.

        Args:
            rows: The data.
            seconds: Time for a group of effort one.
            interrupts: Ends the training after Ctrl-C.
            bar: Progress bar.

        Raises:
            TrainingError: More than half of the losses of a network were not finite.
        """
        task, trainer = self.task, self.trainer
        pace = Pace(task.learning_rate, task.steps, seconds * task.effort, trainer.taken)
        trained, rows = task.rows_left_out(len(rows.y)).trained, rows.to(task.device)
        batches = Batches(trained, min(task.batch_size, trained.shape[1]), task.seed)
        shown = bar.add_task(task.title, total=task.steps, completed=trainer.taken, loss=float("nan"))
        with self.on_device():
            while not interrupts.seen and (rates := pace.rates(trainer.taken, AT_ONCE)):
                at = batches.rows(trainer.taken, len(rates)).to(task.device)
                losses = trainer.take(rows, at, rates)
                bar.update(shown, completed=trainer.taken, loss=float(losses.nanmean()))
                if self.keeper:
                    self.keeper.write_now_and_then()
        bar.update(shown, completed=task.steps)
        self.finish()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the networks on the device of the task within the context."""
        self.trainer.to(self.task.device)
        try:
            yield
        finally:
            self.trainer.to(torch.device("cpu"))

    def finish(self) -> None:
        """Note the end of the training, and write a checkpoint.

        Raises:
            TrainingError: More than half of the losses of a network were not finite.
        """
        if self.keeper:
            self.keeper.write()
        self.trainer.check_left_out()
        self.is_trained = True
