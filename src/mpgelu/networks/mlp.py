"""Ready-made networks: a multilayer perceptron of any widths, and the two networks of the paper."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Linear, Periodic, ReLU, Scale

Nonlinearity = Literal["mpgelu", "relu"]


def network(
    in_features: int,
    hidden: Sequence[int] = (64, 64),
    outputs: int = 2,
    *,
    nonlinearity: Nonlinearity | Callable[[], nn.Module] = "mpgelu",
    rate: float = 0.05,
    gaussian_weights: bool = False,
    sigma: float | None = None,
) -> nn.Sequential:
    """Return a multilayer perceptron for moments: dropout before every linear layer, a nonlinearity between them.

    The type of the input decides what is computed: a tensor runs the ordinary deterministic network, moments run the
    random one.

    Args:
        in_features: Number of input features.
        hidden: Widths of the hidden layers, any number of them.
        outputs: 2 for mean and log-variance (:class:`HeteroscedasticGaussian`), 1 for the mean (:class:`Gaussian`).
        nonlinearity: ``"mpgelu"``, ``"relu"`` (with exact covariance), or a function without arguments that returns a
            new layer, such as the class :class:`mpgelu.layers.Tanh`; it is called once for each hidden layer.
        rate: Dropout rate, rescaled as in torch; 0 omits the dropout layers.
        gaussian_weights: Whether to use :class:`GaussianLinear`, whose weights are random too.
        sigma: Standard deviation of the initial frequencies of a :class:`Periodic` embedding of the features, in
            cycles per unit; ``None`` for no embedding.

    Raises:
        InputError: A size is not a positive whole number, or the nonlinearity is not known.

    Example:
        >>> import torch, mpgelu
        >>> net = mpgelu.network(4, hidden=(32, 32))
        >>> net(mpgelu.FactoredMoments.certain(torch.randn(8, 4)))
        FactoredMoments(mean (8, 2), 3 blocks of 68 sources (36 per row), float32)
    """
    _check_sizes("network", in_features=in_features, outputs=outputs, hidden=hidden)
    layer = GaussianLinear if gaussian_weights else Linear
    modules: list[nn.Module] = []
    inputs = in_features
    if sigma is not None:
        periodic = Periodic(in_features, sigma=sigma)
        inputs = periodic.out_features
        modules += [periodic, Scale(inputs)]
    widths = [inputs, *hidden, outputs]
    for position, (before, after) in enumerate(itertools.pairwise(widths)):
        if position > 0:
            modules.append(_nonlinearity(nonlinearity))
        if rate:
            modules.append(Dropout(rate))
        modules.append(layer(before, after))
    return nn.Sequential(*modules)


def paper_network(
    in_features: int,
    hidden: Sequence[int] = (20, 20),
    outputs: int = 2,
    *,
    nonlinearity: Nonlinearity = "mpgelu",
    rate: float = 0.01,
    relu_dropout: Literal["each", "input"] = "each",
) -> nn.Sequential:
    """Return a network of the paper: two hidden layers of 20 units, dropout without rescaling.

    The MP-GELU network has dropout on the input only, because the nonlinearity is itself a mask. The ReLU network has
    it before every dense layer, and uses the DVI approximation of the covariance. Weights are initialised
    Glorot-uniform and biases at zero, which reproduces the numbers of the paper.

    Args:
        in_features: Number of input features, Q in the paper.
        hidden: Widths of the hidden layers.
        outputs: 2 (mean and log-variance) or 1.
        nonlinearity: ``"mpgelu"`` or ``"relu"``.
        rate: Dropout rate.
        relu_dropout: Where the ReLU network has dropout: before ``"each"`` dense layer, as in the paper, or on the
            ``"input"`` only, as the MP-GELU network always has it.

    Raises:
        InputError: A size is not a positive whole number, or a name is not known.
    """
    if relu_dropout not in ("each", "input"):
        raise InputError(f"paper_network: relu_dropout must be 'each' or 'input', got {relu_dropout!r}")
    _check_sizes("paper_network", in_features=in_features, outputs=outputs, hidden=hidden)
    modules: list[nn.Module] = []
    for position, (before, after) in enumerate(itertools.pairwise([in_features, *hidden, outputs])):
        if position > 0:
            modules.append(_named_nonlinearity("paper_network", nonlinearity, "dvi"))
        if position == 0 or (nonlinearity == "relu" and relu_dropout == "each"):
            modules.append(Dropout(rate, rescale=False))
        modules.append(Linear(before, after))
    for module in modules:
        if isinstance(module, Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return nn.Sequential(*modules)


def _nonlinearity(choice: Nonlinearity | Callable[[], nn.Module]) -> nn.Module:
    """Return a new layer for a name or from a factory."""
    if isinstance(choice, nn.Module):
        raise InputError(
            f"network: nonlinearity must be a name or a function that makes a layer, got the layer {choice}; "
            f"every hidden layer needs its own, so give the class {type(choice).__name__} or lambda: {choice}"
        )
    if not callable(choice):
        return _named_nonlinearity("network", choice, "exact")
    try:
        layer = choice()
    except TypeError as error:
        raise InputError(
            f"network: nonlinearity must be a name or a function without arguments that makes a layer, got {choice!r}, "
            f"which cannot be called so ({error}); layers such as mpgelu.layers.Tanh can"
        ) from error
    if not isinstance(layer, nn.Module):
        raise InputError(f"network: nonlinearity must make an nn.Module, but it made {layer!r}")
    return layer


def _named_nonlinearity(caller: str, name: str, covariance: Literal["exact", "dvi"]) -> nn.Module:
    """Return a new layer for one of the two names."""
    if name == "mpgelu":
        return MPGELU()
    if name == "relu":
        return ReLU(covariance)
    raise InputError(f"{caller}: nonlinearity must be 'mpgelu' or 'relu', got {name!r}")


def _check_sizes(caller: str, *, in_features: int, outputs: int, hidden: Sequence[int]) -> None:
    """Raise if a size is not a positive whole number."""
    if not isinstance(hidden, Iterable) or isinstance(hidden, str):  # type: ignore[unreachable]
        raise InputError(
            f"{caller}: hidden must be a sequence with the width of each hidden layer, got {hidden!r}"
            + f"; for one hidden layer use hidden=({hidden},)" * isinstance(hidden, numbers.Integral)
        )
    sizes: list[tuple[str, object]] = [("in_features", in_features), ("outputs", outputs)]
    for name, size in [*sizes, *(("hidden", width) for width in hidden)]:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or int(size) < 1:
            raise InputError(f"{caller}: {name} must be a positive whole number, got {size!r}")
