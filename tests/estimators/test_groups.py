"""Groups of networks on threads, and on the workers of joblib: loky, Dask and Ray."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from joblib.externals.loky import reusable_executor
from torch import Tensor

import mpgelu as mp
from mpgelu.errors import TrainingError
from mpgelu.estimators.recipe import (
    InterruptedWarning,
    Kind,
    Rows,
    Settings,
    Trained,
    default_network,
    train,
    training,
)
from mpgelu.estimators.recipe.groups import Workers
from mpgelu.estimators.recipe.loop import Group
from mpgelu.estimators.recipe.steps import Steps
from mpgelu.native.threads import job_count
from mpgelu.training import Interrupts, RecoveryWarning

SETTINGS = Settings(
    kinds=(Kind((6,), effort=0.05), Kind((6,), sigma=0.2), Kind((6,), rate=0.1, effort=0.05)),
    process=False,
    folds=3,
    steps=100,
    batch_size=16,
    learning_rate=0.01,
    beta=0.5,
    noise="homoscedastic",
    network=lambda features, kind, outputs: default_network(features, kind, outputs),  # not sent: cannot be pickled
    likelihood=None,
    moments=mp.DiagonalMoments,
    time_limit=None,
    seed=0,
    device=torch.device("cpu"),
)
LONG = replace(SETTINGS, steps=3000)


def data(rows: int = 80) -> Rows:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, 3, generator=generator)
    y = torch.sin(2 * X[:, 0]) + 0.3 * torch.randn(rows, generator=generator)
    return Rows(X, y, torch.ones(rows))


def arrays(trained: Trained) -> list[Tensor]:
    found = [tensor for stack in trained.stacks for tensor in (*stack.parameters(), *stack.buffers())]
    assert trained.noise is not None
    return [*found, *trained.noise.state_dict().values(), trained.weights]


def same(a: Trained, b: Trained) -> None:
    assert [member.name for member in a.members] == [member.name for member in b.members]
    for ours, theirs in zip(arrays(a), arrays(b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.fixture(scope="module")
def here() -> Trained:
    """The fit in this process."""
    return train(data(), SETTINGS)


@pytest.fixture(scope="module")
def long_here() -> Trained:
    return train(data(), LONG)


def checked_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to train anything in this process."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("trained in this process")

    monkeypatch.setattr(Group, "train", refused)


# the same bits wherever


def test_without_a_backend_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, here: Trained) -> None:
    monkeypatch.setattr(joblib, "Parallel", None)
    same(train(data(), SETTINGS, n_jobs=2), here)
    with joblib.parallel_config("threading"):
        same(train(data(), SETTINGS, n_jobs=2), here)


def test_loky_trains_in_the_same_bits(monkeypatch: pytest.MonkeyPatch, here: Trained) -> None:
    checked_backend(monkeypatch)
    with joblib.parallel_config("loky", n_jobs=2, max_nbytes=100):  # also maps the rows from a file, read only
        same(train(data(), SETTINGS, n_jobs=None), here)


def test_dask_trains_in_the_same_bits(monkeypatch: pytest.MonkeyPatch, here: Trained, dask_client: Any) -> None:
    checked_backend(monkeypatch)
    with joblib.parallel_config("dask"):
        same(train(data(), SETTINGS), here)
        assert Workers.of(None).count == 2


def test_ray_trains_in_the_same_bits(monkeypatch: pytest.MonkeyPatch, here: Trained, ray_cluster: Any) -> None:
    from ray.util.joblib import register_ray

    register_ray()
    checked_backend(monkeypatch)
    with joblib.parallel_config("ray"):
        same(train(data(), SETTINGS, n_jobs=None), here)


def test_a_warm_start_and_a_checkpoint_go_on_in_workers(tmp_path: Path, dask_client: Any, here: Trained) -> None:
    expected = train(data(), SETTINGS, start=here)
    with joblib.parallel_config("dask"):
        same(train(data(), SETTINGS, start=here, checkpoint=tmp_path), expected)
        assert len(list(tmp_path.glob("training-*"))) == 3
        same(train(data(), SETTINGS, start=here, checkpoint=tmp_path), expected)  # all steps have been taken


def test_a_half_trained_group_goes_on_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Trained, dask_client: Any
) -> None:
    take_steps = Steps.take

    def interrupted(self: Steps, *batches: Any) -> Tensor:
        if self.taken == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return take_steps(self, *batches)

    monkeypatch.setattr(Steps, "take", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.warns(InterruptedWarning, match="of 100 steps"):
            train(data(), SETTINGS, checkpoint=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with joblib.parallel_config("dask"):
        same(train(data(), SETTINGS, checkpoint=tmp_path), here)


# what goes wrong


def killed_mid_fit(folder: Path, kill: Callable[[], None]) -> threading.Thread:
    """Kill a worker as soon as the first group is done."""

    def work() -> None:
        while not list(folder.glob("training-*")):
            time.sleep(0.01)
        kill()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def taken_groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the groups that workers brought back."""
    titles, finish = list[str](), Group.finish

    def noted(self: Group) -> None:
        titles.append(self.task.title)
        finish(self)

    monkeypatch.setattr(Group, "finish", noted)
    return titles


def test_killing_a_dask_worker_loses_no_finished_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_here: Trained, dask_client: Any
) -> None:
    titles, killed = taken_groups(monkeypatch), list[int]()
    processes = dask_client.run(os.getpid)

    def kill() -> None:
        busy = [worker for worker, tasks in dask_client.processing().items() if tasks]
        killed.append(processes[busy[0]])
        os.kill(processes[busy[0]], signal.SIGKILL)

    with joblib.parallel_config("dask"):
        thread = killed_mid_fit(tmp_path, kill)
        trained = train(data(), LONG, checkpoint=tmp_path)
        thread.join()
    assert killed
    same(trained, long_here)
    assert sorted(titles) == [f"{n} of 3: {kind}" for n, kind in enumerate(map(str, LONG.kinds), 1)]  # each once


