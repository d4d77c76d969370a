"""One training loop, for one network or for many stacked as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import InputError
from mpgelu.moments import FactoredMoments, Moments
from mpgelu.training.best import Best
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
    data: tuple[Tensor, Tensor],
    *,
    epochs: int = 500,
    batch_size: int = 256,
    drop_last: bool = False,
    optimizer: Optimizers | None = None,
    scheduler: Schedulers | None = None,
    moments: Callable[[Tensor], Moments | Tensor] = FactoredMoments.certain,
    penalty: Callable[[], Tensor] | None = None,
    clip: float | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    patience: int | None = None,
    seed: int = 0,
    progress: bool = True,
    compile: bool = False,
) -> History:
    r"""Maximise the expected log-likelihood by mini-batches; the network is trained in place.

    The loss of a batch is :math:`-\frac1B \sum_b \mathbb E \log p(y_b \mid h_b)` plus the penalty. It is analytic: the
    same seed gives bit-identical results on one machine. A non-finite loss or gradient does not end the run: that
    model returns to its last good state, its steps are halved from then on, and a :class:`RecoveryWarning` says so.

    Args:
        network: any module from moments to moments. For a :class:`Stack`, data has a leading model dimension and every
            model is clipped, stopped and recovered on its own.
        likelihood: its parameters, if any, are trained too.
        data: features ``(*models, rows, n)`` and targets ``(*models, rows)``.
        epochs: passes through the data.
        batch_size: rows in a batch.
        drop_last: skip an incomplete last batch (unless it is the only one).
        optimizer: from parameters to a torch optimiser; default Adam with learning rate 0.01.
        scheduler: from the optimiser to a learning-rate scheduler, stepped after every batch.
        moments: from a batch of features to the network's input; the choice of covariance, or of input noise.
        penalty: added to the loss, for example ``lambda: layer.kl() / rows``.
        clip: largest gradient norm of a model.
        validation: held-out data; the state of the best epoch is restored at the end.
        patience: stop when no model has improved on the validation data for so many epochs.
        seed: of the order of the rows.
        progress: show a progress bar when the standard error is a terminal.
        compile: run the loss through ``torch.compile`` where there is a C++ compiler; pays for long runs.

    Returns:
        The history of the run. Ctrl-C ends it early and keeps the best state so far.

    Example:
        >>> import torch, mpgelu
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> net, likelihood = mpgelu.network(1, hidden=(16,)), mpgelu.HeteroscedasticGaussian()
        >>> history = mpgelu.fit(net, likelihood, (x, x[:, 0] ** 2), epochs=100)
        >>> bool(history.loss[-1] < history.loss[0])
        True
    """
    X, y = _check_data("data", data)
    if validation is not None:
        validation = _check_data("validation", validation)
    elif patience is not None:
        raise InputError("fit: patience needs validation data; give validation=(X, y)")
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if number < 1:
            raise InputError(f"fit: {name} must be at least 1, got {number}")

    def row_losses(X: Tensor, y: Tensor) -> Tensor:
        return -likelihood.expected_log_prob(network(moments(X)), y).mean(-1)

    losses = torch.compile(row_losses) if compile and native.can_compile() else row_losses
    trainer = Trainer(network, likelihood, y.shape[:-1], losses, optimizer, scheduler, penalty, clip)
    alone = likelihood if isinstance(likelihood, nn.Module) and y.dim() == 1 else None
    best = Best(network, y.shape[:-1], alone)
    generator = torch.Generator().manual_seed(seed)
    history: list[Tensor] = []
    started = time.perf_counter()
    with training_progress(progress) as bar, Interrupts() as interrupts:
        task = bar.add_task("training", total=epochs, loss=float("nan"))
        for _ in range(epochs):
            batches = _batches(X, y, batch_size, drop_last, generator)
            losses_seen = trainer.epoch(takewhile(lambda _: not interrupts.seen, batches))
            if interrupts.seen:
                break
            history.append(losses_seen)
            bar.update(task, advance=1, loss=history[-1].mean().item())
            if validation is not None:
                with torch.no_grad():
                    best.see(row_losses(*validation))
                if patience is not None and best.epochs_without_improvement >= patience:
                    break
        trainer.finish(X[..., :batch_size, :], y[..., :batch_size])
    best.restore()
    return History(
        loss=torch.stack(history) if history else y.new_empty(0, *y.shape[:-1]),
        validation=torch.stack(best.seen) if best.seen else y.new_empty(0, *y.shape[:-1]),
        best_epoch=best.epoch if best.seen else torch.full(y.shape[:-1], len(history) - 1),
        recoveries=trainer.recoveries,
        interrupted=interrupts.seen,
        seconds=time.perf_counter() - started,
    )


def _batches(
    X: Tensor, y: Tensor, size: int, drop_last: bool, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffle the rows of every model once, then cut slices: no copying per batch."""
    order = torch.rand(y.shape, generator=generator).argsort(-1).to(y.device)
    X, y = torch.take_along_dim(X, order.unsqueeze(-1), dim=-2), torch.take_along_dim(y, order, dim=-1)
    rows = y.shape[-1]
    end = rows - rows % size if drop_last and rows >= size else rows
    for start in range(0, end, size):
        yield X[..., start : start + size, :], y[..., start : start + size]


def _check_data(name: str, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    X, y = data
    if X.dim() < 2 or y.shape != X.shape[:-1]:
        raise InputError(
            f"fit: {name} must be features (rows, n) and targets (rows,), got {tuple(X.shape)} and {tuple(y.shape)}"
        )
    if X.numel() == 0:
        raise InputError(f"fit: {name} has no rows, X has shape {tuple(X.shape)}")
    for part, values in (("X", X), ("y", y)):
        if not values.is_floating_point():
            raise InputError(f"fit: {name}: {part} must have a float dtype, got {values.dtype}; use {part}.float()")
        if not torch.isfinite(values).all():
            place = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
            raise InputError(f"fit: {name}: {part} must be finite, got {values[place].item()} at index {place}")
    return X, y
