"""Scaling of features, by learned factors or by robust statistics with a smooth limit."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import add, elementwise, scale
from mpgelu.rules.activations import SmoothLimit


@layers.register("in_features")
class Scale(nn.Module):
    """Multiply each feature by a learned factor, initially one; see :func:`mpgelu.rules.scale`.

    Args:
        in_features: Number of features.
        device: Device of the factors.
        dtype: Data type of the factors.
    """

    def __init__(
        self, in_features: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.ones(in_features, device=device, dtype=dtype))

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return scale(input, self.weight)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        return f"in_features={self.in_features}"


class RobustScale(nn.Module):
    r"""Standardise each feature by a known centre and scale, and limit it smoothly.

    .. math:: z = (x - c) / s, \qquad z / \sqrt{1 + (z / \ell)^2}

    A tensor or certain moments are transformed exactly. Uncertain features are taken as Gaussian, with the errors of
    :func:`mpgelu.rules.elementwise`. Centre and scale are buffers, which training does not change.

    Args:
        center: Centres c, ``(n,)``.
        scale: Positive scales s, ``(n,)``.
        limit: Limit :math:`\ell` of the absolute value of the result.

    Raises:
        InputError: Shapes differ, a value is not finite, or a scale or the limit is not positive.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, center: Tensor, scale: Tensor, limit: float = 3.0) -> None:
        super().__init__()
        if center.dim() != 1 or center.shape != scale.shape:
            raise InputError(
                f"RobustScale: center and scale must both have shape (features,), got {tuple(center.shape)} and "
                f"{tuple(scale.shape)}"
            )
        if not (center.isfinite() & scale.isfinite() & (scale > 0)).all():
            raise InputError("RobustScale: center must be finite, and scale finite and positive, for every feature")
        if not limit > 0:
            raise InputError(f"RobustScale: limit must be positive, got {limit}")
        self.in_features = len(center)
        self.register_buffer("center", center.detach().clone())
        self.register_buffer("scale", scale.detach().clone())
        self.limit = SmoothLimit(limit)

    @classmethod
    def of(cls, x: Tensor, limit: float = 3.0) -> Self:
        """Return the layer with the median and the interquartile range of some rows.

        If the interquartile range of a feature is zero, half of its range is used instead; if that is zero too, one.

        Args:
            x: Rows, ``(rows, n)``.
            limit: Limit of the scaled features.
        """
        low, center, high = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype, device=x.device), dim=0)
        spread = torch.where(high > low, high - low, (x.amax(0) - x.amin(0)) / 2)
        return cls(center, torch.where(spread > 0, spread, 1), limit)

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return elementwise(scale(add(input, -self.center), 1 / self.scale), self.limit)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        return f"in_features={self.in_features}, limit={self.limit.limit:g}"
