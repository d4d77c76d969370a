"""Layers of elementwise functions, with the names of ``torch.nn``."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import activations, elementwise, leaky_relu
from mpgelu.rules.elementwise import Activation
from mpgelu.rules.leaky_relu import Covariance
from mpgelu.rules.relu import check_covariance


class Elementwise(nn.Module):
    """Apply an elementwise function to Gaussian units; see :func:`mpgelu.rules.elementwise`.

    Means and variances are exact to the accuracy of the quadrature for Gaussian inputs; covariances are approximated
    by the best linear fit.

    Args:
        activation: The function, an object of a subclass of :class:`mpgelu.rules.elementwise.Activation`.

    Raises:
        InputError: It is not such an object.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        if not isinstance(activation, Activation):
            raise InputError(
                f"Elementwise: activation must be an Activation, a function with its slope, got {activation!r}; layers "
                "such as mpgelu.layers.Tanh() have one"
            )
        self.activation = activation

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return elementwise(input, self.activation)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self.activation).items())


@layers.register()
class GELU(Elementwise):
    """``torch.nn.GELU`` that also accepts moments: the mean is a closed form, the variance is quadrature."""

    def __init__(self) -> None:
        super().__init__(activations.GELU())


@layers.register()
class SiLU(Elementwise):
    """``torch.nn.SiLU`` that also accepts moments, by quadrature."""

    def __init__(self) -> None:
        super().__init__(activations.SiLU())


@layers.register()
class Tanh(Elementwise):
    """``torch.nn.Tanh`` that also accepts moments, by quadrature."""

    def __init__(self) -> None:
        super().__init__(activations.Tanh())


@layers.register()
class Sigmoid(Elementwise):
    """``torch.nn.Sigmoid`` that also accepts moments, by quadrature."""

    def __init__(self) -> None:
        super().__init__(activations.Sigmoid())


@layers.register(read=lambda layer: vars(layer.activation))
class Softplus(Elementwise):
    """``torch.nn.Softplus`` that also accepts moments, by quadrature.

    Args:
        beta: Sharpness of the bend.
        threshold: Value of ``beta x`` above which the function is replaced by its argument.
    """

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__(activations.Softplus(beta, threshold))


@layers.register("negative_slope", "covariance")
class LeakyReLU(nn.Module):
    """``torch.nn.LeakyReLU`` that also accepts moments; see :func:`mpgelu.rules.leaky_relu`.

    Args:
        negative_slope: Slope below zero; 0 is ReLU.
        covariance: ``"exact"``, or ``"gain"`` for the first-order approximation in which factored moments stay
            factored.

    Raises:
        InputError: ``covariance`` is neither of the two.
    """

    def __init__(self, negative_slope: float = 0.01, covariance: Covariance = "exact") -> None:
        super().__init__()
        check_covariance("LeakyReLU", covariance, Covariance)
        self.negative_slope = negative_slope
        self.covariance: Covariance = covariance

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return leaky_relu(input, self.negative_slope, self.covariance)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        return f"negative_slope={self.negative_slope:g}, covariance={self.covariance!r}"
