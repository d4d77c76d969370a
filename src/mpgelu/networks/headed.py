"""Moments of networks whose last layer alone is random: a kernel for the body, two products for the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpgelu.moments import DiagonalMoments
from mpgelu.native.plain import PlainNetworks, outputs
from mpgelu.networks.description import description_of
from mpgelu.networks.plain import PlainForm, form_of


@dataclass(frozen=True)
class HeadedNetworks:
    """M networks with k random outputs, whose weights in the last layer, the head, are Gaussian; as arrays.

    Args:
        body: The layers before the last nonlinearity, which is SiLU.
        weight: Mean weights of the head, ``(M, outputs, units)``; the random outputs come first.
        bias: Mean biases of the head, ``(M, 1, outputs)``.
        weight_variance: Variances of the weights of the random outputs, ``(M, k, units)``.
        bias_variance: Variances of their biases, ``(M, 1, k)``.
    """

    body: PlainNetworks
    weight: Tensor
    bias: Tensor
    weight_variance: Tensor
    bias_variance: Tensor

    def __call__(self, x: Tensor) -> DiagonalMoments:
        r"""Return the moments of the outputs; exact, because outputs are independent for a deterministic input.

        .. math:: m = W h + b, \qquad v = V_W h^2 + V_b

        with the units h before the head.

        Args:
            x: Inputs, ``(M, rows, n)``, float32.
        """
        units = F.silu(outputs(self.body, x), inplace=True)
        mean = torch.baddbmm(self.bias, units, self.weight.mT)
        variance = torch.baddbmm(self.bias_variance, units.square_(), self.weight_variance.mT)
        return DiagonalMoments(mean, F.pad(variance, (0, mean.shape[-1] - variance.shape[-1])))


@dataclass(frozen=True)
class HeadedForm:
    """Names of the layers of a network of this kind.

    Args:
        body: Names of the layers before the last nonlinearity.
        head: Name of the last layer, :class:`Beside` of a Gaussian and a deterministic linear layer.
    """

    body: PlainForm
    head: str

    def arrays(self, state: Mapping[str, Tensor]) -> HeadedNetworks:
        """Return the parameters of M networks in this form.

        Args:
            state: Parameters by their names in the network, ``(M, ...)`` each.
        """
        held = {name: tensor.detach() for name, tensor in state.items()}
        weight, bias = (torch.cat([held[f"{self.head}.{i}.{part}"] for i in (0, 1)], 1) for part in ("weight", "bias"))
        of_weight, of_bias = (held[f"{self.head}.0.log_{part}_variance"].exp() for part in ("weight", "bias"))
        return HeadedNetworks(self.body.arrays(held), weight, bias.unsqueeze(1), of_weight, of_bias.unsqueeze(1))


def headed_form(network: nn.Module) -> HeadedForm | None:
    """Return the form of a network such as a distilled one, or ``None`` for any other network."""
    found = description_of(network)
    if found is None or found.kind != "Sequential" or len(found.children) < 3:
        return None
    *layers, between, head = found.children
    parts = [part.kind for part in head.children]
    if between.kind != "SiLU" or head.kind != "Beside" or parts != ["GaussianLinear", "Linear"]:
        return None
    body = form_of(layers)
    if body is None or (body.nonlinearity != "silu" and len(body.linear) > 1):
        return None
    return HeadedForm(body, str(len(layers) + 1)) if all(part.settings["bias"] for part in head.children) else None
