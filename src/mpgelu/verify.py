"""An audit of propagated moments against Monte-Carlo sampling of the same random network, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from scipy.special import ndtri
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.parts import is_composed, parts_of
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
    relu,
    scale,
)
from mpgelu.rules.elementwise import Activation
from mpgelu.rules.leaky_relu import Covariance as LeakyCovariance
from mpgelu.rules.relu import Covariance

_DRAWS = 20_000
_FALSE_ALARM = 1e-3  # probability that an exact layer fails, over all that is compared in it together
_COMPARED = 3  # kinds of numbers: means, covariances, the variances of all units together
_CACHED, _CHUNK = 2**17, 2**22  # sampled values of a layer at a time: what is fastest, and at most
_AT_ONCE = 256  # draws, to which a larger chunk than the fastest is due: moments are propagated once for each chunk
_WEAK = 0.5  # skewness from which on a distribution is visibly lopsided; a gamma distribution of shape 16 has it
# Layers whose outputs are what a nonlinearity, or at the end the likelihood, takes for Gaussian.
_MIXING = ("Linear", "GaussianLinear", "BatchNorm1d", "LayerNorm", "Operation")
_EXACT = ("Dropout", "MPGELU")  # assume nothing
_MOST = 0.9  # share of the units of a layer below which it counts as undecided
_ENOUGH = 25  # a variance that fewer deviations make up is not one that sampling could tell
_ROUNDING = 64  # machine epsilons of its row's size below which a standard deviation counts as zero


class _Source:
    r"""Random numbers of an audit, which see to it that every mask shows both of its outcomes.

    A unit that is dropped once in a million draws would hardly ever be, and its variance would look like zero. So half
    of the draws follow the law :math:`p` of the masks, and the others are dealt out in turn to the layers with masks
    and to their units: there this unit takes its rarer outcome, of probability :math:`r`. All draws together follow

    .. math:: q = \tfrac12 (1 + \rho)\, p, \qquad
        \rho = \operatorname{mean}_{\text{layers}} \operatorname{mean}_{\text{units}} [\text{rarer outcome}] / r

    and averages with the weights :math:`p / q = 2 / (1 + \rho) \le 2` are those of the network, without bias: the
    balance heuristic of Veach and Guibas (1995), in the deterministic mixture of Owen and Zhou (2000). Masks that are
    still to come, and those too small to matter, count with the mean of their term, 1.

    Args:
        seed: of the random numbers.
        device: where to draw them.
        draws: how many there will be in all.

    Attributes:
        layers: how many layers with masks the network has; nothing is dealt out before this is known.
        done: how many of them this pass through the network has seen.
        missed: whether there are rare masks that have no turn in so few draws.
        gaussian: whether there is other randomness than that of masks.
    """

    def __init__(self, seed: int, device: torch.device, draws: int) -> None:
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.draws = draws
        self.layers = 0
        self.missed = self.gaussian = False
        self._starts: list[Tensor] = []  # of each layer, the unit of each row that has the first turn
        self.begin(0)

    def begin(self, first: int) -> None:
        """Start a pass through the network, with draws from number ``first`` on."""
        self._first, self.done = first, 0
        self._ratio = torch.zeros(1, 1, dtype=torch.float64, device=self.generator.device)

    @property
    def weights(self) -> Tensor:
        """Of the draws by all masks so far, ``(draws, rows)`` or ``(1, 1)``."""
        ratio = (self._ratio + self.layers - self.done) / self.layers if self.layers else torch.ones_like(self._ratio)
        return 2 / (1 + ratio)

    def normal_like(self, value: Tensor) -> Tensor:
        """Standard Gaussian numbers of the same shape."""
        self.gaussian = True
        return torch.randn(value.shape, generator=self.generator, dtype=value.dtype, device=value.device)

    def mask(self, value: Samples, keep: Tensor, drop: Tensor) -> Tensor:
        """One where a unit is kept, zero where it is dropped, ``(draws, rows, n)``; probabilities are ``(rows, n)``."""
        rare, square = torch.minimum(keep, drop), value.moments.variance + value.moments.mean.square()
        smallest = torch.finfo(square.dtype).eps ** 2 * (keep * square).amax(-1, keepdim=True)
        outcome = torch.bernoulli(rare.to(value.values).expand(value.values.shape), generator=self.generator)
        if self.layers:
            self._deal_out(outcome, rare, rare * square > smallest)
        self.done += 1
        return outcome.sub_((keep > drop).to(outcome)).abs_()

    def _deal_out(self, outcome: Tensor, rare: Tensor, matters: Tensor) -> None:
        """Have each unit that matters take its rarer outcome where it has its turn."""
        draws, rows, n = outcome.shape
        period = 2 * self.layers
        if len(self._starts) == self.done:
            self._starts.append(torch.randint(n, (rows,), generator=self.generator, device=outcome.device))
            never = matters & (rare * self.draws < _ENOUGH)
            self.missed |= self.draws < period * n and bool(never.any())
        turns = torch.arange((2 * self.done + 1 - self._first) % period, draws, period, device=outcome.device)
        units = ((self._first + turns) // period).unsqueeze(-1) + self._starts[self.done]  # (turns, rows)
        place = turns.unsqueeze(-1), torch.arange(rows, device=outcome.device), units % n
        outcome[place] = torch.maximum(outcome[place], matters[place[1:]].to(outcome))
        terms = outcome * torch.where(matters, 1 / rare, 0).to(outcome)
        self._ratio = self._ratio + (terms.sum(-1).double() + (~matters).sum(-1)) / n


class _Averaged(NamedTuple):
    """Mean and variance of each value over the last masks and random weights, given all draws before them.

    A layer is judged by these and not by what was drawn: however rare an outcome is, also together with rare ones
    further back, it has its part in them.

    Args:
        mean: ``(draws, rows, n)``.
        variance: ``(draws, rows, n)``.
        weights: of the draws before, ``(draws, rows)`` or ``(1, 1)``.
        apart: whether units are independent, given the draws before.
    """

    mean: Tensor
    variance: Tensor
    weights: Tensor
    apart: bool = True


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws of a random vector beside its propagated moments; every rule acts on both.

    The moments are needed because MP-GELU's mask depends on the unit's statistics, not on its sampled value.

    Args:
        values: ``(draws, *batch, n)``.
        moments: the propagated moments ``(*batch, n)``.
        source: of randomness, which knows the weights of the draws.
        averaged: the same draws, averaged over what happened last; ``None`` if that was not random.
    """

    values: Tensor
    moments: Moments
    source: _Source
    averaged: _Averaged | None = None

    @property
    def given(self) -> _Averaged:
        """Units that are independent given earlier draws, from which averages over a next step can be taken."""
        if self.averaged is not None and self.averaged.apart:
            return self.averaged
        return _Averaged(self.values, torch.zeros_like(self.values[:1]), self.source.weights)


