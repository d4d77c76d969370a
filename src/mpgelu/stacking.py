"""Training an ensemble as one program: rates times folds, each network scored on rows it has not seen, then weighted.

Every network leaves out one fold. It enters the ensemble twice, as it is at the end and as it was when it predicted its
held-out rows best; the weights of the rates and of the two kinds are those that predict the held-out rows best.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import Tensor, nn

from mpgelu import native
from mpgelu.arrays import read_arrays, write_arrays
from mpgelu.errors import TrainingError
from mpgelu.layers import Dropout, GaussianLinear, Linear
from mpgelu.likelihood import HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.native.perceptron import Trainer as NativeTrainer
from mpgelu.networks import Stack, network
from mpgelu.training import Best, RecoveryWarning, Trainer, training_progress

Covariance = Literal["exact", "diagonal"]
Noise = Literal["heteroscedastic", "homoscedastic"]

_STEPS_AT_ONCE = 50
_MOST_ENTRIES = 2**25  # of the features of so many steps
_MOST_LEFT_OUT = 0.5  # share of the steps of a network that may be left out because their loss is not finite
_LOOKS = 40  # times that held-out rows are scored during training
_CLIP = 10.0  # largest norm of a network's gradient
_WARM_UP = 0.05  # share of the steps in which the learning rate grows
FEWEST_FOLDS = 5
_MOST_HELD_OUT = 4000  # rows of each fold that networks are judged by
_AGREEMENT = 0.01  # nats per row by which exact moments may score below diagonal ones and still be preferred
_HELD_AT_ONCE = 256
_EM_STEPS = 500
_LOWEST_LOG_DENSITY = -1e4  # of a row; keeps the weights finite
_NO_VARIANCE = -40.0  # logarithm of the variance of a weight that stands for none
_SECONDS_BETWEEN_CHECKPOINTS = 30
_LEAST_WEIGHT = 0.02


class InterruptedWarning(UserWarning):
    """Training was stopped by Ctrl-C; the state so far was kept."""


@dataclass(frozen=True)
class Settings:
    """How an ensemble is trained.

    Args:
        hidden: units of each hidden layer.
        rates: dropout rates, one set of networks for each.
        members: networks for each rate, each of which leaves out another fold of the rows.
        steps: of the optimiser.
        batch_size: rows in a step.
        learning_rate: its peak; it grows for 5 % of the steps, then falls to zero as a cosine.
        beta: exponent of the weight of each row, its detached predictive variance; 0 for none.
        noise: whether the noise depends on the features.
        gaussian_weights: random weights, trained with their Kullback-Leibler term.
        train_covariance: moments during training.
        covariance: moments of the predictions by which networks are weighted; ``"auto"`` takes exact ones unless
            diagonal ones predict the held-out rows better.
        patience: stop after so many steps, at least one, without improvement on held-out rows; ``None`` never does.
        seed: of the folds, the starting weights and the order of the rows.
    """

    hidden: Sequence[int]
    rates: Sequence[float]
    members: int
    steps: int
    batch_size: int
    learning_rate: float
    beta: float
    noise: Noise
    gaussian_weights: bool
    train_covariance: Covariance
    covariance: Covariance | Literal["auto"]
    patience: int | None
    seed: int


def certain(x: Tensor, covariance: Covariance) -> Moments:
    """Known features, in the kind of moments of this name."""
    return (FactoredMoments if covariance == "exact" else DiagonalMoments).certain(x)


@dataclass(frozen=True)
class Trained:
    """The result of :func:`train`.

    Attributes:
        stack: the networks with a weight worth keeping.
        weights: of these networks, ``(M,)``, summing to one.
        covariance: moments to predict with.
        rate_weights: weight of each rate, over all its networks.
        score: mean log density of held-out rows under the mixture of the networks that have not seen them.
        losses: training loss at each look, ``(looks, rates * members)``.
        networks: all networks at the end of training, from which another fit may go on.
        steps: taken.
        interrupted: whether Ctrl-C ended the training.
    """

    stack: Stack
    weights: Tensor
    covariance: Covariance
    rate_weights: dict[float, float]
    score: float
    losses: Tensor
    networks: Stack
    steps: int
    interrupted: bool


def train(
    X: Tensor,
    y: Tensor,
    row_weights: Tensor,
    settings: Settings,
    *,
    start: Stack | None = None,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> Trained:
    """Train all networks as one, then weight them by how well they predict the rows they have not seen.

    Args:
        X: standardised features ``(rows, n)``.
        y: standardised targets ``(rows,)``.
        row_weights: ``(rows,)``, of mean one.
        settings: see :class:`Settings`.
        start: networks to go on from, as many as there are rates times members.
        checkpoint: folder that keeps the state during training, and from which the same call goes on.
        progress: show a progress bar when the standard error is a terminal.
    """
    folds = _Folds.of(len(y), settings)
    stack = Stack(start.unstack() if start else _new_networks(X.shape[1], settings))
    trainer = _steps(stack, settings, folds.trained.shape[1])
    best = Best(stack, torch.Size([len(stack)]), None)
    keeper = _Keeper(checkpoint, trainer, best, (X, y, row_weights), settings) if checkpoint else None
    losses, interrupted = _loop(trainer, best, folds, (X, y, row_weights), settings, keeper, progress)
    networks = Stack(stack.unstack())
    copies = [networks]
    if best.seen:
        best.restore()
        copies.append(stack)
    covariance, stacking = _choose(copies, folds, (X, y, row_weights), settings)
    by_rate = stacking.weights.view(-1, len(settings.rates)).sum(0).tolist()
    weights = (stacking.weights / settings.members).repeat_interleave(settings.members)
    members = [member for copy in copies for member in copy.unstack()]
    kept = torch.nonzero(weights).flatten()
    return Trained(
        stack=Stack([members[i] for i in kept]),
        weights=weights[kept],
        covariance=covariance,
        rate_weights=dict(zip(settings.rates, by_rate, strict=True)),
        score=stacking.score,
        losses=losses,
        networks=networks,
        steps=trainer.taken,
        interrupted=interrupted,
    )


def _choose(
    copies: list[Stack], folds: _Folds, data: tuple[Tensor, Tensor, Tensor], settings: Settings
) -> tuple[Covariance, Stacking]:
    """Weights of rates and copies, and how to propagate: exactly, unless it predicts the held-out rows worse."""
    X, y, row_weights = data
    kinds: tuple[Covariance, ...] = ("exact", "diagonal") if settings.covariance == "auto" else (settings.covariance,)
    found: dict[Covariance, Stacking] = {}
    for kind in kinds:
        densities = [_log_densities(copy, folds, X, y, kind) for copy in copies]
        found[kind] = stacking_weights(*_out_of_fold(densities, folds, row_weights, len(settings.rates)))
    chosen = max(found, key=lambda kind: found[kind].score + (_AGREEMENT if kind == "exact" else 0))
    return chosen, found[chosen]


class Stacking(NamedTuple):
    """Weights of candidates ``(candidates,)`` and the mean log density of their mixture."""

    weights: Tensor
    score: float


def stacking_weights(log_densities: Tensor, row_weights: Tensor) -> Stacking:
    r"""The weights :math:`w` on the simplex that maximise :math:`\sum_i c_i \log \sum_k w_k p_k(y_i)`, by EM.

    Candidates with less than a fiftieth of the weight are left out, weight zero: they cost as much as the others.

    Args:
        log_densities: of each row under each candidate, trained without it, ``(rows, candidates)``.
        row_weights: c, ``(rows,)``.
    """
    logs, shares = log_densities.double(), row_weights.double() / row_weights.double().sum()
    weights = torch.full(logs.shape[1:], 1 / logs.shape[1], dtype=torch.float64)
    for least in (0.0, _LEAST_WEIGHT):
        weights = torch.where(weights < min(least, 0.5 * float(weights.max())), 0, weights)
        for _ in range(_EM_STEPS):
            weights = shares @ torch.softmax(logs + weights.log(), dim=1)
    return Stacking(weights, float(shares @ torch.logsumexp(logs + weights.log(), dim=1)))


# ---- rows ----


@dataclass(frozen=True)
class _Folds:
    """Which rows each network is trained on and which it is judged by; networks are ordered by rate, then fold."""

    trained: Tensor  # (networks, rows)
    held: Tensor  # (networks, rows), the shorter folds filled up by repetition
    counts: Tensor  # (networks, rows): 1 for a row, 0 for a repetition

    @staticmethod
    def of(rows: int, settings: Settings) -> _Folds:
        splitter = KFold(min(rows, max(FEWEST_FOLDS, settings.members)), shuffle=True, random_state=settings.seed)
        random = np.random.default_rng(settings.seed)
        split = list(splitter.split(np.zeros(rows)))[: settings.members]
        folds = [(train, random.permutation(held)[:_MOST_HELD_OUT]) for train, held in split]
        shortest, longest = min(len(train) for train, _ in folds), max(len(held) for _, held in folds)
        trained = np.stack([train[:shortest] for train, _ in folds])
        held = np.stack([np.resize(held, longest) for _, held in folds])
        counts = np.stack([np.arange(longest) < len(held) for _, held in folds])
        parts = (torch.as_tensor(part).repeat(len(settings.rates), 1) for part in (trained, held, counts))
        return _Folds(*parts)


class _Batches:
    """Row numbers of the batches: every network goes through its rows in a new random order each epoch.

    The order depends on the number of the epoch alone, so that a resumed run meets the same batches.
    """

    def __init__(self, folds: _Folds, size: int, seed: int) -> None:
        self.folds, self.size, self.seed = folds, size, seed
        self._orders: dict[int, Tensor] = {}

    def rows(self, first: int, count: int) -> Tensor:
        """Row numbers of ``count`` batches from number ``first`` on, ``(networks, count, size)``."""
        networks, rows = self.folds.trained.shape
        start, stop = first * self.size, (first + count) * self.size
        epochs = range(start // rows, (stop - 1) // rows + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}  # drawn once, kept while it is in use
        offset = start - epochs[0] * rows
        orders = list(self._orders.values())
        order = (orders[0] if len(orders) == 1 else torch.cat(orders, 1))[:, offset : offset + stop - start]
        return torch.take_along_dim(self.folds.trained, order, 1).view(networks, count, self.size)

    def _order(self, epoch: int) -> Tensor:
        if epoch in self._orders:
            return self._orders[epoch]
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        return torch.rand(self.folds.trained.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)


def _log_densities(
    stack: Stack, folds: _Folds, X: Tensor, y: Tensor, covariance: Covariance, nodes: int = 32
) -> Tensor:
    """Log density of its held-out rows under every network, ``(networks, rows)``."""
    parts, likelihood = [], HeteroscedasticGaussian()
    with torch.no_grad():
        for rows in torch.split(folds.held, _HELD_AT_ONCE, dim=1):
            moments = stack(certain(X[rows], covariance))
            parts.append(likelihood.predictive(moments, nodes).log_prob(y[rows]))
    return torch.cat(parts, 1)


def _out_of_fold(densities: list[Tensor], folds: _Folds, row_weights: Tensor, rates: int) -> tuple[Tensor, Tensor]:
    """Log densities ``(held-out rows, candidates)`` and row weights; a candidate is a rate, at its end or its best."""
    members = len(folds.held) // rates
    real = folds.counts[:members].flatten()
    columns = [column for density in densities for column in density.view(rates, -1)]
    table = torch.stack(columns, 1)[real]
    return table.clamp_min(_LOWEST_LOG_DENSITY), row_weights[folds.held[:members].flatten()[real]]


# ---- networks ----


def _new_networks(features: int, settings: Settings) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(settings.seed)
    networks: list[nn.Module] = []
    for rate, _ in product(settings.rates, range(settings.members)):
        with torch.random.fork_rng(devices=[]):  # what torch draws is replaced below
            made = network(features, settings.hidden, rate=0.5, gaussian_weights=settings.gaussian_weights).float()
        for layer in made:
            if isinstance(layer, Dropout):
                layer.rate.fill_(rate)  # also a rate of zero, which network would leave out
        _initialise([layer for layer in made if isinstance(layer, (Linear, GaussianLinear))], settings, generator)
        networks.append(made)
    return networks


def _initialise(layers: list[Linear | GaussianLinear], settings: Settings, generator: torch.Generator) -> None:
    """Hinges spread over the data, outputs near zero, a noise near that of the target and the same for all rows."""
    with torch.no_grad():
        for position, layer in enumerate(layers[:-1]):
            layer.weight.normal_(0, math.sqrt(2 / layer.in_features), generator=generator)
            layer.bias.normal_(0, 0.1 if position else 1.0, generator=generator)
        last = layers[-1]
        last.weight.normal_(0, 1 / math.sqrt(last.in_features), generator=generator)
        last.weight[1].mul_(0.0 if settings.noise == "homoscedastic" else 0.1)
        last.bias.zero_()
        if settings.noise == "homoscedastic" and isinstance(last, GaussianLinear):
            last.log_weight_variance[1] = _NO_VARIANCE


# ---- steps ----


class _Steps(Protocol):
    """What the loop needs of an optimiser of stacked networks."""

    taken: int

    def steps(self, x: Tensor, y: Tensor, weights: Tensor, learning_rates: Tensor) -> Tensor:
        """One step of every network for each batch; the losses ``(networks, steps)``."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on but the number of steps taken."""

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        """Take up a state after so many steps."""


