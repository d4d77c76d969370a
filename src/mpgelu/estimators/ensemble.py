"""A weighted ensemble of networks as one torch module, from raw features to a mixture in the unit of the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.errors import DataError, InputError
from mpgelu.estimators.fast import FastEnsemble
from mpgelu.estimators.measurement import averaged
from mpgelu.estimators.noise import NoiseHead
from mpgelu.likelihoods import Likelihood, MeanAndLogVariance, NoisePart, likelihoods
from mpgelu.likelihoods.outputs import as_moments
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments, moment_types
from mpgelu.networks import FeatureScale, Members, Parts, Stack, feature_names, is_random, parts_of
from mpgelu.networks.description import Description
from mpgelu.networks.prepared import Prepared
from mpgelu.predictive import Predictive
from mpgelu.predictive.checks import needs_gradient
from mpgelu.predictive.nodes import NODES
from mpgelu.storage.arrays import check_arrays
from mpgelu.storage.schema import Optional, checked
from mpgelu.visibility import values_are_visible

_STACKS = [{"models": int, "network": object}]
_DESCRIPTION = {
    "stacks": _STACKS,
    "likelihood": {"kind": str, str: object},
    "moments": str,
    "noise": Optional(_STACKS[0] | {"by_row": Optional(bool)}, null=True),
}
_MOST_NETWORKS = 100_000
_ROWS_AT_ONCE, _ROWS_OF_ONE = 512, 4096  # rows in a chunk for several networks, and for one


class Ensemble(nn.Module):
    r"""A mixture of networks, with the scales of features and target.

    The distribution of network k for the scaled target has density :math:`p_k` and mean :math:`m_k`. It is moved
    towards the average :math:`\bar m` of all means, which shrinks the deviation of each mean by the factor c:

    .. math:: p(y) = \sum_k w_k\, p_k\big(y - (1 - c)(\bar m - m_k)\big), \qquad \bar m = \sum_k w_k m_k

    A Gaussian error is added outside the range of the training data, of the variance
    :meth:`FeatureScale.extrapolation`. The result is then brought to the unit of the target. All steps are exact for
    the moments that the networks propagate. The module does not sample, and can be compiled and exported as a whole.

    Args:
        stacks: Networks for scaled features and target; networks of the same architecture form a stack.
        weights: Weights w of all networks in the order of the stacks, ``(M,)``, summing to one.
        likelihood: Likelihood that interprets the outputs of the networks.
        scaling: Transformation of raw features to the inputs of the networks.
        target_mean: Offset of the target, ``()``.
        target_scale: Scale of the target, ``()``, positive.
        moments: Type of the moments that are propagated through networks with random layers.
        noise: Module that replaces the log-variance, the second of two outputs of the networks; ``None`` to use theirs.
        spread: Factor c of the shrinkage, between 0 and 1.

    Attributes:
        moment_type: The argument ``moments``; it may be changed after construction.

    Raises:
        InputError: The number of weights is not that of the networks.
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
        self._fast: Prepared[FastEnsemble | None] = Prepared()
        self.register_buffer("weights", weights)
        self.register_buffer("target_mean", target_mean)
        self.register_buffer("target_scale", target_scale)
        self.register_buffer("spread", torch.tensor(spread, device="cpu"))

    def __len__(self) -> int:
        """Number of networks."""
        return len(self.weights)

    def forward(self, x: Tensor, input_std: Tensor | None = None, nodes: int = NODES) -> Predictive:
        """Return the distribution of the target for each row, in the dtype of ``x``.

        Args:
            x: Raw features, ``(rows, n)``; float64 avoids rounding of features and targets far from zero.
            input_std: Standard deviations of independent measurement errors of the features, ``(rows, n)``. The
                distribution is averaged over the possible true features, see
                :func:`mpgelu.estimators.measurement.averaged`; each network then has one component at each point.
            nodes: Number of components for each network with random outputs; mean and variances do not depend on it.
        """
        if input_std is not None:
            return averaged(lambda at: self._mixed(at, nodes), lambda at: self._mixed(at, None), x, input_std)
        return self._mixed(x, nodes)

    def _mixed(self, x: Tensor, nodes: int | None) -> Predictive:
        """Return the mixture of all networks for raw features ``(rows, n)``.

        Args:
            x: Raw features.
            nodes: Number of components for each network; ``None`` for the few of :meth:`Likelihood.short`.
        """
        if nodes and (prepared := self._prepared(x)) is not None:
            return prepared
        if nodes and self.noise is not None:
            nodes = 1  # exact, because the noise head returns a deterministic log-variance
        of = self.likelihood
        members = [(of.predictive(h, nodes) if nodes else of.short(h)).to(x.dtype) for h in self.outputs(x)]
        shares = torch.split(self.weights.to(x), [len(member.mean) for member in members])
        # In float64, since all weights of a stack may be zero in float32.
        within = [(part / part.sum()).to(x) for part in torch.split(self.weights.double(), [*map(len, shares)])]
        average = torch.stack([share @ member.mean for share, member in zip(shares, members, strict=True)]).sum(0)
        moved = [member.affine(1.0, (1 - self.spread.to(x)) * (average - member.mean)) for member in members]
        each = [member.mixture_over(0, share) for member, share in zip(moved, within, strict=True)]
        mixture = Predictive.mixture(each, torch.stack([share.sum() for share in shares])) if len(each) > 1 else each[0]
        widened = mixture.widened(self.scaling.extrapolation(x).sum(-1))
        return widened.affine(self.target_scale.to(x), self.target_mean.to(x))

    def _prepared(self, x: Tensor) -> Predictive | None:
        """Return the mixture computed by :class:`FastEnsemble`, equal up to rounding; ``None`` if it is not applicable.

        It requires a noise head, float64 features, visible values, compiled kernels, and that no gradient is needed.
        """
        if self.noise is None or x.dtype != torch.float64 or x.shape[1:] != self.scaling.center.shape:
            return None
        if not x.is_cpu or not values_are_visible(x):
            return None
        parts = (self, self.scaling, self.noise, self.noise.networks, *self.stacks)
        held = [t for part in parts for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
        if needs_gradient(x, *held) or not native.available():
            return None
        fast = self._fast.of(held, lambda: FastEnsemble.of(self), self.moment_type, self.likelihood)
        return None if fast is None else fast(x.detach())

    def outputs(self, x: Tensor) -> list[Moments | Tensor]:
        """Return the outputs of the networks for raw features ``(rows, n)``, in units of the scaled target.

        Returns:
            One element ``(networks, rows, outputs)`` for each stack, or a single one for all networks if there is a
            noise head. Networks without random layers have a tensor, others moments.
        """
        return self.scaled_outputs(self.scaling(x).to(self.dtype))

    def scaled_outputs(self, z: Tensor) -> list[Moments | Tensor]:
        """Return the outputs of the networks, as :meth:`outputs` does, for scaled features ``(rows, n)``."""
        found: list[Moments | Tensor] = []
        for stack in self.each_stack():
            each = z.expand(len(stack), *z.shape)
            random = is_random(stack.architecture)
            found.append(stack.of_known(each, self.moment_type) if random else stack(each))
        return found if self.noise is None else [self.noise(z, found)]

    @property
    def rows_at_once(self) -> int:
        """Number of rows to predict together, so that temporaries fit the cache of the processor."""
        return _ROWS_AT_ONCE if len(self) > 1 else _ROWS_OF_ONE

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the inputs of the networks: float64 if all networks have it, otherwise float32.

        A Gaussian process in an ensemble of float32 networks computes in float64 internally.
        """
        held = [*self.each_stack(), *([self.noise.networks] if self.noise is not None else [])]
        double = all(stack.get_parameter("parameter_0").dtype == torch.float64 for stack in held)
        return torch.float64 if double else torch.float32

    def each_stack(self) -> list[Stack]:
        """The stacks, in order."""
        return [stack for stack in self.stacks if isinstance(stack, Stack)]

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the arrays of the ensemble by name, and a description in JSON of everything else."""
        about = {
            "stacks": [{"models": len(s), "network": s.description.as_json()} for s in self.each_stack()],
            "likelihood": self.likelihood.described(),
            "moments": moment_types.name(self.moment_type),
            "noise": None if self.noise is None else self.noise.described(),
        }
        return dict(self.state_dict()), about

    @classmethod
    def from_description(cls, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> Ensemble:
        """Return the ensemble of a description, without allocating memory beyond the given arrays.

        Args:
            arrays: Arrays that :meth:`described` returned.
            about: Description that :meth:`described` returned.

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
                torch.empty(sum(map(len, stacks)), dtype=torch.float64, device="cpu"),
                likelihoods.build(about["likelihood"]),
                FeatureScale.identity(features),
                torch.empty((), dtype=torch.float64, device="cpu"),
                torch.empty((), dtype=torch.float64, device="cpu"),
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


class MemberOutputs(Members):
    """The Gaussian members that an ensemble mixes, as a function of tensors that torch can trace.

    If the noise of the likelihood is a mixture of G Gaussians (:meth:`Likelihood.gaussians`), as for heavy tails, each
    of the N networks has G members, and M = G N.

    Args:
        ensemble: An ensemble whose likelihood has this form, and the outputs of whose networks are uncorrelated.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    @staticmethod
    def of(ensemble: Ensemble) -> MemberOutputs | None:
        """Return the members of an ensemble, or ``None`` if its distribution is not exactly their mixture."""
        members = MemberOutputs(ensemble)
        uncorrelated = members.known or ensemble.moment_type is DiagonalMoments
        return members if uncorrelated and members.gaussians(torch.zeros((), device="cpu")) is not None else None

    @property
    def known(self) -> bool:
        """Whether the log-variances are deterministic."""
        stacks = self.ensemble.each_stack()
        return self.ensemble.noise is not None or not any(is_random(stack.architecture) for stack in stacks)

    def gaussians(self, log_variance: Tensor) -> list[NoisePart] | None:
        """Return the noise of each network as a mixture of Gaussians, or ``None`` if it is not one."""
        return self.ensemble.likelihood.gaussians(log_variance, self.known)

    @property
    def weights(self) -> Tensor:
        """Weights of the members, ``(M,)``, float64."""
        weights = self.ensemble.weights.double()
        return torch.cat([part.share * weights for part in self.gaussians(torch.zeros((), device="cpu")) or []])

    @property
    def centers(self) -> Tensor | None:
        """Matrix from the means of the members to the means of their networks, ``(M, M)``, float64.

        It averages over the members of a network with their shares. ``None`` if all members have the mean of their
        network, as for noise without offsets.
        """
        parts = self.gaussians(torch.zeros((), device="cpu")) or []
        if not any(part.offset is not None for part in parts):
            return None
        shares = torch.tensor([part.share for part in parts], dtype=torch.float64, device="cpu")
        identity = torch.eye(len(self.ensemble), dtype=torch.float64, device="cpu")
        return torch.kron(shares.expand(len(parts), -1), identity)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of the outputs (mean, log-variance) of all members, after the shrinkage.

        Args:
            z: Scaled features, ``(rows, n)``.

        Returns:
            Means and variances, ``(M, rows, 2)`` each.
        """
        outputs = [as_moments("MemberOutputs", part, 2) for part in self.ensemble.scaled_outputs(z)]
        mean, variance = (torch.cat([getattr(part, name) for part in outputs]) for name in ("mean", "variance"))
        first, log_variance = MeanAndLogVariance.of(mean)
        average = (self.ensemble.weights.to(first)[:, None] * first).sum(0)
        first = average + self.ensemble.spread.to(first) * (first - average)
        parts = self.gaussians(log_variance) or []
        if len(parts) > 1:
            variance, log_variance = torch.cat([variance] * len(parts)), torch.cat([p.log_variance for p in parts])
            first = torch.cat([first if part.offset is None else first + part.offset for part in parts])
        return MeanAndLogVariance(first, log_variance).joined(), variance


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
        members=MemberOutputs.of(model),
    )


def _check_values(arrays: Mapping[str, Tensor]) -> None:
    """Check values that training guarantees and predictions rely on.

    Raises:
        DataError: A scale is not positive, or the weights are not a probability distribution.
    """
    for name in ("scaling.scale", "scaling.limit", "target_scale"):
        if not (arrays[name] > 0).all():
            raise DataError(f"{name} is not positive")
    if (arrays["weights"] < 0).any() or not math.isclose(float(arrays["weights"].sum()), 1, abs_tol=1e-3):
        raise DataError("the networks' weights are not shares of one")
