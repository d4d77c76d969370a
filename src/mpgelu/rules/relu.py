"""ReLU of a Gaussian vector: exact means and variances, and two methods for the covariance.

Covariances are computed for the pairs i < j only, in chunks of rows whose temporaries fit the cache, with analytic
gradients that save nothing but the inputs. The formulas of a pair are in :mod:`mpgelu.rules.relu_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, singledispatch
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules.normal import cdf, pdf, smallest_variance, standardise
from mpgelu.rules.relu_pairs import Units, dvi_pairs, dvi_slopes, exact_pairs, exact_slopes, where_inside

Covariance = Literal["exact", "dvi"]

_Rows = tuple[Tensor, Tensor, Tensor]  # vector (rows, n), diagonal (rows, n) and pairs (rows, n (n - 1) / 2)

_CHUNK = 98304  # pairs worked on at a time: temporaries stay in the cache, and calls cost little beside the work


@singledispatch
def relu(value: Any, covariance: Covariance = "exact") -> Any:
    r"""Return the moments of :math:`\max(h, 0)` for Gaussian :math:`h`.

    With :math:`a = m / s`, :math:`s = \sqrt v` and :math:`\mathrm{SR}(a) = \varphi(a) + a \Phi(a)`:

    .. math:: s\,\mathrm{SR}(a), \qquad v\,[\Phi(a) - \mathrm{SR}(a)\,\mathrm{SR}(-a)]

    Means and variances are exact for a Gaussian input. Covariances are exact to the quadrature error (2e-6 of s1 s2),
    or follow the DVI approximation (error up to 1.5e-2), the baseline of the paper. Factored moments become full ones.
    NaN in the mean or variance of a unit gives NaN; a mean of minus infinity gives zero.

    Args:
        value: A tensor or moments with n features.
        covariance: ``"exact"`` or ``"dvi"``; it matters for full and factored moments.

    Raises:
        InputError: ``covariance`` is neither of the two.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"relu: no rule for {type(value).__name__}; register one with @relu.register")


def check_covariance(caller: str, given: object, options: Any) -> None:
    """Check the name of a method for covariances.

    Args:
        caller: Name of the function that the error message starts with.
        given: The name to check.
        options: A ``Literal`` type with the valid names.

    Raises:
        InputError: The name is not one of the options.
    """
    if given not in get_args(options):
        names = " or ".join(map(repr, get_args(options)))
        raise InputError(f"{caller}: covariance must be {names}, got {given!r}")


@relu.register
def _(value: Tensor, covariance: Covariance = "exact") -> Tensor:
    check_covariance("relu", covariance, Covariance)
    return torch.relu(value)


@relu.register
def _(value: DiagonalMoments, covariance: Covariance = "exact") -> DiagonalMoments:
    check_covariance("relu", covariance, Covariance)
    mean, variance = _marginals(value.mean, value.variance, *_units(value.mean, value.variance))
    return DiagonalMoments(mean, variance, event_dims=value.event_dims)


@relu.register
def _(value: FullMoments, covariance: Covariance = "exact") -> FullMoments:
    check_covariance("relu", covariance, Covariance)
    mean, after = _FullReLU.apply(value.mean, value.covariance, covariance)  # type: ignore[no-untyped-call]
    return FullMoments(mean, after)


@relu.register
def _(value: FactoredMoments, covariance: Covariance = "exact") -> FullMoments:
    full: FullMoments = relu(FullMoments.from_moments(value), covariance)
    return full


def _units(mean: Tensor, variance: Tensor) -> tuple[Units, Tensor]:
    """Return the units scaled to variance one, and their standard deviations."""
    ratio, stddev = standardise(mean, variance)
    return Units(ratio, cdf(ratio), pdf(ratio)), stddev


