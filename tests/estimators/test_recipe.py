"""Training ensembles: folds, batches, weights, resuming and interrupting."""

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
from scipy.optimize import minimize
from torch import Tensor

import mpgelu as mp
from mpgelu import DiagonalMoments, native
from mpgelu.estimators.recipe import InterruptedWarning, Settings, Trained, train, training
from mpgelu.estimators.recipe.folds import Batches, Folds
from mpgelu.estimators.recipe.networks import new_networks
from mpgelu.estimators.recipe.steps import TorchSteps, make_steps, variance_weights
from mpgelu.estimators.recipe.weights import narrow_noise, stacking_weights
from mpgelu.native.perceptron import Trainer as NativeTrainer

SETTINGS = Settings(
    hidden=(8, 6),
    rates=(0.001, 0.1),
    members=3,
    steps=120,
    batch_size=16,
    learning_rate=0.01,
    beta=0.5,
    noise="heteroscedastic",
    gaussian_weights=False,
    train_covariance="diagonal",
    covariance="exact",
    patience=None,
    seed=0,
)


def data(rows: int = 83) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    X = torch.randn(rows, 3)
    return X, X[:, 0] - 0.5 * X[:, 1] ** 2 + 0.1 * torch.randn(rows), torch.ones(rows)


def same(first: Trained, second: Trained) -> None:
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=0)
    for ours, theirs in zip(first.stack.parameters(), second.stack.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# folds and batches


def test_every_network_is_judged_by_rows_it_has_not_seen() -> None:
    folds = Folds.of(23, SETTINGS)
    assert folds.trained.shape[0] == 6
    for trained, held in zip(folds.trained, folds.held, strict=True):
        assert not set(trained.tolist()) & set(held.tolist())
    assert (folds.trained[:3] == folds.trained[3:]).all()  # the same folds for every rate
    real = [row for held, count in zip(folds.held[:3], folds.counts[:3], strict=True) for row in held[count].tolist()]
    assert len(real) == len(set(real))


def test_as_many_members_as_folds_leave_out_every_row_once() -> None:
    folds = Folds.of(23, replace(SETTINGS, members=7, rates=(0.1,)))
    assert sorted(folds.held[folds.counts].tolist()) == list(range(23))


def test_batches_go_through_all_rows_and_depend_on_their_number_alone() -> None:
    folds = Folds.of(50, SETTINGS)
    rows = folds.trained.shape[1]
    whole = Batches(folds, 8, seed=3).rows(0, 4 * rows // 8)
    for network in range(len(folds.trained)):
        assert sorted(whole[network].flatten()[:rows].tolist()) == sorted(folds.trained[network].tolist())
    batches = Batches(folds, 8, seed=3)
    for first, count in ((3, 5), (8, 2), (0, 1)):
        torch.testing.assert_close(batches.rows(first, count), whole[:, first : first + count])
    assert not torch.equal(Batches(folds, 8, seed=4).rows(0, 5), whole[:, :5])
    assert not torch.equal(whole[0, 0], whole[3, 0])  # networks that share rows take them in different orders


# weights


def standard_deviations(stack: mp.Stack, weights: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mixture without the differences between rates, and of its networks on average, row by row in numpy."""
    moments = stack(DiagonalMoments.certain(X.expand(len(stack), *X.shape)))
    mean, variance = moments.mean.detach().numpy(), moments.variance.detach().numpy()
    alone = variance[..., 0] + np.exp(mean[..., 1] + variance[..., 1] / 2)
    within = np.concatenate([mean[i : i + 3, :, 0] - mean[i : i + 3, :, 0].mean(0) for i in range(0, len(mean), 3)])
    average = weights.numpy() @ alone
    return torch.tensor(average + weights.numpy() @ within**2).sqrt(), torch.tensor(average).sqrt()


def test_disagreement_of_folds_does_not_widen_the_prediction() -> None:
    torch.manual_seed(0)
    stack, X, weights = mp.Stack(new_networks(3, SETTINGS)), torch.randn(400, 3), torch.tensor([0.2] * 3 + [2 / 15] * 3)
    with torch.no_grad():  # noise that is larger than the disagreement
        bias = [p for name, p in stack.state()[0].items() if name.endswith("bias")][-1]
        bias[:, 1] = 1.0
    mixed, alone = standard_deviations(stack, weights, X)
    share = float((1 - (alone / mixed) ** 2).mean())
    factor = narrow_noise(stack, weights, 3, X, "diagonal")
    assert factor == pytest.approx(1 - share / (1 - share), rel=1e-4)
    assert 0.5 < factor < 0.95
    torch.testing.assert_close(bias[:, 1].detach(), torch.full((6,), 1 + math.log(factor)))
    after, _ = standard_deviations(stack, weights, X)
    assert float((after / mixed).mean()) < 0.99
    assert float((after / alone).mean()) == pytest.approx(1, abs=0.05)


def test_a_single_network_of_each_rate_keeps_its_noise() -> None:
    stack = mp.Stack(new_networks(3, replace(SETTINGS, members=1)))
    before = [p.clone() for p in stack.parameters()]
    assert narrow_noise(stack, torch.tensor([0.5, 0.5]), 1, torch.randn(50, 3), "exact") == 1
    for now, old in zip(stack.parameters(), before, strict=True):
        assert torch.equal(now, old)


def test_stacking_weights_maximise_the_mixture() -> None:
    torch.manual_seed(0)
    logs, rows = torch.randn(200, 4, dtype=torch.float64) * 2, torch.rand(200, dtype=torch.float64)
    found = stacking_weights(logs, rows)
    shares = (rows / rows.sum()).numpy()

    def loss(free: np.ndarray) -> float:
        weights = np.exp(free) / np.exp(free).sum()
        return -float(shares @ np.log(np.exp(logs.numpy()) @ weights))

    best = minimize(loss, np.zeros(4))
    assert found.score == pytest.approx(-best.fun, abs=1e-4)
    np.testing.assert_allclose(found.weights, np.exp(best.x) / np.exp(best.x).sum(), atol=5e-3)


def test_a_useless_candidate_is_left_out() -> None:
    logs = torch.stack([torch.zeros(50), torch.full((50,), -5.0)], 1)
    found = stacking_weights(logs, torch.ones(50))
    assert found.weights.tolist() == [pytest.approx(1), 0.0]
    assert found.score == pytest.approx(0, abs=1e-6)


def test_many_candidates_share_the_weight() -> None:
    found = stacking_weights(torch.zeros(10, 60), torch.ones(10))
    torch.testing.assert_close(found.weights, torch.full((60,), 1 / 60, dtype=torch.float64))


# training


def test_the_variance_weights_have_mean_one_and_no_gradient() -> None:
    moments = mp.DiagonalMoments(torch.randn(2, 5, 2, requires_grad=True), torch.rand(2, 5, 2))
    weights = variance_weights(moments, 0.5)
    torch.testing.assert_close(weights.mean(-1), torch.ones(2))
    assert not weights.requires_grad
    variance = moments.variance[..., 0] + torch.exp(moments.mean[..., 1] + moments.variance[..., 1] / 2)
    torch.testing.assert_close(weights / weights[..., :1], (variance / variance[..., :1]).sqrt().detach())
    assert (variance_weights(moments, 0.0) == 1).all()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.7])
def test_native_steps_are_those_of_torch(beta: float) -> None:
    settings = replace(SETTINGS, beta=beta, steps=30)
    with native.disabled():
        plain = train(*data(), settings)
    fused = train(*data(), settings)
    for ours, theirs in zip(fused.networks.parameters(), plain.networks.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert fused.score == pytest.approx(plain.score, abs=1e-4)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_a_step_that_is_not_finite_is_left_out() -> None:
    stack = mp.Stack(new_networks(3, SETTINGS))
    trainer = make_steps(stack, SETTINGS, 50)
    before = [p.detach().clone() for p in stack.parameters()]
    x, y = torch.randn(6, 2, 16, 3), torch.randn(6, 2, 16)
    y[2] = torch.inf
    losses = trainer.steps(x, y, torch.ones_like(y), torch.full((2,), 0.01))
    assert torch.isfinite(losses).all(1).tolist() == [True, True, False, True, True, True]
    for now, old in zip(stack.parameters(), before, strict=True):
        changed = (now != old).flatten(1).any(1)
        assert changed.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("native_steps", [True, False])
@pytest.mark.parametrize("place", ["steps", "score"])
def test_an_interrupted_training_is_resumed_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_steps: bool, place: str
) -> None:
    settings = SETTINGS if native_steps else replace(SETTINGS, train_covariance="exact")
    monkeypatch.setattr(training, "_STEPS_AT_ONCE", 3)
    whole = train(*data(), settings)
    kind: Any = NativeTrainer if native_steps else TorchSteps
    owner, name = (kind, "steps") if place == "steps" else (training, "held_out_score")
    real, calls = getattr(owner, name), []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # a real Ctrl-C, in the middle of the work
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.warns(InterruptedWarning, match="after 9 of 120 steps"):
            partial = train(*data(), settings, checkpoint=tmp_path)
    assert partial.interrupted
    assert partial.steps == 9
    same(train(*data(), settings, checkpoint=tmp_path), whole)
    same(train(*data(), settings, checkpoint=tmp_path), whole)  # finished already: nothing is left to do


def test_checkpoints_of_different_runs_live_side_by_side(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=5)
    runs = [(data(), settings), (data(), replace(settings, steps=6)), (data(82), settings)]
    results = [train(*rows, chosen, checkpoint=tmp_path) for rows, chosen in runs]
    assert len(list(tmp_path.iterdir())) == 3
    for (rows, chosen), result in zip(runs, results, strict=True):
        same(train(*rows, chosen, checkpoint=tmp_path), result)


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
        train(*data(), replace(SETTINGS, steps=4_000), checkpoint=Path({str(tmp_path)!r}))
        """
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not list(tmp_path.glob("training*")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("training*"))
    settings = replace(SETTINGS, steps=4_000)
    same(train(*data(), settings, checkpoint=tmp_path), train(*data(), settings))


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_steps_that_are_left_out_are_said_and_too_many_are_an_error() -> None:
    X, y, weights = data()
    y[3] = 1e25  # its square overflows
    with pytest.raises(mp.TrainingError, match=r"was not finite in .* of the steps"):
        train(X, y, weights, replace(SETTINGS, batch_size=40))
    with pytest.warns(mp.RecoveryWarning, match="steps whose loss was not finite were left out"):
        train(X, y, weights, replace(SETTINGS, batch_size=8))


def test_only_the_noise_is_constant_even_if_a_hidden_layer_has_two_units() -> None:
    settings = replace(SETTINGS, hidden=(2,), noise="homoscedastic", steps=20)
    before = mp.Stack(new_networks(3, settings))
    after = train(*data(), settings).networks
    (first, last), (first_now, last_now) = (
        [p for name, p in stack.state()[0].items() if name.endswith("weight")] for stack in (before, after)
    )
    assert (first != first_now).any(dim=(0, 2)).tolist() == [True, True]  # both units are trained
    assert (last[:, 0] != last_now[:, 0]).any()
    assert (last_now[:, 1] == 0).all()


def test_training_leaves_the_global_random_numbers_alone() -> None:
    rows = data()
    state = torch.get_rng_state()
    train(*rows, replace(SETTINGS, steps=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_early_stopping_ends_when_nothing_improves() -> None:
    X, _, weights = data(60)
    noise = torch.randn(60, generator=torch.Generator().manual_seed(1))  # nothing to learn: soon only worse
    stopped = train(X, noise, weights, replace(SETTINGS, steps=4000, patience=400, rates=(0.001,)))
    assert stopped.steps < 4000


def test_warm_starts_go_on_from_given_networks() -> None:
    first = train(*data(), SETTINGS)
    given = [p.detach().clone() for p in first.networks.parameters()]
    second = train(*data(), SETTINGS, start=first.networks)
    assert all(map(torch.equal, given, first.networks.parameters()))  # which stay as they were
    assert second.losses[0].mean() < first.losses[0].mean() - 0.3
