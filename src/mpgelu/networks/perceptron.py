"""Recognition of perceptrons, and their moments by one call of a compiled kernel, otherwise by the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.native import perceptron
from mpgelu.networks.description import Description, description_of
from mpgelu.networks.prepared import Prepared
from mpgelu.rules.dropout import mask_moments

WIDEST = 200  # largest width of a layer for which the kernels of covariances are faster than matrix products
_Masks = tuple[Tensor, Tensor]  # means and variances of the masks of all layers, (M, layers) each
_RELU: dict[str, perceptron.Nonlinearity] = {"dvi": "relu_dvi", "exact": "relu_exact"}


@dataclass(frozen=True)
class MaskedLinear:
    """The position of one linear layer in a perceptron, and of the dropout before it.

    Args:
        name: Name of the linear layer in the network.
        gaussian: Whether its weights are random.
        bias: Whether it has a bias.
        dropout: Name of the dropout layer before it; ``None`` if there is none.
        rescale: The setting ``rescale`` of the dropout.
    """

    name: str
    gaussian: bool
    bias: bool
    dropout: str | None
    rescale: bool


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with the same nonlinearity between any two of them, and optional dropout before each.

    Args:
        layers: The linear layers, in order.
        nonlinearity: The nonlinearity; ``None`` for a single layer.
    """

    layers: tuple[MaskedLinear, ...]
    nonlinearity: Description | None

    @property
    def rates(self) -> list[str]:
        """Names of the dropout rates."""
        return [f"{layer.dropout}.rate" for layer in self.layers if layer.dropout]


def perceptron_of(network: nn.Module) -> Perceptron | None:
    """Return the structure of a plain perceptron, or ``None`` for any other network."""
    description = description_of(network)
    if description is None or description.kind != "Sequential" or any(child.children for child in description.children):
        return None
    found: list[MaskedLinear] = []
    between: list[Description] = []
    dropout: tuple[str, Description] | None = None
    after_linear = False
    for name, layer in description.leaves():
        if layer.kind == "Dropout" and not after_linear and dropout is None:
            dropout = name, layer
        elif layer.kind in ("Linear", "GaussianLinear") and not after_linear:
            held, rescale = (dropout[0], dropout[1].settings["rescale"]) if dropout else (None, False)
            found.append(MaskedLinear(name, layer.kind == "GaussianLinear", layer.settings["bias"], held, rescale))
            dropout, after_linear = None, True
        elif after_linear and layer.kind not in ("Dropout", "Linear", "GaussianLinear"):
            between.append(layer)
            after_linear = False
        else:
            return None
    if not after_linear or any(layer != between[0] for layer in between):
        return None
    return Perceptron(tuple(found), between[0] if between else None)


def known_perceptron(network: nn.Module) -> Perceptron | None:
    """Return the structure of a perceptron that the kernels support, or ``None`` for any other network."""
    found = perceptron_of(network)
    if found is None or any(layer.gaussian or not layer.bias for layer in found.layers):
        return None
    return None if _nonlinearity(found.nonlinearity) is None else found


def run_whole(
    found: Perceptron,
    state: Mapping[str, Tensor],
    value: Moments,
    arrays: perceptron.Perceptrons | None = None,
    masks: _Masks | None = None,
) -> DiagonalMoments | FullMoments | None:
    """Return the moments of the outputs of M networks by one call of a kernel, or ``None`` if it is not applicable.

    Gradients are computed for the parameters only. The kernels support independent inputs without a limit of the rank
    that do not require gradients, float32 on the CPU; everything else is left to the rules.

    Args:
        found: Structure of the networks, from :func:`known_perceptron`.
        state: Parameters and buffers by their names in the network, ``(M, ...)`` each.
        value: Moments of the inputs, with mean ``(M, rows, n)``.
        arrays: The result of :func:`arrays_of` for the state, if it is known already.
        masks: Means and variances of its masks, if they are known already.

    Returns:
        Diagonal moments for diagonal inputs, full moments for factored inputs.
    """
    variance = _independent_variance(value)
    if variance is None or value.mean.dim() != 3 or variance.shape != value.mean.shape:
        return None
    held = [state[name] for layer in found.layers for name in _names(layer)]
    buffers = [state[name] for name in found.rates]
    if any(tensor.requires_grad for tensor in (value.mean, variance, *buffers)):
        return None
    if not perceptron.can_take(value.mean, variance, *held, *buffers):
        return None
    networks = arrays or arrays_of(found, state, masks)
    if value.features != networks.widths[0]:
        return None
    exact = isinstance(value, FactoredMoments)
    if exact and max(networks.widths[1:]) > WIDEST:
        return None
    moments = perceptron.propagate(networks, value.mean, variance, exact=exact)
    return FullMoments(*moments) if exact else DiagonalMoments(*moments)


