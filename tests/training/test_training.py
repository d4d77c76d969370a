"""The training loop: it learns, repeats itself, stops, clips, and survives what is not finite."""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import (
    DiagonalMoments,
    FactoredMoments,
    FullMoments,
    Gaussian,
    HeteroscedasticGaussian,
    InputError,
    Stack,
)
from mpgelu.errors import TrainingError
from mpgelu.training import History, Interrupts, RecoveryWarning

RECOVERS = pytest.mark.filterwarnings("ignore::mpgelu.training.RecoveryWarning")


def data(rows: int = 64, models: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.rand(*models, rows, 2, generator=generator) * 2 - 1
    noise = torch.randn(*models, rows, generator=generator)
    return X.to(dtype), (torch.sin(3 * X[..., 0]) + X[..., 1] + 0.1 * noise).to(dtype)


def small(seed: int = 0, **settings: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return mp.network(2, **{"hidden": (8,), **settings})


def fit(net: nn.Module, given: tuple[Tensor, Tensor] | None = None, likelihood: Any = None, **settings: Any) -> History:
    chosen = {"epochs": 5, "batch_size": 16, "progress": False, **settings}
    return mp.fit(net, likelihood or HeteroscedasticGaussian(), given or data(), **chosen)


def sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def state(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def noise_bias(net: nn.Sequential, value: float) -> nn.Sequential:
    """Start from a log-variance that is far off."""
    last: Any = net[-1]
    with torch.no_grad():
        last.bias[1] = value
    return net


def loss_of(net: nn.Module, given: tuple[Tensor, Tensor], start: Any = FactoredMoments.certain) -> Tensor:
    with torch.no_grad():
        return -HeteroscedasticGaussian().expected_log_prob(net(start(given[0])), given[1]).mean(-1)


class Failing(nn.Module):
    """A likelihood that is NaN at some calls, for all or for one of the models; its gradient is NaN too."""

    def __init__(self, at: set[int], model: int | None = None, learn_noise: bool = False) -> None:
        super().__init__()
        self.at, self.model, self.calls = at, model, 0
        self.log_noise = nn.Parameter(torch.zeros(())) if learn_noise else torch.zeros(())

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        value: Tensor = HeteroscedasticGaussian().expected_log_prob(moments, y) * torch.exp(-self.log_noise)
        self.calls += 1
        if self.calls - 1 not in self.at:
            return value
        factor = torch.ones(value.shape[:-1]).double()
        factor[... if self.model is None else self.model] = torch.nan
        return value * factor[..., None].to(value)


# Learning


@pytest.mark.parametrize(
    ("optimizer", "batch_size"),
    [
        (None, 16),
        (sgd(0.02), 16),
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 16),
        (lambda p: torch.optim.AdamW(p, lr=0.01), 16),
        (lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"), 64),
    ],
    ids=["default", "SGD", "momentum", "AdamW", "LBFGS"],
)
def test_the_loss_goes_down(optimizer: Any, batch_size: int) -> None:
    net = small()
    before = loss_of(net, data())
    history = fit(net, epochs=30, optimizer=optimizer, batch_size=batch_size)
    assert history.loss.shape == (30,)
    assert history.validation.numel() == 0
    assert history.loss[-1] < history.loss[0] - 0.1
    assert loss_of(net, data()) < before - 0.1
    assert history.best_epoch.item() == 29
    assert history.seconds > 0
    assert not history.recoveries
    assert not history.interrupted


@pytest.mark.parametrize("start", [DiagonalMoments.certain, FullMoments.certain, FactoredMoments.certain, lambda x: x])
def test_any_start(start: Any) -> None:
    net = small()
    history = fit(net, epochs=20, moments=start)
    assert history.loss[-1] < history.loss[0]


def test_factored_and_full_moments_train_alike() -> None:
    given = data(dtype=torch.float64)
    nets = [small().double() for _ in range(2)]
    for net, start in zip(nets, (FactoredMoments.certain, FullMoments.certain), strict=True):
        fit(net, given, moments=start)
    torch.testing.assert_close(state(nets[0]), state(nets[1]), rtol=1e-9, atol=1e-10)


def test_input_noise_is_a_choice_of_moments() -> None:
    net = small()
    history = fit(net, epochs=20, moments=lambda x: FactoredMoments.of(x, torch.full_like(x, 0.01)))
    assert history.loss[-1] < history.loss[0]


def test_one_step_of_gradient_descent_by_hand() -> None:
    net, given = small(), data(16)
    twin = copy.deepcopy(net)
    fit(net, given, epochs=1, optimizer=sgd(0.1))
    loss = -HeteroscedasticGaussian().expected_log_prob(twin(FactoredMoments.certain(given[0])), given[1]).mean()
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    wanted = torch.cat([(p - 0.1 * g).flatten() for p, g in zip(twin.parameters(), gradients, strict=True)])
    torch.testing.assert_close(state(net), wanted.detach(), rtol=1e-4, atol=1e-6)


def test_compiled_training_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    nets = [small(), small()]
    for net, compiled in zip(nets, (True, False), strict=True):
        fit(net, epochs=2, compile=compiled)
    torch.testing.assert_close(state(nets[0]), state(nets[1]), rtol=1e-4, atol=1e-5)


# Repeatability


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("models", [(), (3,)])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(models: tuple[int, ...]) -> None:
    def run(seed: int) -> tuple[Tensor, Tensor]:
        net: nn.Module = Stack([small(i) for i in range(3)]) if models else small()
        history = fit(net, data(64, models), seed=seed)
        return state(net), history.loss

    (first, loss), (again, again_loss), (other, _) = run(7), run(7), run(8)
    assert torch.equal(first, again)
    assert torch.equal(loss, again_loss)
    assert not torch.equal(first, other)


def test_a_shuffle_of_its_own_frees_a_model_from_its_stack_mates() -> None:
    X, y = data(models=(3,))

    def train(which: list[int], own: bool) -> list[Tensor]:
        stack = Stack([small(seed) for seed in which])
        shuffle = (lambda generator: torch.rand(3, 64, generator=generator)[which]) if own else None
        fit(stack, (X[which], y[which]), shuffle=shuffle)
        return [state(net) for net in stack.unstack()]

    assert torch.equal(train([2], own=True)[0], train([0, 1, 2], own=True)[2])
    assert not torch.equal(train([2], own=False)[0], train([0, 1, 2], own=False)[2])


def test_global_random_numbers_are_left_alone() -> None:
    net = small()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fit(net, epochs=1)
    assert torch.equal(torch.rand(3), wanted)


# Batches


class Recorder(nn.Module):
    """A network that notes which rows it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.batches = small(), list[Tensor]()

    def forward(self, moments: Any) -> Any:
        if torch.is_grad_enabled():
            self.batches.append(moments.mean.detach().clone())
        return self.inner(moments)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [16, 16, 8]), (True, [16, 16])])
def test_every_row_once_per_epoch_in_a_new_order(drop_last: bool, sizes: list[int]) -> None:
    net, given = Recorder(), data(40)
    fit(net, given, epochs=2, drop_last=drop_last)
    assert [len(batch) for batch in net.batches] == sizes * 2
    epochs = [torch.cat(net.batches[: len(sizes)]), torch.cat(net.batches[len(sizes) :])]
    assert not torch.equal(*epochs)
    if not drop_last:
        for epoch in epochs:
            assert torch.equal(epoch.sort(0).values, given[0].sort(0).values)


def test_drop_last_keeps_the_only_batch() -> None:
    net = Recorder()
    fit(net, data(10), epochs=3, drop_last=True)
    assert [len(batch) for batch in net.batches] == [10, 10, 10]


# Penalty, scheduler, clipping


def test_the_penalty_is_part_of_the_loss() -> None:
    plain, heavy = small(gaussian_weights=True), small(gaussian_weights=True)
    layers = [layer for layer in heavy if isinstance(layer, mp.GaussianLinear)]

    def kl() -> Tensor:
        return torch.stack([layer.kl(0.01) for layer in layers]).sum()

    without = fit(plain, epochs=10)
    with_it = fit(heavy, epochs=10, penalty=kl)
    assert with_it.loss[0] > without.loss[0] + 1
    assert state(heavy).square().sum() != state(plain).square().sum()
    assert kl().item() < sum(layer.kl(0.01).item() for layer in plain if isinstance(layer, mp.GaussianLinear))


def test_the_scheduler_steps_after_every_batch() -> None:
    rates: list[float] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        def factor(step: int) -> float:
            rates.append(0.5**step)
            return rates[-1]

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    fit(small(), data(48), epochs=2, scheduler=scheduler, optimizer=sgd(0.01))
    assert rates == [0.5**step for step in range(7)]


@pytest.mark.parametrize("models", [0, 3])
def test_clipping_bounds_the_gradient_of_each_model(models: int) -> None:
    net: nn.Module = Stack([small(i) for i in range(models)]) if models else small()
    X, y = data(16, (models,) if models else ())
    y = y * 100
    before = [p.detach().clone() for p in net.parameters()]
    fit(net, (X, y), epochs=1, optimizer=sgd(1.0), clip=0.5)
    leading = (models,) if models else (1,)
    pairs = zip(net.parameters(), before, strict=True)
    moved = torch.cat([(p.detach() - b).reshape(*leading, -1) for p, b in pairs], -1)
    torch.testing.assert_close(moved.norm(dim=-1), torch.full(leading, 0.5), rtol=1e-4, atol=0)


def test_clipping_leaves_small_gradients_alone() -> None:
    nets = [small(), small()]
    for net, clip in zip(nets, (None, 1e6), strict=True):
        fit(net, clip=clip, optimizer=sgd(0.01))
    assert torch.equal(state(nets[0]), state(nets[1]))


def test_clipping_survives_a_gradient_whose_square_overflows() -> None:
    net = noise_bias(small(), -50.0)  # gradients of e^50, whose squares float32 does not hold
    history = fit(net, data(16), epochs=200, clip=10.0, optimizer=sgd(0.1))
    assert not history.recoveries
    assert loss_of(net, data(16)) < 1e10


class Scaled(nn.Module):
    """A network with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = small(), nn.Parameter(torch.ones(()))

    def forward(self, moments: Any) -> Any:
        out = self.inner(moments)
        return FullMoments(out.mean * self.scale, out.covariance * self.scale**2)


@RECOVERS
def test_a_parameter_may_be_a_single_number() -> None:
    net = Scaled()
    history = fit(net, likelihood=Failing({5}), validation=data(10), clip=1.0)
    assert len(history.recoveries) == 1
    assert net.scale.isfinite()
    assert net.scale.item() != 1


# Validation and early stopping


def test_the_best_state_is_restored() -> None:
    net = small()
    train, held_out = data(16), data(200)
    history = fit(net, train, validation=held_out, epochs=60, optimizer=sgd(0.2))
    assert history.validation.shape == (60,)
    best = int(history.validation.argmin())
    assert history.best_epoch.item() == best
    torch.testing.assert_close(loss_of(net, held_out), history.validation[best], rtol=1e-5, atol=1e-6)
    again = small()
    fit(again, train, epochs=best + 1, optimizer=sgd(0.2))
    assert torch.equal(state(net), state(again))


def test_the_best_likelihood_is_restored_with_its_network() -> None:
    X, y = data(16)
    net, likelihood = small(outputs=1), Gaussian(learn_noise=True)
    held_out = (X, y + 3)  # gets worse as the noise shrinks
    history = fit(
        net, (X, y), likelihood, validation=held_out, epochs=80, optimizer=lambda p: torch.optim.Adam(p, lr=0.1)
    )
    assert history.best_epoch.item() < 79
    with torch.no_grad():
        found = -likelihood.expected_log_prob(net(FactoredMoments.certain(X)), held_out[1]).mean()
    torch.testing.assert_close(found, history.validation[history.best_epoch], rtol=1e-5, atol=1e-6)


def test_each_model_of_a_stack_keeps_its_own_best() -> None:
    stack = Stack([small(i) for i in range(3)])
    held_out = data(100, (3,))
    history = fit(stack, data(16, (3,)), validation=held_out, epochs=60, optimizer=sgd(0.2))
    assert torch.equal(history.best_epoch, history.validation.argmin(0))
    torch.testing.assert_close(loss_of(stack, held_out), history.validation.amin(0), rtol=1e-5, atol=1e-6)


def test_a_type_of_moments_stands_for_its_certain_inputs() -> None:
    by_type, by_function, exact = (
        fit(small(), moments=m).loss for m in (DiagonalMoments, DiagonalMoments.certain, FactoredMoments)
    )
    assert torch.equal(by_type, by_function)
    assert not torch.equal(by_type, exact)


def test_patience_stops_the_run() -> None:
    history = fit(small(), data(16), validation=data(100), epochs=500, patience=3, optimizer=sgd(0.3))
    epochs = len(history.loss)
    assert epochs < 500
    assert epochs == history.best_epoch.item() + 1 + 3
    assert len(history.validation) == epochs


# Non-finite losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", [None, sgd(0.02)], ids=["Adam", "SGD"])
def test_a_non_finite_loss_is_survived_and_told(dtype: torch.dtype, optimizer: Any) -> None:
    net, given = small().to(dtype), data(dtype=dtype)
    with pytest.warns(RecoveryWarning, match=r"step 30: the loss became non-finite; .*last good state") as record:
        history = fit(net, given, Failing({30}), epochs=20, optimizer=optimizer)
    assert len(history.recoveries) == len(record) == 1
    assert record[0].filename == __file__
    assert state(net).isfinite().all()
    assert history.loss[-1] < history.loss[0]
    assert loss_of(net, given).isfinite()


@RECOVERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovery_goes_back_to_a_state_of_the_run_and_halves_the_step(dtype: torch.dtype) -> None:
    given = data(16, dtype=dtype)

    def run(epochs: int, at: set[int], lr: float = 0.05) -> Tensor:
        net = small().to(dtype)
        fit(net, given, Failing(at), epochs=epochs, optimizer=sgd(lr))
        return state(net)

    start = state(small().to(dtype))
    assert torch.equal(run(4, {3}), start)  # the last copy was taken before the first step
    after = run(5, {3})
    moved, full = after - start, run(1, set()) - start
    torch.testing.assert_close(moved, full / 2, rtol=1e-3, atol=1e-6)


@RECOVERS
def test_lbfgs_forgets_the_steps_that_were_undone() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")

    net = small()
    history = fit(net, likelihood=Failing({20, 21}), epochs=12, batch_size=64, optimizer=optimizer)
    assert 1 <= len(history.recoveries) <= 2  # as long as the failures last
    assert history.loss[-4:].isfinite().all()
    assert (history.loss[-4:].diff() < 0).all()


@RECOVERS
def test_a_learned_noise_survives_too() -> None:
    net, likelihood = small(), Failing({5}, learn_noise=True)
    history = fit(net, likelihood=likelihood, epochs=10)
    assert len(history.recoveries) == 1
    assert all(p.isfinite().all() for p in likelihood.parameters())
    assert history.loss[-1].isfinite()


@RECOVERS
def test_a_step_far_too_large_ends_finite() -> None:
    net = small()
    history = fit(net, epochs=40, optimizer=sgd(1e4))
    assert history.recoveries
    assert state(net).isfinite().all()
    assert loss_of(net, data()).isfinite()


@RECOVERS
def test_the_last_step_is_checked_too() -> None:
    net, given = small(), data(16)
    fit(net, given, epochs=1, optimizer=sgd(1e30))
    assert state(net).isfinite().all()
    assert loss_of(net, given).isfinite()


@pytest.mark.parametrize("optimizer", [None, sgd(0.02)], ids=["Adam", "SGD"])
def test_one_bad_model_does_not_disturb_the_others(optimizer: Any) -> None:
    def run(likelihood: nn.Module) -> tuple[Stack, History]:
        stack = Stack([small(i) for i in range(3)])
        return stack, fit(stack, data(64, (3,)), likelihood, epochs=20, optimizer=optimizer)

    healthy, _ = run(Failing(set()))
    with pytest.warns(RecoveryWarning, match="1 of 3 models"):
        sick, history = run(Failing({25, 43}, model=1))
    assert len(history.recoveries) == 2
    for good, bad in zip(healthy.parameters(), sick.parameters(), strict=True):
        assert torch.equal(good[[0, 2]], bad[[0, 2]])
        assert not torch.equal(good[1], bad[1])
        assert bad.isfinite().all()
    assert history.loss[:, [0, 2]].isfinite().all()
    assert loss_of(sick, data(64, (3,))).isfinite().all()


@RECOVERS
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=5)])
def test_second_order_steps_recover(optimizer: Any) -> None:
    net = small()
    history = fit(net, likelihood=Failing({12, 13, 14, 15, 16}), epochs=15, batch_size=64, optimizer=optimizer)
    assert state(net).isfinite().all()
    assert loss_of(net, data()).isfinite()
    assert history.recoveries


