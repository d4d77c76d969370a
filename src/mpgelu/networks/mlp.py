"""Ready-made networks: a multilayer perceptron of any widths, and the two networks of the paper."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import Literal

from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Linear, ReLU

Nonlinearity = Literal["mpgelu", "relu"]


def network(
    in_features: int,
    hidden: Sequence[int] = (64, 64),
    outputs: int = 2,
    *,
    nonlinearity: Nonlinearity = "mpgelu",
    rate: float = 0.05,
    gaussian_weights: bool = False,
) -> nn.Sequential:
    """A multilayer perceptron for moments: dropout before every linear layer, a nonlinearity between them.

    What it computes depends only on what it is given: a tensor runs the ordinary deterministic network,
    moments run the random one.

    Args:
        in_features: number of input features.
        hidden: width of each hidden layer, any number of them.
        outputs: 2 for mean and log-variance (:class:`HeteroscedasticGaussian`), 1 for the mean (:class:`Gaussian`).
        nonlinearity: ``"mpgelu"`` or ``"relu"`` (with exact covariance).
        rate: dropout rate, rescaled as in torch; 0 leaves the dropout layers out.
        gaussian_weights: use :class:`GaussianLinear`, whose weights are random too.

    Example:
        >>> import torch, mpgelu
        >>> net = mpgelu.network(4, hidden=(32, 32))
        >>> net(mpgelu.FactoredMoments.certain(torch.randn(8, 4)))
        FactoredMoments(mean (8, 2), 3 blocks of 68 sources (36 per row), float32)
    """
    _check_sizes("network", in_features=in_features, outputs=outputs, hidden=hidden)
    layer = GaussianLinear if gaussian_weights else Linear
    widths = [in_features, *hidden, outputs]
    modules: list[nn.Module] = []
    for position, (before, after) in enumerate(itertools.pairwise(widths)):
        if position > 0:
            modules.append(_nonlinearity("network", nonlinearity, "exact"))
        if rate:
            modules.append(Dropout(rate))
        modules.append(layer(before, after))
    return nn.Sequential(*modules)


def paper_network(
    nonlinearity: Nonlinearity, in_features: int, outputs: int = 2, rate: float = 0.01, width: int = 20
) -> nn.Sequential:
    """The networks of the paper: two hidden layers of 20 units, dropout without rescaling.

    MP-GELU has dropout on the input alone, since the nonlinearity is one; ReLU has it before every dense layer, and
    takes its covariance by the DVI approximation. Weights start Glorot-uniform and biases at zero, which lands on
    the paper's numbers.

    Args:
        nonlinearity: ``"mpgelu"`` or ``"relu"``.
        in_features: Q, the number of input features.
        outputs: 2 (mean and log-variance) or 1.
        rate: dropout rate.
        width: units in each hidden layer.
    """
    _check_sizes("paper_network", in_features=in_features, outputs=outputs, hidden=(width,))
    modules: list[nn.Module] = [Dropout(rate, rescale=False), Linear(in_features, width)]
    for after in (width, outputs):
        modules.append(_nonlinearity("paper_network", nonlinearity, "dvi"))
        if nonlinearity == "relu":
            modules.append(Dropout(rate, rescale=False))
        modules.append(Linear(width, after))
    for module in modules:
        if isinstance(module, Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return nn.Sequential(*modules)


def _nonlinearity(caller: str, name: str, covariance: Literal["exact", "dvi"]) -> nn.Module:
    if name == "mpgelu":
        return MPGELU()
    if name == "relu":
        return ReLU(covariance)
    raise InputError(f"{caller}: nonlinearity must be 'mpgelu' or 'relu', got {name!r}")


def _check_sizes(caller: str, *, in_features: int, outputs: int, hidden: Sequence[int]) -> None:
    sizes: list[tuple[str, object]] = [("in_features", in_features), ("outputs", outputs)]
    for name, size in [*sizes, *(("hidden", width) for width in hidden)]:
        if not isinstance(size, numbers.Integral) or int(size) < 1:
            raise InputError(f"{caller}: {name} must be a positive whole number, got {size!r}")
