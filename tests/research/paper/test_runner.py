"""Cells over processes: the same records from every backend, progress, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import joblib
import pytest
from joblib import Parallel
from joblib.externals.loky import get_reusable_executor
from joblib.parallel import get_active_backend
from rich.console import Console

from made_up import SPLITS, publish
from mpgelu.errors import InputError
from mpgelu.research.paper import runner, uci
from mpgelu.research.paper.runner import measure_runtimes, run
from mpgelu.research.paper.uci import IDENTITY, Cell, Effort, cells
from mpgelu.research.store import Store

CELLS = list(cells(["yacht"], tables=[4]))
EFFORT = Effort(splits=2, grid_splits=1, epochs=2)
MODELS = 2 * (4 + 2)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(publish(tmp_path, monkeypatch))


def numbers(store: Store) -> dict[tuple[object, ...], float]:
    records = store.records()
    found = {store.key(record): record["nll"] for record in records}
    assert len(found) == len(records)
    return found


def not_here(*arguments: object) -> None:
    raise AssertionError("trained in this process, not in a worker")


@pytest.mark.parametrize("backend", ["loky", "dask"])
def test_workers_give_the_same_records(
    backend: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if backend == "dask":
        pytest.importorskip("distributed")
    alone = run(CELLS, EFFORT, tmp_path / "alone.jsonl", data=data)
    get_reusable_executor().shutdown(wait=True)  # workers of another test do not know these data
    monkeypatch.setattr(uci, "_train", not_here)
    used = []

    def parallel(**options: Any) -> Any:
        used.append(type(get_active_backend()[0]).__name__.lower())
        return Parallel(**options)

    monkeypatch.setattr(joblib, "Parallel", parallel)
    together = run(CELLS, EFFORT, tmp_path / "together.jsonl", data=data, jobs=2, backend=backend)
    get_reusable_executor().shutdown(wait=True)
    assert [backend in name for name in used] == [True]
    assert len(numbers(alone)) == MODELS
    assert numbers(together) == pytest.approx(numbers(alone))
    assert capfd.readouterr() == ("", "")


def test_a_second_run_trains_nothing(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run(CELLS, EFFORT, tmp_path / "records.jsonl", data=data)
    before = store.path.read_bytes()
    monkeypatch.setattr(uci, "_train", not_here)
    run(CELLS, EFFORT, tmp_path / "records.jsonl", data=data)
    assert store.path.read_bytes() == before


def test_a_cell_that_borrows_its_rate_waits_for_the_one_that_finds_it(data: str, tmp_path: Path) -> None:
    full, diagonal = (Cell("yacht", "relu", 1, covariance) for covariance in ("full", "diagonal"))
    effort = Effort(splits=1, grid_splits=1, borrow_rate=True, epochs=1)
    store = run([full, diagonal], effort, tmp_path / "records.jsonl", data=data)
    assert [record["covariance"] for record in store] == ["diagonal"] * 5 + ["full"]


def test_relative_paths_reach_the_workers_as_absolute_ones(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(runner, "_finish", lambda cell, effort, store, data: seen.append((store.path, data)))
    run(CELLS[:1], EFFORT, Path("out/records.jsonl"), data=".")
    assert seen == [(tmp_path / "out" / "records.jsonl", str(tmp_path))]


# Progress


def test_no_progress_without_a_terminal(data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(CELLS[:1], EFFORT, tmp_path / "records.jsonl", data=data)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("show", [True, False])
def test_progress_counts_the_models_that_were_missing(
    show: bool, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    run(CELLS[:1], EFFORT, path, data=data)
    screen = io.StringIO()
    monkeypatch.setattr(runner, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=80))
    run(CELLS, EFFORT, path, data=data, progress=show)
    assert (f"{MODELS // 2}/{MODELS // 2}" in screen.getvalue()) == show
    assert ("models trained" in screen.getvalue()) == show


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "threads"}, "backend must be one of loky, dask, ray, got 'threads'"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "a scheduler goes with backend 'dask', not 'loky'"),
        ({"backend": "ray"}, "needs ray; install it with pip install ray"),
    ],
)
def test_backends_that_cannot_be_used(options: dict[str, str], message: str, data: str, tmp_path: Path) -> None:
    if options.get("backend") == "ray":
        with pytest.raises(ImportError):
            import ray  # noqa: F401
    with pytest.raises(InputError, match=message):
        run(CELLS, EFFORT, tmp_path / "records.jsonl", data=data, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "records.jsonl").exists()


def test_a_scheduler_that_does_not_answer(data: str, tmp_path: Path) -> None:
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "100ms"}),
        pytest.raises(InputError, match=r"cannot reach the Dask scheduler tcp://127\.0\.0\.1:1"),
    ):
        run(CELLS, EFFORT, tmp_path / "records.jsonl", data=data, backend="dask", scheduler="tcp://127.0.0.1:1")


def test_models_of_another_length_are_not_mixed(data: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    before = numbers(run(CELLS[:1], EFFORT, path, data=data))
    with pytest.raises(InputError, match=r"records\.jsonl holds models of 2 epochs, not 500; give the same number"):
        run(CELLS, Effort(splits=1), path, data=data)
    assert numbers(Store(path, IDENTITY)) == before


# Runtimes


def test_given_and_searched_rates_do_not_share_a_store(tmp_path: Path, data: str) -> None:
    path, effort = tmp_path / "records.jsonl", Effort(splits=1, epochs=1, rate=0.1)
    store = run(CELLS[:1], effort, path, data=data)
    assert {record["rate"] for record in store} == {0.1}
    with pytest.raises(InputError, match=r"holds models of rate 0\.1, not of searched rates; give another output"):
        run(CELLS[:1], Effort(splits=1, epochs=1), path, data=data)
    with pytest.raises(InputError, match=r"holds models of rate 0\.1, not of rate 0\.2;"):
        run(CELLS[:1], Effort(splits=1, epochs=1, rate=0.2), path, data=data)


def test_runtimes_are_measured_once(data: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "records.jsonl", IDENTITY)
    some = list(cells(["yacht"], tables=[1, 4]))
    measure_runtimes(some[:1], store, data)
    assert [record["nonlinearity"] for record in store] == ["mpgelu", "relu"]
    measure_runtimes(some, store, data)
    assert len(numbers(store)) == 4
    measure_runtimes(some, store, data)
    assert len(numbers(store)) == 4


def test_all_published_splits_are_the_default(data: str, tmp_path: Path) -> None:
    store = run(CELLS[:1], Effort(epochs=1), tmp_path / "records.jsonl", data=data)
    assert len(numbers(store)) == SPLITS * 4 + SPLITS
