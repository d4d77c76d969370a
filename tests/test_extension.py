"""Everything that can be added from outside the package, taken through all of it: nothing inside is edited."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu.convert import conversion
from mpgelu.estimators.recipe.weights import stacking_weights
from mpgelu.inspect.audit.samples import Samples
from mpgelu.layers import Elementwise, layers
from mpgelu.likelihoods import HeteroscedasticGaussian, Likelihood, likelihoods
from mpgelu.likelihoods.outputs import as_moments
from mpgelu.moments import DiagonalMoments, Moments, moment_types
from mpgelu.networks import FeatureScale, propagate
from mpgelu.rules import linear, multiply, rescale
from mpgelu.rules.elementwise import Activation

# ---- an elementwise activation: the function and its slope ----


@dataclass(frozen=True)
class Arctangent(Activation):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.atan(x)

    def slope(self, x: Tensor) -> Tensor:
        return 1 / (1 + x * x)


@layers.register()
class Atan(Elementwise):
    def __init__(self) -> None:
        super().__init__(Arctangent())


# ---- a layer with its own rule: multiplicative noise of a given variance ----


@layers.register("variance")
class Jitter(nn.Module):
    """Units times independent factors of mean one."""

    is_random = True

    def __init__(self, variance: float = 0.01) -> None:
        super().__init__()
        self.variance = variance

    def forward(self, input: Any) -> Any:
        return input if isinstance(input, Tensor) else multiply(input, 1.0, self.variance)


# ---- an activation with a rule of its own: the square, whose mean and variance are exact ----


@singledispatch
def square(value: Any) -> Any:
    r"""Moments of :math:`h^2`: mean :math:`m^2 + v`, gain :math:`2m` and a rest of variance :math:`2v^2`."""
    raise mp.errors.MissingRuleError(f"square: no rule for {type(value).__name__}")


@square.register
def _(value: Tensor) -> Tensor:
    return value.square()


@square.register
def _(value: Moments) -> Moments:
    mean, variance = value.mean, value.variance
    moments: Moments = rescale(value, mean.square() + variance, 2 * mean, 2 * variance.square(), row_wise=True)
    return moments


@square.register
def _(value: Samples) -> Samples:  # what verify compares the moments with
    return Samples(square(value.values), square(value.moments), value.source)


@layers.register()
class Square(nn.Module):
    def forward(self, input: Any) -> Any:
        return square(input)


# ---- a likelihood: a Laplace-like noise as two Gaussians of the same mean ----


@likelihoods.register("ratio")
class Doubled(Likelihood):
    """Half of the errors have a variance that is ``ratio`` times that of the others."""

    outputs = 2

    def __init__(self, ratio: float = 4.0) -> None:
        super().__init__()
        self.ratio = ratio

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        narrow = HeteroscedasticGaussian()
        return 0.5 * (narrow.expected_log_prob(moments, y) + narrow.expected_log_prob(self._wide(moments), y))

    def predictive(self, moments: Any, nodes: int = 32) -> mp.Predictive:
        narrow = HeteroscedasticGaussian()
        return mp.Predictive.mixture([narrow.predictive(moments, nodes), narrow.predictive(self._wide(moments), nodes)])

    def _wide(self, moments: Any) -> Moments:
        moments = as_moments("Doubled", moments, 2)
        shift = moments.mean.new_tensor([0.0, math.log(self.ratio)])
        return DiagonalMoments(moments.mean + shift, moments.variance)


# ---- a moment type: diagonal moments that count the linear layers they have passed ----


@dataclass(frozen=True, eq=False, repr=False)
class Counted(DiagonalMoments):
    passed: int = 0


moment_types.register()(Counted)


@linear.register
def _(value: Counted, weight: Tensor, bias: Tensor | None = None) -> Counted:
    after = linear(DiagonalMoments(value.mean, value.variance), weight, bias)
    return Counted(after.mean, after.variance, value.passed + 1)


# ---- a moment type from scratch: standard deviations in place of variances, with two rules ----


@dataclass(frozen=True, eq=False, repr=False)
class Deviations(Moments):
    mean: Tensor
    deviation: Tensor

    @property
    def variance(self) -> Tensor:
        return self.deviation.square()

    @classmethod
    def certain(cls, x: Tensor) -> Deviations:
        return cls(x, torch.zeros_like(x))


@linear.register
def _(value: Deviations, weight: Tensor, bias: Tensor | None = None) -> Deviations:
    return Deviations(linear(value.mean, weight, bias), linear(value.variance, weight.square()).sqrt())


@rescale.register
def _(value: Deviations, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False) -> Deviations:
    variance = (gain * value.deviation).square()
    return Deviations(mean, (variance if added is None else variance + added).sqrt())


# ---- a torch module with a conversion ----


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


@conversion(Halved)
def _(module: Halved) -> nn.Module:
    return mp.layers.Operation(mp.rules.scale, gain=0.5)


def build(features: int, kind: Any, outputs: int) -> nn.Module:
    """Networks of the layers above, for the estimator."""
    hidden = mp.Linear(features, 8), Atan(), Jitter(0.01), mp.Linear(8, 6), Square()
    return nn.Sequential(*hidden, mp.Linear(6, outputs))


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 3))
    return X, np.sin(X[:, 0]) + 0.2 * rng.normal(size=80)


def test_an_activation_and_a_layer_in_a_network() -> None:
    network = mp.network(3, (6,), nonlinearity=Atan, rate=0.1)
    x = torch.randn(50, 3)
    history = mp.fit(network, mp.HeteroscedasticGaussian(), (x, x[:, 0]), epochs=5, progress=False)
    assert torch.isfinite(history.loss).all()
    audit = mp.verify(network, x[:3], draws=2000)
    assert [layer.kind for layer in audit.layers] == ["Dropout", "Linear", "Atan", "Dropout", "Linear"]
    stack = mp.Stack([network, network])
    alone = network(DiagonalMoments.certain(x))
    torch.testing.assert_close(stack(DiagonalMoments.certain(x.expand(2, -1, -1))).mean[0], alone.mean)
    noisy = nn.Sequential(mp.Linear(3, 4), Jitter(0.5), mp.Linear(4, 1))
    assert mp.verify(noisy, x[:3], draws=5000).passed
    assert set(mp.attribute(noisy, x[:3], likelihood=mp.Gaussian(0.1)).kind) == {"noise", "jitter"}


def test_an_activation_with_its_own_rule() -> None:
    x = torch.randn(6, 3)
    network = nn.Sequential(mp.Linear(3, 4), mp.Dropout(0.2), Square(), mp.Linear(4, 2))
    for moments in (DiagonalMoments, mp.FullMoments, mp.FactoredMoments):
        torch.testing.assert_close(square(moments.certain(x)).mean, x.square())
        assert type(network(moments.certain(x))) is moments
    deep = nn.Sequential(mp.Linear(3, 400), mp.Dropout(0.2), mp.Linear(400, 5), Square())  # nearly Gaussian units
    assert mp.verify(deep, x, draws=4000).layers[-1].kind == "Square"
    history = mp.fit(network, mp.HeteroscedasticGaussian(), (x, x[:, 0]), epochs=5, progress=False)
    assert torch.isfinite(history.loss).all()
    frame = mp.attribute(network, x)
    assert set(frame.kind) == {"noise", "dropout", "square"}
    wanted = mp.HeteroscedasticGaussian().variance(network.double()(mp.FactoredMoments.certain(x.double())))
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), wanted.detach(), rtol=1e-6)


def test_all_of_them_in_the_estimator(table: tuple[Any, Any], tmp_path: Path) -> None:
    X, y = table
    model = mp.MPGELURegressor(network=build, likelihood=Doubled(3.0), folds=2, steps=60, diverse=False, random_state=0)
    model.set_params(sigma=None, moments=DiagonalMoments).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
    assert np.mean((mean - y) ** 2) < y.var()
    model.save(tmp_path / "model")
    loaded = mp.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(X, return_std=True), (mean, std))
    assert isinstance(loaded.ensemble_.likelihood, Doubled)
    assert loaded.ensemble_.likelihood.ratio == 3.0
    frame = mp.attribute(loaded, X[:4])
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), std[:4] ** 2, rtol=1e-4)
    assert "jitter" in set(frame.kind)
    assert mp.verify(loaded, X[:3], draws=1000).layers


def test_all_of_them_in_onnx(table: tuple[Any, Any], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    X, y = table
    model = mp.MPGELURegressor(network=build, likelihood=Doubled(3.0), folds=2, steps=20, diverse=False, random_state=0)
    model.set_params(sigma=None, moments=DiagonalMoments).fit(X, y)
    mp.export_onnx(model, tmp_path / "model.onnx", (0.05, 0.95))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"features": X[:9].astype(np.float32)}), strict=True))
    wanted = model.predict_distribution(X[:9].astype(np.float32))
    np.testing.assert_allclose(found["mean"], wanted.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["stddev"], wanted.stddev, rtol=1e-4)
    np.testing.assert_allclose(found["quantiles"], wanted.quantile([0.05, 0.95]), rtol=1e-3, atol=1e-3)


def test_a_moment_type() -> None:
    network = nn.Sequential(mp.Linear(3, 4), mp.Linear(4, 2))
    found = network(Counted.certain(torch.randn(5, 3)))
    assert found.passed == 2
    assert moment_types.type_of("Counted") is Counted
    plain = propagate(network, torch.randn(5, 3), moments=DiagonalMoments.certain)
    assert isinstance(plain, DiagonalMoments)


def test_a_moment_type_in_the_estimator(table: tuple[Any, Any], tmp_path: Path) -> None:
    X, y = table
    settings: dict[str, Any] = {
        "rate": 0.2,
        "sigma": None,
        "folds": 2,
        "steps": 20,
        "diverse": False,
        "random_state": 0,
    }
    model = mp.MPGELURegressor((8,), moments=Counted, **settings).fit(X, y)
    model.save(tmp_path / "model")
    loaded = mp.load(tmp_path / "model")
    assert loaded.ensemble_.moment_type is Counted
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    plain = model.set_params(moments=DiagonalMoments).fit(X, y)
    np.testing.assert_allclose(loaded.predict(X), plain.predict(X), rtol=1e-5, atol=1e-7)  # float32 near zero


def test_a_conversion(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), Halved(), nn.Dropout(0.3), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    network, _ = mp.from_torch(module, example=x)
    torch.testing.assert_close(network(x), module.eval()(x))
    moments = network(mp.FactoredMoments.certain(x))
    assert (moments.variance > 0).all()
    assert mp.verify(network, x, draws=2000).passed
    frame = mp.attribute(network, x, likelihood=mp.Gaussian(0.1))
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), moments.variance[:, 0].detach() + 0.1, rtol=1e-5)


# ---- a recipe of one's own: how networks are trained and weighted ----


def test_a_recipe(table: tuple[Any, Any], tmp_path: Path) -> None:
    X, y = (torch.as_tensor(part).float() for part in table)
    kinds = [mp.network(3, (8,), nonlinearity=Atan, rate=0.05), mp.network(3, (8,), nonlinearity=Square, rate=0.05)]
    likelihood, stacks, densities = Doubled(2.0), [], []
    for kind in kinds:
        stack = mp.Stack([kind, kind])
        mp.fit(stack, likelihood, (X[:60].expand(2, -1, -1), y[:60].expand(2, -1)), epochs=20, progress=False)
        with torch.no_grad():
            outputs = stack(DiagonalMoments.certain(X[60:].expand(2, -1, -1)))
            densities.append(likelihood.predictive(outputs, 8).mixture_over(0).log_prob(y[60:]))
        stacks.append(stack)
    by_kind, _ = stacking_weights(torch.stack(densities, 1), torch.ones(20))
    weights = (by_kind / 2).repeat_interleave(2)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    ensemble = mp.Ensemble(stacks, weights, likelihood, FeatureScale.identity(3), zero, one, DiagonalMoments)
    ensemble.requires_grad_(False)
    predicted = ensemble(X.double())
    again = mp.Ensemble.from_description(*ensemble.described())
    torch.testing.assert_close(again(X.double()).stddev, predicted.stddev)
    frame = mp.attribute(ensemble, X[:4])
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), predicted.variance[:4], rtol=1e-4)
    assert mp.verify(ensemble, X[:3], draws=500).layers


def test_names_are_unique() -> None:
    with pytest.raises(mp.InputError, match="there is a layer called Atan already"):

        @layers.register()
        class Atan(nn.Module):
            pass


def test_two_rules_carry_a_moment_type_through_masks_nonlinearities_and_scales() -> None:
    torch.manual_seed(0)
    hidden = [mp.Dropout(0.2), mp.Linear(3, 8), mp.MPGELU(), mp.Linear(8, 8), mp.layers.Tanh(), mp.layers.Scale(8)]
    network, x = nn.Sequential(*hidden, mp.Dropout(0.1, rescale=False), mp.Linear(8, 2)).double(), torch.randn(5, 3)
    found, wanted = (network(kind.certain(x.double())) for kind in (Deviations, DiagonalMoments))
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.variance, wanted.variance, rtol=1e-12, atol=0)
