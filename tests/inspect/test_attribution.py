"""The parts of a variance add up to it, and each is what removing or sampling its source says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import FactoredMoments, InputError
from mpgelu.convert import from_torch
from mpgelu.inspect.attribution import attribute
from mpgelu.inspect.attribution_figure import plot_attribution


@pytest.fixture(scope="module")
def table() -> tuple[pd.DataFrame, Any]:
    generator = np.random.default_rng(0)
    X = pd.DataFrame(generator.normal([1, 50, -3], [1, 10, 0.1], (150, 3)), columns=["a", "b", "c"])
    return X, 20 * np.sin(X.a) + X.b + generator.normal(size=150)


def total(frame: pd.DataFrame) -> Any:
    return frame.groupby("row").variance.sum().to_numpy()


@pytest.mark.parametrize("gaussian_weights", [False, True])
@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_an_estimators_parts_add_up(moments: Any, gaussian_weights: bool, table: Any) -> None:
    X, y = table

    def build(features: int, kind: Any, outputs: int) -> Any:
        return mp.network(features, kind.hidden, outputs, rate=kind.rate, gaussian_weights=gaussian_weights)

    settings: dict[str, Any] = {"sigma": None, "folds": 2, "diverse": False, "moments": moments, "network": build}
    model = mp.MPGELURegressor((6, 5), rate=(0.01, 0.1), steps=100, random_state=0, **settings).fit(X, y)
    for errors in (None, 0.5, [0.1, 0.0, 0.01]):
        frame = attribute(model, X[:8], input_std=errors)
        parts = model.predict_parts(X[:8], input_std=errors)
        epistemic, aleatoric = parts.epistemic_std**2, parts.aleatoric_std**2
        np.testing.assert_allclose(total(frame), epistemic + aleatoric, rtol=1e-5)
        np.testing.assert_allclose(frame[frame.kind == "noise"].variance, aleatoric, rtol=1e-5)
        np.testing.assert_allclose(frame.groupby("row").share.sum(), 1, rtol=1e-12)
        kinds = ["noise", "dropout", "mpgelu", "disagreement", "distance"]
        kinds += ["weights"] * gaussian_weights + ["input"] * (errors is not None)
        assert set(frame.kind) == set(kinds)
        assert list(frame.columns) == ["row", "kind", "layer", "unit", "variance", "share"]
        assert (frame.variance >= 0).all()
    inputs = frame[frame.kind == "input"].groupby("unit").variance.sum()
    assert list(inputs.index) == ["a", "b", "c", "jointly"]
    assert inputs["b"] == 0
    assert min(inputs["a"], inputs["c"]) > 0


@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
def test_a_networks_parts_add_up_for_the_moments_that_are_asked_for(moments: Any) -> None:
    torch.manual_seed(0)
    network, x = mp.network(3, (6, 5), rate=0.2), torch.randn(5, 3)
    wanted = mp.HeteroscedasticGaussian().variance(mp.propagate(network.double(), x.double(), moments=moments))
    np.testing.assert_allclose(total(attribute(network, x, moments=moments)), wanted.detach(), rtol=1e-9)


def test_errors_of_the_features_are_what_averaging_over_them_does_to_the_mean() -> None:
    """Rows with an error of no, one and two features, beside random inputs; all sources are averages."""
    network, draws = (
        mp.network(3, (16,), 1, rate=0.1),
        200_000,
    )  # the last row's kurtosis of 34 leaves an error of 1.3 %
    x, errors = torch.randn(3, 3), torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.8]])
    frame = attribute(network, x, input_std=errors)
    parts = frame[frame.kind == "input"].pivot(index="row", columns="unit", values="variance")
    assert list(parts.columns) == ["jointly", "x0", "x1", "x2"]
    assert (parts.loc[0] == 0).all()
    assert (parts.x1 == 0).all()
    assert parts.jointly[1] == 0
    assert (parts.loc[2].drop("x1") > 0).all()
    moments = network(FactoredMoments.certain(x[:, None] + errors[:, None] * torch.randn(3, draws, 3)))
    means, variances = moments.mean[..., 0].detach().double(), moments.variance[..., 0].detach().double()
    np.testing.assert_allclose(parts.sum(axis=1), means.var(1), rtol=0.06, atol=1e-12)
    np.testing.assert_allclose(total(frame[frame.kind.isin(["dropout", "mpgelu"])]), variances.mean(1), rtol=0.03)


def test_every_source_is_what_sampling_it_alone_gives() -> None:
    """Resample one layer's dropout masks, all other randomness gone: the variance of the mean over the rest."""
    network = mp.network(3, (6, 5), 1, rate=0.2)
    x = torch.randn(4, 3)
    frame = attribute(network, x)
    draws = 200_000
    for layer, units in (("0", 3), ("3", 6), ("6", 5)):
        found = frame[(frame.kind == "dropout") & (frame.layer == layer)]
        assert len(found) == 4 * units
        sampled = _variance_of_layer(network, x, int(layer), draws)
        np.testing.assert_allclose(found.groupby("row").variance.sum(), sampled, rtol=0.03)


