"""The elementwise functions that :func:`mpgelu.rules.elementwise` can propagate moments through.

Each function defines its value and its derivative; expectations follow by quadrature unless a closed form is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.moments import DiagonalMoments
from mpgelu.rules.elementwise import Activation, Linearisation
from mpgelu.rules.mpgelu import keep_probability
from mpgelu.rules.normal import cdf, pdf
from mpgelu.rules.relu import relu


@dataclass(frozen=True)
class Tanh(Activation):
    """The hyperbolic tangent."""

    def __call__(self, x: Tensor) -> Tensor:
        r"""Return :math:`\tanh x`."""
        return torch.tanh(x)

    def slope(self, x: Tensor) -> Tensor:
        r"""Return the derivative :math:`1 - \tanh^2 x`."""
        return 1 - torch.tanh(x).square()


@dataclass(frozen=True)
class Sigmoid(Activation):
    """The logistic function :math:`1 / (1 + e^{-x})`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logistic function of x."""
        return torch.sigmoid(x)

    def slope(self, x: Tensor) -> Tensor:
        r"""Return the derivative :math:`\sigma(x)\,\sigma(-x)`, which does not cancel for large x."""
        return torch.sigmoid(x) * torch.sigmoid(-x)


@dataclass(frozen=True)
class SiLU(Activation):
    r"""The function :math:`x\,\sigma(x)`, also called swish."""

    def __call__(self, x: Tensor) -> Tensor:
        r"""Return :math:`x\,\sigma(x)`."""
        return F.silu(x)

    def slope(self, x: Tensor) -> Tensor:
        r"""Return the derivative :math:`\sigma(x) + x\,\sigma(x)\,\sigma(-x)`."""
        bounded = x.clamp(-100, 100)  # beyond, the product is nothing, but its gradient may be infinity times zero
        return torch.sigmoid(x) + bounded * torch.sigmoid(bounded) * torch.sigmoid(-bounded)


@dataclass(frozen=True)
class Softplus(Activation):
    r"""The function :math:`\log(1 + e^{\beta x}) / \beta`.

    Args:
        beta: Sharpness :math:`\beta` of the bend.
        threshold: Value of :math:`\beta x` above which the function is replaced by its argument, as in torch.
    """

    beta: float = 1.0
    threshold: float = 20.0

    @property
    def width(self) -> float:  # type: ignore[override]
        r"""Length over which the function bends, :math:`1 / \beta`."""
        return 1 / self.beta

    def __call__(self, x: Tensor) -> Tensor:
        """Return the softplus of x."""
        return F.softplus(x, self.beta, self.threshold)

    def slope(self, x: Tensor) -> Tensor:
        r"""Return the derivative :math:`\sigma(\beta x)`."""
        return torch.sigmoid(self.beta * x)


@dataclass(frozen=True)
class GELU(Activation):
    r"""The function :math:`x\,\Phi(x)`.

    Mean and gain are closed forms in :math:`t = m / \sqrt{1 + v}`; the variance is computed by quadrature.

    .. math:: \bar f = m\,\Phi(t) + \frac{v\,\varphi(t)}{\sqrt{1 + v}}, \qquad g = \Phi(t) + \frac{t\,\varphi(t)}{1 + v}
    """

    def __call__(self, x: Tensor) -> Tensor:
        r"""Return :math:`x\,\Phi(x)`."""
        return F.gelu(x)

    def gain(self, mean: Tensor, variance: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        """Return the expected slope in closed form; the quadrature points are not used."""
        ratio = mean * (1 + variance).rsqrt()
        return cdf(ratio) + ratio * pdf(ratio) / (1 + variance)

    def linearise(self, mean: Tensor, variance: Tensor) -> Linearisation:
        """Return the best linear fit, with the mean in closed form."""
        root = (1 + variance).sqrt()
        ratio = mean / root
        return super().linearise(mean, variance)._replace(mean=mean * cdf(ratio) + variance / root * pdf(ratio))


@dataclass(frozen=True)
class SmoothLimit(Activation):
    r"""The function :math:`x / \sqrt{1 + (x / \ell)^2}`: the identity near zero, with the limits :math:`\pm\ell`.

    Args:
        limit: The limit :math:`\ell > 0`.
    """

    limit: float = 3.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function, computed as the sine of an angle because squares of large arguments overflow."""
        return self.limit * torch.sin(torch.atan(x / self.limit))

    def slope(self, x: Tensor) -> Tensor:
        r"""Return the derivative :math:`(1 + (x / \ell)^2)^{-3/2}`."""
        return torch.cos(torch.atan(x / self.limit)) ** 3


@dataclass(frozen=True)
class Rectifier(Activation):
    r"""ReLU and its leaky form :math:`\alpha h + (1 - \alpha) h_+`; all expectations are closed forms.

    Args:
        negative_slope: The slope :math:`\alpha` for negative arguments.
    """

    negative_slope: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the leaky rectifier of x."""
        return F.leaky_relu(x, self.negative_slope)

    def linearise(self, mean: Tensor, variance: Tensor) -> Linearisation:
        r"""Return the best linear fit in closed form, from the moments of ReLU.

        The linear part :math:`\alpha h` contributes to mean and gain, and nothing to the residual variance.
        """
        rectified: DiagonalMoments = relu(DiagonalMoments(mean, variance))
        probability, slope = keep_probability(mean, variance), self.negative_slope
        # Cauchy-Schwarz makes the rest non-negative; the clamp is for rounding.
        rest = torch.addcmul(rectified.variance, probability.square(), variance, value=-1).clamp_min(0)
        return Linearisation(
            slope * mean + (1 - slope) * rectified.mean,
            slope + (1 - slope) * probability,
            (1 - slope) ** 2 * rest,
        )
