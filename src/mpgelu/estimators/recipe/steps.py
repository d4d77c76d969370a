"""Optimiser steps of a stack of networks, and their loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mpgelu.errors import TrainingError
from mpgelu.estimators.recipe.folds import Rows
from mpgelu.layers import Periodic, Scale
from mpgelu.likelihoods import HeteroscedasticGaussian, Likelihood
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.native.perceptron import can_take
from mpgelu.native.train import Adam, ObjectiveName, TrainedShape, take_steps
from mpgelu.networks import Stack, is_random
from mpgelu.networks.plain import plain_form
from mpgelu.training.gradients import aligned, limit_gradients

CLIP = 10.0  # largest norm of the gradient of a network
_MOST_LEFT_OUT = 0.5  # largest share of skipped steps of a network
_WARM_UP = 0.05  # fraction of the training in which the learning rate grows
_SPEEDS: dict[type[nn.Module], float] = {Periodic: 5.0, Scale: 3.0}  # learning rates relative to other parameters


class Objective(Protocol):
    """The loss of a stack of networks."""

    @property
    def kernel(self) -> tuple[ObjectiveName, float] | None:
        """Name and shape of the objective in the kernel for deterministic networks; ``None`` without one."""

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return the loss of each network, ``(networks,)``.

        Args:
            x: Features, ``(networks, rows, n)``.
            y: Targets, ``(networks, rows)``.
            weights: Weights of the rows, ``(networks, rows)``.
        """


@runtime_checkable
class Penalised(Protocol):
    """A layer with random weights that adds a Kullback-Leibler term to the loss, as :class:`GaussianLinear` does."""

    def kl(self) -> Tensor:
        """Return the Kullback-Leibler divergence of the weights from their prior, ``()``."""


class Steps:
    """Adam on a stack of networks, with gradient clipping and treatment of non-finite losses for each network.

    A network whose loss or gradient is not finite skips the step: its parameters and its moments of Adam stay the same.
    Results of a network do not depend on the other networks of the stack, up to rounding. A compiled kernel takes whole
    steps where it knows networks and objective; otherwise torch takes them, with the same results up to rounding.

    Args:
        stack: The networks, which are updated in place.
        objective: The loss.
        weight_decay: Decoupled weight decay, as of ``torch.optim.AdamW``.

    Attributes:
        taken: Number of steps.
        left_out: Number of steps that each network skipped, ``(networks,)``; a state that is loaded does not include
            those before it.
    """

    def __init__(self, stack: Stack, objective: Objective, weight_decay: float = 0.0) -> None:
        self.stack, self.objective, self.taken = stack, objective, 0
        self.left_out = torch.zeros(len(stack), dtype=torch.long, device="cpu")
        speeds = _speeds(stack.architecture)
        named = {name: p for name, p in stack.state()[0].items() if p.requires_grad}
        self.parameters = list(named.values())
        groups = [
            {"params": [p for name, p in named.items() if speeds.get(name, 1.0) == speed], "speed": speed}
            for speed in sorted({speeds.get(name, 1.0) for name in named})
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=weight_decay, fused=True)
        self._whole = _WholeSteps.of(stack, objective, self.optimizer)

    @property
    def is_divisible(self) -> bool:
        """Whether threads can share the networks of a step."""
        return self._whole is not None

    def take(self, data: Rows, at: Tensor, rates: Sequence[float]) -> Tensor:
        """Take several steps with each network on batches of its own.

        Args:
            data: The data.
            at: Row numbers of the batches, ``(networks, steps, batch)``.
            rates: Learning rate of each step.

        Returns:
            The losses before the last step, ``(networks,)``; NaN for networks that skipped it.
        """
        if self._whole is None or not can_take(data.X, data.y, data.weights, *self.parameters):
            for some, rate in zip(at.unbind(1), rates, strict=True):
                losses = self.step(data.X[some], data.y[some], data.weights[some], rate)
            return losses
        self.state()  # exists from now on
        losses = self._whole.take(data, at, rates, self.taken)
        self.taken += len(rates)
        self.left_out += losses.isnan().sum(1)
        return losses[:, -1]

    def step(self, x: Tensor, y: Tensor, weights: Tensor, learning_rate: float) -> Tensor:
        """Take one step with each network on its own batch.

        Args:
            x: Features, ``(networks, rows, n)``.
            y: Targets, ``(networks, rows)``.
            weights: Weights of the rows, ``(networks, rows)``.
            learning_rate: Learning rate of this step.

        Returns:
            The losses before the step, ``(networks,)``; NaN for networks that skipped it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["speed"]
        self.optimizer.zero_grad()
        losses = self.objective(x, y, weights)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        finite = limit_gradients(gradients, losses.detach(), CLIP)
        kept = [] if finite.all() else [value.clone() for value in self.state().values()]
        self.optimizer.step()
        if kept:
            self._undo(~finite, kept)
        self.taken += 1
        self.left_out += ~finite
        return torch.where(finite, losses.detach(), torch.nan)

    def _undo(self, skipped: Tensor, before: list[Tensor]) -> None:
        """Restore parameters and optimiser state of some of the networks.

        Args:
            skipped: Which networks, ``(networks,)``.
            before: The state to restore, in the order of :meth:`state`.
        """
        with torch.no_grad():
            for now, kept in zip(self.state().values(), before, strict=True):
                if now.dim():  # the number of steps is a scalar that all networks share
                    now.copy_(torch.where(aligned(skipped, now), kept, now))

    @property
    def share_left_out(self) -> float:
        """Fraction of the steps that the network with most of them skipped."""
        return float(self.left_out.max()) / max(1, self.taken)

    def check_left_out(self) -> None:
        """Raise a :class:`TrainingError` if a network skipped more than half of its steps."""
        if self.share_left_out > _MOST_LEFT_OUT:
            raise TrainingError(
                f"fit: the loss was not finite in {self.share_left_out:.0%} of the steps of a network; "
                "lower learning_rate or check the data for extreme values"
            )

    def state(self) -> dict[str, Tensor]:
        """Return parameters and state of the optimiser by name; with :attr:`taken` they determine the next steps."""
        state: dict[str, Tensor] = {}
        for position, p in enumerate(self.parameters):
            kept = self.optimizer.state[p]
            if not kept:
                kept |= {
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                    "step": p.new_zeros((), dtype=torch.float32),
                }
            state |= {f"parameter_{position}": p.detach()}
            state |= {f"{name}_{position}": kept[name] for name in ("exp_avg", "exp_avg_sq", "step")}
        return state

    def to(self, device: torch.device) -> None:
        """Move the networks, and what Adam knows of them, to a device."""
        self.stack.to(device)
        self.left_out = self.left_out.to(device)
        for kept in self.optimizer.state.values():
            kept |= {name: value.to(device) for name, value in kept.items()}

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        """Restore a state that :meth:`state` returned after ``taken`` steps."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.taken = taken


