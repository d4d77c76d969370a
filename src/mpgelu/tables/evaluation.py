"""The quality of predictions on rows with known targets."""

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
    """Predictions with the observed targets, all ``(rows,)``.

    Args:
        actual: Observed targets.
        mean: Mean of the predictive distribution.
        epistemic_std: Standard deviation from uncertainty about the function.
        aleatoric_std: Standard deviation of the noise.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        pit: Probability integral transform, the predicted probability of a target at or below the observed one;
            uniform if the model is calibrated.
        log_density: Log density of the observed target.
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
        """Return the evaluation of predictive distributions and intervals at the observed targets.

        Args:
            actual: Observed targets.
            distribution: Predictive distribution of each row.
            lower: Lower ends of the intervals.
            upper: Upper ends of the intervals.
        """
        y = torch.tensor(actual, device="cpu")
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
        """Return the evaluation of the baseline that predicts the same Gaussian for every row.

        Args:
            actual: Observed targets.
            mean: Mean of the training targets.
            stddev: Standard deviation of the training targets.
            level: Level of the interval.
        """
        means = torch.full((len(actual),), mean, dtype=torch.float64, device="cpu")
        same = Predictive.gaussian(means, torch.zeros_like(means), torch.full_like(means, stddev**2))
        lower, upper = same.interval(level)
        return Evaluation.of(actual, same, lower.numpy(), upper.numpy())

    @staticmethod
    def concatenate(parts: Sequence[Evaluation]) -> Evaluation:
        """Return evaluations of consecutive rows as one."""
        names = [part.name for part in fields(Evaluation)]
        return Evaluation(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @property
    def stddev(self) -> Array:
        """Standard deviation of the predictive distribution."""
        return np.hypot(self.epistemic_std, self.aleatoric_std)

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Whether each target lies in its interval."""
        return (self.lower <= self.actual) & (self.actual <= self.upper)

    def scores(self) -> dict[str, float]:
        r"""Return the scores, averaged over the rows.

        With the error :math:`e = y - \mu`, the predictive density p and its distribution function F:

        * ``rmse``: :math:`\sqrt{\overline{e^2}}`, in the unit of the target,
        * ``mae``: :math:`\overline{|e|}`,
        * ``r2``: :math:`1 - \overline{e^2} / \operatorname{Var} y`, NaN if all targets are equal,
        * ``log_likelihood``: :math:`\overline{\log p(y)}`, in nats; larger is better,
        * ``crps``: the mean of :math:`\int (F(t) - [y \le t])^2 dt`, in the unit of the target; smaller is better,
        * ``coverage``: share of the targets inside their interval,
        * ``mean_width``: mean width of the intervals.
        """
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
    """Return a number with a number of significant digits, in the usual notation.

    Args:
        value: The number.
        digits: Number of significant digits.

    Example:
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
    """Return a number with few characters, for the axes of a figure.

    Example:
        >>> [compact(value) for value in (1995.0, 0.0314159, 12500, 1_285_047, -2.5e9, 0)]
        ['1995', '0.0314', '12.5k', '1.29M', '-2.5bn', '0']
    """
    for least, unit, name in ((1e9, 1e9, "bn"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.3g}{name}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def headlines(scores: Mapping[str, float], level: float) -> dict[str, str]:
    """Return formatted scores by their usual names.

    Args:
        scores: The result of :meth:`Evaluation.scores`.
        level: Probability of the intervals.
    """
    return {
        "RMSE": shown(scores["rmse"]),
        "MAE": shown(scores["mae"]),
        "R²": f"{scores['r2']:.3f}" if math.isfinite(scores["r2"]) else "-",
        "log-likelihood": f"{scores['log_likelihood']:.3f}",
        "CRPS": shown(scores["crps"]),
        f"coverage of {100 * level:g} % intervals": f"{100 * scores['coverage']:.1f} %",
        "mean width of intervals": shown(scores["mean_width"]),
    }