def test_killing_a_loky_worker_loses_no_finished_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_here: Trained
) -> None:
    titles = taken_groups(monkeypatch)

    def kill() -> None:
        for process in list(reusable_executor._executor._processes):
            os.kill(process, signal.SIGKILL)

    thread = killed_mid_fit(tmp_path, kill)
    with joblib.parallel_config("loky", n_jobs=2), pytest.warns(RuntimeWarning, match="not done are sent again"):
        trained = train(data(), LONG, checkpoint=tmp_path, n_jobs=None)
    thread.join()
    same(trained, long_here)
    assert len(titles) == len(set(titles)) == 3


def test_ray_starts_a_killed_worker_again(tmp_path: Path, long_here: Trained, ray_cluster: Any) -> None:
    from ray.util.joblib import register_ray

    register_ray()
    psutil = pytest.importorskip("psutil")
    lives_on = {"max_restarts": 3, "max_task_retries": 3}

    def kill() -> None:
        workers = list[Any]()
        while not workers:
            time.sleep(0.01)
            ours = psutil.Process().children(recursive=True)
            workers = [process for process in ours if "PoolActor.run_batch" in " ".join(process.cmdline())]
        workers[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with joblib.parallel_config("ray", ray_remote_args=lives_on):
        trained = train(data(), LONG, checkpoint=tmp_path, n_jobs=None)
    thread.join()
    same(trained, long_here)


def test_a_backend_that_keeps_failing_raises_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no worker")

    monkeypatch.setattr(Workers, "_results", broken)
    with (
        joblib.parallel_config("loky", n_jobs=2),
        pytest.warns(RuntimeWarning, match="OSError: no worker"),
        pytest.raises(OSError, match="no worker"),
    ):
        train(data(), SETTINGS, n_jobs=None)


def test_errors_and_warnings_of_workers_are_those_of_the_fit() -> None:
    rows = data()
    absurd = torch.arange(80) % 16 == 0
    with joblib.parallel_config("loky", n_jobs=2):
        with pytest.raises(TrainingError, match="not finite in 100% of the steps") as raised:
            train(Rows(rows.X, torch.full_like(rows.y, 1e30), rows.weights), SETTINGS, n_jobs=None)
        assert "loop.py" in raised.value.__notes__[0]
        settings = replace(SETTINGS, kinds=SETTINGS.kinds[1:2], batch_size=4)
        with pytest.warns(RecoveryWarning, match="left out"):
            train(Rows(rows.X, torch.where(absurd, 1e30, rows.y), rows.weights), settings, n_jobs=None)


def test_ctrl_c_keeps_the_groups_that_workers_have_finished(monkeypatch: pytest.MonkeyPatch, here: Trained) -> None:
    results = Workers._results

    def interrupted(self: Workers, calls: list[Any]) -> Any:
        for outcome in results(self, calls):
            yield outcome
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

    monkeypatch.setattr(Workers, "_results", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            joblib.parallel_config("loky", n_jobs=2),
            pytest.warns(InterruptedWarning, match="after 1 of 3 kinds of networks"),
        ):
            trained = train(data(), SETTINGS, n_jobs=None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(trained.members) == 1
    assert trained.members[0].name in {member.name for member in here.members}


def test_ctrl_c_before_any_group_is_done_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(Workers, "_results", waiting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with joblib.parallel_config("loky", n_jobs=2), pytest.raises(KeyboardInterrupt):
            train(data(), SETTINGS, n_jobs=None)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_time_limit_is_shared_out_among_workers() -> None:
    with joblib.parallel_config("loky", n_jobs=2):
        trained = train(data(), replace(SETTINGS, steps=10**6, time_limit=3.0), n_jobs=None)
    assert 1 <= trained.steps < 10**6


# the number of workers, and warm starts


@pytest.mark.parametrize(("n_jobs", "expected"), [(None, 2), (3, 3)])
def test_the_estimators_number_of_jobs_goes_before_the_configurations(n_jobs: int | None, expected: int) -> None:
    with joblib.parallel_config("loky", n_jobs=2):
        assert Workers.of(n_jobs).count == expected
    assert Workers.of(3).backend is None


def test_predictions_count_threads_of_this_process(monkeypatch: pytest.MonkeyPatch, dask_client: Any) -> None:
    with joblib.parallel_config("dask"):
        assert job_count(7) == 7


def test_a_warm_start_takes_a_kind_that_was_left_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "mean_weights", lambda *_: np.array([0.01, 0.49, 0.5]))
    first = train(data(), SETTINGS)
    names = [str(kind) for kind in SETTINGS.kinds[1:]]
    assert [member.name for member in first.members] == names
    monkeypatch.setattr(training, "mean_weights", lambda *_: np.array([0.4, 0.3, 0.3]))
    again = train(data(), SETTINGS, start=first)
    assert [member.name for member in again.members] == [str(kind) for kind in SETTINGS.kinds]
    same_first = train(data(), SETTINGS)
    for ours, theirs in zip(again.members[0].stack.parameters(), same_first.members[0].stack.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_interrupt_at_once_is_noted_and_raised() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            with pytest.raises(KeyboardInterrupt), interrupts.at_once():
                os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.seen
    finally:
        signal.signal(signal.SIGINT, before)
