"""The networks before their first step."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import nn

from mpgelu.estimators.recipe.settings import Settings
from mpgelu.layers import Dropout, GaussianLinear, Linear
from mpgelu.networks import network

_NO_VARIANCE = -40.0  # logarithm of the variance of a weight that stands for none


def new_networks(features: int, settings: Settings) -> list[nn.Module]:
    """Untrained networks, ordered by rate, then fold."""
    generator = torch.Generator().manual_seed(settings.seed)
    networks: list[nn.Module] = []
    for rate, _ in product(settings.rates, range(settings.members)):
        with torch.random.fork_rng(devices=[]):  # what torch draws is replaced below
            made = network(features, settings.hidden, rate=0.5, gaussian_weights=settings.gaussian_weights).float()
        for layer in made:
            if isinstance(layer, Dropout):
                layer.rate.fill_(rate)  # also a rate of zero, which network would leave out
        _initialise([layer for layer in made if isinstance(layer, (Linear, GaussianLinear))], settings, generator)
        networks.append(made)
    return networks


def _initialise(layers: list[Linear | GaussianLinear], settings: Settings, generator: torch.Generator) -> None:
    """Hinges spread over the data, outputs near zero, a noise near that of the target and the same for all rows."""
    with torch.no_grad():
        for position, layer in enumerate(layers[:-1]):
            layer.weight.normal_(0, math.sqrt(2 / layer.in_features), generator=generator)
            layer.bias.normal_(0, 0.1 if position else 1.0, generator=generator)
        last = layers[-1]
        last.weight.normal_(0, 1 / math.sqrt(last.in_features), generator=generator)
        last.weight[1].mul_(0.0 if settings.noise == "homoscedastic" else 0.1)
        last.bias.zero_()
        if settings.noise == "homoscedastic" and isinstance(last, GaussianLinear):
            last.log_weight_variance[1] = _NO_VARIANCE
