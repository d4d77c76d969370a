"""Training of the noise head on the residuals of held-out rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpgelu.estimators.noise import NoiseHead, bounded, head_inputs
from mpgelu.estimators.recipe.folds import Folds, Rows
from mpgelu.estimators.recipe.networks import single_precision
from mpgelu.estimators.recipe.steps import Steps, learning_rate
from mpgelu.layers import SiLU
from mpgelu.native.train import ObjectiveName
from mpgelu.networks import Stack, network
from mpgelu.training import Best, Interrupts

_HIDDEN = (48, 48)
_FOLDS = 5  # number of networks of the head, each with a fold of its own for early stopping
_FREEDOM = 5.0  # degrees of freedom of the Student t distribution, which is robust against outliers
_LEARNING_RATE, _WEIGHT_DECAY = 5e-3, 0.02
_BATCH = 512
_STEPS = 600
_LOOK_EVERY = 20  # steps between two evaluations of held-out rows
_PATIENCE = 10  # evaluations of held-out rows without improvement after which training ends
_OF_MEDIAN = 0.6745  # median of the absolute value of a standard normal variable
_LEAST_SCALE = 1e-6
_MARGIN = 0.3  # margin of the means, relative to the range of the targets


def train_head(
    features: Tensor,
    means: Tensor,
    log_variances: Tensor,
    y: Tensor,
    row_weights: Tensor,
    kind_weights: Tensor,
    constant: bool,
    seed: int,
    interrupts: Interrupts,
) -> tuple[NoiseHead, Tensor]:
    r"""Train a noise head on the residuals of held-out rows, by the likelihood of a Student t distribution.

    With the residual r in units of the typical residual and the standardised log-variance h of the head, the loss is

    .. math:: \tfrac12 h + \frac{\nu + 1}{2} \log\Big(1 + \frac{r^2 e^{-h}}{\nu}\Big), \qquad \nu = 5.

    Each of the five networks of the head holds out a fold of the rows and keeps the state with the smallest loss there.

    Args:
        features: Scaled features, ``(rows, n)``.
        means: Means of each kind for each row, by the network from which the row is held out, ``(kinds, rows)``.
        log_variances: Log-variances of the same networks, ``(kinds, rows)``.
        y: Targets, ``(rows,)``.
        row_weights: Weights of the rows, with mean one, ``(rows,)``.
        kind_weights: Weights of the kinds, ``(kinds,)``.
        constant: Whether the noise is the same for all rows; the head is then not trained.
        seed: Seed of folds, initial weights and batches.
        interrupts: Ends the training after Ctrl-C.

    Returns:
        The head, and the log-variance of each row by the network of the head from which it is held out, ``(rows,)``.
    """
    residuals = y - kind_weights.to(means) @ means
    typical = max(float(residuals.abs().median()) / _OF_MEDIAN, _LEAST_SCALE)
    inputs = head_inputs(features, means, log_variances, kind_weights)
    center, scale = inputs.mean(0), inputs.std(0, correction=0).clamp_min(_LEAST_SCALE)
    folds = Folds.of(len(y), min(_FOLDS, len(y)), seed)
    with single_precision(seed):
        stack = Stack([network(inputs.shape[1], _HIDDEN, 1, nonlinearity=SiLU, rate=0) for _ in folds.trained])
    _start_constant(stack)
    typical_log, one = (torch.tensor(number, device="cpu").float() for number in (2 * math.log(typical), 1.0))
    numbers = (typical_log, kind_weights.float(), one)
    head = NoiseHead(stack, center, scale, *numbers, mean_range(y))
    x, target = head.scaled(inputs), (residuals / typical).clamp(-1e3, 1e3)
    if not constant:
        _fit(stack, folds, Rows(x, target, row_weights), seed, interrupts)
    with torch.no_grad():
        held = bounded(folds.gather(stack(x[folds.held]).squeeze(-1))) + head.log_scale
    return head.requires_grad_(False), held


def mean_range(y: Tensor) -> Tensor:
    """Return the smallest and largest mean that networks may predict, ``(2,)``: the range of the targets +- 30 %."""
    lowest, highest = y.aminmax()
    margin = _MARGIN * (highest - lowest)
    return torch.stack([lowest - margin, highest + margin])


def _fit(stack: Stack, folds: Folds, data: Rows, seed: int, interrupts: Interrupts) -> None:
    """Train the networks of the head by Adam with weight decay and early stopping.

    Args:
        stack: The networks, which are trained in place.
        folds: Training rows and held-out rows of each network.
        data: Scaled inputs ``(rows, n + 3)``, residuals in units of the typical residual, and weights of the rows.
        seed: Seed of the batches.
        interrupts: Ends the training after Ctrl-C.
    """
    generator = torch.Generator().manual_seed(seed)
    loss = StudentLoss(stack)
    trainer = Steps(stack, loss, _WEIGHT_DECAY)
    best, (networks, rows) = Best(stack, torch.Size([len(stack)]), None), folds.trained.shape
    counts = folds.counts * data.weights[folds.held]

    def look() -> None:
        with torch.no_grad():
            losses = loss.each_row(data.X[folds.held], data.y[folds.held])
            best.see((counts * losses).sum(1) / counts.sum(1))

    look()
    for first in range(0, _STEPS, _LOOK_EVERY):
        at = folds.trained.unsqueeze(1).expand(-1, _LOOK_EVERY, -1)
        if rows > _BATCH:
            some = torch.randint(rows, (networks, _LOOK_EVERY, _BATCH), generator=generator, device="cpu")
            at = at.gather(2, some)
        rates = [learning_rate(_LEARNING_RATE, (first + step) / _STEPS) for step in range(1, _LOOK_EVERY + 1)]
        trainer.take(data, at, rates)
        look()
        if best.epochs_without_improvement >= _PATIENCE or interrupts.seen:
            break
    best.restore()


class StudentLoss:
    """The loss of a noise head, see :func:`train_head`.

    Args:
        stack: The networks of the head.
    """

    kernel: tuple[ObjectiveName, float] = "student", _FREEDOM

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def each_row(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the losses of the rows, ``(networks, rows)``."""
        return _loss(self.stack(x).squeeze(-1), y)

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return the losses, ``(networks,)``."""
        return (weights * self.each_row(x, y)).mean(1)


def _loss(log_variance: Tensor, target: Tensor) -> Tensor:
    """Return the negative log density of a Student t distribution up to a constant, see :func:`train_head`."""
    h = bounded(log_variance)
    return 0.5 * h + 0.5 * (_FREEDOM + 1) * torch.log1p(target.square() * (-h).exp() / _FREEDOM)


def _start_constant(stack: Stack) -> None:
    """Set the last layer to zero, so that training starts from a constant noise of the size of the typical residual."""
    parameters, _ = stack.state()
    last = [name for name in parameters if name.endswith((".weight", ".bias"))][-2:]
    with torch.no_grad():
        for name in last:
            parameters[name].zero_()
