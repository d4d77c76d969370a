"""The networks before their first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpgelu.estimators.recipe.settings import Kind, Settings
from mpgelu.layers import MPGELU, GaussianLinear, Linear, SiLU
from mpgelu.likelihoods import Likelihood
from mpgelu.networks import Stack, network


def default_network(features: int, kind: Kind, outputs: int) -> nn.Module:
    """A perceptron after a periodic embedding, if the kind has one.

    SiLU stands between the layers of a network without dropout. One with dropout is trained by its moments, which
    MP-GELU has in closed form.
    """
    nonlinearity = MPGELU if kind.rate else SiLU
    return network(features, kind.hidden, outputs, nonlinearity=nonlinearity, rate=kind.rate, embedding=kind.sigma)


def new_networks(features: int, kind: Kind, likelihood: Likelihood, settings: Settings, seed: int) -> Stack:
    """Untrained networks of one kind, one for each fold."""
    with single_precision(seed):
        made = [settings.network(features, kind, likelihood.outputs).float() for _ in range(settings.folds)]
        for member in made:
            linear = [layer for layer in member.modules() if isinstance(layer, (Linear, GaussianLinear))]
            _initialise(linear, likelihood)
    return Stack(made)


@contextmanager
def single_precision(seed: int) -> Iterator[None]:
    """Random numbers of a seed in single precision, with torch's own seed and default dtype back afterwards."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _initialise(layers: list[Linear | GaussianLinear], likelihood: Likelihood) -> None:
    """Hinges spread over the data, outputs near zero."""
    with torch.no_grad():
        for position, layer in enumerate(layers[:-1]):
            layer.weight.normal_(0, math.sqrt(2 / layer.in_features))
            if layer.bias is not None:
                layer.bias.normal_(0, 0.1 if position else 0.5)
        last = layers[-1]
        last.weight.normal_(0, 1 / math.sqrt(last.in_features))
        if last.bias is not None:
            likelihood.initialise(last.weight, last.bias)
