"""The paper's UCI experiments: grid search of the dropout rate, training and testing on the published splits.

    cells -> `run_cell`: validation models of all rates and splits, as stacks -> best rate -> test models -> store

A *cell* is a data set and a network in one setting. Its models train as stacks (never one by one in Python), each
finished stack is appended to the store, and what the store already holds is not run again.
"""

from __future__ import annotations

import itertools
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu import native
from mpgelu.errors import DataError
from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.networks import Nonlinearity, Stack
from mpgelu.research.datasets import Dataset, Split, load_uci
from mpgelu.research.paper.tables import RATES, SETTINGS
from mpgelu.research.paper.variants import Network, build, input_moments
from mpgelu.research.store import Store
from mpgelu.training import fit

IDENTITY = ("kind", "dataset", "nonlinearity", "outputs", "covariance", "seed", "split", "rate")
LARGE = ("kin8nm", "naval", "power", "protein")
GIVEN = "given"  # how a rate was chosen that was not searched for
PAPER_NETWORKS: tuple[Nonlinearity, ...] = ("mpgelu", "relu")

_EPOCHS = 500
_BATCH = 256
_LEARNING_RATE = 1e-3
_VALIDATION_FRACTION = 0.2
_STACK = 20  # models trained as one: enough to hide Python's overhead, few enough to stay in the cache
_ROUNDS = 9  # interleaved timings of each network, the best counts


@dataclass(frozen=True)
class Cell:
    """A data set and a network in one setting of the paper."""

    dataset: str
    nonlinearity: Network
    outputs: int
    covariance: str
    seed: int = 0

    @property
    def is_full_relu(self) -> bool:
        """Whether the cell is a ReLU network with full covariance, the most expensive kind."""
        return self.nonlinearity in ("relu", "relu_input") and self.covariance == "full"

    def __str__(self) -> str:
        """Words for the progress bar."""
        return f"{self.dataset} {self.nonlinearity} {self.outputs}-output {self.covariance} seed {self.seed}"


@dataclass(frozen=True)
class Effort:
    """The part of the full protocol that is run on each data set; ``None`` stands for every published split.

    Args:
        splits: test splits.
        grid_splits: splits of the grid search.
        full_relu_splits: test splits of ReLU with full covariance, by far the slowest network.
        borrow_rate: let ReLU with full covariance take the rate found with the diagonal one.
        epochs: of training; the paper's 500.
        rate: of the dropout, for all cells, instead of the grid search.
    """

    splits: int | None = None
    grid_splits: int | None = None
    full_relu_splits: int | None = None
    borrow_rate: bool = False
    epochs: int = _EPOCHS
    rate: float | None = None

    def borrows(self, cell: Cell) -> bool:
        """Return whether the cell uses the dropout rate that was found with diagonal covariance."""
        return self.rate is None and self.borrow_rate and cell.is_full_relu

    def grid(self, cell: Cell, available: int) -> int:
        """Number of splits of the cell's grid search."""
        searched = self.rate is None and not self.borrows(cell)
        return min(available, self.grid_splits or available) if searched else 0

    def tests(self, cell: Cell, available: int) -> int:
        """Number of splits the cell is tested on."""
        wanted = self.full_relu_splits if cell.is_full_relu and self.full_relu_splits else self.splits
        return min(available, wanted or available)


def cells(
    datasets: Sequence[str],
    tables: Sequence[int] = (1, 2, 3, 4),
    seeds: Iterable[int] = (0,),
    networks: Sequence[Network] = PAPER_NETWORKS,
) -> Iterator[Cell]:
    """All cells of the given tables, the cheap networks first."""
    settings = [SETTINGS[number - 1] for number in tables]
    found = [
        Cell(dataset, nonlinearity, outputs, covariance, seed)
        for dataset, nonlinearity, (outputs, covariance), seed in itertools.product(datasets, networks, settings, seeds)
    ]
    return iter(
        sorted(found, key=lambda cell: (cell.nonlinearity in ("relu", "relu_input"), cell.covariance == "full"))
    )


def run_cell(cell: Cell, effort: Effort, store: Store, data: str | None = None) -> Iterator[int]:
    """Run what the store lacks of a cell.

    Args:
        cell: what to run.
        effort: how much of it.
        store: where finished stacks of models are appended.
        data: folder of the data sets, see :func:`load_uci`.

    Yields:
        The number of models in each finished stack.
    """
    torch.set_num_threads(1)  # the work is spread over processes
    native.keep_freed_memory()
    dataset = load_uci(cell.dataset, data)
    grid = itertools.product(range(effort.grid(cell, len(dataset.splits))), RATES)
    yield from _run(cell, "validation", dataset, grid, effort.epochs, store)
    rate, chosen = best_rate(store, cell, effort.borrows(cell)) if effort.rate is None else (effort.rate, GIVEN)
    tests = ((split, rate) for split in range(effort.tests(cell, len(dataset.splits))))
    yield from _run(cell, "test", dataset, tests, effort.epochs, store, rate_from=chosen)