@linear.register
def _(value: Samples, weight: Tensor, bias: Tensor | None = None) -> Samples:
    averaged = None
    if value.averaged is not None and value.averaged.apart:
        mean, variance, weights, _ = value.averaged
        averaged = _Averaged(linear(mean, weight, bias), F.linear(variance, weight.square()), weights, apart=False)
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
    averaged = _Averaged(linear(mean, weight, bias), variance, weights, apart=False)
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
    """Units multiplied by a factor or dropped, with probabilities that need not be apart for each row and unit."""
    keep, drop, factor = (part.expand(value.moments.mean.shape) for part in (keep, drop, factor))
    mean, variance, weights, _ = value.given
    variance = (variance + drop.to(mean) * mean.square()) * (keep * factor.square()).to(mean)
    averaged = _Averaged(mean * (keep * factor).to(mean), variance, weights)
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
    return Samples(concatenate(value.values, *(other.values for other in others)), moments, value.source)


@flatten.register
def _(value: Samples, start_dim: int = 1, end_dim: int = -1) -> Samples:
    return Samples(value.values, flatten(value.moments, start_dim, end_dim), value.source)


@fork.register
def _(value: Samples) -> Samples:
    return Samples(value.values, fork(value.moments), value.source)


@dataclass(frozen=True)
class LayerAudit:
    """How one layer's propagated moments compare with sampling; the worst entry over all rows and units.

    Attributes:
        layer: name of the layer in the network.
        kind: its class.
        mean_error: largest error of a mean, in standard deviations of its unit.
        mean_se: standard error of that estimate, in the same unit.
        covariance_error: largest error of a covariance, relative to the product of the two standard deviations; or that
            of the variances of all units together, if it is further beyond its allowance.
        covariance_se: standard error of that estimate, in the same unit.
        smallest_eigenvalue: of the propagated covariances, relative to the largest variance of its row.
        skewness: largest absolute sample skewness, of units with at least a tenth of the largest standard deviation of
            their row; 0 for a Gaussian, which the nonlinearities assume.
        judged: share of the units that are not too rarely random for the draws to tell their variance.
        decided: whether the draws can tell right from wrong for most units.
        passed: whether nothing was found wrong: both errors are within their allowance, sampling error included.
    """

    layer: str
    kind: str
    mean_error: float
    mean_se: float
    covariance_error: float
    covariance_se: float
    smallest_eigenvalue: float
    skewness: float
    judged: float
    decided: bool
    passed: bool

    @property
    def verdict(self) -> str:
        """In one word."""
        return "FAIL" if not self.passed else "pass" if self.decided else "undecided"


