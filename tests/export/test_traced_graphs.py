"""Graphs of models that torch's exporter traces: no rows, and likelihoods that mean something of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import InputError, Predictive
from mpgelu.errors import MissingRuleError
from mpgelu.estimators import Ensemble
from mpgelu.export import export_onnx
from mpgelu.likelihoods import HeavyTailedGaussian, Likelihood
from mpgelu.moments import Moments
from mpgelu.networks import FeatureScale
from mpgelu.rules import concatenate, fork

LEVELS = (0.05, 0.5, 0.95)


class Moved(mp.HeteroscedasticGaussian):
    """The same outputs, but they mean a target that is ten higher."""

    def predictive(self, moments: Moments | Tensor, nodes: int = 32) -> Predictive:
        usual = super().predictive(moments, nodes)
        return usual.affine(1.0, usual.mean.new_tensor(10.0))


class MovedOfOne(mp.Gaussian):
    """The same for one output."""

    def predictive(self, moments: Moments | Tensor, nodes: int = 32) -> Predictive:
        usual = super().predictive(moments, nodes)
        return usual.affine(1.0, usual.mean.new_tensor(10.0))


def run(path: Path, x: Any) -> list[Any]:
    found: list[Any] = onnxruntime.InferenceSession(path).run(None, {"features": np.asarray(x, np.float32)})
    return found


@pytest.mark.parametrize(
    "likelihood",
    [HeavyTailedGaussian(0.2, 3.0, 0.01, 0.5), Moved(), MovedOfOne(0.3)],
    ids=["heavy tails", "two outputs", "one output"],
)
def test_a_subclass_of_a_likelihood_is_not_taken_for_it(likelihood: Likelihood, tmp_path: Path) -> None:
    """A graph of the parent's form would hold other numbers without a word."""
    torch.manual_seed(0)
    network, x = mp.network(3, (8,), likelihood.outputs), torch.randn(5, 3)
    export_onnx(network, tmp_path / "model.onnx", (), likelihood=likelihood)
    mean, stddev, *_ = run(tmp_path / "model.onnx", x)
    with torch.no_grad():
        wanted = likelihood.predictive(network(mp.FactoredMoments.certain(x)))
    np.testing.assert_allclose(mean, wanted.mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stddev, wanted.stddev, rtol=1e-5)


def test_an_ensemble_with_a_subclass_of_a_likelihood(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    settings: dict[str, Any] = {"hidden": (6,), "folds": 2, "steps": 20, "diverse": False, "random_state": 0}
    model = mp.MPGELURegressor(likelihood=Moved(), **settings).fit(X, X[:, 0])
    export_onnx(model, tmp_path / "model.onnx", ())
    mean, stddev, *_ = run(tmp_path / "model.onnx", X)
    wanted = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, wanted[0], rtol=1e-4)
    np.testing.assert_allclose(stddev, wanted[1], rtol=1e-4)


@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_an_ensemble_with_dropout_and_an_embedding(moments: Any, tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(60, 3))
    model = mp.MPGELURegressor(hidden=(6,), folds=2, steps=20, rate=0.1, moments=moments, random_state=0)
    export_onnx(model.fit(X, X[:, 0]), tmp_path / "model.onnx", LEVELS)
    for rows in (1, 5, 60):
        mean, stddev, *_, quantiles = run(tmp_path / "model.onnx", X[:rows])
        wanted = model.predict(X[:rows], return_std=True)
        np.testing.assert_allclose(mean, wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stddev, wanted[1], rtol=1e-4)
        np.testing.assert_allclose(quantiles, model.predict_quantile(X[:rows], LEVELS), rtol=1e-3, atol=1e-3)


def test_a_kind_of_no_weight_is_dropped_and_one_of_little_is_a_number(tmp_path: Path) -> None:
    """A weight that is zero in float32 was divided by itself."""
    X = np.random.default_rng(0).normal(size=(60, 3))
    kinds: dict[str, Any] = {"hidden": (6,), "folds": 2, "sigma": (0.4, 4.0)}
    model = mp.MPGELURegressor(**kinds, steps=20, likelihood=mp.GaussianMixture(2), random_state=0)
    model.fit(X, X[:, 0])
    assert len(model.kind_weights_) < 4
    assert min(model.kind_weights_.values()) >= 0.02
    assert sum(model.kind_weights_.values()) == pytest.approx(1)
    held, stack = model.ensemble_, model.ensemble_.each_stack()[0]
    weights = torch.tensor([1e-58, 1e-58, 0.5, 0.5], dtype=torch.float64)
    parts = held.likelihood, held.scaling, held.target_mean, held.target_scale
    ensemble = model.ensemble_ = Ensemble([stack, stack], weights, *parts).requires_grad_(False)
    wanted = model.predict(X, return_std=True)
    found = ensemble(torch.as_tensor(X).float())
    np.testing.assert_allclose(found.mean, wanted[0], rtol=1e-4, atol=1e-4)
    export_onnx(model, tmp_path / "model.onnx", LEVELS)
    mean, stddev, *_, quantiles = run(tmp_path / "model.onnx", X)
    np.testing.assert_allclose(mean, wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stddev, wanted[1], rtol=1e-4)
    assert np.isfinite(quantiles).all()


