"""Running methods on splits: the scores, what is recorded, resuming, failures and Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joblib.externals.loky import get_reusable_executor
from rich.console import Console
from scipy import integrate, stats

from made_up import SPLITS, TESTED, publish
from mpgelu.predictive import Predictive
from mpgelu.research.compare import neural_peers
from mpgelu.research.compare import run as runs
from mpgelu.research.compare.interface import Method, Rows
from mpgelu.research.compare.methods import METHODS, Recipe
from mpgelu.research.compare.predicted import Points, Predicted, Quantiles
from mpgelu.research.compare.run import Task, evaluate, run, tasks
from mpgelu.research.datasets import Dataset, Split, load_uci
from mpgelu.training import Interrupts


class StandIn:
    """Predicts the first feature, with a standard deviation of two; or does what it is told when it is fitted."""

    def __init__(self, during_fit: Callable[[], object] = lambda: None) -> None:
        self.during_fit = during_fit

    def fit(self, X: Rows, y: Rows) -> None:
        self.during_fit()

    def predict_distribution(self, X: Rows) -> Predicted:
        mean = torch.from_numpy(X[:, 0]).float()
        return Predictive.gaussian(mean, torch.full_like(mean, 3), torch.ones_like(mean))


class TwoPeaks(StandIn):
    """A mixture of N(-3, 1) and N(3, 1) for every row."""

    def predict_distribution(self, X: Rows) -> Predictive:
        mean = torch.zeros(len(X))
        peaks = [Predictive.gaussian(mean + shift, mean, mean + 1) for shift in (-3, 3)]
        return Predictive.mixture(peaks)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(publish(tmp_path, monkeypatch))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a method in the place of ours."""

    def put(method: Method, **options: Any) -> None:
        monkeypatch.setitem(METHODS, "mpgelu", Recipe("Stand-in", lambda dataset, seed: method, **options))

    put(StandIn())
    return put


def table(X: Rows, y: Rows, train: list[int], test: list[int]) -> Dataset:
    split = Split(np.array(train), np.array(test))
    return Dataset("made up", X, y, tuple("abc"[: X.shape[1]]), "y", (split,))


@pytest.mark.usefixtures("stand_in")
def test_scores_are_those_of_the_distribution() -> None:
    X = np.array([[0.0], [0.0], [1.0], [2.0], [3.0]])
    y = np.array([0.0, 0.0, 4.5, 2.5, 2.9])
    record = evaluate(Task("mpgelu", "made up", 0), table(X, y, [0, 1], [2, 3, 4]))

    def crps(index: int) -> float:
        one = stats.norm(X[2 + index, 0], 2)
        below = integrate.quad(lambda t: one.cdf(t) ** 2, -30, y[2 + index])[0]
        return float(below + integrate.quad(lambda t: one.sf(t) ** 2, y[2 + index], 30)[0])

    assert record["log_likelihood"] == pytest.approx(np.mean(stats.norm.logpdf(y[2:], X[2:, 0], 2)))
    assert record["rmse"] == pytest.approx(np.sqrt(np.mean((X[2:, 0] - y[2:]) ** 2)))
    assert record["crps"] == pytest.approx(np.mean([crps(index) for index in range(3)]))
    assert record["coverage90"] == pytest.approx(2 / 3)  # 3.5 is more than 1.645 standard deviations
    assert record["width90"] == pytest.approx(2 * 2 * stats.norm.ppf(0.95))
    assert (record["rows"], record["repeats"]) == (3, 0)
    assert not [name for name in record if name.endswith("_new")]
    for time_taken in ("fit_seconds", "fit_cpu_seconds", "predict_us_per_row", "predict_one_row_ms"):
        assert record[time_taken] > 0


@pytest.mark.usefixtures("stand_in")
def test_rows_that_repeat_a_training_row_are_scored_apart() -> None:
    X = np.array([[1.0, 5.0], [2.0, 5.0], [1.0, 5.0], [1.0, 5.0], [9.0, 5.0]])
    y = np.array([1.0, 2.0, 1.0, 7.0, 10.0])  # row 2 repeats row 0; row 3 has its features, not its target
    record = evaluate(Task("mpgelu", "made up", 0), table(X, y, [0, 1], [2, 3, 4]))
    assert record["repeats"] == 1
    assert record["rmse"] == pytest.approx(np.sqrt((0 + 36 + 1) / 3))
    assert record["rmse_new"] == pytest.approx(np.sqrt((36 + 1) / 2))
    assert record["log_likelihood_new"] == pytest.approx(np.mean(stats.norm.logpdf([6, 1], scale=2)))
    assert record["coverage90_new"] == 0.5


