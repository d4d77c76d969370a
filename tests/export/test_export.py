"""Exported graphs, run by onnxruntime, give the library's numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import nn

import mpgelu as mp
from mpgelu import InputError, Predictive
from mpgelu.convert import from_torch
from mpgelu.export import export_onnx
from mpgelu.export.distribution import _Mixture, _root
from mpgelu.export.graph import Graph
from mpgelu.moments import Moments
from mpgelu.networks import FeatureScale, Parts, parts_of
from mpgelu.research.bench.deployment import _deterministic, onnx_latency
from mpgelu.research.bench.sections import FEATURES as FEATURES_OF_BENCH
from mpgelu.research.bench.sections import Settings

LEVELS = (0.05, 0.5, 0.95)
FEATURES = 4
ROOT = Path(__file__).parents[2]
Array = NDArray[Any]


def session(model: Any, folder: Path, **settings: Any) -> Any:
    export_onnx(model, folder / "model.onnx", **settings)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "model.onnx", options)


def ensemble(
    members: int,
    moments: type[Moments] = mp.FactoredMoments,
    outputs: int = 2,
    hidden: Sequence[int] = (8, 7),
    **settings: Any,
) -> mp.Ensemble:
    """Networks of random weights on features and a target far from zero."""
    torch.manual_seed(members)
    networks = [mp.network(FEATURES, hidden, outputs, **{"rate": 0.05, **settings}) for _ in range(members)]
    likelihood: Any = mp.HeteroscedasticGaussian() if outputs == 2 else mp.Gaussian(0.1)
    weights = torch.rand(members, dtype=torch.float64) + 0.5
    mean, scale = torch.tensor([0.0, 5.0, -100.0, 1e4]), torch.tensor([1.0, 2.0, 0.1, 1e3])
    target = torch.tensor(-30.0), torch.tensor(12.0)
    scaling = FeatureScale.standard(mean, scale)
    return mp.Ensemble([mp.Stack(networks)], weights / weights.sum(), likelihood, scaling, *target, moments)


def features(model: mp.Ensemble, rows: int, times: float = 1.0) -> Array:
    torch.manual_seed(rows)
    center, scale = model.scaling.center, model.scaling.scale
    x = torch.randn(rows, len(center)) * times * scale + center
    numbers: Array = x.float().numpy()
    return numbers


def predictive(parts: Parts, x: Array) -> Predictive:
    """The library's distribution, its components in float64."""
    start: Any = parts.moments.certain
    inputs = parts.scaled("test", x)
    members = [
        parts.likelihood.predictive(mp.propagate(network, inputs, moments=start)).to(torch.float64)
        for network in parts.networks
    ]
    return Predictive.mixture(members, parts.weights).affine(parts.target_scale, parts.target_mean)


def assert_agree(found: Sequence[Array], wanted: Predictive, tolerance: float = 1e-4) -> None:
    """Relative, and for means and quantiles, which may be near zero, to the standard deviation at least."""
    mean, stddev, epistemic, aleatoric, quantiles = (np.asarray(part, dtype=np.float64) for part in found)
    parts = wanted.epistemic_variance.sqrt(), wanted.aleatoric_variance.sqrt()
    for ours, theirs in ((stddev, wanted.stddev), (epistemic, parts[0]), (aleatoric, parts[1])):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=tolerance, atol=1e-10)
    spread = wanted.stddev.numpy()
    assert np.all(np.abs(mean - wanted.mean.numpy()) <= tolerance * np.maximum(spread, wanted.mean.abs().numpy()))
    w, center, deviation = wanted.log_weights.exp().numpy(), wanted.means.numpy(), wanted.variances.sqrt().numpy()
    for place, level in enumerate(LEVELS):  # against the distribution function, by scipy
        y = quantiles[:, place, None]
        low, high = (
            (w * norm.cdf((y + sign * tolerance * np.maximum(np.abs(y), 1e-6) - center) / deviation)).sum(-1)
            for sign in (-1, 1)
        )
        assert np.all(low <= level + 1e-6)
        assert np.all(high >= level - 1e-6)


