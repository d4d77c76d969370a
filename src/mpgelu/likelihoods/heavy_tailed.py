"""Gaussian noise with a share of wider, possibly offset errors and a share of errors of a fixed background variance."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.likelihoods.base import NoisePart, likelihoods
from mpgelu.likelihoods.heteroscedastic import HeteroscedasticGaussian
from mpgelu.likelihoods.outputs import MeanAndLogVariance, as_moments, check_target
from mpgelu.moments import Moments
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import NODES, normal_nodes
from mpgelu.rules import add


@likelihoods.register("tail_share", "tail_width", "background_share", "background_variance", "tail_offset")
class HeavyTailedGaussian(HeteroscedasticGaussian):
    r"""Two outputs, mean and log-variance of the target, with noise that is a mixture of three Gaussians.

    .. math:: y \mid h \sim (1 - \pi - \beta)\, N(h_1 - u \sigma, \sigma^2) + \pi\, N(h_1 + t \sigma, r^2 \sigma^2)
        + \beta\, N(h_1, \sigma^2 + b^2), \qquad \sigma^2 = e^{h_2}, \qquad (1 - \pi - \beta)\, u = \pi t

    The second component has r times the standard deviation of the first. An offset t makes the noise skewed: wide
    errors lie to one side of the usual ones, and the mean stays :math:`h_1`. The third component, the background,
    bounds the density of outliers from below.

    Args:
        tail_share: Weight :math:`\pi \ge 0` of the wide errors.
        tail_width: Ratio r, at least one.
        background_share: Weight :math:`\beta \ge 0` of the background; both weights sum to less than one.
        background_variance: Variance :math:`b^2 \ge 0` that the background adds.
        tail_offset: Offset t of the wide errors, in standard deviations of the usual ones.

    Raises:
        InputError: An argument is outside its range.
    """

    def __init__(
        self,
        tail_share: float = 0.05,
        tail_width: float = 3.0,
        background_share: float = 0.0,
        background_variance: float = 0.0,
        tail_offset: float = 0.0,
    ) -> None:
        super().__init__()
        shares = tail_share, background_share
        allowed = min(shares) >= 0 and sum(shares) < 1 and 1 <= tail_width < math.inf and background_variance >= 0
        if not (allowed and math.isfinite(tail_offset)):
            raise InputError(
                "HeavyTailedGaussian: wants shares that are not negative and sum to less than one, a tail_width of at "
                "least 1, a background_variance that is not negative and a finite tail_offset, got "
                f"{tail_share}, {background_share}, {tail_width}, {background_variance} and {tail_offset}"
            )
        self.tail_share, self.tail_width = float(tail_share), float(tail_width)
        self.background_share, self.background_variance = float(background_share), float(background_variance)
        self.tail_offset = float(tail_offset)

    @property
    def shares(self) -> tuple[float, float, float]:
        """Weights of the usual, the wide and the background errors."""
        return 1 - self.tail_share - self.background_share, self.tail_share, self.background_share

    @property
    def offsets(self) -> tuple[float, float]:
        """Offsets of the usual and the wide errors, in standard deviations of the usual ones; their mean is zero."""
        usual, wide, _ = self.shares
        return -wide / usual * self.tail_offset, self.tail_offset

    @property
    def variance_ratio(self) -> float:
        """Variance of all errors relative to that of the usual ones, without the variance the background adds."""
        (usual, wide, rest), (of_usual, of_wide) = self.shares, self.offsets
        return usual * (1 + of_usual**2) + wide * (self.tail_width**2 + of_wide**2) + rest

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""Return a lower bound of the expectation of :math:`\log p(y \mid h)`, ``(*batch,)``.

        By Jensen's inequality, the average of the bounds of usual and wide errors with their prior weights. It is
        exact if the weight of wide errors is zero. The background has no part in training.

        .. math:: \mathrm E \log N(y; h_1 + t\sigma, r^2\sigma^2) = \mathrm E \log N(y; h_1, r^2\sigma^2)
            + \frac{t}{r^2} (y - \mu_1 + S_{12}/2)\, e^{S_{22}/8 - \mu_2/2} - \frac{t^2}{2 r^2}

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``.
            y: Targets, ``(*batch,)``.
        """
        usual = super().expected_log_prob(moments, y)
        if not self.tail_share:
            return usual
        wide = super().expected_log_prob(self._wider(moments), y)
        if self.tail_offset:
            ratio = _expected_ratio(moments, y)
            of_usual, of_wide = self.offsets
            usual = usual + of_usual * ratio - of_usual**2 / 2
            wide = wide + (of_wide * ratio - of_wide**2 / 2) / self.tail_width**2
        return (1 - self.tail_share) * usual + self.tail_share * wide

    def predictive(self, moments: Moments | Tensor, nodes: int = NODES) -> Predictive:
        """Return the distribution of y: the mixture of all errors, each itself a mixture over the log-variance.

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``.
            nodes: Number of mixture components of each kind of errors.
        """
        usual = super().predictive(moments, nodes)
        parts = [usual]
        if self.tail_share:
            wide = super().predictive(self._wider(moments), nodes)
            parts = [usual, wide]
            if self.tail_offset:
                scales = _scales(moments, nodes)
                noise = usual.aleatoric_variance
                parts = [_moved(p, o * scales, o**2 * noise) for p, o in zip(parts, self.offsets, strict=True)]
        if self.background_share:
            variances = usual.variances + self.background_variance
            aleatoric = usual.aleatoric_variance + self.background_variance
            parts.append(replace(usual, variances=variances, aleatoric_variance=aleatoric))
        shares = [share for share in self.shares if share]
        return Predictive.mixture(parts, usual.mean.new_tensor(shares)) if len(parts) > 1 else usual

    def noise(self, moments: Moments | Tensor) -> Tensor:
        r"""Return the expected variance of the noise.

        .. math:: \big((1 - \pi - \beta)(1 + u^2) + \pi (r^2 + t^2) + \beta\big)\, e^{\mu_2 + S_{22}/2} + \beta b^2
        """
        return super().noise(moments) * self.variance_ratio + self.background_share * self.background_variance

    def gaussians(self, log_variance: Tensor, known: bool) -> list[NoisePart] | None:
        """Return the kinds of errors; an offset or a background is Gaussian only if the log-variance is known."""
        if (self.background_share or self.tail_offset) and not known:
            return None
        usual, wide, background = self.shares
        offsets: tuple[Tensor | None, ...] = (None, None)
        if wide and self.tail_offset:
            stddev = (log_variance / 2).exp()
            offsets = tuple(offset * stddev for offset in self.offsets)
        parts = [NoisePart(usual, log_variance, offsets[0])]
        if wide:
            parts.append(NoisePart(wide, log_variance + 2 * math.log(self.tail_width), offsets[1]))
        if background:
            parts.append(NoisePart(background, torch.log(log_variance.exp() + self.background_variance)))
        return parts

    def _wider(self, moments: Moments | Tensor) -> Moments | Tensor:
        """Return the same outputs with the log-variance of the wide errors."""
        mean = moments if isinstance(moments, Tensor) else moments.mean
        shift = torch.stack([mean.new_zeros(()), mean.new_tensor(2 * math.log(self.tail_width))])
        wider: Moments | Tensor = add(moments, shift.expand_as(mean))
        return wider


