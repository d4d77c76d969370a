"""Parallel training of the kinds of networks, on threads of this process or on the workers of joblib.

A group is all networks of a kind. Groups are not divided further, because results would then depend on the number of
workers in their last bits: the fused optimiser treats the ends of its arrays with other instructions, and these ends
are at other places in smaller stacks.
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

_ATTEMPTS = 3  # number of times that unfinished groups are sent to a failing backend


@dataclass(frozen=True)
class Task:
    """The training of a group, without its rows; it can be sent to another process.

    Args:
        title: Title of the progress bar.
        stack: The networks, which are trained in place.
        likelihood: Likelihood of their outputs.
        folds: Number of folds, one of which is held out from each network.
        steps: Number of optimiser steps.
        effort: Number of steps relative to that of the longest groups.
        batch_size: Number of rows in a step.
        learning_rate: Largest learning rate of the schedule.
        beta: Exponent of the weights of rows, see :func:`expected_loss`.
        seed: Seed of the folds and of the order of the rows.
        device: Device on which the networks are trained; before and after, they are on the CPU.
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
        """Return the optimiser of the networks for a number of rows."""
        trained = self.rows_left_out(rows).trained.shape[1]
        return Steps(self.stack, expected_loss(self.stack, self.likelihood, self.beta, trained))

    def rows_left_out(self, rows: int) -> Folds:
        """Return the folds for a number of rows."""
        return Folds.of(rows, self.folds, self.seed)


@dataclass
class Group:
    """A task with the state of its training.

    Args:
        task: The task.
        trainer: Optimiser of its networks.
        keeper: Writes checkpoints; ``None`` without them.
        left_out: Number of steps that each network skipped because its loss was not finite, ``(networks,)``; ``None``
            before the training has ended.
    """

    task: Task
    trainer: Steps
    keeper: Keeper | None = None
    left_out: Tensor | None = None

    def train(self, rows: Rows, seconds: float, interrupts: Interrupts, bar: Progress) -> None:
        """Train the group in this process.

        Args:
            rows: The data.
            seconds: Time for a group of effort one.
            interrupts: Ends the training after Ctrl-C.
            bar: Progress bar.
        """
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
        """Keep the networks on the device of the task within the context."""
        self.trainer.to(self.task.device)
        try:
            yield
        finally:
            self.trainer.to(torch.device("cpu"))

    def take(self, outcome: _Outcome) -> None:
        """Load the result of a worker, and write a checkpoint."""
        self.trainer.load(outcome.state, outcome.taken)
        self.left_out = outcome.left_out
        if self.keeper:
            self.keeper.write()


class _Outcome(NamedTuple):
    """The result of a worker.

    Attributes:
        place: Position of the group in the list of groups.
        state: State of networks and optimiser, :meth:`Steps.state`.
        taken: Number of steps.
        left_out: Number of steps that each network skipped, ``(networks,)``.
    """

    place: int
    state: dict[str, Tensor]
    taken: int
    left_out: Tensor


@dataclass(frozen=True)
class Workers:
    """The workers that train groups.

    Args:
        count: Number of groups that are trained at the same time.
        backend: Backend of joblib, whose workers are other processes; ``None`` for threads of this process.
    """

    count: int
    backend: Any = None

    @staticmethod
    def of(n_jobs: int | None) -> Workers:
        """Return the workers of ``joblib.parallel_config``, if it names a backend of processes, otherwise threads.

        Args:
            n_jobs: Number of workers as in scikit-learn; ``None`` for that of the configuration, or else all.
        """
        elsewhere = workers_elsewhere()
        if elsewhere is None:
            return Workers(job_count(n_jobs))
        backend, configured = elsewhere
        wanted = next((n for n in (n_jobs, configured) if n is not None), -1)
        return Workers(joblib.effective_n_jobs(wanted), backend)

    def train(self, groups: list[Group], rows: Rows, seconds: float, interrupts: Interrupts, bar: Progress) -> None:
        """Train all groups.

        After Ctrl-C threads stop at the end of the current step. Other workers are stopped at once, and their
        unfinished groups stay untrained.

        Args:
            groups: The groups, which are trained in place.
            rows: The data.
            seconds: Time for a group of effort one.
            interrupts: State of Ctrl-C.
            bar: Progress bar; it shows groups on other workers when they are finished.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed before any group was finished.
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
        """Train groups on other processes, and load the result of each when it is finished.

        Errors of a group are raised at once. After an error of the backend, unfinished groups are sent again, at most
        three times in all.
        """
        arrays = tuple(tensor.numpy() for tensor in (rows.X, rows.y, rows.weights))  # joblib shares memory if it can
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
        """Yield results when they are finished, or all at the end if the backend, such as Ray's, requires it."""
        as_they_come = self.backend.supports_return_generator
        return_as = "generator_unordered" if as_they_come else "list"
        results = joblib.Parallel(self.count, return_as=return_as, batch_size=1, pre_dispatch="all")(calls)
        try:
            for result in results:  # noqa: UP028  # which would close them first
                yield result
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*cancelled")  # unfinished calls are cancelled on purpose
                if as_they_come:
                    results.close()


class _GroupError(Exception):
    """An error in the training of a group, as opposed to an error of the backend."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _warn_of_failure(error: Exception, left: int) -> None:
    """Warn about an error of the backend, at the line that called ``fit``."""
    warnings.warn(
        f"fit: the joblib backend failed ({type(error).__name__}: {error}); the {left} kinds of networks that are not "
        "done are sent again",
        RuntimeWarning,
        stacklevel=7,
    )


def _sent(group: Group) -> tuple[Task, dict[str, Tensor], int]:
    """Return task, state and number of steps of a group for a worker; the state is empty before the first step."""
    taken = group.trainer.taken
    return group.task, group.trainer.state() if taken else {}, taken


def _trained(
    place: int, task: Task, state: dict[str, Tensor], taken: int, seconds: float, *arrays: NDArray[np.float32]
) -> _Outcome | Exception:
    """Train a group in a worker process.

    Args:
        place: Position of the group in the list of groups.
        task: The task.
        state: State to continue from, empty before the first step.
        taken: Number of steps of that state.
        seconds: Time for a group of effort one.
        *arrays: Features, targets and weights of the rows.

    Returns:
        The outcome, or an error of the training. Errors are returned instead of raised, so that all exceptions that
        joblib raises are errors of the backend.
    """
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
    """Return a tensor that shares the memory of an array, which may be a read-only file in memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        return torch.from_numpy(array)


@contextmanager
def one_thread_all() -> Iterator[None]:
    """Return a context of one thread for torch (:func:`one_thread_each`) and for the linear algebra of numpy."""
    with one_thread_each(), threadpool_limits(1, "blas"):
        yield
