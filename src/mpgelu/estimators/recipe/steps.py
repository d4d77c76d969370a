"""Optimiser steps of all networks at once, in native code or in torch."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.estimators.recipe.settings import Settings, certain
from mpgelu.layers import GaussianLinear
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import Moments
from mpgelu.native.perceptron import Trainer as NativeTrainer
from mpgelu.networks import Stack
from mpgelu.training import Trainer

CLIP = 10.0  # largest norm of a network's gradient
_WARM_UP = 0.05  # share of the steps in which the learning rate grows


class Steps(Protocol):
    """What the loop needs of an optimiser of stacked networks."""

    taken: int

    def steps(self, x: Tensor, y: Tensor, weights: Tensor, learning_rates: Tensor) -> Tensor:
        """One step of every network for each batch; the losses ``(networks, steps)``."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on but the number of steps taken."""

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        """Take up a state after so many steps."""


def make_steps(stack: Stack, settings: Settings, rows: int) -> Steps:
    """Whole steps in native code where it can do what is asked, else torch."""
    plain = settings.train_covariance == "diagonal" and settings.noise == "heteroscedastic"
    if plain and stack.perceptron is not None and native.available():
        return NativeTrainer(stack.perceptron, settings.beta, CLIP)
    return TorchSteps(stack, settings, rows)


class TorchSteps:
    """The same steps in torch, for exact covariance, Gaussian weights and constant noise."""

    def __init__(self, stack: Stack, settings: Settings, rows: int) -> None:
        likelihood = HeteroscedasticGaussian()

        def losses(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            moments = stack(certain(x, settings.train_covariance))
            weights = weights * variance_weights(moments, settings.beta)
            return -(weights * likelihood.expected_log_prob(moments, y)).mean(-1)

        penalty = (lambda: stack.each(_kl) / rows) if settings.gaussian_weights else None
        models = torch.Size([len(stack)])
        self.trainer = Trainer(stack, likelihood, models, losses, _adam, None, penalty, CLIP)
        self.taken = 0
        if settings.noise == "homoscedastic":
            _freeze_noise_weights(stack)

    def steps(self, x: Tensor, y: Tensor, weights: Tensor, learning_rates: Tensor) -> Tensor:
        """See :class:`Steps`."""
        losses = []
        for step, learning_rate in enumerate(learning_rates.tolist()):
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = learning_rate
            losses.append(self.trainer.step(x[:, step], y[:, step], weights[:, step]))
            self.taken += 1
        return torch.stack(losses, 1)

    def state(self) -> dict[str, Tensor]:
        """See :class:`Steps`."""
        state = {"step_scale": self.trainer.step_scale}
        for position, p in enumerate(self.trainer.parameters):
            kept = self.trainer.optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                kept.setdefault(name, torch.zeros_like(p))
            kept.setdefault("step", torch.tensor(0.0))
            state |= {f"parameter_{position}": p.detach()}
            state |= {f"{name}_{position}": kept[name] for name in ("exp_avg", "exp_avg_sq", "step")}
        return state

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        """See :class:`Steps`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.taken = taken


def variance_weights(moments: Moments, beta: float) -> Tensor:
    """Weight of each row in the loss, its predictive variance to the power beta, of mean one; no gradient."""
    if not beta:
        return torch.ones_like(moments.mean[..., 0])
    with torch.no_grad():
        (_, log_noise), (variance, log_noise_variance) = moments.mean.unbind(-1), moments.variance.unbind(-1)
        noise = torch.exp((log_noise + log_noise_variance / 2).clamp(-30, 30))
        weights = (variance + noise) ** beta
        return weights / weights.mean(-1, keepdim=True)


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1.0)  # type: ignore[arg-type]


def _kl(network: nn.Module) -> Tensor:
    return torch.stack([layer.kl() for layer in network.modules() if isinstance(layer, GaussianLinear)]).sum()


def _freeze_noise_weights(stack: Stack) -> None:
    """Let the second output be a constant: its weights, zero at the start, get no gradient."""
    parameters, _ = stack.state()
    for kind in (".weight", ".log_weight_variance"):
        for p in [p for name, p in parameters.items() if name.endswith(kind)][-1:]:  # of the last layer
            keep = torch.ones_like(p[0])
            keep[1] = 0
            p.register_hook(lambda gradient, keep=keep: gradient * keep)  # type: ignore[no-untyped-call]


def learning_rates(settings: Settings) -> Tensor:
    """A linear warm-up, then half a cosine down to zero."""
    done = torch.arange(1, settings.steps + 1, dtype=torch.float64) / settings.steps
    falling = 0.5 * (1 + torch.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))
    return (settings.learning_rate * torch.where(done < _WARM_UP, done / _WARM_UP, falling)).float()
