"""Many networks of one architecture, run and trained as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from mpgelu.errors import InputError
from mpgelu.layers import Dropout, GaussianLinear
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.native import perceptron, plain
from mpgelu.networks import batched
from mpgelu.networks.description import Description, build, describe
from mpgelu.networks.headed import HeadedNetworks, headed_form
from mpgelu.networks.perceptron import arrays_of, known_perceptron, run_whole
from mpgelu.networks.plain import plain_form
from mpgelu.networks.prepared import Prepared
from mpgelu.visibility import values_are_visible


class Stack(nn.Module):
    """Several networks of the same architecture that are evaluated and trained as one module.

    Parameters and buffers have a leading model dimension, so that thousands of small networks become a few large tensor
    operations. Inputs and outputs have the model dimension first. Factored moments of the outputs become full ones, or
    diagonal ones if the outputs are independent.

    Change parameters in place under ``torch.no_grad()``, not through ``.data``, which prepared kernels do not notice.
    Second derivatives by the parameters need float64 (``stack.double()``) where a kernel computes the first ones.

    Args:
        networks: Modules of the same architecture; their parameters are copied.

    Raises:
        InputError: There is no network.

    Example:
        >>> import torch, mpgelu
        >>> stack = mpgelu.Stack([mpgelu.network(3) for _ in range(5)])
        >>> stack(mpgelu.FactoredMoments.certain(torch.randn(5, 8, 3)))  # each network has its own eight rows
        FullMoments(mean (5, 8, 2), float32)
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not networks:
            raise InputError("Stack: needs at least one network, got none")
        self._models = len(networks)
        parameters, buffers = stack_module_state(list(networks))
        self._names = [*parameters]
        self._buffer_names = [*buffers]
        for position, name in enumerate(self._names):
            self.register_parameter(f"parameter_{position}", nn.Parameter(parameters[name].detach().clone()))
        for position, name in enumerate(self._buffer_names):
            self.register_buffer(f"buffer_{position}", buffers[name].detach().clone())
        self._skeleton = (copy.deepcopy(networks[0]).to("meta"),)  # a tuple hides its parameters from nn.Module
        self._perceptron = known_perceptron(networks[0])
        self._plain = plain_form(networks[0])
        self._headed = headed_form(networks[0])
        self._is_batched = batched.has_batched_form(networks[0])
        self._for_moments: Prepared[perceptron.Perceptrons] = Prepared()
        self._for_tensors: Prepared[plain.PlainNetworks] = Prepared()
        self._for_heads: Prepared[HeadedNetworks] = Prepared()

    @classmethod
    def empty(cls, description: Description, models: int) -> Self:
        """Return networks of a description without parameters, on the device ``meta``; load a state with ``assign``.

        Args:
            description: Description of each network.
            models: Number of networks.
        """
        stack = cls([build(description)])
        stack._models = models
        for tensor in (*stack.parameters(), *stack.buffers()):
            tensor.data = tensor.data.expand(models, *tensor.shape[1:])  # tensors on "meta" have no memory
        return stack

    def __len__(self) -> int:
        """Number of models."""
        return self._models

    def forward(self, value: Any) -> Any:
        """Apply each network to its own slice of ``value``.

        A compiled kernel is used if one is applicable, then batched operations of torch, and otherwise ``vmap``.

        Args:
            value: A tensor ``(models, *batch, n)``, or moments with such a mean.
        """
        if (outputs := self._known(value) if isinstance(value, Tensor) else self._whole(value)) is not None:
            return outputs
        if isinstance(value, Tensor) and value.dim() == 3 and self._is_batched:
            parameters, buffers = self.state()
            return batched.run(self.architecture, value, parameters | buffers)
        return vmap(self._run)(*self.state(), value)

    def of_known(self, x: Tensor, moments: type[Moments]) -> Any:
        """Return the moments of the outputs of random networks for deterministic inputs.

        Args:
            x: Inputs, ``(models, rows, n)``.
            moments: The type that is propagated; if only the last layer is random, all types are exact.
        """
        form = self._headed
        if form is not None and self._takes(x):
            networks = self._for_heads.of(self.parameters(), lambda: form.arrays(self.state()[0]))
            if x.shape[2] == networks.body.features:
                return networks(x)
        return self(moments.certain(x))

    def each(self, function: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return the value of a function of each network, such as its Kullback-Leibler term, ``(models, ...)``.

        Args:
            function: Function from a network to a tensor; it is evaluated once, by ``vmap``.
        """
        called = _Called(self._skeleton[0], function)

        def run(state: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(called, {f"network.{name}": value for name, value in state.items()}, ())
            return result

        parameters, buffers = self.state()
        results: Tensor = vmap(run)(parameters | buffers)
        return results

    def unstack(self) -> list[nn.Module]:
        """Return the networks as separate modules, with copies of their parameters."""
        parameters, buffers = self.state()
        networks = []
        for index in range(len(self)):
            state = {name: tensor[index].detach().clone() for name, tensor in (parameters | buffers).items()}
            network = copy.deepcopy(self._skeleton[0])
            network.load_state_dict(state, assign=True)  # keeps dtype and device of the stack
            networks.append(network)
        return networks

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers by their names in a single network, ``(models, ...)`` each."""
        parameters: dict[str, Tensor] = {name: getattr(self, f"parameter_{i}") for i, name in enumerate(self._names)}
        buffers = {name: getattr(self, f"buffer_{i}") for i, name in enumerate(self._buffer_names)}
        return parameters, buffers

    @property
    def architecture(self) -> nn.Module:
        """One of the networks, without parameters (they are on the device "meta")."""
        return self._skeleton[0]

    @property
    def description(self) -> Description:
        """Description of each of the networks.

        Raises:
            InputError: A layer is of a type that is not registered.
        """
        return describe(self._skeleton[0], "Stack")

    def _whole(self, value: Any) -> DiagonalMoments | FullMoments | None:
        """Return the moments of the outputs by one call of a kernel, or ``None`` if none is applicable."""
        known = self._perceptron
        if known is None or not isinstance(value, Moments) or len(value.mean) != len(self):
            return None
        parameters, buffers = self.state()
        state = parameters | buffers
        if not self._is_fixed or not values_are_visible(value.mean):
            return run_whole(known, state, value)
        arrays = self._for_moments.of(state.values(), lambda: arrays_of(known, state))
        return run_whole(known, state, value, arrays)

    def _known(self, value: Tensor) -> Tensor | None:
        """Return the outputs for inputs ``(models, rows, n)`` by one call of a kernel, or ``None``."""
        form = self._plain
        if form is None or not self._takes(value, training=True):
            return None
        make = partial(form.arrays, self.state()[0])
        networks = self._for_tensors.of(self.parameters(), make) if self._is_fixed else make()
        return plain.outputs(networks, value) if value.shape[2] == networks.features else None

    def _takes(self, value: Tensor, training: bool = False) -> bool:
        """Return whether a kernel takes inputs ``(models, rows, n)`` and these parameters.

        Args:
            value: The inputs.
            training: Whether the kernel has gradients of the parameters.
        """
        if value.dim() != 3 or len(value) != len(self) or (value.requires_grad and torch.is_grad_enabled()):
            return False
        if not training and not self._is_fixed:
            return False
        return perceptron.can_take(value, *self.parameters())

    @property
    def _is_fixed(self) -> bool:
        """Whether no gradients of the parameters are recorded, so that prepared arrays can be cached."""
        return not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters())

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], value: Any) -> Any:
        """Return the output of one network, for ``vmap``."""
        output = functional_call(self._skeleton[0], (parameters, buffers), (value,))
        if not isinstance(output, FactoredMoments):
            return output
        if not output.blocks:  # independent outputs, which need no dense covariance
            return DiagonalMoments(output.mean, output.variance)
        return FullMoments.from_moments(output)


class _Called(nn.Module):
    """A function of a network as a module, so that ``functional_call`` can replace its parameters."""

    def __init__(self, network: nn.Module, function: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self) -> Tensor:
        return self.function(self.network)


def is_random(network: nn.Module) -> bool:
    """Return whether the output of a network is random for a deterministic input, because of dropout or random weights.

    Layers from outside the package declare this by an attribute ``is_random``.
    """
    return any(
        isinstance(module, (Dropout, GaussianLinear)) or getattr(module, "is_random", False)
        for module in network.modules()
    )
