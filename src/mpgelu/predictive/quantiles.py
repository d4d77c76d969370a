r"""Quantiles of one-dimensional Gaussian mixtures, accurate to rounding.

The equation :math:`F(y) = q` is solved on the scale :math:`g = \operatorname{erf}^{-1}(2 F - 1)`, on which the
distribution function of a Gaussian is a straight line, by Halley's method with bisection as a safeguard. Traced code
cannot iterate to convergence; it bisects the floating-point numbers instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpgelu import native
from mpgelu.native.mixture import mixture_quantiles
from mpgelu.rules import normal

_ELEMENTS_AT_ONCE = 131072  # temporaries of this size stay in the cache of a CPU
_FREE_STEPS = 8  # steps after which every second one is a bisection
_MOST_STEPS = _FREE_STEPS + 2 * 64  # bisections alone find a root among all float64 numbers in 64 steps
_STEP_ERROR = 1e-12  # largest error of a root after its last step, in standard deviations
_TINY = 1e-3  # tail probabilities below which relative precision is needed
_POINTS = 8  # points that represent a component in the search for an initial value


def quantiles(
    means: Tensor, variances: Tensor, log_weights: Tensor, mean: Tensor, stddev: Tensor, q: Tensor, tolerance: float
) -> Tensor:
    """Return the solutions y of F(y) = q for each mixture, to rounding. Eager mode only: iterates to convergence.

    The compiled kernel takes the same steps in double precision, and leaves to this module what it does not find.

    Args:
        means: Means of the components, ``(*batch, K)``.
        variances: Variances of the components, ``(*batch, K)``.
        log_weights: Logarithms of their weights, ``(K,)`` or ``(*batch, K)``.
        mean: Mean of each mixture, ``(*batch,)``.
        stddev: Standard deviation of each mixture, ``(*batch,)``.
        q: Probabilities, ``()`` or ``(n,)``.
        tolerance: Largest error of F(y) that is accepted; 0 asks for rounding error.

    Returns:
        ``(*batch, *q.shape)``, of the dtype of q.
    """
    shape, values = means.shape[:-1] + q.shape, tuple(q.reshape(-1).tolist())
    tiny = not all(_TINY <= value <= 1 - _TINY for value in values)
    count = means.shape[-1]
    parts = [x if x.dim() == 2 else x.reshape(-1, count) for x in (means, variances, log_weights.double().softmax(-1))]
    mixture = [*parts, mean.reshape(-1, 1), stddev.reshape(-1, 1)]
    if tiny or not means.is_cpu or not native.available():
        found = _iterated(mixture, _Levels.of(q.double(), tiny), tolerance)
        return torch.where((q > 0) & (q < 1), found.to(q.dtype).reshape(shape), torch.special.ndtri(q))
    found = mixture_quantiles([x.double() for x in mixture], *_with_standard(values))
    if np.isnan(found.numpy()).any():  # its check of a few numbers is shorter than that of torch
        missing = found.isnan().any(-1)
        rest = [x if len(x) < len(missing) else x[missing] for x in mixture]
        found[missing] = _iterated(rest, _Levels.of(q.double(), tiny), tolerance)
    return found.to(q.dtype).reshape(shape)


@lru_cache(maxsize=64)
def _with_standard(values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return probabilities and their standard normal quantiles, float64 on the CPU; cached, must not be modified."""
    q = torch.tensor(values, dtype=torch.float64, device="cpu")
    return q, torch.special.ndtri(q)


