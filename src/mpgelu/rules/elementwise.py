"""Elementwise functions of Gaussian units: exact or quadrature marginals, covariance by the best linear fit."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.rules.scale import rescale

_NODES, _REACH = 96, 6.5  # of the trapezoidal rule, in standard deviations


class Fit(NamedTuple):
    r"""A function of Gaussian units by its best linear fit, :math:`f(h) = \bar f + g\,(h - m) + e`.

    The rest :math:`e` has mean zero and is uncorrelated with :math:`h`, so
    :math:`\operatorname{Var} f = g^2 v + \operatorname{Var} e`.
    """

    mean: Tensor  # E f(h)
    gain: Tensor  # g = E f'(h), by Stein's lemma
    rest: Tensor  # Var e >= 0


class Activation:
    """An elementwise function and its slope, or closed forms in place of what is computed from them."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function itself."""
        raise NotImplementedError

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        raise NotImplementedError

    def gain(self, mean: Tensor, variance: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        """Expected slope: over weighted points ``(*batch, n, points)``, unless a subclass knows it from the moments."""
        return self.slope(points) @ weights

    def fit(self, mean: Tensor, variance: Tensor) -> Fit:
        r"""The best linear fit for :math:`N(m, v)`, by the trapezoidal rule with 96 nodes over 6.5 standard deviations.

        For functions that are analytic around the real line this rule converges far faster than Gauss-Hermite's. It is
        tested for means in [-10, 10] and variances up to 25: the error of a mean is below 1e-6 and of a variance below
        5e-5, both met by tanh, whose poles are the nearest; up to variance 9, and for the other functions throughout,
        they are below 2e-9 and 2e-8. At zero variance it is the plain function. Variances below the machine epsilon
        count as zero inside the function, whose mean they move by less than rounding: a derivative by so small a
        variance would be rounding errors divided by it.

        Args:
            mean: ``(*batch, n)``.
            variance: ``(*batch, n)``.
        """
        nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=mean.dtype, device=mean.device)
        weights = torch.softmax(-0.5 * nodes.square(), 0)
        matters = variance > torch.finfo(variance.dtype).eps
        stddev = torch.where(matters, torch.where(matters, variance, 1).sqrt(), 0)
        steps = stddev.unsqueeze(-1) * nodes  # (*batch, n, nodes)
        points, centre = mean.unsqueeze(-1) + steps, self(mean)
        deviations = self(points) - centre.unsqueeze(-1)  # from the centre, so that certain units stay exact
        shift, gain = deviations @ weights, self.gain(mean, variance, points, weights)
        rest = deviations - shift.unsqueeze(-1) - gain.unsqueeze(-1) * steps
        return Fit(centre + shift, gain, rest.square() @ weights)


@singledispatch
def elementwise(value: Any, activation: Activation) -> Any:
    r"""Moments of :math:`f(h)` for Gaussian :math:`h`, from the best linear fit of :class:`Fit`.

    .. math:: \bar f, \qquad g_i g_j C_{ij} + \delta_{ij} \operatorname{Var} e_i

    Means and variances are those of :meth:`Activation.fit`, closed form or quadrature. Covariances are
    *approximated* to first order: the rest of the fit is taken as independent between units. They stay positive
    semidefinite, and factored moments stay factored, every source with its name.

    Args:
        value: a tensor or moments with n features.
        activation: the function, for example :class:`mpgelu.rules.activations.Tanh`.
    """
    raise MissingRuleError(f"elementwise: no rule for {type(value).__name__}; register one with @elementwise.register")


@elementwise.register
def _(value: Tensor, activation: Activation) -> Tensor:
    return activation(value)


@elementwise.register(DiagonalMoments)
@elementwise.register(FullMoments)
def _(value: DiagonalMoments | FullMoments, activation: Activation) -> Moments:
    return _fitted(value, activation)


@elementwise.register
def _(value: FactoredMoments, activation: Activation) -> Moments:
    return replace(value, mean=activation(value.mean)) if is_certain(value) else _fitted(value, activation)


def is_certain(value: FactoredMoments) -> bool:
    """Whether there is no randomness at all, which an elementwise function then does not add."""
    return len(value.blocks) == 0 and value.residual is None


def _fitted(value: Moments, activation: Activation) -> Moments:
    fitted: Moments = rescale(value, *activation.fit(value.mean, value.variance), row_wise=True)
    return fitted