def as_function(network: nn.Module) -> Callable[[Any], Any]:
    """Return a function with the values of a network that uses a kernel if one is applicable.

    Args:
        network: Any network. It is returned itself if no kernel supports it, or if a module has hooks, which a kernel
            would not call.

    Returns:
        Function from moments ``(rows, n)`` to moments of the outputs.
    """
    found = known_perceptron(network)
    if found is None or any(module._forward_hooks or module._forward_pre_hooks for module in network.modules()):
        return network

    held, masks = list(_held(found, network)), Prepared[_Masks]()

    def run(value: Any) -> Any:
        outputs = None
        if isinstance(value, (DiagonalMoments, FactoredMoments)):
            of_network = {name: getattr(module, tensor) for name, module, tensor in held}
            state = {name: tensor.unsqueeze(0) for name, tensor in of_network.items()}
            rates = [of_network[name] for name in found.rates]
            like = next(iter(state.values()))
            known = masks.of(rates, lambda: _masks_of(found, state), like.dtype, like.device)
            outputs = run_whole(found, state, _stacked(value), masks=known)
        if outputs is None:
            return network(value)
        mean, spread = mean_and_spread(outputs)
        return type(outputs)(mean.squeeze(0), spread.squeeze(0))

    return run


def warn_if_slow(network: nn.Module) -> None:
    """Issue a :class:`SlowWarning` once if the kernels are missing and would support the training of this network."""
    single = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in network.parameters())
    known = getattr(network, "_perceptron", None) or known_perceptron(network)
    if single and known is not None:
        native.warn_if_missing()


def _independent_variance(value: Moments) -> Tensor | None:
    """Return the variances of independent inputs, or ``None`` for inputs with correlations or a limit of the rank."""
    if isinstance(value, DiagonalMoments):
        return value.variance
    if not isinstance(value, FactoredMoments) or value.blocks or value.max_rank not in (None, math.inf):
        return None
    return torch.zeros_like(value.mean) if value.residual is None else value.residual


def _stacked(value: DiagonalMoments | FactoredMoments) -> DiagonalMoments | FactoredMoments:
    """Return moments with a leading dimension of one network.

    Blocks of factored moments are not changed, because :func:`run_whole` does not accept moments with blocks.
    """
    mean = value.mean.unsqueeze(0)
    if isinstance(value, DiagonalMoments):
        return DiagonalMoments(mean, value.variance.unsqueeze(0))
    residual = None if value.residual is None else value.residual.unsqueeze(0)
    return FactoredMoments(mean, value.blocks, residual, max_rank=value.max_rank)


def mean_and_spread(value: Moments) -> tuple[Tensor, Tensor]:
    """Return the mean with the variance of diagonal moments, or with the covariance of others."""
    return value.mean, value.variance if isinstance(value, DiagonalMoments) else value.covariance


def _names(layer: MaskedLinear) -> tuple[str, str]:
    """Return the names of weight and bias of a layer."""
    return f"{layer.name}.weight", f"{layer.name}.bias"


def _held(found: Perceptron, network: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the parameters and rates of a perceptron: name in the network, module, and name in the module."""
    names = [name for layer in found.layers for name in _names(layer)]
    for name in [*names, *found.rates]:
        module, _, tensor = name.rpartition(".")
        yield name, network.get_submodule(module), tensor


def arrays_of(found: Perceptron, state: Mapping[str, Tensor], masks: _Masks | None = None) -> perceptron.Perceptrons:
    """Return the parameters of M networks in the form of the kernels.

    Args:
        found: Structure of the networks, from :func:`known_perceptron`.
        state: Parameters and buffers by their names in the network, ``(M, ...)`` each.
        masks: Means and variances of the masks, if they are known already.
    """
    weights, biases = zip(*([state[name] for name in _names(layer)] for layer in found.layers), strict=True)
    gains, noises = masks or _masks_of(found, state)
    nonlinearity = _nonlinearity(found.nonlinearity)
    assert nonlinearity is not None  # of a known perceptron
    return perceptron.Perceptrons(weights, biases, gains, noises, nonlinearity)


def _masks_of(found: Perceptron, state: Mapping[str, Tensor]) -> _Masks:
    """Return means and variances of the masks of all layers, ``(M, layers)`` each; those without dropout are one."""
    weights = [state[_names(layer)[0]] for layer in found.layers]
    no_dropout = weights[0].new_zeros(len(weights[0]))
    rates = (state[f"{layer.dropout}.rate"] if layer.dropout else no_dropout for layer in found.layers)
    masks = [mask_moments(rate, layer.rescale) for rate, layer in zip(rates, found.layers, strict=True)]
    device = weights[0].device
    gains, noises = (
        torch.stack([torch.as_tensor(part, device=device) for part in parts], 1) for parts in zip(*masks, strict=True)
    )
    return gains, noises


def _nonlinearity(layer: Description | None) -> perceptron.Nonlinearity | None:
    """Return the name of a nonlinearity in the kernels, or ``None`` if they do not support it.

    A perceptron of a single layer has no nonlinearity, and any name is valid.
    """
    if layer is None or layer.kind == "MPGELU":
        return "mpgelu"
    return _RELU[layer.settings["covariance"]] if layer.kind == "ReLU" else None
