"""The parts of training an ensemble: folds, batches, steps, weights, noise, checkpoints."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpgelu as mp
from mpgelu.estimators import gaussian_process
from mpgelu.estimators.gaussian_process import fit_process
from mpgelu.estimators.noise import NoiseHead, head_inputs
from mpgelu.estimators.recipe import InterruptedWarning, Kind, Rows, Settings, Trained, default_network, train, training
from mpgelu.estimators.recipe.folds import Batches, Folds
from mpgelu.estimators.recipe.head import mean_range, train_head
from mpgelu.estimators.recipe.loop import Group, Pace
from mpgelu.estimators.recipe.networks import new_networks
from mpgelu.estimators.recipe.steps import ExpectedLoss, Steps, learning_rate, variance_weights
from mpgelu.estimators.recipe.weights import fit_width, mean_weights, stacking_weights
from mpgelu.estimators.scales import LIMIT
from mpgelu.likelihoods import HeavyTailedGaussian, HeteroscedasticGaussian
from mpgelu.training import Interrupts, RecoveryWarning

SETTINGS = Settings(
    kinds=(Kind((6,)), Kind((6,), sigma=0.2)),
    process=False,
    folds=3,
    steps=60,
    batch_size=16,
    learning_rate=0.01,
    beta=0.5,
    noise="heteroscedastic",
    network=default_network,
    likelihood=None,
    moments=mp.DiagonalMoments,
    time_limit=None,
    seed=0,
    device=torch.device("cpu"),
)


def data(rows: int = 80, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 3, generator=generator)
    y = torch.sin(2 * X[:, 0]) + 0.3 * torch.randn(rows, generator=generator)
    return Rows(X, y, torch.ones(rows))


def arrays(trained: Trained) -> list[Tensor]:
    found = [tensor for stack in trained.stacks for tensor in (*stack.parameters(), *stack.buffers())]
    head = [] if trained.noise is None else list(trained.noise.state_dict().values())
    return [*found, *head, trained.weights]


def same(a: Trained, b: Trained) -> None:
    for ours, theirs in zip(arrays(a), arrays(b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# folds and batches


def test_every_row_is_left_out_once_and_never_trained_on_by_that_network() -> None:
    folds = Folds.of(23, 5, 0)
    assert sorted(folds.held[folds.counts].tolist()) == list(range(23))
    for trained, held in zip(folds.trained.tolist(), folds.held.tolist(), strict=True):
        assert not set(trained) & set(held)
        assert len(set(trained)) == len(trained)


def test_what_networks_say_of_their_held_out_rows_comes_back_in_order() -> None:
    folds = Folds.of(23, 5, 0)
    torch.testing.assert_close(folds.gather(folds.held), torch.arange(23))


def test_batches_go_through_all_rows_and_depend_on_their_number_alone() -> None:
    trained = Folds.of(20, 4, 0).trained
    batches = Batches(trained, 4, seed=3)
    once = torch.cat([batches.rows(i, 1) for i in range(9)], 1)
    torch.testing.assert_close(Batches(trained, 4, seed=3).rows(2, 5), once[:, 2:7])
    epoch = once[:, :3].flatten(1)[:, :12]
    assert all(len(set(rows.tolist())) == 12 for rows in epoch)


# steps


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(1.0, done) for done in np.linspace(0.001, 1, 1000)]
    assert max(rates) == pytest.approx(1, abs=1e-3)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert rates[:49] == sorted(rates[:49])


def test_the_variance_weights_have_mean_one_and_no_gradient() -> None:
    outputs = torch.randn(2, 5, 2, requires_grad=True)
    weights = variance_weights(HeteroscedasticGaussian(), outputs, 0.5)
    assert isinstance(weights, Tensor)
    assert not weights.requires_grad
    torch.testing.assert_close(weights.mean(-1), torch.ones(2))
    expected = outputs[..., 1].detach().exp().sqrt()
    torch.testing.assert_close(weights, expected / expected.mean(-1, keepdim=True))


def test_a_step_is_that_of_adam_on_each_network_alone() -> None:
    rows, likelihood = data(), HeteroscedasticGaussian()
    stack = new_networks(3, SETTINGS.kinds[1], likelihood, SETTINGS, 0)
    alone = mp.Stack(stack.unstack()[:1])
    at = torch.arange(30).view(3, 10)
    trainers = [Steps(each, ExpectedLoss(each, likelihood, 0.5, 10)) for each in (stack, alone)]
    for trainer, chosen in zip(trainers, (at, at[:1]), strict=True):
        for _ in range(3):
            trainer.step(rows.X[chosen], rows.y[chosen], rows.weights[chosen], 0.01)
    for together, single in zip(stack.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(together[:1], single, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_is_left_out_for_that_network_alone() -> None:
    rows, likelihood = data(), HeteroscedasticGaussian()
    stacks = [new_networks(3, SETTINGS.kinds[0], likelihood, SETTINGS, 0) for _ in range(2)]
    at = torch.arange(30).view(3, 10)
    wrong = rows.y.clone()
    wrong[12] = 1e30  # of the second network's batch
    for stack, y in zip(stacks, (rows.y, wrong), strict=True):
        trainer = Steps(stack, ExpectedLoss(stack, likelihood, 0.5, 10))
        losses = trainer.step(rows.X[at], y[at], rows.weights[at], 0.01)
    assert torch.isfinite(losses).tolist() == [True, False, True]
    start = new_networks(3, SETTINGS.kinds[0], likelihood, SETTINGS, 0)
    for right, left_out, before in zip(*(stack.parameters() for stack in (*stacks, start)), strict=True):
        torch.testing.assert_close(left_out[[0, 2]], right[[0, 2]], rtol=0, atol=0)
        torch.testing.assert_close(left_out[1], before[1], rtol=0, atol=0)


def test_steps_that_are_left_out_are_said_and_too_many_are_an_error() -> None:
    rows = data()
    absurd = torch.arange(80) == 7
    settings = replace(SETTINGS, batch_size=4)
    with pytest.warns(RecoveryWarning, match="left out"):
        train(Rows(rows.X, torch.where(absurd, 1e30, rows.y), rows.weights), settings)
    with pytest.raises(mp.errors.TrainingError, match="not finite in"):
        train(Rows(rows.X, torch.full_like(rows.y, 1e30), rows.weights), settings)


# weights


def test_kinds_that_predict_held_out_rows_better_count_more() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=400)
    means = np.stack([y + 0.1 * rng.normal(size=400), y + 1.0 * rng.normal(size=400)])
    weights = mean_weights(means, y, np.ones(400))
    assert weights.sum() == pytest.approx(1)
    assert weights[0] > 0.95
    equal = mean_weights(np.stack([y, y, y]), y + rng.normal(size=400), np.ones(400))
    np.testing.assert_allclose(equal, 1 / 3, atol=0.01)


def test_one_absurd_prediction_does_not_decide() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=200)
    means = np.stack([y + 0.1 * rng.normal(size=200), y + 0.5 * rng.normal(size=200)])
    means[0, 3] = 40.0
    assert mean_weights(means, y, np.ones(200))[0] > 0.7


def test_the_width_of_the_mixture_is_that_of_the_errors() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=3000)
    means = truth + 0.2 * rng.normal(size=(3, 3000))
    y = truth + 0.5 * rng.normal(size=3000)
    weights = np.full(3, 1 / 3)
    width, score = fit_width(means, np.full(3000, np.log(0.25)), y, weights, np.ones(3000))
    spread = width.spread**2 * means.var(0).mean()
    noise = HeavyTailedGaussian(width.tail_share, width.tail_width, tail_offset=width.tail_offset).noise(
        torch.tensor([0.0, math.log(0.25 * width.scale)])
    )
    assert spread + float(noise) == pytest.approx(0.25 + 0.04 / 3, rel=0.05)
    assert score == pytest.approx(-0.5 * (1 + np.log(2 * np.pi * (0.25 + 0.04 / 3))), abs=0.03)


def test_heavy_tails_are_found() -> None:
    rng = np.random.default_rng(0)
    wide = rng.random(3000) < 0.1
    y = np.where(wide, 3.0, 1.0) * rng.normal(size=3000)
    width, _ = fit_width(np.zeros((1, 3000)), np.zeros(3000), y, np.ones(1), np.ones(3000))
    assert width.tail_share == pytest.approx(0.1, abs=0.04)
    assert width.tail_width == pytest.approx(3, abs=0.5)
    assert width.tail_offset == pytest.approx(0, abs=0.3)


@pytest.mark.parametrize("offset", [-2.0, 2.0])
def test_skewed_errors_are_found(offset: float) -> None:
    rng = np.random.default_rng(0)
    wide = rng.random(3000) < 0.4
    y = np.where(wide, offset + 3 * rng.normal(size=3000), -offset * 0.4 / 0.6 + rng.normal(size=3000))
    width, _ = fit_width(np.zeros((1, 3000)), np.zeros(3000), y, np.ones(1), np.ones(3000))
    assert width.scale == pytest.approx(1, abs=0.2)
    assert width.tail_share == pytest.approx(0.4, abs=0.07)
    assert width.tail_width == pytest.approx(3, abs=0.3)
    assert width.tail_offset == pytest.approx(offset, abs=0.3)


def test_stacking_weights_maximise_the_mixture() -> None:
    logs = torch.randn(200, 3, dtype=torch.float64)
    weights, score = stacking_weights(logs, torch.ones(200))
    assert float(weights.sum()) == pytest.approx(1)
    for other in torch.distributions.Dirichlet(torch.ones(3)).sample((200,)).double():
        assert torch.logsumexp(logs + other.log(), 1).mean() <= score + 1e-6


# noise


def test_the_head_learns_where_the_noise_is() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(1000, 2, generator=generator) * 2 - 1
    deviation = torch.where(X[:, 0] > 0, 1.0, 0.1)
    y = deviation * torch.randn(1000, generator=generator)
    zero = torch.zeros(1, 1000)
    with Interrupts() as interrupts:
        head, held = train_head(X, zero, zero, y, torch.ones(1000), torch.ones(1), False, 0, interrupts)
        constant, flat = train_head(X, zero, zero, y, torch.ones(1000), torch.ones(1), True, 0, interrupts)
    found = (held / 2).exp()
    assert found[X[:, 0] > 0.2].median() == pytest.approx(1, rel=0.35)
    assert found[X[:, 0] < -0.2].median() == pytest.approx(0.1, rel=0.35)
    assert flat.std() < 1e-5
    assert len(constant.networks) == len(head.networks)


def test_a_head_keeps_means_in_range_and_its_noise_bounded() -> None:
    with Interrupts() as interrupts:
        zero = torch.zeros(1, 50)
        y = torch.linspace(-1, 1, 50)
        head, _ = train_head(torch.randn(50, 2), zero, zero, y, torch.ones(50), torch.ones(1), True, 0, interrupts)
    outputs = torch.full((3, 4, 2), 1e6)
    after = head(torch.randn(4, 2), [outputs])
    assert isinstance(after, Tensor)
    torch.testing.assert_close(after[..., 0], mean_range(y)[1].expand(3, 4))
    assert torch.isfinite(after).all()


def unit_head() -> NoiseHead:
    """Return a head whose noise variance is one before the correction for averaging, and whose spread is a half."""
    stack = mp.Stack([mp.network(4, (), 1, rate=0)]).requires_grad_(False)
    for parameter in stack.parameters():
        parameter.zero_()
    held = torch.zeros(4), torch.ones(4), torch.tensor(0.0), torch.ones(1), torch.tensor(0.5), torch.tensor([-9.0, 9.0])
    return NoiseHead(stack, *held)


def two_networks(apart: float) -> Tensor:
    """Return the outputs of two networks for five rows, with means that are apart by the same distance everywhere."""
    means = torch.tensor([apart / 2, -apart / 2])[:, None].expand(2, 5)
    return torch.stack([means, torch.zeros(2, 5)], -1)


def test_what_averaging_saves_is_taken_off_the_noise() -> None:
    after = unit_head()(torch.zeros(5, 1), [two_networks(0.6)])
    assert isinstance(after, Tensor)
    between = torch.tensor([0.3, -0.3]).var().item()
    torch.testing.assert_close(after[..., 1].exp(), torch.full((2, 5), 1 - between * 0.5 * 1.25))


# two networks apart by d: between = d^2 / 2, and averaging saves 0.5 * 1.25 * d^2 / 2 of the variance one
@pytest.mark.parametrize(
    ("apart", "ratio", "by_row", "share"),
    [
        (0.6, 1.0, True, 1 - 0.1125),
        (0.6, 3.0, True, 1 - 0.1125),  # 0.9625 on average: less than a tenth more
        (0.8, 30.0, False, 1 - 0.2 / 30),  # most of the noise are wide errors, which averaging does not change
        (1.6, 2.0, False, 1 - 0.8 / 2),  # by rows it would be 0.7
        (9.0, 1.0, False, 0.5),
    ],
)
def test_the_average_correction_replaces_one_by_rows_that_is_far_from_it(
    apart: float, ratio: float, by_row: bool, share: float
) -> None:
    head, features, outputs = unit_head(), torch.zeros(5, 1), [two_networks(apart)]
    head.settle(features, outputs, torch.ones(5), ratio)
    assert head.by_row is by_row
    after = head(features, outputs)
    assert isinstance(after, Tensor)
    torch.testing.assert_close(after[..., 1].exp(), torch.full((2, 5), share))


def test_intervals_of_a_target_that_is_often_zero_contain_the_zeros() -> None:
    """Its errors are a narrow peak with a broad side, and averaging narrows the whole, not the peak."""
    random = np.random.default_rng(0)
    X, new = random.normal(size=(300, 4)), random.normal(size=(500, 4))

    def target(x: np.ndarray) -> np.ndarray:
        return np.where(random.random(len(x)) < 0.5, 0.0, random.gamma(2.0, 1.0, len(x)) + 0.2 * x[:, 0])

    model = mp.MPGELURegressor(sigma=1.0, steps=200, random_state=0).fit(X, target(X))
    assert model.ensemble_.noise is not None
    assert not model.ensemble_.noise.by_row
    (lower, upper), y = model.predict_interval(new), target(new)
    assert (lower[y == 0] <= 0).mean() > 0.95
    assert 0.86 < ((lower <= y) & (y <= upper)).mean() < 0.97


def test_piecewise_linear_networks_are_mpgelu_of_known_inputs() -> None:
    torch.manual_seed(0)
    smooth, kinked = (default_network(3, Kind((8, 8), sigma=0.2, smooth=each), 2) for each in (True, False))
    relu = mp.network(3, (8, 8), nonlinearity=mp.ReLU, rate=0, sigma=0.2)
    for other in (smooth, relu):
        other.load_state_dict(kinked.state_dict())
    x = torch.randn(50, 3)
    torch.testing.assert_close(kinked(x), relu(x))
    assert not torch.allclose(kinked(x), smooth(x), atol=0.01)
    assert str(Kind((8,), sigma=0.2, smooth=False)) == "periodic 0.2, piecewise linear"


def test_targets_of_few_values_are_met_by_piecewise_linear_networks() -> None:
    """A smooth function is nowhere constant; half of this target is."""
    random = np.random.default_rng(0)
    X, new = random.uniform(-2, 2, (1_200, 2)), random.uniform(-2, 2, (500, 2))

    def target(x: np.ndarray) -> np.ndarray:
        slopes: np.ndarray = np.maximum(x[:, 0] + 0.5 * x[:, 1], 0) + np.maximum(x[:, 1] - 1, 0)
        return slopes

    settings: dict[str, Any] = {"hidden": (32, 32), "folds": 2, "random_state": 0}
    model = mp.MPGELURegressor(**settings).fit(X, target(X))
    smooth = mp.MPGELURegressor(**settings, diverse=False).fit(X, target(X))
    assert model.kind_weights_["periodic 0.2, piecewise linear"] > 0.5
    flat = new[target(new) == 0]
    assert np.median(np.abs(model.predict(flat))) < 0.5 * np.median(np.abs(smooth.predict(flat)))


def test_inputs_of_the_head_are_features_mean_disagreement_and_own_noise() -> None:
    means, own = torch.tensor([[1.0], [3.0]]), torch.tensor([[-2.0], [-4.0]])
    inputs = head_inputs(torch.tensor([[7.0]]), means, own, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(inputs, torch.tensor([[7.0, 2.0, 0.0, -1.5]]), rtol=0, atol=1e-6)


# rows that judge


def test_rows_whose_features_are_repeated_do_not_judge() -> None:
    rows = data(200)
    X = torch.cat([rows.X, rows.X[:40]])
    repeated = Rows(X, torch.cat([rows.y, rows.y[:40] + 1]), torch.linspace(0.5, 1.5, 240))
    judges = repeated.judges()
    assert (judges.weights[:40] == 0).all()
    assert (judges.weights[200:] == 0).all()
    kept = repeated.weights[40:200]
    torch.testing.assert_close(judges.weights[40:200], kept * 240 / kept.sum())
    assert judges.weights.mean() == pytest.approx(1)


def test_all_rows_judge_where_none_or_nearly_all_are_repeated() -> None:
    rows = data(200)
    torch.testing.assert_close(rows.judges().weights, rows.weights)
    few = Rows((rows.X > 0).float(), rows.y, rows.weights)  # eight combinations of categories
    assert few.judges() is few


def test_noise_is_that_of_new_rows_where_half_of_the_table_is_repeated() -> None:
    """Twins of noisy rows are memorised; held-out errors of the others tell the noise of new rows."""
    rows = data(120)
    X, y = (torch.cat([part, part[:60]]).numpy() for part in (rows.X, rows.y))
    new = data(200, seed=1)

    def log_likelihood() -> float:
        model = mp.MPGELURegressor((64, 64), sigma=1.0, diverse=False, steps=400, random_state=0).fit(X, y)
        return float(model.predict_distribution(new.X.numpy()).log_prob(new.y.double()).mean())

    judged = log_likelihood()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "judges", lambda self: self)
        assert log_likelihood() < judged - 0.1


# the Gaussian process


@pytest.mark.parametrize("count", [5, 40], ids=["folds", "single rows"])
def test_the_process_leaves_out_folds_and_rows_exactly(count: int) -> None:
    rows, folds = data(40), Folds.of(40, count, 0)
    process, means, single = fit_process(rows.X / 4, rows.y, 3.0, Folds.of(40, 5, 0))
    means = single if count == 40 else means
    state = {name: value.clone() for name, value in process.state_dict().items()}
    x, parameters = state["points"], state["kernel"]
    for held in folds.held:  # the same kernel without these rows, by solving the smaller system
        kept = ~torch.isin(torch.arange(40), held)
        covariance = gaussian_process._kernel(parameters, x[kept], x[kept])
        covariance += gaussian_process._noise_variance(parameters) * torch.eye(int(kept.sum()), dtype=torch.float64)
        alpha = torch.linalg.solve(covariance, rows.y[kept].double())
        expected = gaussian_process._kernel(parameters, x[held], x[kept]) @ alpha
        torch.testing.assert_close(means[held].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_process_fits_a_smooth_function_and_knows_its_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(150, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * X[:, 0]) + 0.1 * torch.randn(150, generator=generator)
    process, _, _ = fit_process(X, y, 3.0, Folds.of(150, 5, 0))
    mean, log_noise = process(X).unbind(-1)
    assert (mean - torch.sin(3 * X[:, 0])).square().mean().sqrt() < 0.06
    assert (log_noise / 2).exp()[0] == pytest.approx(0.1, rel=0.3)


def test_the_noise_of_a_process_alone_is_that_of_rows_predicted_from_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process knows all rows; errors of predictions from four folds of five would make its intervals too wide."""
    monkeypatch.setattr(training, "mean_weights", lambda means, y, weights: np.eye(len(means))[-1])
    seen: list[Tensor] = []

    def spy(features: Tensor, means: Tensor, *others: Any) -> Any:
        seen.extend([features, means, others[1]])
        return train_head(features, means, *others)

    monkeypatch.setattr(training, "train_head", spy)
    X = np.random.default_rng(0).uniform(-2, 2, (60, 2))
    mp.MPGELURegressor(steps=2, random_state=0).fit(X, np.sin(2 * X[:, 0]) * np.cos(2 * X[:, 1]))
    features, means, y = seen
    _, by_folds, single = fit_process(features, y, LIMIT, Folds.of(60, 5, 0))
    torch.testing.assert_close(means, single[None])
    assert (single - y).square().mean() < (by_folds - y).square().mean()