@dataclass(frozen=True)
class Audit:
    """The result of :func:`verify`: one entry per layer. Prints as a table."""

    layers: tuple[LayerAudit, ...]
    draws: int
    rows: int
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether no layer was found wrong."""
        return all(layer.passed for layer in self.layers)

    @property
    def decided(self) -> bool:
        """Whether the draws can tell right from wrong at every layer."""
        return all(layer.decided for layer in self.layers)

    def words(self) -> str:
        """The findings in words: whether the moments are right, and where the Gaussian assumption is weak."""
        wrong = [row for row in self.layers if not row.passed]
        undecided = [row.layer for row in self.layers if row.verdict == "undecided"]
        lines = ["Means and covariances agree with sampling at every layer."]
        if wrong:
            worst = max(wrong, key=lambda row: max(row.mean_error, row.covariance_error))
            lines = [
                f"Means or covariances disagree with sampling at {_listed([row.layer for row in wrong])}, most at "
                f"layer {worst.layer} ({worst.kind}): by {worst.mean_error:.2f} standard deviations in a mean, by "
                f"{worst.covariance_error:.2f} times the two standard deviations in a covariance."
            ]
        elif undecided:
            agreeing = len(self.layers) - len(undecided)
            lines = [f"Means and covariances agree with sampling at {agreeing} of {len(self.layers)} layers."]
        if undecided:
            lines.append(
                f"Undecided at {_listed(undecided)}, neither right nor wrong: too rarely random for {self.draws} "
                "draws. More draws tell more."
            )
        partly = [row for row in self.layers if row.judged < 1]
        if partly:
            least = min(partly, key=lambda row: row.judged)
            lines.append(
                f"{1 - least.judged:.1%} of the units of layer {least.layer}"
                + f", and of {len(partly) - 1} other layers," * (len(partly) > 1)
                + f" are too rarely random for {self.draws} draws and were left out."
            )
        misled = [row.layer for row in wrong if row.kind not in (*_MIXING, *_EXACT)]
        if misled:
            lines.append(f"The Gaussian assumption is wrong for some inputs of the nonlinearity at {_listed(misled)}.")
        skewed = [row for row in self.layers if row.skewness > _WEAK and row.kind in _MIXING]
        if skewed:
            worst = max(skewed, key=lambda row: row.skewness)
            lines.append(
                f"The Gaussian assumption is weak at {_listed([row.layer for row in skewed])}: units are skewed, most "
                f"at layer {worst.layer} ({worst.kind}) with {worst.skewness:.1f} (0 is Gaussian). Means and variances "
                "after MP-GELU do not depend on it; those after other nonlinearities, and quantiles, do."
            )
        else:
            lines.append(f"No unit that is taken for Gaussian has a skewness above {_WEAK}.")
        return "\n".join(lines)

    def frame(self) -> pd.DataFrame:
        """The table as a DataFrame."""
        return pd.DataFrame([vars(layer) for layer in self.layers])

    def __str__(self) -> str:
        """The table, with what its columns mean."""
        head = f"{'layer':12} {'kind':14} {'mean error':>18} {'covariance error':>18} {'min eigen':>10} {'skew':>6}"
        lines = [head + "  verdict", "-" * (len(head) + 9)]
        for row in self.layers:
            mean = f"{row.mean_error:.4f} ± {row.mean_se:.4f}"
            covariance = f"{row.covariance_error:.4f} ± {row.covariance_se:.4f}"
            lines.append(
                f"{row.layer:12} {row.kind:14} {mean:>18} {covariance:>18} {row.smallest_eigenvalue:>10.1e} "
                f"{row.skewness:>6.2f}  {row.verdict}"
            )
        lines.append(
            f"{self.draws} draws, {self.rows} rows; errors in standard deviations, largest entry; "
            f"passes within sampling error + {self.tolerance:g}"
        )
        return "\n".join(lines)


def _listed(layers: list[str]) -> str:
    names = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    return f"layer{'s' * (len(layers) > 1)} {names}"


def verify(
    network: Any,
    x: Any,
    *,
    moments: Callable[[Tensor], Moments] | None = None,
    draws: int | None = None,
    tolerance: float = 0.01,
    seed: int = 0,
    networks: int = 3,
) -> Audit:
    """Compare propagated moments with sampling the same random network, after every layer.

    Sampling draws dropout masks, Gaussian weights and MP-GELU masks (with the keep-probabilities that propagation
    found) and applies ReLU to the sampled values. MP-GELU networks agree to sampling error whatever their depth with
    full and factored moments; ReLU assumes Gaussian inputs, which the last columns let you judge.

    However rare an outcome of a mask is, some draws have it, with a weight that makes up for that. An exact layer is
    called wrong with a probability of at most 1/1000. What remains too rarely random for the draws, such as a Gaussian
    unit that is hardly ever positive, is left out; a layer with many such units is *undecided*, neither right nor
    wrong.

    Args:
        network: built from this library's layers, or converted to them; or a fitted estimator or its ensemble, whose
            layers are then named by the number of the network too, ``3:0``.
        x: inputs ``(rows, features)``, a tensor, of an estimator raw ones in any form; a dozen rows tell enough.
        moments: how to start, for example ``DiagonalMoments.certain``, to see what dropping correlations costs; by
            default exact, or what an estimator predicts with.
        draws: samples per row, by default 20,000.
        tolerance: error allowed beyond sampling error, in standard deviations of the units.
        seed: of the sampling.
        networks: how many of an ensemble's networks to audit, those of the largest weights.

    Example:
        >>> import torch, mpgelu
        >>> audit = mpgelu.verify(mpgelu.network(3, hidden=(8,)), torch.randn(4, 3))
        >>> audit.passed
        True
    """
    if is_composed(network):
        return _verify_members(network, x, moments, draws, tolerance, seed, networks)
    moments, draws = moments or FactoredMoments.certain, _DRAWS if draws is None else draws
    if x.dim() != 2:
        raise InputError(f"verify: x must have shape (rows, features), got {tuple(x.shape)}")
    if draws < 100:
        raise InputError(f"verify: draws must be at least 100, got {draws}")
    start = moments(x)
    source = _Source(seed, x.device, draws)
    tallies: dict[str, _Tally] = {}
    calls: dict[str, int] = {}  # a module may be used several times

    def record(name: str, module: nn.Module) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Samples):
                calls[name] = calls.get(name, 0) + 1
                key = name if calls[name] == 1 else f"{name} ({calls[name]})"
                if key not in tallies:
                    tallies[key] = _Tally(type(module).__name__, output.moments)
                tallies[key].add(output)

        return hook

    with torch.no_grad():
        network(_draw(start, 1, source))  # to count the layers with masks
    source.layers = source.done
    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(record(name, module)) for name, module in leaves]
    widest = max([x.shape[-1], *(max(p.shape) for p in network.parameters() if p.dim() > 1)])
    chunk = _draws_at_a_time(widest * len(x))
    try:
        with torch.no_grad():
            for first in range(0, draws, chunk):
                calls.clear()
                source.begin(first)
                network(_draw(start, min(chunk, draws - first), source))
    finally:
        for handle in hooks:
            handle.remove()
    layers = tuple(tally.result(name, tolerance, source) for name, tally in tallies.items())
    return Audit(layers, draws, len(x), tolerance)


def _draws_at_a_time(size: int) -> int:
    """For a layer with so many values in each draw."""
    return max(1, _CACHED // size, min(_AT_ONCE, _CHUNK // size))


def _verify_members(
    model: Any,
    X: Any,
    moments: Callable[[Tensor], Moments] | None,
    draws: int | None,
    tolerance: float,
    seed: int,
    networks: int,
) -> Audit:
    """The audits of an ensemble's heaviest networks as one."""
    parts = parts_of("verify", model)
    if networks < 1:
        raise InputError(f"verify: networks must be at least 1, got {networks}")
    start = moments or (FactoredMoments if parts.covariance == "exact" else DiagonalMoments).certain
    x = parts.standardised("verify", X)
    heaviest = parts.weights.argsort(descending=True, stable=True)[:networks]
    layers: list[LayerAudit] = []
    for place in sorted(heaviest.tolist()):
        audit = verify(parts.networks[place], x, moments=start, draws=draws, tolerance=tolerance, seed=seed + place)
        layers += [replace(layer, layer=f"{place}:{layer.layer}") for layer in audit.layers]
    return Audit(tuple(layers), audit.draws, len(x), tolerance)