def _variance_of_layer(network: Any, x: Tensor, chosen: int, draws: int) -> Any:
    """Variance of the output when one dropout layer draws its masks and every other random layer takes its mean.

    All other masks multiply by their means, but what a mask adds depends on the second moment of its unit, so the
    units are drawn at random before it and their masks' deviations kept.
    """
    generator = torch.Generator().manual_seed(0)
    moments: Any = FactoredMoments.certain(x)
    value = x.expand(draws, *x.shape)  # a draw of everything before the chosen layer
    deviation: Tensor | None = None  # what the chosen masks do, linear after it
    with torch.no_grad():
        for position, layer in enumerate(network):
            if isinstance(layer, mp.Linear):
                value = layer(value) if deviation is None else value
                deviation = None if deviation is None else deviation @ layer.weight.mT
            elif isinstance(layer, mp.MPGELU):
                keep = mp.rules.keep_probability(moments.mean, moments.variance)
                if deviation is None:
                    value = value * torch.bernoulli(keep.expand(value.shape), generator=generator)
                else:
                    deviation = deviation * keep
            elif deviation is None:
                mask = torch.bernoulli(torch.full_like(value, 1 - layer.rate), generator=generator) / (1 - layer.rate)
                if position == chosen:
                    deviation = value * (mask - 1)
                value = value * mask
            moments = layer(moments)
        assert deviation is not None
        return deviation[..., 0].var(0).numpy()


def test_units_and_features_are_named() -> None:
    network = mp.network(2, (4,), rate=0.1)
    frame = attribute(network, pd.DataFrame(np.ones((2, 2)), columns=["age", "height"]))
    names = frame[frame.row == 0].groupby(["kind", "layer"]).unit.agg(list).to_dict()
    units = ["0", "1", "2", "3"]
    assert names == {
        ("noise", ""): [""],
        ("dropout", "0"): ["age", "height"],
        ("mpgelu", "2"): units,
        ("dropout", "3"): units,
    }
    assert set(attribute(network, torch.ones(2, 2)).unit[1:3]) == {"x0", "x1"}
    summed = attribute(network, torch.ones(2, 2), units=False)
    assert list(summed[summed.row == 0].unit) == ["", "x0", "x1", "", ""]
    np.testing.assert_allclose(total(summed), total(frame), rtol=1e-12)


@pytest.mark.parametrize("moments", [mp.FactoredMoments, mp.DiagonalMoments])
@pytest.mark.parametrize("bias", [True, False])
def test_random_weights_belong_to_what_they_multiply(moments: Any, bias: bool) -> None:
    """Two linear maps of random weights: the variance of every weight reaches the output in closed form."""
    first, second = mp.GaussianLinear(2, 3, bias=bias), mp.GaussianLinear(3, 1, bias=bias)
    for layer in (first, second):
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    x = torch.tensor([[1.0, -2.0], [0.0, 0.5], [0.0, 0.0]])
    frame = attribute(nn.Sequential(first, second), x, features=["a", "b"], moments=moments)
    found = frame[frame.kind == "weights"].pivot(index="row", columns=["layer", "unit"], values="variance")
    through = second.weight[0].square()  # (3,)
    mean, variance = first(x), x.square() @ first.weight_variance.mT
    if bias:
        assert first.bias_variance is not None
        assert second.bias_variance is not None
        variance = variance + first.bias_variance
        np.testing.assert_allclose(found["0", "bias"], (through @ first.bias_variance).expand(3).detach(), rtol=1e-5)
        np.testing.assert_allclose(found["1", "bias"], second.bias_variance.expand(3).detach(), rtol=1e-5)
    by_feature = x.square() * (through @ first.weight_variance)
    by_unit = second.weight_variance[0] * (mean.square() + variance)
    np.testing.assert_allclose(found["0"][["a", "b"]], by_feature.detach(), rtol=1e-5)
    np.testing.assert_allclose(found["1"][["0", "1", "2"]], by_unit.detach(), rtol=1e-5)


