"""Independent tasks on threads: results in order, errors, nesting, forks, limits, and the same bits for any number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import joblib
import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu.native import threads
from mpgelu.native.threads import job_count, one_thread_each, run_all, share, spans


def test_results_come_in_order_from_several_threads() -> None:
    both = threading.Barrier(2, timeout=10)  # passed only by two tasks at the same time

    def task(number: int) -> int:
        if number < 2:
            both.wait()
        return number

    assert run_all([partial(task, number) for number in range(7)], threads=2) == list(range(7))


def test_an_error_ends_the_work_and_is_raised() -> None:
    seen = []

    def task(number: int) -> None:
        seen.append(number)
        if number == 1:
            raise ValueError("of task 1")
        time.sleep(0.01)

    for count in (1, 2):
        seen.clear()
        with pytest.raises(ValueError, match="of task 1"):
            run_all([partial(task, number) for number in range(50)], count)
        assert len(seen) < 10
    assert run_all([lambda: 3, lambda: 4], 2) == [3, 4]  # the pool is still good


def test_a_thread_without_a_task_helps_with_tasks_inside_a_task() -> None:
    both = threading.Barrier(2, timeout=10)  # passed only by two tasks at the same time

    def inner() -> int:
        return both.wait()

    def outer() -> list[int]:
        while not threads._state.team.idle:
            time.sleep(0.001)
        return run_all([inner] * 2, threads=2)

    for first in (0, 1):  # the thread that is idle is a helper, or the calling one, which waits
        tasks: list[Callable[[], list[int]]] = [list, outer]
        found = run_all([tasks[first], tasks[1 - first]], threads=2)
        assert sorted(found[1 - first]) == [0, 1]
    (alone,) = run_all([lambda: share([inner] * 2)], threads=2)
    assert sorted(alone) == [0, 1]


def test_tasks_inside_tasks_take_no_more_threads_than_the_outermost_call() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def inner() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    def outer(count: int) -> None:
        run_all([inner] * count, threads=5)

    run_all([partial(outer, count) for count in (1, 2, 30, 7)], threads=2)
    assert most == 2
    run_all([lambda: share([inner] * 4)], threads=1)
    most = 0
    share([inner] * 4)  # outside of a task
    assert most == 1


def test_several_calls_at_once_take_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling threads always work; others join only while there are fewer of them than cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    lock, running, seen, begun = threading.Lock(), 0, list[int](), threading.Barrier(3, timeout=10)

    def task() -> None:
        nonlocal running
        with lock:
            running += 1
            seen.append(running)
        time.sleep(0.002)
        with lock:
            running -= 1

    def call() -> None:
        begun.wait()
        run_all([task] * 20, threads=2)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert max(seen[20:]) <= 3  # one that helped before the others called has ended
    assert threads._processes[os.getpid()].working == 0
    seen.clear()
    run_all([task] * 40, threads=2)
    assert max(seen) == 2


def test_several_threads_predict_and_fit_at_once() -> None:
    random = np.random.default_rng(0)
    X, new = random.normal(size=(80, 3)), random.normal(size=(3_000, 3))

    def fitted() -> mp.MPGELURegressor:
        return mp.MPGELURegressor((8,), steps=10, folds=2, random_state=0, n_jobs=2).fit(X, X[:, 0])

    model = fitted()
    wanted = model.predict_interval(new)
    found = joblib.Parallel(3, "threading")(
        joblib.delayed(call)() for call in [partial(model.predict_interval, new), fitted] * 3
    )
    for intervals in found[::2]:
        np.testing.assert_array_equal(intervals, wanted)
    for other in found[1::2]:
        np.testing.assert_array_equal(other.predict(new), model.predict(new))


def test_an_error_inside_a_task_leaves_the_threads_usable() -> None:
    def fail() -> None:
        raise ValueError("inside")

    def outer() -> None:
        share([fail, time.time, fail])

    for _ in range(5):
        with pytest.raises(ValueError, match="inside"):
            run_all([outer, outer, outer], threads=2)
    test_a_thread_without_a_task_helps_with_tasks_inside_a_task()


def test_a_forked_process_has_a_pool_of_its_own() -> None:
    code = (
        "import os\nfrom mpgelu.native.threads import run_all\n"
        "run_all([int] * 4, 2)\nchild = os.fork()\nfound = run_all([int] * 4, 2)\n"
        "if child:\n    os.waitpid(child, 0)\nprint(found, flush=True)\nos._exit(0)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown == "[0, 0, 0, 0]\n" * 2


def test_a_forked_process_fits_and_predicts() -> None:
    code = (
        "import os, numpy as np, mpgelu\nX = np.random.default_rng(0).normal(size=(600, 3))\n"
        "def run():\n    model = mpgelu.MPGELURegressor((4,), steps=5, folds=2, random_state=0, n_jobs=2)\n"
        "    return model.fit(X, X[:, 0]).predict(X).sum().item()\n"
        "run()\nchild = os.fork()\nfound = run()\n"
        "if child:\n    os.waitpid(child, 0)\nprint(found, flush=True)\nos._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    ours, theirs = ran.stdout.split()
    assert ours == theirs


@pytest.mark.parametrize(("count", "parts"), [(1, 4), (7, 3), (6, 1), (5, 0), (8, 8)])
def test_spans_cover_everything_once(count: int, parts: int) -> None:
    found = spans(count, parts)
    assert [i for part in found for i in range(count)[part]] == list(range(count))
    assert len(found) <= max(1, parts)


def test_number_of_jobs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert job_count(None) == 1
    finally:
        torch.set_num_threads(before)
    assert job_count(3) == 3
    assert job_count(-1) == os.cpu_count() or job_count(-1) == joblib.cpu_count()
    assert _in_two_threads(partial(_in_two_threads, partial(job_count, -1))) == [
        [1, 1],
        [1, 1],
    ]  # no third level


def _in_two_threads(function: Callable[[], object]) -> object:
    return joblib.Parallel(n_jobs=2, backend="threading")(joblib.delayed(function)() for _ in range(2))


def test_torch_has_its_threads_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread_each():
            assert torch.get_num_threads() == 1
            with one_thread_each():
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_bits_of_an_estimator_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpgelu.estimators.ensemble._ROWS_AT_ONCE", 16)  # several chunks
    random = np.random.default_rng(0)
    X = random.normal(size=(60, 3))
    y = X[:, 0] ** 2 + 0.1 * random.normal(size=60)
    one, two = (mp.MPGELURegressor((16,), steps=12, random_state=0, n_jobs=jobs).fit(X, y) for jobs in (1, 2))
    for ours, theirs in zip(one.ensemble_.state_dict().values(), two.ensemble_.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert np.array_equal(one.predict(X, return_std=True), two.predict(X, return_std=True))
    assert np.array_equal(one.predict_interval(X), two.predict_interval(X))


def test_bits_of_a_stack_do_not_depend_on_the_number_of_threads() -> None:
    stack, x = mp.Stack([mp.network(3, (20, 20), rate=0.1) for _ in range(5)]), torch.randn(5, 300, 3)

    def result(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        stack.zero_grad()
        after = stack(mp.FactoredMoments.certain(x))
        (after.mean.sin().sum() + after.covariance.sum()).backward()
        return [
            after.mean.detach(),
            after.covariance.detach(),
            *(p.grad for p in stack.parameters() if p.grad is not None),
        ]

    before = torch.get_num_threads()
    try:
        for one, two in zip(result(1), result(2), strict=True):
            assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)
