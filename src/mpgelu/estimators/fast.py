"""An ensemble prepared for prediction: the numbers of :class:`Ensemble` to rounding, with little work around them.

Networks of one shape run by one kernel, whatever stack they are in, and kernels do what is around networks, too: calls
of torch would take most of the time of one row.
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

from mpgelu import native
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
        self.weights = ensemble.weights.double() / ensemble.weights.double().sum()
        target = float(ensemble.target_mean), float(ensemble.target_scale)
        self.settings = _doubles(float(ensemble.spread), *target, *ensemble.noise.range.tolist())

    @staticmethod
    def of(ensemble: Ensemble) -> FastEnsemble | None:
        """The prepared form of an ensemble, or ``None`` if a part of it has none or does not fit the others.

        Kernels do not check sizes: networks for other features, as a forged file may hold them, are left to torch.
        """
        if ensemble.noise is None or plain_form(ensemble.noise.networks.architecture) is None:
            return None
        if ensemble.dtype != torch.float32 or not all(tensor.is_cpu for tensor in ensemble.state_dict().values()):
            return None
        features, head = len(ensemble.scaling.center), ensemble.noise
        if len(head.center) != features + 3 or _ends(head.networks) != (features + 3, 1):
            return None
        runs, start, alike = [], 0, dict[Any, list[Any]]()
        for stack in ensemble.each_stack():
            places = slice(start, start + len(stack))
            start = places.stop
            if _ends(stack) != (features, 2):
                return None
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
        limited, beyond = self.scale(x.contiguous())
        outputs = np.zeros((self.weights.shape[0], x.shape[0], 3), np.float32)
        for run in self.runs:
            outputs[run.places, :, : 3 if run.variance else 2] = run.outputs(limited)
        held = torch.from_numpy(outputs)
        gaussians = self.likelihood.gaussians(self.head(limited, held), True)
        return None if gaussians is None else self._mixture(held, gaussians, beyond)

    def _mixture(self, outputs: Tensor, gaussians: Sequence[NoisePart], beyond: Tensor) -> Predictive:
        """The mixture of all networks and kinds of errors, in the unit of the target.

        Args:
            outputs: Of the networks, ``(M, rows, 3)``.
            gaussians: Kinds of errors.
            beyond: Variance from lying outside the training data, ``(rows,)``.
        """
        (networks, rows, _), errors = outputs.shape, len(gaussians)
        shares = _doubles(*(part.share for part in gaussians))
        variances = torch.stack([part.log_variance for part in gaussians]).double().exp_()  # (errors, rows)
        offsets = torch.zeros_like(variances)
        for offset, part in zip(offsets, gaussians, strict=True):
            if part.offset is not None:
                offset.copy_(part.offset)
        given = (self.weights, self.settings, beyond, shares, variances, offsets)
        components = [beyond.new_empty(rows, networks * errors) for _ in range(2)]
        summary = [torch.empty_like(beyond) for _ in range(3)]
        native.run("ensemble_mixture", (rows, networks, errors), (*given, *components, *summary, outputs), doubles=11)
        return Predictive(*components, torch.outer(self.weights, shares).log_().flatten(), *summary)


class _Scale:
    """:class:`FeatureScale` by one call."""

    def __init__(self, scaling: FeatureScale) -> None:
        arrays = (scaling.center, scaling.scale, scaling.lower, scaling.upper)
        settings = _doubles(float(scaling.limit), float(scaling.reach), FARTHEST)
        self.given = *(tensor.double().contiguous() for tensor in arrays), settings

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features, scaled and smoothly limited, in single precision, and the variance from lying outside the data.

        Args:
            x: ``(rows, n)``.

        Returns:
            ``(rows, n)`` and ``(rows,)``.
        """
        limited, beyond = torch.empty_like(x, dtype=torch.float32), x.new_empty(x.shape[0])
        native.run("ensemble_features", tuple(x.shape), (x, *self.given, beyond, limited), doubles=7)
        return limited, beyond