def _iterated(mixture: Sequence[Tensor], levels: _Levels, tolerance: float) -> Tensor:
    """Return the quantiles ``(rows, levels)``, float64, in chunks of rows that fit the cache.

    Args:
        mixture: Means and variances ``(rows, K)``, weights ``(1, K)`` or ``(rows, K)``, mean and standard deviation
            ``(rows, 1)``.
        levels: Probabilities.
        tolerance: Largest error of F(y) that is accepted.
    """
    means, variances, weights, mean, stddev = mixture
    size, shared = max(1, _ELEMENTS_AT_ONCE // (means.shape[-1] * len(levels.sign))), len(weights) < len(means)
    roots = []
    for start in range(0, max(1, len(means)), size):
        rows = slice(start, start + size)
        some = _Mixture.of(means[rows].double(), variances[rows], weights[0] if shared else weights[rows])
        roots.append(_quantiles(some, mean[rows].double(), stddev[rows].double(), levels, tolerance))
    return torch.cat(roots)


def bisected(means: Tensor, variances: Tensor, log_weights: Tensor, q: Tensor) -> Tensor:
    """Return the quantiles without branches on values, for tracing and transforms, by bisection.

    The interval of all floating-point numbers is halved until one number is left: as many steps as the dtype has bits.
    The equation is the same as in :func:`quantiles`, :meth:`_Mixture.excess`, in the dtype of the mixture.

    Args:
        means: Means of the components, ``(*batch, K)``.
        variances: Variances of the components, ``(*batch, K)``.
        log_weights: Logarithms of their weights, ``(K,)`` or ``(*batch, K)``.
        q: Probabilities, ``()`` or ``(n,)``.

    Returns:
        ``(*batch, *q.shape)``.
    """
    shape, levels, weights = means.shape[:-1] + q.shape, _Levels.of(q, tiny=True), log_weights.softmax(-1)
    means, variances = (x.reshape(-1, x.shape[-1]) for x in (means, variances))
    mixture = _Mixture.of(means, variances, weights if weights.dim() == 1 else weights.reshape(means.shape))
    upper = torch.full_like(means[:, :1] + levels.target, math.inf)  # (rows, levels)
    lower, largest = -upper, torch.finfo(q.dtype).max
    for _ in range(8 * q.dtype.itemsize):
        y = _between(lower, upper).clamp(-largest, largest)
        excess = mixture.excess(mixture.ratios(y), levels)[0]
        lower, upper = torch.where(excess < 0, y, lower), torch.where(excess < 0, upper, y)
    root = torch.where(upper.abs() < largest, upper, 2 * upper)
    return torch.where(excess.isnan(), excess, root).reshape(shape)


class _Levels(NamedTuple):
    """Probabilities q in the form that the solver uses, ``(levels,)`` each.

    Attributes:
        q: The probabilities.
        sign: 1 for q up to one half, otherwise -1.
        target: The value that :meth:`_Mixture.excess` subtracts: 2 q - 1, or for ``tiny`` the smaller of q and 1 - q
            times the sign.
        standard: Quantiles of the standard normal distribution divided by sqrt(2).
        tiny: Whether tail probabilities are computed by erfc, with full relative precision. Otherwise erf is used, in
            half the time, but 2 q - 1 loses the digits of small tails.
    """

    q: Tensor
    sign: Tensor
    target: Tensor
    standard: Tensor
    tiny: bool

    @staticmethod
    def of(q: Tensor, tiny: bool) -> _Levels:
        """Return the form of probabilities ``()`` or ``(levels,)``, in their dtype."""
        q = q.reshape(-1)
        tail, sign = torch.minimum(q, 1 - q), 1 - 2 * (q > 0.5).to(q)
        return _Levels(q, sign, sign * tail if tiny else 2 * q - 1, sign * _standard(tail), tiny)

    def single(self) -> _Levels:
        """Return the levels in single precision."""
        return _Levels(self.q.float(), self.sign.float(), self.target.float(), self.standard.float(), self.tiny)


class _Mixture(NamedTuple):
    """Some rows of a mixture in the form that the solver uses.

    Attributes:
        means: Means of the components, ``(rows, 1, K)``.
        scales: 1 / (sqrt(2) stddev) of the components, ``(rows, 1, K)``.
        weights: Weights of the components, ``(K,)`` or ``(rows, 1, K)``, summing to one.
        log_weights: Logarithms of the weights.
    """

    means: Tensor
    scales: Tensor
    weights: Tensor
    log_weights: Tensor

    @staticmethod
    def of(means: Tensor, variances: Tensor, weights: Tensor) -> _Mixture:
        """Return the form of rows ``(rows, K)``, in the dtype of the means; zero variances become the smallest ones."""
        variances = variances.clamp_min(normal.smallest_variance(variances.dtype)).to(means.dtype)
        weights = weights if weights.dim() == 1 else weights[:, None]
        return _Mixture(means[:, None], variances.rsqrt()[:, None] * math.sqrt(0.5), weights, weights.log())

    def take(self, rows: Tensor | slice) -> _Mixture:
        """Return the rows at an index."""
        return _Mixture(*(x[rows] if x.dim() > 1 else x for x in self))

    def standardised(self, mean: Tensor, stddev: Tensor) -> _Mixture:
        """Return the distribution of (y - mean) / stddev, for ``(rows, 1)`` each, in single precision."""
        means = (self.means - mean[..., None]).div_(stddev[..., None]).float()
        return _Mixture(
            means, (self.scales * stddev[..., None]).float(), self.weights.float(), self.log_weights.float()
        )

    def rough_quantiles(self, levels: _Levels) -> Tensor:
        """Return initial values ``(rows, levels)``: quantiles of the discrete distribution of 8 points per component.

        They are near the solution for components of any width.
        """
        shares = (torch.arange(_POINTS, dtype=self.means.dtype, device=self.means.device) + 0.5) / _POINTS
        points = (self.means + _standard(shares)[:, None] / self.scales).flatten(1)  # component k is k, k + K, ...
        points, order = points.sort(-1)
        weights = self.weights.expand_as(self.means).flatten(1).gather(-1, order % self.means.shape[-1])
        below = levels.q.expand(len(points), -1).contiguous()
        places = torch.searchsorted(weights.cumsum(-1) / _POINTS, below).clamp_max_(points.shape[-1] - 1)
        return points.gather(-1, places)

    def ratios(self, y: Tensor) -> Tensor:
        """Return the standardised distances a of y ``(rows, levels)`` from the components, ``(rows, levels, K)``."""
        return (y[..., None] - self.means).mul_(self.scales)

    def excess(self, a: Tensor, levels: _Levels) -> tuple[Tensor, Tensor]:
        r"""Return the difference of the cdf from q, and :math:`g = \operatorname{erf}^{-1}(2 F - 1)`.

        The difference has the scale of ``levels``: 2 (F - q), or for ``tiny`` the difference F - q of the smaller
        tails.

        Args:
            a: Standardised distances, ``(rows, levels, K)``.
            levels: The probabilities.
        """
        if levels.tiny:
            tail = self._average(normal.cdf(a * (levels.sign * math.sqrt(2))[:, None]))
            return levels.sign * tail - levels.target, levels.sign * _standard(tail)
        erf = self._average(torch.erf(a))
        return erf - levels.target, erf.erfinv()

    def halley(self, y: Tensor, levels: _Levels) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the excess of the cdf at y, Halley's steps, and slopes g', ``(rows, levels)`` each.

        The next iterate is y minus the step. With the weights w, means m and scales s of the components:

        .. math:: g = \operatorname{erf}^{-1}(2 F - 1), \qquad g' = D e^{g^2}, \qquad
            D = \sum_k w_k s_k e^{-a_k^2}, \qquad a_k = s_k (y - m_k)

        .. math:: d = \frac{g - g_q}{g'}, \qquad \text{step} = \frac{d}{1 - d\, g'' / (2 g')}, \qquad
            \frac{g''}{2 g'} = g g' - \frac1D \sum_k w_k s_k^2 a_k e^{-a_k^2}
        """
        bound, least = (8.0, 1e-27) if y.dtype == torch.float32 else (25.0, 1e-270)
        a = self.ratios(y).clamp_(-bound, bound)  # keeps out of the denormal range, where a CPU is slow
        excess, g = self.excess(a, levels)
        terms = torch.threshold_(torch.addcmul(self.log_weights, a, a, value=-1).exp_(), least, 0).mul_(self.scales)
        density = terms.sum(-1)
        bend = a.mul_(terms).mul_(self.scales).sum(-1).div_(density)
        slope = density * g.square().exp_()
        d = (g - levels.standard).div_(slope)
        return excess, d / torch.addcmul(bend, g, slope, value=-1).mul_(d).add_(1).clamp_(0.5, 2), slope

    def error_after(self, step: Tensor) -> Tensor:
        """Return the estimated error after a step d, :math:`|d| (d / s)^2` with the smallest standard deviation s."""
        widths = math.sqrt(0.5) / self.scales.amax(-1)
        return step.abs() * (step / widths).square()

    def _average(self, values: Tensor) -> Tensor:
        """Return the weighted average over the components, ``(rows, levels)``."""
        return torch.matmul(values, self.weights) if self.weights.dim() == 1 else (values * self.weights).sum(-1)


def _quantiles(mixture: _Mixture, mean: Tensor, stddev: Tensor, levels: _Levels, tolerance: float) -> Tensor:
    """Return the quantiles ``(rows, levels)`` of a mixture.

    Two steps in single precision, from the quantiles of the Gaussian of the same mean and variance, are so close that
    for most rows one step in double precision is exact. Rows that have not converged start again from
    :meth:`_Mixture.rough_quantiles`.

    Args:
        mixture: The mixture, in double precision.
        mean: Means, ``(rows, 1)``.
        stddev: Standard deviations, ``(rows, 1)``.
        levels: The probabilities.
        tolerance: Largest accepted error of the cdf.
    """
    standard, single = mixture.standardised(mean, stddev), levels.single()
    z = (single.standard * math.sqrt(2)).expand(len(mean), -1)
    for _ in range(2):
        _, step, slope = standard.halley(z, single)
        z = z - step.clamp(-1, 1)
    y = mean + stddev * z
    rounding = torch.finfo(z.dtype).eps * z.abs()
    settled = (slope * (standard.error_after(step) + rounding) < tolerance).all(-1)
    if not settled.all():
        rest = ~settled if settled.any() else slice(None)
        y[rest], settled[rest] = _solved(mixture.take(rest), y[rest], levels, 3)
    if not settled.all():
        chosen = mixture.take(~settled)
        y[~settled], _ = _solved(chosen, chosen.rough_quantiles(levels), levels, _MOST_STEPS)
    return y


def _solved(mixture: _Mixture, y: Tensor, levels: _Levels, most: int) -> tuple[Tensor, Tensor]:
    """Return quantiles ``(rows, levels)`` by Halley's method with bisection, and which rows have converged.

    A quantile has converged if the estimated error of its last step is small, or if its bounds are adjacent numbers. If
    a step is below rounding error, it has converged only if the cdf crosses q between y and the neighbouring numbers,
    because near a point mass steps are short away from the quantile, too. Steps beyond the bounds, and every second
    step after the first eight, are replaced by bisections. Initial values that are not finite are returned.

    Args:
        mixture: The mixture, in double precision.
        y: Initial values, ``(rows, levels)``.
        levels: The probabilities.
        most: Largest number of steps.
    """
    found, settled, left = y.clone(), torch.zeros_like(y[:, 0], dtype=torch.bool), torch.arange(len(y), device=y.device)
    lower, upper = torch.full_like(y, -math.inf), torch.full_like(y, math.inf)
    done = ~y.isfinite()
    for number in range(most):
        going = ~done.all(-1)
        if not going.any():
            break
        if not going.all():
            mixture = mixture.take(going)
            y, lower, upper, done, left = (x[going] for x in (y, lower, upper, done, left))
        excess, step, slope = mixture.halley(y, levels)
        following = y - step
        lower, upper = torch.where(excess < 0, y, lower), torch.where(excess < 0, upper, y)
        short, rounding = slope * mixture.error_after(step) <= _STEP_ERROR, 2 * torch.finfo(y.dtype).eps * y.abs()
        stuck = ~short & (step.abs() <= rounding)
        if stuck.any():
            beyond = y - torch.copysign(rounding, step)
            crossed = (mixture.excess(mixture.ratios(beyond), levels)[0] < 0) != (excess < 0)
            short |= stuck & crossed
            following = torch.where(stuck & ~crossed, beyond, following)
        free = (lower <= following) & (following <= upper) & (number < _FREE_STEPS or number % 2 == 0)
        reached = done | (free & short)
        if not reached.all():
            middle = _between(lower, upper)
            closed = (middle == lower) | (middle == upper)
            following = torch.where(free, following, torch.where(closed, upper, middle))
            following = torch.where(excess.isnan(), excess, following)
            reached |= closed | excess.isnan()
        y, done = torch.where(done, y, following), reached
        found[left], settled[left] = y, done.all(-1) & y.isfinite().all(-1)
    return found, settled


def _between(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the midpoint in the order of floating-point numbers, so that bisection takes one step per bit."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[lower.dtype.itemsize]
    a, b = _ordered(lower.view(integer)), _ordered(upper.view(integer))
    return _ordered((a >> 1) + (b >> 1) + (a & b & 1)).view(lower.dtype)


def _ordered(bits: Tensor) -> Tensor:
    """Return integers in the order of floating-point numbers, from their bits; the map is its own inverse."""
    largest = torch.iinfo(bits.dtype).max
    return bits ^ ((bits >> largest.bit_length()) & largest)


def _standard(q: Tensor) -> Tensor:
    """Return quantiles of the standard normal distribution divided by sqrt(2), that is erfinv(2 q - 1)."""
    quantiles: Tensor = torch.special.ndtri(q)
    return quantiles * math.sqrt(0.5)
