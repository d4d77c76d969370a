"""A misprint, seen.

Covariance of two rectified Gaussians with unit variances and means 0.5, against their correlation: exact, as the DVI
paper prints it, and with the sign and the factor corrected.
"""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from style import BLUE, GREEN, ORANGE

import mpgelu
from mpgelu import rules


def draw() -> Figure:
    """Three curves, and how far two of them are off."""
    mean = 0.5
    rho = torch.linspace(-0.98, 0.98, 99, dtype=torch.float64)
    exact, right = (_library(mean, rho, covariance) for covariance in ("exact", "dvi"))
    printed = _printed(mean, rho)
    figure, (curves, errors) = plt.subplots(1, 2, figsize=(8.2, 3.2))
    curves.plot(rho, printed, color=ORANGE, label="as printed")
    curves.plot(rho, right, color=GREEN, label="corrected")
    curves.plot(rho, exact, "--", color=BLUE, label="exact")
    curves.set(title="Covariance after ReLU", xlabel="correlation before")
    curves.legend()
    errors.semilogy(rho, (printed - exact).abs(), color=ORANGE)
    errors.semilogy(rho, (right - exact).abs() + 1e-7, color=GREEN)
    errors.set(title="Absolute error", xlabel="correlation before", ylim=(1e-6, 1))
    for axes in (curves, errors):
        axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    return figure


def _library(mean: float, rho: torch.Tensor, covariance: str) -> torch.Tensor:
    before = torch.stack([torch.ones_like(rho), rho, rho, torch.ones_like(rho)], -1).view(-1, 2, 2)
    moments = mpgelu.FullMoments.of(torch.full((len(rho), 2), mean, dtype=torch.float64), before)
    return rules.relu(moments, covariance=covariance).covariance[:, 0, 1]


def _printed(mean: float, rho: torch.Tensor) -> torch.Tensor:
    """With a plus in g, and without the factor rho of the correction."""
    root = (1 - rho**2).sqrt()
    g = torch.asin(rho) + rho / (1 + root)
    exponent = -rho / (2 * g * (1 + root)) * 2 * mean**2 + (torch.asin(rho) - rho) / (rho * g) * mean**2
    kept = 0.5 * math.erfc(-mean / math.sqrt(2))
    return rho * kept**2 + g / (2 * math.pi) * torch.exp(exponent)
