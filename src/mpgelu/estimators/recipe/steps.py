"""Optimiser steps of a stack of networks, and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mpgelu.errors import TrainingError
from mpgelu.layers import Periodic, Scale
from mpgelu.likelihoods import Likelihood
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Stack, is_random
from mpgelu.training.gradients import aligned, limit_gradients

CLIP = 10.0  # largest norm of the gradient of a network
_MOST_LEFT_OUT = 0.5  # largest share of skipped steps of a network
_WARM_UP = 0.05  # fraction of the training in which the learning rate grows
_SPEEDS: dict[type[nn.Module], float] = {Periodic: 5.0, Scale: 3.0}  # learning rates relative to other parameters

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


@runtime_checkable
class Penalised(Protocol):
    """A layer with random weights that adds a Kullback-Leibler term to the loss, as :class:`GaussianLinear` does."""

    def kl(self) -> Tensor:
        """Return the Kullback-Leibler divergence of the weights from their prior, ``()``."""


class Steps:
    """Adam on a stack of networks, with gradient clipping and treatment of non-finite losses for each network.

    A network whose loss or gradient is not finite skips the step: its parameters and its moments of Adam stay the same.
    Results of a network do not depend on the other networks of the stack, up to rounding.

    Args:
        stack: The networks, which are updated in place.
        objective: Function from features, targets and row weights of a batch to the loss of each network,
            ``(networks,)``.

    Attributes:
        taken: Number of steps.
        left_out: Number of steps that each network skipped, ``(networks,)``; a state that is loaded does not include
            those before it.
    """

    def __init__(self, stack: Stack, objective: Objective) -> None:
        self.stack, self.objective, self.taken = stack, objective, 0
        self.left_out = torch.zeros(len(stack), dtype=torch.long, device="cpu")
        speeds = _speeds(stack.architecture)
        named = {name: p for name, p in stack.state()[0].items() if p.requires_grad}
        self.parameters = list(named.values())
        groups = [
            {"params": [p for name, p in named.items() if speeds.get(name, 1.0) == speed], "speed": speed}
            for speed in sorted({speeds.get(name, 1.0) for name in named})
        ]
        self.optimizer = torch.optim.Adam(groups, lr=1.0, fused=True)

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


def expected_loss(stack: Stack, likelihood: Likelihood, beta: float, rows: int) -> Objective:
    r"""Return the loss of a stack of networks, the weighted negative expected log-likelihood of a batch.

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

    Returns:
        Function from features ``(networks, B, n)``, targets ``(networks, B)`` and row weights ``(networks, B)`` to
        losses ``(networks,)``.
    """
    random = is_random(stack.architecture)
    penalised = any(isinstance(module, Penalised) for module in stack.architecture.modules())

    def losses(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        outputs: Moments | Tensor = stack(DiagonalMoments.certain(x) if random else x)
        weights = weights * variance_weights(likelihood, outputs, beta)
        fit = -(weights * likelihood.expected_log_prob(outputs, y)).mean(-1)
        return fit + stack.each(_kl) / rows if penalised else fit

    return losses


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
