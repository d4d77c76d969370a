"""Many networks of one architecture, run and trained as one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from mpgelu.errors import InputError
from mpgelu.layers import MPGELU, Dropout, Linear, ReLU
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.native import perceptron
from mpgelu.native.row_wise import use_native
from mpgelu.rules.dropout import mask_moments


class Stack(nn.Module):
    """Several networks of one architecture that run, and train, as one.

    Parameters and buffers gain a leading model dimension, so thousands of small networks become a few large tensor
    operations. Input and output have the model dimension first; the output's covariance is dense, being small.

    Args:
        networks: modules of the same architecture; their parameters are copied.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not networks:
            raise InputError("Stack: needs at least one network, got none")
        parameters, buffers = stack_module_state(list(networks))
        self._names = [*parameters]
        self._buffer_names = [*buffers]
        for position, name in enumerate(self._names):
            self.register_parameter(f"parameter_{position}", nn.Parameter(parameters[name].detach().clone()))
        for position, name in enumerate(self._buffer_names):
            self.register_buffer(f"buffer_{position}", buffers[name].detach().clone())
        self._skeleton = (copy.deepcopy(networks[0]).to("meta"),)  # in a tuple, so that its parameters stay hidden
        self._perceptron = _as_perceptron(networks[0])

    def __len__(self) -> int:
        """Number of models."""
        return len(self.get_parameter("parameter_0"))

    def forward(self, value: Any) -> Any:
        """Run every network on its own slice of ``value``, whose tensors are ``(models, *batch, n)``."""
        fused = self._fused(value) if isinstance(value, (DiagonalMoments, FactoredMoments)) else None
        if fused is not None:
            return fused
        return vmap(self._run)(*self.state(), value)

    def each(self, function: Callable[[nn.Module], Tensor]) -> Tensor:
        """A number or tensor computed from every network, for example its Kullback-Leibler term, ``(models, ...)``."""
        called = _Called(self._skeleton[0], function)

        def run(state: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(called, {f"network.{name}": value for name, value in state.items()}, ())
            return result

        parameters, buffers = self.state()
        results: Tensor = vmap(run)(parameters | buffers)
        return results

    def unstack(self) -> list[nn.Module]:
        """The networks, one by one, with copies of their parameters."""
        parameters, buffers = self.state()
        networks = []
        for index in range(len(self)):
            state = {name: tensor[index].detach().clone() for name, tensor in (parameters | buffers).items()}
            network = copy.deepcopy(self._skeleton[0])
            network.load_state_dict(state, assign=True)  # assigned, not copied: the stack's dtype and device count
            networks.append(network)
        return networks

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of all networks by their names in one, each ``(models, ...)``."""
        parameters: dict[str, Tensor] = {
            name: self.get_parameter(f"parameter_{i}") for i, name in enumerate(self._names)
        }
        buffers = {name: self.get_buffer(f"buffer_{i}") for i, name in enumerate(self._buffer_names)}
        return parameters, buffers

    def _fused(self, value: DiagonalMoments | FactoredMoments) -> DiagonalMoments | FullMoments | None:
        """All layers of all networks in one native call, if there is one that can do it."""
        networks = self.perceptron
        if networks is None or value.mean.dim() != 3 or len(value.mean) != len(self):
            return None
        if isinstance(value, DiagonalMoments):
            variance = value.variance
        else:
            variance = torch.zeros_like(value.mean) if value.residual is None else value.residual
            exactly = value.max_rank in (None, math.inf)
            if value.blocks or not exactly:
                return None
        if value.features != networks.widths[0] or variance.shape != value.mean.shape:
            return None
        held = [*self.parameters(), *self.buffers()]
        if any(tensor.requires_grad for tensor in (value.mean, variance, *self.buffers())):
            return None
        if torch._C._are_functorch_transforms_active() or not use_native(value.mean, variance, *held):
            return None
        if isinstance(value, DiagonalMoments):
            return DiagonalMoments(*perceptron.propagate(networks, value.mean, variance))
        return FullMoments(*perceptron.propagate_exactly(networks, value.mean, variance))

    @property
    def perceptron(self) -> perceptron.Perceptrons | None:
        """The networks as plain arrays, if they are linear layers with MP-GELU or ReLU between them; else ``None``."""
        if self._perceptron is None:
            return None
        layers, nonlinearity = self._perceptron
        parameters, buffers = self.state()
        weights = [parameters[layer.weight] for layer in layers]
        biases = [parameters[layer.bias] for layer in layers]
        no_dropout = weights[0].new_zeros(len(self))
        rates = (buffers[layer.rate] if layer.rate else no_dropout for layer in layers)
        masks = [mask_moments(rate, layer.rescale) for rate, layer in zip(rates, layers, strict=True)]
        gains, noises = (
            torch.stack([torch.as_tensor(part) for part in parts], 1) for parts in zip(*masks, strict=True)
        )
        return perceptron.Perceptrons(weights, biases, gains, noises, nonlinearity)

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], value: Any) -> Any:
        output = functional_call(self._skeleton[0], (parameters, buffers), (value,))
        return FullMoments.from_moments(output) if isinstance(output, FactoredMoments) else output


class _Called(nn.Module):
    """A function of a network as a module, whose parameters can be replaced."""

    def __init__(self, network: nn.Module, function: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self) -> Tensor:
        return self.function(self.network)


class _Layer(NamedTuple):
    """Where a stacked network keeps one linear layer and the dropout before it."""

    weight: str
    bias: str
    rate: str | None
    rescale: bool


_RELU: dict[str, perceptron.Nonlinearity] = {"dvi": "relu_dvi", "exact": "relu_exact"}


def _as_perceptron(network: nn.Module) -> tuple[list[_Layer], perceptron.Nonlinearity] | None:
    """The layers, if the network is linear layers with one nonlinearity between them and dropout before any."""
    layers: list[_Layer] = []
    nonlinearities: set[perceptron.Nonlinearity] = set()
    dropout: tuple[str, bool] | None = None
    expected: tuple[type[nn.Module], ...] = (Dropout, Linear)
    for name, module in network.named_children() if type(network) is nn.Sequential else ():
        if type(module) not in expected or (isinstance(module, Linear) and module.bias is None):
            return None
        if isinstance(module, Dropout):
            dropout, expected = (f"{name}.rate", module.rescale), (Linear,)
        elif isinstance(module, Linear):
            layers.append(_Layer(f"{name}.weight", f"{name}.bias", *(dropout or (None, True))))
            dropout, expected = None, (MPGELU, ReLU)
        else:
            nonlinearities.add(_RELU[module.covariance] if isinstance(module, ReLU) else "mpgelu")
            expected = (Dropout, Linear)
    if expected != (MPGELU, ReLU) or len(nonlinearities) > 1:
        return None
    return layers, nonlinearities.pop() if nonlinearities else "mpgelu"