def _steps(stack: Stack, settings: Settings, rows: int) -> _Steps:
    """Whole steps in native code where it can do what is asked, else torch."""
    plain = settings.train_covariance == "diagonal" and settings.noise == "heteroscedastic"
    if plain and stack.perceptron is not None and native.available():
        return NativeTrainer(stack.perceptron, settings.beta, _CLIP)
    return _TorchSteps(stack, settings, rows)


class _TorchSteps:
    """The same steps in torch, for exact covariance, Gaussian weights and constant noise."""

    def __init__(self, stack: Stack, settings: Settings, rows: int) -> None:
        likelihood = HeteroscedasticGaussian()

        def losses(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            moments = stack(certain(x, settings.train_covariance))
            weights = weights * variance_weights(moments, settings.beta)
            return -(weights * likelihood.expected_log_prob(moments, y)).mean(-1)

        penalty = (lambda: stack.each(_kl) / rows) if settings.gaussian_weights else None
        models = torch.Size([len(stack)])
        self.trainer = Trainer(stack, likelihood, models, losses, _adam, None, penalty, _CLIP)
        self.taken = 0
        if settings.noise == "homoscedastic":
            _freeze_noise_weights(stack)

    def steps(self, x: Tensor, y: Tensor, weights: Tensor, learning_rates: Tensor) -> Tensor:
        losses = []
        for step, learning_rate in enumerate(learning_rates.tolist()):
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = learning_rate
            losses.append(self.trainer.step(x[:, step], y[:, step], weights[:, step]))
            self.taken += 1
        return torch.stack(losses, 1)

    def state(self) -> dict[str, Tensor]:
        state = {"step_scale": self.trainer.step_scale}
        for position, p in enumerate(self.trainer.parameters):
            kept = self.trainer.optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                kept.setdefault(name, torch.zeros_like(p))
            kept.setdefault("step", torch.tensor(0.0))
            state |= {f"parameter_{position}": p.detach()}
            state |= {f"{name}_{position}": kept[name] for name in ("exp_avg", "exp_avg_sq", "step")}
        return state

    def load(self, state: dict[str, Tensor], taken: int) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.taken = taken


def variance_weights(moments: Moments, beta: float) -> Tensor:
    """Weight of each row in the loss, its predictive variance to the power beta, of mean one; no gradient."""
    if not beta:
        return torch.ones_like(moments.mean[..., 0])
    with torch.no_grad():
        (_, log_noise), (variance, log_noise_variance) = moments.mean.unbind(-1), moments.variance.unbind(-1)
        noise = torch.exp((log_noise + log_noise_variance / 2).clamp(-30, 30))
        weights = (variance + noise) ** beta
        return weights / weights.mean(-1, keepdim=True)


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1.0)  # type: ignore[arg-type]


