"""Optimiser steps of all networks of a stack at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.layers import Periodic, Scale
from mpgelu.likelihoods import Likelihood
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Stack, is_random

CLIP = 10.0  # largest norm of a network's gradient
_WARM_UP = 0.05  # share of the training in which the learning rate grows
_SPEEDS: dict[type[nn.Module], float] = {Periodic: 5.0, Scale: 3.0}  # learning rates in that of the other parameters

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


class Steps:
    """Adam on the networks of a stack, each clipped on its own; a step that is not finite is left out for that network.

    Args:
        stack: Networks, updated in place.
        objective: From features, targets and row weights of a batch to the loss of each network, ``(networks,)``.
    """

    def __init__(self, stack: Stack, objective: Objective) -> None:
        self.stack, self.objective, self.taken = stack, objective, 0
        speeds = _speeds(stack.architecture)
        named = {name: p for name, p in stack.state()[0].items() if p.requires_grad}
        self.parameters = list(named.values())
        groups = [
            {"params": [p for name, p in named.items() if speeds.get(name, 1.0) == speed], "speed": speed}
            for speed in sorted({speeds.get(name, 1.0) for name in named})
        ]
        self.optimizer = torch.optim.Adam(groups, lr=1.0, fused=True)

    def step(self, x: Tensor, y: Tensor, weights: Tensor, learning_rate: float) -> Tensor:
        """One step of every network on its own batch; the losses before it, ``(networks,)``.

        Args:
            x: ``(networks, rows, n)``.
            y: ``(networks, rows)``.
            weights: Weights of the rows, ``(networks, rows)``.
            learning_rate: Learning rate of this step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["speed"]
        self.optimizer.zero_grad()
        losses = self.objective(x, y, weights)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]).norm(dim=0)
        finite = torch.isfinite(losses.detach()) & torch.isfinite(norms)
        scale = (CLIP / (norms + 1e-12)).clamp_max(1)
        if finite.all():
            if (scale < 1).any():
                for gradient in gradients:
                    gradient.mul_(_aligned(scale, gradient))
            self.optimizer.step()
        else:
            self._step_of(finite, gradients, scale)
        self.taken += 1
        return torch.where(finite, losses.detach(), torch.nan)

    def _step_of(self, finite: Tensor, gradients: list[Tensor], scale: Tensor) -> None:
        """Step with some of the networks and leave the others, and what Adam knows of them, as they are."""
        for gradient in gradients:
            gradient.copy_(torch.where(_aligned(finite, gradient), gradient * _aligned(scale, gradient), 0))
        kept = [value.clone() for value in self.state().values()]
        self.optimizer.step()
        with torch.no_grad():
            for now, before in zip(self.state().values(), kept, strict=True):
                if now.dim():  # numbers of steps are shared
                    now.copy_(torch.where(_aligned(finite, now), now, before))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on but the number of steps taken."""
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
        for kept in self.optimizer.state.values():
            kept |= {name: value.to(device) for name, value in kept.items()}

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        """Take up a state after so many steps."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.taken = taken


def expected_loss(stack: Stack, likelihood: Likelihood, beta: float, rows: int) -> Objective:
    r"""Minus the expected log-likelihood of a batch, rows weighted by their predictive variance to the power beta.

    Random networks propagate diagonal moments, and layers with a Kullback-Leibler term add it, divided by the rows.

    Args:
        stack: The networks.
        likelihood: What their outputs mean.
        beta: Exponent of the weights (Seitzer et al., 2022), which carry no gradient and have mean one.
        rows: That each network is trained on.
    """
    random = is_random(stack.architecture)
    penalised = any(hasattr(module, "kl") for module in stack.architecture.modules())

    def losses(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        outputs: Moments | Tensor = stack(DiagonalMoments.certain(x) if random else x)
        weights = weights * variance_weights(likelihood, outputs, beta)
        fit = -(weights * likelihood.expected_log_prob(outputs, y)).mean(-1)
        return fit + stack.each(_kl) / rows if penalised else fit

    return losses


def variance_weights(likelihood: Likelihood, outputs: Moments | Tensor, beta: float) -> Tensor | float:
    """Weight of each row in the loss, its predictive variance to the power beta, of mean one; no gradient."""
    if not beta:
        return 1.0
    with torch.no_grad():
        weights = likelihood.variance(outputs).clamp(1e-12, 1e12) ** beta
        return weights / weights.mean(-1, keepdim=True)


def learning_rate(peak: float, done: float) -> float:
    """A linear warm-up, then half a cosine down to zero; ``done`` is the share of the training after the step."""
    if done < _WARM_UP:
        return peak * done / _WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def _speeds(architecture: nn.Module) -> dict[str, float]:
    """Learning rates of parameters by their names, in that of all others."""
    return {
        f"{name}.{parameter}": _SPEEDS[type(module)]
        for name, module in architecture.named_modules()
        if type(module) in _SPEEDS
        for parameter, _ in module.named_parameters()
    }


def _aligned(per_network: Tensor, p: Tensor) -> Tensor:
    return per_network.reshape(-1, *[1] * (p.dim() - 1)).to(p if per_network.is_floating_point() else per_network)


def _kl(network: nn.Module) -> Tensor:
    terms: list[Any] = [getattr(module, "kl", None) for module in network.modules()]
    return torch.stack([kl() for kl in terms if kl is not None]).sum()
