"""Gaussian noise with a share of wider errors and a share of errors of a fixed background variance."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.likelihoods.base import likelihoods
from mpgelu.likelihoods.heteroscedastic import HeteroscedasticGaussian
from mpgelu.moments import Moments
from mpgelu.predictive import Predictive
from mpgelu.rules import add


@likelihoods.register("tail_share", "tail_width", "background_share", "background_variance")
class HeavyTailedGaussian(HeteroscedasticGaussian):
    r"""Two outputs, mean and log-variance of the target, with noise that is a mixture of three Gaussians.

    .. math:: y \mid h \sim (1 - \pi - \beta)\, N(h_1, e^{h_2}) + \pi\, N(h_1, r^2 e^{h_2})
        + \beta\, N(h_1, e^{h_2} + b^2)

    The second component has r times the standard deviation of the first. The third, the background, bounds the density
    of outliers from below.

    Args:
        tail_share: Weight :math:`\pi \ge 0` of the wide errors.
        tail_width: Ratio r, at least one.
        background_share: Weight :math:`\beta \ge 0` of the background; both weights sum to less than one.
        background_variance: Variance :math:`b^2 \ge 0` that the background adds.

    Raises:
        InputError: An argument is outside its range.
    """

    def __init__(
        self,
        tail_share: float = 0.05,
        tail_width: float = 3.0,
        background_share: float = 0.0,
        background_variance: float = 0.0,
    ) -> None:
        super().__init__()
        shares = tail_share, background_share
        if not (min(shares) >= 0 and sum(shares) < 1 and 1 <= tail_width < math.inf and background_variance >= 0):
            raise InputError(
                "HeavyTailedGaussian: wants shares that are not negative and sum to less than one, a tail_width of at "
                f"least 1 and a background_variance that is not negative, got {tail_share}, {background_share}, "
                f"{tail_width} and {background_variance}"
            )
        self.tail_share, self.tail_width = float(tail_share), float(tail_width)
        self.background_share, self.background_variance = float(background_share), float(background_variance)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Weights of the usual, the wide and the background errors."""
        return 1 - self.tail_share - self.background_share, self.tail_share, self.background_share

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""Return a lower bound of the expectation of :math:`\log p(y \mid h)`, ``(*batch,)``.

        By Jensen's inequality, the average of the bounds of usual and wide errors with their prior weights. It is
        exact if the weight of wide errors is zero. The background has no part in training.

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``.
            y: Targets, ``(*batch,)``.
        """
        usual = super().expected_log_prob(moments, y)
        if not self.tail_share:
            return usual
        return (1 - self.tail_share) * usual + self.tail_share * super().expected_log_prob(self._wider(moments), y)

    def predictive(self, moments: Moments | Tensor, nodes: int = 32) -> Predictive:
        """Return the distribution of y: the mixture of all errors, each itself a mixture over the log-variance.

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``.
            nodes: Number of mixture components of each kind of errors.
        """
        usual = super().predictive(moments, nodes)
        parts = [usual]
        if self.tail_share:
            parts.append(super().predictive(self._wider(moments), nodes))
        if self.background_share:
            variances = usual.variances + self.background_variance
            aleatoric = usual.aleatoric_variance + self.background_variance
            parts.append(replace(usual, variances=variances, aleatoric_variance=aleatoric))
        shares = [share for share in self.shares if share]
        return Predictive.mixture(parts, usual.mean.new_tensor(shares)) if len(parts) > 1 else usual

    def noise(self, moments: Moments | Tensor) -> Tensor:
        r"""Return the expected variance of the noise, :math:`(1 - \pi + \pi r^2)\, e^{\mu_2 + S_{22}/2} + \beta b^2`."""
        widths = 1 - self.tail_share + self.tail_share * self.tail_width**2
        return super().noise(moments) * widths + self.background_share * self.background_variance

    def gaussians(self, log_variance: Tensor, known: bool) -> list[tuple[float, Tensor]] | None:
        """Return usual, wide and background errors; the latter are Gaussian only if the log-variance is known."""
        if self.background_share and not known:
            return None
        wide = log_variance + 2 * math.log(self.tail_width)
        background = torch.log(log_variance.exp() + self.background_variance)
        each = zip(self.shares, (log_variance, wide, background), strict=True)
        return [(share, noise) for share, noise in each if share]

    def _wider(self, moments: Moments | Tensor) -> Moments | Tensor:
        """Return the same outputs with the log-variance of the wide errors."""
        mean = moments if isinstance(moments, Tensor) else moments.mean
        shift = torch.stack([mean.new_zeros(()), mean.new_tensor(2 * math.log(self.tail_width))])
        wider: Moments | Tensor = add(moments, shift.expand_as(mean))
        return wider
