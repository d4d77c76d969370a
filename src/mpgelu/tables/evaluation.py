"""How good predictions are on rows whose targets are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from mpgelu.predictive import Predictive

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predictions together with the observed targets, all ``(rows,)``.

    Args:
        actual: The targets.
        mean: Mean of the predictive distribution.
        epistemic_std: Its standard deviation from not knowing the function.
        aleatoric_std: Its standard deviation from noise.
        lower: End of the interval.
        upper: End of the interval.
        pit: Predicted probability of a target at or below the actual one; uniform if the model is calibrated.
        log_density: Log density of the actual target.
        crps: Continuous ranked probability score.
    """

    actual: Array
    mean: Array
    epistemic_std: Array
    aleatoric_std: Array
    lower: Array
    upper: Array
    pit: Array
    log_density: Array
    crps: Array

    @staticmethod
    def of(actual: Array, distribution: Predictive, lower: Array, upper: Array) -> Evaluation:
        """Evaluate distributions at the observed targets."""
        y = torch.tensor(actual)
        return Evaluation(
            actual=actual,
            mean=distribution.mean.numpy(),
            epistemic_std=distribution.epistemic_variance.sqrt().numpy(),
            aleatoric_std=distribution.aleatoric_variance.sqrt().numpy(),
            lower=lower,
            upper=upper,
            pit=distribution.cdf(y).numpy(),
            log_density=distribution.log_prob(y).numpy(),
            crps=distribution.crps(y).numpy(),
        )

    @staticmethod
    def of_average(actual: Array, mean: float, stddev: float, level: float) -> Evaluation:
        """What anyone could do: predict the same Gaussian for every row.

        Args:
            actual: The targets.
            mean: Mean of the training targets.
            stddev: Standard deviation of the training targets.
            level: Level of the interval.
        """
        means = torch.full((len(actual),), mean, dtype=torch.float64)
        same = Predictive.gaussian(means, torch.zeros_like(means), torch.full_like(means, stddev**2))
        lower, upper = same.interval(level)
        return Evaluation.of(actual, same, lower.numpy(), upper.numpy())

    @staticmethod
    def concatenate(parts: Sequence[Evaluation]) -> Evaluation:
        """Evaluations of consecutive rows as one."""
        names = [part.name for part in fields(Evaluation)]
        return Evaluation(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @property
    def stddev(self) -> Array:
        """Standard deviation of the predictive distribution."""
        return np.hypot(self.epistemic_std, self.aleatoric_std)

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which targets lie in their interval."""
        return (self.lower <= self.actual) & (self.actual <= self.upper)

    def scores(self) -> dict[str, float]:
        """The headline numbers by their name."""
        error = self.actual - self.mean
        spread = float(np.var(self.actual))
        return {
            "rmse": float(np.sqrt(np.mean(error**2))),
            "mae": float(np.mean(np.abs(error))),
            "r2": 1 - float(np.mean(error**2)) / spread if spread else float("nan"),
            "log_likelihood": float(np.mean(self.log_density)),
            "crps": float(np.mean(self.crps)),
            "coverage": float(np.mean(self.inside)),
            "mean_width": float(np.mean(self.upper - self.lower)),
        }


def shown(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, as people write it.

    >>> shown(123456.7), shown(0.0123456), shown(-2.5), shown(1.5e-9), shown(float("nan"))
    ('123,457', '0.01235', '-2.500', '1.500e-09', '-')
    """
    if not math.isfinite(value):
        return "-"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    if not -5 < magnitude < 10:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def compact(value: float) -> str:
    """A number in little space, for the axes of a figure.

    >>> [compact(value) for value in (1995.0, 0.0314159, 12500, 1_285_047, -2.5e9, 0)]
    ['1995', '0.0314', '12.5k', '1.29M', '-2.5bn', '0']
    """
    for least, unit, name in ((1e9, 1e9, "bn"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.3g}{name}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def headlines(scores: Mapping[str, float], level: float) -> dict[str, str]:
    """The scores as people read them, by the name people know."""
    return {
        "RMSE": shown(scores["rmse"]),
        "MAE": shown(scores["mae"]),
        "R²": f"{scores['r2']:.3f}" if math.isfinite(scores["r2"]) else "-",
        "log-likelihood": f"{scores['log_likelihood']:.3f}",
        "CRPS": shown(scores["crps"]),
        f"coverage of {100 * level:g} % intervals": f"{100 * scores['coverage']:.1f} %",
        "mean width of intervals": shown(scores["mean_width"]),
    }
