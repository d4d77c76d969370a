"""An ensemble prepared for prediction: the numbers of :class:`Ensemble` to rounding, with little work around them.

Networks of one shape run by one kernel, whatever stack they are in, and everything between kernels is done by numpy on
a few arrays: for one row, the calls of torch would take most of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu.estimators.gaussian_process import GaussianProcess
from mpgelu.estimators.noise import LEAST_SHARE, LEAST_SPREAD, LIMIT, OWN_RANGE, STEEPEST, NoiseHead
from mpgelu.likelihoods import NoisePart
from mpgelu.likelihoods.outputs import LOG_VARIANCE, MEAN
from mpgelu.moments import DiagonalMoments, FactoredMoments
from mpgelu.native import perceptron, plain
from mpgelu.native.process import process_mean
from mpgelu.networks import FeatureScale, Stack, is_random
from mpgelu.networks.plain import plain_form
from mpgelu.networks.scaling import FARTHEST
from mpgelu.networks.whole import WIDEST, arrays_of, known_perceptron
from mpgelu.predictive import Predictive

if TYPE_CHECKING:
    from mpgelu.estimators.ensemble import Ensemble

Array = NDArray[Any]
Outputs = Callable[[Tensor], Array]  # of some networks, (networks, rows, 2), for scaled features (rows, n)


@dataclass(frozen=True)
class Run:
    """Networks that one call runs.

    Args:
        places: Where they are among all networks.
        outputs: Mean outputs.
        variance: Whether the outputs are followed by the variances of the first of them: ``(networks, rows, 3)``.
    """

    places: slice
    outputs: Outputs
    variance: bool = False


class FastEnsemble:
    """What an :class:`Ensemble` with a noise head predicts.

    Args:
        ensemble: It holds the parameters, of which this is made.
        runs: All of its networks.
    """

    def __init__(self, ensemble: Ensemble, runs: Sequence[Run]) -> None:
        assert ensemble.noise is not None
        self.likelihood, self.runs = ensemble.likelihood, runs
        self.scale, self.head = _Scale(ensemble.scaling), _Head(ensemble.noise, ensemble.each_stack())
        self.weights: Array = (ensemble.weights.double() / ensemble.weights.double().sum()).numpy()
        self.random = any(run.variance for run in runs)
        self.spread = float(ensemble.spread)
        self.target_mean, self.target_scale = float(ensemble.target_mean), float(ensemble.target_scale)

    @staticmethod
    def of(ensemble: Ensemble) -> FastEnsemble | None:
        """The prepared form of an ensemble, or ``None`` if a part of it has none."""
        if ensemble.noise is None or plain_form(ensemble.noise.networks.architecture) is None:
            return None
        if ensemble.dtype != torch.float32 or not all(tensor.is_cpu for tensor in ensemble.state_dict().values()):
            return None
        runs, start, alike = [], 0, dict[Any, list[Any]]()
        for stack in ensemble.each_stack():
            places = slice(start, start + len(stack))
            start = places.stop
            if (form := plain_form(stack.architecture)) is not None:
                shapes = tuple(p.shape[1:] for p in stack.parameters())
                alike.setdefault((form, shapes), []).append((places, form.arrays(stack.state()[0])))
            elif (run := _run_of(stack, places, ensemble.moment_type)) is not None:
                runs.append(run)
            else:
                return None
        return FastEnsemble(ensemble, [*(_joined(parts) for parts in alike.values()), *runs])

    def __call__(self, x: Tensor) -> Predictive | None:
        """Distribution of the target for raw features ``(rows, n)`` in float64; ``None`` if the noise is no mixture."""
        scaled, limited = self.scale(x.numpy())
        z = torch.from_numpy(limited)
        outputs = np.empty((len(self.weights), len(x), 3 if self.random else 2), np.float32)
        if self.random:
            outputs[..., 2] = 0
        for run in self.runs:
            outputs[run.places, :, : 3 if run.variance else 2] = run.outputs(z)
        means, noise = self.head(limited, outputs)
        gaussians = self.likelihood.gaussians(torch.from_numpy(np.log(noise)), True)
        if gaussians is None:
            return None
        errors = _Errors.of(gaussians)
        return self._mixture(means, outputs[..., 2] if self.random else None, errors, self.scale.beyond(scaled))

    def _mixture(self, means: Array, variances: Array | None, errors: _Errors, beyond: Array) -> Predictive:
        """The mixture of all networks and kinds of errors, in the unit of the target.

        Args:
            means: ``(M, rows)``.
            variances: ``(M, rows)``; ``None`` where all means are known.
            errors: Kinds of errors.
            beyond: Variance from lying outside the training data, ``(rows,)``.
        """
        unit = self.target_scale**2
        means = means.T.astype(np.float64)  # (rows, M)
        average = means @ self.weights
        means = means + (1 - self.spread) * (average[:, None] - means)
        mean = means @ self.weights
        between = np.square(means - mean[:, None])
        known = beyond[:, None] if variances is None else variances.T + beyond[:, None]
        epistemic = (between if variances is None else between + variances.T) @ self.weights + beyond
        each = (known[:, :, None] + errors.variances.T[:, None].astype(np.float64)) * unit  # (rows, M or 1, S)
        rows, count = means.shape
        repeated = np.repeat(each, count // each.shape[1], 1)
        if errors.offsets is None:
            centers = np.repeat(means, len(errors.shares), 1)
        else:
            centers = (means[:, :, None] + errors.offsets.T[:, None]).reshape(rows, -1)
        numbers = (
            centers * self.target_scale + self.target_mean,
            repeated.reshape(rows, -1),
            np.log(np.outer(self.weights, errors.shares)).ravel(),
            mean * self.target_scale + self.target_mean,
            epistemic * unit,
            errors.expected_squares() * unit,
        )
        return Predictive(*map(torch.from_numpy, numbers))


@dataclass(frozen=True)
class _Errors:
    """Kinds of errors around the mean of a network.

    Args:
        shares: ``(S,)``, summing to one.
        variances: ``(S, rows)``.
        offsets: ``(S, rows)``, of mean zero; ``None`` where all are zero.
    """

    shares: Array
    variances: Array
    offsets: Array | None

    @staticmethod
    def of(gaussians: Sequence[NoisePart]) -> _Errors:
        shares, log_variances, offsets = zip(*gaussians, strict=True)
        centred = all(offset is None for offset in offsets)
        moved = None if centred else np.stack([offset.numpy() for offset in offsets])
        return _Errors(np.array(shares), np.exp([each.numpy() for each in log_variances]), moved)

    def expected_squares(self) -> Array:
        """Variance of the noise, ``(rows,)``."""
        squares = self.variances if self.offsets is None else self.variances + np.square(self.offsets)
        return np.asarray(self.shares @ squares)


class _Scale:
    """:class:`FeatureScale` by numpy."""

    def __init__(self, scaling: FeatureScale) -> None:
        arrays = (scaling.center, scaling.scale, scaling.lower, scaling.upper)
        self.center, self.scale, self.lower, self.upper = (tensor.double().numpy() for tensor in arrays)
        self.limit, self.reach = float(scaling.limit), float(scaling.reach)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Scaled features, and the same smoothly limited, in single precision."""
        scaled = np.clip((x - self.center) / self.scale, -FARTHEST, FARTHEST)
        return scaled, (scaled / np.sqrt(1 + np.square(scaled / self.limit))).astype(np.float32)

    def beyond(self, scaled: Array) -> Array:
        """Variance from lying outside the training data, ``(rows,)``."""
        distance = np.maximum(np.maximum(self.lower - scaled, scaled - self.upper), 0)
        if not distance.any():
            return np.zeros(len(scaled))
        found: Array = np.square(self.reach * np.log1p(distance)).sum(-1)
        return found


