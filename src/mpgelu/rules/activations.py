"""The elementwise functions that :func:`mpgelu.rules.elementwise` knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.moments import DiagonalMoments
from mpgelu.rules.elementwise import Activation, Fit
from mpgelu.rules.mpgelu import keep_probability
from mpgelu.rules.normal import cdf, pdf
from mpgelu.rules.relu import relu


@dataclass(frozen=True)
class Tanh(Activation):
    """Hyperbolic tangent."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return torch.tanh(x)

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return 1 - torch.tanh(x).square()


@dataclass(frozen=True)
class Sigmoid(Activation):
    """Logistic function."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return torch.sigmoid(x)

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return torch.sigmoid(x) * torch.sigmoid(-x)


@dataclass(frozen=True)
class SiLU(Activation):
    """``x sigmoid(x)``, also called swish."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return F.silu(x)

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        bounded = x.clamp(-100, 100)  # beyond, the product is nothing, but its gradient may be infinity times zero
        return torch.sigmoid(x) + bounded * torch.sigmoid(bounded) * torch.sigmoid(-bounded)


@dataclass(frozen=True)
class Softplus(Activation):
    """``log(1 + exp(beta x)) / beta``.

    Args:
        beta: Sharpness.
        threshold: Value of ``beta x`` above which the function is its argument.
    """

    beta: float = 1.0
    threshold: float = 20.0

    @property
    def width(self) -> float:  # type: ignore[override]
        """Shorter, the sharper the bend."""
        return 1 / self.beta

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return F.softplus(x, self.beta, self.threshold)

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return torch.sigmoid(self.beta * x)


@dataclass(frozen=True)
class GELU(Activation):
    r"""``x Phi(x)``; with :math:`t = m / \sqrt{1 + v}` mean and gain are closed forms, the variance is quadrature.

    .. math:: \bar f = m\,\Phi(t) + \frac{v\,\varphi(t)}{\sqrt{1 + v}}, \qquad g = \Phi(t) + \frac{t\,\varphi(t)}{1 + v}
    """

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return F.gelu(x)

    def gain(self, mean: Tensor, variance: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        """Closed form."""
        ratio = mean * (1 + variance).rsqrt()
        return cdf(ratio) + ratio * pdf(ratio) / (1 + variance)

    def fit(self, mean: Tensor, variance: Tensor) -> Fit:
        """With the mean in closed form."""
        root = (1 + variance).sqrt()
        ratio = mean / root
        return super().fit(mean, variance)._replace(mean=mean * cdf(ratio) + variance / root * pdf(ratio))


@dataclass(frozen=True)
class SmoothLimit(Activation):
    r""":math:`x / \sqrt{1 + (x / \ell)^2}`: the identity near zero, :math:`\pm\ell` far from it.

    Args:
        limit: :math:`\ell > 0`.
    """

    limit: float = 3.0

    def __call__(self, x: Tensor) -> Tensor:
        """The function, as the sine of an angle, since squares of far values overflow."""
        return self.limit * torch.sin(torch.atan(x / self.limit))

    def slope(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return torch.cos(torch.atan(x / self.limit)) ** 3


@dataclass(frozen=True)
class Rectifier(Activation):
    r"""ReLU and its leaky form :math:`\alpha h + (1 - \alpha) h_+`, in closed form.

    Args:
        negative_slope: :math:`\alpha`.
    """

    negative_slope: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The function."""
        return F.leaky_relu(x, self.negative_slope)

    def fit(self, mean: Tensor, variance: Tensor) -> Fit:
        """From the moments of ReLU; the linear part leaves no rest."""
        rectified: DiagonalMoments = relu(DiagonalMoments(mean, variance))
        probability, slope = keep_probability(mean, variance), self.negative_slope
        # Cauchy-Schwarz makes the rest non-negative; the clamp is for rounding.
        rest = torch.addcmul(rectified.variance, probability.square(), variance, value=-1).clamp_min(0)
        return Fit(
            slope * mean + (1 - slope) * rectified.mean,
            slope + (1 - slope) * probability,
            (1 - slope) ** 2 * rest,
        )