def test_no_rows_of_an_estimator(tmp_path: Path) -> None:
    """With every kind of member that the recipe has, a Gaussian process among them."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    model = mp.MPGELURegressor(hidden=(6,), folds=2, steps=20, random_state=0).fit(X, np.sin(X[:, 0]))
    export_onnx(model, tmp_path / "model.onnx", LEVELS)
    assert [part.shape for part in run(tmp_path / "model.onnx", X[:0])] == [(0,)] * 4 + [(0, 3)]
    assert [part.shape for part in run(tmp_path / "model.onnx", X[:1])] == [(1,)] * 4 + [(1, 3)]


def test_a_graph_holds_no_paths_of_the_machine(tmp_path: Path) -> None:
    """Torch notes the stack trace of every node, which would tell readers of the file about its author's computer."""
    export_onnx(mp.network(3, (4,), nonlinearity="relu"), tmp_path / "model.onnx", ())
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()


def test_no_rows_of_a_traced_network(tmp_path: Path) -> None:
    export_onnx(mp.network(3, (6,), nonlinearity="relu", rate=0.1), tmp_path / "model.onnx", ())
    assert [part.shape for part in run(tmp_path / "model.onnx", np.zeros((0, 3)))] == [(0,)] * 4


class Twice(nn.Module):
    """A layer that does not state its number of inputs, and changes that of features."""

    def forward(self, value: Any) -> Any:
        value = fork(value)
        return concatenate(value, value)


def test_a_first_layer_that_does_not_state_its_number_of_inputs(tmp_path: Path) -> None:
    """The given number of features counts, not that of the first linear layer."""
    torch.manual_seed(0)
    network, x = nn.Sequential(Twice(), mp.Dropout(0.1), mp.Linear(4, 2)), torch.randn(5, 2)
    export_onnx(network, tmp_path / "model.onnx", (), features=2)
    with torch.no_grad():
        wanted = mp.HeteroscedasticGaussian().predictive(network(mp.FactoredMoments.certain(x)))
    mean, stddev, *_ = run(tmp_path / "model.onnx", x)
    np.testing.assert_allclose(mean, wanted.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stddev, wanted.stddev, rtol=1e-5)


@pytest.mark.parametrize("hidden", [(8, 8), (5,)], ids=["depth", "width"])
def test_an_ensemble_of_two_architectures(hidden: tuple[int, ...], tmp_path: Path) -> None:
    """Their layers cannot be stacked, so that torch traces each of them."""
    torch.manual_seed(0)
    stacks = [mp.Stack([mp.network(3, (8,))]), mp.Stack([mp.network(3, hidden)])]
    zero, one, x = torch.tensor(0.0), torch.tensor(1.0), torch.randn(5, 3)
    likelihood, scaling = mp.HeteroscedasticGaussian(), FeatureScale.identity(3)
    model = mp.Ensemble(stacks, torch.tensor([0.4, 0.6]), likelihood, scaling, zero, one)
    export_onnx(model, tmp_path / "model.onnx", ())
    with torch.no_grad():
        wanted = model(x)
    mean, stddev, *_ = run(tmp_path / "model.onnx", x)
    np.testing.assert_allclose(mean, wanted.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stddev, wanted.stddev, rtol=1e-5)


def test_a_class_is_no_likelihood(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="export_onnx: likelihood must be an object, got a class; did you mean"):
        export_onnx(nn.Sequential(mp.Linear(2, 2)), tmp_path / "a.onnx", likelihood=Moved)  # type: ignore[arg-type]


def test_export_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1)).double().train()
    network, _ = mp.from_torch(module)
    network.train()
    export_onnx(network, tmp_path / "n.onnx", q=(), likelihood=mp.Gaussian(0.1))
    assert all(parameter.requires_grad and parameter.dtype == torch.float64 for parameter in module.parameters())
    assert all(part.training for part in network.modules())


def test_a_plain_torch_module_is_refused_with_the_remedy(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 1))
    with pytest.raises(
        MissingRuleError, match=r"use mpgelu.Linear, or convert the whole torch module with mpgelu.from_torch"
    ):
        export_onnx(module, tmp_path / "n.onnx", likelihood=mp.Gaussian(0.1))