def _scales(moments: Moments | Tensor, nodes: int) -> Tensor:
    """Return the standard deviation of the noise in every component of a heteroscedastic Gaussian, ``(*batch, K)``."""
    if isinstance(moments, Tensor):
        return torch.exp(MeanAndLogVariance.of(moments).log_variance / 2)[..., None]
    log_variance, variance = (MeanAndLogVariance.of(part).log_variance for part in (moments.mean, moments.variance))
    z, _ = normal_nodes(nodes, log_variance)
    return torch.exp((log_variance[..., None] + variance.sqrt()[..., None] * z) / 2)


def _moved(part: Predictive, by: Tensor, variance: Tensor) -> Predictive:
    """Return a component of the noise with moved means; its mean stays that of the whole noise."""
    return replace(part, means=part.means + by, aleatoric_variance=part.aleatoric_variance + variance)


def _expected_ratio(moments: Moments | Tensor, y: Tensor) -> Tensor:
    r"""Return the expectation of :math:`(y - h_1) e^{-h_2/2}`, exact for Gaussian h, ``(*batch,)``."""
    moments = as_moments("HeavyTailedGaussian.expected_log_prob", moments, 2)
    check_target("HeavyTailedGaussian.expected_log_prob", moments, y)
    (mean, log_variance), covariance = MeanAndLogVariance.of(moments.mean), moments.covariance
    return (y - mean + covariance[..., 0, 1] / 2) * torch.exp(covariance[..., 1, 1] / 8 - log_variance / 2)
