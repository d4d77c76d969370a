"""The layers of perceptrons as arrays, for all networks of an ensemble at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mpgelu.layers import GaussianLinear, Linear
from mpgelu.networks.description import Description, description_of
from mpgelu.networks.perceptron import MaskedLinear, perceptron_of
from mpgelu.rules.dropout import mask_moments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """One linear layer of M networks with the dropout mask before it.

    Args:
        weight: Weights, ``(M, before, after)``.
        bias: Biases, ``(M, 1, after)``.
        gain: Mean of the mask, ``(M, 1, 1)``.
        noise: Variance of the mask, ``(M, 1, 1)``.
        weight_variance: Variances of the weights, in their shape; ``None`` if the weights are known.
        bias_variance: Variances of the biases, in their shape.
    """

    weight: Array
    bias: Array
    gain: Array
    noise: Array
    weight_variance: Array | None
    bias_variance: Array

    @property
    def before(self) -> int:
        """Number of inputs."""
        return int(self.weight.shape[1])

    @property
    def after(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[2])

    @property
    def mean_weight(self) -> Array:
        """Weights of the mean and the fluctuations before the mask: the weights times the mean g of the mask."""
        return self.weight * self.gain

    @property
    def noise_weight(self) -> Array:
        """Weights of the fluctuations that the mask adds to a known value: the weights times its standard deviation."""
        return self.weight * np.sqrt(self.noise)

    @property
    def second_moment_weight(self) -> Array:
        """Weights from second moments before the mask to the variance that random weights add."""
        assert self.weight_variance is not None
        return (self.gain**2 + self.noise) * self.weight_variance

    def of_inputs(self, scale: Array) -> Layer:
        """Return the layer for inputs that are multiplied by ``scale``, ``(before,)``."""
        by = scale[:, None]
        variance = None if self.weight_variance is None else self.weight_variance / by**2
        return replace(self, weight=self.weight / by, weight_variance=variance)

    def scaled(self, scale: Array, shift: Array) -> Layer:
        """The layer with its outputs multiplied by ``scale`` and then shifted by ``shift``, ``(after,)`` each."""
        variance = None if self.weight_variance is None else self.weight_variance * scale**2
        weight, bias = self.weight * scale, self.bias * scale + shift
        return Layer(weight, bias, self.gain, self.noise, variance, self.bias_variance * scale**2)


def layers_of(networks: Sequence[nn.Module]) -> list[Layer] | None:
    """Return the layers of MP-GELU perceptrons of one shape, or ``None`` if a network has another structure or shape.

    Args:
        networks: M networks.
    """
    found = perceptron_of(networks[0])
    if found is None or found.nonlinearity not in (None, Description("MPGELU")):
        return None
    described = description_of(networks[0])
    if any(description_of(network) != described for network in networks[1:]):
        return None
    layers = []
    for layer in found.layers:
        each = (_numbers(network, layer) for network in networks)
        weight, bias, weight_variance, bias_variance, gain, noise = (
            torch.stack(part).detach().numpy() for part in zip(*each, strict=True)
        )
        uncertain = weight_variance.any() or bias_variance.any()
        layers.append(Layer(weight, bias, gain, noise, weight_variance if uncertain else None, bias_variance))
    return layers


def _numbers(network: nn.Module, layer: MaskedLinear) -> tuple[Tensor, ...]:
    """Return weight, bias, their variances, and mean and variance of the mask of a linear layer, in float64."""
    module = network.get_submodule(layer.name)
    assert isinstance(module, Linear | GaussianLinear)
    weight = module.weight.double()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.double()
    variances = torch.zeros_like(weight), torch.zeros_like(bias)
    if isinstance(module, GaussianLinear):
        held = module.bias_variance
        variances = module.weight_variance.double(), variances[1] if held is None else held.double()
    rate = network.get_buffer(f"{layer.dropout}.rate") if layer.dropout else torch.zeros((), device="cpu")
    moments = mask_moments(rate.double(), layer.rescale)
    mask = (torch.as_tensor(part, dtype=torch.float64, device="cpu").reshape(1, 1) for part in moments)
    return weight.mT, bias[None], variances[0].mT, variances[1][None], *mask
