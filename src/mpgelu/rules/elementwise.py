"""Elementwise functions of Gaussian units, propagated by closed forms or quadrature and a best linear fit."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import Moments
from mpgelu.rules.scale import rescale
from mpgelu.visibility import values_are_visible

_NODES, _REACH = 96, 6.5  # of the trapezoidal rule, in standard deviations
_UNITS = 1024  # integrated at once, so that their points stay in the processor's cache
_FINEST, _COARSEST = 1e-9, 10.0  # scale of the nodes in standard deviations; at the coarsest they are equidistant


class Linearisation(NamedTuple):
    r"""The best linear fit of a function of Gaussian units, :math:`f(h) = \bar f + g\,(h - m) + e`.

    The residual :math:`e` has mean zero and is uncorrelated with :math:`h`, so
    :math:`\operatorname{Var} f = g^2 v + \operatorname{Var} e`.

    Attributes:
        mean: Expectation :math:`\bar f = \mathrm E f(h)`.
        gain: Slope :math:`g = \mathrm E f'(h)`, by Stein's lemma.
        rest: Residual variance :math:`\operatorname{Var} e \ge 0`.
    """

    mean: Tensor
    gain: Tensor
    rest: Tensor


class Activation:
    """An elementwise function with its derivative.

    A subclass defines :meth:`__call__` and :meth:`slope`, from which :meth:`linearise` computes expectations by
    quadrature. It may override :meth:`gain` or :meth:`linearise` with closed forms.

    Attributes:
        width: Length around zero over which the function bends; it is close to linear beyond. Quadrature nodes are
            concentrated there.
    """

    width = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function of every entry of x."""
        raise NotImplementedError

    def slope(self, x: Tensor) -> Tensor:
        """Return the derivative at every entry of x."""
        raise NotImplementedError

    def gain(self, mean: Tensor, variance: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        r"""Return the expected slope :math:`\mathrm E f'(h)`, ``(*batch, n)``.

        Args:
            mean: Means of the units, ``(*batch, n)``.
            variance: Variances of the units, ``(*batch, n)``.
            points: Quadrature points, ``(*batch, n, points)``.
            weights: Weights of the points, ``(*batch, n, points)``, summing to one.
        """
        return (self.slope(points) * weights).sum(-1)

    def linearise(self, mean: Tensor, variance: Tensor) -> Linearisation:
        r"""Return the best linear fit for :math:`h \sim N(m, v)`, by the trapezoidal rule with 96 nodes.

        The nodes are equidistant in u, with :math:`m + s z = 1.5\,w \sinh u` for the width w of the function, and
        cover 6.5 standard deviations s on either side: they are dense where the function bends, however large s is,
        and equidistant in z where s is small. For functions that are analytic around the real line the rule converges
        much faster than Gauss-Hermite quadrature. Tests cover variances from 0 to 1e6 and means in [-10, 10] or within
        9 standard deviations of zero: the error of a mean is below 5e-9 of max(1, s) and that of a variance below 2e-8
        of max(1, v); for tanh and sigmoid these bounds are absolute.

        At zero variance the result is the plain function. Variances below the machine epsilon count as zero inside the
        function, whose mean they change by less than rounding; a derivative with respect to so small a variance would
        be a rounding error divided by it.

        Args:
            mean: Means m, ``(*batch, n)``.
            variance: Variances v, ``(*batch, n)``.
        """
        rows = _rows_at_once(mean, variance)
        if rows is None:
            return self._integrate(mean, variance)
        parts = map(self._integrate, torch.split(mean, rows), torch.split(variance, rows))
        return Linearisation(*map(torch.cat, zip(*parts, strict=True)))

    def _integrate(self, mean: Tensor, variance: Tensor) -> Linearisation:
        matters = ~(variance <= torch.finfo(variance.dtype).eps)  # NaN does
        stddev = torch.where(matters, torch.where(matters, variance, 1).sqrt(), 0)
        nodes, weights = _nodes(mean.detach(), stddev.detach(), 1.5 * self.width)
        steps = stddev.unsqueeze(-1) * nodes  # (*batch, n, nodes)
        points, centre = mean.unsqueeze(-1) + steps, self(mean)
        gain = self.gain(mean, variance, points, weights)
        # From the centre, so that certain units stay exact, and without the linear part, whose mean is zero.
        bend = self(points) - centre.unsqueeze(-1) - gain.unsqueeze(-1) * steps
        shift = (bend * weights).sum(-1)
        rest = bend - shift.unsqueeze(-1)
        return Linearisation(centre + shift, gain, (rest.square() * weights).sum(-1))


def _rows_at_once(mean: Tensor, variance: Tensor) -> int | None:
    """Return the number of rows to integrate at once, or None for all; a recorded graph must not depend on it."""
    if mean.dim() < 2 or mean.shape != variance.shape or not values_are_visible(mean, variance):
        return None
    rows = max(1, _UNITS * len(mean) // max(1, mean.numel()))
    return rows if 4 * rows < len(mean) else None  # fewer parts would not pay


def _nodes(mean: Tensor, stddev: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Return standardised nodes and weights, ``(*batch, n, nodes)``, concentrated around the point where x is zero.

    Args:
        mean: Means of the units, ``(*batch, n)``.
        stddev: Standard deviations of the units, ``(*batch, n)``.
        width: Length around zero over which the nodes are dense.
    """
    spread = torch.where(stddev > 0, stddev, 1).unsqueeze(-1)
    zero = (-mean.unsqueeze(-1) / spread).clamp(-_REACH, _REACH)
    scale = (width / spread).clamp(_FINEST, _COARSEST)
    first, last = torch.asinh((-_REACH - zero) / scale), torch.asinh((_REACH - zero) / scale)
    u = first + (last - first) * torch.linspace(0, 1, _NODES, dtype=mean.dtype, device=mean.device)
    nodes = zero + scale * torch.sinh(u)
    weights = torch.exp(-0.5 * nodes.square()) * torch.cosh(u)
    return nodes, weights / weights.sum(-1, keepdim=True)


@singledispatch
def elementwise(value: Any, activation: Activation) -> Any:
    r"""Return the moments of :math:`f(h)` for Gaussian :math:`h`, from its :class:`Linearisation`.

    .. math:: \bar f, \qquad g_i g_j C_{ij} + \delta_{ij} \operatorname{Var} e_i

    Means and variances are those of :meth:`Activation.linearise`, by closed form or quadrature. Covariances are
    *approximated* to first order: the residuals of the fit are taken as independent between units. They stay positive
    semidefinite, and factored moments stay factored with the identity of every source preserved.

    Args:
        value: A tensor or moments with n features.
        activation: The function, for example :class:`mpgelu.rules.activations.Tanh`.

    Raises:
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"elementwise: no rule for {type(value).__name__}; register one with @elementwise.register")


@elementwise.register
def _(value: Tensor, activation: Activation) -> Tensor:
    return activation(value)


@elementwise.register
def _(value: Moments, activation: Activation) -> Moments:
    if value.is_certain:  # the function of a known value has no variance to fit
        known: Moments = rescale(value, activation(value.mean), torch.ones_like(value.mean))
        return known
    fitted: Moments = rescale(value, *activation.linearise(value.mean, value.variance), row_wise=True)
    return fitted
