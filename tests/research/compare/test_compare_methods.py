"""The compared methods: one contract for all, and what is particular to each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from mpgelu import MPGELU, Dropout, MPGELURegressor, ReLU
from mpgelu.estimators.recipe import settings_of
from mpgelu.layers import Periodic
from mpgelu.predictive import Predictive
from mpgelu.research.compare import ablations, gaussian_process, methods, neural_peers
from mpgelu.research.compare.gaussian_process import GaussianProcess
from mpgelu.research.compare.interface import Rows, Standardised, held_out
from mpgelu.research.compare.methods import GROUPS, METHODS, Recipe
from mpgelu.research.compare.neural_peers import DeepEnsemble, MCDropout
from mpgelu.research.compare.predicted import Points, Predicted, Quantiles

NOISE = 20.0
PEERS = GROUPS["peers"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural_peers, "_SHORT", (64, 300))


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Peers warn about themselves when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def problem(rows: int, seed: int = 0) -> tuple[Rows, Rows]:
    """A line in the first of three features, far from zero, with noise; the last feature is constant."""
    generator = np.random.default_rng(seed)
    X = np.column_stack([generator.normal(50, 10, rows), generator.normal(0, 1e-3, rows), np.full(rows, 7.0)])
    return X, 5000 + 10 * (X[:, 0] - 50) + generator.normal(0, NOISE, rows)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", PEERS)
def test_a_method_finds_the_line_and_its_noise_in_original_units(name: str) -> None:
    pytest.importorskip(METHODS[name].module)
    X, y = problem(500)
    method = METHODS[name].build("boston", 0)
    method.fit(X, y)
    new, _ = problem(200, seed=1)
    predicted = method.predict_distribution(new)
    assert isinstance(predicted, METHODS[name].gives)
    error = predicted.mean.double() - torch.from_numpy(5000 + 10 * (new[:, 0] - 50))
    assert error.square().mean().sqrt() < NOISE
    alone = method.predict_distribution(new[:1])
    assert alone.mean.shape == (1,)
    if not isinstance(predicted, Points):
        assert 0.5 * NOISE < spread(predicted).median() < 1.6 * NOISE
        if name != "mc-dropout":
            torch.testing.assert_close(spread(alone), spread(predicted)[:1], rtol=1e-4, atol=0)


def spread(predicted: Predicted) -> torch.Tensor:
    """The standard deviation, or that of a Gaussian with the same 68 % interval."""
    assert not isinstance(predicted, Points)
    if isinstance(predicted, Predictive):
        return predicted.stddev
    lower, upper = predicted.interval(0.6827)
    return (upper - lower) / 2


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", [name for name in PEERS if name not in ("ngboost", "gaussian-process")])
def test_the_seed_decides(name: str) -> None:
    pytest.importorskip(METHODS[name].module)
    X, y = problem(80)

    def predicted(seed: int) -> torch.Tensor:
        method = METHODS[name].build("boston", seed)
        method.fit(X, y)
        torch.manual_seed(0)
        return method.predict_distribution(X).mean

    assert torch.equal(predicted(3), predicted(3))
    assert not torch.equal(predicted(3), predicted(4))


@pytest.mark.parametrize("kind", [DeepEnsemble, MCDropout])
def test_moments_are_those_of_the_mixture(kind: type[DeepEnsemble] | type[MCDropout]) -> None:
    X, y = problem(60)
    method = Standardised(kind(8, 0))
    method.fit(X, y)
    predictive = method.predict_distribution(X)
    assert isinstance(predictive, Predictive)
    members = [
        Predictive.gaussian(mean, torch.zeros_like(mean), variance)
        for mean, variance in zip(predictive.means.unbind(-1), predictive.variances.unbind(-1), strict=True)
    ]
    assert len(members) == (5 if kind is DeepEnsemble else 50)
    mixture = Predictive.mixture(members)
    for name in ("mean", "epistemic_variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(predictive, name), getattr(mixture, name), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(predictive.log_prob(5000.0), mixture.log_prob(5000.0), rtol=1e-4, atol=1e-4)


def test_dropout_takes_its_noise_from_the_network_that_did_not_see_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def train(X: torch.Tensor, y: torch.Tensor, rows: list[torch.Tensor], *other: object, **more: object) -> object:
        trained.extend(map(len, rows))
        biases = torch.tensor([0.0, 5.0]).reshape(2, 1, 1)
        return [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 4, 1), biases]

    monkeypatch.setattr(neural_peers, "_train", train)
    method = MCDropout(4, 0)
    method.fit(np.zeros((100, 1)), np.tile([0.1, -0.1], 50))
    predictive = method.predict_distribution(np.zeros((3, 1)))
    assert trained == [90, 100]
    torch.testing.assert_close(predictive.mean, torch.full((3,), 5.0))
    torch.testing.assert_close(predictive.variance, torch.full((3,), 0.01), rtol=0.1, atol=0)


def test_every_member_keeps_the_weights_best_on_its_own_held_out_rows() -> None:
    X, y = torch.randn(60, 5), torch.randn(60)  # nothing to learn, so that training makes it worse
    train, test = [torch.arange(50), torch.arange(10, 60)], [torch.arange(50, 60), torch.arange(10)]

    def losses(weights: list[torch.Tensor]) -> torch.Tensor:
        seen = torch.stack(test)
        return neural_peers._negative_log_density(neural_peers._forward(weights, X[seen]), y[seen]).mean(1)

    torch.manual_seed(0)
    last = losses(neural_peers._train(X, y, train, 20, 2, neural_peers._negative_log_density))
    torch.manual_seed(0)
    best = losses(neural_peers._train(X, y, train, 20, 2, neural_peers._negative_log_density, test))
    assert (best < 0.5 * last).all()
    assert (best < 2).all()


def test_a_member_sees_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    X, seen = torch.arange(20.0)[:, None], []
    forward = neural_peers._forward

    def spy(weights: list[torch.Tensor], batch: torch.Tensor, rate: float) -> torch.Tensor:
        seen.append(batch[..., 0])
        return forward(weights, batch, rate)

    monkeypatch.setattr(neural_peers, "_forward", spy)
    neural_peers._train(X, X[:, 0], [torch.arange(5), torch.arange(20)], 2, 1, neural_peers._squared_error)
    few, all_rows = torch.cat(seen, 1)
    assert set(few.tolist()) == set(range(5))
    assert set(all_rows.tolist()) == set(range(20))


def test_the_long_training_is_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(neural_peers, "_LONG", (7, 1))
    monkeypatch.setattr(neural_peers, "_SHORT", (3, 1))

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(y.shape[1])
        return neural_peers._squared_error(outputs, y)

    for rows in (1999, 2000):
        neural_peers._train(torch.zeros(rows, 1), torch.zeros(rows), [torch.arange(rows)], 2, 1, loss)
    assert sizes == [3, 7]


@pytest.mark.parametrize("build", [METHODS["deep-ensemble"].build, METHODS["mc-dropout"].build])
def test_the_network_is_wider_for_protein(build: Callable[[str, int], object]) -> None:
    widths = [build(name, 0).method.hidden for name in ("boston", "protein")]  # type: ignore[attr-defined]
    assert widths == [50, 100]


def test_marginal_likelihood_of_the_process_and_its_gradient() -> None:
    generator = np.random.default_rng(0)
    X, y = torch.from_numpy(generator.normal(size=(12, 3))), torch.from_numpy(generator.normal(size=12))
    logs = np.log([1.3, 0.8, 2.0, 1.1, 0.2])
    kernel = ConstantKernel(1.3) * Matern([0.8, 2.0, 1.1], nu=2.5) + WhiteKernel(0.2)
    covariance = kernel(X.numpy())
    value, gradient = gaussian_process._loss(logs, X, y)
    assert value == pytest.approx(-stats.multivariate_normal(np.zeros(12), covariance).logpdf(y.numpy()))

    def alone(at: Rows) -> float:
        return gaussian_process._loss(at, X, y)[0]

    numeric = optimize.approx_fprime(logs, alone, 1e-6)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)


def test_posterior_of_the_process_is_that_of_scikit_learn() -> None:
    X, y = problem(60)
    X, y = (X[:, :2] - X[:, :2].mean(0)) / X[:, :2].std(0), (y - y.mean()) / y.std()
    method = GaussianProcess()
    method.fit(X, y)
    scales = method.scales.tolist()
    kernel = ConstantKernel(method.amplitude.item()) * Matern(scales, nu=2.5) + WhiteKernel(method.noise.item())
    reference = GaussianProcessRegressor(kernel, optimizer=None).fit(X, y)
    mean, stddev = reference.predict(X[:9] + 0.3, return_std=True)
    predictive = method.predict_distribution(X[:9] + 0.3)
    np.testing.assert_allclose(predictive.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(predictive.stddev, stddev, rtol=1e-6)
    assert (predictive.aleatoric_variance == method.noise).all()


def test_score_of_quantiles_is_that_of_as_many_equally_likely_values() -> None:
    generator = torch.Generator().manual_seed(0)
    values, y = torch.randn(7, 50, generator=generator).double(), torch.randn(7, generator=generator).double()
    quantiles = Quantiles(values)
    distances = (values - y[:, None]).abs().mean(1)
    expected = distances - (values[:, :, None] - values[:, None]).abs().mean((1, 2)) / 2
    torch.testing.assert_close(quantiles.crps(y), expected)
    torch.testing.assert_close(quantiles.affine(3.0, 1.0).crps(3 * y + 1), 3 * expected)
    lower, upper = quantiles.interval(0.9)  # 0.05 and 0.95 are among the fifty levels
    torch.testing.assert_close(lower, values.sort(-1).values[:, 2])
    torch.testing.assert_close(upper, values.sort(-1).values[:, 47])


@pytest.mark.parametrize("name", ablations.OURS)
def test_our_estimator_takes_the_settings_of_each_ablation(name: str) -> None:
    if reason := METHODS[f"mpgelu-{name}"].missing:
        pytest.skip(reason)
    X, y = problem(60)
    settings = {"steps": 3} | ablations.OURS[name][1]
    model = MPGELURegressor(**settings, random_state=0).fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    assert sum(model.kind_weights_.values()) == pytest.approx(1)


def test_deep_ensemble_of_our_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    class Ensemble:
        def __init__(self, *arguments: object) -> None:
            made.append(arguments)

        def fit(self, X: Rows, y: Rows) -> None:
            pass

    monkeypatch.setattr(ablations, "DeepEnsemble", Ensemble)
    for rows in (300, 1000, 9000):
        ablations.SameSizeEnsemble(3).fit(np.zeros((rows, 2)), np.zeros(rows))
        settings = settings_of(MPGELURegressor(), rows, 2)
        trained_long = settings.folds * sum(kind.effort == 1 for kind in settings.kinds)
        assert made.pop() == (settings.kinds[0].hidden, 3, trained_long, (settings.batch_size, settings.steps))


def layers_of(name: str) -> list[set[type]]:
    """Types of the layers of each kind of networks of an ablation, for two features."""
    settings = settings_of(MPGELURegressor(**ablations.OURS[name][1]), 60, 2)
    made = (settings.network(2, kind, 2) for kind in settings.kinds)
    return [{type(layer) for layer in network.modules()} for network in made]


def test_ablations_leave_out_what_they_say() -> None:
    assert any(Dropout in layers for layers in layers_of("plain"))  # as the default has
    assert not any(Dropout in layers for layers in layers_of("no-dropout"))
    assert len(layers_of("no-dropout")) == len(layers_of("constant"))
    pairs = list(zip(layers_of("moments"), layers_of("relu-moments"), strict=True))
    assert pairs
    for mpgelu, relu in pairs:
        assert mpgelu - {MPGELU} == relu - {ReLU}
        assert MPGELU in mpgelu
        assert ReLU in relu
        assert Dropout in relu
    assert not any(Periodic in layers for layers in layers_of("plain"))
    assert len(layers_of("plain")) == len(layers_of("constant"))
    assert not any({MPGELU, Dropout} & layers for layers in layers_of("smooth"))
    assert all(Periodic in layers for layers in layers_of("smooth"))


def test_one_network_is_the_first_of_one_kind() -> None:
    X, y = problem(60)
    one = ablations.OneNetwork(0)
    one.model.set_params(steps=10, hidden=(8,))
    one.fit(X, y)
    predicted = one.predict_distribution(X[:7])
    whole = one.model.ensemble_
    outputs = whole.outputs(torch.from_numpy(X[:7]))[0]
    assert isinstance(outputs, torch.Tensor)
    first = outputs[0, :, 0].double()
    torch.testing.assert_close(predicted.mean, first * whole.target_scale + whole.target_mean)
    assert (predicted.epistemic_variance < 1e-6 * predicted.aleatoric_variance).all()  # there is none to disagree with
    assert (predicted.aleatoric_variance > 0).all()


def test_an_ensemble_may_have_more_layers_and_members() -> None:
    X, y = problem(60)
    method = Standardised(DeepEnsemble((8, 4), 0, 3, (16, 20)))
    method.fit(X, y)
    predictive = method.predict_distribution(X)
    assert isinstance(predictive, Predictive)
    assert predictive.means.shape == (60, 3)


def test_an_argument_that_the_estimator_lacks_is_named() -> None:
    recipe = methods._ours("Ours", {"magic": 1, "folds": 2}, part=True)
    assert recipe.missing == "Ours skipped: MPGELURegressor has no argument magic"
    assert methods._ours("Ours", {"folds": 2}).missing == ""


def test_held_out_rows_are_a_tenth_and_every_row_is_used_once() -> None:
    train, test = held_out(205, seed=1)
    assert len(test) == 20
    assert sorted([*train, *test]) == list(range(205))
    assert not np.array_equal(test, held_out(205, seed=2)[1])


def test_a_missing_package_is_named_with_its_remedy() -> None:
    recipe = Recipe("Some method", METHODS["catboost"].build, "no_such_module", "no-such-package")
    assert recipe.missing == (
        "Some method skipped: no-such-package is not installed; pip install 'mpgelu[compare]' brings it"
    )
    assert METHODS["deep-ensemble"].missing == ""


def test_our_estimator_gets_the_seed_and_the_fast_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        FAST = {"epochs": 3}  # noqa: RUF012
        MPGELURegressor = dict

    monkeypatch.setattr(methods, "import_module", {"mpgelu.estimators.regressor": Module}.__getitem__)
    built: list[object] = [METHODS[name].build("yacht", 5) for name in ("mpgelu", "mpgelu-fast")]
    assert built == [{"random_state": 5}, {"epochs": 3, "random_state": 5}]
