"""Monte-Carlo samples of a random network, propagated through its layers together with the moments under audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.rules import (
    add,
    concatenate,
    elementwise,
    flatten,
    fork,
    gaussian_linear,
    keep_probability,
    layer_norm,
    leaky_relu,
    linear,
    mpgelu,
    multiply,
    periodic,
    relu,
    scale,
)
from mpgelu.rules.elementwise import Activation
from mpgelu.rules.leaky_relu import Covariance as LeakyCovariance
from mpgelu.rules.relu import Covariance

ENOUGH = 25  # effective number of deviations that a sample variance needs for its standard error to be reliable


class Source:
    r"""The source of random numbers of an audit, which ensures that every mask shows both of its outcomes.

    A unit that is dropped once in a million draws would hardly ever be dropped in a sample, and its variance would
    look like zero. Therefore half of the draws follow the distribution :math:`p` of the masks, and the others are
    assigned in turn to the layers with masks and to their units, where the unit takes its rarer outcome, of
    probability :math:`r`. All draws together follow

    .. math:: q = \tfrac12 (1 + \rho)\, p, \qquad
        \rho = \operatorname{mean}_{\text{layers}} \operatorname{mean}_{\text{units}} [\text{rarer outcome}] / r

    and averages with the weights :math:`p / q = 2 / (1 + \rho) \le 2` are unbiased for the network. This is the
    balance heuristic of Veach and Guibas (1995) in the deterministic mixture of Owen and Zhou (2000). Masks of later
    layers, and those too small to matter, enter with the mean of their term, 1.

    Args:
        seed: Seed of the random numbers.
        device: Device on which they are drawn.
        draws: Total number of draws.

    Attributes:
        layers: Number of layers with masks; no outcome is assigned before it is known.
        done: Number of such layers that the current pass has reached.
        missed: Whether rare masks exist that so few draws do not cover.
        gaussian: Whether there is randomness other than masks.
    """

    def __init__(self, seed: int, device: torch.device, draws: int) -> None:
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.draws = draws
        self.layers = 0
        self.missed = self.gaussian = False
        self._starts: list[Tensor] = []  # of each layer, the unit of each row that has the first turn
        self.begin(0)

    def begin(self, first: int) -> None:
        """Start a pass through the network with the draws from number ``first`` on."""
        self._first, self.done = first, 0
        self._ratio = torch.zeros(1, 1, dtype=torch.float64, device=self.generator.device)

    @property
    def weights(self) -> Tensor:
        """Importance weights of the draws given all masks so far, ``(draws, rows)`` or ``(1, 1)``."""
        ratio = (self._ratio + self.layers - self.done) / self.layers if self.layers else torch.ones_like(self._ratio)
        return 2 / (1 + ratio)

    def normal_like(self, value: Tensor) -> Tensor:
        """Return standard normal numbers of the shape of a tensor."""
        self.gaussian = True
        return torch.randn(value.shape, generator=self.generator, dtype=value.dtype, device=value.device)

    def mask(self, value: Samples, keep: Tensor, drop: Tensor) -> Tensor:
        """Return a mask of ones (kept) and zeros (dropped) in the shape of the values of ``value``.

        Args:
            value: The samples to be masked, ``(draws, rows, *event)``.
            keep: Probability of keeping each unit, ``(rows, *event)``.
            drop: Probability of dropping it; given separately for accuracy in both tails.
        """
        keep, drop, square = (
            part.flatten(1) for part in (keep, drop, value.moments.variance + value.moments.mean.square())
        )
        rare, values = torch.minimum(keep, drop), value.values.flatten(2)
        smallest = torch.finfo(square.dtype).eps ** 2 * (keep * square).amax(-1, keepdim=True)
        outcome = torch.bernoulli(rare.to(values).expand(values.shape), generator=self.generator)
        if self.layers:
            self._deal_out(outcome, rare, rare * square > smallest)
        self.done += 1
        return outcome.sub_((keep > drop).to(outcome)).abs_().view(value.values.shape)

    def _deal_out(self, outcome: Tensor, rare: Tensor, matters: Tensor) -> None:
        """Force the rarer outcome of each relevant unit in the draws assigned to it, and update the weights."""
        draws, rows, n = outcome.shape
        period = 2 * self.layers
        if len(self._starts) == self.done:
            self._starts.append(torch.randint(n, (rows,), generator=self.generator, device=outcome.device))
            never = matters & (rare * self.draws < ENOUGH)
            self.missed |= self.draws < period * n and bool(never.any())
        turns = torch.arange((2 * self.done + 1 - self._first) % period, draws, period, device=outcome.device)
        units = ((self._first + turns) // period).unsqueeze(-1) + self._starts[self.done]  # (turns, rows)
        place = turns.unsqueeze(-1), torch.arange(rows, device=outcome.device), units % n
        outcome[place] = torch.maximum(outcome[place], matters[place[1:]].to(outcome))
        terms = outcome * torch.where(matters, 1 / rare, 0).to(outcome)
        self._ratio = self._ratio + (terms.sum(-1).double() + (~matters).sum(-1)) / n


class Averaged(NamedTuple):
    """Conditional mean and variance of each value over the last masks and random weights, given all earlier draws.

    Layers are judged by these instead of the drawn values, so that outcomes contribute however rare they are.

    Attributes:
        mean: Conditional means, ``(draws, rows, n)``.
        variance: Conditional variances, ``(draws, rows, n)``.
        weights: Importance weights of the earlier draws, ``(draws, rows)`` or ``(1, 1)``.
        apart: Whether units are conditionally independent.
    """

    mean: Tensor
    variance: Tensor
    weights: Tensor
    apart: bool = True


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws of a random value together with its propagated moments; every rule acts on both.

    The moments are needed because the mask of MP-GELU depends on the statistics of a unit, not on its sampled value.

    Args:
        values: Sampled values, ``(draws, rows, *event)``.
        moments: Propagated moments, ``(rows, *event)``.
        source: Source of the random numbers and of the weights of the draws.
        averaged: The same draws, averaged over the last random operation; ``None`` if that was deterministic.
    """

    values: Tensor
    moments: Moments
    source: Source
    averaged: Averaged | None = None

    @property
    def given(self) -> Averaged:
        """Conditional moments of units that are independent given earlier draws, the start of the next average."""
        if self.averaged is not None and self.averaged.apart:
            return self.averaged
        return Averaged(self.values, torch.zeros_like(self.values[:1]), self.source.weights)

    def flat(self) -> Samples:
        """Return the same draws as those of vectors, ``(draws, rows, n)``, whatever the shape of an event."""
        averaged = self.averaged
        if averaged is not None:
            averaged = averaged._replace(mean=averaged.mean.flatten(2), variance=averaged.variance.flatten(2))
        return Samples(self.values.flatten(2), flatten(self.moments), self.source, averaged)