@pytest.mark.parametrize("likelihood", [None, HeteroscedasticGaussian()])
def test_of_many_kinds_that_all_weigh_little_the_heaviest_are_kept(
    likelihood: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.r_[0.019, np.full(99, 0.981 / 99)]  # all below the limit of 2 %
    monkeypatch.setattr(training, "mean_weights", lambda means, y, rows: weights[: len(means)])
    monkeypatch.setattr(
        training, "stacking_weights", lambda logs, rows: (torch.as_tensor(weights[: logs.shape[1]]), -1.0)
    )
    trained = train(data(), replace(SETTINGS, likelihood=likelihood))
    assert len(trained.members) == 1
    assert trained.members[0].name == str(SETTINGS.kinds[0])


def test_a_model_of_the_process_alone_predicts_and_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process has float64 parameters, the networks of its noise float32 ones."""
    monkeypatch.setattr(training, "mean_weights", lambda means, y, weights: np.eye(len(means))[-1])
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = mp.MPGELURegressor(steps=20, random_state=0).fit(X, np.sin(X[:, 0]))
    assert list(model.kind_weights_) == ["Gaussian process"]
    mean, std = model.predict(X, return_std=True)
    assert np.abs(mean - np.sin(X[:, 0])).max() < 0.05
    assert (std > 0).all()
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(mp.load(tmp_path / "model").predict(X), mean)


# the whole


def test_training_gives_the_same_bits_twice_and_leaves_global_random_numbers_alone() -> None:
    rows = data()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = train(rows, SETTINGS)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    same(first, train(rows, SETTINGS))


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_an_interrupted_training_is_resumed_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    rows = data()
    whole = train(rows, SETTINGS)
    take, calls = Steps.take, 0

    def interrupted(self: Steps, *batches: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *batches)

    monkeypatch.setattr(Steps, "take", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.warns(InterruptedWarning):
            train(rows, SETTINGS, checkpoint=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(Steps, "take", take)
    same(train(rows, SETTINGS, checkpoint=tmp_path), whole)


def test_checkpoints_of_different_runs_live_side_by_side(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=5, kinds=SETTINGS.kinds[:1])
    runs = [(data(), settings), (data(), replace(settings, steps=6)), (data(82), settings)]
    results = [train(rows, chosen, checkpoint=tmp_path) for rows, chosen in runs]
    assert len(list(tmp_path.iterdir())) == 3
    for (rows, chosen), result in zip(runs, results, strict=True):
        same(train(rows, chosen, checkpoint=tmp_path), result)


def test_killed_processes_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from dataclasses import replace
        from pathlib import Path
        from mpgelu.estimators.recipe import checkpoint, train
        from test_recipe import SETTINGS, data
        checkpoint._SECONDS_BETWEEN_CHECKPOINTS = 0
        train(data(), replace(SETTINGS, steps=4_000), checkpoint=Path({str(tmp_path)!r}))
        """
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not list(tmp_path.glob("training*")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("training*"))
    (left,) = tmp_path.glob("training*.safetensors")
    stack = new_networks(3, SETTINGS.kinds[0], HeteroscedasticGaussian(), SETTINGS, 0)
    assert mp.storage.arrays.read_arrays(left, "checkpoint")[1]["taken"] >= 20
    assert len(stack) == SETTINGS.folds


def test_a_time_limit_ends_the_steps_with_a_learning_rate_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, likelihood = data(), HeteroscedasticGaussian()
    task = training.task_of(0, 3, likelihood, replace(SETTINGS, steps=10**6))
    trainer, rates = task.trainer(len(rows.y)), []
    take = trainer.take

    def recorded(data: Rows, at: Tensor, some: list[float]) -> Tensor:
        rates.extend(some)
        return take(data, at, some)

    monkeypatch.setattr(trainer, "take", recorded)
    with mp.training.training_progress(False) as bar, Interrupts() as interrupts:
        Group(task, trainer).train(rows, 1.0, interrupts, bar)
    assert 1 <= len(rates) < 10**6
    assert rates[-1] < 0.2 * max(rates)


def test_a_time_limit_that_has_passed_leaves_one_step() -> None:
    pace = Pace(0.01, 100, seconds=-5.0, taken=20)  # a Gaussian process may have taken more than the whole limit
    assert len(pace.rates(20, 10)) == 1
    assert pace.rates(21, 10) == []


def test_a_time_limit_does_not_take_the_last_step_away() -> None:
    pace = Pace(0.01, 100, seconds=1e6, taken=0)
    assert pace.rates(99, 10) == [pytest.approx(0)]
    assert pace.rates(100, 10) == []


def test_several_rates_at_once_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(0.01, 100, seconds=math.inf, taken=0)
    assert pace.rates(40, 20) == [learning_rate(0.01, (41 + step) / 100) for step in range(20)]
    assert len(pace.rates(93, 20)) == 7
    limited = Pace(0.01, 100, seconds=10.0, taken=0)
    assert len(limited.rates(0, 20)) == 1  # nothing is known of the duration of a step
    monkeypatch.setattr(time, "monotonic", lambda: limited.started + 8.0)  # of two seconds each
    assert limited.rates(4, 20) == [learning_rate(0.01, 1.0)][:0]
    monkeypatch.setattr(time, "monotonic", lambda: limited.started + 5.0)  # of a second each
    assert limited.rates(5, 20) == pytest.approx([learning_rate(0.01, passed) for passed in (0.6, 0.7, 0.8, 0.9)])


def test_a_likelihood_of_the_users_keeps_the_networks_own_outputs() -> None:
    trained = train(data(), replace(SETTINGS, likelihood=HeteroscedasticGaussian()))
    assert trained.noise is None
    assert isinstance(trained.likelihood, HeteroscedasticGaussian)
    assert float(trained.weights.sum()) == pytest.approx(1)


def test_members_without_weight_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "mean_weights", lambda *_: np.array([0.985, 0.015]))
    trained = train(data(), SETTINGS)
    assert [member.name for member in trained.members] == ["plain"]
    assert len(trained.weights) == SETTINGS.folds
