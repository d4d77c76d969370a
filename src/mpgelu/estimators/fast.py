"""The distribution of an ensemble by compiled kernels, equal to that of :class:`Ensemble` up to rounding.

Networks of the same shape are evaluated by one call of a kernel, also if they belong to different stacks. Scaling,
noise head and mixture are kernels, too, because calls of torch would take most of the time of a single row.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu import native
from mpgelu.estimators.gaussian_process import PROCESS_STATE, GaussianProcess
from mpgelu.estimators.noise import LEAST_SHARE, LEAST_SPREAD, LIMIT, OWN_RANGE, STEEPEST, NoiseHead
from mpgelu.likelihoods import NoisePart
from mpgelu.likelihoods.outputs import LOG_VARIANCE, MEAN
from mpgelu.moments import DiagonalMoments, FactoredMoments
from mpgelu.native import perceptron, plain
from mpgelu.native.process import bound_process
from mpgelu.networks import FeatureScale, Stack, is_random
from mpgelu.networks.perceptron import WIDEST, arrays_of, known_perceptron
from mpgelu.networks.plain import plain_form
from mpgelu.networks.scaling import FARTHEST
from mpgelu.predictive import Predictive

if TYPE_CHECKING:
    from mpgelu.estimators.ensemble import Ensemble

Array = NDArray[Any]
Call = Callable[[], object]
# Function from scaled features (rows, n) and an array for outputs (M, rows, 3) to calls that write some of these.
Bind = Callable[[Tensor, Array], list[Call]]

_MOST_KEPT = 1024  # largest number of rows for which arrays are kept between calls


class FastEnsemble:
    """The predictive distribution of an :class:`Ensemble` with a noise head, by kernels and without gradients.

    The object contains the parameters in the layout of the kernels, and is valid as long as these do not change. Arrays
    of the last call are reused by each thread if the number of rows is the same.

    Args:
        ensemble: The ensemble.
        binds: Functions that evaluate all of its networks.
    """

    def __init__(self, ensemble: Ensemble, binds: Sequence[Bind]) -> None:
        assert ensemble.noise is not None
        self.likelihood, self.binds = ensemble.likelihood, binds
        self.scale, self.head = _Scale(ensemble.scaling), _Head(ensemble.noise, ensemble.each_stack())
        self.weights = ensemble.weights.double() / ensemble.weights.double().sum()
        target = float(ensemble.target_mean), float(ensemble.target_scale)
        self.settings = _doubles(float(ensemble.spread), *target, *ensemble.noise.range.tolist())
        self._mixed: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}  # shares of the noise, all log weights
        self._kept = threading.local()  # .session: the arrays of the last call of this thread

    @staticmethod
    def of(ensemble: Ensemble) -> FastEnsemble | None:
        """Return the prepared form of an ensemble, or ``None`` if a part of it has no kernel.

        Kernels do not check sizes. Networks whose sizes do not agree, as in a forged file, are therefore left to torch,
        which raises an error.
        """
        if ensemble.noise is None or plain_form(ensemble.noise.networks.architecture) is None:
            return None
        if ensemble.dtype != torch.float32 or not all(tensor.is_cpu for tensor in ensemble.state_dict().values()):
            return None
        features, head = len(ensemble.scaling.center), ensemble.noise
        if len(head.center) != features + 3 or _ends(head.networks) != (features + 3, 1):
            return None
        binds, start, alike = [], 0, dict[Any, list[Any]]()
        for stack in ensemble.each_stack():
            places = slice(start, start + len(stack))
            start = places.stop
            if _ends(stack) != (features, 2):
                return None
            if (form := plain_form(stack.architecture)) is not None:
                shapes = tuple(p.shape[1:] for p in stack.parameters())
                alike.setdefault((form, shapes), []).append((places, form.arrays(stack.state()[0])))
            elif (bind := _bind_of(stack, places, ensemble.moment_type)) is not None:
                binds.append(bind)
            else:
                return None
        return FastEnsemble(ensemble, [*(_joined(parts) for parts in alike.values()), *binds])

    def __call__(self, x: Tensor) -> Predictive | None:
        """Return the distribution of the target, or ``None`` if the noise is not a mixture of Gaussians.

        Args:
            x: Raw features, ``(rows, n)``, float64.
        """
        session = self._session(x.shape[0])
        session(x)
        gaussians = self.likelihood.gaussians(session.log_variance, True)
        return None if gaussians is None else self._mixture(session.outputs, gaussians, session.beyond)

    def _session(self, rows: int) -> _Session:
        """Return the arrays and calls for a number of rows, those of the last call if they fit."""
        kept: _Session | None = getattr(self._kept, "session", None)
        if kept is not None and kept.x.shape[0] == rows:
            return kept
        made = _Session(self, rows)
        if rows <= _MOST_KEPT:
            self._kept.session = made
        return made

    def _mixture(self, outputs: Tensor, gaussians: Sequence[NoisePart], beyond: Tensor) -> Predictive:
        """Return the mixture over all networks and all components of the noise, in the unit of the target.

        Args:
            outputs: Outputs of the networks, ``(M, rows, 3)``.
            gaussians: Components of the noise.
            beyond: Variance of extrapolation outside the training data, ``(rows,)``.
        """
        (networks, rows, _), errors = outputs.shape, len(gaussians)
        shares, log_weights = self._weights(tuple(part.share for part in gaussians))
        variances, offsets = np.zeros((2, errors, rows))  # by numpy, whose calls on a few numbers are shorter
        for part, variance, offset in zip(gaussians, variances, offsets, strict=True):
            np.exp(part.log_variance.detach().numpy(), out=variance, dtype=np.float64)
            if part.offset is not None:
                offset[:] = part.offset.detach().numpy()
        noise = torch.from_numpy(variances), torch.from_numpy(offsets)
        given = (self.weights, self.settings, beyond, shares, *noise)
        means, mixed = (beyond.new_empty(rows, networks * errors) for _ in range(2))
        summary = [beyond.new_empty(rows) for _ in range(3)]
        arrays = (*given, means, mixed, *summary, outputs)
        native.run("ensemble_mixture", (rows, networks, errors), arrays, doubles=11)
        return Predictive(means, mixed, log_weights.clone(), *summary)

    def _weights(self, shares: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Return the shares of the components of the noise, and the log weights of all components of the mixture."""
        if shares not in self._mixed:
            held = _doubles(*shares)
            self._mixed[shares] = held, torch.outer(self.weights, held).log_().flatten()
        return self._mixed[shares]