class _Head:
    """:class:`NoiseHead` by three calls: what its networks are told, what they say, and what follows."""

    def __init__(self, head: NoiseHead, stacks: Sequence[Stack]) -> None:
        form = plain_form(head.networks.architecture)
        assert form is not None
        self.networks = form.arrays(head.networks.state()[0])
        ends, folds = np.cumsum([len(stack) for stack in stacks]), max(map(len, stacks))
        of_kind = [np.resize(np.arange(end - len(stack), end), folds) for stack, end in zip(stacks, ends, strict=True)]
        self.groups = native.integers(np.concatenate(of_kind).tolist())  # (kinds, folds): taken together, one of each
        self.kinds, self.folds = len(stacks), folds
        self.weights, *scales = (t.float().contiguous() for t in (head.kind_weights, head.center, head.scale))
        within = head.range.tolist()
        self.given = *scales, _floats(*within, *OWN_RANGE, LEAST_SPREAD, LIMIT)
        self.settings = _floats(float(head.log_scale), float(head.spread), *within, STEEPEST, LEAST_SHARE)

    def __call__(self, features: Tensor, outputs: Tensor) -> Tensor:
        """Logarithm of the variance of the noise, ``(rows,)``; see :meth:`NoiseHead.forward`.

        Args:
            features: ``(rows, n)``.
            outputs: Of the networks, ``(M, rows, 3)``.
        """
        (rows, n), heads = features.shape, self.networks.flat.shape[0]
        told = features.new_empty(self.folds * rows, n + 3)
        arrays = (features, outputs, self.weights, *self.given, told)
        native.run("ensemble_told", (rows, n, self.kinds, self.folds, self.groups), arrays)
        said = plain.outputs(self.networks, told.expand(heads, -1, -1))
        log_variance = features.new_empty(rows)
        sizes = (rows, self.kinds, self.folds, heads, self.groups)
        native.run("ensemble_noise", sizes, (said, outputs, self.weights, self.settings, log_variance))
        return log_variance


def _doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _ends(stack: Stack) -> tuple[int, int] | None:
    """Features and outputs of networks of a kind that a kernel knows; ``None`` for any other."""
    state = {name: tensor for part in stack.state() for name, tensor in part.items()}
    if (form := plain_form(stack.architecture)) is not None:
        arrays = form.arrays(state)
        return arrays.features, arrays.widths[-1]
    if (process := _process_of(stack)) is not None:
        return process["points"].shape[1], 2
    if (found := known_perceptron(stack.architecture)) is not None:
        networks = arrays_of(found, state)
        return networks.widths[0], networks.widths[-1]
    return None


def _joined(parts: Sequence[tuple[slice, plain.PlainNetworks]]) -> Run:
    """Plain networks of one shape as one."""
    places, networks = zip(*parts, strict=True)
    joined = plain.PlainNetworks.joined(networks)
    consecutive = all(a.stop == b.start for a, b in itertools.pairwise(places))
    at: Any = slice(places[0].start, places[-1].stop) if consecutive else np.r_[places]
    count = joined.flat.shape[0]
    return Run(at, lambda z: plain.outputs(joined, z.expand(count, -1, -1)).numpy())


def _run_of(stack: Stack, places: slice, moments: type[Any]) -> Run | None:
    """A Gaussian process, or perceptrons whose moments a kernel propagates; ``None`` for anything else."""
    if (process := _process_of(stack)) is not None:
        return Run(places, _process(process))
    state = {name: tensor.detach() for part in stack.state() for name, tensor in part.items()}
    found = known_perceptron(stack.architecture)
    if found is None or not is_random(stack.architecture):
        return None
    networks = arrays_of(found, state)
    if moments is DiagonalMoments:
        return Run(places, _perceptrons(networks, perceptron.propagate), variance=True)
    if moments is FactoredMoments and max(networks.widths[1:]) <= WIDEST:
        return Run(places, _perceptrons(networks, perceptron.propagate_exactly), variance=True)
    return None


def _process_of(stack: Stack) -> dict[str, Tensor] | None:
    """The state of a Gaussian process that is alone in its stack."""
    layers = list(stack.architecture.children())
    if len(stack) != 1 or len(layers) != 1 or not isinstance(layers[0], GaussianProcess):
        return None
    return {name.removeprefix("0."): t[0].detach() for part in stack.state() for name, t in part.items()}


def _process(state: dict[str, Tensor]) -> Outputs:
    held = [state[name] for name in ("weight", "points", "center", "scale", "limit", "kernel")]
    log_variance = float(GaussianProcess.log_noise_variance(state["kernel"]))

    def outputs(z: Tensor) -> Array:
        found = np.empty((1, z.shape[0], 2), np.float32)
        found[..., MEAN], found[..., LOG_VARIANCE] = process_mean(z.double(), *held).numpy(), log_variance
        return found

    return outputs


def _perceptrons(networks: perceptron.Perceptrons, propagate: Callable[..., tuple[Tensor, Tensor]]) -> Outputs:
    def outputs(z: Tensor) -> Array:
        each = z.expand(networks.flat.shape[0], *z.shape)
        mean, spread = propagate(networks, each, torch.zeros_like(each))
        variance = spread[..., MEAN] if spread.dim() == 3 else spread[..., MEAN, MEAN]
        return np.concatenate([mean.numpy(), variance.unsqueeze(-1).numpy()], -1)

    return outputs
