"""The compared methods: one contract for all, and what is particular to each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mpgelu.predictive import Predictive
from mpgelu.research.compare import methods, networks
from mpgelu.research.compare.interface import Rows, Standardised, held_out
from mpgelu.research.compare.methods import METHODS, Recipe
from mpgelu.research.compare.networks import DeepEnsemble, MCDropout

NOISE = 20.0
PEERS = [name for name, recipe in METHODS.items() if not recipe.ours]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_SHORT", (64, 300))


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
    predictive = method.predict_distribution(new)
    assert predictive.batch_shape == (200,)
    error = predictive.mean.double() - torch.from_numpy(5000 + 10 * (new[:, 0] - 50))
    assert error.square().mean().sqrt() < NOISE
    assert 0.5 * NOISE < predictive.stddev.median() < 1.6 * NOISE
    assert method.predict_distribution(new[:1]).batch_shape == (1,)
    if name != "mc-dropout":
        alone = method.predict_distribution(new[:1]).stddev
        torch.testing.assert_close(alone, predictive.stddev[:1], rtol=1e-4, atol=0)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", [name for name in PEERS if name != "ngboost"])
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

    monkeypatch.setattr(networks, "_train", train)
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
        return networks._negative_log_density(networks._forward(weights, X[seen]), y[seen]).mean(1)

    torch.manual_seed(0)
    last = losses(networks._train(X, y, train, 20, 2, networks._negative_log_density))
    torch.manual_seed(0)
    best = losses(networks._train(X, y, train, 20, 2, networks._negative_log_density, test))
    assert (best < 0.5 * last).all()
    assert (best < 2).all()


def test_a_member_sees_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    X, seen = torch.arange(20.0)[:, None], []
    forward = networks._forward

    def spy(weights: list[torch.Tensor], batch: torch.Tensor, rate: float) -> torch.Tensor:
        seen.append(batch[..., 0])
        return forward(weights, batch, rate)

    monkeypatch.setattr(networks, "_forward", spy)
    networks._train(X, X[:, 0], [torch.arange(5), torch.arange(20)], 2, 1, networks._squared_error)
    few, all_rows = torch.cat(seen, 1)
    assert set(few.tolist()) == set(range(5))
    assert set(all_rows.tolist()) == set(range(20))


def test_the_long_training_is_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(networks, "_LONG", (7, 1))
    monkeypatch.setattr(networks, "_SHORT", (3, 1))

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(y.shape[1])
        return networks._squared_error(outputs, y)

    for rows in (1999, 2000):
        networks._train(torch.zeros(rows, 1), torch.zeros(rows), [torch.arange(rows)], 2, 1, loss)
    assert sizes == [3, 7]


@pytest.mark.parametrize("build", [METHODS["deep-ensemble"].build, METHODS["mc-dropout"].build])
def test_the_network_is_wider_for_protein(build: Callable[[str, int], object]) -> None:
    widths = [build(name, 0).method.hidden for name in ("boston", "protein")]  # type: ignore[attr-defined]
    assert widths == [50, 100]


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
