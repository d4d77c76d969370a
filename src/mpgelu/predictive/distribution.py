"""The distribution of the target for each row, always held as a one-dimensional Gaussian mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.predictive.checks import check_floats, needs_gradient
from mpgelu.predictive.distances import mean_absolute, mean_absolute_difference
from mpgelu.predictive.nodes import normal_nodes
from mpgelu.predictive.quantiles import bisected, quantiles
from mpgelu.rules import normal
from mpgelu.visibility import values_are_visible


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    r"""The distribution of y for each row, a mixture of K one-dimensional Gaussians.

    .. math:: p(y) = \sum_k w_k\, N(y;\ \text{means}_k,\ \text{variances}_k)

    Everything computed from the mixture is exact for it. The mean and the two variances are given by whoever builds
    it, because their closed forms are better than sums over components. A variance of zero is a point mass, held as
    the narrowest Gaussian that the dtype allows. A row with a NaN in any component is NaN in everything computed from
    it, and other rows are not touched. Build one with ``gaussian``, ``heteroscedastic`` or ``mixture``.

    Args:
        means: Means of the components, ``(*batch, K)``.
        variances: Variances of the components, ``(*batch, K)``.
        log_weights: Logarithms of weights that sum to one, ``(K,)`` if all rows share them, else ``(*batch, K)``.
        mean: Mean of y, ``(*batch,)``.
        epistemic_variance: What comes from not knowing the function, ``(*batch,)``.
        aleatoric_variance: Expected variance of the noise, ``(*batch,)``.
    """

    means: Tensor
    variances: Tensor
    log_weights: Tensor
    mean: Tensor
    epistemic_variance: Tensor
    aleatoric_variance: Tensor

    def __post_init__(self) -> None:
        """Check shapes and dtypes, never values."""
        check_floats("Predictive", "means", self.means)
        if self.means.dim() == 0:
            raise InputError("Predictive: means must be (*batch, K), got a scalar; use means.reshape(1)")
        allowed = {"variances": [self.means.shape], "log_weights": [self.means.shape[-1:], self.means.shape]}
        for field in fields(self)[1:]:
            shapes = allowed.get(field.name, [self.batch_shape])
            check_floats("Predictive", field.name, getattr(self, field.name), self.means, *shapes)

    @staticmethod
    def gaussian(mean: Tensor, epistemic_variance: Tensor, aleatoric_variance: Tensor) -> Predictive:
        """One Gaussian for each row, whose variance is the sum of the two.

        Args:
            mean: Mean of y, ``(*batch,)``.
            epistemic_variance: ``(*batch,)``, or ``()`` if the same for all rows.
            aleatoric_variance: ``(*batch,)``, or ``()`` if the same for all rows.
        """
        check_floats("Predictive.gaussian", "mean", mean)
        check_floats("Predictive.gaussian", "epistemic_variance", epistemic_variance, mean, mean.shape, ())
        check_floats("Predictive.gaussian", "aleatoric_variance", aleatoric_variance, mean, mean.shape, ())
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
            nodes: Number of components K; one is exact where :math:`S_{22} = 0`.
        """
        caller = "Predictive.heteroscedastic"
        check_floats(caller, "mean", mean)
        if mean.shape[-1:] != (2,):
            raise InputError(f"{caller}: mean must be (*batch, 2), got {tuple(mean.shape)}; use a two-output network")
        check_floats(caller, "covariance", covariance, mean, (*mean.shape, 2))
        if nodes < 1:
            raise InputError(f"{caller}: nodes must be at least 1, got {nodes}; leave it out for 32")
        mean1, mean2 = mean.unbind(-1)
        variance1, covariance12, variance2 = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
        uncertain = variance2 > 0
        stddev2 = torch.where(uncertain, variance2, 1.0).sqrt()
        slope = torch.where(uncertain, covariance12 / stddev2, 0.0)  # E[h1 | z] = E1 + slope z, h2 = E2 + stddev2 z
        conditional = variance1 - slope.square()
        conditional = conditional + (conditional.clamp_min(0) - conditional).detach()
        z, log_weights = normal_nodes(nodes, mean)
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
            check_floats(caller, "the mean of every member", member.mean, first.mean, first.batch_shape)
        weights = first.mean.new_ones(len(members)) if weights is None else weights
        check_floats(caller, "weights", weights, first.mean, (len(members),))
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
        """Predictives of consecutive rows as one; weights that rows share must be the same in all of them."""
        names = [field.name for field in fields(Predictive) if field.name != "log_weights"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        log_weights = parts[0].log_weights
        if log_weights.dim() > 1:
            return Predictive(**joined, log_weights=torch.cat([part.log_weights for part in parts]))
        if any(not torch.equal(part.log_weights, log_weights) for part in parts[1:]):
            raise InputError("Predictive.concatenate: the parts must have components of the same weights")
        return Predictive(**joined, log_weights=log_weights)

    def mixture_over(self, dim: int = 0, weights: Tensor | None = None) -> Predictive:
        """Mixture over one batch dimension, such as the models of a stacked ensemble; see ``mixture``."""
        dims = len(self.batch_shape)
        if not -dims <= dim < dims:
            raise InputError(f"mixture_over: dim must be one of the {dims} dimensions of the batch, got {dim}")
        dim, members = dim % dims, self.batch_shape[dim]
        weights = self.mean.new_ones(members) if weights is None else weights
        check_floats("mixture_over", "weights", weights, self.mean, (members,))
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

    def log_prob(self, y: Tensor | ArrayLike) -> Tensor:
        """Logarithm of the density at y, which broadcasts against ``(*batch,)``."""
        errors = self._errors("log_prob", "y", y)
        _, stddevs = normal.standardise(errors, self.variances)
        log_densities = -0.5 * (errors / stddevs).square() - stddevs.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(self.log_weights + log_densities, -1)

    def cdf(self, y: Tensor | ArrayLike) -> Tensor:
        """Probability of a target at or below y, which broadcasts against ``(*batch,)``."""
        return (
            (self.log_weights.exp() * normal.cdf(self._ratios("cdf", "y", y))).sum(-1).clamp_max(1)
        )  # weights sum to one up to rounding

    def probability_above(self, t: Tensor | ArrayLike) -> Tensor:
        """Probability of a target above t, which broadcasts against ``(*batch,)``; keeps its digits when tiny."""
        return (self.log_weights.exp() * normal.cdf(-self._ratios("probability_above", "t", t))).sum(-1).clamp_max(1)

    def quantile(self, q: Tensor | float | Sequence[float], tolerance: float = 0.0) -> Tensor:
        r"""The y at which the cdf F is q.

        Found to rounding, whatever the widths of the components; infinite where components of infinite variance leave
        no finite y. First derivatives are those of the implicit function theorem,

        .. math:: dy = \frac{dq - dF(y)}{p(y)},

        and zero where the density underflows, in the empty space between components.

        Args:
            q: One probability, or n of them.
            tolerance: By how much F may miss q. 1e-5 allows single precision, which takes half the time; 0 does not.

        Returns:
            ``(*batch,)`` for one probability, ``(*batch, n)`` for n.
        """
        if isinstance(q, int | float) and not 0 < q < 1:
            raise InputError(f"quantile: q must lie strictly between 0 and 1, got {q}")
        q = self._tensor("quantile", "q", q)
        if q.dim() > 1:
            raise InputError(f"quantile: q must be one probability or a vector, got {tuple(q.shape)}; use q.flatten()")
        parts = (self.means, self.variances, self.log_weights, q)
        plain = values_are_visible(*parts)
        with torch.no_grad():
            if plain:
                root = quantiles(self.means, self.variances, self.log_weights, self.mean, self.stddev, q, tolerance)
            else:
                root = bisected(*(part.detach() for part in parts))
        if plain and not needs_gradient(*parts):
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
            level: Strictly between 0 and 1.
            tolerance: As in :meth:`quantile`.
        """
        if not 0 < level < 1:
            raise InputError(f"interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2], tolerance).unbind(-1)
        return lower, upper

    def crps(self, y: Tensor | ArrayLike) -> Tensor:
        r"""Continuous ranked probability score at y, smaller is better, in the unit of y.

        .. math:: \int (F(t) - [y \le t])^2\, dt = \mathbb E|Y - y| - \tfrac12\, \mathbb E|Y - Y'|

        Exact as a sum over pairs of components (Grimit et al., 2006). Hundreds of components, without gradients, take
        the integral of :math:`F (1 - F)` instead of the second term where its error is below 1e-7 of that term.

        Args:
            y: Broadcasts against ``(*batch,)``.
        """
        parts, weights = (self.means, self.variances, self.log_weights), self.log_weights.softmax(-1)
        distance = (weights * mean_absolute(self._errors("crps", "y", y), self.variances)).sum(-1)
        by_integral = values_are_visible(*parts) and not needs_gradient(*parts)
        spread = mean_absolute_difference(self.means, self.variances, weights.expand_as(self.means), by_integral)
        return torch.where(distance.isinf(), distance, distance - 0.5 * spread)

    def sample(self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw independent values for each row, as ``torch.distributions`` does; without gradients.

        Args:
            sample_shape: Shape of the draws of each row, such as ``(100,)`` or ``torch.Size([100])``; an integer n
                means ``(n,)``, nothing means one draw.
            generator: Source of random numbers; by default that of ``torch.manual_seed``.

        Returns:
            ``(*sample_shape, *batch)``; NaN where a parameter of the row is.
        """
        sample_shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        shape = (*self.batch_shape, math.prod(sample_shape))
        with torch.no_grad():
            uniform = torch.rand(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
            noise = torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device)
            component = torch.searchsorted(self.log_weights.exp().cumsum(-1), uniform, right=True)
            component = component.clamp_max(self.means.shape[-1] - 1)  # the weights may sum to a little less than one
            draws = self.means.gather(-1, component) + self.variances.gather(-1, component).sqrt() * noise
            unknown = (self.means.isnan() | self.variances.isnan() | self.log_weights.isnan()).any(-1, keepdim=True)
            draws = torch.where(unknown, math.nan, draws)
            return draws.movedim(-1, 0).reshape((*sample_shape, *self.batch_shape))

    def matched(self) -> Predictive:
        """The single Gaussian of the same mean and variances: cheap, an approximation of the mixture."""
        return Predictive.gaussian(self.mean, self.epistemic_variance, self.aleatoric_variance)

    def affine(self, scale: Tensor | float, shift: Tensor | ArrayLike) -> Predictive:
        """Distribution of ``scale * y + shift``, for example back in the unit of the data; exact.

        Args:
            scale: Scale of either sign, ``()`` or ``(*batch,)``.
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

    def widened(self, variance: Tensor) -> Predictive:
        """Distribution of y plus an independent Gaussian error, which counts as epistemic; exact.

        Args:
            variance: Variance of the error, ``()`` or ``(*batch,)``.
        """
        variance = self._tensor("widened", "variance", variance, (), self.batch_shape)
        return replace(
            self,
            variances=self.variances + variance[..., None],
            epistemic_variance=self.epistemic_variance + variance,
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

    def _tensor(self, caller: str, argument: str, value: Tensor | ArrayLike, *shapes: Sequence[int]) -> Tensor:
        if not isinstance(value, Tensor):
            value = np.array(value) if hasattr(value, "__array__") else value  # such as a column of a data frame
            value = torch.as_tensor(value, dtype=self.mean.dtype, device=self.mean.device)
        check_floats(caller, argument, value, self.mean, *shapes)
        return value

    def _errors(self, caller: str, argument: str, value: Tensor | ArrayLike) -> Tensor:
        """Distance from every component's mean, ``(*broadcast, K)``."""
        value = self._tensor(caller, argument, value)
        shape, batch = tuple(value.shape), tuple(self.batch_shape)
        sizes = zip(shape[::-1], batch[::-1], strict=False)
        column = shape == (*batch, 1) and batch[-1:] > (1,)  # would compare every row with every other
        if column or not all(size == rows or 1 in (size, rows) for size, rows in sizes):
            fix = f"use {argument}.squeeze(-1)" if column else f"give one {argument} for each row, or a scalar"
            raise InputError(f"{caller}: {argument} must broadcast against the rows {batch}, got {shape}; {fix}")
        return value[..., None] - self.means

    def _ratios(self, caller: str, argument: str, value: Tensor | ArrayLike) -> Tensor:
        """The same in standard deviations of the components, bounded; NaN stays NaN, also for a point mass."""
        errors = self._errors(caller, argument, value)
        return torch.where(errors.isnan(), errors, normal.standardise(errors, self.variances)[0])


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Components ``(*batch, K)`` of all members along one batch dimension side by side."""
    return parts.movedim(dim, -2).flatten(-2)
