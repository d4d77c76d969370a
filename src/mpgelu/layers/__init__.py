"""Layers: modules that own parameters and call one rule each.

A layer accepts a plain tensor, for which it is the ordinary deterministic layer, or moments of any type, for which it
propagates mean and covariance. Names and arguments follow ``torch.nn``.
"""

from mpgelu.layers.beside import Beside
from mpgelu.layers.dropout import Dropout
from mpgelu.layers.elementwise import GELU, Elementwise, LeakyReLU, Sigmoid, SiLU, Softplus, Tanh
from mpgelu.layers.gaussian_linear import GaussianLinear
from mpgelu.layers.linear import Linear
from mpgelu.layers.mpgelu import MPGELU
from mpgelu.layers.normalise import BatchNorm1d, LayerNorm
from mpgelu.layers.operation import Operation
from mpgelu.layers.periodic import Periodic
from mpgelu.layers.registry import layers
from mpgelu.layers.relu import ReLU
from mpgelu.layers.scale import RobustScale, Scale

__all__ = [
    "GELU",
    "MPGELU",
    "BatchNorm1d",
    "Beside",
    "Dropout",
    "Elementwise",
    "GaussianLinear",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "Operation",
    "Periodic",
    "ReLU",
    "RobustScale",
    "Scale",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "layers",
]