@pytest.mark.parametrize("members", [1, 5])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_agreement(moments: type[Moments], outputs: int, members: int, tmp_path: Path) -> None:
    model = ensemble(members, moments, outputs)
    graph = session(model, tmp_path)
    for rows, times in ((1, 1.0), (10_000, 1.0), (200, 10.0), (1, 30.0)):
        x = features(model, rows, times)
        found = graph.run(None, {"features": x})
        assert [part.shape for part in found] == [(rows,)] * 4 + [(rows, 3)]
        assert all(part.dtype == np.float32 for part in found)
        wanted = predictive(parts_of(model, "test"), x)
        assert_agree(found, wanted)
        library = wanted[:200].quantile(LEVELS).numpy()
        scale = np.maximum(np.abs(library), wanted.stddev[:200, None].numpy())
        assert np.all(np.abs(found[-1][:200] - library) <= 1e-4 * scale)


@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
@pytest.mark.parametrize(
    "settings",
    [
        {"hidden": ()},
        {"hidden": (6,)},
        {"hidden": (5, 6, 7, 4)},
        {"rate": 0.0},
        {"rate": 1e-7},
        {"gaussian_weights": True},
        {"gaussian_weights": True, "rate": 0.0, "outputs": 1},
        {"gaussian_weights": True, "hidden": (), "rate": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("members", [1, 2])
def test_other_networks(members: int, settings: dict[str, Any], moments: type[Moments], tmp_path: Path) -> None:
    model = ensemble(members, moments, **settings)
    x = features(model, 50, 2.0)
    assert_agree(session(model, tmp_path).run(None, {"features": x}), predictive(parts_of(model, "test"), x))


def test_the_paper_network_without_rescaling(tmp_path: Path) -> None:
    network, x = mp.paper_network(FEATURES, rate=0.2), torch.randn(40, FEATURES).numpy()
    assert_agree(session(network, tmp_path).run(None, {"features": x}), predictive(parts_of(network, "test"), x))


@pytest.mark.parametrize("by_row", [True, False])
def test_a_fitted_estimator_far_outside_its_data(by_row: bool, tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal([3.0, 1e5, -2.0], [1.0, 50.0, 1e-3], (200, 3)).astype(np.float32)
    y = 1e4 + 50 * np.sin(X[:, 0]) + X[:, 0] * np.random.default_rng(1).normal(size=200)
    model = mp.MPGELURegressor(hidden=(12, 12), steps=150, folds=2, random_state=0).fit(X, y)
    assert model.ensemble_.noise is not None
    model.ensemble_.noise.by_row = by_row
    graph = session(model, tmp_path)
    for times in (1, 5, 20):
        x = (X.mean(0) + times * (X - X.mean(0))).astype(np.float32)
        found, wanted = graph.run(None, {"features": x}), model.predict_distribution(x)
        assert_agree(found, wanted, tolerance=1e-5 if times == 1 else 1e-4)
        library, reached = wanted.quantile(LEVELS).numpy(), wanted[:, None].cdf(torch.tensor(found[4]).double()).numpy()
        near = np.abs(found[4] - library) <= 1e-4 * np.abs(library)
        flat = np.abs(reached - LEVELS) <= 1e-6  # between components that lie apart float32 does not tell places apart
        assert np.all(near | flat)
        assert near.mean() > (0.95 if times > 5 else 0.99)


def quieter(model: mp.Ensemble, by: float) -> mp.Ensemble:
    """The same networks with a log-variance that is lower."""
    networks = model.each_stack()[0].unstack()
    for network in networks:
        last = [layer for layer in network.modules() if isinstance(layer, mp.Linear)][-1]
        with torch.no_grad():
            last.bias[1] -= by
    target = model.target_mean, model.target_scale
    return mp.Ensemble([mp.Stack(networks)], model.weights, model.likelihood, model.scaling, *target, model.moment_type)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("noiseless", [False, True])
def test_quantiles_far_from_the_data(noiseless: bool, members: int, tmp_path: Path) -> None:
    """Finite where the library's are, and right: up to there the moments themselves differ by float32 rounding."""
    model = ensemble(members)
    model = quieter(model, 30.0) if noiseless else model
    graph = session(model, tmp_path)
    for times in (50, 200, 1000, 1e6):
        x = features(model, 60, times)
        y, wanted = graph.run(["quantiles"], {"features": x})[0], predictive(parts_of(model, "test"), x)
        library = wanted.quantile(LEVELS).numpy()
        assert not np.isnan(y).any()
        kept = np.abs(library) < 1e15  # beyond, the graph's variances overflow before the library's do
        assert kept.mean() > 0.2
        assert np.isfinite(y[kept]).all()
        assert np.all(np.isinf(y) | (np.abs(y) > 1e15) | kept)
        y = np.where(kept, y, 0.0)
        slack = 1e-4 * np.maximum(np.abs(y), wanted.mean.abs().numpy()[:, None])
        low, high = (wanted[:, None].cdf(torch.tensor(y + by)).numpy() for by in (-slack, slack))
        assert np.all((low <= np.asarray(LEVELS) + 1e-4) | ~kept)
        assert np.all((high >= np.asarray(LEVELS) - 1e-4) | ~kept)


def test_rows_that_are_not_numbers_leave_others_alone(tmp_path: Path) -> None:
    model = ensemble(3)
    graph, x = session(model, tmp_path), features(model, 20, 50.0)
    broken = x.copy()
    broken[7, 1] = np.nan
    for ours, theirs in zip(graph.run(None, {"features": broken}), graph.run(None, {"features": x}), strict=True):
        assert np.isnan(ours[7]).all()
        np.testing.assert_allclose(np.delete(ours, 7, 0), np.delete(theirs, 7, 0), rtol=1e-5)


@pytest.mark.parametrize("levels", [(), LEVELS])
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_no_rows(moments: type[Moments], outputs: int, members: int, levels: Sequence[float], tmp_path: Path) -> None:
    for hidden in ((), (5,), (5, 4, 3)):
        graph = session(ensemble(members, moments, outputs, hidden), tmp_path, q=levels)
        found = graph.run(None, {"features": np.zeros((0, FEATURES), np.float32)})
        assert [part.shape for part in found] == [(0,)] * 4 + [(0, len(levels))] * bool(levels)


def test_certain_rows_and_empty_levels(tmp_path: Path) -> None:
    """Features at their means meet no dropout noise: units without any variance."""
    network = mp.network(2, (5, 5))
    with torch.no_grad():
        nn.init.zeros_(network.get_parameter("1.bias"))  # a unit without mean and variance
    graph = session(network, tmp_path, q=())
    assert [output.name for output in graph.get_outputs()] == ["mean", "stddev", "epistemic_std", "aleatoric_std"]
    found = graph.run(None, {"features": np.zeros((3, 2), np.float32)})
    wanted = mp.HeteroscedasticGaussian().predictive(network(mp.FactoredMoments.certain(torch.zeros(3, 2))))
    for ours, theirs in zip(found, (wanted.mean, wanted.stddev), strict=False):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_rows_that_no_unit_answers(moments: type[Moments], rate: float, tmp_path: Path) -> None:
    """Hidden units that are certainly zero leave the next ones without mean and variance."""
    network = mp.network(2, (5, 4, 3), rate=rate)
    biases = [layer.bias for layer in network.modules() if isinstance(layer, mp.Linear)]
    for bias, value in zip(biases, (-1e3, 0.0, 0.0, 0.5), strict=True):
        nn.init.constant_(bias, value)
    x = torch.randn(6, 2)
    found = session(network, tmp_path, moments=moments).run(None, {"features": x.numpy()})
    assert_agree(found, predictive(parts_of(network, "test", moments=moments), x.numpy()))


def test_features_of_extreme_scales(tmp_path: Path) -> None:
    model = ensemble(2)
    model.scaling.scale.mul_(torch.tensor([1e-20, 1e3, 1e25, 1.0]))
    x = features(model, 30)
    assert_agree(session(model, tmp_path).run(None, {"features": x}), predictive(parts_of(model, "test"), x))


def test_quantiles_of_components_of_many_scales() -> None:
    """From any first guess, also where the distribution function is flat for most of its range."""
    rng = np.random.default_rng(0)
    rows, count = 300, 6
    means = rng.normal(size=(rows, 1, count)) * 10.0 ** rng.uniform(-2, 4, (rows, 1, count))
    weights = rng.uniform(0.05, 1, (1, count))
    weights /= weights.sum()
    means -= (weights * means).sum(-1, keepdims=True)
    stddevs = 10.0 ** rng.uniform(-2, 4, means.shape)
    spread = np.sqrt((weights * (means**2 + stddevs**2)).sum(-1, keepdims=True))
    graph = Graph()
    mixture = _Mixture.of(graph.constant(means), graph.constant(stddevs), weights, LEVELS)
    root = _root(mixture, graph.value("start"), graph.constant(spread))
    shape: list[str | int] = [len(LEVELS), "rows", 1, 1]
    run = onnxruntime.InferenceSession(graph.model({"start": shape}, {"y": (root, shape)}, {}).SerializeToString()).run
    for times in (0.0, 1.0, 1e6):
        start = times * np.asarray(norm.ppf(LEVELS))[:, None, None, None] * spread
        y = run(None, {"start": start.astype(np.float32)})[0].astype(np.float64)
        slack = 1e-4 * np.maximum(np.abs(y), stddevs.min(-1, keepdims=True)) + 1e-6 * np.abs(means).max(
            -1, keepdims=True
        )
        low, high = ((weights * norm.cdf((y + by - means) / stddevs)).sum((-1, -2)) for by in (-slack, slack))
        level = np.asarray(LEVELS)[:, None]
        assert np.all(low <= level + 1e-6)
        assert np.all(high >= level - 1e-6)


def test_a_network_of_other_layers_is_traced(tmp_path: Path) -> None:
    relu = mp.network(3, (5,), 1, nonlinearity="relu", rate=0.1)
    module = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))
    converted, _ = from_torch(module)
    x = torch.randn(20, 3).numpy()
    factored, diagonal = mp.FactoredMoments, mp.DiagonalMoments
    cases: tuple[tuple[Any, Any, Any], ...] = ((relu, factored, mp.Gaussian(0.3)), (converted, diagonal, None))
    for network, moments, likelihood in cases:
        settings: dict[str, Any] = {"moments": moments, "likelihood": likelihood}
        found = session(network, tmp_path, **settings).run(None, {"features": x})
        assert_agree(found, predictive(parts_of(network, "test", **settings), x))


def test_an_ensemble_of_other_layers_is_traced(tmp_path: Path) -> None:
    model = ensemble(2, hidden=(5,), nonlinearity="relu")
    x = features(model, 20)
    assert_agree(session(model, tmp_path).run(None, {"features": x}), predictive(parts_of(model, "test"), x))


def test_metadata(tmp_path: Path) -> None:
    graph = session(mp.network(2), tmp_path, q=(0.1, 0.2), features=["age", "height"])
    about = graph.get_modelmeta().custom_metadata_map
    assert json.loads(about["feature_names"]) == ["age", "height"]
    assert json.loads(about["q"]) == [0.1, 0.2]
    assert about["version"] == mp.__version__
    assert graph.get_inputs()[0].shape == ["rows", 2]


def test_graphs_are_small(tmp_path: Path) -> None:
    """Latency of one row is a matter of how many nodes there are."""
    import onnx

    counts: dict[Any, int] = {}
    moments: type[Moments]
    for moments in (mp.FactoredMoments, mp.DiagonalMoments):
        export_onnx(mp.network(4), tmp_path / "model.onnx", (), moments=moments)
        counts[moments] = len(onnx.load(tmp_path / "model.onnx").graph.node)
    assert counts[mp.FactoredMoments] <= 56
    assert counts[mp.DiagonalMoments] <= 38


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(InputError, match=r"export_onnx: q must lie strictly between 0 and 1, got \[0.5, 1.0\]"):
        export_onnx(mp.network(2), path, (0.5, 1.0))
    with pytest.raises(InputError, match="export_onnx: the MPGELURegressor is not fitted; call fit first"):
        export_onnx(mp.MPGELURegressor(), path)
    with pytest.raises(InputError, match="the model takes 4 features, got the names of 1"):
        export_onnx(ensemble(1), path, features=["a"])
    with pytest.raises(InputError, match=r"the network has 3 outputs; one .* and two .* are understood"):
        export_onnx(mp.network(2, outputs=3), path)
    one, two = mp.network(2, outputs=1), mp.network(2)
    with pytest.raises(InputError, match=r"one output does not say how large the noise is; give likelihood=Gaussian\("):
        export_onnx(one, path)
    with pytest.raises(InputError, match=r"likelihood must be a Likelihood, such as .*, got MSELoss"):
        export_onnx(one, path, likelihood=nn.MSELoss())  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"HeteroscedasticGaussian takes 2 outputs, but the network has 1; give .*Gaus"
    ):
        export_onnx(one, path, likelihood=mp.HeteroscedasticGaussian())
    with pytest.raises(InputError, match="Gaussian takes 1 output, but the network has 2; give likelihood=Hetero"):
        export_onnx(two, path, likelihood=mp.Gaussian(0.1))
    with pytest.raises(InputError, match="likelihood is for networks; this model has its own"):
        export_onnx(ensemble(1), path, likelihood=mp.HeteroscedasticGaussian())
    assert not path.exists()
    with pytest.raises(InputError, match="no layer of the network states its number of features; give features="):
        export_onnx(nn.Sequential(mp.MPGELU()), path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in ("distribution", "graph", "perceptron"):
        monkeypatch.delitem(sys.modules, f"mpgelu.export.{name}", raising=False)
    with pytest.raises(InputError, match=r"needs the package onnx; pip install 'mpgelu\[onnx\]'"):
        export_onnx(mp.network(2), path)


def test_the_example_runs_without_torch(tmp_path: Path) -> None:
    """The program in the documentation, in a fresh environment that has onnxruntime alone."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    (program,) = re.findall(r"```python\n(# predict\.py.*?)```", text, re.DOTALL)
    (tmp_path / "predict.py").write_text(program)
    model = ensemble(2)
    names = ["a", "b", "c", "d"]
    export_onnx(model, tmp_path / "model.onnx", features=names)
    x = features(model, 3)
    lines = [",".join(names), *(",".join(map(repr, map(float, row))) for row in x)]
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install: list[Any] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        "onnxruntime",
    ]
    made = subprocess.run(install, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"onnxruntime cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
    missing = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert missing.returncode
    shown = subprocess.run([python, "predict.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    wanted = predictive(parts_of(model, "test"), x)
    assert len(shown.splitlines()) == 1 + len(x)
    for line, mean, stddev in zip(shown.splitlines()[1:], wanted.mean, wanted.stddev, strict=True):
        numbers = [float(number) for number in line.split()]
        np.testing.assert_allclose(numbers[:2], [mean, stddev], rtol=1e-4)
        assert numbers[2] < numbers[3]


def test_the_latency_benchmark_runs() -> None:
    table = onnx_latency(Settings(rounds=1, widths=(8,), compiled=False, quick=True))
    names = {row["method"] for row in table}
    assert names == {"deterministic"} | {
        f"MP-GELU {kind}{words}" for kind in ("exact", "diagonal") for words in ("", ", quantiles")
    }
    assert all(row["us"] > 0 for row in table)


def test_the_deterministic_graph_is_the_deterministic_network() -> None:
    networks = [mp.network(FEATURES_OF_BENCH, (8, 8)) for _ in range(2)]
    x = torch.randn(5, FEATURES_OF_BENCH)
    (found,) = onnxruntime.InferenceSession(_deterministic(networks)).run(None, {"features": x.numpy()})
    wanted = sum(network(x) for network in networks).detach().numpy() / 2
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