@pytest.mark.parametrize("matched", [False, True])
def test_a_mixture_is_scored_as_it_is_or_as_its_gaussian(matched: bool, stand_in: Callable[..., None]) -> None:
    stand_in(TwoPeaks(), matched=matched)
    X, y = np.zeros((4, 1)), np.array([0.0, 1.0, 3.0, -3.0])
    record = evaluate(Task("mpgelu", "made up", 0), table(X, y, [0], [2, 3]))
    mixture = np.log(0.5 * stats.norm.pdf(0) + 0.5 * stats.norm.pdf(6))
    gaussian = stats.norm.logpdf(3, scale=np.sqrt(10))
    assert record["log_likelihood_mixture"] == pytest.approx(mixture)
    assert record["log_likelihood_gaussian"] == pytest.approx(gaussian)
    assert record["log_likelihood"] == pytest.approx(gaussian if matched else mixture)


def test_tasks_go_data_set_by_data_set_and_stay_within_the_splits(data: str) -> None:
    found = tasks(["mpgelu", "mc-dropout"], ["yacht"], range(SPLITS - 1, SPLITS + 5), data)
    assert found == [Task("mpgelu", "yacht", SPLITS - 1), Task("mc-dropout", "yacht", SPLITS - 1)]


def test_report_splits_and_sets_too_large_for_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(np.arange(1), np.arange(1))
    sets = {name: Dataset(name, np.zeros((1, 1)), np.zeros(1), ("a",), "y", (split,) * 10) for name in ("pol", "yacht")}
    monkeypatch.setattr(runs, "load_uci", lambda name, data: sets[name])
    found = tasks(["realmlp-x5", "realmlp"], ["yacht", "pol"], "report", None)
    assert {(task.method, task.dataset) for task in found} == {
        ("realmlp-x5", "yacht"),
        ("realmlp", "yacht"),
        ("realmlp", "pol"),
    }
    assert [task.split for task in found] == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    assert [task.split for task in tasks(["realmlp"], ["pol"], "development", None)] == [0, 1, 2, 3, 4]


class FewQuantiles(StandIn):
    """Quantiles -1, 0 and 1 of every row, in the wrong order."""

    def predict_distribution(self, X: Rows) -> Quantiles:
        return Quantiles(torch.tensor([[0.0, 1.0, -1.0]]).expand(len(X), 3))


class Zero(StandIn):
    """Zero for every row, and nothing else."""

    def predict_distribution(self, X: Rows) -> Points:
        return Points(torch.zeros(len(X)))


def test_methods_without_a_density_have_fewer_scores(stand_in: Callable[..., None]) -> None:
    X, y = np.zeros((4, 1)), np.array([0.0, 1.0, 0.5, 0.5])
    stand_in(FewQuantiles(), gives=Quantiles)
    record = evaluate(Task("mpgelu", "made up", 0), table(X, y, [0, 1], [2, 3]))
    pinball = [1 / 6 * 1.5, 1 / 2 * 0.5, 1 / 6 * 0.5]  # at the levels 1/6, 1/2 and 5/6
    assert record["crps"] == pytest.approx(2 * np.mean(pinball))
    assert record["rmse"] == pytest.approx(0.5)
    assert (record["coverage90"], record["width90"]) == (1, 2)
    stand_in(Zero(), gives=Points)
    points = evaluate(Task("mpgelu", "made up", 0), table(X, y, [0, 1], [2, 3]))
    assert points["rmse"] == pytest.approx(0.5)
    assert "crps" in record
    assert not {"log_likelihood", "log_likelihood_mixture"} & set(record)
    assert not {"crps", "coverage90", "log_likelihood"} & set(points)
    assert METHODS["mpgelu"].lacks("crps")
    assert not METHODS["mpgelu"].lacks("rmse")
    assert not METHODS["mpgelu"].lacks("fit_cpu_seconds")


def test_a_second_run_does_only_what_is_missing(
    data: str, tmp_path: Path, stand_in: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    wanted = tasks(["mpgelu"], ["yacht"], range(3), data)
    run(wanted[:2], path, data=data)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["1 of 2 done", "2 of 2 done"]
    assert "yacht split 1 Stand-in: log-likelihood" in lines[1]
    fits: list[int] = []
    stand_in(StandIn(lambda: fits.append(1)))
    with path.open("a") as file:
        file.write('{"method": "mpgelu", "dataset"')  # as a kill would leave it
    records = run(wanted, path, data=data).records()
    assert len(fits) == 1
    assert [record["split"] for record in records] == [0, 1, 2]
    assert records[0]["rows"] == TESTED
    assert set(records[0]["versions"]) == {"mpgelu", "torch", "python"}


def test_a_failure_is_recorded_and_tried_again(data: str, tmp_path: Path, stand_in: Callable[..., None]) -> None:
    def fail() -> None:
        raise np.linalg.LinAlgError("not positive definite\nat all")

    path, wanted = tmp_path / "records.jsonl", tasks(["mpgelu"], ["yacht"], range(2), data)
    stand_in(StandIn(fail))
    store = run(wanted, path, data=data)
    assert [record["error"] for record in store] == ["LinAlgError: not positive definite"] * 2
    stand_in(StandIn())
    assert ["error" in record for record in run(wanted, path, data=data)] == [True, True, False, False]


def raised() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def swallowed() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        raised()


def flagged() -> None:
    """As in the training loops of this library."""
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("interrupted", [raised, swallowed, flagged])
def test_ctrl_c_records_nothing_half_trained(
    interrupted: Callable[[], None], data: str, tmp_path: Path, stand_in: Callable[..., None]
) -> None:
    stand_in(StandIn(interrupted))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tasks(["mpgelu"], ["yacht"], range(2), data), tmp_path / "records.jsonl", data=data)
    assert not (tmp_path / "records.jsonl").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_workers_give_the_same_records(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural_peers, "_SHORT", (16, 20))
    package = tmp_path / "site" / "mpgelu" / "research" / "compare"  # what workers import
    package.unlink()
    shutil.copytree(Path(neural_peers.__file__).parent, package)
    text = (package / "neural_peers.py").read_text()
    assert "(64, 4000)" in text
    (package / "neural_peers.py").write_text(text.replace("(64, 4000)", "(16, 20)"))
    wanted = tasks(["mc-dropout"], ["yacht"], range(2), data)
    together = run(wanted, tmp_path / "together.jsonl", data=data, jobs=2).records()
    get_reusable_executor().shutdown(wait=True)
    scores = {record["split"]: record["log_likelihood"] for record in together}
    alone = evaluate(wanted[1], load_uci("yacht", data))
    assert scores[1] == pytest.approx(alone["log_likelihood"])
    assert set(scores) == {0, 1}


