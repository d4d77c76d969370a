"""The training loop of one stack of networks, with time limit, checkpoints and Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpgelu.errors import TrainingError
from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Batches, Rows
from mpgelu.estimators.recipe.steps import Steps, learning_rate
from mpgelu.training import Interrupts

if TYPE_CHECKING:
    from rich.progress import Progress

_MOST_LEFT_OUT = 0.5  # largest share of skipped steps of a network
_SHOWN_EVERY = 20  # steps between two updates of the progress bar


@dataclass
class Clock:
    """The time limit of a training run.

    Args:
        limit: Duration in seconds after which training must end; ``None`` for no limit.

    Attributes:
        started: Time of the start on the monotonic clock.
    """

    limit: float | None
    started: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock."""
        self.started = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without a limit."""
        return float("inf") if self.limit is None else self.started + self.limit - time.monotonic()


def run(
    trainer: Steps,
    trained: Tensor,
    rows: Rows,
    *,
    steps: int,
    batch_size: int,
    peak: float,
    seed: int,
    seconds: float = float("inf"),
    keeper: Keeper | None = None,
    interrupts: Interrupts,
    bar: Progress,
    title: str,
) -> Tensor:
    """Train for a number of steps, or for as many as fit into the time.

    The schedule of the learning rate depends on the larger of the fractions of steps and of time that have passed, so
    that it falls to zero in either case.

    Args:
        trainer: Optimiser of the networks; it may have taken steps before.
        trained: Numbers of the training rows of each network, ``(networks, rows)``.
        rows: The data.
        steps: Number of steps.
        batch_size: Number of rows in a step.
        peak: Largest learning rate of the schedule.
        seed: Seed of the order of the rows.
        seconds: Duration of the training.
        keeper: Writes checkpoints; ``None`` without them.
        interrupts: Ends the training after Ctrl-C.
        bar: Progress bar.
        title: Title of the progress bar.

    Returns:
        Number of steps that each network skipped because its loss was not finite, ``(networks,)``.

    Raises:
        TrainingError: More than half of the losses of a network were not finite.
    """
    batches = Batches(trained, min(batch_size, trained.shape[1]), seed)
    left_out = torch.zeros(len(trained), dtype=torch.long, device=rows.X.device)
    task = bar.add_task(title, total=steps, completed=trainer.taken, loss=float("nan"))
    started, first = time.monotonic(), trainer.taken
    while trainer.taken < steps and not interrupts.seen:
        done = (trainer.taken + 1) / steps
        if seconds < float("inf"):
            elapsed, taken = time.monotonic() - started, trainer.taken - first
            done = max(done, (elapsed + elapsed / max(taken, 1)) / seconds)
            if done >= 1 and taken:
                break
        at = batches.rows(trainer.taken, 1)[:, 0].to(rows.X.device)
        losses = trainer.step(rows.X[at], rows.y[at], rows.weights[at], learning_rate(peak, min(done, 1.0)))
        left_out += ~torch.isfinite(losses)
        if trainer.taken % _SHOWN_EVERY == 0:
            bar.update(task, completed=trainer.taken, loss=float(losses.nanmean()))
            if keeper:
                keeper.write_now_and_then()
    bar.update(task, completed=steps)
    if keeper:
        keeper.write()
    left_out = left_out.cpu()
    check_left_out(left_out, trainer.taken)
    return left_out


def check_left_out(left_out: Tensor, taken: int) -> None:
    """Raise a :class:`TrainingError` if a network skipped more than half of its steps.

    Args:
        left_out: Number of steps that each network skipped, ``(networks,)``.
        taken: Number of steps.
    """
    share = float(left_out.max()) / max(1, taken)
    if share > _MOST_LEFT_OUT:
        raise TrainingError(
            f"fit: the loss was not finite in {share:.0%} of the steps of a network; "
            "lower learning_rate or check the data for extreme values"
        )
