"""The predictive distribution of the target, represented for each row as a one-dimensional Gaussian mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.predictive.checks import as_tensor, check_broadcast, check_floats, check_mixture, needs_gradient
from mpgelu.predictive.distances import mean_absolute, mean_absolute_difference
from mpgelu.predictive.nodes import NODES, heteroscedastic_components
from mpgelu.predictive.quantiles import bisected, quantiles
from mpgelu.rules import normal
from mpgelu.visibility import values_are_visible


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    r"""The distribution of y for each row, a mixture of K one-dimensional Gaussians.

    .. math:: p(y) = \sum_k w_k\, N(y;\ \text{means}_k,\ \text{variances}_k)

    All quantities that are computed from the mixture are exact for it. Mean and variances are stored separately,
    because the constructors know closed forms that are more accurate than sums over components. A component of variance
    zero is a point mass, represented by the narrowest Gaussian of the dtype. NaN in a component makes all results of
    its row NaN, and does not affect other rows. Use the constructors :meth:`gaussian`, :meth:`heteroscedastic` and
    :meth:`mixture`.

    Args:
        means: Means of the components, ``(*batch, K)``.
        variances: Variances of the components, ``(*batch, K)``.
        log_weights: Logarithms of weights that sum to one, ``(K,)`` if all rows share them, otherwise ``(*batch, K)``.
        mean: Mean of y, ``(*batch,)``.
        epistemic_variance: Variance due to uncertainty about the function, ``(*batch,)``.
        aleatoric_variance: Expected variance of the noise, ``(*batch,)``.

    Raises:
        InputError: Shapes, dtypes or devices do not agree.

    Example:
        >>> p = Predictive.gaussian(torch.zeros(2), torch.full((2,), 0.5), torch.full((2,), 0.5))
        >>> p.interval(0.9)
        (tensor([-1.6449, -1.6449]), tensor([1.6449, 1.6449]))
    """

    means: Tensor
    variances: Tensor
    log_weights: Tensor
    mean: Tensor
    epistemic_variance: Tensor
    aleatoric_variance: Tensor

    def __post_init__(self) -> None:
        """Check shapes and dtypes, but not values."""
        rows = {name: getattr(self, name) for name in ("mean", "epistemic_variance", "aleatoric_variance")}
        check_mixture(self.means, self.variances, self.log_weights, **rows)

    @staticmethod
    def gaussian(mean: Tensor, epistemic_variance: Tensor, aleatoric_variance: Tensor) -> Predictive:
        """Return one Gaussian for each row, whose variance is the sum of the two.

        Args:
            mean: Mean of y, ``(*batch,)``.
            epistemic_variance: Variance due to uncertainty about the function, ``(*batch,)`` or ``()``.
            aleatoric_variance: Variance of the noise, ``(*batch,)`` or ``()``.
        """
        check_floats("Predictive.gaussian", "mean", mean)
        check_floats("Predictive.gaussian", "epistemic_variance", epistemic_variance, mean, mean.shape, ())
        check_floats("Predictive.gaussian", "aleatoric_variance", aleatoric_variance, mean, mean.shape, ())
        epistemic, aleatoric = epistemic_variance.expand(mean.shape), aleatoric_variance.expand(mean.shape)
        variances = (epistemic + aleatoric)[..., None]
        return Predictive(mean[..., None], variances, mean.new_zeros(1), mean, epistemic, aleatoric)

    @staticmethod
    def heteroscedastic(mean: Tensor, covariance: Tensor, nodes: int = NODES) -> Predictive:
        r"""Return the distribution of :math:`y \mid h \sim N(h_1, e^{h_2})` with :math:`h \sim N(E, S)`.

        .. math:: p(y) = \int N\Big(y;\ E_1 + \frac{S_{12}}{S_{22}} (h_2 - E_2),\
            S_{11} - \frac{S_{12}^2}{S_{22}} + e^{h_2}\Big)\, N(h_2;\ E_2, S_{22})\, dh_2

        Mean :math:`E_1`, epistemic variance :math:`S_{11}` and aleatoric variance :math:`e^{E_2 + S_{22}/2}` are exact.
        The integral is approximated by a sum over nodes (:func:`normal_nodes`). For up to :math:`S_{22} = 1` and a
        correlation of 0.9 between the outputs, 32 nodes give the cdf, and the log density of the central 99.98 %, with
        an error of 1e-6. A stronger correlation with little noise has narrow components that are far apart and needs
        more nodes: 48 for 0.95, 96 for 0.99.

        If :math:`S_{22} = 0` the noise variance is deterministic, and :math:`S_{12}` and :math:`S_{22}` have no
        gradient. A conditional variance that is negative by rounding is set to zero; its gradient is kept.

        Args:
            mean: Means E, ``(*batch, 2)``.
            covariance: Covariance S, ``(*batch, 2, 2)``, symmetric and positive semidefinite.
            nodes: Number of components K; one is exact for :math:`S_{22} = 0`.
        """
        caller = "Predictive.heteroscedastic"
        check_floats(caller, "mean", mean)
        if mean.shape[-1:] != (2,):
            raise InputError(f"{caller}: mean must be (*batch, 2), got {tuple(mean.shape)}; use a two-output network")
        check_floats(caller, "covariance", covariance, mean, (*mean.shape, 2))
        if nodes < 1:
            raise InputError(f"{caller}: nodes must be at least 1, got {nodes}; leave it out for 32")
        means, variances, log_weights = heteroscedastic_components(mean, covariance, nodes)
        epistemic, aleatoric = covariance[..., 0, 0], (mean[..., 1] + covariance[..., 1, 1] / 2).exp()
        return Predictive(means, variances, log_weights, mean[..., 0], epistemic, aleatoric)

    @staticmethod
    def mixture(members: Sequence[Predictive], weights: Tensor | None = None) -> Predictive:
        r"""Return a mixture of distributions, such as those of the members of an ensemble; exact.

        .. math:: \text{epistemic} = \sum_m w_m \big(\text{epistemic}_m + (\text{mean}_m - \text{mean})^2\big), \qquad
            \text{aleatoric} = \sum_m w_m\, \text{aleatoric}_m

        Args:
            members: M distributions for the same rows; their numbers of components may differ.
            weights: Weights w of the members, ``(M,)``, not negative; they are divided by their sum. ``None`` for equal
                weights.
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
        """Return the distributions of consecutive rows as one.

        Args:
            parts: Distributions with the same number of components; weights that rows share must be equal in all parts.
        """
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(Predictive) if field.name != "log_weights"]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        log_weights = parts[0].log_weights
        if log_weights.dim() > 1:
            return Predictive(**joined, log_weights=torch.cat([part.log_weights for part in parts]))
        if any(not torch.equal(part.log_weights, log_weights) for part in parts[1:]):
            raise InputError("Predictive.concatenate: the parts must have components of the same weights")
        return Predictive(**joined, log_weights=log_weights)

    def mixture_over(self, dim: int = 0, weights: Tensor | None = None) -> Predictive:
        """Return the mixture over one batch dimension, such as the models of a stack; exact, see :meth:`mixture`.

        Args:
            dim: The batch dimension, of size M.
            weights: Weights of its entries, ``(M,)``, divided by their sum; ``None`` for equal weights.
        """
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
        """Return the log density at y, which broadcasts against ``(*batch,)``."""
        errors = self._errors("log_prob", "y", y)
        _, stddevs = normal.standardise(errors, self.variances)
        log_densities = -0.5 * (errors / stddevs).square() - stddevs.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(self.log_weights + log_densities, -1)

    def cdf(self, y: Tensor | ArrayLike) -> Tensor:
        """Return the probability of a target at or below y, which broadcasts against ``(*batch,)``."""
        probabilities = self.log_weights.exp() * normal.cdf(self._ratios("cdf", "y", y))
        return probabilities.sum(-1).clamp_max(1)  # weights sum to one up to rounding

    def probability_above(self, t: Tensor | ArrayLike) -> Tensor:
        """Return the probability of a target above t, ``(*batch,)``; small ones are accurate, unlike ``1 - cdf(t)``."""
        return (self.log_weights.exp() * normal.cdf(-self._ratios("probability_above", "t", t))).sum(-1).clamp_max(1)

    def quantile(self, q: Tensor | float | Sequence[float], tolerance: float = 0.0) -> Tensor:
        r"""Return the quantiles y, for which :math:`F(y) = q`.

        They are accurate to rounding for components of any widths, and infinite if components of infinite variance
        leave no finite solution. First derivatives follow from the implicit function theorem,

        .. math:: dy = \frac{dq - dF(y)}{p(y)},

        and are zero if the density underflows, between components that are far apart.

        Args:
            q: One probability, or n of them.
            tolerance: Largest error of F(y). 1e-5 permits single precision, which takes half the time.

        Returns:
            The quantiles, ``(*batch,)`` for one probability and ``(*batch, n)`` for n.

        Raises:
            InputError: A single q is not strictly between 0 and 1, or q has more than one dimension.
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
        """Return the ends of the central interval that contains y with probability ``level``, ``(*batch,)`` each.

        Args:
            level: Probability, strictly between 0 and 1.
            tolerance: As in :meth:`quantile`.
        """
        if not 0 < level < 1:
            raise InputError(f"interval: level must lie strictly between 0 and 1, got {level}; 90 % is 0.9")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2], tolerance).unbind(-1)
        return lower, upper

    def crps(self, y: Tensor | ArrayLike) -> Tensor:
        r"""Return the continuous ranked probability score at y, in the unit of y; smaller is better.

        .. math:: \int (F(t) - [y \le t])^2\, dt = \mathbb E|Y - y| - \tfrac12\, \mathbb E|Y - Y'|

        The sum over pairs of components is exact (Grimit et al., 2006). Without gradients and for 128 or more
        components, the second term is computed as an integral of :math:`F (1 - F)` with a relative error below 1e-7.

        Args:
            y: Targets, which broadcast against ``(*batch,)``.
        """
        parts, weights = (self.means, self.variances, self.log_weights), self.log_weights.softmax(-1)
        distance = (weights * mean_absolute(self._errors("crps", "y", y), self.variances)).sum(-1)
        by_integral = values_are_visible(*parts) and not needs_gradient(*parts)
        spread = mean_absolute_difference(self.means, self.variances, weights.expand_as(self.means), by_integral)
        return torch.where(distance.isinf(), distance, distance - 0.5 * spread)

    def sample(self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draw independent values for each row, as ``torch.distributions`` does; without gradients.

        Args:
            sample_shape: Shape of the draws of each row, such as ``(100,)``; an integer n means ``(n,)``, and the
                default is one draw.
            generator: Random number generator; by default that of ``torch.manual_seed``.

        Returns:
            The draws, ``(*sample_shape, *batch)``; NaN for rows with a NaN parameter.
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
        """Return the Gaussian of the same mean and variances, an approximation of the mixture."""
        return Predictive.gaussian(self.mean, self.epistemic_variance, self.aleatoric_variance)

    def affine(self, scale: Tensor | float, shift: Tensor | ArrayLike) -> Predictive:
        """Return the distribution of ``scale * y + shift``, for example in the unit of the data; exact.

        Args:
            scale: Factor of either sign, ``()`` or ``(*batch,)``.
            shift: Offset after the factor, ``()`` or ``(*batch,)``.
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
        """Return the distribution of y plus an independent Gaussian error, which counts as epistemic; exact.

        Args:
            variance: Variance of the error, ``()`` or ``(*batch,)``.
        """
        variance = self._tensor("widened", "variance", variance, (), self.batch_shape)
        return replace(
            self,
            variances=self.variances + variance[..., None],
            epistemic_variance=self.epistemic_variance + variance,
        )

    def to(self, *args: Any, **kwargs: Any) -> Predictive:
        """Return the distribution in another dtype or on another device; the arguments are those of ``Tensor.to``."""
        return Predictive(**{field.name: getattr(self, field.name).to(*args, **kwargs) for field in fields(self)})

    def __getitem__(self, index: Any) -> Predictive:
        """Return the distributions at an index of the batch dimensions."""
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
        """Return shape, number of components and dtype."""
        count, dtype = self.means.shape[-1], str(self.means.dtype).removeprefix("torch.")
        return f"Predictive(mean {tuple(self.mean.shape)}, {count} component{'s' * (count > 1)}, {dtype})"

    def _tensor(self, caller: str, argument: str, value: Tensor | ArrayLike, *shapes: Sequence[int]) -> Tensor:
        """Return a value as a tensor like the mean, of one of ``shapes`` if any are given."""
        return as_tensor(caller, argument, value, self.mean, *shapes)

    def _errors(self, caller: str, argument: str, value: Tensor | ArrayLike) -> Tensor:
        """Return the differences from the means of all components, ``(*broadcast, K)``."""
        value = self._tensor(caller, argument, value)
        check_broadcast(caller, argument, value.shape, self.batch_shape)
        return value[..., None] - self.means

    def _ratios(self, caller: str, argument: str, value: Tensor | ArrayLike) -> Tensor:
        """Return :meth:`_errors` in standard deviations of the components, bounded; NaN stays NaN for point masses."""
        errors = self._errors(caller, argument, value)
        return torch.where(errors.isnan(), errors, normal.standardise(errors, self.variances)[0])


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Return components ``(*batch, K)`` with one batch dimension of size M merged into a last dimension M K."""
    return parts.movedim(dim, -2).flatten(-2)