def _kl(network: nn.Module) -> Tensor:
    return torch.stack([layer.kl() for layer in network.modules() if isinstance(layer, GaussianLinear)]).sum()


def _freeze_noise_weights(stack: Stack) -> None:
    """Let the second output be a constant: its weights, zero at the start, get no gradient."""
    parameters, _ = stack.state()
    for kind in (".weight", ".log_weight_variance"):
        for p in [p for name, p in parameters.items() if name.endswith(kind)][-1:]:  # of the last layer
            keep = torch.ones_like(p[0])
            keep[1] = 0
            p.register_hook(lambda gradient, keep=keep: gradient * keep)  # type: ignore[no-untyped-call]


def _learning_rates(settings: Settings) -> Tensor:
    """A linear warm-up, then half a cosine down to zero."""
    done = torch.arange(1, settings.steps + 1, dtype=torch.float64) / settings.steps
    falling = 0.5 * (1 + torch.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))
    return (settings.learning_rate * torch.where(done < _WARM_UP, done / _WARM_UP, falling)).float()


def _loop(
    trainer: _Steps,
    best: Best,
    folds: _Folds,
    data: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
    keeper: _Keeper | None,
    progress: bool,
) -> tuple[Tensor, bool]:
    """All steps, with a look at the held-out rows now and then; the losses of each look."""
    X, y, weights = data
    rates = _learning_rates(settings)
    size, look = min(settings.batch_size, folds.trained.shape[1]), max(1, settings.steps // _LOOKS)
    batches = _Batches(folds, size, settings.seed)
    at_once = min(_STEPS_AT_ONCE, max(1, _MOST_ENTRIES // (len(folds.trained) * size * X.shape[1])))
    patience = math.inf if settings.patience is None else settings.patience
    losses: list[Tensor] = []
    left_out = torch.zeros(len(folds.trained), dtype=torch.long)
    with training_progress(progress) as bar, _Interrupts() as interrupts:
        task = bar.add_task("training", total=settings.steps, completed=trainer.taken, loss=float("nan"))
        while trainer.taken < settings.steps and best.epochs_without_improvement * look < patience:
            if interrupts.seen:
                warnings.warn(
                    f"fit: interrupted after {trainer.taken} of {settings.steps} steps; the state so far was kept",
                    InterruptedWarning,
                    stacklevel=4,
                )
                break
            first = trainer.taken
            count = min(at_once, look - first % look, settings.steps - first)
            rows = batches.rows(first, count)
            seen = trainer.steps(X[rows], y[rows], weights[rows], rates[first : first + count])
            left_out += (~torch.isfinite(seen)).sum(1)
            bar.update(task, completed=trainer.taken, loss=float(seen.nanmean()))
            if trainer.taken % look == 0:
                losses.append(seen.mean(1))
                best.see(-_score(best.network, folds, X, y, weights, settings))
            if keeper:
                keeper.write_now_and_then()
    if keeper:
        keeper.write()
    _warn_of_steps_left_out(left_out, settings.steps)
    return _stacked(losses, y, len(folds.held)), interrupts.seen


class _Interrupts:
    """Ctrl-C as a flag that is looked at between steps: a step that stops half-way would leave a state that never was.

    In other threads than the main one, which get no Ctrl-C, it is never raised.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.seen:  # the second time, do not wait for the step
            raise KeyboardInterrupt
        self.seen = True


def _warn_of_steps_left_out(left_out: Tensor, steps: int) -> None:
    share = float(left_out.max()) / steps
    if share > _MOST_LEFT_OUT:
        raise TrainingError(
            f"fit: the loss was not finite in {share:.0%} of the steps of a network; "
            "lower learning_rate or check the data for extreme values"
        )
    if left_out.any():
        warnings.warn(
            f"fit: {int(left_out.sum())} steps whose loss was not finite were left out, in {share:.1%} of the steps of "
            "the network with most of them",
            RecoveryWarning,
            stacklevel=5,
        )


def _stacked(losses: list[Tensor], like: Tensor, networks: int) -> Tensor:
    return torch.stack(losses) if losses else like.new_empty(0, networks)


def _score(stack: nn.Module, folds: _Folds, X: Tensor, y: Tensor, weights: Tensor, settings: Settings) -> Tensor:
    """Mean log density of the held-out rows of every network."""
    assert isinstance(stack, Stack)
    counts = folds.counts * weights[folds.held]
    densities = _log_densities(stack, folds, X, y, settings.train_covariance, nodes=8)
    return (counts * densities).sum(1) / counts.sum(1)


# ---- checkpoints ----


class _Keeper:
    """Keeps the state of a training run in a file named after it, and takes it up again if it is there."""

    def __init__(self, folder: Path, trainer: _Steps, best: Best, data: tuple[Tensor, ...], settings: Settings) -> None:
        run = _fingerprint(data, settings, trainer)
        self.path, self.trainer, self.best = folder / f"training-{run[:16]}.safetensors", trainer, best
        self.written = time.monotonic()
        if self.path.exists():
            arrays, about = read_arrays(self.path, "checkpoint")
            best.load(arrays)
            trainer.load(arrays, about["taken"])

    def write_now_and_then(self) -> None:
        """Write if the last time is long enough ago."""
        if time.monotonic() - self.written > _SECONDS_BETWEEN_CHECKPOINTS:
            self.write()

    def write(self) -> None:
        """Write the state."""
        arrays = self.trainer.state() | self.best.arrays()
        write_arrays(self.path, "checkpoint", arrays, {"taken": self.trainer.taken})
        self.written = time.monotonic()


def _fingerprint(data: tuple[Tensor, ...], settings: Settings, trainer: _Steps) -> str:
    """A hash of everything that the result depends on, the starting weights included."""
    digest = sha256(repr(asdict(settings)).encode())
    for tensor in (*data, *trainer.state().values()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
