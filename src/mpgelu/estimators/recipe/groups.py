"""Groups of networks that are trained beside each other: on threads of this process, or on the workers of joblib.

A group is all networks of a kind. Fewer would have other last bits: the optimiser treats the ends of its arrays, which
are elsewhere in smaller stacks, with other instructions.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from mpgelu.estimators.recipe.checkpoint import Keeper
from mpgelu.estimators.recipe.folds import Folds, Rows
from mpgelu.estimators.recipe.loop import run
from mpgelu.estimators.recipe.steps import Steps, expected_loss
from mpgelu.likelihoods import Likelihood
from mpgelu.native.threads import job_count, one_thread_each, run_all, workers_elsewhere
from mpgelu.networks import Stack
from mpgelu.training import Interrupts, training_progress

if TYPE_CHECKING:
    from rich.progress import Progress

_ATTEMPTS = 3  # at the groups that are left, when a backend fails


@dataclass(frozen=True)
class Task:
    """What the training of a group needs beside the rows; another process can be given it.

    Args:
        title: Of the progress bar.
        stack: The networks, trained in place.
        likelihood: What their outputs mean.
        folds: Parts of the rows, of which each network leaves out one.
        steps: How many to take.
        effort: Share of them in those of the longest groups.
        batch_size: Rows in a step.
        learning_rate: Its peak.
        beta: Exponent of the weights of rows, see :func:`expected_loss`.
        seed: Seed of the folds and the order of the rows.
        device: Where the networks are trained; before and after they are on the CPU.
    """

    title: str
    stack: Stack
    likelihood: Likelihood
    folds: int
    steps: int
    effort: float
    batch_size: int
    learning_rate: float
    beta: float
    seed: int
    device: torch.device

    def trainer(self, rows: int) -> Steps:
        """Takes the steps of the networks, when there are so many rows."""
        trained = self.rows_left_out(rows).trained.shape[1]
        return Steps(self.stack, expected_loss(self.stack, self.likelihood, self.beta, trained))

    def rows_left_out(self, rows: int) -> Folds:
        """The folds of so many rows."""
        return Folds.of(rows, self.folds, self.seed)


@dataclass
class Group:
    """A task with its progress.

    Args:
        task: The task.
        trainer: Trainer of its networks.
        keeper: Keeps its state in a file.
        left_out: Steps that each network left out, ``(networks,)``; ``None`` while it is not trained.
    """

    task: Task
    trainer: Steps
    keeper: Keeper | None = None
    left_out: Tensor | None = None

    def train(self, rows: Rows, seconds: float, interrupts: Interrupts, bar: Progress) -> None:
        """Train in this process; see :func:`run`."""
        with self.on_device():
            self.left_out = run(
                self.trainer,
                self.task.rows_left_out(len(rows.y)).trained,
                rows.to(self.task.device),
                steps=self.task.steps,
                batch_size=self.task.batch_size,
                peak=self.task.learning_rate,
                seed=self.task.seed,
                seconds=seconds * self.task.effort,
                keeper=self.keeper,
                interrupts=interrupts,
                bar=bar,
                title=self.task.title,
            )

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The networks on the device where they are trained."""
        self.trainer.to(self.task.device)
        try:
            yield
        finally:
            self.trainer.to(torch.device("cpu"))

    def take(self, outcome: _Outcome) -> None:
        """Take over the state that a worker has trained, and keep it."""
        self.trainer.load(outcome.state, outcome.taken)
        self.left_out = outcome.left_out
        if self.keeper:
            self.keeper.write()


class _Outcome(NamedTuple):
    """What a worker gives back: the group's place, :meth:`Steps.state`, steps taken, and left out by each network."""

    place: int
    state: dict[str, Tensor]
    taken: int
    left_out: Tensor


