"""The distribution of the target for each row, always held as a one-dimensional Gaussian mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mpgelu.errors import InputError
from mpgelu.rules import normal

# Temporaries of this size stay in the cache of a CPU, which makes large ensembles five times faster.
_ELEMENTS_AT_ONCE = 32768
_FREE_STEPS = 8  # of a root, before every second one is a bisection
_MOST_STEPS = _FREE_STEPS + 2 * 64  # until bisections alone have found it among all float64 numbers
_STEP_ERROR = 1e-12  # of a root after its last step, in standard deviations
_POINTS = 8  # that stand for a component where a first guess of a quantile is looked for
_INTEGRAL_ERROR = 1e-9  # of the expected distance of two draws, relative
_MANY = 128  # components, of which pairs are too many
_NODES = (24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)  # of their integral


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    r"""The distribution of y for each row, a mixture of K one-dimensional Gaussians.

    .. math:: p(y) = \sum_k w_k\, N(y;\ \text{means}_k,\ \text{variances}_k)

    Everything computed from the mixture is exact for it. The mean and the two variances are given by whoever builds
    it, because their closed forms are better than sums over components. A variance of zero is a point mass, held as
    the narrowest Gaussian that the dtype allows. Build one with ``gaussian``, ``heteroscedastic`` or ``mixture``.

    Args:
        means: of the components, ``(*batch, K)``.
        variances: of the components, ``(*batch, K)``.
        log_weights: logarithms of weights that sum to one, ``(K,)`` if all rows share them, else ``(*batch, K)``.
        mean: of y, ``(*batch,)``.
        epistemic_variance: what comes from not knowing the function, ``(*batch,)``.
        aleatoric_variance: expected variance of the noise, ``(*batch,)``.
    """

    means: Tensor
    variances: Tensor
    log_weights: Tensor
    mean: Tensor
    epistemic_variance: Tensor
    aleatoric_variance: Tensor

    def __post_init__(self) -> None:
        """Check shapes and dtypes; values are never looked at."""
        _check("Predictive", "means", self.means)
        if self.means.dim() == 0:
            raise InputError("Predictive: means must be (*batch, K), got a scalar; use means.reshape(1)")
        allowed = {"variances": [self.means.shape], "log_weights": [self.means.shape[-1:], self.means.shape]}
        for field in fields(self)[1:]:
            shapes = allowed.get(field.name, [self.batch_shape])
            _check("Predictive", field.name, getattr(self, field.name), self.means, *shapes)

    @staticmethod
    def gaussian(mean: Tensor, epistemic_variance: Tensor, aleatoric_variance: Tensor) -> Predictive:
        """One Gaussian for each row, whose variance is the sum of the two.

        Args:
            mean: of y, ``(*batch,)``.
            epistemic_variance: ``(*batch,)``, or ``()`` if the same for all rows.
            aleatoric_variance: ``(*batch,)``, or ``()`` if the same for all rows.
        """
        _check("Predictive.gaussian", "mean", mean)
        _check("Predictive.gaussian", "epistemic_variance", epistemic_variance, mean, mean.shape, ())
        _check("Predictive.gaussian", "aleatoric_variance", aleatoric_variance, mean, mean.shape, ())
        epistemic, aleatoric = epistemic_variance.expand(mean.shape), aleatoric_variance.expand(mean.shape)
        variances = (epistemic + aleatoric)[..., None]
        return Predictive(mean[..., None], variances, mean.new_zeros(1), mean, epistemic, aleatoric)

    @staticmethod
    def heteroscedastic(mean: Tensor, covariance: Tensor, nodes: int = 32) -> Predictive:
        r"""Predictive of :math:`y \mid h \sim N(h_1, e^{h_2})` with :math:`h \sim N(E, S)`.

        .. math:: p(y) = \int N\Big(y;\ E_1 + \frac{S_{12}}{S_{22}} (h_2 - E_2),\
            S_{11} - \frac{S_{12}^2}{S_{22}} + e^{h_2}\Big)\, N(h_2;\ E_2, S_{22})\, dh_2

        Mean :math:`E_1`, epistemic variance :math:`S_{11}` and aleatoric variance :math:`e^{E_2 + S_{22}/2}` are
        exact. The integral becomes a sum over nodes. 32 give the cdf, and the log density of the central 99.98 %, to
        1e-6 up to :math:`S_{22} = 1` and a correlation of 0.9 between the two outputs. Stronger correlation together
        with little noise makes narrow components that lie far apart and needs more nodes: 48 for 0.95, 96 for 0.99.

        Where :math:`S_{22} = 0` the noise variance is known, and :math:`S_{12}` and :math:`S_{22}` get no gradient.
        Where rounding makes the conditional variance negative it is set to zero and still passes its gradient on.

        Args:
            mean: E, ``(*batch, 2)``.
            covariance: S, ``(*batch, 2, 2)``, symmetric and positive semidefinite.
            nodes: number of components K, at least 2.
        """
        caller = "Predictive.heteroscedastic"
        _check(caller, "mean", mean)
        if mean.shape[-1:] != (2,):
            raise InputError(f"{caller}: mean must be (*batch, 2), got {tuple(mean.shape)}; use a two-output network")
        _check(caller, "covariance", covariance, mean, (*mean.shape, 2))
        if nodes < 2:
            raise InputError(f"{caller}: nodes must be at least 2, got {nodes}; leave it out for 32")
        mean1, mean2 = mean.unbind(-1)
        variance1, covariance12, variance2 = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
        uncertain = variance2 > 0
        stddev2 = torch.where(uncertain, variance2, 1.0).sqrt()
        slope = torch.where(uncertain, covariance12 / stddev2, 0.0)  # E[h1 | z] = E1 + slope z, h2 = E2 + stddev2 z
        conditional = variance1 - slope.square()
        conditional = conditional + (conditional.clamp_min(0) - conditional).detach()
        z, log_weights = _normal_nodes(nodes, mean)
        h2 = mean2[..., None] + torch.where(uncertain, stddev2, 0.0)[..., None] * z  # (*batch, K)
        return Predictive(
            means=mean1[..., None] + slope[..., None] * z,
            variances=conditional[..., None] + h2.exp(),
            log_weights=log_weights,
            mean=mean1,
            epistemic_variance=variance1,
            aleatoric_variance=(mean2 + variance2 / 2).exp(),
        )

    @staticmethod
    def mixture(members: Sequence[Predictive], weights: Tensor | None = None) -> Predictive:
        r"""Mixture of predictives, such as the members of an ensemble; exact.

        .. math:: \text{epistemic} = \sum_m w_m \big(\text{epistemic}_m + (\text{mean}_m - \text{mean})^2\big), \qquad
            \text{aleatoric} = \sum_m w_m\, \text{aleatoric}_m

        Args:
            members: M predictives for the same rows; their numbers of components may differ.
            weights: ``(M,)``, not negative, divided here by their sum; equal if left out.
        """
        caller = "Predictive.mixture"
        if not members:
            raise InputError(f"{caller}: members must not be empty; give at least one Predictive")
        first = members[0]
        for member in members:
            _check(caller, "the mean of every member", member.mean, first.mean, first.batch_shape)
        weights = first.mean.new_ones(len(members)) if weights is None else weights
        _check(caller, "weights", weights, first.mean, (len(members),))
        weights = weights / weights.sum()
        logs = [member.log_weights + log for member, log in zip(members, weights.log().unbind(), strict=True)]
        if any(log.dim() > 1 for log in logs):
            logs = [log.expand_as(member.means) for member, log in zip(members, logs, strict=True)]
        means = torch.stack([member.mean for member in members])  # (M, *batch)
        mean = torch.tensordot(weights, means, 1)
        epistemic = torch.stack([member.epistemic_variance for member in members]) + (means - mean).square()
        aleatoric = torch.stack([member.aleatoric_variance for member in members])
        return Predictive(
            means=torch.cat([member.means for member in members], -1),
            variances=torch.cat([member.variances for member in members], -1),
            log_weights=torch.cat(logs, -1),
            mean=mean,
            epistemic_variance=torch.tensordot(weights, epistemic, 1),
            aleatoric_variance=torch.tensordot(weights, aleatoric, 1),
        )

    @staticmethod
    def concatenate(parts: Sequence[Predictive]) -> Predictive:
        """Predictives of consecutive rows as one; their components must have the same weights."""
        if any(not torch.equal(part.log_weights, parts[0].log_weights) for part in parts[1:]):
            raise InputError("Predictive.concatenate: the parts must have components of the same weights")
        names = [field.name for field in fields(Predictive) if field.name != "log_weights"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Predictive(**joined, log_weights=parts[0].log_weights)

    def mixture_over(self, dim: int = 0, weights: Tensor | None = None) -> Predictive:
        """Mixture over one batch dimension, such as the models of a stacked ensemble; see ``mixture``."""
        dims = len(self.batch_shape)
        if not -dims <= dim < dims:
            raise InputError(f"mixture_over: dim must be one of the {dims} dimensions of the batch, got {dim}")
        dim, members = dim % dims, self.batch_shape[dim]
        weights = self.mean.new_ones(members) if weights is None else weights
        _check("mixture_over", "weights", weights, self.mean, (members,))
        weights = weights / weights.sum()
        each = weights.reshape(members, *[1] * (dims - dim - 1))  # broadcasts against the batch
        mean = (each * self.mean).sum(dim)
        spread = self.epistemic_variance + (self.mean - mean.unsqueeze(dim)).square()
        if self.log_weights.dim() == 1:
            log_weights = (weights.log()[:, None] + self.log_weights).flatten()
        else:
            log_weights = _joined(self.log_weights + each[..., None].log(), dim)
        return Predictive(
            means=_joined(self.means, dim),
            variances=_joined(self.variances, dim),
            log_weights=log_weights,
            mean=mean,
            epistemic_variance=(each * spread).sum(dim),
            aleatoric_variance=(each * self.aleatoric_variance).sum(dim),
        )

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions: one distribution for each index."""
        return self.means.shape[:-1]

    @property
    def variance(self) -> Tensor:
        """Variance of y, epistemic plus aleatoric, ``(*batch,)``."""
        return self.epistemic_variance + self.aleatoric_variance

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of y, ``(*batch,)``."""
        return self.variance.sqrt()

    def log_prob(self, y: Tensor | float) -> Tensor:
        """Logarithm of the density at y, which broadcasts against ``(*batch,)``."""
        errors = self._errors("log_prob", "y", y)
        _, stddevs = normal.standardise(errors, self.variances)
        log_densities = -0.5 * (errors / stddevs).square() - stddevs.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(self.log_weights + log_densities, -1)

    def cdf(self, y: Tensor | float) -> Tensor:
        """Probability of a target at or below y, which broadcasts against ``(*batch,)``."""
        a, _ = normal.standardise(self._errors("cdf", "y", y), self.variances)
        return (self.log_weights.exp() * normal.cdf(a)).sum(-1).clamp_max(1)  # weights sum to one up to rounding

    def probability_above(self, t: Tensor | float) -> Tensor:
        """Probability of a target above t, which broadcasts against ``(*batch,)``; keeps its digits when tiny."""
        a, _ = normal.standardise(self._errors("probability_above", "t", t), self.variances)
        return (self.log_weights.exp() * normal.cdf(-a)).sum(-1).clamp_max(1)

    def quantile(self, q: Tensor | float | Sequence[float], tolerance: float = 0.0) -> Tensor:
        r"""The y at which the cdf F is q.

        Found to rounding, whatever the widths of the components; infinite where components of infinite variance leave
        no finite y. First derivatives are those of the implicit function theorem,

        .. math:: dy = \frac{dq - dF(y)}{p(y)},

        and zero where the density underflows, in the empty space between components.

        Args:
            q: one probability, or n of them.
            tolerance: by how much F may miss q. 1e-5 allows single precision, which takes half the time; 0 does not.

        Returns:
            ``(*batch,)`` for one probability, ``(*batch, n)`` for n.
        """
        if isinstance(q, int | float) and not 0 < q < 1:
            raise InputError(f"quantile: q must lie strictly between 0 and 1, got {q}")
        q = self._tensor("quantile", "q", q)
        if q.dim() > 1:
            raise InputError(f"quantile: q must be one probability or a vector, got {tuple(q.shape)}; use q.flatten()")
        parts = (self.means, self.variances, self.log_weights, q)
        plain = _plain(*parts)
        with torch.no_grad():
            root = self._roots(q, tolerance) if plain else self._bisected(q)
        if plain and not _needs_gradient(*parts):
            return root
        rows = self if q.dim() == 0 else self[..., None]
        finite = torch.where(root.isfinite(), root, 0.0)
        residual = q - rows.cdf(finite)
        density = rows.log_prob(finite).exp().detach()
        density = torch.where(density > torch.finfo(density.dtype).tiny, density, math.inf)
        return root + (residual - residual.detach()) / density

    def interval(self, level: float = 0.9, tolerance: float = 0.0) -> tuple[Tensor, Tensor]:
        """Ends of the central interval that holds y with probability ``level``, each ``(*batch,)``.

        Args:
            level: strictly between 0 and 1.
            tolerance: as in :meth:`quantile`.
        """
        if not 0 < level < 1:
            raise InputError(f"interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2], tolerance).unbind(-1)
        return lower, upper

    def crps(self, y: Tensor | float) -> Tensor:
        r"""Continuous ranked probability score at y, smaller is better, in the unit of y.

        .. math:: \int (F(t) - [y \le t])^2\, dt = \mathbb E|Y - y| - \tfrac12\, \mathbb E|Y - Y'|

        Exact as a sum over pairs of components (Grimit et al., 2006). Hundreds of components, without gradients, take
        the integral of :math:`F (1 - F)` instead of the second term where its error is below 1e-8 of that term.

        Args:
            y: broadcasts against ``(*batch,)``.
        """
        distance = self.log_weights.softmax(-1) * _mean_absolute(self._errors("crps", "y", y), self.variances)
        distance = distance.sum(-1)
        return torch.where(distance.isinf(), distance, distance - 0.5 * self._mean_absolute_difference())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n independent values for each row, ``(n, *batch)``; without gradients."""
        shape = (*self.batch_shape, n)
        with torch.no_grad():
            uniform = torch.rand(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
            noise = torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
            component = torch.searchsorted(self.log_weights.exp().cumsum(-1), uniform, right=True)
            component = component.clamp_max(self.means.shape[-1] - 1)  # the weights may sum to a little less than one
            stddevs = self.variances.gather(-1, component).sqrt()
            return (self.means.gather(-1, component) + stddevs * noise).movedim(-1, 0)

    def matched(self) -> Predictive:
        """The single Gaussian of the same mean and variances: cheap, an approximation of the mixture."""
        return Predictive.gaussian(self.mean, self.epistemic_variance, self.aleatoric_variance)

    def affine(self, scale: Tensor | float, shift: Tensor | float) -> Predictive:
        """Distribution of ``scale * y + shift``, for example back in the unit of the data; exact.

        Args:
            scale: of either sign, ``()`` or ``(*batch,)``.
            shift: ``()`` or ``(*batch,)``.
        """
        scale = self._tensor("affine", "scale", scale, (), self.batch_shape)
        shift = self._tensor("affine", "shift", shift, (), self.batch_shape)
        return Predictive(
            means=self.means * scale[..., None] + shift[..., None],
            variances=self.variances * scale[..., None].square(),
            log_weights=self.log_weights,
            mean=self.mean * scale + shift,
            epistemic_variance=self.epistemic_variance * scale.square(),
            aleatoric_variance=self.aleatoric_variance * scale.square(),
        )

    def to(self, dtype: torch.dtype) -> Predictive:
        """The same in another floating-point precision."""
        return Predictive(**{field.name: getattr(self, field.name).to(dtype) for field in fields(self)})

    def __getitem__(self, index: Any) -> Predictive:
        """Rows chosen by any index into the batch dimensions."""
        rows = index if isinstance(index, tuple) else (index,)
        every = (*rows, slice(None))
        return Predictive(
            means=self.means[every],
            variances=self.variances[every],
            log_weights=self.log_weights[every] if self.log_weights.dim() > 1 else self.log_weights,
            mean=self.mean[rows],
            epistemic_variance=self.epistemic_variance[rows],
            aleatoric_variance=self.aleatoric_variance[rows],
        )

    def __repr__(self) -> str:
        """Shapes, never the numbers."""
        count, dtype = self.means.shape[-1], str(self.means.dtype).removeprefix("torch.")
        return f"Predictive(mean {tuple(self.mean.shape)}, {count} component{'s' * (count > 1)}, {dtype})"

    def _tensor(
        self, caller: str, argument: str, value: Tensor | float | Sequence[float], *shapes: Sequence[int]
    ) -> Tensor:
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=self.mean.dtype, device=self.mean.device)
        _check(caller, argument, value, self.mean, *shapes)
        return value

    def _errors(self, caller: str, argument: str, value: Tensor | float) -> Tensor:
        """Distance from every component's mean, ``(*broadcast, K)``."""
        value = self._tensor(caller, argument, value)
        shape, batch = tuple(value.shape), tuple(self.batch_shape)
        sizes = zip(shape[::-1], batch[::-1], strict=False)
        column = shape == (*batch, 1) and batch[-1:] > (1,)  # would compare every row with every other
        if column or not all(size == rows or 1 in (size, rows) for size, rows in sizes):
            fix = f"use {argument}.squeeze(-1)" if column else f"give one {argument} for each row, or a scalar"
            raise InputError(f"{caller}: {argument} must broadcast against the rows {batch}, got {shape}; {fix}")
        return value[..., None] - self.means

    def _roots(self, q: Tensor, tolerance: float) -> Tensor:
        """Quantiles ``(*batch, *q.shape)`` where numbers can be looked at: a few rows at a time, each until right."""
        count, shared, levels = self.means.shape[-1], self.log_weights.dim() == 1, _Levels.of(q)
        parts = (self.means, self.variances, self.log_weights, self.mean[..., None], self.stddev[..., None])
        means, variances, log_weights, mean, stddev = (x.reshape(-1, x.shape[-1]) for x in parts)
        weights, size = log_weights.double().softmax(-1), max(1, 4 * _ELEMENTS_AT_ONCE // (count * len(levels.sign)))
        roots = []
        for start in range(0, max(1, len(means)), size):
            rows = slice(start, start + size)
            mixture = _Mixture.of(means[rows], variances[rows], weights[0] if shared else weights[rows])
            roots.append(_quantiles(mixture, mean[rows].double(), stddev[rows].double(), levels, tolerance))
        found = torch.cat(roots).to(q.dtype).reshape(*self.batch_shape, *q.shape)
        return torch.where((q > 0) & (q < 1), found, torch.special.ndtri(q)) if levels.tiny else found

    def _bisected(self, q: Tensor) -> Tensor:
        """The same where numbers cannot be looked at: bisection until one floating-point number is left."""
        q, rows = q.detach(), self if q.dim() == 0 else self[..., None]
        means, variances, weights = rows.means.detach(), rows.variances.detach(), rows.log_weights.detach().softmax(-1)
        tail, sign = torch.minimum(q, 1 - q), 1 - 2 * (q > 0.5).to(q)  # the smaller tail keeps its digits
        upper = torch.full_like(means[..., 0] + q, math.inf)
        lower, largest = -upper, torch.finfo(q.dtype).max
        for _ in range(8 * q.dtype.itemsize):
            y = _between(lower, upper).clamp(-largest, largest)
            a, _ = normal.standardise(sign[..., None] * (y[..., None] - means), variances)
            excess = sign * ((weights * normal.cdf(a)).sum(-1) - tail)
            lower, upper = torch.where(excess < 0, y, lower), torch.where(excess < 0, upper, y)
        return torch.where(excess.isnan(), excess, torch.where(upper.abs() < largest, upper, 2 * upper))

    def _mean_absolute_difference(self) -> Tensor:
        """E|Y - Y'| of two independent draws, ``(*batch,)``, for a few rows at a time."""
        count, parts = self.means.shape[-1], (self.means, self.variances, self.log_weights)
        weights = self.log_weights.softmax(-1).expand_as(self.means)
        flat = (x.reshape(-1, count) for x in (self.means, self.variances, weights))
        if count < _MANY or not _plain(*parts) or _needs_gradient(*parts):
            return _paired_difference(*flat).reshape(self.batch_shape)
        chunks = zip(*(torch.split(x, max(1, 4 * _ELEMENTS_AT_ONCE // count)) for x in flat), strict=True)
        return torch.cat([_integrated_difference(*chunk) for chunk in chunks]).reshape(self.batch_shape)


class _Levels(NamedTuple):
    """Probabilities q in the form in which their quantiles are found.

    Args:
        erf: 2 q - 1, ``(levels,)``.
        tail: q or 1 - q, whichever is less, ``(levels,)``.
        sign: 1 where it is q, else -1, ``(levels,)``.
        standard: quantiles of the standard normal distribution divided by sqrt(2), ``(levels,)``.
        tiny: whether a tail is lost in 2 q - 1; it is kept by erfc, which takes twice the time of erf.
    """

    erf: Tensor
    tail: Tensor
    sign: Tensor
    standard: Tensor
    tiny: bool

    @staticmethod
    def of(q: Tensor) -> _Levels:
        """In double precision."""
        q = q.double().flatten()
        tail, sign = torch.minimum(q, 1 - q), 1 - 2 * (q > 0.5).to(q)
        return _Levels(2 * q - 1, tail, sign, sign * _standard(tail), bool(tail.min() < 1e-3))

    def single(self) -> _Levels:
        """In single precision."""
        return _Levels(self.erf.float(), self.tail.float(), self.sign.float(), self.standard.float(), self.tiny)


class _Mixture(NamedTuple):
    """Some rows of a mixture in the form in which quantiles are found.

    Args:
        means: of the components, ``(rows, 1, K)``.
        scales: 1 / (sqrt(2) stddev) of each, ``(rows, 1, K)``.
        weights: of the components, ``(K,)`` or ``(rows, 1, K)``; they sum to one.
        log_weights: their logarithms.
    """

    means: Tensor
    scales: Tensor
    weights: Tensor
    log_weights: Tensor

    @staticmethod
    def of(means: Tensor, variances: Tensor, weights: Tensor) -> _Mixture:
        """In double precision."""
        scales = variances.clamp_min(normal.smallest_variance(variances.dtype)).double().mul_(2).rsqrt_()
        weights = weights if weights.dim() == 1 else weights[:, None]
        return _Mixture(means.double()[:, None], scales[:, None], weights, weights.log())

    def take(self, rows: Tensor | slice) -> _Mixture:
        """Rows chosen by any index."""
        return _Mixture(*(x[rows] if x.dim() > 1 else x for x in self))

    def standardised(self, mean: Tensor, stddev: Tensor) -> _Mixture:
        """Distribution of (y - mean) / stddev, both ``(rows, 1)``, in single precision."""
        means = (self.means - mean[..., None]).div_(stddev[..., None]).float()
        return _Mixture(
            means, (self.scales * stddev[..., None]).float(), self.weights.float(), self.log_weights.float()
        )

    def rough_quantiles(self, levels: _Levels) -> Tensor:
        """Quantiles ``(rows, levels)`` if every component were a few points: no component is too narrow to be found."""
        shares = (torch.arange(_POINTS).to(self.means) + 0.5) / _POINTS
        points = (self.means + _standard(shares)[:, None] / self.scales).flatten(1)  # component k is k, k + K, ...
        points, order = points.sort(-1)
        weights = self.weights.expand_as(self.means).flatten(1).gather(-1, order % self.means.shape[-1])
        below = (0.5 + 0.5 * levels.erf).expand(len(points), -1).contiguous()
        places = torch.searchsorted(weights.cumsum(-1) / _POINTS, below).clamp_max_(points.shape[-1] - 1)
        return points.gather(-1, places)

    def halley(self, y: Tensor, levels: _Levels) -> tuple[Tensor, Tensor, Tensor]:
        r"""Excess of the cdf at y, Halley's steps from the quantiles to y, and slopes g', each ``(rows, levels)``.

        The step is one on the scale where the cdf of a Gaussian is a straight line.

        .. math:: g = \operatorname{erf}^{-1}(2 F - 1), \qquad g' = D e^{g^2}, \qquad
            D = \sum_k w_k s_k e^{-a_k^2}, \qquad a_k = s_k (y - m_k)

        .. math:: d = \frac{g - g_q}{g'}, \qquad \text{step} = \frac{d}{1 - d\, g'' / (2 g')}, \qquad
            \frac{g''}{2 g'} = g g' - \frac1D \sum_k w_k s_k^2 a_k e^{-a_k^2}
        """
        a = (y[..., None] - self.means).mul_(self.scales)
        bound, least = (8.0, 1e-27) if a.dtype == torch.float32 else (25.0, 1e-270)
        a.clamp_(-bound, bound)  # keeps out of the denormal range, where a CPU is slow
        if levels.tiny:
            tail = 0.5 * self._average(torch.erfc(a * -levels.sign[:, None]))
            excess, g = levels.sign * (tail - levels.tail), levels.sign * _standard(tail)
        else:
            erf = self._average(torch.erf(a))
            excess, g = erf - levels.erf, erf.erfinv()
        terms = torch.threshold_(torch.addcmul(self.log_weights, a, a, value=-1).exp_(), least, 0).mul_(self.scales)
        density = terms.sum(-1)
        bend = a.mul_(terms).mul_(self.scales).sum(-1).div_(density)
        slope = density * g.square().exp_()
        d = (g - levels.standard).div_(slope)
        return excess, d / torch.addcmul(bend, g, slope, value=-1).mul_(d).add_(1).clamp_(0.5, 2), slope

    def error_after(self, step: Tensor) -> Tensor:
        """What a step leaves of the error, at most about: so much as the narrowest component bends over it."""
        widths = math.sqrt(0.5) / self.scales.amax(-1)
        return step.abs() * (step / widths).square()

    def _average(self, values: Tensor) -> Tensor:
        return torch.matmul(values, self.weights) if self.weights.dim() == 1 else (values * self.weights).sum(-1)


def _quantiles(mixture: _Mixture, mean: Tensor, stddev: Tensor, levels: _Levels, tolerance: float) -> Tensor:
    """Quantiles ``(rows, levels)`` of a mixture whose mean and standard deviation are ``(rows, 1)``.

    Two steps from the Gaussian of the same moments, in single precision, end so close that one more in double
    precision is exact for most rows. What is then not settled starts again from a better place.
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
    """Quantiles ``(rows, levels)`` from a first guess y, and which rows are settled, after so many steps at most.

    A quantile is settled by a step so short that no component bends over it, or when its bounds have met. Steps that
    leave the bounds, and every second one after the first few, are bisections. A guess that is not finite stays.
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
        free = (lower <= following) & (following <= upper) & (number < _FREE_STEPS or number % 2 == 0)
        short = slope * mixture.error_after(step) <= _STEP_ERROR
        short |= step.abs() <= 2 * torch.finfo(y.dtype).eps * y.abs()
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
    """The number with as many floating-point numbers above ``lower`` as below ``upper``; both may be infinite."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[lower.dtype.itemsize]
    a, b = _ordered(lower.view(integer)), _ordered(upper.view(integer))
    return _ordered((a >> 1) + (b >> 1) + (a & b & 1)).view(lower.dtype)


def _ordered(bits: Tensor) -> Tensor:
    """Integers in the order of the numbers that these are the bits of, and back: negative ones run the other way."""
    largest = torch.iinfo(bits.dtype).max
    return bits ^ ((bits >> largest.bit_length()) & largest)


def _standard(q: Tensor) -> Tensor:
    """Quantiles of the standard normal distribution divided by sqrt(2), which is to erf what they are to the cdf."""
    quantiles: Tensor = torch.special.ndtri(q)
    return quantiles * math.sqrt(0.5)


def _plain(*tensors: Tensor) -> bool:
    """Whether numbers can be looked at: neither traced nor transformed, by torch.func or forward mode."""
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return not (torch.compiler.is_compiling() or transformed) and all(type(x) in (Tensor, Parameter) for x in tensors)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Components ``(*batch, K)`` of all members along one batch dimension side by side."""
    return parts.movedim(dim, -2).flatten(-2)


def _paired_difference(means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
    """E|Y - Y'| of two draws from mixtures ``(rows, K)``, for a few rows at a time.

    Each round pairs all components at one cyclic distance.
    """
    count = means.shape[-1]
    rows = max(1, _ELEMENTS_AT_ONCE // count)
    totals = []
    for m, v, w in zip(*(torch.split(x, rows) for x in (means, variances, weights)), strict=True):
        total = torch.zeros_like(m[..., 0])
        for distance in range(count // 2 + 1):
            absolute = _mean_absolute(m - m.roll(distance, -1), v + v.roll(distance, -1))
            meets_both_orders = distance == 0 or 2 * distance == count  # else it meets (k, l) and not (l, k)
            times = 1 if meets_both_orders else 2
            total = total + times * (w * w.roll(distance, -1) * absolute).sum(-1)
        totals.append(total)
    return torch.cat(totals)


def _integrated_difference(means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
    r"""The same by the trapezoidal rule in u, and by pairs for the rows that would need too many nodes.

    .. math:: \mathbb E|Y - Y'| = 2 \int F (1 - F)\, dt, \qquad t = c + b \sinh u

    Where the nodes lie d apart, a component of standard deviation s is wrong by about :math:`d\, e^{-(\pi s / d)^2}`
    times its weight. So the number of nodes that a row needs is known before any is computed.
    """
    means64, weights64 = means.double(), weights.double()
    weights64 = weights64 / weights64.sum(-1, keepdim=True)
    stddevs = normal.standardise(means, variances)[1].double()
    narrow = weights64 / stddevs
    b = 2 / narrow.sum(-1, keepdim=True)
    c = (narrow * means64).sum(-1, keepdim=True) * b / 2
    parts = weights64 * stddevs
    allowed = _INTEGRAL_ERROR * (parts + weights64 * (means64 - c).abs()).sum(-1, keepdim=True)  # of the result's size
    reach = (parts / allowed).log().clamp_min(0).mul(2).sqrt() * stddevs
    start = ((torch.where(reach > 0, means64 - reach, c).amin(-1, keepdim=True) - c) / b).asinh()
    length = ((torch.where(reach > 0, means64 + reach, c).amax(-1, keepdim=True) - c) / b).asinh() - start
    spacing = torch.hypot(b, means64 - c) / stddevs  # at each component, in its standard deviations, by step of u
    result, left = torch.full_like(means[:, 0], math.nan), torch.arange(len(means), device=means.device)
    for nodes in (n for n in _NODES if n <= means.shape[-1] // 2):
        d = (spacing[left] * (length[left] / nodes)).clamp_min(0.15)  # keeps exp out of the denormal range
        error = (parts[left] * d * (-(math.pi / d).square()).exp()).sum(-1, keepdim=True)
        enough = (error <= allowed[left])[:, 0]
        rows, left = left[enough], left[~enough]
        if len(rows):
            chosen = (x[rows] for x in (means64, stddevs, weights64, c, b, start, length / nodes))
            result[rows] = 2 * _integral_of_spread(nodes, *chosen).to(result.dtype)
    if len(left):
        result[left] = _paired_difference(means[left], variances[left], weights[left])
    return result


def _integral_of_spread(
    nodes: int, means: Tensor, stddevs: Tensor, weights: Tensor, c: Tensor, b: Tensor, start: Tensor, step: Tensor
) -> Tensor:
    """Integral of F (1 - F) for mixtures ``(rows, K)``, in steps of u from its start, all ``(rows, 1)``."""
    means, weights, scales = means[:, None], weights[:, None], math.sqrt(0.5) / stddevs[:, None]
    total = torch.zeros_like(c)
    for some in torch.split(torch.arange(nodes + 1).to(c), max(1, _ELEMENTS_AT_ONCE // means.numel())):
        u = start + step * some
        t = c + b * u.sinh()
        above_half = 0.5 * (t[..., None] - means).mul_(scales).erf_().mul_(weights).sum(-1)
        total += ((0.25 - above_half.square()) * u.cosh()).sum(-1, keepdim=True)
    return (total * b * step)[:, 0]


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Expectation of :math:`|x|` for :math:`x \sim N(m, v)`, with :math:`a = m / \sqrt v`.

    .. math:: 2 \sqrt v\, \varphi(a) + m\, \operatorname{erf}(a / \sqrt 2)
    """
    a, stddev = normal.standardise(mean, variance)
    return 2 * stddev * normal.pdf(a) + mean * torch.erf(a * math.sqrt(0.5))


def _normal_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Nodes and log weights for an expectation over :math:`z \sim N(0, 1)`, each ``(count,)``.

    The trapezoidal rule in t with :math:`z \propto \sinh t`. For the narrow components of strongly correlated outputs
    32 such nodes do better than 48 of Gauss-Hermite, which puts many where the normal density is negligible. The
    outermost node balances the tail that is cut off against the spacing; its place was found by experiment.
    """
    t = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    z = torch.sinh(t) * (min(1.2 * math.sqrt(count), 8.0) / math.sinh(1))
    return z, torch.log_softmax(torch.cosh(t).log() - 0.5 * z.square(), 0)


def _check(caller: str, argument: str, value: object, like: Tensor | None = None, *shapes: Sequence[int]) -> None:
    """A float tensor of the dtype and device of ``like``, and of one of ``shapes`` if any are given."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{caller}: {argument} must be a float tensor, got {came}; use torch.as_tensor(x).float()")
    if like is not None and (value.dtype, value.device) != (like.dtype, like.device):
        wanted, came = f"{like.dtype} on {like.device}", f"{value.dtype} on {value.device}"
        raise InputError(f"{caller}: {argument} must be {wanted} like the rest, got {came}; convert it with .to(...)")
    if shapes and tuple(value.shape) not in [tuple(shape) for shape in shapes]:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise InputError(f"{caller}: {argument} must have shape {wanted}, got {tuple(value.shape)}; reshape it")
