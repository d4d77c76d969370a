"""The noise variance of an ensemble, estimated from residuals of held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.likelihoods import MeanAndLogVariance
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Stack, in_features_of
from mpgelu.networks.description import Description
from mpgelu.networks.scaling import smoothly_limited

LEAST_SPREAD = 1e-4  # smallest standard deviation between networks, in units of the scaled target
LEAST_SHARE = 0.7  # smallest fraction of the noise variance after the correction of a row for averaging
LEAST_AVERAGE = 0.5  # the same for the average correction
AGREEMENT = 1.1  # ratio of the two, or its inverse, up to which rows are corrected one by one
STEEPEST = 10.0  # bound of the standardised log-variance
LIMIT = 3.0  # smooth limit of the scaled inputs of the head; that of features is another one
OWN_RANGE = (-14.0, 6.0)  # range to which the log-variances of the networks are clipped
_HELD = ("center", "scale", "log_scale", "kind_weights", "spread", "range")


class NoiseHead(nn.Module):
    r"""A model of the noise variance, trained on the residuals of held-out rows; it also limits the range of the means.

    Wide networks fit the noise of their training rows, so their own log-variances underestimate the noise of new rows.
    The head therefore predicts the log-variance from the n features and three summaries of the networks: their mean,
    the logarithm of their disagreement, and their own log-variance. For a held-out row there is one network of each
    kind that was not trained on it. The inputs are accordingly computed for groups with one network of each kind, and
    the outputs are averaged over the groups and over the networks of the head.

    The noise :math:`s^2` of such a group includes the variance of a single network of each kind, part of which averages
    out over all K networks of the kind. With the variance :math:`A_m` between the networks of kind m it is corrected by

    .. math:: s^2 \leftarrow \max\big(s^2 - S,\ 0.7\, s^2\big), \qquad
        S = (1 + c^2)\Big(1 - \frac1K\Big) \sum_m w_m^2 A_m.

    This is an approximation in two respects: S is small for most tables, but sometimes more than 30 % of the noise; and
    :math:`s^2` is the variance of the usual errors only, while S reduces the variance :math:`\rho s^2` of all errors.
    Where its average is off by more than a tenth, all rows are corrected by the same factor; see :meth:`settle`.

    Args:
        networks: Networks of the head, from n + 3 scaled inputs to one output each.
        center: Centre of the inputs, ``(n + 3,)``.
        scale: Scale of the inputs, ``(n + 3,)``.
        log_scale: Log-variance that corresponds to an output of zero, ``()``.
        kind_weights: Weights :math:`w_m` of the kinds of networks, ``(kinds,)``, summing to one.
        spread: Factor c of the shrinkage of the means towards their average; see :class:`Ensemble`.
        range: Smallest and largest mean that a network may predict, ``(2,)``.
        by_row: Whether the correction is that of each row; otherwise the average one is contained in ``log_scale``.
    """

    center: Tensor
    scale: Tensor
    log_scale: Tensor
    kind_weights: Tensor
    spread: Tensor
    range: Tensor

    def __init__(self, networks: Stack, *held: Tensor, by_row: bool = True) -> None:
        super().__init__()
        self.networks, self.by_row = networks, by_row
        for name, value in zip(_HELD, held, strict=True):
            self.register_buffer(name, value)

    def forward(self, features: Tensor, outputs: Sequence[Moments | Tensor]) -> Moments | Tensor:
        """Return the outputs of all networks with means inside the range and with the log-variance of the head.

        Args:
            features: Scaled features, ``(rows, n)``.
            outputs: Outputs (mean, log-variance) of the networks of each kind, ``(networks, rows, 2)``.

        Returns:
            Outputs of the M networks of all kinds, ``(M, rows, 2)``, with deterministic log-variances; a tensor if the
            means are deterministic, too, otherwise diagonal moments.
        """
        values = [output if isinstance(output, Tensor) else output.mean for output in outputs]
        means, noise, saved = self._noise(features, values)
        log_variance = (torch.maximum(noise - saved, LEAST_SHARE * noise) if self.by_row else noise).log()
        mean = torch.cat([mean[: len(value)] for mean, value in zip(means, values, strict=True)])
        both = MeanAndLogVariance(mean, log_variance.expand_as(mean)).joined()
        if all(isinstance(output, Tensor) for output in outputs):
            return both
        variances = [torch.zeros_like(o) if isinstance(o, Tensor) else o.variance for o in outputs]
        variance = MeanAndLogVariance.of(torch.cat(variances)).mean
        return DiagonalMoments(both, MeanAndLogVariance(variance, torch.zeros_like(variance)).joined())

    def _noise(self, features: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means of all groups inside the range, the noise variance, and what averaging takes off it.

        Args:
            features: Scaled features, ``(rows, n)``.
            values: Mean outputs of the networks of each kind, ``(networks, rows, 2)``.

        Returns:
            Means ``(kinds, folds, rows)``, and the variances :math:`s^2` and S, ``(rows,)`` each.
        """
        folds = max(map(len, values))
        groups = torch.stack([value.expand(folds, *value.shape[1:]) for value in values])  # (kinds, folds, rows, 2)
        means, own = MeanAndLogVariance.of(groups)
        means = means.clamp(*self.range.to(groups))
        inputs = head_inputs(features, means, own, self.kind_weights)
        noise = self.log_variance(inputs).mean(0).exp()
        between = self.kind_weights.square().to(means) @ means.var(1, correction=min(1, folds - 1))  # 0 of one
        return means, noise, between * (1 - 1 / folds) * (1 + self.spread.square())

    def settle(self, features: Tensor, values: Sequence[Tensor], row_weights: Tensor, ratio: float) -> None:
        r"""Replace the correction of each row by the average one, if the two differ by more than a tenth.

        The average share of the variance that remains is :math:`1 - \mathrm E \min(S / \rho s^2, 1)` over some training
        rows, and at least a half. It is rather too large than too small, because networks agree more on rows on which
        most of them were trained.

        Args:
            features: Scaled features of training rows, ``(rows, n)``.
            values: Mean outputs of the networks of each kind, ``(networks, rows, 2)``.
            row_weights: Weights of the rows, ``(rows,)``.
            ratio: Variance of all errors relative to that of the usual ones, :math:`\rho`.
        """
        _, noise, saved = self._noise(features, values)
        shares = row_weights / row_weights.sum()
        by_row = float(shares @ (1 - saved / noise).clamp_min(LEAST_SHARE))
        average = max(float(shares @ (1 - saved / (ratio * noise)).clamp_min(0)), LEAST_AVERAGE)
        if abs(math.log(average / by_row)) > math.log(AGREEMENT):
            self.by_row = False
            self.log_scale += math.log(average)

    def described(self) -> dict[str, Any]:
        """Return the description of the head in JSON, without its arrays."""
        return {"models": len(self.networks), "network": self.networks.description.as_json(), "by_row": self.by_row}

    @classmethod
    def empty(cls, about: Mapping[str, Any], kinds: int) -> NoiseHead:
        """Return the head of a description without parameters, on the device ``meta``; load a state with ``assign``.

        Args:
            about: Description that :meth:`described` returned.
            kinds: Number of kinds of networks in the ensemble.
        """
        networks = Stack.empty(Description.from_json(about["network"]), about["models"])
        inputs = in_features_of(networks.architecture) or 1
        shapes = ((inputs,), (inputs,), (), (kinds,), (), (2,))
        empty = (torch.empty(shape, device="meta") for shape in shapes)
        return cls(networks, *empty, by_row=about.get("by_row", True))

    def log_variance(self, inputs: Tensor) -> Tensor:
        """Return the log-variance ``(*batch,)`` for inputs ``(*batch, n + 3)``, averaged over the head's networks."""
        each = self.scaled(inputs).flatten(0, -2).expand(len(self.networks), -1, -1)
        outputs: Tensor = self.networks(each).squeeze(-1)
        return bounded(outputs).mean(0).view(inputs.shape[:-1]) + self.log_scale.to(inputs)

    def scaled(self, inputs: Tensor) -> Tensor:
        r"""Return the standardised inputs z with a smooth limit, :math:`z / \sqrt{1 + (z / 3)^2}`."""
        return smoothly_limited((inputs - self.center.to(inputs)) / self.scale.to(inputs), LIMIT)


