"""Weighted networks as one distribution: from raw features, scaled here, to a mixture in the target's unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.errors import DataError, InputError
from mpgelu.estimators.measurement import averaged
from mpgelu.estimators.noise import NoiseHead
from mpgelu.likelihoods import HeavyTailedGaussian, HeteroscedasticGaussian, Likelihood, likelihoods
from mpgelu.likelihoods.outputs import as_moments
from mpgelu.moments import FactoredMoments, Moments, moment_types
from mpgelu.networks import FeatureScale, Parts, Stack, feature_names, is_random, parts_of
from mpgelu.networks.description import Description
from mpgelu.predictive import Predictive
from mpgelu.storage.arrays import check_arrays
from mpgelu.storage.schema import Optional, checked

_STACKS = [{"models": int, "network": object}]
_DESCRIPTION = {
    "stacks": _STACKS,
    "likelihood": {"kind": str, str: object},
    "moments": str,
    "noise": Optional(_STACKS[0], null=True),
}
_MOST_NETWORKS = 100_000


class Ensemble(nn.Module):
    r"""Networks, the weight of each, what their outputs mean, and the scales of the data they were trained on.

    The prediction is the mixture of the networks' distributions, each moved towards the average of all by a factor c:

    .. math:: p(y) = \sum_k w_k\, p\big(y - (1 - c)(\bar m - m_k) \mid \text{outputs}_k\big), \qquad
        \bar m = \sum_k w_k m_k

    A static graph without sampling: it can be compiled and exported as a whole.

    Args:
        stacks: Networks for scaled features and target; those of one architecture form a stack.
        weights: Of all networks in the order of the stacks, ``(M,)``, summing to one.
        likelihood: What their outputs mean.
        scaling: From raw features to what the networks take.
        target_mean: ``()``.
        target_scale: ``()``, positive.
        moments: The type that is propagated through networks with random layers.
        noise: Replaces the networks' own log-variances, the second of two outputs; ``None`` keeps them.
        spread: c; the average of networks is closer to the truth than they are to each other.
    """

    weights: Tensor
    target_mean: Tensor
    target_scale: Tensor
    spread: Tensor

    def __init__(
        self,
        stacks: Sequence[Stack],
        weights: Tensor,
        likelihood: Likelihood,
        scaling: FeatureScale,
        target_mean: Tensor,
        target_scale: Tensor,
        moments: type[Moments] = FactoredMoments,
        noise: NoiseHead | None = None,
        spread: float = 1.0,
    ) -> None:
        super().__init__()
        if len(weights) != sum(map(len, stacks)):
            raise InputError(f"Ensemble: {len(weights)} weights for {sum(map(len, stacks))} networks; give each one")
        self.stacks = nn.ModuleList(stacks)
        self.likelihood, self.scaling, self.moment_type, self.noise = likelihood, scaling, moments, noise
        self.register_buffer("weights", weights)
        self.register_buffer("target_mean", target_mean)
        self.register_buffer("target_scale", target_scale)
        self.register_buffer("spread", torch.tensor(spread))

    def __len__(self) -> int:
        """Number of networks."""
        return len(self.weights)

    def forward(self, x: Tensor, input_std: Tensor | None = None, nodes: int = 32) -> Predictive:
        """Distribution of the target for each row of raw features, in the dtype of x.

        Args:
            x: ``(rows, n)``; float64 keeps the digits of features and targets far from zero.
            input_std: Standard deviation of independent measurement errors of the features, ``(rows, n)``: the
                distribution is averaged over the features that may be the true ones, see
                :func:`mpgelu.estimators.measurement.averaged`. Each network then has one component at each point.
            nodes: Components of each random network's part of the mixture; mean and variances do not depend on it.
        """
        if input_std is not None:
            return averaged(lambda at: self._mixed(at, nodes), lambda at: self._mixed(at, None), x, input_std)
        return self._mixed(x, nodes)

    def _mixed(self, x: Tensor, nodes: int | None) -> Predictive:
        """The mixture of all networks; with few components for each where ``nodes`` is ``None``."""
        shares = torch.split(self.weights.to(x), [len(stack) for stack in self.each_stack()])
        of = self.likelihood
        members = [(of.predictive(h, nodes) if nodes else of.short(h)).to(x.dtype) for h in self.outputs(x)]
        average = torch.stack([share @ member.mean for share, member in zip(shares, members, strict=True)]).sum(0)
        moved = [member.affine(1.0, (1 - self.spread.to(x)) * (average - member.mean)) for member in members]
        each = [member.mixture_over(0, share) for member, share in zip(moved, shares, strict=True)]
        mixture = Predictive.mixture(each, torch.stack([share.sum() for share in shares]))
        widened = mixture.widened(self.scaling.extrapolation(x).sum(-1))
        return widened.affine(self.target_scale.to(x), self.target_mean.to(x))

    def outputs(self, x: Tensor) -> list[Moments | Tensor]:
        """Outputs of the networks of every stack, scaled, ``(networks, rows, outputs)``.

        A stack without random layers gives a tensor: its outputs are known exactly.
        """
        return self.scaled_outputs(self.scaling(x).to(self.dtype))

    def scaled_outputs(self, z: Tensor) -> list[Moments | Tensor]:
        """The same for scaled features ``(rows, n)``."""
        found: list[Moments | Tensor] = []
        for stack in self.each_stack():
            each = z.expand(len(stack), *z.shape)
            found.append(stack(self.moment_type.certain(each) if is_random(stack.architecture) else each))
        return found if self.noise is None else self.noise(z, found)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the networks: the lowest among them, for a Gaussian process computes in float64 by itself."""
        held = [*self.each_stack(), *([self.noise.networks] if self.noise is not None else [])]
        return min((stack.get_parameter("parameter_0").dtype for stack in held), key=lambda dtype: dtype.itemsize)

    def each_stack(self) -> list[Stack]:
        """The stacks, in order."""
        return [stack for stack in self.stacks if isinstance(stack, Stack)]

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Arrays, and what else is needed to build the ensemble from them."""
        about = {
            "stacks": [{"models": len(s), "network": s.description.as_json()} for s in self.each_stack()],
            "likelihood": self.likelihood.described(),
            "moments": moment_types.name(self.moment_type),
            "noise": None if self.noise is None else self.noise.described(),
        }
        return dict(self.state_dict()), about

    @classmethod
    def from_description(cls, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> Ensemble:
        """The ensemble that :meth:`described` described; nothing is allocated beyond the given arrays.

        Raises:
            DataError: A layer, likelihood or type of moments is unknown, or the arrays do not fit the description.
        """
        if "stacks" not in about:
            raise DataError("it was saved by a version before 0.2, whose networks were other ones; fit the model again")
        checked({name: about.get(name) for name in _DESCRIPTION}, _DESCRIPTION, "the ensemble")
        kinds = [*about["stacks"], *([about["noise"]] if about["noise"] else [])]
        if not about["stacks"] or any(not 1 <= kind["models"] <= _MOST_NETWORKS for kind in kinds):
            raise DataError(f"the ensemble must have 1 to {_MOST_NETWORKS:,} networks of each kind")
        stacks = [Stack.empty(Description.from_json(kind["network"]), kind["models"]) for kind in about["stacks"]]
        if not all(list(stack.parameters()) for stack in stacks):
            raise DataError("a network of the ensemble has no parameters")
        noise = NoiseHead.empty(about["noise"], len(stacks)) if about["noise"] else None
        features = arrays["scaling.center"].numel() if "scaling.center" in arrays else 1
        with torch.device("meta"):
            ensemble = cls(
                stacks,
                torch.empty(sum(map(len, stacks)), dtype=torch.float64),
                likelihoods.build(about["likelihood"]),
                FeatureScale.identity(features),
                torch.empty((), dtype=torch.float64),
                torch.empty((), dtype=torch.float64),
                moment_types.type_of(about["moments"]),  # type: ignore[arg-type]
                noise,
            )
        check_arrays(arrays, {name: tensor.shape for name, tensor in ensemble.state_dict().items()})
        _check_values(arrays)
        ensemble.load_state_dict(dict(arrays), assign=True)
        for stack in ensemble.each_stack():
            rates = [tensor for name, tensor in stack.state()[1].items() if name.endswith("rate")]
            if not all(((rate >= 0) & (rate < 1)).all() for rate in rates):
                raise DataError("a dropout rate is not in [0, 1)")
        return ensemble.requires_grad_(False)


class MemberOutputs(nn.Module):
    """What an ensemble mixes, as tensors: a function of scaled features that can be traced.

    The heavy tails of a likelihood are further members, with a wider noise.

    Args:
        ensemble: Whose networks have two outputs, mean and log-variance.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.tails = ensemble.likelihood if isinstance(ensemble.likelihood, HeavyTailedGaussian) else None

    @property
    def weights(self) -> Tensor:
        """Of the members, ``(M,)``, float64."""
        weights = self.ensemble.weights.double()
        return weights if self.tails is None else torch.cat([share * weights for share in self.tails.shares])

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of the members' outputs, ``(M, rows, 2)`` each, for scaled features ``(rows, n)``."""
        outputs = [as_moments("MemberOutputs", part, 2) for part in self.ensemble.scaled_outputs(z)]
        mean, variance = (torch.cat([getattr(part, name) for part in outputs]) for name in ("mean", "variance"))
        first, log_variance = mean.unbind(-1)
        average = (self.ensemble.weights.to(first)[:, None] * first).sum(0)
        first = average + self.ensemble.spread.to(first) * (first - average)
        if self.tails is not None:
            noises = self.tails.log_variances(log_variance)
            log_variance = torch.cat(noises)
            first, variance = torch.cat([first] * len(noises)), torch.cat([variance] * len(noises))
        return torch.stack([first, log_variance], -1), variance


@parts_of.register
def _(model: Ensemble, caller: str, *, features: int | Sequence[str] | None = None, **_: Any) -> Parts:
    return Parts(
        networks=[network for stack in model.each_stack() for network in stack.unstack()],
        weights=model.weights.double() / model.weights.double().sum(),
        likelihood=model.likelihood,
        feature_names=feature_names(caller, features, len(model.scaling.center)),
        scaling=model.scaling,
        target_mean=float(model.target_mean),
        target_scale=float(model.target_scale),
        moments=model.moment_type,
        noise=model.noise,
        spread=float(model.spread),
        whole=model,
        members=MemberOutputs(model) if isinstance(model.likelihood, HeteroscedasticGaussian) else None,
    )


def _check_values(arrays: Mapping[str, Tensor]) -> None:
    """Refuse arrays that no training gives, from which only nonsense or a late error would come."""
    for name in ("scaling.scale", "scaling.limit", "target_scale"):
        if not (arrays[name] > 0).all():
            raise DataError(f"{name} is not positive")
    if (arrays["weights"] < 0).any() or not math.isclose(float(arrays["weights"].sum()), 1, abs_tol=1e-3):
        raise DataError("the networks' weights are not shares of one")
