"""Construction and initialisation of the networks of a kind."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpgelu.estimators.recipe.settings import Kind, Settings
from mpgelu.layers import MPGELU, GaussianLinear, Linear, SiLU
from mpgelu.likelihoods import Likelihood
from mpgelu.networks import Stack, network

_one_at_a_time = threading.RLock()


def default_network(features: int, kind: Kind, outputs: int) -> nn.Module:
    """Return a perceptron, with a periodic embedding if the kind has one.

    The nonlinearity is SiLU for smooth networks without dropout. Networks with dropout propagate moments in training
    and use MP-GELU, for which these are known in closed form; so do piecewise linear ones, for which it is ReLU.

    Args:
        features: Number of features.
        kind: The kind of the network.
        outputs: Number of outputs.
    """
    nonlinearity = MPGELU if kind.rate or not kind.smooth else SiLU
    return network(features, kind.hidden, outputs, nonlinearity=nonlinearity, rate=kind.rate, sigma=kind.sigma)


def new_networks(features: int, kind: Kind, likelihood: Likelihood, settings: Settings, seed: int) -> Stack:
    """Return initialised networks of a kind, one for each fold, float32.

    Args:
        features: Number of features.
        kind: The kind of the networks.
        likelihood: Likelihood of their outputs, which initialises the last layer.
        settings: Settings of the training.
        seed: Seed of the initial weights.
    """
    with single_precision(seed):
        made = [settings.network(features, kind, likelihood.outputs).float() for _ in range(settings.folds)]
        for member in made:
            linear = [layer for layer in member.modules() if isinstance(layer, (Linear, GaussianLinear))]
            _initialise(linear, likelihood)
    return Stack(made)


@contextmanager
def single_precision(seed: int) -> Iterator[None]:
    """Return a context with a seed, and with float32 and the CPU as torch's defaults; those before are restored.

    Seed and data type are those of the process, so that one thread at a time is in such a context.
    """
    with _one_at_a_time, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        before = torch.get_default_dtype()
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _initialise(layers: list[Linear | GaussianLinear], likelihood: Likelihood) -> None:
    r"""Initialise linear layers in place.

    Weights of hidden layers are :math:`N(0, 2 / n)` for n inputs (He et al., 2015). Biases are :math:`N(0, 0.5^2)` in
    the first and :math:`N(0, 0.1^2)` in later layers, which distributes the transitions of units over the data. Weights
    of the last layer are :math:`N(0, 1 / n)` and are then adjusted by :meth:`Likelihood.initialise`.
    """
    with torch.no_grad():
        for position, layer in enumerate(layers[:-1]):
            layer.weight.normal_(0, math.sqrt(2 / layer.in_features))
            if layer.bias is not None:
                layer.bias.normal_(0, 0.1 if position else 0.5)
        last = layers[-1]
        last.weight.normal_(0, 1 / math.sqrt(last.in_features))
        if last.bias is not None:
            likelihood.initialise(last.weight, last.bias)