def test_a_terminal_shows_a_bar_and_failures(
    data: str, tmp_path: Path, stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, fits = io.StringIO(), iter([None, OSError("no luck")])

    def fit() -> None:
        if (error := next(fits)) is not None:
            raise error

    stand_in(StandIn(fit))
    monkeypatch.setattr(runs, "Console", lambda **options: Console(file=screen, force_terminal=True, highlight=False))
    run(tasks(["mpgelu"], ["yacht"], range(2), data), tmp_path / "records.jsonl", data=data)
    shown = screen.getvalue()
    assert "yacht split 1 Stand-in failed: OSError: no luck" in shown
    assert "2 of 2 done, 0 min left" in shown
    assert "log-likelihood" not in shown


@pytest.mark.usefixtures("stand_in")
def test_the_time_left_is_that_of_like_tasks(data: str, tmp_path: Path) -> None:
    store = run([], tmp_path / "records.jsonl")
    left = [Task("mpgelu", "yacht", split) for split in range(3)] + [Task("ngboost", "yacht", 0)]
    clock = runs._Clock(left, store, jobs=2)
    assert clock.words() == "0 of 4 done"
    assert clock.count({"method": "mpgelu", "dataset": "yacht", "split": 0, "seconds": 600}) == (
        "1 of 4 done, 15 min left"
    )
    assert clock.count({"method": "ngboost", "dataset": "boston", "split": 0, "seconds": 9000}) == (
        "1 of 4 done, 1 h 25 min left"
    )


def test_a_slow_method_is_timed_by_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_TIMING_SECONDS", 0.05)
    assert len(runs._seconds(lambda: time.sleep(0.03), 50)) == 2
    assert len(runs._seconds(lambda: None, 50)) == 50


@pytest.mark.parametrize(
    "name", ["deep-ensemble", "mc-dropout", "xgboost-distribution", "catboost", "gaussian-process", "xgboost-point"]
)
def test_smoke(name: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(METHODS[name].module)
    monkeypatch.setattr(neural_peers, "_SHORT", (16, 100))
    record = evaluate(Task(name, "yacht", 0), load_uci("yacht", data))
    assert METHODS[name].lacks("log_likelihood") or np.isfinite(record["log_likelihood"])
    assert 0 < record["rmse"] < 30


class Student(StandIn):
    """Fits another method on the way."""

    def fit(self, X: Rows, y: Rows) -> None:
        self.brought = {"mpgelu": (StandIn(), {"fit_seconds": 1.5, "fit_cpu_seconds": 1.25})}


@pytest.mark.usefixtures("stand_in")
def test_what_is_fitted_on_the_way_is_recorded_and_not_fitted_again(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        METHODS, "mpgelu-compact", Recipe("Student", lambda dataset, seed: Student(), brings=("mpgelu",))
    )
    wanted = tasks(["mpgelu", "mpgelu-compact"], ["yacht"], [0], data)
    records = list(run(wanted, tmp_path / "records.jsonl", data=data))
    assert [record["method"] for record in records] == ["mpgelu-compact", "mpgelu"]
    assert records[1]["fit_cpu_seconds"] == 1.25
    assert records[1]["crps"] == records[0]["crps"]
    assert "log_likelihood" in records[1]
    again = run([Task("mpgelu-compact", "yacht", 1)], tmp_path / "records.jsonl", data=data)
    assert len(list(again)) == 4
    run(tasks(["mpgelu"], ["yacht"], [0], data), tmp_path / "other.jsonl", data=data)
    both = list(run(wanted, tmp_path / "other.jsonl", data=data))
    assert [record["method"] for record in both] == ["mpgelu", "mpgelu-compact"]  # the first is kept