def test_the_features_of_random_weights_are_listed_for_ensembles_too(table: Any) -> None:
    X, y = table

    def build(features: int, kind: Any, outputs: int) -> Any:
        return mp.network(features, (4,), outputs, rate=kind.rate, gaussian_weights=True)

    model = mp.MPGELURegressor(sigma=None, rate=0.1, folds=2, diverse=False, network=build, steps=5, random_state=0)
    frame = attribute(model.fit(X, y), X[:2])
    weights = frame[(frame.kind == "weights") & (frame.row == 0)]
    assert list(weights[weights.layer == "1"].unit) == ["a", "b", "c", "bias"]
    assert list(weights[weights.layer == "4"].unit) == [""]


def test_one_output_has_constant_noise() -> None:
    network, x = mp.network(3, (5,), 1), torch.randn(6, 3)
    frame = attribute(network, x, likelihood=mp.Gaussian(0.25))
    np.testing.assert_allclose(frame[frame.kind == "noise"].variance, 0.25)
    variance = network(FactoredMoments.certain(x)).variance[:, 0].detach().numpy()
    np.testing.assert_allclose(total(frame), 0.25 + variance, rtol=1e-5)


class Residual(nn.Module):
    """A network with two branches that share their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.first = nn.Dropout(0.3), nn.Linear(3, 6)
        self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(self.dropout(x)))
        out: Tensor = self.last(h + torch.tanh(self.second(h)))
        return out


def test_a_converted_network_with_branches() -> None:
    network, _ = from_torch(Residual())
    x = torch.randn(5, 3)
    frame = attribute(network, x)
    variance = network(FactoredMoments.certain(x)).variance[:, 0].detach().numpy()
    np.testing.assert_allclose(total(frame), 1 + variance, rtol=1e-5)
    assert set(frame[frame.kind == "dropout"].unit) == {"x0", "x1", "x2"}


def test_many_rows_are_treated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = mp.network(3, (5, 4)), torch.randn(5, 3)
    whole = attribute(network, x, input_std=0.1)
    monkeypatch.setattr("mpgelu.inspect.attribution._ENTRIES", 4000)
    monkeypatch.setattr("mpgelu.estimators.measurement._PREDICTED_AT_ONCE", 512)
    pd.testing.assert_frame_equal(attribute(network, x, input_std=0.1), whole)


def test_a_network_is_left_as_it_was() -> None:
    network = mp.network(2, (3,))
    attribute(network, torch.ones(1, 2))
    assert all(not module._forward_hooks for module in network.modules())
    assert next(network.parameters()).dtype == torch.float32


def test_the_figure(tmp_path: Path) -> None:
    frame = attribute(mp.network(3, (5,)), torch.randn(20, 3), input_std=0.1)
    figure = plot_attribution(frame)
    bars, ranking = figure.axes
    assert len(bars.get_xticks()) == 8
    heights: dict[int, float] = {}
    patches: Any = bars.patches
    for patch in patches:
        place = round(patch.get_x() + patch.get_width() / 2)
        heights[place] = max(heights.get(place, 0), patch.get_y() + patch.get_height())
    rows = [int(label.get_text()) for label in bars.get_xticklabels()]
    np.testing.assert_allclose([heights[i] for i in range(8)], total(frame)[rows], rtol=1e-6)
    assert sorted(heights.values()) == [heights[i] for i in range(8)]  # from the smallest to the largest
    patches = ranking.patches
    widths = [patch.get_width() for patch in patches]
    assert widths == sorted(widths)
    assert sum(widths) <= 100 + 1e-6
    labels = [label.get_text() for label in ranking.get_yticklabels()]
    rest = frame[frame.kind != "noise"].variance.sum()
    assert "noise" not in labels
    assert ranking.get_title() == f"Without the noise ({1 - rest / frame.variance.sum():.0%})"
    plot_attribution(frame, rows=[3, 1]).savefig(tmp_path / "figure.png")
    with pytest.raises(InputError, match="there is no row 99; there are 20 rows"):
        plot_attribution(frame, rows=[99])


def test_bad_input() -> None:
    network = mp.network(2, (3,))
    with pytest.raises(InputError, match=r"attribute: X must have shape \(rows, 2\), got \(4, 3\)"):
        attribute(network, torch.ones(4, 3))
    with pytest.raises(InputError, match="attribute: input_std must be a number, one for each feature"):
        attribute(network, torch.ones(4, 2), input_std=[1, 2, 3])
    with pytest.raises(InputError, match="input_std must be finite and not negative"):
        attribute(network, torch.ones(4, 2), input_std=-1)
    with pytest.raises(InputError, match=r"attribute: layer 2 \(ReLU\) mixes its sources"):
        attribute(mp.network(2, (3,), nonlinearity="relu"), torch.ones(4, 2))
    with pytest.raises(InputError, match="attribute: the MPGELURegressor is not fitted"):
        attribute(mp.MPGELURegressor(), torch.ones(4, 2))