def models_left(cell: Cell, effort: Effort, done: set[tuple[object, ...]], available: int) -> int:
    """Return the number of models of a cell that are not yet trained, as far as it is known before the grid search.

    Args:
        cell: what to run.
        effort: how much of it.
        done: the keys of the store.
        available: number of published splits.
    """
    identity = tuple(asdict(cell)[name] for name in IDENTITY[1:6])
    mine = [(key[0], key[6]) for key in done if key[1:6] == identity]
    grid, tests = effort.grid(cell, available), effort.tests(cell, available)
    validated = sum(kind == "validation" and split in range(grid) for kind, split in mine)
    tested = len({split for kind, split in mine if kind == "test" and split in range(tests)})
    return grid * len(RATES) - validated + tests - tested


def best_rate(store: Store, cell: Cell, borrowed: bool) -> tuple[float, str]:
    """The rate with the lowest mean validation NLL of a cell, and how it was chosen.

    A rate whose NLL is not finite on one split is not chosen.

    Raises:
        DataError: The store has no grid search of the cell, or none of its rates can be chosen.
    """
    source = Cell(cell.dataset, cell.nonlinearity, cell.outputs, "diagonal" if borrowed else cell.covariance, cell.seed)
    frame = store.frame()
    rows = frame[frame["kind"] == "validation"] if len(frame) else frame
    for name, value in asdict(source).items():
        rows = rows[rows[name] == value] if len(rows) else rows
    if not len(rows):
        raise DataError(f"reproduce: no grid search of '{source}' in {store.path}; run it before '{cell}'")
    rows = rows.drop_duplicates(["split", "rate"], keep="last").astype({"nll": float}).fillna({"nll": np.inf})
    nll = rows.groupby("rate")["nll"].mean()
    if not np.isfinite(nll.min()):
        raise DataError(f"reproduce: no rate of '{source}' has a finite validation NLL on every split in {store.path}")
    splits = rows["split"].nunique()
    origin = "the diagonal setting's grid" if borrowed else "grid"
    return float(str(nll.idxmin())), f"{origin} over {splits} split{'s' * (splits > 1)}"


def _run(
    cell: Cell,
    kind: str,
    dataset: Dataset,
    wanted: Iterable[tuple[int, float]],
    epochs: int,
    store: Store,
    **extra: object,
) -> Iterator[int]:
    """Train the models (split, rate) that the store lacks, a stack at a time."""
    done, wanted = store.keys(), list(wanted)
    fixed = {"kind": kind, **asdict(cell)}
    for start in range(0, len(wanted), _STACK):  # cut before looking at what is done, so that stacks stay the same
        stack = [
            (split, rate)
            for split, rate in wanted[start : start + _STACK]
            if store.key({**fixed, "split": split, "rate": rate}) not in done
        ]
        if not stack:
            continue
        started = time.perf_counter()
        metrics = _train(cell, kind, dataset, stack, epochs)
        seconds = (time.perf_counter() - started) / len(stack)
        about = {"epochs": epochs, "seconds": seconds, "versions": versions(), **extra}
        for (split, rate), row in zip(stack, metrics, strict=True):
            store.append({**fixed, "split": split, "rate": rate, **row, **about})
        yield len(stack)


def _train(
    cell: Cell, kind: str, dataset: Dataset, models: Sequence[tuple[int, float]], epochs: int
) -> list[dict[str, float]]:
    """Train models of one cell as one stack, and score each on its held-out rows."""
    parts = [_standardised(dataset, _held_out(dataset, split, kind)) for split, _ in models]
    networks = [_network(cell, dataset, split, rate) for split, rate in models]
    likelihood = _likelihood(cell.outputs)
    stack = Stack(networks)
    history = fit(
        stack,
        likelihood,
        (torch.stack([part.X for part in parts]), torch.stack([part.y for part in parts])),
        epochs=epochs,
        batch_size=_BATCH,
        drop_last=True,  # the paper does not say so, but only this lands on its numbers
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_LEARNING_RATE),
        moments=_input(cell),
        seed=cell.seed,
        shuffle=_shuffle(len(dataset.splits), len(parts[0].y), [split for split, _ in models]),
        progress=False,
    )
    if history.interrupted:  # half-trained models are no results
        raise KeyboardInterrupt
    return [
        _scores(cell, kind, network, likelihood, part) for network, part in zip(stack.unstack(), parts, strict=True)
    ]


def _shuffle(published: int, rows: int, splits: list[int]) -> Callable[[torch.Generator], Tensor]:
    """Random numbers for the order of the rows, drawn for all published splits, of which a model takes its own split's.

    So a model sees its rows in the same order whichever models share its stack, and all networks and rates see a split
    in the same order.
    """
    return lambda generator: torch.rand(published, rows, generator=generator)[splits]


