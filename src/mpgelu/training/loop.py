"""Training of one network, or of a stack of networks, by mini-batches of the expected log-likelihood."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.moments import FactoredMoments, Moments, moments_of
from mpgelu.networks.perceptron import as_function, warn_if_slow
from mpgelu.training.best import Best
from mpgelu.training.checkpoint import Checkpoint
from mpgelu.training.data import Data, Loader, Rows, all_rows, is_whole, source
from mpgelu.training.distributed import ManyProcesses, OneProcess, cooperating
from mpgelu.training.interrupts import Interrupts
from mpgelu.training.progress import training_progress
from mpgelu.training.trainer import Likelihood, Optimizers, Schedulers, Trainer


@dataclass
class History:
    """The record of a training run.

    The shape ``models`` is empty for a network and ``(M,)`` for a :class:`Stack` of M networks.

    Attributes:
        loss: Mean training loss of each epoch, ``(epochs, *models)``.
        validation: Validation loss of each epoch, ``(epochs, *models)``; empty without validation data.
        best_epoch: Epoch (from 0) whose state was kept, ``(*models,)``; the last one without validation data.
        recoveries: One message for each time that a model was restored to its last finite state.
        interrupted: Whether Ctrl-C ended the run; the best state so far was kept.
        seconds: Wall-clock time of the run in this process.
    """

    loss: Tensor
    validation: Tensor
    best_epoch: Tensor
    recoveries: list[str] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0


def fit(
    network: nn.Module,
    likelihood: Likelihood,
    data: Data,
    *,
    epochs: int = 500,
    batch_size: int = 256,
    drop_last: bool = False,
    optimizer: Optimizers | None = None,
    scheduler: Schedulers | None = None,
    moments: type[Moments] | Callable[[Tensor], Moments | Tensor] = FactoredMoments,
    penalty: Callable[[], Tensor] | None = None,
    clip: float | None = None,
    validation: Data | None = None,
    patience: int | None = None,
    seed: int = 0,
    shuffle: Callable[[torch.Generator], Tensor] | None = None,
    progress: bool = True,
    compile: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> History:
    r"""Train a network in place by maximising the expected log-likelihood of the targets.

    The loss of a batch of B rows is the negative expected log-likelihood over the random network outputs h, plus the
    penalty:

    .. math:: L = -\frac1B \sum_{b=1}^B \mathbb E_{h_b} \log p(y_b \mid h_b) + \text{penalty}

    The expectation is evaluated in closed form from the propagated moments, without sampling. Training is therefore
    deterministic: the same seed gives bit-identical results on the same machine.

    If the loss or a gradient of a model becomes non-finite, the model returns to its last finite state, its later steps
    are halved, and a :class:`RecoveryWarning` is issued; the run continues. Ctrl-C ends the run after the current step.

    **Several processes.** Under ``torchrun``, or inside a process group that the caller initialised, all processes
    train one network on the device of its parameters. Each process evaluates its part of every batch, and
    ``DistributedDataParallel`` averages the gradients. Batches, validation losses and results equal those of one
    process up to rounding. All processes must call ``fit`` with the same arguments; they start from the parameters of
    the first process and stop together when one of them is interrupted. A loader must give each process its own part of
    the data (``DistributedSampler``). If ``torchrun`` started the processes and there is no process group, ``fit``
    initialises one, which lasts until the process ends.

    Args:
        network: Module from moments to moments. The data of a :class:`Stack` have a leading model dimension; each of
            its models is clipped, compared with its validation data and recovered independently.
        likelihood: Likelihood of the targets. Its parameters, if any, are trained too.
        data: Features ``(*models, rows, n)`` and targets ``(*models, rows)``, as tensors or numpy arrays; or a
            ``DataLoader`` of such pairs, which is iterated once per epoch and determines batches and order.
        epochs: Number of passes through the data.
        batch_size: Number of rows in a batch; not used with a loader.
        drop_last: Whether an incomplete last batch is skipped, unless it is the only one; not used with a loader.
        optimizer: Function from parameters to a torch optimiser; the default is Adam with a learning rate of 0.01.
        scheduler: Function from the optimiser to a learning-rate scheduler, which is stepped after every batch.
        moments: Type of the moments that are propagated, for example ``DiagonalMoments``; or function from features
            ``(*models, B, n)`` to the input of the network, which may add a variance of the features.
        penalty: Function without arguments whose value is added to the loss, such as ``lambda: layer.kl() / rows``.
        clip: Largest Euclidean norm of the gradient of a model, to which larger ones are scaled; ``None`` for no limit.
        validation: Held-out data in the form of ``data``; the state of the epoch with the smallest validation loss is
            restored at the end.
        patience: Number of epochs without an improvement of the validation loss of any model after which training
            stops; ``None`` for no early stopping.
        seed: Seed of the order of the rows; not used with a loader.
        shuffle: Function from a ``torch.Generator`` to random numbers ``(*models, rows)``, whose ranks are the order of
            the rows in an epoch. The default draws them for the whole stack at once, so that the order of a model
            depends on its position in the stack.
        progress: Whether to show a progress bar, if standard error is a terminal.
        compile: Whether to run the loss through ``torch.compile``, if there is a C++ compiler. Compilation takes time
            and pays off for long runs.
        checkpoint: File that receives the state of the run between epochs; writing takes at most a tenth of the time.
            If the file exists, the run continues from it, in a single process with bit-identical results. ``epochs``
            and ``patience`` may differ from those of the interrupted call.

    Returns:
        The history of the run.

    Raises:
        InputError: An argument is invalid, or the data are not finite.
        TrainingError: The loss became non-finite more than 20 times, or contact with another process was lost.
        DataError: The checkpoint is damaged, or belongs to a different run.

    Example:
        >>> import torch, mpgelu
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> net, likelihood = mpgelu.network(1, hidden=(16,)), mpgelu.HeteroscedasticGaussian()
        >>> history = mpgelu.fit(net, likelihood, (x, x[:, 0] ** 2), epochs=100)
        >>> bool(history.loss[-1] < history.loss[0])
        True
    """
    _check_likelihood(likelihood)
    _check_optimizer(optimizer)
    _check_numbers(epochs, batch_size, patience, validation)
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    compile = compile and native.can_compile()
    if not compile:
        warn_if_slow(network)
    row_losses = _row_losses(network if compile else as_function(network), likelihood, moments_of("fit", moments))
    started = time.perf_counter()
    with cooperating(like.device, _remedy(checkpoint)) as processes:
        rows = source(data, like, batch_size, drop_last, seed, shuffle)
        held_out = None
        if validation is not None:
            held_out = processes.part(all_rows("validation", validation, like), is_whole=is_whole(validation))
        models = rows.first[1].shape[:-1]
        losses = processes.objective(
            network, likelihood, _evaluated(torch.compile(row_losses) if compile else row_losses)
        )
        trainer = Trainer(network, likelihood, models, losses, optimizer, scheduler, penalty, clip, processes)
        best = Best(network, models, likelihood if isinstance(likelihood, nn.Module) and not models else None)
        keeper = None
        if checkpoint is not None:
            settings = {"batch_size": batch_size, "drop_last": drop_last, "seed": seed, "clip": clip}
            keeper = Checkpoint(Path(checkpoint), network, likelihood, trainer, best, rows, settings, processes)
        run = _Run(trainer, best, rows, processes, _evaluated(row_losses), held_out, keeper)
        history, interrupted = run.train(epochs, patience, progress)
    best.restore()
    none = rows.first[1].new_empty(0, *models)
    return History(
        loss=torch.stack(history) if history else none,
        validation=torch.stack(best.seen) if best.seen else none,
        best_epoch=best.epoch if best.seen else torch.full(models, len(history) - 1, device=trainer.device),
        recoveries=trainer.recoveries,
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
    )


class _Run(NamedTuple):
    """The objects that take part in one run of :func:`fit`.

    Attributes:
        trainer: Takes the optimiser steps.
        best: Records validation losses and the best state of each model.
        rows: Source of the batches.
        processes: The processes that train together.
        losses: Function from a batch to the loss of each model, ``(*models,)``, for validation.
        held_out: The validation data of this process; ``None`` without validation.
        keeper: Writes checkpoints; ``None`` without them.
    """

    trainer: Trainer
    best: Best
    rows: Rows | Loader
    processes: OneProcess | ManyProcesses
    losses: Callable[..., Tensor]
    held_out: tuple[Tensor, ...] | None
    keeper: Checkpoint | None

    def train(self, epochs: int, patience: int | None, progress: bool) -> tuple[list[Tensor], bool]:
        """Train epoch by epoch, from the checkpoint if there is one, until the end, early stopping or Ctrl-C.

        Args:
            epochs: Number of epochs, including those of the checkpoint.
            patience: Number of epochs without improvement after which training stops; ``None`` for no such limit.
            progress: Whether to show a progress bar.

        Returns:
            The mean training losses of each completed epoch, ``(*models,)``, and whether Ctrl-C ended the run.
        """
        history = self.keeper.resume() if self.keeper else []
        with training_progress(progress and self.processes.is_first) as bar, Interrupts() as interrupts:
            task = bar.add_task("training", total=epochs, completed=len(history), loss=float("nan"))
            while len(history) < epochs and not _is_stuck(self.best, patience):
                epoch = self.rows.epoch(len(history))
                losses = self.trainer.epoch(self.processes.batches(epoch, self.rows, interrupts))
                if interrupts.seen:
                    break
                history.append(losses)
                bar.update(task, advance=1, loss=losses.mean().item())
                if self.held_out is not None:
                    with torch.no_grad():
                        self.best.see(self.processes.mean(self.losses(*self.held_out)))
                if self.keeper:
                    self.keeper.write_now_and_then(history)
            if self.keeper and not interrupts.seen:
                self.keeper.write(history)
            self.trainer.finish(*self.processes.part(self.rows.first, self.rows.is_whole))
        return history, interrupts.seen


def _row_losses(
    run: Callable[[Any], Any], likelihood: Likelihood, moments: Callable[[Tensor], Moments | Tensor]
) -> Callable[..., Tensor]:
    r"""Return the loss as a function of a batch.

    The function takes features ``(*models, rows, n)``, targets ``(*models, rows)`` and an optional weight w, and
    returns :math:`-\frac1B \sum_b \mathbb E \log p(y_b \mid h_b)`, ``(*models,)``; with a weight, which one of several
    processes is given for its part of a batch, :math:`-w \sum_b \mathbb E \log p(y_b \mid h_b)`.

    Args:
        run: The network, or a faster function with the same values.
        likelihood: Likelihood of the targets.
        moments: Function from features to the input of the network.
    """

    def row_losses(X: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        expected = likelihood.expected_log_prob(run(moments(X)), y)
        return -expected.mean(-1) if weight is None else -expected.sum(-1) * weight

    return row_losses


def _evaluated(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss that uses the current parameters.

    Inside ``torch.autocast`` torch caches rounded copies of the parameters, which are out of date after a step; the
    returned function clears that cache first.
    """

    def evaluate(*batch: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        return losses(*batch)

    return evaluate


def _is_stuck(best: Best, patience: int | None) -> bool:
    """Return whether no model has improved for ``patience`` epochs."""
    return patience is not None and bool(best.seen) and best.epochs_without_improvement >= patience


def _remedy(checkpoint: str | os.PathLike[str] | None) -> str:
    """Return the advice for the loss of a process, as the end of a sentence."""
    if checkpoint is None:
        return "nothing was kept: give fit(checkpoint='run.checkpoint') to be able to go on where it stopped"
    return f"run the same command again to go on from {checkpoint}"


def _check_numbers(epochs: int, batch_size: int, patience: int | None, validation: object) -> None:
    """Raise if a number is below one, or if there is a patience without validation data."""
    if patience is not None and validation is None:
        raise InputError("fit: patience needs validation data; give validation=(X, y)")
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise InputError(f"fit: {name} must be at least 1, got {number}")


def _check_optimizer(optimizer: object) -> None:
    """Raise if the optimiser is not a function of parameters, as if it is an optimiser already."""
    if optimizer is not None and not callable(optimizer):
        kind = type(optimizer).__name__
        article = "an" if kind[0] in "AEIOU" else "a"
        raise InputError(
            f"fit: optimizer must be a function from parameters to a torch optimiser, got {article} {kind}; use "
            "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)"
        )


def _check_likelihood(likelihood: object) -> None:
    """Raise if the likelihood is a class, or has no method ``expected_log_prob``."""
    if isinstance(likelihood, type):
        raise InputError(f"fit: likelihood must be an object, got a class; did you mean {likelihood.__name__}()?")
    if not callable(getattr(likelihood, "expected_log_prob", None)):
        raise InputError(
            "fit: likelihood must have a method expected_log_prob(moments, y), as mpgelu.HeteroscedasticGaussian() and "
            f"mpgelu.Gaussian() have, got {type(likelihood).__name__}; losses of torch compare numbers and do not take "
            "moments"
        )
