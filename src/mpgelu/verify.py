"""An audit of propagated moments against Monte-Carlo sampling of the same random network, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from scipy.special import ndtri
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.layers import Dropout
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

_DRAWS = (20_000, 200_000)  # first and second choice
_FALSE_ALARM = 1e-3  # probability that an exact layer fails, over all its entries together
_CHUNK = 2**22  # sampled values held at a time
_WEAK = 0.5  # skewness from which on a distribution is visibly lopsided; a gamma distribution of shape 16 has it
# Layers whose outputs are what a nonlinearity, or at the end the likelihood, takes for Gaussian.
_MIXING = ("Linear", "GaussianLinear", "BatchNorm1d", "LayerNorm", "Operation")
_EXACT = ("Dropout", "MPGELU")  # assume nothing
_MOST = 0.9  # share of the units of a layer below which it counts as unclear
_ENOUGH = 100  # a unit that is non-zero in fewer draws has no variance that sampling could tell


@dataclass(frozen=True, eq=False)
class Samples:
    """Draws of a random vector beside its propagated moments; every rule acts on both.

    The moments are needed because MP-GELU's mask depends on the unit's statistics, not on its sampled value.

    Args:
        values: ``(draws, *batch, n)``.
        moments: the propagated moments ``(*batch, n)``.
        generator: source of randomness.
    """

    values: Tensor
    moments: Moments
    generator: torch.Generator


@linear.register
def _(value: Samples, weight: Tensor, bias: Tensor | None = None) -> Samples:
    return Samples(linear(value.values, weight, bias), linear(value.moments, weight, bias), value.generator)


@gaussian_linear.register
def _(
    value: Samples, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> Samples:
    # Given h, the outputs of a layer with independent Gaussian weights are independent Gaussians.
    variance = F.linear(value.values.square(), weight_variance, bias_variance)
    values = linear(value.values, weight, bias) + variance.sqrt() * _normal_like(variance, value.generator)
    moments = gaussian_linear(value.moments, weight, weight_variance, bias, bias_variance)
    return Samples(values, moments, value.generator)


@multiply.register
def _(value: Samples, gain: Tensor | float, noise: Tensor | float) -> Samples:
    # A mask that is c with probability k and otherwise 0 has mean g = c k and variance c^2 k (1 - k).
    gain, noise = torch.as_tensor(gain).to(value.values), torch.as_tensor(noise).to(value.values)
    keep = gain.square() / (gain.square() + noise)
    values = value.values * _mask(keep.expand(value.values.shape), value.generator) * (gain / keep)
    return Samples(values, multiply(value.moments, gain, noise), value.generator)


@mpgelu.register
def _(value: Samples) -> Samples:
    keep = keep_probability(value.moments.mean, value.moments.variance)
    values = value.values * _mask(keep.expand(value.values.shape), value.generator)
    return Samples(values, mpgelu(value.moments), value.generator)


@relu.register
def _(value: Samples, covariance: Covariance = "exact") -> Samples:
    return Samples(torch.relu(value.values), relu(value.moments, covariance), value.generator)


@leaky_relu.register
def _(value: Samples, negative_slope: float = 0.01, covariance: LeakyCovariance = "exact") -> Samples:
    values = leaky_relu(value.values, negative_slope)
    return Samples(values, leaky_relu(value.moments, negative_slope, covariance), value.generator)


@elementwise.register
def _(value: Samples, activation: Activation) -> Samples:
    return Samples(activation(value.values), elementwise(value.moments, activation), value.generator)


@layer_norm.register
def _(value: Samples, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Samples:
    values = layer_norm(value.values, weight, bias, eps)
    return Samples(values, layer_norm(value.moments, weight, bias, eps), value.generator)


@scale.register
def _(value: Samples, gain: Tensor | float) -> Samples:
    return Samples(scale(value.values, gain), scale(value.moments, gain), value.generator)


@add.register
def _(value: Samples, other: Samples | Tensor | float, alpha: float = 1.0) -> Samples:
    drawn, moments = (other.values, other.moments) if isinstance(other, Samples) else (other, other)
    return Samples(add(value.values, drawn, alpha), add(value.moments, moments, alpha), value.generator)


@concatenate.register
def _(value: Samples, *others: Samples, dim: int = -1) -> Samples:
    moments = concatenate(value.moments, *(other.moments for other in others), dim=dim)
    return Samples(concatenate(value.values, *(other.values for other in others)), moments, value.generator)


@flatten.register
def _(value: Samples, start_dim: int = 1, end_dim: int = -1) -> Samples:
    return Samples(value.values, flatten(value.moments, start_dim, end_dim), value.generator)


@fork.register
def _(value: Samples) -> Samples:
    return Samples(value.values, fork(value.moments), value.generator)


@dataclass(frozen=True)
class LayerAudit:
    """How one layer's propagated moments compare with sampling; the worst entry over all rows and units.

    Attributes:
        layer: name of the layer in the network.
        kind: its class.
        mean_error: largest error of a mean, in standard deviations of its unit.
        mean_se: standard error of that estimate, in the same unit.
        covariance_error: largest error of a covariance, relative to the product of the two standard deviations.
        covariance_se: standard error of that estimate, in the same unit.
        smallest_eigenvalue: of the propagated covariances, relative to the largest variance of its row.
        skewness: largest absolute sample skewness; 0 for a Gaussian, which the nonlinearities assume.
        judged: share of the units whose randomness is not too rare for the draws to tell their variance.
        passed: whether both errors are within their allowance, sampling error included.
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
    passed: bool


