"""A common view of all models (network, ensemble, estimator, table model) for audit, attribution and export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood, check_likelihood
from mpgelu.moments import FactoredMoments, Moments, check_moment_type
from mpgelu.networks.scaling import FeatureScale


class Members(nn.Module):
    """The Gaussian members that a model mixes, as a module that torch can trace.

    ``forward`` maps scaled features ``(rows, n)`` to means and variances of the outputs of the members,
    ``(M, rows, outputs)`` each.
    """

    @property
    def weights(self) -> Tensor:
        """Weights of the members, ``(M,)``, float64, summing to one."""
        raise NotImplementedError

    @property
    def centers(self) -> Tensor | None:
        """Matrix from the means of the members to those of their networks, ``(M, M)``; ``None`` if they are equal."""
        return None


@dataclass(frozen=True)
class Parts:
    """The networks of a model, their weights, and the scales of the data.

    Attributes:
        networks: M networks that take scaled features.
        weights: Weights of the networks, ``(M,)``, float64, summing to one.
        likelihood: The likelihood that interprets their outputs.
        feature_names: Names of the n raw features.
        scaling: Transformation of raw features to the inputs of the networks.
        target_mean: Offset of the target, in its unit.
        target_scale: Scale of the target, in its unit.
        moments: Type of moments that predictions propagate.
        encode: Function from rows as users have them to raw features ``(rows, n)``.
        calibration_scores: Sorted conformity scores, if the intervals were calibrated.
        noise: Module from scaled features and the outputs of the networks to outputs with the log-variance of the
            noise; ``None`` if the networks predict it themselves.
        spread: Factor of the shrinkage of the means of the networks towards their average.
        whole: Module from raw features, their errors and a number of nodes to the distribution of the target; ``None``
            for a single network.
        members: The members that the model mixes, if these are not the outputs of the networks.
    """

    networks: Sequence[nn.Module]
    weights: Tensor
    likelihood: Likelihood
    feature_names: Sequence[str]
    scaling: FeatureScale
    target_mean: float = 0.0
    target_scale: float = 1.0
    moments: type[Moments] = FactoredMoments
    encode: Callable[[Any], ArrayLike] = field(default=lambda rows: rows)
    calibration_scores: NDArray[np.float64] | None = None
    noise: nn.Module | None = None
    spread: float = 1.0
    whole: nn.Module | None = None
    members: Members | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the networks."""
        parameters = (parameter.dtype for network in self.networks for parameter in network.parameters())
        return next(parameters, torch.float32)

    def raw(self, caller: str, X: Any) -> Tensor:
        """Return rows as raw features ``(rows, n)``, float64.

        Args:
            caller: Name of the function that the error message starts with.
            X: Rows in any form that the model accepts.

        Raises:
            InputError: The rows are not vectors of the features of the model.
        """
        x = torch.tensor(np.asarray(self.encode(X), dtype=np.float64), device=_first_device(self.networks))
        if x.dim() != 2 or x.shape[1] != len(self.feature_names):
            raise InputError(f"{caller}: X must have shape (rows, {len(self.feature_names)}), got {tuple(x.shape)}")
        return x

    def scaled(self, caller: str, X: Any) -> Tensor:
        """Return rows as inputs of the networks, in their dtype; the arguments are those of :meth:`raw`."""
        scaled: Tensor = self.scaling(self.raw(caller, X))
        return scaled.to(self.dtype)


@singledispatch
def parts_of(
    model: Any,
    caller: str,
    *,
    features: int | Sequence[str] | None = None,
    likelihood: Likelihood | None = None,
    moments: type[Moments] = FactoredMoments,
) -> Parts:
    """Return the parts of a model. Further types of models are added with ``@parts_of.register``.

    Args:
        model: A fitted estimator, a table model, an ensemble, or a module from moments to moments.
        caller: Name of the function that error messages start with.
        features: Names of the features, or their number; required for networks that do not start with a linear layer.
        likelihood: Likelihood of a network; by default heteroscedastic for two outputs, Gaussian of unit noise for
            one.
        moments: Type of moments that a network propagates.

    Raises:
        InputError: The object is not a fitted model of a registered type.
    """
    what = f"{type(model).__name__}; call fit first" if hasattr(model, "fit") else type(model).__name__
    raise InputError(f"{caller}: wants a fitted estimator, an Ensemble or a network, got {what}")


@parts_of.register
def _(
    model: nn.Module,
    caller: str,
    *,
    features: int | Sequence[str] | None = None,
    likelihood: Likelihood | None = None,
    moments: type[Moments] = FactoredMoments,
) -> Parts:
    check_moment_type(caller, moments)
    if likelihood is not None:
        check_likelihood(caller, likelihood)
    given = features if features is None or isinstance(features, int) else len(features)
    if (count := given or in_features_of(model)) is None:
        raise InputError(f"{caller}: no layer of the network states its number of features; give features=")
    return Parts(
        networks=[model],
        weights=torch.ones(1, dtype=torch.float64, device=_first_device([model])),
        likelihood=likelihood or _likelihood(caller, model, count),
        feature_names=feature_names(caller, features, count),
        scaling=FeatureScale.identity(count),
        moments=moments,
    )


def feature_names(caller: str, features: int | Sequence[str] | None, count: int) -> list[str]:
    """Return the names of ``count`` features; the default is ``x0``, ``x1`` and so on.

    Args:
        caller: Name of the function that the error message starts with.
        features: The names, their number, or ``None``.
        count: Number of features of the model.

    Raises:
        InputError: The number of names is not ``count``.
    """
    names = [f"x{i}" for i in range(count)] if features is None or isinstance(features, int) else list(features)
    if len(names) != count:
        raise InputError(f"{caller}: the model takes {count} features, got the names of {len(names)}")
    return names


def _first_device(networks: Sequence[nn.Module]) -> torch.device:
    """Return the device of the first parameter; the CPU if there are no parameters."""
    return next((p.device for network in networks for p in network.parameters()), torch.device("cpu"))


def one_row(network: nn.Module, features: int) -> Tensor:
    """Return a row of zeros, ``(1, features)``, with the dtype and on the device of a network."""
    return next(network.parameters(), torch.empty(0, device="cpu")).new_zeros(1, features)


def in_features_of(network: nn.Module) -> int | None:
    """Return the number of inputs of the first layer that states it as ``in_features``; ``None`` if none does."""
    sizes = (getattr(module, "in_features", None) for module in network.modules())
    return next((size for size in sizes if isinstance(size, int)), None)


def _likelihood(caller: str, network: nn.Module, features: int) -> Likelihood:
    """Return the default likelihood for the number of outputs of a network.

    Raises:
        InputError: The network has more than two outputs.
    """
    with torch.no_grad():
        outputs = network(one_row(network, features)).shape[-1]
    if outputs not in (1, 2):
        raise InputError(
            f"{caller}: the network has {outputs} outputs; one (mean) and two (mean, log-variance) are understood, "
            "for others give likelihood="
        )
    return HeteroscedasticGaussian() if outputs == 2 else Gaussian()
