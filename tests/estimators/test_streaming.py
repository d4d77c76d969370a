"""Training on rows that pass by: which rows each network sees, that it learns as in memory, that it can be stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu.errors import InputError
from mpgelu.estimators import MPGELURegressor
from mpgelu.estimators.hashing import uniform
from mpgelu.estimators.recipe import Block, settings_of, streaming
from mpgelu.estimators.recipe.steps import ExpectedLoss, Steps

SMALL: dict[str, Any] = {"hidden": (16,), "sigma": 0.4, "diverse": False, "folds": 3, "random_state": 0, "n_jobs": 1}
SMALL |= {"noise": "homoscedastic"}  # whose head need not be trained


class Rows:
    """A stream of rows that are in memory all the same."""

    def __init__(self, rows: int = 3000, sampled: int = 1500) -> None:
        random = np.random.default_rng(0)
        X = random.normal(size=(rows, 2))
        y = 5 + np.sin(2 * X[:, 0]) + 0.1 * (1 + (X[:, 1] > 0)) * random.normal(size=rows)
        self.all = Block(X, y, np.arange(rows))
        chosen = np.sort(random.permutation(rows)[:sampled])
        self.rows, self.sample = rows, self.all.at(chosen)
        self.range = X.min(0), X.max(0)
        self.target = float(y.mean()), float(y.std())
        self.passes = 0

    def blocks(self, seed: int) -> Iterator[Block]:
        self.passes += 1
        order = np.random.default_rng(seed).permutation(self.rows)
        for at in np.array_split(order, 4):
            yield self.all.at(at)


def test_numbers_of_rows_are_uniform_and_independent_of_seeds() -> None:
    numbers = np.arange(100_000)
    first, second = uniform(numbers, 0), uniform(numbers, 1)
    assert 0 <= first.min() < first.max() < 1
    for found in (first, second):
        counts = np.histogram(found, 20, (0, 1))[0]
        assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # a thousandth of chance, 19 degrees of freedom
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(100_000)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 4 / np.sqrt(100_000)
    np.testing.assert_array_equal(uniform(numbers[7:9], 0), first[7:9])


def watch(monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]) -> None:
    """Call a function before steps of the ensemble are taken, with their arguments."""
    take = Steps.take

    def watched(self: Steps, *given: Any) -> Any:
        if isinstance(self.objective, ExpectedLoss):  # not of the noise head
            seen(self, *given)
        return take(self, *given)

    monkeypatch.setattr(Steps, "take", watched)


def test_no_network_trains_on_rows_that_it_is_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = Rows(), [set[float](), set[float](), set[float]()]

    def note(steps: Steps, data: Any, at: Any, rates: Any) -> None:
        for network, targets in enumerate(data.y[at].flatten(1).tolist()):
            seen[network] |= set(targets)

    watch(monkeypatch, note)
    MPGELURegressor(steps=150, **SMALL).fit_stream(stream)
    mean, scale = stream.target
    y = ((stream.all.y - mean) / scale).astype(np.float32)
    seed = settings_of(MPGELURegressor(**SMALL), 3000, 2).seed
    fold = streaming.fold_of(stream.all.numbers, 3, seed)
    for network in range(3):
        left_out = {float(value) for value in y[fold == network]}
        assert not seen[network] & left_out
        others = {float(value) for value in y[fold != network]}
        assert len(seen[network]) > 0.99 * len(others)  # a few rows of an epoch are missed, not always the same
    held = streaming.held_out(stream.sample.numbers, 3, seed)
    of_sample = streaming.fold_of(stream.sample.numbers, 3, seed)
    for network in range(3):
        assert set(held.held[network].tolist()) == set(np.flatnonzero(of_sample == network).tolist())
    assert int(held.counts.sum()) == 1500


def test_it_learns_as_in_memory() -> None:
    stream, new = Rows(), Rows(5000).all
    test = Block(new.X[3000:], new.y[3000:], new.numbers[3000:])
    settings = SMALL | {"steps": 300, "noise": "heteroscedastic"}
    models = [
        MPGELURegressor(**settings).fit_stream(stream),
        MPGELURegressor(**settings).fit(stream.all.X, stream.all.y),
    ]
    scores = [m.predict_distribution(test.X).log_prob(torch.as_tensor(test.y)) for m in models]
    difference = (scores[0] - scores[1]).numpy()
    assert abs(difference.mean()) < scores[1].numpy().std() / np.sqrt(len(difference))
    assert abs(models[0].score_ - float(scores[0].mean())) < 0.1
    scaling = models[0].ensemble_.scaling
    lowest, highest = ((end - scaling.center.numpy()) / scaling.scale.numpy() for end in stream.range)
    np.testing.assert_allclose(scaling.lower.numpy(), lowest)
    np.testing.assert_allclose(scaling.upper.numpy(), highest)


def test_the_result_is_a_model_as_any_other(tmp_path: Path) -> None:
    stream = Rows()
    model = MPGELURegressor(steps=60, **SMALL).fit_stream(stream)
    model.save(tmp_path / "m")
    again = mp.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict(stream.all.X[:50]), model.predict(stream.all.X[:50]))
    assert model.n_iter_ == 60
    assert np.isfinite(model.distill(steps=20).predict(stream.all.X[:5])).all()


def test_threads_do_not_change_the_bits() -> None:
    stream, several = Rows(), SMALL | {"sigma": (0.4, None), "diverse": True, "steps": 40}
    found = [
        MPGELURegressor(**several | {"n_jobs": jobs}).fit_stream(stream).predict(stream.all.X[:20]) for jobs in (1, 2)
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_steps_of_brief_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[int, int] = {}

    def note(trainer: Steps, data: Any, at: Any, rates: Any) -> None:
        steps[id(trainer)] = steps.get(id(trainer), 0) + len(rates)

    watch(monkeypatch, note)
    MPGELURegressor(**SMALL | {"diverse": True, "steps": 48}).fit_stream(Rows())
    assert sorted(steps.values()) == [6, 8, 48, 48]


def test_a_time_limit_ends_it() -> None:
    stream = Rows()
    model = MPGELURegressor(**SMALL, steps=10**6, time_limit=2.0).fit_stream(stream)
    assert 1 <= model.n_iter_ < 10**6
    assert MPGELURegressor(**SMALL, steps=50, time_limit=5.0).fit_stream(stream, spent=100.0).n_iter_ <= 1


def test_ctrl_c_keeps_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(steps: Steps, *given: Any) -> None:
        if steps.taken == 0:
            os.kill(os.getpid(), signal.SIGINT)

    watch(monkeypatch, interrupt)
    with pytest.warns(mp.InterruptedWarning, match=r"interrupted after \d+ of 100 steps"):
        model = MPGELURegressor(steps=100, **SMALL).fit_stream(Rows())
    assert np.isfinite(model.predict(np.zeros((1, 2)))).all()


def test_it_goes_on_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()

    def note(trainer: Steps, data: Any, at: Any, rates: Any) -> None:
        steps.extend(range(trainer.taken, trainer.taken + len(rates)))

    def kill(trainer: Steps, *given: Any) -> None:
        if trainer.taken >= 40:
            raise RuntimeError("killed")
        note(trainer, *given)

    monkeypatch.setattr("mpgelu.estimators.recipe.checkpoint._SECONDS_BETWEEN_CHECKPOINTS", 0)
    watch(monkeypatch, kill)
    with pytest.raises(RuntimeError, match="killed"):
        MPGELURegressor(steps=90, checkpoint=tmp_path, **SMALL).fit_stream(Rows())
    first = steps.copy()
    steps.clear()
    monkeypatch.undo()
    watch(monkeypatch, note)
    model = MPGELURegressor(steps=90, checkpoint=tmp_path, **SMALL).fit_stream(Rows())
    assert 0 < steps[0] <= first[-1] + 1  # from the last block that was finished
    assert (steps[-1], model.n_iter_) == (89, 90)


@pytest.mark.parametrize(("scale", "wrong"), [(1e160, "large"), (1e-160, "close to zero")])
def test_a_stream_of_targets_whose_variance_is_no_number(scale: float, wrong: str) -> None:
    stream = Rows()
    stream.target = 0.0, scale
    with pytest.raises(InputError, match=f"targets are too {wrong}.*another unit"):
        MPGELURegressor(**SMALL).fit_stream(stream)


def test_what_a_stream_cannot_do() -> None:
    with pytest.raises(InputError, match="900 rows are too few for a stream, which needs 1,000"):
        MPGELURegressor(**SMALL).fit_stream(Rows(900, 900))
    with pytest.raises(InputError, match="warm_start needs the rows in memory"):
        MPGELURegressor(**SMALL, warm_start=True).fit_stream(Rows())
    with pytest.raises(InputError, match="leave one empty; take fewer folds"):
        MPGELURegressor(**SMALL | {"folds": 900}).fit_stream(Rows())


def test_networks_grow_with_the_rows() -> None:
    def sizes(rows: int) -> tuple[tuple[int, ...], int, int]:
        settings = settings_of(MPGELURegressor(), rows, 10)
        return settings.kinds[0].hidden, settings.batch_size, len(settings.kinds)

    assert sizes(1_500) == ((128, 128), 128, 5)
    assert sizes(100_000) == ((128, 128), 256, 5)
    assert sizes(1_000_000) == ((192, 192), 512, 4)
    assert sizes(10_000_000) == ((256, 256), 1024, 2)
    steps = [settings_of(MPGELURegressor(), 10**power, 10).steps for power in range(3, 9)]
    assert steps == sorted(steps)
    assert settings_of(MPGELURegressor(hidden=(8,)), 10**7, 10).kinds[0].hidden == (8,)