@RECOVERS
def test_too_many_recoveries_end_the_run() -> None:
    with pytest.raises(TrainingError, match=r"non-finite 21 times.*lower the learning rate, clip"):
        fit(small(), likelihood=Failing(set(range(1000))), epochs=100)


@RECOVERS
def test_an_exponential_that_overflows_at_the_start_is_named() -> None:
    net = noise_bias(small(), -200.0)  # precision e^200
    with pytest.raises(TrainingError, match="non-finite"):
        fit(net, epochs=100)
    assert state(net).isfinite().all()


# Interruption


class Interrupting(torch.optim.lr_scheduler.LRScheduler):
    """Presses Ctrl-C in a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, at: int) -> None:
        self.at = at
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_an_interruption_keeps_the_best_state() -> None:
    net, held_out = small(), data(100)
    history = fit(
        net, data(16), validation=held_out, epochs=100, optimizer=sgd(0.05), scheduler=lambda o: Interrupting(o, 8)
    )
    assert history.interrupted
    assert len(history.loss) == len(history.validation) == 7
    torch.testing.assert_close(loss_of(net, held_out), history.validation.min(), rtol=1e-5, atol=1e-6)


def test_an_interruption_in_the_first_epoch() -> None:
    net = small()
    history = fit(net, epochs=100, scheduler=lambda o: Interrupting(o, 1))
    assert history.interrupted
    assert history.loss.shape == (0,)
    assert state(net).isfinite().all()


def test_the_second_interruption_does_not_wait_and_others_hear_the_first() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.seen
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert heard == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interruption_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        history = fit(small(), epochs=3, scheduler=lambda o: Interrupting(o, 1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (history.interrupted, len(history.loss)) == (False, 3)


def test_training_in_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        history = pool.submit(fit, small(), epochs=2).result()
    assert not history.interrupted


# Bad input

NAN = float("nan")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ((torch.ones(5, 2), torch.ones(5, 1)), ["(5, 2)", "(5, 1)", "targets (rows,)"]),
        ((torch.ones(5, 2), torch.ones(4)), ["(5, 2)", "(4,)"]),
        ((torch.ones(5), torch.ones(5)), ["features (rows, n)", "(5,)"]),
        ((torch.ones(0, 2), torch.ones(0)), ["no rows", "(0, 2)"]),
        ((torch.ones(5, 2).long(), torch.ones(5)), ["X", "float", "torch.int64", "X.float()"]),
        ((torch.ones(5, 2), torch.ones(5).long()), ["y", "float", "torch.int64", "y.float()"]),
        ((torch.tensor([[1.0, NAN]]), torch.ones(1)), ["X", "finite", "nan", "(0, 1)"]),
        ((torch.ones(1, 2), torch.tensor([float("inf")])), ["y", "finite", "inf", "(0,)"]),
    ],
)
def test_bad_data(given: tuple[Tensor, Tensor], parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        fit(small(), given)
    assert all(part in str(error.value) for part in ("fit: data", *parts)), str(error.value)
    with pytest.raises(InputError, match="fit: validation"):
        fit(small(), validation=given)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epochs": 0}, "fit: epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "fit: batch_size must be at least 1, got 0"),
        ({"patience": 3}, "fit: patience needs validation data"),
    ],
)
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        fit(small(), **settings)


def test_a_parameter_outside_the_loss_is_named() -> None:
    with pytest.raises(TrainingError, match="takes no part in the loss"):
        fit(small(gaussian_weights=True), moments=lambda x: x)


def test_a_frozen_parameter_stays() -> None:
    net = small(rate=0)
    first: Any = net[0]
    first.weight.requires_grad_(False)
    before = first.weight.clone()
    fit(net)
    assert torch.equal(first.weight, before)


def test_without_a_compiler_compiled_training_is_plain_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mpgelu import native

    native.available()  # found before the compilers vanish
    monkeypatch.setattr("shutil.which", lambda name: None)
    native.can_compile.cache_clear()
    torch.manual_seed(0)
    network, x = mp.network(2, (4,)), torch.randn(8, 2)
    with caplog.at_level("INFO", logger="mpgelu"):
        for _ in range(2):
            history = mp.fit(
                network, mp.HeteroscedasticGaussian(), (x, x[:, 0]), epochs=2, compile=True, progress=False
            )
    native.can_compile.cache_clear()
    assert torch.isfinite(history.loss).all()
    assert [record.message[:15] for record in caplog.records] == ["No C++ compiler"]


def test_a_frozen_network_is_refused() -> None:
    network = mp.network(2, (4,)).requires_grad_(False)
    with pytest.raises(InputError, match="fit: the network has no parameters to train"):
        mp.fit(network, mp.HeteroscedasticGaussian(), (torch.ones(3, 2), torch.ones(3)), progress=False)


@pytest.mark.parametrize("wrong", ["adam", torch.optim.SGD([nn.Parameter(torch.zeros(1))])])
def test_an_optimizer_that_is_no_function_is_refused(wrong: Any) -> None:
    remedy = r"use optimizer=lambda parameters: torch.optim.Adam\(parameters, lr=0.01\)"
    with pytest.raises(InputError, match=rf"fit: optimizer must be a function .*got an? (str|SGD); {remedy}"):
        mp.fit(small(), HeteroscedasticGaussian(), data(), epochs=1, optimizer=wrong)