def bounded(log_variance: Tensor) -> Tensor:
    r"""Return :math:`10 \tanh(u / 10)`, which is about u near zero and always between -10 and 10."""
    return STEEPEST * torch.tanh(log_variance / STEEPEST)


def head_inputs(features: Tensor, means: Tensor, log_variances: Tensor, kind_weights: Tensor) -> Tensor:
    r"""Return the inputs of a :class:`NoiseHead`, ``(*groups, rows, n + 3)``.

    They are the features, the weighted mean :math:`\mu = \sum_m w_m \mu_m` over the kinds, the logarithm of the
    weighted standard deviation between the kinds, and half the weighted mean of the log-variances of the networks.

    Args:
        features: Scaled features, ``(rows, n)``.
        means: Means of one network of each kind, ``(kinds, *groups, rows)``.
        log_variances: Log-variances of the same networks, ``(kinds, *groups, rows)``.
        kind_weights: Weights of the kinds, ``(kinds,)``.
    """
    weights = kind_weights.to(means).view(-1, *[1] * (means.dim() - 1))
    mean = (weights * means).sum(0)
    spread = (weights * (means - mean).square()).sum(0).sqrt().clamp_min(LEAST_SPREAD)
    own = (weights * log_variances.clamp(*OWN_RANGE)).sum(0) / 2
    summaries = torch.stack([mean, spread.log(), own], -1)
    return torch.cat([features.expand(*summaries.shape[:-1], features.shape[-1]), summaries], -1)
