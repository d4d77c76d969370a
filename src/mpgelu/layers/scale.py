"""Scaling of features: learned, or by robust statistics with a smooth limit."""

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
    """A learned factor for each feature, one at the start; see :func:`mpgelu.rules.scale`.

    Args:
        in_features: Number of features.
        device: Where the factors live.
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
        """Settings shown by ``print(network)``."""
        return f"in_features={self.in_features}"


class RobustScale(nn.Module):
    r"""Known centre and scale of each feature, then a smooth limit that far values approach.

    .. math:: z = (x - c) / s, \qquad z / \sqrt{1 + (z / \ell)^2}

    A tensor or certain moments are scaled exactly. Uncertain features are taken as Gaussian, with the errors of
    :func:`mpgelu.rules.elementwise`. Centre and scale are buffers: training leaves them as they are.

    Args:
        center: c, ``(n,)``.
        scale: S > 0, ``(n,)``.
        limit: Limit of :math:`|z|`.
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
        """The median and interquartile range of rows ``(rows, n)``.

        Where half of the values of a feature are equal, half of its range takes the place of the interquartile
        range, and where all are, one.

        Args:
            x: Rows.
            limit: Limit of the scaled features.
        """
        low, center, high = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype, device=x.device), dim=0)
        spread = torch.where(high > low, high - low, (x.amax(0) - x.amin(0)) / 2)
        return cls(center, torch.where(spread > 0, spread, 1), limit)

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return elementwise(scale(add(input, -self.center), 1 / self.scale), self.limit)

    def extra_repr(self) -> str:
        """Settings shown by ``print(network)``."""
        return f"in_features={self.in_features}, limit={self.limit.limit:g}"