class _Head:
    """:class:`NoiseHead` by numpy."""

    def __init__(self, head: NoiseHead, stacks: Sequence[Stack]) -> None:
        form = plain_form(head.networks.architecture)
        assert form is not None
        self.networks = form.arrays(head.networks.state()[0])
        ends, folds = np.cumsum([len(stack) for stack in stacks]), max(map(len, stacks))
        of_kind = [np.resize(np.arange(end - len(stack), end), folds) for stack, end in zip(stacks, ends, strict=True)]
        self.groups = np.stack(of_kind)  # (kinds, folds): the networks that are taken together, one of each kind
        self.center, self.scale, self.weights = (
            t.float().numpy() for t in (head.center, head.scale, head.kind_weights)
        )
        self.log_scale, self.spread = float(head.log_scale), float(head.spread)
        self.lowest, self.highest = head.range.tolist()

    def __call__(self, features: Array, outputs: Array) -> tuple[Array, Array]:
        """Means in range ``(M, rows)``, and the variance of the noise ``(rows,)``; see :meth:`NoiseHead.forward`."""
        means, own = (
            np.clip(outputs[..., MEAN], self.lowest, self.highest),
            np.clip(outputs[..., LOG_VARIANCE], *OWN_RANGE),
        )
        rows, (kinds, folds) = len(features), self.groups.shape
        by_kind = means[self.groups.ravel()].reshape(kinds, -1)  # (kinds, folds * rows)
        mean = self.weights @ by_kind
        spread = np.sqrt(self.weights @ np.square(by_kind - mean))
        z = np.empty((folds, rows, features.shape[1] + 3), np.float32)
        z[..., :-3] = features
        z[..., -3] = mean.reshape(folds, rows)
        z[..., -2] = np.log(np.maximum(spread, LEAST_SPREAD)).reshape(folds, rows)
        z[..., -1] = (self.weights @ own[self.groups.ravel()].reshape(kinds, -1)).reshape(folds, rows) / 2
        z = ((z - self.center) / self.scale).reshape(folds * rows, -1)
        z /= np.sqrt(1 + np.square(z / LIMIT))
        x = torch.from_numpy(z).expand(len(self.networks.flat), -1, -1)
        said = STEEPEST * np.tanh(plain.outputs(self.networks, x).numpy()[..., 0] / STEEPEST)
        noise = np.exp(said.mean(0).reshape(folds, rows).mean(0) + self.log_scale)
        if folds == 1:
            return means, noise
        between = np.square(self.weights) @ by_kind.reshape(kinds, folds, rows).var(1, ddof=1)
        return means, np.maximum(noise - between * ((1 - 1 / folds) * (1 + self.spread**2)), LEAST_SHARE * noise)