class _WholeSteps:
    """Steps of deterministic networks by a kernel, on the parameters and the state of an optimiser of torch.

    Args:
        shape: Sizes of the networks.
        parts: Parameters of scale, embedding and linear maps.
        objective: Name of the objective.
        adam: Settings of objective and optimiser.
        optimizer: The optimiser, whose state is read and written.
    """

    def __init__(
        self,
        shape: TrainedShape,
        parts: Sequence[Sequence[Tensor]],
        objective: ObjectiveName,
        adam: Adam,
        optimizer: torch.optim.AdamW,
    ) -> None:
        self.shape, self.objective, self.adam, self.optimizer = shape, objective, adam, optimizer
        self.parameters = [p for part in parts for p in part]
        speeds = {p: float(group["speed"]) for group in optimizer.param_groups for p in group["params"]}
        self.speeds = torch.tensor(
            [speeds[part[0]] if part else 1.0 for part in parts], dtype=torch.float64, device="cpu"
        )

    @classmethod
    def of(cls, stack: Stack, objective: Objective, optimizer: torch.optim.AdamW) -> _WholeSteps | None:
        """Return the steps by the kernel, or ``None`` if it does not know networks or objective."""
        form = plain_form(stack.architecture)
        if objective.kernel is None or form is None or not all(p.requires_grad for p in stack.parameters()):
            return None
        if (trained := form.trained(stack.state()[0])) is None:
            return None
        (name, shape), settings = objective.kernel, optimizer.defaults
        beta_1, beta_2 = settings["betas"]
        adam = Adam(shape, CLIP, settings["weight_decay"], beta_1, beta_2, settings["eps"])
        return cls(*trained, name, adam, optimizer)

    def take(self, data: Rows, at: Tensor, rates: Sequence[float], taken: int) -> Tensor:
        """Take steps as :meth:`Steps.take` does, and return all losses, ``(networks, steps)``."""
        kept = [self.optimizer.state[p] for p in self.parameters]
        state = [[p.detach() for p in self.parameters]]
        state += [[each[name] for each in kept] for name in ("exp_avg", "exp_avg_sq")]
        flat = [torch.cat([tensor.flatten(1) for tensor in tensors], 1) for tensors in state]
        by_part = torch.outer(torch.tensor(rates, dtype=torch.float64, device="cpu"), self.speeds)
        given = (data.X, data.y, data.weights)
        losses = take_steps(self.shape, self.objective, self.adam, given, at, by_part, taken, flat)
        for tensors, joined in zip(state, flat, strict=True):
            parts = torch.split(joined, [tensor[0].numel() for tensor in tensors], 1)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        for each in kept:
            each["step"] += len(rates)
        return losses


