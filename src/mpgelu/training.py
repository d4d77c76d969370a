"""One training loop, for one network or for many stacked as one."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from types import FrameType
from typing import Any, Protocol, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import InputError, TrainingError
from mpgelu.moments import FactoredMoments, Moments

_MOST_RECOVERIES = 20
_SNAPSHOT_EVERY = 20  # steps between two copies of the last good state

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedulers = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class RecoveryWarning(UserWarning):
    """The loss became non-finite and training went on from the last good state with a smaller step."""


class Likelihood(Protocol):
    """What training needs of a likelihood."""

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        """Expected log-likelihood of each target, in closed form."""


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


class Interrupts:
    """Ctrl-C as a flag that is looked at between steps: a step that stops half-way would leave a state that never was.

    Whoever listened before hears of it too. Where Ctrl-C is ignored, as by jobs in the background, it stays so. Threads
    other than the main one get none.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        """Listen from now on."""
        self._before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._listens = is_main and self._before not in (signal.SIG_IGN, None)  # None: not set from Python
        if self._listens:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signal back to whoever listened before."""
        if self._listens:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:  # the second time, do not wait for the step
            raise KeyboardInterrupt
        self.seen = True
        if callable(self._before):
            with suppress(KeyboardInterrupt):
                self._before(number, frame)


class Trainer:
    """Steps of the optimiser, with each model kept finite on its own."""

    def __init__(
        self,
        network: nn.Module,
        likelihood: Likelihood,
        models: torch.Size,
        losses: Callable[..., Tensor],
        optimizer: Optimizers | None,
        scheduler: Schedulers | None,
        penalty: Callable[[], Tensor] | None,
        clip: float | None,
    ) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError("fit: the network has no parameters to train; all of them are frozen, or there are none")
        noise = likelihood.parameters() if isinstance(likelihood, nn.Module) else ()
        self.shared = [p for p in noise if p.requires_grad]
        make = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
        self.optimizer = make([*self.parameters, *self.shared])
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.models, self.losses, self.penalty, self.clip = models, losses, penalty, clip
        self.device = self.parameters[0].device
        self.step_scale = torch.ones(models, device=self.device)
        self.good = torch.ones(models, dtype=torch.bool, device=self.device)
        self.recoveries: list[str] = []
        self.steps = 0
        self.losses_seen = torch.zeros(models, device=self.device)
        self._snapshot = [p.detach().clone() for p in self.parameters]

    def epoch(self, batches: Iterator[tuple[Tensor, ...]]) -> Tensor:
        """Train on every batch; the mean loss of each model."""
        total, count = torch.zeros(self.models, device=self.device), 0
        for batch in batches:
            total, count = total + self.step(*batch), count + 1
        return total / count

    def step(self, *batch: Tensor) -> Tensor:
        """One step of the optimiser, undone for the models that have become non-finite; the losses before it."""
        snapshot_due = self.steps % _SNAPSHOT_EVERY == 0
        damped = bool((self.step_scale < 1).any())
        before = [p.detach().clone() for p in self.parameters] if snapshot_due or damped else []
        self.optimizer.step(lambda: self._backward(batch))
        if self.scheduler:
            self.scheduler.step()
        if damped:
            self._blend(before, self.step_scale)
        if not self.good.all():
            self._recover()
        elif snapshot_due:
            self._snapshot = before
        self.steps += 1
        return self.losses_seen

    def finish(self, *batch: Tensor) -> None:
        """Undo a last step that went wrong: its loss is not seen by any further step."""
        with torch.no_grad():
            self.good = torch.isfinite(self.losses(*batch))
        if not self.good.all():
            self._recover()

    def _backward(self, batch: tuple[Tensor, ...]) -> float:
        """Total loss, with clipped gradients left on the parameters; those of a non-finite model are zero."""
        self.optimizer.zero_grad()
        losses = self.losses(*batch)
        if self.penalty is not None:
            losses = losses + self.penalty()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        norms = torch.linalg.vector_norm(torch.stack([self._norm(p) for p in self.parameters]), dim=0)
        self.good = torch.isfinite(losses.detach()) & torch.isfinite(norms)
        if self.clip is not None:
            self._scale_gradients((self.clip / (norms + 1e-12)).clamp_max(1))
        if not self.good.all():
            for p in self.parameters:
                p.grad = torch.where(self._align(self.good, p), _gradient(p), 0)
            for p in self.shared:
                p.grad = torch.zeros_like(p)
        self.losses_seen = torch.where(self.good, losses.detach(), torch.nan)
        return float(torch.where(self.good, self.losses_seen, 0).sum())

    def _recover(self) -> None:
        bad = ~self.good
        self.step_scale = torch.where(bad, self.step_scale / 2, self.step_scale)
        with torch.no_grad():
            for p, snapshot in zip(self.parameters, self._snapshot, strict=True):
                p.copy_(torch.where(self._align(bad, p), snapshot, p))
        which = f" of {int(bad.sum())} of {bad.numel()} models" if self.models else ""
        message = (
            f"fit: step {self.steps}: the loss{which} became non-finite; "
            "went back to the last good state and halved the step"
        )
        self.recoveries.append(message)
        if len(self.recoveries) > _MOST_RECOVERIES:
            raise TrainingError(
                f"fit: the loss became non-finite {len(self.recoveries)} times, last at step {self.steps}; "
                "lower the learning rate, clip the gradients (clip=10) or check the data for extreme values"
            )
        warnings.warn(message, RecoveryWarning, stacklevel=5)

    def _blend(self, start: list[Tensor], scale: Tensor) -> None:
        with torch.no_grad():
            for p, before in zip(self.parameters, start, strict=True):
                p.copy_(torch.lerp(before, p, self._align(scale, p).to(p)))

    def _scale_gradients(self, scale: Tensor) -> None:
        for p in self.parameters:
            _gradient(p).mul_(self._align(scale, p).to(p))

    def _norm(self, p: nn.Parameter) -> Tensor:
        """Norm of the gradient of each model, ``(*models,)``."""
        gradient = _gradient(p).reshape(*self.models, -1)
        norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float64)
        return norm

    def _align(self, per_model: Tensor, p: Tensor) -> Tensor:
        """A value for each model, shaped to broadcast against a parameter."""
        return per_model.reshape((*self.models, *[1] * (p.dim() - len(self.models))))


class Best:
    """The state of each model at its best validation loss."""

    def __init__(self, network: nn.Module, models: torch.Size, likelihood: nn.Module | None) -> None:
        self.network = network
        self.parameters = [*network.parameters(), *(likelihood.parameters() if likelihood is not None else ())]
        self.models = models
        device = self.parameters[0].device
        self.loss = torch.full(models, torch.inf, device=device)
        self.epoch = torch.zeros(models, dtype=torch.long, device=device)
        self.seen: list[Tensor] = []
        self.state: list[Tensor] = []

    def see(self, losses: Tensor) -> None:
        """Take note of the validation losses after an epoch, and of the models that improved."""
        better = losses < self.loss  # false for a non-finite loss
        self.loss = torch.where(better, losses, self.loss)
        self.epoch = torch.where(better, len(self.seen), self.epoch)
        self.seen.append(losses)
        kept = self.state or [p.detach().clone() for p in self.parameters]
        self.state = [
            torch.where(better.reshape((*self.models, *[1] * (p.dim() - len(self.models)))), p.detach(), old)
            for p, old in zip(self.parameters, kept, strict=True)
        ]

    @property
    def epochs_without_improvement(self) -> int:
        """Epochs since the last improvement of any model."""
        return len(self.seen) - 1 - int(self.epoch.max()) if self.seen else 0

    def arrays(self) -> dict[str, Tensor]:
        """What has been seen, as tensors."""
        if not self.seen:
            return {}
        kept = {f"best_{position}": tensor for position, tensor in enumerate(self.state)}
        return kept | {"best_loss": self.loss, "best_epoch": self.epoch, "best_seen": torch.stack(self.seen)}

    def load(self, arrays: dict[str, Tensor]) -> None:
        """Take up what :meth:`arrays` gave."""
        if "best_seen" in arrays:
            self.seen = list(arrays["best_seen"])
            self.loss, self.epoch = arrays["best_loss"], arrays["best_epoch"]
            self.state = [arrays[f"best_{position}"] for position in range(len(self.parameters))]

    def restore(self) -> None:
        """Put the best state back; nothing to do without validation data."""
        with torch.no_grad():
            for p, state in zip(self.parameters, self.state, strict=bool(self.state)):
                p.copy_(state)


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


def _gradient(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        raise TrainingError("fit: a parameter of the network takes no part in the loss; freeze it or remove it")
    return p.grad


def training_progress(show: bool) -> Progress:
    """A bar with the loss, on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        console=Console(stderr=True),
        transient=True,
        disable=not (show and sys.stderr.isatty()),
    )


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
