"""Covariance of two rectified Gaussians of unit variance: by Price's theorem, and the DVI approximation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpgelu.rules.normal import cdf, pdf

_NODES = 8
_LOWEST_EXPONENT = -60.0  # exp is many times slower on a CPU where it underflows, and e^-60 is nothing here


def exact_pairs(a1: Tensor, a2: Tensor, correlation: Tensor) -> Tensor:
    r"""Covariance of :math:`(z_1 + a_1)_+` and :math:`(z_2 + a_2)_+` for standard normal z with correlation rho.

    .. math:: \rho\,\Phi(a_1)\Phi(a_2) + \frac1{2\pi} \int_0^{\arcsin\rho} (\rho - \sin t)
        \exp\Big(-\frac{a_1^2 + a_2^2 - 2 a_1 a_2 \sin t}{2\cos^2 t}\Big)\, dt

    Price's theorem: the derivative by rho is the probability that both are positive. The integral is taken by
    8-point Gauss-Legendre in t: error below 2e-6 for :math:`|a| \le 4`. Gradients are the analytic ones.

    Args:
        a1: ratio of mean to standard deviation of the first unit, any shape.
        a2: the same of the second unit.
        correlation: rho in [-1, 1].
    """
    value: Tensor = _ExactPairs.apply(a1, a2, correlation)[0]  # type: ignore[no-untyped-call]
    return value


class _ExactPairs(torch.autograd.Function):
    """Saves four tensors instead of the eight nodes' intermediates, and stays finite at rho = +-1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a1: Tensor, a2: Tensor, correlation: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.asin(correlation)
        squares, product = a1 * a1 + a2 * a2, a1 * a2
        covariance = torch.zeros_like(correlation)
        both = torch.zeros_like(correlation)
        for node, weight in zip(*_legendre(), strict=True):
            sine = torch.sin(angle * node)
            exponent = (squares - 2 * product * sine) / (2 * (sine * sine - 1))
            density = weight * torch.exp(exponent.clamp_min(_LOWEST_EXPONENT))
            covariance = covariance + (correlation - sine) * density
            both = both + density
        angle = angle / (2 * math.pi)
        independent = cdf(a1) * cdf(a2)
        both = independent + both * angle
        return correlation * independent + covariance * angle, both

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a1, a2, correlation, both = ctx.saved_tensors
        # E[1(x1 > 0) x2+] = a2 P(both) + phi(a2) Phi(b1) + rho phi(a1) Phi(b2): Price's theorem for the means.
        spread = (1 - correlation * correlation).clamp_min(1e-12).rsqrt()
        p1, p2, d1, d2 = cdf(a1), cdf(a2), pdf(a1), pdf(a2)
        t1 = d2 * cdf(((a1 - correlation * a2) * spread).clamp(-10, 10))
        t2 = d1 * cdf(((a2 - correlation * a1) * spread).clamp(-10, 10))
        by_a1 = a2 * both + t1 + correlation * t2 - p1 * (d2 + a2 * p2)
        by_a2 = a1 * both + t2 + correlation * t1 - p2 * (d1 + a1 * p1)
        return grad * by_a1, grad * by_a2, grad * both


def dvi_pairs(a1: Tensor, a2: Tensor, correlation: Tensor) -> Tensor:
    r"""The same covariance by the approximation of Wu et al. (2019), the paper's ReLU baseline.

    .. math:: \rho \Big\{ \Phi(a_1)\Phi(a_2) + \frac{g}{2\pi} \exp\Big[ -\frac{\rho\,(a_1^2 + a_2^2)}{2 g (1 + \bar\rho)}
        + \frac{\arcsin\rho - \rho}{\rho\, g}\, a_1 a_2 \Big] \Big\}

    with :math:`\bar\rho = \sqrt{1 - \rho^2}` and :math:`g = \arcsin\rho - \rho / (1 + \bar\rho)`; the DVI paper prints a
    plus sign in g and omits a factor rho, which is wrong by up to 0.49. As here it is within 1.2e-2 of the truth. The
    covariances it gives are not always positive semidefinite.

    Args:
        a1: ratio of mean to standard deviation of the first unit, any shape.
        a2: the same of the second unit.
        correlation: rho in [-1, 1].
    """
    # g and arcsin(rho) - rho vanish with rho: near zero both quotients come from their series.
    small = correlation.abs() < 0.03
    rho = torch.where(small, 0.5, correlation.clamp(-1 + 1e-7, 1 - 1e-7))
    angle = torch.asin(rho)
    lean = rho / (1 + torch.sqrt(1 - rho * rho))
    height = angle - lean
    square = correlation * correlation
    g = torch.where(small, correlation * (0.5 + square / 24), height)
    first = torch.where(small, -0.5 - square / 12, -0.5 * lean / height)
    second = torch.where(small, correlation * (1 / 3 + square * (11 / 90)), (angle - rho) / (rho * height))
    exponent = first * (a1 * a1 + a2 * a2) + second * (a1 * a2)
    return correlation * (cdf(a1) * cdf(a2) + g * (1 / (2 * math.pi)) * torch.exp(exponent.clamp_min(_LOWEST_EXPONENT)))


def _legendre() -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()
