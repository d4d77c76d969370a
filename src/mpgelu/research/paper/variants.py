"""The paper's two networks, and variants of them that test what the paper says about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.layers import MPGELU, Dropout
from mpgelu.moments import DiagonalMoments, FactoredMoments
from mpgelu.networks import paper_network
from mpgelu.rules.normal import cdf

Network = Literal["mpgelu", "relu", "relu_input", "gelu_input", "gelu_hidden"]
Variant = Literal["relu_input", "gelu_input", "gelu_hidden"]
Held = TypeVar("Held", DiagonalMoments, FactoredMoments)

VARIANTS: dict[Variant, str] = {
    "relu_input": "ReLU with dropout on the input alone, as the MP-GELU network has it",
    "gelu_input": "MP-GELU with GELU on the features in place of dropout",
    "gelu_hidden": "MP-GELU with GELU as the first nonlinearity and no dropout",
}
WITHOUT_DROPOUT: tuple[Variant, ...] = ("gelu_input", "gelu_hidden")


def check_variant(name: str, rate: float | None, records: Path) -> None:
    """Refuse a variant that does not exist, has no use for the rate, or has nothing to be compared with.

    Raises:
        InputError: One of these is the case.
    """
    if name not in VARIANTS:
        raise InputError(f"reproduce: --variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    if name in WITHOUT_DROPOUT and rate is not None:
        raise InputError(f"reproduce: --variant {name} has no dropout, got --rate {rate:g}; leave --rate out")
    if not records.exists():
        raise InputError(
            f"reproduce: --variant {name} is compared with the paper's networks, and there is no {records}; "
            "run the command without --variant first"
        )


class GELUMask(nn.Module):
    r"""GELU as the random layer it stands for, on values that are known: :math:`\epsilon x`, :math:`\epsilon \sim
    \operatorname{Bernoulli}(\Phi(x))`.

    .. math:: \Phi(x)\, x, \qquad \Phi(x)(1 - \Phi(x))\, x^2

    The mean is GELU. Both moments are exact for a value without variance; the variance of any other is not asked for.
    """  # noqa: D205

    def forward(self, value: Held) -> Held:
        """Apply the layer to moments of a value that nothing random came before."""
        return gelu_moments(type(value), value.mean)


def gelu_moments(kind: type[Held], x: Tensor) -> Held:
    """Moments of known values after :class:`GELUMask`, held as ``kind``."""
    keep = cdf(x)
    return kind.of(keep * x, keep * (1 - keep) * x.square())


def build(name: Network, in_features: int, outputs: int, rate: float) -> nn.Sequential:
    """A fresh network; all of them draw the same weights from the same seed of torch.

    The network of "gelu_input" begins after its GELU, which :func:`input_moments` applies.
    """
    network = paper_network(
        nonlinearity="relu" if name in ("relu", "relu_input") else "mpgelu",
        in_features=in_features,
        outputs=outputs,
        rate=rate,
        relu_dropout="input" if name == "relu_input" else "each",
    )
    if name not in WITHOUT_DROPOUT:
        return network
    layers = [layer for layer in network if not isinstance(layer, Dropout)]
    if name == "gelu_hidden":
        layers[next(i for i, layer in enumerate(layers) if isinstance(layer, MPGELU))] = GELUMask()
    return nn.Sequential(*layers)


def input_moments(name: Network, kind: type[Held]) -> Callable[[Tensor], Held]:
    """From features to what the network of :func:`build` takes."""
    if name == "gelu_input":
        return lambda X: gelu_moments(kind, X)
    return kind.certain
