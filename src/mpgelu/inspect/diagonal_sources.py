r"""Diagonal moments whose variances are kept apart by source, for the attribution of diagonal predictions.

A diagonal propagation keeps the variance of every unit and drops all covariances. It is linear in the variances: a
layer with gain :math:`g` and independent added variance :math:`e` maps :math:`v` to :math:`g^2 v + e`. The parts of the
variance that belong to different sources can therefore be propagated separately, and their sum equals the variance of
:class:`mpgelu.DiagonalMoments` after every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.moments import Moments
from mpgelu.rules import add, gaussian_linear, linear, periodic, rescale
from mpgelu.rules.gaussian_linear import variance_of_weights
from mpgelu.rules.periodic import fit_apart


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalSources(Moments):
    r"""Diagonal moments whose variances are kept apart by source.

    .. math:: v_i = \sum_s v_{is}

    Rules that are written for all :class:`Moments` in terms of :func:`mpgelu.rules.rescale` apply to these, too. There
    is no covariance: as in :class:`mpgelu.DiagonalMoments` it is dropped, which is an approximation.

    Args:
        mean: Means of the units, ``(rows, n)``.
        sources: For every set of sources, the object that identifies it and its parts of the variances,
            ``(rows, sources, n)``.
    """

    mean: Tensor
    sources: tuple[tuple[object, Tensor], ...] = ()

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``(rows, n)``."""
        return sum((part.sum(-2) for _, part in self.sources), torch.zeros_like(self.mean))

    @property
    def is_certain(self) -> bool:
        """Whether there are no sources."""
        return not self.sources

    def then(self, mean: Tensor, carry: Callable[[Tensor], Tensor], added: Tensor | None = None) -> DiagonalSources:
        """Return the moments after a layer.

        Args:
            mean: Means after the layer, ``(rows, m)``.
            carry: Linear function from parts of the variances before the layer, ``(rows, sources, n)``, to those after
                it, ``(rows, sources, m)``.
            added: Variances that the layer adds independently to each unit, ``(rows, m)``. They become a new set of m
                sources, each of which reaches one unit.
        """
        sources = tuple((key, carry(part)) for key, part in self.sources)
        return DiagonalSources(mean, sources if added is None else (*sources, (object(), torch.diag_embed(added))))


@linear.register
def _(value: DiagonalSources, weight: Tensor, bias: Tensor | None = None) -> DiagonalSources:
    return value.then(F.linear(value.mean, weight, bias), lambda part: F.linear(part, weight.square()))


@gaussian_linear.register
def _(
    value: DiagonalSources, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> DiagonalSources:
    added = variance_of_weights(value, weight_variance, bias_variance)
    return value.then(F.linear(value.mean, weight, bias), lambda part: F.linear(part, weight.square()), added)


@rescale.register
def _(
    value: DiagonalSources, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False
) -> DiagonalSources:
    return value.then(mean, lambda part: part * gain.square().unsqueeze(-2), added)


@add.register
def _(value: DiagonalSources, other: Tensor | float, alpha: float = 1.0) -> DiagonalSources:
    return replace(value, mean=value.mean + alpha * other)


@periodic.register
def _(value: DiagonalSources, frequency: Tensor, phase: Tensor, weight: Tensor) -> DiagonalSources:
    if value.is_certain:
        return DiagonalSources(periodic(value.mean, frequency, phase, weight))
    fit = fit_apart(value.mean, value.variance, frequency, phase, weight)
    square = fit.gain.square().unsqueeze(-3)  # (rows, 1, n, 1 + d)
    return value.then(
        fit.mean.flatten(-2), lambda part: (part.unsqueeze(-1) * square).flatten(-2), fit.added.flatten(-2)
    )