@dataclass(frozen=True)
class Audit:
    """The result of :func:`verify`: one entry per layer. Prints as a table."""

    layers: tuple[LayerAudit, ...]
    draws: int
    rows: int
    tolerance: float
    left_out: float = 0.0  # weight of the networks of an ensemble whose dropout is too rare for the draws

    @property
    def passed(self) -> bool:
        """Whether every layer passed."""
        return all(layer.passed for layer in self.layers)

    def words(self) -> str:
        """The findings in words: whether the moments are right, and where the Gaussian assumption is weak."""
        wrong = [row for row in self.layers if not row.passed]
        lines = ["Means and covariances agree with sampling at every layer."]
        if wrong:
            worst = max(wrong, key=lambda row: max(row.mean_error, row.covariance_error))
            lines = [
                f"Means or covariances disagree with sampling at {_listed([row.layer for row in wrong])}, most at "
                f"layer {worst.layer} ({worst.kind}): by {worst.mean_error:.2f} standard deviations in a mean, by "
                f"{worst.covariance_error:.2f} times the two standard deviations in a covariance."
            ]
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
        unclear = [row for row in self.layers if row.judged < _MOST]
        if unclear:
            least = min(unclear, key=lambda row: row.judged)
            lines.append(
                f"At {_listed([row.layer for row in unclear])} some randomness is too rare for {self.draws} draws: at "
                f"layer {least.layer} they tell the variance of {least.judged:.0%} of the units, the others were "
                "compared with the size of their layer."
            )
        if self.left_out:
            lines.append(
                f"Networks with {self.left_out:.0%} of the weight were left out: they drop units too rarely for "
                f"{self.draws} draws to tell."
            )
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
                f"{row.skewness:>6.2f}  {'pass' if row.passed else 'FAIL'}"
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

    Args:
        network: built from this library's layers, or converted to them; or a fitted estimator or its ensemble, whose
            layers are then named by the number of the network too, ``3:0``.
        x: inputs ``(rows, features)``, a tensor, of an estimator raw ones in any form; a dozen rows tell enough.
        moments: how to start, for example ``DiagonalMoments.certain``, to see what dropping correlations costs; by
            default exact, or what an estimator predicts with.
        draws: samples per row; by default 20,000, or ten times as many if an ensemble's dropout is rare.
        tolerance: error allowed beyond sampling error, in standard deviations of the units.
        seed: of the sampling.
        networks: how many of an ensemble's networks to audit, those of the largest weights among those whose dropout
            is not too rare for the draws.

    Example:
        >>> import torch, mpgelu
        >>> audit = mpgelu.verify(mpgelu.network(3, hidden=(8,)), torch.randn(4, 3))
        >>> audit.passed
        True
    """
    if is_composed(network):
        return _verify_members(network, x, moments, draws, tolerance, seed, networks)
    moments, draws = moments or FactoredMoments.certain, _DRAWS[0] if draws is None else draws
    if x.dim() != 2:
        raise InputError(f"verify: x must have shape (rows, features), got {tuple(x.shape)}")
    if draws < 100:
        raise InputError(f"verify: draws must be at least 100, got {draws}")
    start = moments(x)
    generator = torch.Generator(device=x.device).manual_seed(seed)
    tallies: dict[str, _Tally] = {}
    calls: dict[str, int] = {}  # a module may be used several times

    def record(name: str, module: nn.Module) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if isinstance(output, Samples):
                calls[name] = calls.get(name, 0) + 1
                key = name if calls[name] == 1 else f"{name} ({calls[name]})"
                tallies.setdefault(key, _Tally(type(module).__name__, output.moments)).add(output.values)

        return hook

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(record(name, module)) for name, module in leaves]
    widest = max([x.shape[-1], *(max(p.shape) for p in network.parameters() if p.dim() > 1)])
    chunk = max(1, min(draws, _CHUNK // (widest * len(x))))
    try:
        with torch.no_grad():
            for first in range(0, draws, chunk):
                calls.clear()
                network(_draw(start, min(chunk, draws - first), generator))
    finally:
        for handle in hooks:
            handle.remove()
    layers = tuple(tally.result(name, tolerance) for name, tally in tallies.items())
    return Audit(layers, draws, len(x), tolerance)


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
    weights = {place: parts.weights[place].item() for place in range(len(parts.networks))}
    rates = {place: _smallest_rate(network) for place, network in enumerate(parts.networks)}
    if draws is None:
        draws = _DRAWS[0] if max(rates.values()) * _DRAWS[0] >= _ENOUGH else _DRAWS[1]
    clear = [place for place, rate in rates.items() if rate * draws >= _ENOUGH]
    if not clear:
        needed = round(_ENOUGH / max(rates.values()))
        raise InputError(f"verify: every network drops units too rarely for {draws} draws to tell; use draws={needed}")
    layers: list[LayerAudit] = []
    for place in sorted(sorted(clear, key=weights.__getitem__, reverse=True)[:networks]):
        audit = verify(parts.networks[place], x, moments=start, draws=draws, tolerance=tolerance, seed=seed + place)
        layers += [replace(layer, layer=f"{place}:{layer.layer}") for layer in audit.layers]
    left_out = sum(weight for place, weight in weights.items() if place not in clear)
    return Audit(tuple(layers), draws, len(x), tolerance, left_out)


def _smallest_rate(network: nn.Module) -> float:
    """Of the dropout layers that drop anything; one if there are none."""
    rates = [module.rate.item() for module in network.modules() if isinstance(module, Dropout)]
    return min([rate for rate in rates if rate > 0], default=1.0)


class _Tally:
    """Running sums of centred powers of one layer's samples."""

    def __init__(self, kind: str, moments: Moments) -> None:
        self.kind = kind
        self.mean = moments.mean.double()
        self.covariance = moments.covariance.double()
        self.count = 0
        self.active = torch.zeros_like(self.mean)
        self.sums: list[Tensor | float] = [0.0] * 5

    def add(self, values: Tensor) -> None:
        """Take note of more draws ``(draws, rows, n)``, centred at the propagated mean for accuracy."""
        centred = (values.double() - self.mean).transpose(0, 1)  # (rows, draws, n)
        squares = centred.square()
        self.count += values.shape[0]
        self.active += (values != 0).sum(0)
        powers = (
            centred.sum(1),
            centred.mT @ centred,
            squares.mT @ squares,
            (squares * centred).sum(1),
            squares.sum(1),
        )
        self.sums = [total + power for total, power in zip(self.sums, powers, strict=True)]

    def _largest_size(self) -> Tensor:
        """Largest root mean square of a row: what a unit too rarely active to be judged by itself is measured in."""
        size = (self.covariance.diagonal(dim1=-2, dim2=-1) + self.mean.square()).amax(-1, keepdim=True).sqrt()
        return torch.where(size > 0, size, 1).expand(self.mean.shape)

    def result(self, name: str, tolerance: float) -> LayerAudit:
        """Errors of the propagated moments in units of the sampled standard deviations."""
        shift, products, fourth, cubes, squares = (torch.as_tensor(total) / self.count for total in self.sums)
        sampled = products - shift.unsqueeze(-1) * shift.unsqueeze(-2)
        variance = sampled.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        # Few large deviations make a kurtosis of the draws over their number; a unit without any is resolved.
        rare = fourth.diagonal(dim1=-2, dim2=-1) * _ENOUGH > self.count * squares.square()
        resolved = (self.active >= _ENOUGH) & ~rare
        scale = torch.where(resolved & (variance > 0), variance.sqrt(), self._largest_size())
        pair_scale = scale.unsqueeze(-1) * scale.unsqueeze(-2)
        mean_error = shift.abs() / scale
        mean_se = (variance / self.count).sqrt() / scale
        covariance_error = (sampled - self.covariance).abs() / pair_scale
        covariance_se = ((fourth - products.square()).clamp_min(0) / self.count).sqrt() / pair_scale
        skewness = (cubes - 3 * shift * squares + 2 * shift**3) / torch.where(variance > 0, variance, 1) ** 1.5
        mean_worst, mean_passed = _worst(mean_error, mean_se, tolerance)
        covariance_worst, covariance_passed = _worst(covariance_error, covariance_se, tolerance)
        eigenvalues = torch.linalg.eigvalsh(self.covariance)
        largest = self.covariance.diagonal(dim1=-2, dim2=-1).amax(-1)
        return LayerAudit(
            layer=name,
            kind=self.kind,
            mean_error=mean_worst[0],
            mean_se=mean_worst[1],
            covariance_error=covariance_worst[0],
            covariance_se=covariance_worst[1],
            smallest_eigenvalue=(eigenvalues[..., 0] / torch.where(largest > 0, largest, 1)).min().item(),
            skewness=torch.where(resolved, skewness, 0).abs().max().item(),
            judged=1 - (rare | (variance < 1e-9 * self.covariance.diagonal(dim1=-2, dim2=-1))).double().mean().item(),
            passed=mean_passed and covariance_passed,
        )


def _worst(error: Tensor, se: Tensor, tolerance: float) -> tuple[tuple[float, float], bool]:
    """The entry furthest beyond its allowance, and whether it is within; Bonferroni over all entries."""
    critical = -ndtri(_FALSE_ALARM / 2 / error.numel())
    excess = (error - critical * se - tolerance).flatten()
    place = int(excess.argmax())
    rounding = 1e-6  # a layer without randomness agrees to float32 rounding only
    return (error.flatten()[place].item(), se.flatten()[place].item()), bool(excess[place] <= rounding)


def _draw(moments: Moments, draws: int, generator: torch.Generator) -> Samples:
    """Samples of an input: exact when it is certain, otherwise Gaussian with its covariance."""
    shape = (draws, *moments.mean.shape)
    values, vectors = torch.linalg.eigh(moments.covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = _normal_like(moments.mean.expand(shape), generator)
    return Samples(moments.mean + (root @ noise.unsqueeze(-1)).squeeze(-1), moments, generator)


def _mask(keep: Tensor, generator: torch.Generator) -> Tensor:
    return torch.bernoulli(keep, generator=generator)


def _normal_like(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
