"""Running sums over the draws of one layer, and the comparison of its propagated moments with them."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from mpgelu.inspect.audit.findings import LayerAudit
from mpgelu.inspect.audit.samples import ENOUGH, Averaged, Samples, Source
from mpgelu.moments import Moments
from mpgelu.rules import flatten

_FALSE_ALARM = 1e-3  # probability that an exact layer fails, over all that is compared in it together
_COMPARED = 3  # kinds of numbers: means, covariances, the variances of all units together
_MOST = 0.9  # share of the units of a layer below which it counts as undecided
_ROUNDING = 64  # machine epsilons of its row's size below which a standard deviation counts as zero


class Compared(NamedTuple):
    """Errors of propagated values relative to sampled ones, with their standard errors.

    A standard error is itself an estimate, which rests on few effective deviations if a unit is rarely far from its
    mean. Half of their number is used as degrees of freedom of Student's t distribution, whose quantile replaces that
    of the normal distribution.

    Attributes:
        error: Absolute errors.
        se: Standard errors of the sampled values.
        reliable: Which of them rest on enough deviations to be compared.
        deviations: Effective number of deviations behind each, :math:`N (E d^2)^2 / E d^4`.
    """

    error: Tensor
    se: Tensor
    reliable: Tensor
    deviations: Tensor

    def worst(self, tolerance: float) -> tuple[float, float, float]:
        """Return error, standard error and excess of the entry that exceeds its Bonferroni-corrected allowance most.

        Args:
            tolerance: Error allowed in addition to sampling error.
        """
        if not self.reliable.any():
            return math.nan, math.nan, -math.inf
        level = _FALSE_ALARM / _COMPARED / 2 / self.error.numel()
        found = -stdtrit(self.deviations.clamp_min(2).cpu().numpy() / 2, level)
        critical = torch.as_tensor(found, device="cpu").to(self.error)
        excess = torch.where(self.reliable, self.error - critical * self.se - tolerance, -math.inf).flatten()
        place = int(excess.argmax())
        return self.error.flatten()[place].item(), self.se.flatten()[place].item(), excess[place].item()


class Tally:
    """Running sums of weighted powers of the draws of one layer, and the comparison of its moments with them.

    All values are in units of the size of their row, the root of the largest propagated second moment.

    Args:
        kind: Class of the layer.
        moments: Propagated moments after the layer.
    """

    def __init__(self, kind: str, moments: Moments) -> None:
        self.kind = kind
        moments = flatten(moments)
        self.eps = torch.finfo(moments.mean.dtype).eps
        size = (moments.variance + moments.mean.square()).double().amax(-1, keepdim=True).sqrt()  # (rows, 1)
        self.size = torch.where(size > 0, size, 1)
        self.mean = moments.mean.double() / self.size
        self.covariance = moments.covariance.double() / self.size.square().unsqueeze(-1)
        self.stated = self.covariance.diagonal(dim1=-2, dim2=-1)
        self.centre = self.mean  # until there are draws
        self.count = 0
        self.sums: list[Tensor | float] = [0.0] * 8

    def add(self, samples: Samples) -> None:
        """Add draws to the sums, centred at the mean of the first draws for accuracy."""
        samples = samples.flat()
        averaged = samples.averaged
        if self.count == 0:
            values, _, weights, _ = averaged or Averaged(samples.values, samples.values, samples.source.weights)
            self.centre = (weights.unsqueeze(-1) * values).mean(0) / weights.mean(0).unsqueeze(-1) / self.size
        self.count += len(samples.values)
        centred, weights = self._centred(samples.values, samples.source.weights)
        pairs = weights * centred.square()
        cubes = (pairs * centred).sum(1)
        mean, before, second, squares = centred, weights, pairs, pairs
        if averaged is not None:
            mean, before = self._centred(averaged.mean, averaged.weights)
            second = before * mean.square()
            squares = second + before * (averaged.variance / self.size.square().to(mean)).transpose(0, 1)
            if averaged.apart:
                centred, weights, pairs = mean, before, second
        powers = (
            (before.mT @ mean).squeeze(-2),
            (before.mT @ second).squeeze(-2),
            squares.sum(1),
            squares.square().sum(1),
            cubes,
            squares.sum(-1).square().sum(-1),
            (weights * centred).mT @ centred,
            pairs.mT @ pairs,
        )
        self.sums = [total + power.double() for total, power in zip(self.sums, powers, strict=True)]

    def _centred(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return centred values ``(rows, draws, n)`` in units of the size, and weights ``(rows, draws, 1)``."""
        centred = (values / self.size.to(values)).sub_(self.centre.to(values))
        return centred.transpose(0, 1), weights.to(values).expand(values.shape[:2]).mT.unsqueeze(-1)

    def result(self, name: str, tolerance: float, source: Source) -> LayerAudit:
        """Return the errors of the propagated moments in units of the sampled standard deviations.

        Args:
            name: Name of the layer.
            tolerance: Error allowed in addition to sampling error.
            source: Source of the random numbers, for what the draws cannot show.
        """
        averages = (torch.as_tensor(total, device=self.size.device) / self.count for total in self.sums)
        shift, mean_spread, second, fourth, cubes, total_square, products, pair_squares = averages
        variance = (second - shift.square()).clamp_min(0)
        sampled = _with_diagonal(products - _outer(shift), variance)
        moves, claims = (part > (_ROUNDING * self.eps) ** 2 for part in (variance, self.stated))
        # If masks are the only randomness, both outcomes of each were drawn: a unit without variance has none.
        deviations = self._deviations(second, fourth)
        reliable = torch.where(moves, deviations > ENOUGH, ~claims | (not source.gaussian))
        scale = torch.where(moves, variance, torch.where(claims, self.stated, 1)).sqrt()
        # A sampled variance below the stated one means that standard errors are underestimated by the same factor.
        shortfall = _ratio(self.stated, variance).clamp_min(1)
        mean = Compared(
            ((self.centre + shift - self.mean).abs() - 4 * self.eps).clamp_min(0) / scale,
            (mean_spread * shortfall / self.count).sqrt() / scale,
            reliable,
            deviations,
        )
        # Units that rarely deviate together may not have done so in any draw.
        spread = (pair_squares - products.square()).clamp_min(0) * _outer(shortfall.sqrt())
        spread = torch.maximum(spread, _outer(torch.maximum(variance, self.stated)))
        spread = _with_diagonal(spread, (fourth - second.square()).clamp_min(0) * shortfall)
        covariance = Compared(
            (sampled - self.covariance).abs() / _outer(scale),
            (spread / self.count).sqrt() / _outer(scale),
            _outer(reliable),
            torch.minimum(deviations.unsqueeze(-1), deviations.unsqueeze(-2)),
        )
        total = self._total(variance.sum(-1), second.sum(-1), total_square, (moves | claims).any(-1))
        *mean_worst, mean_excess = mean.worst(tolerance)
        *worst, excess = max(covariance.worst(tolerance), total.worst(tolerance), key=itemgetter(2))
        within = max(mean_excess, excess) <= 1e-6  # a layer without randomness agrees to float32 rounding only
        skewness = _ratio(cubes - 3 * shift * second + 2 * shift**3, variance**1.5)
        visible = variance > 1e-2 * variance.amax(-1, keepdim=True)
        eigenvalues, largest = torch.linalg.eigvalsh(self.covariance), self.stated.amax(-1)
        judged = reliable.double().mean().item()
        return LayerAudit(
            layer=name,
            kind=self.kind,
            mean_error=mean_worst[0],
            mean_se=mean_worst[1],
            covariance_error=worst[0],
            covariance_se=worst[1],
            smallest_eigenvalue=(eigenvalues[..., 0] / torch.where(largest > 0, largest, 1)).min().item(),
            skewness=torch.where(reliable & visible, skewness, 0).abs().max().item(),
            judged=judged,
            decided=judged >= _MOST and (within or not source.missed),
            passed=within or source.missed,
        )

    def _total(self, variance: Tensor, second: Tensor, fourth: Tensor, random: Tensor) -> Compared:
        """Compare the sum of the variances of all units with the propagated sum, averaged over rows."""
        stated = self.stated.sum(-1)
        deviations = self._deviations(second, fourth)
        reliable = random & (deviations > ENOUGH)
        base, rows = torch.where(stated > 0, stated, variance), reliable.sum().clamp_min(1)
        error = torch.where(reliable, _ratio(variance - stated, base), 0).sum() / rows
        spread = (fourth - second.square()).clamp_min(0) * _ratio(stated, variance).clamp_min(1)
        se = torch.where(reliable, _ratio(spread, base.square()), 0).sum().div(self.count).sqrt() / rows
        return Compared(error.abs(), se, reliable.any(), torch.where(reliable, deviations, torch.inf).min())

    def _deviations(self, second: Tensor, fourth: Tensor) -> Tensor:
        """Return the effective number of deviations behind a second moment, :math:`N (E d^2)^2 / E d^4`."""
        return self.count * _ratio(second.square(), fourth)


def _with_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    """Return matrices with other diagonals."""
    return torch.diagonal_scatter(matrix, values, dim1=-2, dim2=-1)


def _outer(vector: Tensor) -> Tensor:
    """Return the outer products of vectors with themselves."""
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


def _ratio(value: Tensor, base: Tensor) -> Tensor:
    """Return a quotient that is zero where the divisor is zero."""
    return torch.where(base > 0, value / torch.where(base > 0, base, 1), 0)
