"""What the library is measured against, written by hand: nothing here is used by the library itself."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpgelu.layers import Dropout, Linear


def linears(network: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of the linear layers."""
    return [(module.weight, module.bias) for module in network if isinstance(module, Linear)]


def paper_relu(network: nn.Sequential, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The ReLU network as the paper computes it: n x n tensors, DVI formula for every entry, chunks of rows."""
    (rate,) = {float(module.rate) for module in network if isinstance(module, Dropout)}
    parts = [_paper_relu_rows(linears(network), rows, 1 - rate) for rows in torch.split(x, chunk)]
    return torch.cat([mean for mean, _ in parts]), torch.cat([covariance for _, covariance in parts])


def _paper_relu_rows(layers: list[tuple[Tensor, Tensor]], x: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    mean, covariance = x, x.new_zeros(*x.shape, x.shape[-1])
    for position, (weight, bias) in enumerate(layers):
        if position:
            mean, covariance = _dvi_relu(mean, covariance)
        second = covariance.diagonal(dim1=-2, dim2=-1) + mean.square()
        covariance = keep * keep * covariance + torch.diag_embed(keep * (1 - keep) * second)
        mean = F.linear(keep * mean, weight, bias)
        covariance = weight @ covariance @ weight.mT
    return mean, covariance


def _dvi_relu(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12)
    stddev = variance.sqrt()
    ratio = mean / stddev
    cdf = 0.5 * torch.erfc(-ratio * math.sqrt(0.5))
    pdf = torch.exp(-0.5 * ratio * ratio) / math.sqrt(2 * math.pi)
    ramp = pdf + ratio * cdf
    a1, a2 = ratio.unsqueeze(-1), ratio.unsqueeze(-2)
    rho = (covariance / (stddev.unsqueeze(-1) * stddev.unsqueeze(-2))).clamp(-0.9999, 0.9999)
    rho = torch.where(rho.abs() < 1e-3, 1e-3, rho)
    angle = torch.asin(rho)
    root = torch.sqrt(1 - rho * rho)
    height = angle - rho / (1 + root)
    exponent = -rho / (2 * height * (1 + root)) * (a1 * a1 + a2 * a2) + (angle - rho) / (rho * height) * a1 * a2
    product = cdf.unsqueeze(-1) * cdf.unsqueeze(-2)
    off_diagonal = covariance * (product + height / (2 * math.pi) * torch.exp(exponent))
    diagonal = variance * (cdf + ratio * ramp - ramp * ramp)
    eye = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device)
    return stddev * ramp, torch.where(eye, diagonal.unsqueeze(-1), off_diagonal)


def exact_by_hand(network: nn.Sequential, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Exact moments of a two-layer MP-GELU network as one function: the same operations, without the library."""
    (rate,) = {float(module.rate) for module in network if isinstance(module, Dropout)}
    parts = [_exact_rows(linears(network), rows, rate) for rows in torch.split(x, chunk)]
    return torch.cat([mean for mean, _ in parts]), torch.cat([covariance for _, covariance in parts])


def _exact_rows(layers: list[tuple[Tensor, Tensor]], x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    (w1, b1), (w2, b2), (w3, b3) = layers
    d0 = x.square() * (rate * (1 - rate))
    m1, v1 = F.linear(x * (1 - rate), w1, b1), d0 @ w1.mT.square()
    k1, m1, d1 = _mask(m1, v1)
    table = (w1.mT.unsqueeze(-2) * w2).flatten(0, 1)
    f0 = F.linear(k1, table).view(len(x), -1, len(w2))
    v2 = (d0.unsqueeze(-2) @ f0.square()).squeeze(-2) + d1 @ w2.mT.square()
    k2, m2, d2 = _mask(F.linear(m1, w2, b2), v2)
    scaled = (k2.unsqueeze(-2) * w3).mT
    f0 = f0 @ scaled
    f1 = F.linear(k2, (w2.mT.unsqueeze(-2) * w3).flatten(0, 1)).view(len(x), -1, len(w3))
    products = (w3.mT.unsqueeze(-1) * w3.mT.unsqueeze(-2)).flatten(1)
    covariance = (d2 @ products).view(len(x), len(w3), len(w3))
    for d, f in ((d0, f0), (d1, f1)):
        covariance = covariance + (d.unsqueeze(-1) * f).mT @ f
    return F.linear(m2, w3, b3), covariance


def _mask(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = (mean / variance.clamp_min(1e-28).sqrt()).clamp(-13, 13)
    keep = 0.5 * torch.erfc(ratio * -math.sqrt(0.5))
    after = keep * mean
    kept = keep * variance
    return keep, after, torch.addcmul(torch.addcmul(kept, keep, kept, value=-1), after, mean - after)


class MCDropout(nn.Module):
    """The usual way to the same uncertainty: run a torch dropout network many times and take sample moments."""

    def __init__(self, in_features: int, width: int, outputs: int, rate: float, samples: int = 50) -> None:
        super().__init__()
        self.samples = samples
        sizes = (in_features, width, width, outputs)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Dropout(rate), nn.Linear(before, after), nn.ReLU()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sample mean and variance of the outputs."""
        draws = torch.stack([self.network(x) for _ in range(self.samples)])
        return draws.mean(0), draws.var(0)


class SharedMasks(nn.Module):
    """Sample moments in their fastest form: one mask per draw for all rows, all draws as batched products.

    Masks multiply the weights, in fresh draws at every call, so that no row draws random numbers and the first layer of
    all draws is one matrix product. Sample moments of a row are as good as with masks of its own; only the errors of
    different rows are then correlated.

    Args:
        network: Layers `nn.Dropout`, `nn.Linear` and `nn.ReLU` in any order; dropout comes before a linear layer.
        samples: Number of draws.
    """

    def __init__(self, network: nn.Sequential, samples: int) -> None:
        super().__init__()
        self.network, self.samples = network, samples

    def draws(self, x: Tensor) -> Tensor:
        """Outputs of all draws, shape (samples, rows, outputs)."""
        rate = 0.0
        for layer in self.network:
            if isinstance(layer, nn.Dropout):
                rate = layer.p
            elif isinstance(layer, nn.Linear):
                mask = torch.rand(self.samples, layer.in_features, 1) >= rate
                weight = layer.weight.mT * mask / (1 - rate)  # (samples, inputs, outputs)
                x, rate = x @ weight + layer.bias, 0.0
            else:
                x = layer(x)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sample mean and variance of the outputs."""
        draws = self.draws(x)
        return draws.mean(0), draws.var(0)
