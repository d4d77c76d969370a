"""Training ensembles: folds, batches, weights, resuming and interrupting."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import mpgelu as mp
from mpgelu import native, stacking
from mpgelu.stacking import InterruptedWarning, Settings, Trained, stacking_weights, train

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
    folds = stacking._Folds.of(23, SETTINGS)
    assert folds.trained.shape[0] == 6
    for trained, held in zip(folds.trained, folds.held, strict=True):
        assert not set(trained.tolist()) & set(held.tolist())
    assert (folds.trained[:3] == folds.trained[3:]).all()  # the same folds for every rate
    real = [row for held, count in zip(folds.held[:3], folds.counts[:3], strict=True) for row in held[count].tolist()]
    assert len(real) == len(set(real))


def test_as_many_members_as_folds_leave_out_every_row_once() -> None:
    folds = stacking._Folds.of(23, replace(SETTINGS, members=7, rates=(0.1,)))
    assert sorted(folds.held[folds.counts].tolist()) == list(range(23))


def test_batches_go_through_all_rows_and_depend_on_their_number_alone() -> None:
    folds = stacking._Folds.of(50, SETTINGS)
    rows = folds.trained.shape[1]
    whole = stacking._batches(folds, 8, 0, 4 * rows // 8, seed=3)
    for network in range(len(folds.trained)):
        assert sorted(whole[network].flatten()[:rows].tolist()) == sorted(folds.trained[network].tolist())
    torch.testing.assert_close(stacking._batches(folds, 8, 3, 5, seed=3), whole[:, 3:8])
    assert not torch.equal(stacking._batches(folds, 8, 0, 5, seed=4), whole[:, :5])
    assert not torch.equal(whole[0, 0], whole[3, 0])  # networks that share rows take them in different orders


# weights


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
    assert found.score == pytest.approx(0)


# training


def test_the_variance_weights_have_mean_one_and_no_gradient() -> None:
    moments = mp.DiagonalMoments(torch.randn(2, 5, 2, requires_grad=True), torch.rand(2, 5, 2))
    weights = stacking.variance_weights(moments, 0.5)
    torch.testing.assert_close(weights.mean(-1), torch.ones(2))
    assert not weights.requires_grad
    variance = moments.variance[..., 0] + torch.exp(moments.mean[..., 1] + moments.variance[..., 1] / 2)
    torch.testing.assert_close(weights / weights[..., :1], (variance / variance[..., :1]).sqrt().detach())
    assert (stacking.variance_weights(moments, 0.0) == 1).all()


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
    stack = mp.Stack(stacking._new_networks(3, SETTINGS))
    trainer = stacking._steps(stack, SETTINGS, 50)
    before = [p.detach().clone() for p in stack.parameters()]
    x, y = torch.randn(6, 2, 16, 3), torch.randn(6, 2, 16)
    y[2] = torch.inf
    losses = trainer.steps(x, y, torch.ones_like(y), torch.full((2,), 0.01))
    assert torch.isfinite(losses).all(1).tolist() == [True, True, False, True, True, True]
    for now, old in zip(stack.parameters(), before, strict=True):
        changed = (now != old).flatten(1).any(1)
        assert changed.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("native_steps", [True, False])
def test_a_resumed_training_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_steps: bool
) -> None:
    settings = SETTINGS if native_steps else replace(SETTINGS, train_covariance="exact", steps=120)
    monkeypatch.setattr(stacking, "_STEPS_AT_ONCE", 3)
    whole = train(*data(), settings)
    real, calls = stacking._batches, []

    def stop_early(*arguments: object) -> Tensor:
        calls.append(arguments)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stacking, "_batches", stop_early)
    with pytest.warns(InterruptedWarning, match=r"after 9 of \d+ steps"):
        partial = train(*data(), settings, checkpoint=tmp_path)
    monkeypatch.setattr(stacking, "_batches", real)
    assert partial.interrupted
    assert partial.steps == 9
    same(train(*data(), settings, checkpoint=tmp_path), whole)
    same(train(*data(), settings, checkpoint=tmp_path), whole)  # finished already: nothing is left to do


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=5)
    train(*data(), settings, checkpoint=tmp_path)
    for other in (replace(settings, steps=6), replace(settings, seed=1)):
        with pytest.raises(mp.InputError, match="is the checkpoint of another fit"):
            train(*data(), other, checkpoint=tmp_path)
    with pytest.raises(mp.InputError, match="is the checkpoint of another fit"):
        train(*data(82), settings, checkpoint=tmp_path)


def test_killed_processes_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from dataclasses import replace
        from pathlib import Path
        from mpgelu import stacking
        from test_stacking import SETTINGS, data
        stacking._SECONDS_BETWEEN_CHECKPOINTS = 0
        print("ready", flush=True)
        stacking.train(*data(), replace(SETTINGS, steps=4_000), checkpoint=Path({str(tmp_path)!r}))
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        file = tmp_path / "training.safetensors"
        while not file.exists() and process.poll() is None:
            pass
        process.send_signal(signal.SIGKILL)
    assert file.exists()
    settings = replace(SETTINGS, steps=4_000)
    same(train(*data(), settings, checkpoint=tmp_path), train(*data(), settings))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["training.safetensors"]


def test_early_stopping_ends_when_nothing_improves() -> None:
    X, _, weights = data(60)
    noise = torch.randn(60, generator=torch.Generator().manual_seed(1))  # nothing to learn: soon only worse
    stopped = train(X, noise, weights, replace(SETTINGS, steps=4000, patience=400, rates=(0.001,)))
    assert stopped.steps < 4000


def test_warm_starts_go_on_from_given_networks() -> None:
    first = train(*data(), SETTINGS)
    second = train(*data(), SETTINGS, start=first.networks)
    assert second.losses[0].mean() < first.losses[0].mean() - 0.3
