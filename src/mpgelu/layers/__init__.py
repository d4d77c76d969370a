"""Layers: modules that own parameters and call one rule each."""

from mpgelu.layers.dropout import Dropout
from mpgelu.layers.gaussian_linear import GaussianLinear
from mpgelu.layers.linear import Linear
from mpgelu.layers.mpgelu import MPGELU
from mpgelu.layers.relu import ReLU

__all__ = ["MPGELU", "Dropout", "GaussianLinear", "Linear", "ReLU"]