class _Compared(NamedTuple):
    """Errors of some numbers, the standard errors of these, and which of them the draws can tell."""

    error: Tensor
    se: Tensor
    told: Tensor

    def worst(self, tolerance: float) -> tuple[float, float, float]:
        """Error and standard error of what is furthest beyond its allowance, and by how much; Bonferroni over all."""
        if not self.told.any():
            return math.nan, math.nan, -math.inf
        critical = -ndtri(_FALSE_ALARM / _COMPARED / 2 / self.error.numel())
        excess = torch.where(self.told, self.error - critical * self.se - tolerance, -math.inf).flatten()
        place = int(excess.argmax())
        return self.error.flatten()[place].item(), self.se.flatten()[place].item(), excess[place].item()


class _Tally:
    """Running sums of weighted powers of one layer's samples, and what they say about its moments.

    Everything is in units of the size of its row, the root of the largest second moment that was propagated.
    """

    def __init__(self, kind: str, moments: Moments) -> None:
        self.kind = kind
        self.eps = torch.finfo(moments.mean.dtype).eps
        size = (moments.variance + moments.mean.square()).double().amax(-1, keepdim=True).sqrt()  # (rows, 1)
        self.size = torch.where(size > 0, size, 1)
        self.mean = moments.mean.double() / self.size
        self.covariance = moments.covariance.double() / self.size.square().unsqueeze(-1)
        self.stated = _diagonal(self.covariance)
        self.centre = self.mean  # until there are draws
        self.count = 0
        self.sums: list[Tensor | float] = [0.0] * 8

    def add(self, samples: Samples) -> None:
        """Take note of more draws, centred at the mean of the first ones for accuracy."""
        averaged = samples.averaged
        if self.count == 0:
            values, _, weights, _ = averaged or _Averaged(samples.values, samples.values, samples.source.weights)
            self.centre = (weights.unsqueeze(-1) * values).mean(0) / weights.mean(0).unsqueeze(-1) / self.size
        self.count += len(samples.values)
        centred, weights = self._centred(samples.values, samples.source.weights)
        pairs = weights * centred.square()
        cubes = (pairs * centred).sum(1)
        mean, before, second, squares = centred, weights, pairs, pairs
        if averaged is not None:
            mean, before = self._centred(averaged.mean, averaged.weights)
            second = before * mean.square()
            squares = second + before * (averaged.variance / self.size.square().to(mean)).transpose(0, 1)
            if averaged.apart:
                centred, weights, pairs = mean, before, second
        powers = (
            (before.mT @ mean).squeeze(-2),
            (before.mT @ second).squeeze(-2),
            squares.sum(1),
            squares.square().sum(1),
            cubes,
            squares.sum(-1).square().sum(-1),
            (weights * centred).mT @ centred,
            pairs.mT @ pairs,
        )
        self.sums = [total + power.double() for total, power in zip(self.sums, powers, strict=True)]

    def _centred(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``(rows, draws, n)`` from the centre, in units of the size, and weights ``(rows, draws, 1)``."""
        centred = (values / self.size.to(values)).sub_(self.centre.to(values))
        return centred.transpose(0, 1), weights.to(values).expand(values.shape[:2]).mT.unsqueeze(-1)

    def result(self, name: str, tolerance: float, source: _Source) -> LayerAudit:
        """Errors of the propagated moments in units of the sampled standard deviations."""
        averages = (torch.as_tensor(total) / self.count for total in self.sums)
        shift, mean_spread, second, fourth, cubes, total_square, products, pair_squares = averages
        variance = (second - shift.square()).clamp_min(0)
        sampled = _with_diagonal(products - _outer(shift), variance)
        moves, claims = (part > (_ROUNDING * self.eps) ** 2 for part in (variance, self.stated))
        # Where all randomness is that of masks, both outcomes of each were seen, and what did not move does not.
        told = torch.where(moves, self._is_enough(second, fourth), ~claims | (not source.gaussian))
        scale = torch.where(moves, variance, torch.where(claims, self.stated, 1)).sqrt()
        # Where less than expected was seen, less was seen too of what standard errors are estimated from.
        shortfall = _ratio(self.stated, variance).clamp_min(1)
        mean = _Compared(
            ((self.centre + shift - self.mean).abs() - 4 * self.eps).clamp_min(0) / scale,
            (mean_spread * shortfall / self.count).sqrt() / scale,
            told,
        )
        # And units that rarely move together may not have done so once.
        spread = (pair_squares - products.square()).clamp_min(0) * _outer(shortfall.sqrt())
        spread = torch.maximum(spread, _outer(torch.maximum(variance, self.stated)))
        spread = _with_diagonal(spread, (fourth - second.square()).clamp_min(0) * shortfall)
        covariance = _Compared(
            (sampled - self.covariance).abs() / _outer(scale),
            (spread / self.count).sqrt() / _outer(scale),
            _outer(told),
        )
        total = self._total(variance.sum(-1), second.sum(-1), total_square, (moves | claims).any(-1))
        *mean_worst, mean_excess = mean.worst(tolerance)
        *worst, excess = max(covariance.worst(tolerance), total.worst(tolerance), key=itemgetter(2))
        within = max(mean_excess, excess) <= 1e-6  # a layer without randomness agrees to float32 rounding only
        skewness = _ratio(cubes - 3 * shift * second + 2 * shift**3, variance**1.5)
        visible = variance > 1e-2 * variance.amax(-1, keepdim=True)
        eigenvalues, largest = torch.linalg.eigvalsh(self.covariance), self.stated.amax(-1)
        judged = told.double().mean().item()
        return LayerAudit(
            layer=name,
            kind=self.kind,
            mean_error=mean_worst[0],
            mean_se=mean_worst[1],
            covariance_error=worst[0],
            covariance_se=worst[1],
            smallest_eigenvalue=(eigenvalues[..., 0] / torch.where(largest > 0, largest, 1)).min().item(),
            skewness=torch.where(told & visible, skewness, 0).abs().max().item(),
            judged=judged,
            decided=judged >= _MOST and (within or not source.missed),
            passed=within or source.missed,
        )

    def _total(self, variance: Tensor, second: Tensor, fourth: Tensor, random: Tensor) -> _Compared:
        """The variances of all units together, relative to what was propagated, averaged over rows ``(rows,)``."""
        stated = self.stated.sum(-1)
        told = random & self._is_enough(second, fourth)
        base, rows = torch.where(stated > 0, stated, variance), told.sum().clamp_min(1)
        error = torch.where(told, _ratio(variance - stated, base), 0).sum() / rows
        spread = (fourth - second.square()).clamp_min(0) * _ratio(stated, variance).clamp_min(1)
        se = torch.where(told, _ratio(spread, base.square()), 0).sum().div(self.count).sqrt() / rows
        return _Compared(error.abs(), se, told.any())

    def _is_enough(self, second: Tensor, fourth: Tensor) -> Tensor:
        """Whether a second moment is made up of enough deviations, had they all been equal."""
        return self.count * second.square() > _ENOUGH * fourth


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _with_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    return torch.diagonal_scatter(matrix, values, dim1=-2, dim2=-1)


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


def _ratio(value: Tensor, base: Tensor) -> Tensor:
    """A quotient, zero where the base is."""
    return torch.where(base > 0, value / torch.where(base > 0, base, 1), 0)


def _draw(moments: Moments, draws: int, source: _Source) -> Samples:
    """Samples of an input: exact when it is certain, otherwise Gaussian with its covariance."""
    shape = (draws, *moments.mean.shape)
    if not moments.variance.any():
        return Samples(moments.mean.expand(shape), moments, source)
    values, vectors = torch.linalg.eigh(moments.covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = source.normal_like(moments.mean.expand(shape))
    return Samples(moments.mean + (root @ noise.unsqueeze(-1)).squeeze(-1), moments, source)
