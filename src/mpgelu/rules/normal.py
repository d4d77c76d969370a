"""The standard normal distribution, accurate in float32 and defined at zero variance; all nonlinear rules use it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

# Coefficients of the tail polynomial, lowest first.
_TAIL = (
    *(3.000093157e-01, 2.997353871e-01, 2.762148369e-01, 1.969550338e-01, 2.397622613e-01),
    *(-1.968365316e-01, 4.781490779e-01, -5.701896695e-01, 2.810749698e-01, -5.156054835e-02),
)


def cdf(a: Tensor) -> Tensor:
    r"""Return the standard normal distribution function :math:`\Phi(a) = \tfrac12 \operatorname{erfc}(-a/\sqrt2)`.

    The erfc form is accurate in the left tail in float32, where ``torch.special.ndtr`` and ``1 + erf`` are not. Values
    below the tail that :func:`standardise` keeps are exactly zero. Compilers do not vectorise erfc; in compiled
    float32 code a polynomial of the same accuracy is used, which is several times faster.

    Args:
        a: Standardised values, any shape.
    """
    if torch.compiler.is_compiling() and a.dtype == torch.float32:
        return _cdf_by_polynomial(a)
    return torch.nn.functional.hardshrink(0.5 * torch.erfc(a * -math.sqrt(0.5)), _smallest_tail(a.dtype))


def pdf(a: Tensor) -> Tensor:
    r"""Return the standard normal density :math:`\varphi(a)`, zero below the tail that :func:`standardise` keeps.

    Args:
        a: Standardised values, any shape.
    """
    density = torch.exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))
    return torch.nn.functional.hardshrink(density, _smallest_tail(a.dtype))


def _cdf_by_polynomial(a: Tensor) -> Tensor:
    r"""Return :math:`\Phi(-x) = \varphi(x)\, t\, P(t)` with :math:`t = 1 / (1 + 0.3 x)`, :math:`x \ge 0`."""
    t = 1 / (1 + 0.3 * a.abs())
    terms, power = [t * odd + even for even, odd in zip(_TAIL[::2], _TAIL[1::2], strict=True)], t * t
    while len(terms) > 1:  # Estrin's scheme: pairs of terms at a time, a short chain of dependent operations
        pairs = itertools.zip_longest(terms[::2], terms[1::2])
        terms, power = [low if high is None else high * power + low for low, high in pairs], power * power
    tail = pdf(a) * t * terms[0]
    return torch.where(a < 0, tail, 1 - tail)


def standardise(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the standardised mean :math:`a = m / \sqrt v` and the standard deviation :math:`\sqrt v`.

    At zero variance :math:`a` takes its limit, plus or minus its bound (0 for a zero mean), and no gradient flows to
    the variance. Bounding :math:`|a|` changes no result, because the tail beyond it is not representable; it keeps exp
    and erfc out of the denormal range, in which CPUs are many times slower. NaN in either argument gives NaN.

    Args:
        mean: Means m, any shape.
        variance: Non-negative variances v of the same shape.
    """
    smallest, bound = smallest_variance(variance.dtype), _largest_ratio(mean.dtype)
    stddev = variance.clamp_min(smallest).sqrt()
    limit = mean.detach() / torch.finfo(mean.dtype).tiny  # beyond the bound unless zero; NaN stays, unlike in sign
    ratio = torch.where(variance <= smallest, limit, mean / stddev)
    return ratio.clamp(-bound, bound), stddev


def _largest_ratio(dtype: torch.dtype) -> float:
    """Return the ratio at which the density reaches the smallest normal number: 13 in float32, 37.5 in float64."""
    return math.sqrt(-2 * (math.log(torch.finfo(dtype).tiny) + 2.5))


def _smallest_tail(dtype: torch.dtype) -> float:
    """Return a value just above the density at the largest ratio, so that both tails end in an exact zero."""
    return torch.finfo(dtype).tiny * 10


def smallest_variance(dtype: torch.dtype) -> float:
    """Return the variance below which a variance counts as zero.

    It is large enough that m / v, which occurs in gradients, does not overflow.
    """
    return float(torch.finfo(dtype).tiny ** 0.75)