def _network(cell: Cell, dataset: Dataset, split: int, rate: float) -> torch.nn.Sequential:
    """A fresh network; all networks and all rates start a split from the same weights, to be comparable."""
    torch.manual_seed(zlib.crc32(f"{cell.dataset}/{split}/{cell.seed}".encode()))
    return build(cell.nonlinearity, dataset.X.shape[1], cell.outputs, rate)


def _scores(
    cell: Cell, kind: str, network: torch.nn.Module, likelihood: Gaussian | HeteroscedasticGaussian, part: _Part
) -> dict[str, float]:
    with torch.no_grad():
        moments = network(_input(cell)(part.X_test))
        scores = {"nll": -likelihood.expected_log_prob(moments, part.y_test).mean().item()}
        if kind == "validation":
            return scores
        predictive = likelihood.predictive(moments)
        lower, upper = predictive.interval(0.9)
        covered = (part.y_test >= lower) & (part.y_test <= upper)
        return scores | {
            "nll_mixture": -predictive.log_prob(part.y_test).mean().item(),
            "nll_gaussian": -predictive.matched().log_prob(part.y_test).mean().item(),
            "rmse": (predictive.mean - part.y_test).square().mean().sqrt().item(),
            "crps": predictive.crps(part.y_test).mean().item(),
            "coverage90": covered.double().mean().item(),
        }


def _input(cell: Cell) -> Callable[[Tensor], DiagonalMoments] | Callable[[Tensor], FactoredMoments]:
    """From features to a network's input; full covariances start factored, with the numbers of n x n matrices."""
    if cell.covariance == "diagonal":
        return input_moments(cell.nonlinearity, DiagonalMoments)
    return input_moments(cell.nonlinearity, FactoredMoments)


@dataclass(frozen=True, eq=False)
class _Part:
    """Standardised training and held-out rows of one model."""

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor


def _held_out(dataset: Dataset, split: int, kind: str) -> Split:
    """The published split, or for validation a fifth of its training rows held out from the rest."""
    published = dataset.splits[split]
    if kind == "test":
        return published
    order = np.random.default_rng(split).permutation(published.train)
    size = round(_VALIDATION_FRACTION * len(order))
    return Split(train=order[size:], test=order[:size])


def _standardised(dataset: Dataset, split: Split) -> _Part:
    """Features and target with mean 0 and variance 1 on the training rows; a constant feature stays 0."""
    X_mean, X_scale = dataset.X[split.train].mean(0), dataset.X[split.train].std(0)
    y_mean, y_scale = dataset.y[split.train].mean(), dataset.y[split.train].std()
    X = (dataset.X - X_mean) / np.where(X_scale > 0, X_scale, 1)
    y = (dataset.y - y_mean) / y_scale
    return _Part(*(_tensor(values[rows]) for rows in (split.train, split.test) for values in (X, y)))


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _likelihood(outputs: int) -> Gaussian | HeteroscedasticGaussian:
    return HeteroscedasticGaussian() if outputs == 2 else Gaussian()


@cache
def versions() -> dict[str, str]:
    """Versions that a result may depend on."""
    return {"mpgelu": metadata.version("mpgelu"), "torch": torch.__version__, "python": platform.python_version()}


def time_predictions(dataset: Dataset, outputs: int, covariance: str, seed: int = 0) -> list[dict[str, object]]:
    """Seconds to predict the first test split, both networks and for full covariance also the factored form.

    Timed in turns in one thread, the best of several rounds; untrained networks, which cost the same.

    Args:
        dataset: with its published splits.
        outputs: 2 or 1.
        covariance: ``"full"`` (dense n x n matrices, as in the paper) or ``"diagonal"``.
        seed: goes into the records.

    Returns:
        One record of kind "runtime" for each network.
    """
    torch.set_num_threads(1)
    native.keep_freed_memory()
    part = _standardised(dataset, dataset.splits[0])
    dense = FullMoments if covariance == "full" else DiagonalMoments
    runs: dict[tuple[Nonlinearity, str], type[DiagonalMoments] | type[FactoredMoments] | type[FullMoments]] = {
        ("mpgelu", "runtime_s"): dense,
        ("relu", "runtime_s"): dense,
    }
    if covariance == "full":
        runs["mpgelu", "runtime_factored_s"] = FactoredMoments
    cell = {name: Cell(dataset.name, name, outputs, covariance, seed) for name in PAPER_NETWORKS}
    networks = {name: _network(cell[name], dataset, 0, RATES[1]) for name in PAPER_NETWORKS}
    likelihood = _likelihood(outputs)
    best = dict.fromkeys(runs, float("inf"))
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for (name, column), moments in runs.items():
                started = time.perf_counter()
                likelihood.predictive(networks[name](moments.certain(part.X_test)))
                best[name, column] = min(best[name, column], time.perf_counter() - started)
    return [
        {"kind": "runtime", **asdict(cell[name]), "split": 0, "rate": RATES[1], "nll": None, "versions": versions()}
        | {column: seconds for (network, column), seconds in best.items() if network == name}
        for name in PAPER_NETWORKS
    ]