@dataclass(frozen=True)
class Workers:
    """Where groups are trained.

    Args:
        count: How many groups at a time.
        backend: joblib's, whose workers are other processes; ``None`` for threads of this one.
    """

    count: int
    backend: Any = None

    @staticmethod
    def of(n_jobs: int | None) -> Workers:
        """The workers of ``joblib.parallel_config``, if it names a backend of processes, or else threads.

        Args:
            n_jobs: As in scikit-learn; ``None`` for what the configuration says, or else as many as there are.
        """
        elsewhere = workers_elsewhere()
        if elsewhere is None:
            return Workers(job_count(n_jobs))
        backend, configured = elsewhere
        wanted = next((n for n in (n_jobs, configured) if n is not None), -1)
        return Workers(joblib.effective_n_jobs(wanted), backend)

    def train(self, groups: list[Group], rows: Rows, seconds: float, interrupts: Interrupts, bar: Progress) -> None:
        """Train all groups.

        Ctrl-C ends them: on threads after the current step, on other workers at once, where groups that are not done
        stay untrained.

        Args:
            groups: Trained in place.
            rows: The data.
            seconds: Time for a group of effort one.
            interrupts: Notes Ctrl-C.
            bar: Shows how far they are; groups on other workers when they are done.

        Raises:
            KeyboardInterrupt: Ctrl-C came before any group was done.
        """
        if self.backend is None:
            run_all([partial(group.train, rows, seconds, interrupts, bar) for group in groups], self.count)
            return
        try:
            with interrupts.at_once():
                self._send(groups, rows, seconds, bar)
        except KeyboardInterrupt:
            if all(group.left_out is None for group in groups):
                raise

    def _send(self, groups: list[Group], rows: Rows, seconds: float, bar: Progress) -> None:
        """Have the groups trained, and take each over as soon as it comes back."""
        arrays = tuple(tensor.numpy() for tensor in (rows.X, rows.y, rows.weights))  # sent once, shared where possible
        shown = [bar.add_task(g.task.title, total=g.task.steps, completed=g.trainer.taken, loss=np.nan) for g in groups]
        for attempt in range(1, _ATTEMPTS + 1):
            left = [place for place, group in enumerate(groups) if group.left_out is None]
            left.sort(key=lambda place: -groups[place].task.effort)
            calls = [joblib.delayed(_trained)(place, *_sent(groups[place]), seconds, *arrays) for place in left]
            try:
                with closing(self._results(calls)) as outcomes:
                    for outcome in outcomes:
                        if isinstance(outcome, Exception):
                            raise _GroupError(outcome)
                        groups[outcome.place].take(outcome)
                        bar.update(shown[outcome.place], completed=groups[outcome.place].task.steps)
                return
            except _GroupError as error:
                raise error.cause from None
            except Exception as error:
                if attempt == _ATTEMPTS:
                    raise
                _warn_of_failure(error, sum(group.left_out is None for group in groups))

    def _results(self, calls: list[Any]) -> Generator[_Outcome | Exception, None, None]:
        """Results as they come, or all at the end from a backend that cannot do better, such as Ray's."""
        as_they_come = self.backend.supports_return_generator
        return_as = "generator_unordered" if as_they_come else "list"
        results = joblib.Parallel(self.count, return_as=return_as, batch_size=1, pre_dispatch="all")(calls)
        try:
            for result in results:  # noqa: UP028  # which would close them first
                yield result
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*cancelled")  # what is left is not wanted any more
                if as_they_come:
                    results.close()


class _GroupError(Exception):
    """An error in a group, as opposed to one of the backend."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _warn_of_failure(error: Exception, left: int) -> None:
    warnings.warn(
        f"fit: the joblib backend failed ({type(error).__name__}: {error}); the {left} kinds of networks that are not "
        "done are sent again",
        RuntimeWarning,
        stacklevel=7,
    )


def _sent(group: Group) -> tuple[Task, dict[str, Tensor], int]:
    """A group for a worker; the state of the optimiser only if it has one."""
    taken = group.trainer.taken
    return group.task, group.trainer.state() if taken else {}, taken


def _trained(
    place: int, task: Task, state: dict[str, Tensor], taken: int, seconds: float, *arrays: NDArray[np.float32]
) -> _Outcome | Exception:
    """Train a group in a worker. Its own error is a result: what a backend raises is then the backend's."""
    try:
        rows = Rows(*map(_tensor, arrays))
        group = Group(task, task.trainer(len(rows.y)))
        if taken:
            group.trainer.load(state, taken)
        with one_thread_all(), Interrupts() as interrupts, training_progress(False) as bar:
            group.train(rows, seconds, interrupts, bar)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        return error
    assert group.left_out is not None
    return _Outcome(place, group.trainer.state(), group.trainer.taken, group.left_out)


def _tensor(array: NDArray[np.float32]) -> Tensor:
    """The array itself, which backends may map from a file that is not to be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        return torch.from_numpy(array)


@contextmanager
def one_thread_all() -> Iterator[None]:
    """As :func:`one_thread_each`, and for the linear algebra of numpy too."""
    with one_thread_each(), threadpool_limits(1, "blas"):
        yield
