"""Parallel training of the kinds of networks, on threads of this process or on the workers of joblib.

A group is all networks of a kind. Idle threads help with the networks of another group where a kernel takes the steps
of each network. Other groups are not divided, because results would then depend on the number of workers in their last
bits: the fused optimiser treats the ends of its arrays with other instructions, and these ends are at other places in
smaller stacks.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
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

from mpgelu.estimators.recipe.folds import Rows
from mpgelu.estimators.recipe.loop import Group, Task
from mpgelu.native.threads import job_count, one_thread_each, run_all, workers_elsewhere
from mpgelu.training import Interrupts, training_progress

if TYPE_CHECKING:
    from rich.progress import Progress

_ATTEMPTS = 3  # number of times that unfinished groups are sent to a failing backend


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

    def load_into(self, group: Group) -> None:
        """Finish the training of a group in this process with the result."""
        group.trainer.load(self.state, self.taken)
        group.trainer.left_out = self.left_out
        group.finish()


@dataclass(frozen=True)
class Workers:
    """The workers that train groups.

    Args:
        count: Number of groups that are trained at the same time.
        backend: Backend of joblib, whose workers are other processes; ``None`` for threads of this process.
    """

    count: int
    backend: Any = None

    @property
    def threads(self) -> int:
        """Number of threads of this process."""
        return self.count if self.backend is None else 1

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

    def train(
        self,
        groups: list[Group],
        rows: Rows,
        seconds: float,
        interrupts: Interrupts,
        bar: Progress,
        first: Callable[[], object],
    ) -> None:
        """Train all groups, and do something else that does not depend on them.

        After Ctrl-C threads stop at the end of the current step. Other workers are stopped at once, and their
        unfinished groups stay untrained.

        Args:
            groups: The groups, which are trained in place.
            rows: The data.
            seconds: Time for a group of effort one.
            interrupts: State of Ctrl-C.
            bar: Progress bar; it shows groups on other workers when they are finished.
            first: The first task, done by one of the threads, or by this process before it sends groups to workers.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed before any group was finished.
        """
        if self.backend is None:
            tasks: list[Callable[[], object]] = [first]
            tasks += [partial(group.train, rows, seconds, interrupts, bar) for group in groups]
            run_all(tasks, self.count)
            return
        first()
        try:
            with interrupts.at_once():
                self._send(groups, rows, seconds, bar)
        except KeyboardInterrupt:
            if not any(group.is_trained for group in groups):
                raise

    def _send(self, groups: list[Group], rows: Rows, seconds: float, bar: Progress) -> None:
        """Train groups on other processes, and load the result of each when it is finished.

        Errors of a group are raised at once. After an error of the backend, unfinished groups are sent again, at most
        three times in all.
        """
        arrays = tuple(tensor.numpy() for tensor in (rows.X, rows.y, rows.weights))  # joblib shares memory if it can
        shown = [bar.add_task(g.task.title, total=g.task.steps, completed=g.trainer.taken, loss=np.nan) for g in groups]
        for attempt in range(1, _ATTEMPTS + 1):
            left = [place for place, group in enumerate(groups) if not group.is_trained]
            left.sort(key=lambda place: -groups[place].task.effort)
            calls = [joblib.delayed(_trained)(place, *_sent(groups[place]), seconds, *arrays) for place in left]
            try:
                with closing(self._results(calls)) as outcomes:
                    for outcome in outcomes:
                        if isinstance(outcome, Exception):
                            raise _GroupError(outcome)
                        outcome.load_into(groups[outcome.place])
                        bar.update(shown[outcome.place], completed=groups[outcome.place].task.steps)
                return
            except _GroupError as error:
                raise error.cause from None
            except Exception as error:
                if attempt == _ATTEMPTS:
                    raise
                _warn_of_failure(error, sum(not group.is_trained for group in groups))

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
    return _Outcome(place, group.trainer.state(), group.trainer.taken, group.trainer.left_out)


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
