"""The audit of predictions for features with errors against averages over random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import ndtri
from torch import Tensor

ALLOWED = 0.05  # standard deviations in a mean, and relative in a standard deviation, beyond sampling error
_FALSE_ALARM = 1e-3  # probability that a right prediction fails, over all that is compared together
_AT_ONCE = 2048  # inputs

MeanAndVariance = tuple[Tensor, Tensor]  # (rows, units) each


class Finding:
    """A comparison with samples.

    Attributes:
        decided: Whether the number of draws suffices to distinguish right from wrong values.
        passed: Whether the errors are within their allowance, including sampling error.
    """

    decided: bool
    passed: bool

    @property
    def verdict(self) -> str:
        """The verdict: ``"pass"``, ``"FAIL"`` or ``"undecided"``."""
        return "FAIL" if not self.passed else "pass" if self.decided else "undecided"


@dataclass(frozen=True)
class InputAudit(Finding):
    """Comparison of predictions for features with errors with averages of predictions over random inputs.

    Errors are the largest over all rows, in standard deviations of the sampled average, each with its standard error.

    Attributes:
        mean_error: Largest error of a mean, in standard deviations.
        mean_se: Standard error of that estimate.
        stddev_error: Largest relative error of a standard deviation.
        stddev_se: Standard error of that estimate.
        propagated: Whether moments of the errors were propagated through a network, as with ``FactoredMoments.of``; an
            estimator averages over points instead.
        decided: Whether the number of draws suffices to detect an error of 0.05 standard deviations everywhere.
        passed: Whether every error is below 0.05 plus what sampling explains.
    """

    mean_error: float
    mean_se: float
    stddev_error: float
    stddev_se: float
    propagated: bool
    decided: bool
    passed: bool

    def words(self) -> str:
        """Return the finding in one or two sentences."""
        found = f"{self.mean_error:.3f} standard deviations in a mean, {self.stddev_error:.1%} in a standard deviation"
        if self.passed:
            start = "Predictions with errors of the features agree with averaging over random inputs: the largest"
            unsure = "" if self.decided else " The draws are too few to be sure; more draws tell more."
            return f"{start} differences are {found}.{unsure}"
        why = (
            " Propagated moments are not meant to be: MP-GELU keeps a unit by its mean and variance, so that noise of "
            "the inputs changes the function. MPGELURegressor averages, by input_std."
        ) * self.propagated
        return f"Predictions with errors of the features are not the average over such inputs, by up to {found}.{why}"

    def __str__(self) -> str:
        """Return the finding as one line of the table."""
        return (
            f"errors of the features: mean {self.mean_error:.4f} ± {self.mean_se:.4f}, "
            f"stddev {self.stddev_error:.4f} ± {self.stddev_se:.4f}  {self.verdict}"
        )


def audit_inputs(
    stated: MeanAndVariance,
    predict: Callable[[Tensor], MeanAndVariance],
    x: Tensor,
    input_std: Tensor,
    *,
    draws: int,
    seed: int,
    propagated: bool,
) -> InputAudit:
    r"""Compare stated moments with averages over :math:`x + s z`, z standard normal.

    .. math:: \text{mean} = \mathbb E\, \mu(x + s z), \qquad
        \text{variance} = \mathbb E \big[ v(x + s z) + (\mu(x + s z) - \text{mean})^2 \big]

    Args:
        stated: Mean and variance, ``(rows, units)``, that a model predicts for x with its errors.
        predict: Function to mean and variance, ``(inputs, units)``, that the model predicts for known features.
        x: Recorded features, ``(rows, n)``.
        input_std: Standard deviation s of the error of each entry, ``(rows, n)``.
        draws: Number of random inputs for each row.
        seed: Seed of the draws.
        propagated: See :class:`InputAudit`.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    sampled = []
    for row, errors in zip(x, input_std, strict=True):
        noise = torch.randn(draws, len(row), generator=generator, dtype=x.dtype, device=x.device)
        parts = [predict(inputs) for inputs in (row + errors * noise).split(_AT_ONCE)]
        sampled.append(_sampled(*(torch.cat(part).double() for part in zip(*parts, strict=True))))
    mean, variance, mean_se, variance_se = (torch.stack(part) for part in zip(*sampled, strict=True))
    random = variance > 0
    scale = torch.where(random, variance, 1).sqrt()
    errors_of_mean, mean_se = (stated[0].double() - mean).abs() / scale, mean_se / scale
    ratio = (stated[1].double() / scale.square()).sqrt()
    errors_of_stddev = torch.where(random, (ratio - 1).abs(), ratio)
    stddev_se = variance_se / (2 * scale.square())
    critical = -float(ndtri(_FALSE_ALARM / 2 / (2 * mean.numel())))
    return InputAudit(
        *_worst(errors_of_mean, mean_se, critical),
        *_worst(errors_of_stddev, stddev_se, critical),
        propagated=propagated,
        decided=bool((critical * torch.maximum(mean_se, stddev_se) <= ALLOWED).all()),
        passed=bool(
            (errors_of_mean <= ALLOWED + critical * mean_se).all()
            and (errors_of_stddev <= ALLOWED + critical * stddev_se).all()
        ),
    )


def _sampled(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean and variance ``(units,)`` over draws ``(draws, units)``, and the standard errors of both."""
    mean = means.mean(0)
    squares = (means - mean).square() + variances
    root = len(means) ** 0.5
    return mean, squares.mean(0), means.std(0) / root, squares.std(0) / root


def _worst(errors: Tensor, se: Tensor, critical: float) -> tuple[float, float]:
    """Return error and standard error of the entry that exceeds its sampling error most."""
    place = int((errors - critical * se).argmax())
    return errors.flatten()[place].item(), se.flatten()[place].item()
