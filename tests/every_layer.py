"""One layer of each type for four features; tests that run through all layers hold that none is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mpgelu import layers
from mpgelu.rules import fork

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: layers.Linear(4, 3),
    "GaussianLinear": lambda: layers.GaussianLinear(4, 3),
    "Dropout": lambda: layers.Dropout(0.2),
    "MPGELU": layers.MPGELU,
    "ReLU": layers.ReLU,
    "LeakyReLU": layers.LeakyReLU,
    "GELU": layers.GELU,
    "SiLU": layers.SiLU,
    "Tanh": layers.Tanh,
    "Sigmoid": layers.Sigmoid,
    "Softplus": layers.Softplus,
    "BatchNorm1d": lambda: layers.BatchNorm1d(4),
    "LayerNorm": lambda: layers.LayerNorm(4),
    "Periodic": lambda: layers.Periodic(4, frequencies=3, outputs=2),
    "Scale": lambda: layers.Scale(4),
    "RobustScale": lambda: layers.RobustScale(torch.randn(4), torch.rand(4) + 0.5),
    "Operation": lambda: layers.Operation(fork),
    "Elementwise": lambda: layers.Elementwise(layers.Tanh().activation),
    "Beside": lambda: layers.Beside(layers.Linear(4, 3), layers.Linear(4, 2)),
}
