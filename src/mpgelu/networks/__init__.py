"""Networks built from layers: perceptrons, the paper's networks, many networks as one, many rows in bounded memory."""

from mpgelu.networks.mlp import Nonlinearity, network, paper_network
from mpgelu.networks.propagation import propagate
from mpgelu.networks.stack import Stack

__all__ = ["Nonlinearity", "Stack", "network", "paper_network", "propagate"]
