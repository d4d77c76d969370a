"""Covariance of two rectified Gaussians of unit variance, by Price's theorem and by the DVI approximation.

Each formula is implemented twice: the value alone, and the value with its derivatives by the two ratios and the
correlation. All functions are elementwise over ``(rows, pairs)`` and written for small chunks: temporaries are
overwritten where possible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpgelu.rules.normal import cdf

_LEGENDRE = [(float(1 + x) / 2, float(w) / 2) for x, w in zip(*np.polynomial.legendre.leggauss(8), strict=True)]
_LOWEST_EXPONENT = -60.0  # exp is many times slower on a CPU where it underflows, and e^-60 is nothing here
_PER_TURN = 1 / (2 * math.pi)
_EDGE = 1 - 1e-7  # beyond it the derivative of the DVI formula by rho, infinite at +-1, counts as zero


class Units(NamedTuple):
    r"""Gaussian units of variance one.

    Attributes:
        ratio: Ratio a of mean to standard deviation.
        probability: :math:`\Phi(a)`.
        density: :math:`\varphi(a)`.
    """

    ratio: Tensor
    probability: Tensor
    density: Tensor


class Slopes(NamedTuple):
    """A covariance with its derivatives by the ratios :math:`a_1`, :math:`a_2` and by the correlation."""

    value: Tensor
    by_a1: Tensor
    by_a2: Tensor
    by_correlation: Tensor


def exact_pairs(one: Units, two: Units, correlation: Tensor) -> Tensor:
    r"""Return the covariance of :math:`(z_1 + a_1)_+` and :math:`(z_2 + a_2)_+`, z standard normal of correlation rho.

    .. math:: \rho\,\Phi(a_1)\Phi(a_2) + \frac1{2\pi} \int_0^{\arcsin\rho} (\rho - \sin t)
        \exp\Big(-\frac{a_1^2 + a_2^2 - 2 a_1 a_2 \sin t}{2\cos^2 t}\Big)\, dt

    The integral is evaluated by 8-point Gauss-Legendre quadrature in t. The error is below 2e-6 for :math:`|a| \le 4`,
    and 7e-6 at rho = 1.

    Args:
        one: The first unit of each pair, any shape.
        two: The second unit of each pair, the same shape.
        correlation: Correlation rho in [-1, 1].
    """
    return _price(one, two, correlation)[0]


def exact_slopes(one: Units, two: Units, correlation: Tensor) -> Slopes:
    r"""Return the covariance of :func:`exact_pairs` with its analytic derivatives, which are finite at rho = +-1.

    By Price's theorem the derivative by rho is the probability :math:`P_{12}` that both are positive, and

    .. math:: \mathrm E[1(x_1 > 0)\, x_{2+}] = a_2 P_{12} + \varphi(a_2) \Phi(b_1) + \rho\,\varphi(a_1) \Phi(b_2),
        \qquad b_1 = \frac{a_1 - \rho a_2}{\sqrt{1 - \rho^2}}

    Args:
        one: The first unit of each pair, any shape.
        two: The second unit of each pair, the same shape.
        correlation: Correlation rho in [-1, 1].
    """
    value, both = _price(one, two, correlation)
    (a1, p1, d1), (a2, p2, d2) = one, two
    spread = (1 - correlation * correlation).clamp_min_(1e-12).rsqrt_()
    t1 = cdf(torch.addcmul(a1, correlation, a2, value=-1).mul_(spread).clamp_(-10, 10)).mul_(d2)
    t2 = cdf(torch.addcmul(a2, correlation, a1, value=-1).mul_(spread).clamp_(-10, 10)).mul_(d1)
    by_a1 = (a2 * both).add_(t1).addcmul_(correlation, t2).addcmul_(p1, torch.addcmul(d2, a2, p2), value=-1)
    by_a2 = (a1 * both).add_(t2).addcmul_(correlation, t1).addcmul_(p2, torch.addcmul(d1, a1, p1), value=-1)
    return Slopes(value, by_a1, by_a2, both)


def _price(one: Units, two: Units, correlation: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariance and the probability that both units are positive."""
    a1, a2 = one.ratio, two.ratio
    angle = torch.asin(correlation)
    half_squares, product = (a1 * a1).addcmul_(a2, a2).mul_(0.5), a1 * a2
    mass, moment = torch.zeros_like(angle), torch.zeros_like(angle)  # integrals of the density, and of sin t times it
    for node, weight in _LEGENDRE:
        sine = (angle * node).sin_()
        exponent = torch.addcmul(half_squares, product, sine, value=-1).div_((sine * sine).sub_(1))
        density = exponent.clamp_min_(_LOWEST_EXPONENT).exp_()
        mass.add_(density, alpha=weight)
        moment.addcmul_(sine, density, value=weight)
    angle.mul_(_PER_TURN)
    both = torch.addcmul(one.probability * two.probability, mass, angle)
    return (correlation * both).addcmul_(moment, angle, value=-1), both