class ExpectedLoss:
    r"""The loss of a stack of networks, the weighted negative expected log-likelihood of a batch.

    .. math:: L = -\frac1B \sum_b c_b\, u_b\, \mathbb E \log p(y_b \mid h_b) + \frac{\mathrm{KL}}{R}, \qquad
        u_b \propto v_b^\beta

    with row weights c, predictive variances v, and normalised weights u of mean one without gradients, the beta-NLL of
    Seitzer et al. (2022). Networks with random layers propagate diagonal moments, an approximation that is corrected in
    predictions. Layers with a Kullback-Leibler term contribute it, divided by the number R of training rows.

    Args:
        stack: The networks.
        likelihood: Likelihood of their outputs.
        beta: Exponent of the predictive variance; 0 for equal weights.
        rows: Number R of training rows of each network.
    """

    def __init__(self, stack: Stack, likelihood: Likelihood, beta: float, rows: int) -> None:
        self.stack, self.likelihood, self.beta, self.rows = stack, likelihood, beta, rows
        self.is_random = is_random(stack.architecture)
        self.is_penalised = any(isinstance(module, Penalised) for module in stack.architecture.modules())

    @property
    def kernel(self) -> tuple[ObjectiveName, float] | None:
        """The objective of the kernel, for the Gaussian whose log-variance is an output."""
        known = type(self.likelihood) is HeteroscedasticGaussian and not self.is_random and not self.is_penalised
        return ("beta_gaussian", self.beta) if known else None

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return the losses, ``(networks,)``."""
        outputs: Moments | Tensor = self.stack(DiagonalMoments.certain(x) if self.is_random else x)
        weights = weights * variance_weights(self.likelihood, outputs, self.beta)
        fit = -(weights * self.likelihood.expected_log_prob(outputs, y)).mean(-1)
        return fit + self.stack.each(_kl) / self.rows if self.is_penalised else fit


def variance_weights(likelihood: Likelihood, outputs: Moments | Tensor, beta: float) -> Tensor | float:
    r"""Return the weights :math:`v^\beta` of rows in the loss, normalised to mean one, without gradients.

    Args:
        likelihood: Likelihood of the outputs, which states the predictive variance v.
        outputs: Outputs of the networks, ``(networks, rows, outputs)``.
        beta: Exponent; for 0 the weight is the number one.

    Returns:
        Weights, ``(networks, rows)``.
    """
    if not beta:
        return 1.0
    with torch.no_grad():
        weights = likelihood.variance(outputs).clamp(1e-12, 1e12) ** beta
        return weights / weights.mean(-1, keepdim=True)


def learning_rate(peak: float, done: float) -> float:
    """Return the learning rate of a step: a linear warm-up in 5 % of the training, then half a cosine down to zero.

    Args:
        peak: Largest learning rate.
        done: Fraction of the training that is completed after the step.
    """
    if done < _WARM_UP:
        return peak * done / _WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def _speeds(architecture: nn.Module) -> dict[str, float]:
    """Return the learning rates of parameters with a special one, relative to the others, by name."""
    return {
        f"{name}.{parameter}": _SPEEDS[type(module)]
        for name, module in architecture.named_modules()
        if type(module) in _SPEEDS
        for parameter, _ in module.named_parameters()
    }


def _kl(network: nn.Module) -> Tensor:
    """Return the sum of the Kullback-Leibler terms of all layers, ``()``."""
    return torch.stack([module.kl() for module in network.modules() if isinstance(module, Penalised)]).sum()
