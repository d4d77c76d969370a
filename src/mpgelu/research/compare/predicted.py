"""What methods predict beside full distributions, and the scores that each kind of prediction allows.

| prediction | RMSE | CRPS, coverage | log-likelihood |
|---|---|---|---|
| `Predictive`, a density | yes | yes | yes |
| `Quantiles` | yes | yes | no |
| `Points` | yes | no | no |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpgelu.predictive import Predictive

LEVEL = 0.9


@dataclass(frozen=True, eq=False)
class Quantiles:
    r"""Quantiles of each row's target at the K levels (k + 1/2) / K, from a method that gives no density.

    Scored as the distribution of K equally likely values, whose CRPS is exactly twice the mean pinball loss:

        CRPS(y) = 2 / K \sum_k (1[y < q_k] - a_k) (q_k - y),    a_k = (k + 1/2) / K.

    Quantiles that cross are sorted, which never raises the loss.

    Args:
        values: Quantiles, shape (rows, K).
    """

    values: Tensor

    def __post_init__(self) -> None:
        """Sort the quantiles of every row."""
        object.__setattr__(self, "values", self.values.sort(-1).values)

    @staticmethod
    def levels(count: int) -> Tensor:
        """The levels of so many quantiles, shape (count,)."""
        return (torch.arange(count, dtype=torch.float64) + 0.5) / count

    @property
    def mean(self) -> Tensor:
        """Mean of the K equally likely values, shape (rows,)."""
        return self.values.mean(-1)

    def crps(self, y: Tensor) -> Tensor:
        """Continuous ranked probability score of each row, shape (rows,)."""
        above = self.values - y[:, None]
        return 2 * (((above > 0).double() - self.levels(above.shape[-1])) * above).mean(-1)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Central interval of each row, interpolated linearly between the quantiles; two tensors (rows,)."""
        count = self.values.shape[-1]
        ends = [min(max(count * share - 0.5, 0), count - 1) for share in ((1 - level) / 2, (1 + level) / 2)]
        lower, upper = (torch.lerp(*self._around(end), end % 1) for end in ends)
        return lower, upper

    def _around(self, place: float) -> tuple[Tensor, Tensor]:
        below = int(place)
        return self.values[:, below], self.values[:, min(below + 1, self.values.shape[-1] - 1)]

    def affine(self, scale: float, shift: float) -> Quantiles:
        """Quantiles of ``scale * y + shift``, for a positive scale."""
        return Quantiles(self.values * scale + shift)

    def double(self) -> Quantiles:
        """Return the quantiles in float64."""
        return Quantiles(self.values.double())

    def __getitem__(self, rows: Tensor) -> Quantiles:
        """Those of some rows."""
        return Quantiles(self.values[rows])


@dataclass(frozen=True, eq=False)
class Points:
    """One number for each row, the predicted mean.

    Args:
        mean: Predictions, shape (rows,).
    """

    mean: Tensor

    def affine(self, scale: float, shift: float) -> Points:
        """Predictions of ``scale * y + shift``."""
        return Points(self.mean * scale + shift)

    def double(self) -> Points:
        """Return the predictions in float64."""
        return Points(self.mean.double())

    def __getitem__(self, rows: Tensor) -> Points:
        """Those of some rows."""
        return Points(self.mean[rows])


Predicted = Predictive | Quantiles | Points

_OF_POINTS = ("rmse",)
_OF_QUANTILES = (*_OF_POINTS, "crps", "coverage90", "width90")
SCORES: dict[type[Predicted], tuple[str, ...]] = {
    Points: _OF_POINTS,
    Quantiles: _OF_QUANTILES,
    Predictive: ("log_likelihood", *_OF_QUANTILES),
}


def scores(predicted: Predicted, y: Tensor) -> dict[str, float]:
    """Mean scores over rows, those of `SCORES` that the kind of prediction allows.

    Args:
        predicted: Predictions in float64.
        y: Targets, shape (rows,).
    """
    found = {"rmse": (predicted.mean - y).square().mean().sqrt().item()}
    if not isinstance(predicted, Points):
        lower, upper = predicted.interval(LEVEL)
        found["crps"] = predicted.crps(y).mean().item()
        found["coverage90"] = ((lower <= y) & (y <= upper)).double().mean().item()
        found["width90"] = (upper - lower).mean().item()
    if isinstance(predicted, Predictive):
        found["log_likelihood"] = predicted.log_prob(y).mean().item()
    return {name: found[name] for name in SCORES[type(predicted)]}
