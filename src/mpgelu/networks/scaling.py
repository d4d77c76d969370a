"""From raw features to what networks take, finite and bounded however far a row lies from the training data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ENDLESS = 1e300  # of a limit or a range that there is not
FARTHEST = 1e15  # scales from the centre, whose square float32 holds


class FeatureScale(nn.Module):
    r"""Features in units of their spread, smoothly limited, and how far they lie outside the training data.

    .. math:: z = \frac{x - c}{s}, \qquad z \mapsto \frac{z}{\sqrt{1 + (z / l)^2}}

    Near the centre this is the plain scale; far out it tends to the limit l. So a network never sees more than
    ``limit``, and its outputs stay as bounded as on the training rows. What the limit hides comes back as variance,
    :meth:`extrapolation`.

    Args:
        center: Typical value c of each feature, ``(n,)``, float64.
        scale: Spread s of each feature, ``(n,)``, positive.
        limit: Limit of the scaled features; 1e300 for none.
        lower: Smallest scaled value of each feature in the training rows, before the limit, ``(n,)``.
        upper: The largest, ``(n,)``.
        reach: Standard deviation of the target, in its own scale, that one logarithmic unit of distance adds.
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
        """Plain standardisation without a limit, ``(n,)`` each."""
        endless = torch.full_like(mean.double(), _ENDLESS)
        return cls(mean.double(), scale.double(), _ENDLESS, -endless, endless)

    @classmethod
    def identity(cls, features: int) -> FeatureScale:
        """Features as they are, for networks that take them so."""
        return cls.standard(torch.zeros(features), torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled and limited features ``(rows, n)``, in the dtype of x."""
        z = self._scaled(x)
        return z / torch.sqrt(1 + (z / self.limit.to(x)).square())

    def extrapolation(self, x: Tensor) -> Tensor:
        r"""Variance that each feature's distance from the training data adds, ``(rows, n)``, in the target's scale.

        .. math:: r^2 \log^2(1 + d)

        with d the distance from the nearest training value of that feature beyond the smallest or the largest, in
        scales. It grows without bound, but so slowly that a wrong cell does not ruin a score.
        """
        z = self._scaled(x)
        distance = torch.relu(self.lower.to(x) - z) + torch.relu(z - self.upper.to(x))
        return (self.reach.to(x) * torch.log1p(distance)).square()

    def _scaled(self, x: Tensor) -> Tensor:
        return ((x - self.center.to(x)) / self.scale.to(x)).clamp(-FARTHEST, FARTHEST)