class _Session:
    """The calls of kernels from raw features to the log-variance of the noise, on arrays for a number of rows.

    Args:
        fast: The ensemble.
        rows: Number of rows.

    Attributes:
        outputs: Outputs of the networks, ``(M, rows, 3)``: mean, log-variance, variance of the mean.
        log_variance: Log-variance of the noise, ``(rows,)``.
        beyond: Variance of extrapolation outside the training data, ``(rows,)``.
    """

    def __init__(self, fast: FastEnsemble, rows: int) -> None:
        self.x = fast.settings.new_empty(rows, fast.scale.features)
        self.beyond, limited = self.x.new_empty(rows), torch.empty_like(self.x, dtype=torch.float32)
        outputs = np.zeros((fast.weights.shape[0], rows, 3), np.float32)
        self.outputs, self.log_variance = torch.from_numpy(outputs), limited.new_empty(rows)
        self.calls: list[Call] = [fast.scale.bound(self.x, self.beyond, limited)]
        for bind in fast.binds:
            self.calls += bind(limited, outputs)
        self.calls += fast.head.bound(limited, self.outputs, self.log_variance)

    def __call__(self, x: Tensor) -> None:
        """Compute the arrays for raw features ``(rows, n)``."""
        self.x.copy_(x)
        for call in self.calls:
            call()


class _Scale:
    """:class:`FeatureScale` by one call of a kernel."""

    def __init__(self, scaling: FeatureScale) -> None:
        arrays = (scaling.center, scaling.scale, scaling.lower, scaling.upper)
        settings = _doubles(float(scaling.limit), float(scaling.reach), FARTHEST)
        self.given = *(tensor.double().contiguous() for tensor in arrays), settings
        self.features = scaling.center.shape[0]

    def bound(self, x: Tensor, beyond: Tensor, limited: Tensor) -> Call:
        """Return the call of the kernel.

        Args:
            x: Raw features, ``(rows, n)``, float64.
            beyond: Receives the variance of extrapolation, ``(rows,)``.
            limited: Receives the scaled and limited features, ``(rows, n)``, float32.
        """
        return native.bound("ensemble_features", tuple(x.shape), (x, *self.given, beyond, limited), doubles=7)


class _Head:
    """:class:`NoiseHead` by three calls of kernels: its inputs, its networks, and the corrected log-variance."""

    def __init__(self, head: NoiseHead, stacks: Sequence[Stack]) -> None:
        form = plain_form(head.networks.architecture)
        assert form is not None
        self.networks = form.arrays(head.networks.state()[0])
        ends, folds = np.cumsum([len(stack) for stack in stacks]), max(map(len, stacks))
        of_kind = [np.resize(np.arange(end - len(stack), end), folds) for stack, end in zip(stacks, ends, strict=True)]
        self.groups = native.integers(np.concatenate(of_kind).tolist())  # (kinds, folds): a group has one of each kind
        self.kinds, self.folds = len(stacks), folds
        self.weights, *scales = (t.float().contiguous() for t in (head.kind_weights, head.center, head.scale))
        within = head.range.tolist()
        self.given = *scales, _floats(*within, *OWN_RANGE, LEAST_SPREAD, LIMIT)
        least = LEAST_SHARE if head.by_row else 1.0
        self.settings = _floats(float(head.log_scale), float(head.spread), *within, STEEPEST, least)

    def bound(self, features: Tensor, outputs: Tensor, log_variance: Tensor) -> list[Call]:
        """Return the calls that compute the log-variance of the noise, as :meth:`NoiseHead.forward` does.

        Args:
            features: Scaled features, ``(rows, n)``.
            outputs: Outputs of the networks, ``(M, rows, 3)``.
            log_variance: Receives the log-variance, ``(rows,)``.
        """
        (rows, n), heads = features.shape, self.networks.flat.shape[0]
        inputs = features.new_empty(self.folds * rows, n + 3)
        predicted = features.new_empty(heads, self.folds * rows, 1)
        before = (features, outputs, self.weights, *self.given, inputs)
        after = (predicted, outputs, self.weights, self.settings, log_variance)
        return [
            native.bound("ensemble_told", (rows, n, self.kinds, self.folds, self.groups), before),
            plain.bound_networks(self.networks, inputs, predicted),
            native.bound("ensemble_noise", (rows, self.kinds, self.folds, heads, self.groups), after),
        ]


