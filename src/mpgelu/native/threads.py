"""Parallel execution of independent tasks on threads; torch and the kernels release the lock of the interpreter."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_state = threading.local()  # .team: the threads to which the task that this thread runs belongs


class _Process:
    """The threads of all outermost calls of a process.

    Attributes:
        working: Number of threads that work.
        lock: Lock of this number, and of those of the teams.
    """

    def __init__(self) -> None:
        self.working, self.lock = 0, threading.Lock()


class _Team:
    """The threads of an outermost call, which help each other.

    Args:
        threads: Number of threads, of which the calling one works.
        process: The threads of all calls. Where these are as many as cores, no other one starts to work, unless a call
            alone wants more.
    """

    def __init__(self, threads: int, process: _Process) -> None:
        self.idle, self._most, self._process = threads, max(threads, os.cpu_count() or 1), process

    def take_one(self) -> bool:
        """Return whether a thread is idle and may work, and let it work."""
        with self._process.lock:
            found = self.idle > 0 and self._process.working < self._most
            self.idle -= found
            self._process.working += found
            return found

    @property
    def is_crowded(self) -> bool:
        """Whether more threads work than should, because other calls began since."""
        return self._process.working > self._most

    def give(self, count: int) -> None:
        """Let threads that worked be idle, or with a negative number the reverse."""
        with self._process.lock:
            self.idle += count
            self._process.working -= count


_processes: dict[int, _Process] = {}  # by the id of the process, because a forked one begins with no working thread


def run_all(tasks: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """Return the results of tasks in their order.

    The calling thread works, too. Inside a task, further tasks are shared with threads of the outermost call that have
    none. All callers share one pool with a thread for each core, of which only as many work as there are cores that
    calling threads leave; one that helps ends at its next task if other calls began. After an exception no further task
    is started, and the exception is raised.

    Args:
        tasks: Functions without arguments that do not depend on each other.
        threads: Largest number of threads; with one, the tasks run sequentially in the calling thread.
    """
    team = getattr(_state, "team", None)
    if team is not None:
        return _run_all(tasks, min(threads, team.idle + 1), team)
    _state.team = team = _Team(threads, _processes.setdefault(os.getpid(), _Process()))
    team.give(-1)  # the calling thread works whatever others do
    try:
        return _run_all(tasks, threads, team)
    finally:
        team.give(1)
        _state.team = None


def share(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of tasks as :func:`run_all` does inside a task; outside, they run sequentially."""
    return run_all(tasks, len(tasks) if getattr(_state, "team", None) else 1)


def _run_all(tasks: Sequence[Callable[[], Result]], threads: int, team: _Team) -> list[Result]:
    """Return the results of tasks that the threads of a team work at."""
    threads = min(threads, len(tasks))
    if threads <= 1:
        return [task() for task in tasks]
    results: dict[int, Result] = {}
    waiting = iter(enumerate(tasks))
    lock = threading.Lock()
    stopped = False

    def work(helping: bool = False) -> None:
        nonlocal stopped
        try:
            while not (helping and team.is_crowded):
                with lock:
                    place, task = (None, None) if stopped else next(waiting, (None, None))
                if place is None or task is None:
                    return
                results[place] = task()
        except BaseException:
            stopped = True
            raise

    def help_out() -> None:
        if not team.take_one():
            return
        _state.team = team
        try:
            work(helping=True)
        finally:
            _state.team = None
            team.give(1)

    helpers = [_pool(os.getpid()).submit(help_out) for _ in range(threads - 1)]
    try:
        work()
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        team.give(1)  # while this thread waits, another one may work in its place
        for helper in started:
            helper.exception()  # waits for the end of the task
        team.give(-1)
    for helper in started:
        helper.result()
    return [results[place] for place in range(len(tasks))]


def spans(count: int, parts: int) -> list[slice]:
    """Return slices that divide ``count`` items into at most ``parts`` consecutive parts of almost equal size."""
    parts = max(1, min(parts, count))
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def job_count(n_jobs: int | None) -> int:
    """Return the number of threads of this process that an estimator may use.

    Args:
        n_jobs: Number of jobs as in scikit-learn, within the limits of joblib for nested parallelism. ``None`` for the
            number of threads of torch, which ``OMP_NUM_THREADS`` and ``torch.set_num_threads`` limit.
    """
    from joblib import effective_n_jobs, parallel_config

    if workers_elsewhere() is not None:
        with parallel_config("threading"):
            return job_count(n_jobs)
    found: int = effective_n_jobs(-1 if n_jobs is None else n_jobs)
    return min(found, torch.get_num_threads()) if n_jobs is None else found


def workers_elsewhere() -> tuple[Any, int | None] | None:
    """Return the backend of ``joblib.parallel_config`` and its number of jobs, or ``None`` for a backend of threads."""
    from joblib.parallel import get_active_backend

    backend, n_jobs = get_active_backend(prefer="threads")
    return None if getattr(backend, "supports_sharedmem", False) else (backend, n_jobs)


_limits = threading.Lock()
_limited = 0
_threads_before = 1


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Return a context in which every operation of torch runs on one thread.

    Sums then do not depend on the number of cores. The setting applies to the process: the first of several concurrent
    contexts makes it, and the last one restores the previous number of threads.
    """
    global _limited, _threads_before
    with _limits:
        if not _limited:
            _threads_before = torch.get_num_threads()
        _limited += 1
        if torch.get_num_threads() != 1:  # setting it takes long beside a prediction of one row
            torch.set_num_threads(1)
    try:
        yield
    finally:
        with _limits:
            _limited -= 1
            if not _limited and torch.get_num_threads() != _threads_before:
                torch.set_num_threads(_threads_before)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process, by its id, because a forked process does not have the threads of its parent."""
    return ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="mpgelu")
