"""The UCI protocol on a small made-up data set: what is trained, on which rows, at which rate, and what is not."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made_up import ROWS, SPLITS, TESTED, publish
from mpgelu.errors import DataError
from mpgelu.layers import Linear
from mpgelu.research.datasets import Dataset, Split, load_uci
from mpgelu.research.paper import uci
from mpgelu.research.paper.tables import RATES
from mpgelu.research.paper.uci import IDENTITY, Cell, Effort, best_rate, cells, models_left, run_cell, time_predictions
from mpgelu.research.paper.variants import VARIANTS
from mpgelu.research.store import Store
from mpgelu.training import History

CELL = Cell("yacht", "mpgelu", 1, "diagonal")
FULL_RELU = Cell("yacht", "relu", 2, "full")
METRICS = ("nll", "nll_mixture", "nll_gaussian", "rmse", "crps", "coverage90")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(publish(tmp_path, monkeypatch))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "out" / "records.jsonl", IDENTITY)


class Trainer:
    """Stands in for training: keeps account, and answers with an NLL that is lowest at one rate."""

    def __init__(self, best: float = 0.05) -> None:
        self.best = best
        self.stacks: list[tuple[str, list[tuple[int, float]]]] = []

    @property
    def models(self) -> Counter[tuple[str, int, float]]:
        return Counter((kind, *model) for kind, models in self.stacks for model in models)

    def __call__(
        self, cell: Cell, kind: str, dataset: Dataset, models: Sequence[tuple[int, float]], epochs: int
    ) -> list[dict[str, float]]:
        self.stacks.append((kind, list(models)))
        return [{"nll": split + abs(math.log(rate / self.best))} for split, rate in models]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(uci, "_train", trainer)
    return trainer


def finish(cell: Cell, effort: Effort, store: Store, data: str) -> int:
    return sum(run_cell(cell, effort, store, data))


def add_search(store: Store, nll: dict[float, Sequence[float | None]], **changes: Any) -> None:
    cell = {"dataset": "yacht", "nonlinearity": "relu", "outputs": 2, "covariance": "full", "seed": 0} | changes
    for rate, values in nll.items():
        for split, value in enumerate(values):
            store.append({"kind": "validation", **cell, "split": split, "rate": rate, "nll": value})


def keys(store: Store) -> Counter[tuple[object, ...]]:
    return Counter(store.key(record) for record in store)


# What there is to run


def test_cells_of_the_tables_with_the_slow_network_last() -> None:
    found = list(cells(["yacht", "wine"], tables=[2, 3], seeds=[0, 4]))
    assert len(found) == len(set(found)) == 16
    assert {(cell.outputs, cell.covariance) for cell in found} == {(2, "diagonal"), (1, "full")}
    assert {cell.seed for cell in found} == {0, 4}
    order = [(cell.nonlinearity, cell.covariance) for cell in found]
    assert {cell.nonlinearity for cell in cells(["yacht"], networks=["relu_input"])} == {"relu_input"}
    assert [kind for kind, _ in itertools.groupby(order)] == list(
        itertools.product(("mpgelu", "relu"), ("diagonal", "full"))
    )


@pytest.mark.parametrize(
    ("effort", "cell", "grid", "tests"),
    [
        (Effort(), CELL, 20, 20),
        (Effort(splits=5, grid_splits=2), CELL, 2, 5),
        (Effort(splits=50), CELL, 20, 20),
        (Effort(splits=5, full_relu_splits=2), FULL_RELU, 20, 2),
        (Effort(splits=5, full_relu_splits=2), CELL, 20, 5),
        (Effort(borrow_rate=True), FULL_RELU, 0, 20),
        (Effort(rate=0.1, borrow_rate=True), FULL_RELU, 0, 20),
        (Effort(borrow_rate=True), replace(FULL_RELU, covariance="diagonal"), 20, 20),
    ],
)
def test_effort(effort: Effort, cell: Cell, grid: int, tests: int) -> None:
    assert (effort.grid(cell, 20), effort.tests(cell, 20)) == (grid, tests)


# The grid search


def test_the_grid_search_takes_the_rate_with_the_lowest_mean_validation_nll(store: Store) -> None:
    add_search(store, {0.005: [1.0, 2.0], 0.01: [0.0, 2.9], 0.05: [1.4, 1.4], 0.1: [1.5, 1.6]})
    add_search(store, {0.1: [-9.0, -9.0]}, seed=1)
    add_search(store, {0.1: [-9.0, -9.0]}, covariance="diagonal")
    assert best_rate(store, FULL_RELU, borrowed=False) == (0.05, "grid over 2 splits")


def test_a_rate_that_fails_on_one_split_is_not_chosen(store: Store) -> None:
    add_search(store, {0.005: [0.1, None], 0.01: [1.0, 1.0]})
    assert best_rate(store, FULL_RELU, borrowed=False)[0] == 0.01
    add_search(store, {0.01: [None]})
    with pytest.raises(DataError, match="no rate of 'yacht relu 2-output full seed 0' has a finite validation NLL"):
        best_rate(store, FULL_RELU, borrowed=False)


def test_the_tests_use_the_rate_of_the_grid_search(store: Store, data: str, trainer: Trainer) -> None:
    assert finish(CELL, Effort(splits=3, grid_splits=2), store, data) == 2 * 4 + 3
    assert trainer.models == Counter(
        [("validation", split, rate) for split in range(2) for rate in RATES] + [("test", s, 0.05) for s in range(3)]
    )
    tests = [record for record in store if record["kind"] == "test"]
    assert {record["rate_from"] for record in tests} == {"grid over 2 splits"}


def test_full_relu_may_borrow_the_rate_of_the_diagonal_setting(store: Store, data: str, trainer: Trainer) -> None:
    effort = Effort(splits=2, borrow_rate=True)
    with pytest.raises(
        DataError, match=r"no grid search of 'yacht relu 2-output diagonal seed 0' in .*; run it before"
    ):
        finish(FULL_RELU, effort, store, data)
    add_search(store, {0.1: [0.2], 0.005: [0.1]}, covariance="diagonal")
    assert finish(FULL_RELU, effort, store, data) == 2
    assert trainer.models == Counter([("test", 0, 0.005), ("test", 1, 0.005)])
    assert store.records()[-1]["rate_from"] == "the diagonal setting's grid over 1 split"


def test_a_given_rate_needs_no_search(store: Store, data: str, trainer: Trainer) -> None:
    assert finish(CELL, Effort(splits=2, rate=0.3), store, data) == 2
    assert trainer.models == Counter([("test", 0, 0.3), ("test", 1, 0.3)])
    assert [(record["rate"], record["rate_from"]) for record in store.records()] == [(0.3, "given")] * 2


# Resuming


def test_finished_work_is_not_repeated(store: Store, data: str, trainer: Trainer) -> None:
    finish(CELL, Effort(splits=1, grid_splits=1), store, data)
    assert finish(CELL, Effort(splits=1, grid_splits=1), store, data) == 0
    assert finish(CELL, Effort(), store, data) == SPLITS * 4 - 4 + SPLITS - 1
    assert finish(CELL, Effort(), store, data) == 0
    assert set(trainer.models.values()) == {1}
    assert len(trainer.models) == SPLITS * 4 + SPLITS
    assert finish(replace(CELL, seed=1), Effort(splits=1, grid_splits=1), store, data) == 5


def test_a_new_choice_of_rate_is_tested_anew(store: Store, data: str, trainer: Trainer) -> None:
    finish(CELL, Effort(splits=1, grid_splits=1), store, data)
    trainer.best = 0.005
    finish(CELL, Effort(splits=1), store, data)
    assert [(record["kind"], record["rate"]) for record in store][-1] == ("test", 0.005)
    assert trainer.models["test", 0, 0.05] == trainer.models["test", 0, 0.005] == 1


def test_models_left_counts_what_will_be_trained(store: Store, data: str, trainer: Trainer) -> None:
    small, large = Effort(splits=1, grid_splits=1), Effort(splits=3, grid_splits=2)
    assert models_left(CELL, small, store.keys(), SPLITS) == 5
    finish(CELL, small, store, data)
    finish(replace(CELL, seed=1), large, store, data)
    assert models_left(CELL, small, store.keys(), SPLITS) == 0
    assert models_left(CELL, large, store.keys(), SPLITS) == finish(CELL, large, store, data) == 6


def test_models_train_in_stacks_that_stay_the_same_when_resumed(
    store: Store, data: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci, "_STACK", 3)
    finish(CELL, Effort(), store, data)
    whole = trainer.stacks.copy()
    assert [len(models) for _, models in whole] == [3, 3, 3, 3, 3, 1, 3, 1]
    lines = store.path.read_bytes().splitlines(keepends=True)
    store.path.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # as if killed in the second stack
    trainer.stacks.clear()
    finish(CELL, Effort(), store, data)
    assert trainer.stacks == [("validation", whole[1][1][1:]), *whole[2:]]


def test_half_trained_models_are_not_recorded(store: Store, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> History:
        return History(torch.zeros(0), torch.zeros(0), torch.zeros(0), interrupted=True)

    monkeypatch.setattr(uci, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(CELL, Effort(splits=1, grid_splits=1), store, data)
    assert store.records() == []


KILLED = """
import os, signal, sys
from pathlib import Path
from mpgelu.research.paper import uci
from mpgelu.research.paper.variants import VARIANTS
from mpgelu.research.store import Store

