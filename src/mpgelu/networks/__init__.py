"""Networks built from layers: perceptrons, the networks of the paper, stacks of networks, and prediction in chunks."""

from mpgelu.networks.mlp import Nonlinearity, network, paper_network
from mpgelu.networks.parts import Members, Parts, feature_names, in_features_of, parts_of
from mpgelu.networks.propagation import propagate
from mpgelu.networks.scaling import FeatureScale
from mpgelu.networks.stack import Stack, is_random

__all__ = [
    "FeatureScale",
    "Members",
    "Nonlinearity",
    "Parts",
    "Stack",
    "feature_names",
    "in_features_of",
    "is_random",
    "network",
    "paper_network",
    "parts_of",
    "propagate",
]
