"""Dropout as a random layer."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import dropout


@layers.register("rescale")  # the rate is a buffer, which belongs to the arrays
class Dropout(nn.Module):
    """Multiply every unit by an independent Bernoulli variable; see :func:`mpgelu.rules.dropout`.

    The randomness is part of the model: training and evaluation mode give the same moments, and both are exact. A
    plain tensor is multiplied by the mean of the mask, which is one if the mask is rescaled.

    Args:
        rate: Probability of dropping a unit, in [0, 1).
        rescale: Divide the kept units by ``1 - rate``, as ``torch.nn.Dropout`` does; ``False`` is the dropout of the
            paper.
        device: Device of the rate, which is a buffer.
        dtype: Data type of the rate.

    Raises:
        InputError: The rate is outside [0, 1).

    Example:
        >>> import torch, mpgelu
        >>> Dropout(0.5)(mpgelu.DiagonalMoments.certain(torch.ones(2))).variance
        tensor([1., 1.])
    """

    rate: Tensor  # a buffer, so that models with different rates can be stacked and trained as one

    def __init__(
        self,
        rate: float = 0.5,
        rescale: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given: object = rate  # which may be a number of numpy, or a text
        number = float(rate) if isinstance(given, numbers.Real | Tensor) else math.nan
        held = torch.tensor(number, dtype=dtype, device="cpu")  # rounding can take a rate just below one to one
        if not 0 <= held.item() < 1:
            raise InputError(f"Dropout: rate must be in [0, 1), got {rate}; it is the probability of dropping a unit")
        self.register_buffer("rate", held.to(device))
        self.rescale = rescale

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return dropout(input, self.rate, self.rescale)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        if self.rate.dim() > 0:
            return "rates of many models"
        rate = "?" if self.rate.is_meta else f"{self.rate.item():g}"  # a tensor without numbers has none to show
        return f"rate={rate}, rescale={self.rescale}"