uci._STACK = 3
append, count = Store.append, 0

def append_or_die(self, record):
    global count
    append(self, record)
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGKILL)

Store.append = append_or_die
store = Store(sys.argv[1], uci.IDENTITY)
list(uci.run_cell(uci.Cell("yacht", "mpgelu", 1, "diagonal"), uci.Effort(epochs=2), store, sys.argv[2]))
"""


def test_a_killed_run_goes_on_where_it_was(
    store: Store, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci, "_STACK", 3)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(store.path), data], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(store.records()) == 5
    finish(CELL, Effort(epochs=2), store, data)
    whole = Store(tmp_path / "whole.jsonl", IDENTITY)
    finish(CELL, Effort(epochs=2), whole, data)
    assert keys(store) == keys(whole)
    assert set(keys(store).values()) == {1}
    ours, theirs = ({s.key(r): r["nll"] for r in s} for s in (store, whole))
    assert ours == theirs  # bit for bit, though the first model after the kill trained alone


@pytest.mark.parametrize("cell", list(cells(["yacht"])), ids=str)
def test_a_model_does_not_depend_on_its_stack_mates(cell: Cell, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "_BATCH", 16)  # several in an epoch, so that the order of the rows matters
    dataset = load_uci("yacht", data)
    for kind in ("test", "validation"):
        models = [(split, rate) for split in range(SPLITS) for rate in (0.005, 0.1)]
        together = dict(zip(models, uci._train(cell, kind, dataset, models, 20), strict=True))
        for stack in ([(2, 0.1)], [(3, 0.005), (2, 0.1), (0, 0.1)], models[:4]):
            assert uci._train(cell, kind, dataset, stack, 20) == [together[model] for model in stack]


def test_fewer_splits_are_the_first_of_more(
    store: Store, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci, "_BATCH", 16)
    more = Store(tmp_path / "more.jsonl", IDENTITY)
    finish(CELL, Effort(splits=2, grid_splits=1, epochs=10), store, data)
    finish(CELL, Effort(grid_splits=1, epochs=10), more, data)
    found = {more.key(record): [record.get(metric) for metric in METRICS] for record in more}
    assert len(found) == 4 + SPLITS
    assert len(store.records()) == 4 + 2
    for record in store:
        assert found[store.key(record)] == [record.get(metric) for metric in METRICS]


# Rows, weights, scores


def test_validation_is_a_fifth_of_the_training_rows(data: str) -> None:
    dataset = load_uci("yacht", data)
    for number, published in enumerate(dataset.splits):
        split = uci._held_out(dataset, number, "validation")
        assert len(split.test) == round((ROWS - TESTED) / 5)
        assert sorted([*split.train, *split.test]) == sorted(published.train)
        assert not set(split.test) & set(published.test)
        assert uci._held_out(dataset, number, "test") is published
    twice = replace(dataset, splits=dataset.splits[:1] * 2)
    first, second = (set(uci._held_out(twice, number, "validation").test) for number in range(2))
    assert first != second


def test_standardisation_uses_the_training_rows_alone() -> None:
    X = np.array([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0], [100.0, 8.0]])
    dataset = Dataset("made-up", X, np.array([10.0, 20.0, 30.0, 1000.0]), ("a", "constant"), "y")
    part = uci._standardised(dataset, Split(train=np.array([0, 1, 2]), test=np.array([3])))
    scale = math.sqrt(1.5)
    assert part.X.tolist() == [pytest.approx([x, 0]) for x in (-scale, 0, scale)]
    assert part.y.tolist() == pytest.approx([-scale, 0, scale])
    assert part.X_test.tolist() == [pytest.approx([97 / (2 / scale), 1])]
    assert part.y_test.tolist() == pytest.approx([980 / (10 / scale)])


def weights(cell: Cell, dataset: Dataset, split: int = 0, rate: float = 0.01) -> list[torch.Tensor]:
    return [layer.weight for layer in uci._network(cell, dataset, split, rate) if isinstance(layer, Linear)]


def test_both_networks_and_all_rates_start_a_split_from_the_same_weights(data: str) -> None:
    dataset = load_uci("yacht", data)
    first = weights(CELL, dataset)
    assert len(first) == 3
    for same in (
        weights(replace(CELL, nonlinearity="relu"), dataset),
        weights(replace(CELL, covariance="full"), dataset),
        weights(CELL, dataset, rate=0.1),
        *(weights(replace(CELL, nonlinearity=variant), dataset) for variant in VARIANTS),
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    for other in (weights(replace(CELL, seed=1), dataset), weights(CELL, dataset, split=1)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("cell", list(cells(["yacht"], networks=("mpgelu", "relu", *VARIANTS))), ids=str)
def test_every_cell_runs_and_its_records_are_complete(cell: Cell, store: Store, data: str) -> None:
    assert finish(cell, Effort(splits=2, grid_splits=1, epochs=2), store, data) == 6
    about = {*IDENTITY, "epochs", "seconds", "versions"}
    validation, tests = store.records()[:4], store.records()[4:]
    assert all(set(record) == about | {"nll"} for record in validation)
    assert all(set(record) == about | {*METRICS, "rate_from"} for record in tests)
    assert all(math.isfinite(record[name]) for record in tests for name in METRICS)
    assert all(0 <= record["coverage90"] <= 1 for record in tests)
    assert all(record["epochs"] == 2 and record["seconds"] > 0 for record in store)
    chosen = min(validation, key=lambda record: float(record["nll"]))
    assert {record["rate"] for record in tests} == {chosen["rate"]}


def test_training_lowers_the_nll(store: Store, data: str, tmp_path: Path) -> None:
    after = Store(tmp_path / "after.jsonl", IDENTITY)
    for place, epochs in ((store, 1), (after, 200)):
        list(uci._run(CELL, "test", load_uci("yacht", data), [(split, 0.01) for split in range(SPLITS)], epochs, place))
    first, last = (sum(record["nll"] for record in place) for place in (store, after))
    assert last < first


# Runtimes


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_runtimes_of_both_networks(covariance: str, store: Store, data: str) -> None:
    records = time_predictions(load_uci("yacht", data), 2, covariance)
    assert [record["nonlinearity"] for record in records] == ["mpgelu", "relu"]
    for record in records:
        store.append(record)
        measured = {name: value for name, value in record.items() if name.startswith("runtime_")}
        factored = covariance == "full" and record["nonlinearity"] == "mpgelu"
        assert set(measured) == {"runtime_s"} | ({"runtime_factored_s"} if factored else set())
        assert all(isinstance(value, float) and 0 < value < 10 for value in measured.values())
        expected = {"kind": "runtime", "dataset": "yacht", "outputs": 2, "covariance": covariance, "seed": 0}
        assert expected.items() <= record.items()
    assert len(store.keys()) == 2
