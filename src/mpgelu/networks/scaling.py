"""The transformation of raw features to inputs of networks, finite and bounded for any row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ENDLESS = 1e300  # stands for the absence of a limit or a range
FARTHEST = 1e15  # largest distance from the centre in scales; its square is finite in float32


class FeatureScale(nn.Module):
    r"""Standardise features, limit them smoothly, and measure how far they lie outside the training data.

    .. math:: z = \frac{x - c}{s}, \qquad z \mapsto \frac{z}{\sqrt{1 + (z / l)^2}}

    Near the centre this is a plain standardisation; far from it the result approaches the limit l. A network therefore
    never receives values beyond ``limit``, and its outputs stay as bounded as on the training rows. The distance that
    the limit hides is returned as a variance by :meth:`extrapolation`.

    Args:
        center: Centre c of each feature, ``(n,)``, float64.
        scale: Positive scale s of each feature, ``(n,)``.
        limit: Limit l of the scaled features; 1e300 for none.
        lower: Smallest scaled value of each feature in the training rows, before the limit, ``(n,)``.
        upper: Largest such value, ``(n,)``.
        reach: Standard deviation, in scales of the target, that one logarithmic unit of distance adds.
    """

    center: Tensor
    scale: Tensor
    limit: Tensor
    lower: Tensor
    upper: Tensor
    reach: Tensor

    def __init__(
        self, center: Tensor, scale: Tensor, limit: float, lower: Tensor, upper: Tensor, reach: float = 0.0
    ) -> None:
        super().__init__()
        numbers = {"limit": center.new_tensor(limit), "reach": center.new_tensor(reach)}
        arrays = {"center": center, "scale": scale, "lower": lower, "upper": upper, **numbers}
        for name, value in arrays.items():
            self.register_buffer(name, value)

    @classmethod
    def standard(cls, mean: Tensor, scale: Tensor) -> FeatureScale:
        """Return a plain standardisation without limit.

        Args:
            mean: Centre of each feature, ``(n,)``.
            scale: Scale of each feature, ``(n,)``.
        """
        endless = torch.full_like(mean.double(), _ENDLESS)
        return cls(mean.double(), scale.double(), _ENDLESS, -endless, endless)

    @classmethod
    def identity(cls, features: int) -> FeatureScale:
        """Return the identity for a number of features, for networks that take raw features."""
        return cls.standard(torch.zeros(features, device="cpu"), torch.ones(features, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and limited features, ``(rows, n)``, in the dtype of x."""
        return smoothly_limited(self._scaled(x), self.limit.to(x))

    def extrapolation(self, x: Tensor) -> Tensor:
        r"""Return the variance due to the distance of features from the training data, in units of the scaled target.

        .. math:: r^2 \log^2(1 + d)

        with r the ``reach`` and d the distance beyond the smallest or largest training value of the feature, in
        scales. The variance is unbounded, but grows so slowly that one wrong cell does not dominate a score.

        Args:
            x: Raw features, ``(rows, n)``.

        Returns:
            Variances, ``(rows, n)``, which add over the features.
        """
        z = self._scaled(x)
        distance = torch.relu(self.lower.to(x) - z) + torch.relu(z - self.upper.to(x))
        return (self.reach.to(x) * torch.log1p(distance)).square()

    def _scaled(self, x: Tensor) -> Tensor:
        """Return the standardised features, clipped so that their squares are finite in float32."""
        return ((x - self.center.to(x)) / self.scale.to(x)).clamp(-FARTHEST, FARTHEST)


def smoothly_limited(z: Tensor, limit: Tensor | float) -> Tensor:
    r"""Return :math:`z / \sqrt{1 + (z / l)^2}`, which is about z near zero and always between -l and l."""
    return z / torch.sqrt(1 + (z / limit).square())
