"""Optimiser steps that keep each model of a stack finite independently of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError, TrainingError
from mpgelu.training.distributed import ManyProcesses, OneProcess
from mpgelu.training.gradients import aligned, limit_gradients

_MOST_RECOVERIES = 20
_SNAPSHOT_EVERY = 20  # steps between two copies of the last good state

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedulers = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class RecoveryWarning(UserWarning):
    """The loss became non-finite, and training continues from the last good state with a smaller step."""


class Likelihood(Protocol):
    """The part of a likelihood that training uses."""

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        """Return the expected log-likelihood of each target, in closed form."""


class Trainer:
    r"""Optimiser steps with gradient clipping and recovery from non-finite losses, for each model of a stack.

    A copy of the parameters is kept every 20 steps. If the loss or the gradient of a model is not finite, its
    parameters return to that copy and its step scale s is halved; from then on its steps are
    :math:`\theta \leftarrow \theta + s\, (\theta_{\text{optimiser}} - \theta)`. The other models of the stack are not
    affected. Parameters of the likelihood are shared by all models and skip such a step.

    Args:
        network: Network or stack whose trainable parameters are optimised. Those of a stack have leading dimensions
            ``models``.
        likelihood: Likelihood; its parameters are optimised too if it is a module.
        models: Shape of the model dimensions, empty for a single network.
        losses: Function from a batch to the loss of each model, ``(*models,)``.
        optimizer: Function from parameters to an optimiser; ``None`` for Adam with a learning rate of 0.01.
        scheduler: Function from the optimiser to a learning-rate scheduler; ``None`` for a constant rate.
        penalty: Function to a penalty that is added to the losses; ``None`` for none.
        clip: Largest gradient norm of a model; ``None`` for no limit.
        processes: The processes that train together.

    Attributes:
        step_scale: Factor s of the steps of each model, ``(*models,)``.
        good: Whether loss and gradient of each model were finite in the last step, ``(*models,)``.
        recoveries: One message for each recovery.
        steps: Number of steps so far.

    Raises:
        InputError: The network has no trainable parameters.
    """

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
        processes: OneProcess | ManyProcesses,
    ) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError("fit: the network has no parameters to train; all of them are frozen, or there are none")
        noise = likelihood.parameters() if isinstance(likelihood, nn.Module) else ()
        self.shared = [p for p in noise if p.requires_grad]
        make = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
        self.optimizer = make([*self.parameters, *self.shared])
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.models, self.losses, self.penalty, self.clip, self.processes = models, losses, penalty, clip, processes
        self.device = self.parameters[0].device
        self.step_scale = torch.ones(models, device=self.device)
        self.good = torch.ones(models, dtype=torch.bool, device=self.device)
        self.recoveries: list[str] = []
        self.steps = 0
        self.losses_seen = torch.zeros(models, device=self.device)
        self._snapshot = [p.detach().clone() for p in self.parameters]

    def state(self) -> dict[str, Any]:
        """Return everything but the parameters that changes during training, for a checkpoint between epochs."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "step_scale": self.step_scale,
            "snapshot": self._snapshot,
            "recoveries": list(self.recoveries),
            "steps": self.steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step_scale = state["step_scale"].to(self.device)
        self._snapshot = [tensor.to(self.device) for tensor in state["snapshot"]]
        self.recoveries, self.steps = list(state["recoveries"]), state["steps"]

    def epoch(self, batches: Iterator[tuple[Tensor, ...]]) -> Tensor:
        """Take one step for each batch, and return the mean loss of each model before its steps, ``(*models,)``."""
        total, count = torch.zeros(self.models, device=self.device), 0
        for batch in batches:
            total, count = total + self.step(*batch), count + 1
        return total / count

    def step(self, *batch: Tensor) -> Tensor:
        """Take one optimiser step, undo it for models that became non-finite, and return the losses before it."""
        snapshot_due = self.steps % _SNAPSHOT_EVERY == 0
        damped = bool((self.step_scale < 1).any())
        before = [p.detach().clone() for p in self.parameters] if snapshot_due or damped else []
        self.optimizer.step(lambda: self._backward(batch))
        if self.scheduler:
            self.scheduler.step()
        if damped:
            self._blend(before)
        if not self.good.all():
            self._recover()
        elif snapshot_due:
            self._snapshot = before
        self.steps += 1
        return self.losses_seen

    def finish(self, *batch: Tensor) -> None:
        """Undo the last step if its loss, which no later step evaluates, is not finite."""
        with torch.no_grad():
            self.good = torch.isfinite(self.processes.mean(self.losses(*batch)))
        if not self.good.all():
            self._recover()

    def _backward(self, batch: tuple[Tensor, ...]) -> float:
        """Return the total loss, with clipped gradients on the parameters; gradients of non-finite models are zero."""
        self.optimizer.zero_grad()
        losses = self.losses(*batch)
        if self.penalty is not None:
            losses = losses + self.penalty()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        losses = self.processes.mean(losses.detach())
        self.good = limit_gradients([_gradient(p) for p in self.parameters], losses, self.clip, torch.float64)
        if not self.good.all():
            for p in self.shared:
                p.grad = torch.zeros_like(p)
        self.losses_seen = torch.where(self.good, losses, torch.nan)
        return float(torch.where(self.good, self.losses_seen, 0).sum())

    def _recover(self) -> None:
        """Restore the last good state of the models that became non-finite, halve their steps, and warn.

        Raises:
            TrainingError: Recoveries are too many to continue.
        """
        bad = ~self.good
        self.step_scale = torch.where(bad, self.step_scale / 2, self.step_scale)
        with torch.no_grad():
            for p, snapshot in zip(self.parameters, self._snapshot, strict=True):
                p.copy_(torch.where(aligned(bad, p), snapshot, p))
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.state.clear()  # its directions and gradients are those of steps that were undone
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
        if self.processes.is_first:
            warnings.warn(message, RecoveryWarning, stacklevel=6)

    def _blend(self, start: list[Tensor]) -> None:
        """Shorten the step that the parameters of each model took from ``start`` by its step scale."""
        with torch.no_grad():
            for p, before in zip(self.parameters, start, strict=True):
                p.copy_(torch.lerp(before, p, aligned(self.step_scale, p).to(p)))


def _gradient(p: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter.

    Raises:
        TrainingError: The parameter has no gradient because the loss does not depend on it.
    """
    if p.grad is None:
        raise TrainingError("fit: a parameter of the network takes no part in the loss; freeze it or remove it")
    return p.grad