def dvi_pairs(one: Units, two: Units, correlation: Tensor) -> Tensor:
    r"""Return the same covariance by the approximation of Wu et al. (2019), the ReLU baseline of the paper.

    .. math:: \rho \Big\{ \Phi(a_1)\Phi(a_2) + \frac{g}{2\pi} \exp\Big[
        -\frac{\rho\,(a_1^2 + a_2^2)}{2 g (1 + \bar\rho)} + \frac{\arcsin\rho - \rho}{\rho\, g}\, a_1 a_2 \Big] \Big\}

    with :math:`\bar\rho = \sqrt{1 - \rho^2}` and :math:`g = \arcsin\rho - \rho / (1 + \bar\rho)`. The DVI paper prints
    a plus sign in g and omits a factor rho, which is wrong by up to 0.49. In this form the error is at most 1.3e-2
    (1.5e-2 at rho = 1). The resulting covariance matrices are not always positive semidefinite.

    Args:
        one: The first unit of each pair, any shape.
        two: The second unit of each pair, the same shape.
        correlation: Correlation rho in [-1, 1].
    """
    bump = _dvi_terms(one.ratio, two.ratio, correlation)[0]
    return (one.probability * two.probability).add_(bump, alpha=_PER_TURN).mul_(correlation)


def dvi_slopes(one: Units, two: Units, correlation: Tensor) -> Slopes:
    r"""Return the covariance of :func:`dvi_pairs` with its analytic derivatives.

    The covariance is :math:`\rho\,(\Phi_1 \Phi_2 + h)`, :math:`2\pi h = g \exp[-\tfrac w2 (a_1^2 + a_2^2) + e\,a_1
    a_2]`, and with the identities :math:`w' = e w / \bar\rho` and :math:`\rho e' = \rho w / \bar\rho - e (1 + w)`

    .. math:: \rho\,\frac{\partial h}{\partial\rho} = h\,\Big[ w - e (1 + w)\,a_1 a_2
        + \frac{\rho w}{\bar\rho} \Big( a_1 a_2 - \frac e2 (a_1^2 + a_2^2) \Big) \Big]

    Args:
        one: The first unit of each pair, any shape.
        two: The second unit of each pair, the same shape.
        correlation: Correlation rho in [-1, 1].
    """
    (a1, p1, d1), (a2, p2, d2) = one, two
    bump, w, e, rho_bar, squares, product = _dvi_terms(a1, a2, correlation)
    by_a1 = (d1 * p2).addcmul_(bump, (e * a2).addcmul_(w, a1, value=-1), value=_PER_TURN).mul_(correlation)
    by_a2 = (d2 * p1).addcmul_(bump, (e * a1).addcmul_(w, a2, value=-1), value=_PER_TURN).mul_(correlation)
    level = (p1 * p2).add_(bump, alpha=_PER_TURN)
    growth = torch.addcmul(product, e, squares, value=-0.5).mul_(correlation).div_(rho_bar).add_(1).mul_(w)
    growth.addcmul_(torch.addcmul(e, e, w), product, value=-1).mul_(bump)
    by_rho = torch.add(level, where_inside(growth, correlation, _EDGE), alpha=_PER_TURN)
    return Slopes(level.mul_(correlation), by_a1, by_a2, by_rho)


def _dvi_terms(a1: Tensor, a2: Tensor, correlation: Tensor) -> tuple[Tensor, ...]:
    r"""Return :math:`2\pi h`, the w and e of its exponent, :math:`\bar\rho`, :math:`a_1^2 + a_2^2` and :math:`a_1 a_2`.

    With :math:`l = \rho / (1 + \bar\rho)` the terms are :math:`w = l / g` and
    :math:`e = (\arcsin\rho - \rho) / (\rho g) = (1 - w \bar\rho) / \rho`.
    """
    rho = correlation.clamp(-_EDGE, _EDGE).add_(max(1e-30, torch.finfo(a1.dtype).tiny))  # never zero
    rho_bar = (1 - rho * rho).sqrt_()
    lean = rho / (1 + rho_bar)
    g = torch.asin(rho).sub_(lean)
    w = lean.div_(g)
    # |e| <= 1. Near rho = 0 rounding spoils e but nothing else, because the bump is small there.
    e = (1 - w * rho_bar).div_(rho).clamp_(-1, 1)
    squares, product = (a1 * a1).addcmul_(a2, a2), a1 * a2
    exponent = (e * product).addcmul_(w, squares, value=-0.5).clamp_min_(_LOWEST_EXPONENT)
    return g.mul_(exponent.exp_()), w, e, rho_bar, squares, product


def where_inside(gradient: Tensor, x: Tensor, bound: float) -> Tensor:
    """Return the gradient where x lies strictly between -bound and bound, and zero elsewhere, in a single pass."""
    inside: Tensor = torch.ops.aten.hardtanh_backward(gradient, x, -bound, bound)
    return inside
