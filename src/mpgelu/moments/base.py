"""What every kind of moments has in common: a mean, a marginal variance, a covariance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor


class Moments:
    """Mean and covariance of a random vector, one per leading batch index.

    Subclasses differ only in how they hold the covariance. Rules dispatch on the subclass.
    """

    mean: Tensor  # (*batch, n)

    if TYPE_CHECKING:  # a field in the subclass that holds it, a computed property in the others

        @property
        def variance(self) -> Tensor:
            """Marginal variances, the diagonal of the covariance, ``(*batch, n)``."""

        @property
        def covariance(self) -> Tensor:
            """Dense covariance, ``(*batch, n, n)``."""

    @property
    def features(self) -> int:
        """Length n of the random vector."""
        return self.mean.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions: one random vector for each index."""
        return self.mean.shape[:-1]

    def _describe(self) -> str:
        """The covariance in words, for ``repr``."""
        return ""

    def __repr__(self) -> str:
        """Shapes and structure, never the numbers: a batch of covariances does not fit a line."""
        words = [
            f"mean {tuple(self.mean.shape)}",
            self._describe(),
            str(self.mean.dtype).removeprefix("torch."),
        ]
        if self.mean.device.type != "cpu":
            words.append(str(self.mean.device))
        return f"{type(self).__name__}({', '.join(word for word in words if word)})"
