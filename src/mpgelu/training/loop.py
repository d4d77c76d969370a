"""The training loop, for one network or a stack of networks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.moments import FactoredMoments, Moments
from mpgelu.networks.whole import as_function, warn_if_slow
from mpgelu.training.best import Best
from mpgelu.training.checkpoint import Checkpoint
from mpgelu.training.data import Data, all_rows, is_whole, source
from mpgelu.training.distributed import cooperating
from mpgelu.training.interrupts import Interrupts
from mpgelu.training.progress import training_progress
from mpgelu.training.trainer import Likelihood, Optimizers, Schedulers, Trainer


@dataclass
class History:
    """What happened in a training run.

    Attributes:
        loss: mean training loss of each epoch, ``(epochs, *models)``.
        validation: validation loss of each epoch, ``(epochs, *models)``; empty without validation data.
        best_epoch: epoch (from 0) whose state was kept, ``(*models,)``; the last one without validation data.
        recoveries: one sentence for each return to a good state.
        interrupted: whether Ctrl-C ended the run; the best state so far was kept.
        seconds: wall-clock time.
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
    moments: Callable[[Tensor], Moments | Tensor] = FactoredMoments.certain,
    penalty: Callable[[], Tensor] | None = None,
    clip: float | None = None,
    validation: Data | None = None,
    patience: int | None = None,
    seed: int = 0,
    shuffle: Callable[[torch.Generator], Tensor] | None = None,
    progress: bool = True,
    compile: bool = False,
    checkpoint: str | Path | None = None,
) -> History:
    r"""Maximise the expected log-likelihood by mini-batches; the network is trained in place.

    The loss of a batch is :math:`-\frac1B \sum_b \mathbb E \log p(y_b \mid h_b)` plus the penalty. It is analytic: the
    same seed gives bit-identical results on one machine. A non-finite loss or gradient does not end the run: that
    model returns to its last good state, its steps are halved from then on, and a :class:`RecoveryWarning` says so.

    Under ``torchrun``, or in a process group of the caller's, all processes train one network, on the device where it
    is: each takes its part of every batch, and ``DistributedDataParallel`` averages the gradients. Batches, validation
    and result are those of one process, up to rounding. All processes must call ``fit`` with the same arguments; they
    start from the first one's parameters, and end together when one is interrupted. A loader gives each process its own
    part of the data (``DistributedSampler``). If there is no process group yet, ``fit`` begins one and leaves it.

    Args:
        network: any module from moments to moments. For a :class:`Stack`, data has a leading model dimension and every
            model is clipped, stopped and recovered on its own.
        likelihood: its parameters, if any, are trained too.
        data: features ``(*models, rows, n)`` and targets ``(*models, rows)``, tensors or numpy arrays; or a
            ``DataLoader`` of such pairs, iterated once in each epoch with its own batches and order.
        epochs: passes through the data.
        batch_size: rows in a batch; not used with a loader.
        drop_last: skip an incomplete last batch (unless it is the only one); not used with a loader.
        optimizer: from parameters to a torch optimiser; default Adam with learning rate 0.01.
        scheduler: from the optimiser to a learning-rate scheduler, stepped after every batch.
        moments: from a batch of features to the network's input; the choice of covariance, or of input noise.
        penalty: added to the loss, for example ``lambda: layer.kl() / rows``.
        clip: largest gradient norm of a model.
        validation: held-out data of the same kind; the state of the best epoch is restored at the end.
        patience: stop when no model has improved on the validation data for so many epochs.
        seed: seed of the order of the rows; not used with a loader.
        shuffle: from a generator to random numbers ``(*models, rows)``, by whose size an epoch orders the rows. The
            default draws them anew for the whole stack, so that a model's order depends on its place in it.
        progress: show a progress bar when the standard error is a terminal.
        compile: run the loss through ``torch.compile`` where there is a C++ compiler; pays for long runs.
        checkpoint: file to keep the state of the run in between epochs, at most a tenth of the time. If it is there,
            the run goes on from it, in one process to the same bits; ``epochs`` and ``patience`` may have changed.

    Returns:
        The history of the run. Ctrl-C ends it early and keeps the best state so far.

    Raises:
        TrainingError: The loss stays non-finite, or another process has ended.
        DataError: The checkpoint is damaged, or of another run.

    Example:
        >>> import torch, mpgelu
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> net, likelihood = mpgelu.network(1, hidden=(16,)), mpgelu.HeteroscedasticGaussian()
        >>> history = mpgelu.fit(net, likelihood, (x, x[:, 0] ** 2), epochs=100)
        >>> bool(history.loss[-1] < history.loss[0])
        True
    """
    _check_likelihood(likelihood)
    if patience is not None and validation is None:
        raise InputError("fit: patience needs validation data; give validation=(X, y)")
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise InputError(f"fit: {name} must be at least 1, got {number}")
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    compile = compile and native.can_compile()
    run = network if compile else as_function(network)

    def row_losses(X: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        expected = likelihood.expected_log_prob(run(moments(X)), y)
        return -expected.mean(-1) if weight is None else -expected.sum(-1) * weight

    if not compile:
        warn_if_slow(network)
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
        history: list[Tensor] = []
        keeper = None
        if checkpoint is not None:
            settings = {"batch_size": batch_size, "drop_last": drop_last, "seed": seed, "clip": clip}
            keeper = Checkpoint(Path(checkpoint), network, likelihood, trainer, best, rows, settings, processes)
            history = keeper.resume()
        with training_progress(progress and processes.is_first) as bar, Interrupts() as interrupts:
            task = bar.add_task("training", total=epochs, completed=len(history), loss=float("nan"))
            while len(history) < epochs and not _is_stuck(best, patience):
                epoch = rows.epoch(len(history))
                losses_seen = trainer.epoch(processes.batches(epoch, rows, interrupts))
                if interrupts.seen:
                    break
                history.append(losses_seen)
                bar.update(task, advance=1, loss=history[-1].mean().item())
                if held_out is not None:
                    with torch.no_grad():
                        best.see(processes.mean(_evaluated(row_losses)(*held_out)))
                if keeper:
                    keeper.write_now_and_then(history)
            if keeper and not interrupts.seen:
                keeper.write(history)
            trainer.finish(*processes.part(rows.first, rows.is_whole))
    best.restore()
    none = rows.first[1].new_empty(0, *models)
    return History(
        loss=torch.stack(history) if history else none,
        validation=torch.stack(best.seen) if best.seen else none,
        best_epoch=best.epoch if best.seen else torch.full(models, len(history) - 1, device=trainer.device),
        recoveries=trainer.recoveries,
        interrupted=interrupts.seen,
        seconds=time.perf_counter() - started,
    )


def _evaluated(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Losses of the parameters as they are: inside ``torch.autocast`` torch keeps rounded copies of earlier ones."""

    def evaluate(*batch: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        return losses(*batch)

    return evaluate


def _is_stuck(best: Best, patience: int | None) -> bool:
    """Whether no model has improved for longer than one wants to wait."""
    return patience is not None and bool(best.seen) and best.epochs_without_improvement >= patience


def _remedy(checkpoint: str | Path | None) -> str:
    """What to do when a process is lost."""
    if checkpoint is None:
        return "nothing was kept: give fit(checkpoint='run.checkpoint') to be able to go on where it stopped"
    return f"run the same command again to go on from {checkpoint}"


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
