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

_state = threading.local()  # .busy: whether the thread runs a task; nested tasks then run sequentially


def run_all(tasks: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """Return the results of tasks in their order.

    The calling thread works, too. All callers share one pool with a thread for each core, so that nested or concurrent
    calls do not start more threads. After an exception no further task is started, and the exception is raised.

    Args:
        tasks: Functions without arguments that do not depend on each other.
        threads: Largest number of threads. With one, or inside a task, the tasks run sequentially in the calling
            thread.
    """
    threads = min(threads, len(tasks))
    if threads <= 1 or getattr(_state, "busy", False):
        return [task() for task in tasks]
    results: dict[int, Result] = {}
    waiting = iter(enumerate(tasks))
    lock = threading.Lock()
    stopped = False

    def work() -> None:
        nonlocal stopped
        _state.busy = True
        try:
            while True:
                with lock:
                    place, task = (None, None) if stopped else next(waiting, (None, None))
                if place is None or task is None:
                    return
                results[place] = task()
        except BaseException:
            stopped = True
            raise
        finally:
            _state.busy = False

    helpers = [_pool(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        for helper in started:
            helper.exception()  # waits for the end of the task
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
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="mpgelu")