def _joined(parts: Sequence[tuple[slice, plain.PlainNetworks]]) -> Run:
    """Plain networks of one shape as one."""
    places, networks = zip(*parts, strict=True)
    joined = plain.PlainNetworks.joined(networks)
    consecutive = all(a.stop == b.start for a, b in itertools.pairwise(places))
    at: Any = slice(places[0].start, places[-1].stop) if consecutive else np.r_[places]
    count = len(joined.flat)
    return Run(at, lambda z: plain.outputs(joined, z.expand(count, -1, -1)).numpy())


def _run_of(stack: Stack, places: slice, moments: type[Any]) -> Run | None:
    """A Gaussian process, or perceptrons whose moments a kernel propagates; ``None`` for anything else."""
    state = {name: tensor.detach() for part in stack.state() for name, tensor in part.items()}
    layers = list(stack.architecture.children())
    if len(stack) == 1 and len(layers) == 1 and isinstance(layers[0], GaussianProcess):
        return Run(places, _process({name.removeprefix("0."): tensor[0] for name, tensor in state.items()}))
    found = known_perceptron(stack.architecture)
    if found is None or not is_random(stack.architecture):
        return None
    networks = arrays_of(found, state)
    if moments is DiagonalMoments:
        return Run(places, _perceptrons(networks, perceptron.propagate), variance=True)
    if moments is FactoredMoments and max(networks.widths[1:]) <= WIDEST:
        return Run(places, _perceptrons(networks, perceptron.propagate_exactly), variance=True)
    return None


def _process(state: dict[str, Tensor]) -> Outputs:
    held = [state[name] for name in ("weight", "points", "center", "scale", "limit", "kernel")]
    log_variance = float(GaussianProcess.log_noise_variance(state["kernel"]))

    def outputs(z: Tensor) -> Array:
        found = np.empty((1, len(z), 2), np.float32)
        found[..., MEAN], found[..., LOG_VARIANCE] = process_mean(z.double(), *held).numpy(), log_variance
        return found

    return outputs


def _perceptrons(networks: perceptron.Perceptrons, propagate: Callable[..., tuple[Tensor, Tensor]]) -> Outputs:
    def outputs(z: Tensor) -> Array:
        each = z.expand(len(networks.flat), *z.shape)
        mean, spread = propagate(networks, each, torch.zeros_like(each))
        variance = spread[..., MEAN] if spread.dim() == 3 else spread[..., MEAN, MEAN]
        return np.concatenate([mean.numpy(), variance.unsqueeze(-1).numpy()], -1)

    return outputs
