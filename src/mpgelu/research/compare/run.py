"""Runs methods on published splits over processes, with progress, and so that it can be resumed.

    tasks -> `run`: fit, score and time what the store lacks -> store

A record holds the scores of one method on one split. A task that fails is recorded with its error, and run again by
the next call.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from threadpoolctl import threadpool_limits
from torch import Tensor

from mpgelu import native
from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Method, Rows
from mpgelu.research.compare.methods import METHODS, Recipe
from mpgelu.research.compare.predicted import Predicted, scores
from mpgelu.research.datasets import SETS, Dataset, Split, load_uci
from mpgelu.research.paper.uci import versions
from mpgelu.research.store import Record, Store

IDENTITY = ("method", "dataset", "split")

_WHOLE_CALLS, _ROW_CALLS = 5, 50
_TIMING_SECONDS = 5.0  # a slow method is timed by fewer calls


@dataclass(frozen=True)
class Task:
    """One method on one split."""

    method: str
    dataset: str
    split: int

    def __str__(self) -> str:
        """Words for the progress."""
        return f"{self.dataset} split {self.split} {METHODS[self.method].title}"


def tasks(
    methods: Sequence[str],
    datasets: Sequence[str],
    splits: Sequence[int] | Literal["report", "development"],
    data: str | None,
) -> list[Task]:
    """All combinations, data set by data set and there method by method.

    Splits that a set lacks are left out, and sets with more rows than a method is meant for.

    Args:
        methods: Keys of `METHODS`.
        datasets: Keys of `SETS`.
        splits: Numbers of splits, or which of the two parts of every set's splits.
        data: Folder of the data sets, see :func:`load_uci`.
    """
    available = {name: range(len(load_uci(name, data).splits)) for name in datasets}  # also downloads
    return [
        Task(method, dataset, split)
        for dataset in datasets
        for method in methods
        if SETS[dataset].rows <= METHODS[method].most_rows
        for split in (getattr(SETS[dataset], splits) if isinstance(splits, str) else splits)
        if split in available[dataset]
    ]


def run(wanted: Sequence[Task], path: Path, *, data: str | None = None, jobs: int = 1) -> Store:
    """Run every task that the store at ``path`` has no scores of.

    Args:
        wanted: In order of start.
        path: The results store.
        data: Folder of the data sets, see :func:`load_uci`.
        jobs: Processes, one thread each. Times are only comparable if the machine is not crowded.

    Raises:
        DataError: A data set or the store cannot be read or written.
    """
    store = Store(path.resolve(), IDENTITY)
    if data is not None:
        data = os.pathsep.join(str(Path(folder).expanduser().resolve()) for folder in data.split(os.pathsep))
    done = {store.key(record) for record in store if "error" not in record}
    left = [task for task in wanted if store.key(asdict(task)) not in done]
    brought = {(name, task.dataset, task.split) for task in left for name in METHODS[task.method].brings}
    left = [task for task in left if (task.method, task.dataset, task.split) not in brought]
    parallel = joblib.Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="n_jobs", return_as="generator_unordered")
    with _progress(left, store, jobs) as report:
        for record in parallel(joblib.delayed(_finish)(task, store, data) for task in left):
            report(record)
    return store


def _finish(task: Task, store: Store, data: str | None) -> Record:
    """Run one task in a worker and record it; half-trained models are no results."""
    started = time.perf_counter()
    found: dict[str, Record] = {}
    with _heeding_interrupts():
        try:
            found = evaluations(task, load_uci(task.dataset, data))
        except Exception as error:  # whatever a method of others raises, the rest goes on
            found = {task.method: {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}}
    seconds = time.perf_counter() - started
    for method, result in found.items():
        about = {"seconds": seconds, "versions": versions() | METHODS[method].versions()}
        record = {**asdict(task), "method": method, **result, **about}
        if method == task.method or not _is_done(record, store):
            store.append(record)
    return {**asdict(task), **found[task.method], "seconds": seconds}


def _is_done(record: Record, store: Store) -> bool:
    return any(store.key(other) == store.key(record) and "error" not in other for other in store)


@contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the end if Ctrl-C came in the block, even if a training loop took it for itself."""
    came = False

    def notice(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def evaluate(task: Task, dataset: Dataset) -> Record:
    """The scores of the task's own method; see :func:`evaluations`."""
    return evaluations(task, dataset)[task.method]


def evaluations(task: Task, dataset: Dataset) -> dict[str, Record]:
    """Fit a method to the training rows of a split; score and time it on the test rows, in original units.

    Test rows that repeat a training row, features and target, are counted in `repeats`; where there are any, every
    score is also taken over the other rows, in a field whose name ends in `_new`.

    Timed are `fit`, by the clock and in seconds of the processor, and `predict_distribution` with mean and standard
    deviation, from array to tensors: for all test rows (best of 5 calls) and for one row (median of 50 calls). What a
    method keeps in an attribute `record` goes into the record too.

    Args:
        task: The method and the split.
        dataset: With its splits.

    Returns:
        The record of the method, and those of the methods that it fits on the way: see `Recipe.brings`.
    """
    recipe, split = METHODS[task.method], dataset.splits[task.split]
    torch.set_num_threads(1)
    native.keep_freed_memory()
    with threadpool_limits(1):
        method = recipe.build(task.dataset, task.split)
        started, worked = time.perf_counter(), time.process_time()
        method.fit(dataset.X[split.train], dataset.y[split.train])
        times = {"fit_seconds": time.perf_counter() - started, "fit_cpu_seconds": time.process_time() - worked}
        brought: dict[str, tuple[Method, dict[str, float]]] = getattr(method, "brought", {})
        return {
            task.method: _judged(method, recipe, dataset, split, times),
            **{name: _judged(fitted, METHODS[name], dataset, split, took) for name, (fitted, took) in brought.items()},
        }


def _judged(method: Method, recipe: Recipe, dataset: Dataset, split: Split, times: dict[str, float]) -> Record:
    """Scores and times of a fitted method."""
    X, y = dataset.X[split.test], dataset.y[split.test]
    exact = _double(method.predict_distribution(X))
    whole = min(_seconds(lambda: _summary(method, X), _WHOLE_CALLS))
    row = statistics.median(_seconds(lambda: _summary(method, X[:1]), _ROW_CALLS))
    predicted = exact.matched() if recipe.matched and isinstance(exact, Predictive) else exact
    return {
        "rows": len(y),
        **scores(predicted, torch.from_numpy(y)),
        **_both_log_likelihoods(exact, torch.from_numpy(y)),
        **_scores_of_new_rows(predicted, y, _repeats(dataset, split)),
        **getattr(method, "record", {}),
        **times,
        "predict_us_per_row": 1e6 * whole / len(y),
        "predict_one_row_ms": 1e3 * row,
    }


def _both_log_likelihoods(predicted: Predicted, y: Tensor) -> dict[str, float]:
    """Of the mixture, and of the Gaussian with its mean and variance."""
    if not isinstance(predicted, Predictive):
        return {}
    both = {"mixture": predicted, "gaussian": predicted.matched()}
    return {f"log_likelihood_{name}": one.log_prob(y).mean().item() for name, one in both.items()}


def _scores_of_new_rows(predicted: Predicted, y: Rows, repeats: NDArray[np.bool_]) -> dict[str, float]:
    count, new = int(repeats.sum()), torch.from_numpy(~repeats)
    found = scores(predicted[new], torch.from_numpy(y)[new]) if 0 < count < len(y) else {}
    return {"repeats": count, **{f"{name}_new": value for name, value in found.items()}}


def _repeats(dataset: Dataset, split: Split) -> NDArray[np.bool_]:
    """Which test rows stand in the training rows, with the same target."""
    table = np.column_stack([dataset.X, dataset.y])
    known = {row.tobytes() for row in table[split.train]}
    return np.array([row.tobytes() in known for row in table[split.test]])


def _double(predicted: Predicted) -> Predicted:
    """Return the predictions in float64, so that scores add no rounding error."""
    if not isinstance(predicted, Predictive):
        return predicted.double()
    return Predictive(**{field.name: getattr(predicted, field.name).double() for field in fields(predicted)})


def _summary(method: Method, X: Rows) -> None:
    predicted = method.predict_distribution(X)
    _ = predicted.mean
    if isinstance(predicted, Predictive):
        _ = predicted.stddev


def _seconds(call: Callable[[], None], calls: int) -> list[float]:
    """Durations of some calls, fewer if they take long."""
    durations: list[float] = []
    while len(durations) < calls and sum(durations) < _TIMING_SECONDS:
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return durations


@contextmanager
def _progress(left: Sequence[Task], store: Store, jobs: int) -> Iterator[Callable[[Record], None]]:
    """A function to call with each record: it moves a bar on a terminal and else prints a line."""
    console = Console(stderr=True, width=None if os.isatty(2) else 200, highlight=False)
    clock = _Clock(left, store, jobs)
    if not console.is_terminal:
        yield lambda record: console.print(f"{clock.count(record)}, {_outcome(record)}", soft_wrap=True, markup=False)
        return
    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(clock.words(), total=len(left))

        def advance(record: Record) -> None:
            bar.update(task, advance=1, description=clock.count(record))
            if "error" in record:
                bar.console.print(_outcome(record), markup=False)

        yield advance


class _Clock:
    """Knows how long the rest will take, from the durations of like tasks.

    Args:
        left: The tasks to come.
        store: Records of earlier runs, whose durations count too.
        jobs: Processes.
    """

    def __init__(self, left: Sequence[Task], store: Store, jobs: int) -> None:
        self.left, self.jobs, self.total = {(t.method, t.dataset, t.split) for t in left}, jobs, len(left)
        self.durations: dict[tuple[str, ...], list[float]] = {}
        for record in store:
            self._note(record)

    def _note(self, record: Record) -> None:
        for like in ((record["method"], record["dataset"]), (record["method"],), ()):
            self.durations.setdefault(like, []).append(record["seconds"])

    def count(self, record: Record) -> str:
        """Take note of a finished task and say what is left."""
        self._note(record)
        self.left.discard((record["method"], record["dataset"], record["split"]))
        return self.words()

    def words(self) -> str:
        """Return the number of finished tasks and, after the first one, an estimate of the remaining time."""
        done = f"{self.total - len(self.left)} of {self.total} done"
        if not self.durations:
            return done
        return f"{done}, {_span(sum(self._expected(*task[:2]) for task in self.left) / self.jobs)} left"

    def _expected(self, method: str, dataset: str) -> float:
        likes = [like for like in ((method, dataset), (method,), ()) if like in self.durations]
        return statistics.mean(self.durations[likes[0]])


def _span(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def _outcome(record: dict[str, Any]) -> str:
    task = Task(record["method"], record["dataset"], record["split"])
    if "error" in record:
        return f"{task} failed: {record['error']}"
    shown = {"log_likelihood": "log-likelihood", "crps": "CRPS", "rmse": "RMSE"}
    found = [f"{words} {record[name]:.4g}" for name, words in shown.items() if record.get(name) is not None]
    return f"{task}: {', '.join(found)}, {record['seconds']:.1f} s"