def _marginals(mean: Tensor, variance: Tensor, units: Units, stddev: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance after ReLU."""
    ratio, probability, density = units
    ramp = density + ratio * probability  # SR(a); SR(-a) = SR(a) - a
    finite = mean.clamp_min(torch.finfo(mean.dtype).min)  # minus infinity times a probability of zero is zero
    after = finite * probability + torch.where(variance > 0, stddev, 0) * density
    return after, variance * (probability - ramp * (ramp - ratio)).clamp_min(0)


class _FullReLU(torch.autograd.Function):
    """The rule for full moments as an autograd function: pairs i < j only, in chunks, saving nothing but its inputs."""

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, variant: Covariance) -> tuple[Tensor, Tensor]:
        return _by_chunks(_values, variant, mean, covariance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.variant = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads = _FullReLUGradient.apply(*ctx.saved_tensors, *grads, ctx.variant)  # type: ignore[no-untyped-call]
        return *grads, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, tuple[int, int]]:
        return _FullReLU.apply(*_batch_first(info, in_dims, inputs)), (0, 0)  # type: ignore[no-untyped-call]


class _FullReLUGradient(torch.autograd.Function):
    """The gradients of :class:`_FullReLU` as a separate function, which ``torch.func.jacrev`` can map over."""

    @staticmethod
    def forward(
        mean: Tensor, covariance: Tensor, grad_mean: Tensor, grad_covariance: Tensor, variant: Covariance
    ) -> tuple[Tensor, Tensor]:
        return _by_chunks(_gradients, variant, mean, covariance, grad_mean, grad_covariance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save nothing: second derivatives are not implemented."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, tuple[int, int]]:
        return _FullReLUGradient.apply(*_batch_first(info, in_dims, inputs)), (0, 0)  # type: ignore[no-untyped-call]


def _batch_first(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Return the inputs with the mapped dimension first; the rule works row by row over leading dimensions."""
    *tensors, variant = inputs
    mapped = zip(tensors, in_dims, strict=False)
    return [x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in mapped] + [variant]


def _by_chunks(rule: Callable[..., _Rows], variant: Covariance, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a rule to chunks of rows, and assemble the units and pairs that it returns into matrices.

    Args:
        rule: Takes the variant, the pairs and the inputs of a chunk, with matrices as ``(rows, n * n)``.
        variant: Method for the covariance.
        *inputs: Vectors ``(*batch, n)`` and matrices ``(*batch, n, n)`` in turn.

    Returns:
        A vector ``(*batch, n)`` and a matrix ``(*batch, n, n)``.
    """
    n = inputs[0].shape[-1]
    compiling = torch.compiler.is_compiling()  # then the compiler fuses, and looks with suspicion at caches
    pairs = _Pairs.of(n, inputs[0].device) if compiling else _cached_pairs(n, inputs[0].device)
    flat = [x.reshape(-1, width) for x, width in zip(inputs, (n, n * n) * (len(inputs) // 2), strict=True)]
    rows = max(1, _CHUNK // max(1, len(pairs.first)))
    if compiling or len(flat[0]) <= rows:  # a graph is for any number of rows
        vector, diagonal, above = rule(variant, pairs, *flat)
        matrix = torch.cat([diagonal, above], dim=1).index_select(1, pairs.matrix)
        return vector.reshape(inputs[0].shape), matrix.reshape(inputs[1].shape)
    vectors, matrices = torch.empty_like(flat[0]), torch.empty_like(flat[1])
    for start in range(0, len(vectors), rows):
        chunk = slice(start, start + rows)
        vectors[chunk], diagonal, above = rule(variant, pairs, *(x[chunk] for x in flat))
        torch.index_select(torch.cat([diagonal, above], dim=1), 1, pairs.matrix, out=matrices[chunk])
    return vectors.view(inputs[0].shape), matrices.view(inputs[1].shape)


class _Pairs(NamedTuple):
    """Index tensors of the pairs i < j of n units.

    Attributes:
        first: Unit i of each pair.
        second: Unit j of each pair.
        upper: Index of :math:`C_{ij}` in the flattened matrix.
        lower: Index of :math:`C_{ji}` in the flattened matrix.
        matrix: For each of the n * n entries of the matrix, its index in (diagonal, pairs).
        partners: For each unit the indices of its n - 1 pairs in (pairs, pairs); in the second copy where it is j.
    """

    first: Tensor  # i of each pair
    second: Tensor  # j
    upper: Tensor  # C_ij of each pair in the flattened matrix
    lower: Tensor  # C_ji
    matrix: Tensor  # (n * n,): each entry of the matrix in (diagonal, pairs)
    partners: Tensor  # ((n - 1) * n,): the n - 1 pairs of each unit in (pairs, pairs), in the second where it is j

    @classmethod
    def of(cls, n: int, device: torch.device) -> Self:
        """Enumerate the pairs of n units row by row."""
        first, second = torch.triu_indices(n, n, offset=1, device=device)
        number = torch.arange(len(first), device=device)
        matrix = torch.arange(n, device=device).diag()
        matrix[first, second] = matrix[second, first] = n + number
        partners = torch.empty(n, max(n - 1, 0), dtype=torch.long, device=device)
        partners[first, second - 1], partners[second, first] = number, number + len(first)
        return cls(first, second, first * n + second, second * n + first, matrix.flatten(), partners.T.flatten())


_cached_pairs = cache(_Pairs.of)


def _values(variant: Covariance, pairs: _Pairs, mean: Tensor, covariance: Tensor) -> _Rows:
    """Return means, variances and the covariance of each pair after ReLU."""
    variance = covariance[:, :: mean.shape[1] + 1].contiguous()
    units, stddev = _units(mean, variance)
    scale, correlation = _standardised_pairs(pairs, stddev, covariance)
    ratio, probability, density = units
    one, two = (Units(ratio.index_select(1, k), probability.index_select(1, k), density) for k in pairs[:2])
    value = (exact_pairs if variant == "exact" else dvi_pairs)(one, two, correlation.clamp_(-1, 1))
    return *_marginals(mean, variance, units, stddev), value.mul_(scale)


def _gradients(
    variant: Covariance, pairs: _Pairs, mean: Tensor, covariance: Tensor, grad_mean: Tensor, grad_covariance: Tensor
) -> _Rows:
    r"""Return the gradients by means, variances and pair covariances, half of the latter for each triangle.

    A pair contributes :math:`s_i s_j f(a_i, a_j, \rho)` with :math:`a = m / s` and :math:`\rho = C_{ij} / s_i s_j`.
    The marginals have :math:`\partial m' = (\Phi, \varphi / 2s)` and :math:`\partial v' = (2
    s\,\mathrm{SR}(a)\,\Phi(-a), \Phi - \mathrm{SR}\,\varphi)` with respect to :math:`(m, v)`.
    """
    variance, grad_variance = (x[:, :: mean.shape[1] + 1].contiguous() for x in (covariance, grad_covariance))
    units, stddev = _units(mean, variance)
    scale, unbounded = _standardised_pairs(pairs, stddev, covariance)
    one, two = (Units(*(x.index_select(1, side) for x in units)) for side in pairs[:2])
    correlation = unbounded.clamp(-1, 1)
    slopes = (exact_slopes if variant == "exact" else dvi_slopes)(one, two, correlation)
    by_rho = where_inside(slopes.by_correlation, unbounded, 1 + 2 * torch.finfo(mean.dtype).eps)

    grad = grad_covariance.index_select(1, pairs.upper).add_(grad_covariance.index_select(1, pairs.lower))
    grad_above = (grad * by_rho).mul_(0.5)
    grad.mul_(scale)
    by_scale = slopes.value.addcmul_(correlation, by_rho, value=-1).mul_(grad)
    grad_scale = _sum_partners(pairs, by_scale, by_scale)  # times s
    grad_ratio = _sum_partners(pairs, slopes.by_a1.mul_(grad), slopes.by_a2.mul_(grad))

    ratio, probability, density = units
    ramp = density + ratio * probability
    grad_scale += stddev * density * grad_mean - ratio * grad_ratio
    by_variance = torch.where(variance > smallest_variance(mean.dtype), grad_scale / (2 * stddev * stddev), 0)
    return (
        probability * grad_mean + 2 * stddev * ramp * cdf(-ratio) * grad_variance + grad_ratio / stddev,
        (probability - ramp * density) * grad_variance + by_variance,
        grad_above,
    )


def _standardised_pairs(pairs: _Pairs, stddev: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return product of standard deviations and correlation of each pair; rounding may move it out of [-1, 1]."""
    scale = stddev.index_select(1, pairs.first).mul_(stddev.index_select(1, pairs.second))
    return scale, covariance.index_select(1, pairs.upper).div_(scale)


def _sum_partners(pairs: _Pairs, of_first: Tensor, of_second: Tensor) -> Tensor:
    """Return for each unit the sum over its pairs, ``(rows, n)``.

    Args:
        pairs: The index tensors.
        of_first: Terms of the first unit of each pair, ``(rows, pairs)``.
        of_second: Terms of the second unit of each pair, ``(rows, pairs)``.
    """
    n = math.isqrt(len(pairs.matrix))
    both = torch.cat([of_first, of_second], dim=1).index_select(1, pairs.partners)
    return both.view(len(both), n - 1, n).sum(dim=1)