def _doubles(*values: float) -> Tensor:
    """Return numbers as a float64 tensor on the CPU."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _floats(*values: float) -> Tensor:
    """Return numbers as a float32 tensor on the CPU."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _ends(stack: Stack) -> tuple[int, int] | None:
    """Return the numbers of features and outputs of networks that a kernel supports, or ``None`` for any other."""
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


def _joined(parts: Sequence[tuple[slice, plain.PlainNetworks]]) -> Bind:
    """Return one call for deterministic networks of the same shape, which may belong to different stacks."""
    places, networks = zip(*parts, strict=True)
    joined = plain.PlainNetworks.joined(networks)
    consecutive = all(a.stop == b.start for a, b in itertools.pairwise(places))
    at: Any = slice(places[0].start, places[-1].stop) if consecutive else np.r_[places]

    def bind(z: Tensor, outputs: Array) -> list[Call]:
        made = z.new_empty(joined.flat.shape[0], z.shape[0], 2)
        return [plain.bound_networks(joined, z, made), _put(made, outputs, (at, slice(None), slice(2)))]

    return bind


def _bind_of(stack: Stack, places: slice, moments: type[Any]) -> Bind | None:
    """Return the calls of a Gaussian process, or of perceptrons whose moments a kernel propagates, or ``None``.

    Args:
        stack: The networks.
        places: Their positions in the ensemble.
        moments: Type of moments that the ensemble propagates.
    """
    if (process := _process_of(stack)) is not None:
        return _process(process, places)
    state = {name: tensor.detach() for part in stack.state() for name, tensor in part.items()}
    found = known_perceptron(stack.architecture)
    if found is None or not is_random(stack.architecture):
        return None
    networks, exact = arrays_of(found, state), moments is FactoredMoments
    if moments is DiagonalMoments or (exact and max(networks.widths[1:]) <= WIDEST):
        return _perceptrons(networks, exact, places)
    return None


def _process_of(stack: Stack) -> dict[str, Tensor] | None:
    """Return parameters and buffers of a stack that is a single Gaussian process, or ``None``."""
    layers = list(stack.architecture.children())
    if len(stack) != 1 or len(layers) != 1 or not isinstance(layers[0], GaussianProcess):
        return None
    return {name.removeprefix("0."): t[0].detach() for part in stack.state() for name, t in part.items()}


def _process(state: dict[str, Tensor], places: slice) -> Bind:
    """Return the calls of a Gaussian process at a position in the ensemble."""
    held = [state[name].contiguous() for name in PROCESS_STATE]
    log_variance = float(GaussianProcess.log_noise_variance(state["kernel"]))

    def bind(z: Tensor, outputs: Array) -> list[Call]:
        outputs[places, :, LOG_VARIANCE] = log_variance
        doubles = z.double()
        mean = doubles.new_empty(z.shape[0])
        call = bound_process([doubles, *held], mean)
        return [_put(z, doubles.numpy(), ...), call, _put(mean, outputs, (places, slice(None), MEAN))]

    return bind


def _perceptrons(networks: perceptron.Perceptrons, exact: bool, places: slice) -> Bind:
    """Return the calls of perceptrons with exact or diagonal moments, at positions in the ensemble."""

    def bind(z: Tensor, outputs: Array) -> list[Call]:
        each = z.new_empty(networks.flat.shape[0], *z.shape)
        call, mean, spread = perceptron.bound_propagation(networks, exact, each, torch.zeros_like(each))
        variance = spread[..., MEAN, MEAN] if exact else spread[..., MEAN]
        means, variances = (places, slice(None), slice(2)), (places, slice(None), 2)
        return [_put(z, each.numpy(), ...), call, _put(mean, outputs, means), _put(variance, outputs, variances)]

    return bind


def _put(source: Tensor, target: Array, at: Any) -> Call:
    """Return a call that copies a tensor to an index of an array."""
    return partial(target.__setitem__, at, source.numpy())
