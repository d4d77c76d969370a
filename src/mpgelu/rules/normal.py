"""The standard normal distribution, safe in float32 and at zero variance; used by every rule with a nonlinearity."""

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
    r"""Standard normal distribution function :math:`\Phi(a) = \tfrac12 \operatorname{erfc}(-a/\sqrt2)`.

    The erfc form keeps the left tail in float32, which ``torch.special.ndtr`` and ``1 + erf`` lose. What is below
    the tail kept by :func:`standardise` becomes exactly zero. Compilers do not vectorise erfc: in their hands float32
    takes a polynomial of the same accuracy, several times faster.
    """
    if torch.compiler.is_compiling() and a.dtype == torch.float32:
        return _cdf_by_polynomial(a)
    return torch.nn.functional.hardshrink(0.5 * torch.erfc(a * -math.sqrt(0.5)), _smallest_tail(a.dtype))


def pdf(a: Tensor) -> Tensor:
    r"""Standard normal density :math:`\varphi(a)`, exactly zero below the tail kept by :func:`standardise`."""
    density = torch.exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))
    return torch.nn.functional.hardshrink(density, _smallest_tail(a.dtype))


def _cdf_by_polynomial(a: Tensor) -> Tensor:
    r"""The same by :math:`\Phi(-x) = \varphi(x)\, t\, P(t)`, :math:`t = 1 / (1 + 0.3 x)`, :math:`x \ge 0`."""
    t = 1 / (1 + 0.3 * a.abs())
    terms, power = [t * odd + even for even, odd in zip(_TAIL[::2], _TAIL[1::2], strict=True)], t * t
    while len(terms) > 1:  # Estrin's scheme: pairs of terms at a time, a short chain of dependent operations
        pairs = itertools.zip_longest(terms[::2], terms[1::2])
        terms, power = [low if high is None else high * power + low for low, high in pairs], power * power
    tail = pdf(a) * t * terms[0]
    return torch.where(a < 0, tail, 1 - tail)


def standardise(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Standardised mean :math:`a = m / \sqrt v` and standard deviation :math:`\sqrt v`.

    At zero variance :math:`a` is the limit, plus or minus its bound (0 for a zero mean), and no gradient flows to
    the variance. Bounding :math:`|a|` loses nothing, the tail beyond it is not representable; it keeps exp and erfc
    out of the denormal range, where a CPU is many times slower. NaN in either gives NaN.

    Args:
        mean: any shape.
        variance: same shape, not negative.
    """
    smallest, bound = smallest_variance(variance.dtype), _largest_ratio(mean.dtype)
    stddev = variance.clamp_min(smallest).sqrt()
    limit = mean.detach() / torch.finfo(mean.dtype).tiny  # beyond the bound unless zero; NaN stays, unlike in sign
    ratio = torch.where(variance <= smallest, limit, mean / stddev)
    return ratio.clamp(-bound, bound), stddev


def _largest_ratio(dtype: torch.dtype) -> float:
    """Where the density reaches the smallest normal number: 13 in float32, 37.5 in float64."""
    return math.sqrt(-2 * (math.log(torch.finfo(dtype).tiny) + 2.5))


def _smallest_tail(dtype: torch.dtype) -> float:
    """Just above the density at the largest ratio, so that both tails end in an exact zero."""
    return torch.finfo(dtype).tiny * 10


def smallest_variance(dtype: torch.dtype) -> float:
    """Below this a variance counts as zero; large enough that m / v, met in the gradient, does not overflow."""
    return float(torch.finfo(dtype).tiny ** 0.75)
