"""The noise of an ensemble, learned from rows that its networks have not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.likelihoods import MeanAndLogVariance
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Stack
from mpgelu.networks.description import Description

LEAST_SPREAD = 1e-4  # standard deviation of the networks, in the target's scale, that counts as none
LEAST_SHARE = 0.7  # of the noise that stays when what averaging saves is taken off
STEEPEST = 10.0  # bound of the standardised log-variance
LIMIT = 3.0  # of the scaled inputs
OWN_RANGE = (-14.0, 6.0)  # of a network's own log-variance
_HELD = ("center", "scale", "log_scale", "kind_weights", "spread", "range")


class NoiseHead(nn.Module):
    r"""What held-out rows teach: the range of the means, and the log-variance of the noise.

    A wide network fits its noise too, so its own idea of the noise says little about new rows, but something: it is one
    of the inputs here, beside the features, the mean and the logarithm of the networks' disagreement. The head is
    trained on the residuals of held-out rows, for which each kind of networks has one that has not seen the row. So its
    inputs are taken over such groups, one network of each kind, and its outputs averaged over the groups and over its
    own networks.

    The average of all K networks of a kind is better than one of them. What this saves, from the variance
    :math:`A_m` between the networks of kind m, is taken off the noise:

    .. math:: s^2 \leftarrow \max\Big(s^2 - (1 + c^2)\Big(1 - \frac1K\Big) \sum_m w_m^2 A_m,\ 0.7\, s^2\Big)

    Args:
        networks: Of the head, for scaled inputs, each with one output.
        center: Of the inputs, ``(n + 3,)``.
        scale: Of the inputs, ``(n + 3,)``.
        log_scale: Log-variance that an output of zero stands for, ``()``.
        kind_weights: w_m, of the kinds of networks, ``(kinds,)``, summing to one.
        spread: c, the factor by which networks are moved towards their average; see :class:`Ensemble`.
        range: Lowest and highest mean that a network may predict, ``(2,)``.
    """

    center: Tensor
    scale: Tensor
    log_scale: Tensor
    kind_weights: Tensor
    spread: Tensor
    range: Tensor

    def __init__(self, networks: Stack, *held: Tensor) -> None:
        super().__init__()
        self.networks = networks
        for name, value in zip(_HELD, held, strict=True):
            self.register_buffer(name, value)

    def forward(self, features: Tensor, outputs: Sequence[Moments | Tensor]) -> Moments | Tensor:
        """Outputs of all networks, mean and log-variance, with means in range and this noise in place of their own.

        Args:
            features: Scaled, ``(rows, n)``.
            outputs: Of every kind, ``(networks, rows, 2)``.

        Returns:
            Outputs of the networks of all kinds, ``(M, rows, 2)``, whose log-variances are known; a tensor if the
            means are known too.
        """
        values = [output if isinstance(output, Tensor) else output.mean for output in outputs]
        folds = max(map(len, values))
        groups = torch.stack([value.expand(folds, *value.shape[1:]) for value in values])  # (kinds, folds, rows, 2)
        means, own = MeanAndLogVariance.of(groups)
        means = means.clamp(*self.range.to(groups))
        inputs = head_inputs(features, means, own, self.kind_weights)
        noise = self.log_variance(inputs).mean(0).exp()
        between = self.kind_weights.square().to(means) @ means.var(1, correction=min(1, folds - 1))  # 0 of one
        saved = between * (1 - 1 / folds) * (1 + self.spread.square())
        log_variance = torch.maximum(noise - saved, LEAST_SHARE * noise).log()
        mean = torch.cat([mean[: len(value)] for mean, value in zip(means, values, strict=True)])
        both = MeanAndLogVariance(mean, log_variance.expand_as(mean)).joined()
        if all(isinstance(output, Tensor) for output in outputs):
            return both
        variances = [torch.zeros_like(o) if isinstance(o, Tensor) else o.variance for o in outputs]
        variance = MeanAndLogVariance.of(torch.cat(variances)).mean
        return DiagonalMoments(both, MeanAndLogVariance(variance, torch.zeros_like(variance)).joined())

    def described(self) -> dict[str, Any]:
        """What is needed beside the arrays to build the head again."""
        return {"models": len(self.networks), "network": self.networks.description.as_json()}

    @classmethod
    def empty(cls, about: Mapping[str, Any], kinds: int) -> NoiseHead:
        """A head of what :meth:`described` described, without parameters; load a state into it, assigned."""
        networks = Stack.empty(Description.from_json(about["network"]), about["models"])
        inputs = next((size for m in networks.architecture.modules() if (size := getattr(m, "in_features", 0))), 1)
        shapes = ((inputs,), (inputs,), (), (kinds,), (), (2,))
        return cls(networks, *(torch.empty(shape, device="meta") for shape in shapes))

    def log_variance(self, inputs: Tensor) -> Tensor:
        """What the head's networks say on average about inputs ``(*batch, n + 3)``: ``(*batch,)``."""
        each = self.scaled(inputs).flatten(0, -2).expand(len(self.networks), -1, -1)
        outputs: Tensor = self.networks(each).squeeze(-1)
        return bounded(outputs).mean(0).view(inputs.shape[:-1]) + self.log_scale.to(inputs)

    def scaled(self, inputs: Tensor) -> Tensor:
        """Inputs in units of their spread, smoothly limited."""
        z = (inputs - self.center.to(inputs)) / self.scale.to(inputs)
        return z / torch.sqrt(1 + (z / LIMIT).square())


def bounded(log_variance: Tensor) -> Tensor:
    """The same near zero, and between -10 and 10 always."""
    return STEEPEST * torch.tanh(log_variance / STEEPEST)


def head_inputs(features: Tensor, means: Tensor, log_variances: Tensor, kind_weights: Tensor) -> Tensor:
    """What a :class:`NoiseHead` looks at, ``(*groups, rows, n + 3)``.

    Args:
        features: Scaled, ``(rows, n)``.
        means: Of one network of each kind, ``(kinds, *groups, rows)``.
        log_variances: Of the same networks, ``(kinds, *groups, rows)``.
        kind_weights: ``(kinds,)``.
    """
    weights = kind_weights.to(means).view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    spread = (weights * (means - mean).square()).sum(0).sqrt().clamp_min(LEAST_SPREAD)
    own = (weights * log_variances.clamp(*OWN_RANGE)).sum(0) / 2
    told = torch.stack([mean, spread.log(), own], -1)
    return torch.cat([features.expand(*told.shape[:-1], features.shape[-1]), told], -1)
