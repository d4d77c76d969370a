"""Periodic embedding of numeric features."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import periodic


def _sizes(layer: Periodic) -> dict[str, int]:
    """Return the constructor arguments of the layer, for its description; sigma affects the initial values only."""
    return dict(zip(("in_features", "frequencies", "outputs"), layer.weight.shape, strict=True))


@layers.register(read=_sizes)
class Periodic(nn.Module):
    """Append to each feature learned linear combinations of its cosines; see :func:`mpgelu.rules.periodic`.

    Frequencies are initialised as independent Gaussians, phases uniformly over a cycle, and weights as in
    ``torch.nn.Linear``. There is no bias, because the linear layer that follows has one. Moments are exact for
    Gaussian features.

    Args:
        in_features: Number n of features.
        frequencies: Number of cosines of each feature.
        sigma: Standard deviation of the initial frequencies, in cycles per unit of the feature. Larger values resolve
            finer structure and overfit sooner.
        outputs: Number of linear combinations of the cosines of each feature.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Attributes:
        out_features: Number of features after the layer, ``in_features * (1 + outputs)``.

    Raises:
        InputError: A size is smaller than one, or sigma is negative or not finite.

    Example:
        >>> layer = Periodic(4, outputs=3)
        >>> layer(torch.randn(7, 4)).shape
        torch.Size([7, 16])
    """

    def __init__(
        self,
        in_features: int,
        frequencies: int = 16,
        sigma: float = 0.3,
        outputs: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("in_features", in_features), ("frequencies", frequencies), ("outputs", outputs)):
            if count < 1:
                raise InputError(f"Periodic: {name} must be at least 1, got {count}")
        if not 0 <= sigma < float("inf"):
            raise InputError(f"Periodic: sigma must be finite and not negative, got {sigma}")
        self.in_features, self.out_features = in_features, in_features * (1 + outputs)
        self.sigma = sigma

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.frequency = empty(in_features, frequencies)
        self.phase = empty(in_features, frequencies)
        self.weight = empty(in_features, frequencies, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from their initial distributions again."""
        bound = self.frequency.shape[1] ** -0.5
        nn.init.normal_(self.frequency, std=self.sigma)
        nn.init.uniform_(self.phase)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return periodic(input, self.frequency, self.phase, self.weight)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        _, frequencies, outputs = self.weight.shape[-3:]
        return f"in_features={self.in_features}, frequencies={frequencies}, sigma={self.sigma:g}, outputs={outputs}"