@linear.register
def _(value: Samples, weight: Tensor, bias: Tensor | None = None) -> Samples:
    averaged = None
    if value.averaged is not None and value.averaged.apart:
        mean, variance, weights, _ = value.averaged
        averaged = Averaged(linear(mean, weight, bias), F.linear(variance, weight.square()), weights, apart=False)
    return Samples(linear(value.values, weight, bias), linear(value.moments, weight, bias), value.source, averaged)


@gaussian_linear.register
def _(
    value: Samples, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> Samples:
    # Given h, the outputs of a layer with independent Gaussian weights are independent Gaussians.
    variance = F.linear(value.values.square(), weight_variance, bias_variance)
    values = linear(value.values, weight, bias) + variance.sqrt() * value.source.normal_like(variance)
    moments = gaussian_linear(value.moments, weight, weight_variance, bias, bias_variance)
    mean, before, weights, _ = value.given
    variance = F.linear(before, weight.square()) + F.linear(mean.square() + before, weight_variance, bias_variance)
    averaged = Averaged(linear(mean, weight, bias), variance, weights, apart=False)
    return Samples(values, moments, value.source, averaged)


@multiply.register
def _(value: Samples, gain: Tensor | float, noise: Tensor | float) -> Samples:
    # A mask that is c with probability k and otherwise 0 has mean g = c k and variance c^2 k (1 - k).
    mean, variance = (torch.as_tensor(part, device=value.values.device).double() for part in (gain, noise))
    keep, drop = (part / (mean.square() + variance) for part in (mean.square(), variance))
    return _mask(value, multiply(value.moments, gain, noise), keep, drop, mean / keep)


@mpgelu.register
def _(value: Samples) -> Samples:
    mean, variance = value.moments.mean, value.moments.variance
    keep, drop = (keep_probability(part, variance).double() for part in (mean, -mean))
    return _mask(value, mpgelu(value.moments), keep, drop, torch.ones_like(keep))


def _mask(value: Samples, moments: Moments, keep: Tensor, drop: Tensor, factor: Tensor) -> Samples:
    """Return samples with each unit multiplied by a factor or dropped; probabilities broadcast to rows and units."""
    keep, drop, factor = (part.expand(value.moments.mean.shape) for part in (keep, drop, factor))
    mean, variance, weights, _ = value.given
    variance = (variance + drop.to(mean) * mean.square()) * (keep * factor.square()).to(mean)
    averaged = Averaged(mean * (keep * factor).to(mean), variance, weights)
    values = value.source.mask(value, keep, drop).mul_(value.values).mul_(factor.to(mean))
    return Samples(values, moments, value.source, averaged)


@relu.register
def _(value: Samples, covariance: Covariance = "exact") -> Samples:
    return Samples(torch.relu(value.values), relu(value.moments, covariance), value.source)


@leaky_relu.register
def _(value: Samples, negative_slope: float = 0.01, covariance: LeakyCovariance = "exact") -> Samples:
    values = leaky_relu(value.values, negative_slope)
    return Samples(values, leaky_relu(value.moments, negative_slope, covariance), value.source)


@elementwise.register
def _(value: Samples, activation: Activation) -> Samples:
    return Samples(activation(value.values), elementwise(value.moments, activation), value.source)


@periodic.register
def _(value: Samples, frequency: Tensor, phase: Tensor, weight: Tensor) -> Samples:
    values = periodic(value.values, frequency, phase, weight)
    return Samples(values, periodic(value.moments, frequency, phase, weight), value.source)


@layer_norm.register
def _(value: Samples, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Samples:
    values = layer_norm(value.values, weight, bias, eps)
    return Samples(values, layer_norm(value.moments, weight, bias, eps), value.source)


@scale.register
def _(value: Samples, gain: Tensor | float) -> Samples:
    return Samples(scale(value.values, gain), scale(value.moments, gain), value.source)


@add.register
def _(value: Samples, other: Samples | Tensor | float, alpha: float = 1.0) -> Samples:
    drawn, moments = (other.values, other.moments) if isinstance(other, Samples) else (other, other)
    return Samples(add(value.values, drawn, alpha), add(value.moments, moments, alpha), value.source)


@concatenate.register
def _(value: Samples, *others: Samples, dim: int = -1) -> Samples:
    moments = concatenate(value.moments, *(other.moments for other in others), dim=dim)
    values = concatenate(value.values, *(other.values for other in others), dim=dim if dim < 0 else dim + 1)
    return Samples(values, moments, value.source)


@flatten.register
def _(value: Samples, start_dim: int = 1, end_dim: int = -1) -> Samples:
    moments = flatten(value.moments, start_dim, end_dim)
    return Samples(value.values.reshape(len(value.values), *moments.shape), moments, value.source)


@fork.register
def _(value: Samples) -> Samples:
    return Samples(value.values, fork(value.moments), value.source)


def draw(moments: Moments, draws: int, source: Source) -> Samples:
    """Return samples of an input: constant if it is certain, otherwise Gaussian with its covariance.

    Args:
        moments: Moments of the input, ``(rows, *event)``.
        draws: Number of samples of each row.
        source: Source of the random numbers.
    """
    shape = (draws, *moments.mean.shape)
    if not moments.variance.any():
        return Samples(moments.mean.expand(shape), moments, source)
    noise = source.normal_like(moments.mean.expand(shape))
    if isinstance(moments, DiagonalMoments):
        return Samples(moments.mean + moments.stddev * noise, moments, source)
    values, vectors = torch.linalg.eigh(moments.covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return Samples(moments.mean + (root @ noise.unsqueeze(-1)).squeeze(-1), moments, source)
