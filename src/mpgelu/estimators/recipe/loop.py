"""The training of one stack of networks: all steps, within a time limit, resumable, ended by Ctrl-C without a loss."""

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

_MOST_LEFT_OUT = 0.5  # share of the steps of a network that may be left out because their loss is not finite
_SHOWN_EVERY = 20  # steps between two updates of the progress bar


@dataclass
class Clock:
    """How much of the training time has passed.

    Args:
        limit: Seconds from the start at which training must end; ``None`` for no limit.
    """

    limit: float | None
    started: float = 0.0

    def __post_init__(self) -> None:
        """Start now."""
        self.started = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without one."""
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
    """Take all steps, or as many as fit into the time: the learning rate falls to zero in either case.

    Args:
        trainer: Trainer of the networks.
        trained: Row numbers of each network, ``(networks, rows)``.
        rows: The data.
        steps: How many to take.
        batch_size: Rows in a step.
        peak: Peak of the learning rate.
        seed: Seed of the order of the rows.
        seconds: Time for all of this.
        keeper: Keeps the state in a file.
        interrupts: Ends the training when Ctrl-C was seen.
        bar: Shows how far it is.
        title: Title of the bar.

    Returns:
        How many steps each network left out because its loss was not finite, ``(networks,)``.

    Raises:
        TrainingError: Most losses of a network are not finite.
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
    """Raise a TrainingError if more than half of the steps of a network had no finite loss.

    Args:
        left_out: Steps that each network left out, ``(networks,)``.
        taken: Steps in all.
    """
    share = float(left_out.max()) / max(1, taken)
    if share > _MOST_LEFT_OUT:
        raise TrainingError(
            f"fit: the loss was not finite in {share:.0%} of the steps of a network; "
            "lower learning_rate or check the data for extreme values"
        )
