"""One network that learned from an ensemble: what it says, that everything works on it, and its parts."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import mpgelu as mp
from command_line import Command
from houses import QUICK, houses
from mpgelu import DiagonalMoments, GaussianMixture, InputError, MPGELURegressor, Predictive, native
from mpgelu.estimators import distillation, ensemble, pupil
from mpgelu.estimators import lesson as lesson_module
from mpgelu.estimators.lesson import Batch, Lesson, made_rows, spread_values
from mpgelu.estimators.recipe.networks import single_precision
from mpgelu.estimators.scales import robust_scale
from mpgelu.inspect import verify
from mpgelu.layers import SiLU
from mpgelu.networks import FeatureScale

Array = NDArray[np.float64]
SMALL: dict[str, Any] = {"hidden": (32, 32), "components": 3, "steps": 400}


def table(rows: int, seed: int = 0) -> tuple[Array, Array]:
    """A curve in two of three features, with noise that grows with the third."""
    random = np.random.default_rng(seed)
    X = random.uniform(-2, 2, (rows, 3))
    return X, 10 + np.sin(2 * X[:, 0]) + X[:, 1] + (0.1 + 0.1 * (X[:, 2] + 2)) * random.normal(size=rows)


@pytest.fixture(scope="module")
def teacher() -> MPGELURegressor:
    X, y = table(200)
    return MPGELURegressor((24,), sigma=0.2, diverse=False, folds=4, steps=200, random_state=0).fit(X, y)


@pytest.fixture(scope="module")
def compact(teacher: MPGELURegressor) -> MPGELURegressor:
    before = distillation._MADE_ROWS
    distillation._MADE_ROWS = 2_000
    try:
        return teacher.distill(**SMALL)
    finally:
        distillation._MADE_ROWS = before


def log_epistemic(model: MPGELURegressor, X: Array) -> Array:
    log: Array = 2 * np.log(model.predict_parts(X).epistemic_std)
    return log


# What it says


def test_it_predicts_what_the_ensemble_does(teacher: MPGELURegressor, compact: MPGELURegressor) -> None:
    X, y = table(500, seed=1)
    ours, theirs = compact.predict_distribution(X), teacher.predict_distribution(X)
    assert len(compact.ensemble_) == 1
    assert isinstance(compact, MPGELURegressor)
    assert (ours.mean - theirs.mean).square().mean() < 0.05 * theirs.variance.mean()
    assert ours.log_prob(torch.tensor(y)).mean() > theirs.log_prob(torch.tensor(y)).mean() - 0.15
    assert np.corrcoef(log_epistemic(compact, X), log_epistemic(teacher, X))[0, 1] > 0.5
    assert (ours.variance / theirs.variance).log().abs().mean() < 0.2


def test_far_from_the_data_it_is_as_wide(teacher: MPGELURegressor, compact: MPGELURegressor) -> None:
    X, _ = table(200, seed=2)
    for distance in (3.0, 100.0):
        far = X + distance * np.array([1.0, -1.0, 0.5])
        ours, theirs = (model.predict(far, return_std=True)[1] for model in (compact, teacher))
        # Four seeds: medians 0.06 to 0.10, largest 0.24 to 0.55 (0.20 to 0.38 before the start in the unit of width)
        apart = np.abs(np.log(ours / theirs))
        assert np.median(apart) < 0.15
        assert apart.max() < 0.6
        assert np.corrcoef(log_epistemic(compact, X), log_epistemic(teacher, X))[0, 1] > 0.5


def test_the_score_tells_the_loss(teacher: MPGELURegressor, compact: MPGELURegressor) -> None:
    assert 0 < teacher.score_ - compact.score_ < 0.2
    assert compact.kind_weights_ == {"compact network": 1.0}
    assert compact.n_iter_ == SMALL["steps"]


def test_the_teacher_is_left_as_it_was(teacher: MPGELURegressor, compact: MPGELURegressor) -> None:
    assert len(teacher.ensemble_) > 1
    assert float(teacher.ensemble_.scaling.reach) == float(compact.ensemble_.scaling.reach) > 0
    assert teacher.ensemble_.scaling is not compact.ensemble_.scaling


def test_the_seed_decides(teacher: MPGELURegressor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_MADE_ROWS", 200)
    X, _ = table(5)

    def predicted(seed: int) -> list[float]:
        torch.manual_seed(7)
        found: list[float] = teacher.distill(hidden=(4,), components=2, steps=3, random_state=seed).predict(X).tolist()
        assert torch.initial_seed() == 7
        return found

    assert predicted(1) == predicted(1) != predicted(2)


# Everything works on it


def test_intervals_quantiles_calibration_and_input_errors(compact: MPGELURegressor) -> None:
    X, y = table(200, seed=3)
    distribution = compact.predict_distribution(X)
    parts = compact.predict_parts(X)
    np.testing.assert_allclose(parts.epistemic_std**2 + parts.aleatoric_std**2, distribution.variance)
    quantiles = compact.predict_quantile(X, [0.05, 0.95])
    np.testing.assert_allclose(distribution.cdf(torch.tensor(quantiles[:, 0])), 0.05, atol=1e-6)
    np.testing.assert_allclose(np.stack(compact.predict_interval(X, 0.9), 1), quantiles)
    blurred = compact.predict_distribution(X[:5], input_std=0.01)
    assert blurred.means.shape[-1] > 3  # the components are kept at every point
    torch.testing.assert_close(
        blurred.log_prob(torch.tensor(y[:5])), distribution[:5].log_prob(torch.tensor(y[:5])), atol=0.1, rtol=0
    )
    calibrated = compact.__class__(**compact.get_params())
    calibrated.__dict__.update(compact.__dict__)
    lower, upper = calibrated.calibrate(X, y).predict_interval(table(300, seed=4)[0], 0.8)
    assert np.mean((lower <= table(300, seed=4)[1]) & (table(300, seed=4)[1] <= upper)) > 0.7


def test_many_rows_are_predicted_in_parts(compact: MPGELURegressor, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = table(700, seed=9)
    monkeypatch.setattr(ensemble, "_ROWS_OF_ONE", 300)
    whole = compact.predict_distribution(X)
    torch.testing.assert_close(whole[650:].log_weights, compact.predict_distribution(X[650:]).log_weights)
    assert whole.log_prob(torch.tensor(y)).shape == (700,)


def test_files_hold_it(compact: MPGELURegressor, tmp_path: Path) -> None:
    X, _ = table(50, seed=5)
    compact.save(tmp_path / "small")
    loaded = mp.load(tmp_path / "small")
    np.testing.assert_array_equal(np.stack(loaded.predict(X, True)), np.stack(compact.predict(X, True)))
    assert (tmp_path / "small").stat().st_size < 100_000


def test_a_model_from_a_file_needs_rows(teacher: MPGELURegressor, tmp_path: Path) -> None:
    teacher.save(tmp_path / "big")
    loaded = mp.load(tmp_path / "big")
    with pytest.raises(InputError, match=r"does not hold the rows .* distill\(X_unlabelled=X\)"):
        loaded.distill()
    X, _ = table(60, seed=6)
    assert loaded.distill(X, hidden=(4,), components=2, steps=2).predict(X).shape == (60,)
    with pytest.raises(InputError, match="got steps=0"):
        teacher.distill(steps=0)


def test_sources_add_up_and_moments_are_right(compact: MPGELURegressor) -> None:
    X, _ = table(6, seed=7)
    X[0] += 4
    frame = mp.attribute(compact, X)
    assert set(frame.kind) == {"noise", "weights", "distance"}
    parts = compact.predict_distribution(X)
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), parts.variance, rtol=1e-4)
    noise = frame[frame.kind == "noise"].groupby("row").variance.sum()
    np.testing.assert_allclose(noise, parts.aleatoric_variance, rtol=1e-4)
    assert verify(compact, X, draws=2_000).passed


def test_diagonal_moments_are_as_exact_as_factored_ones(compact: MPGELURegressor) -> None:
    X, _ = table(6, seed=7)
    exact = compact.predict_distribution(X)
    compact.ensemble_.moment_type = DiagonalMoments
    try:
        diagonal = compact.predict_distribution(X)
    finally:
        compact.ensemble_.moment_type = mp.FactoredMoments
    torch.testing.assert_close(diagonal.variances, exact.variances, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(diagonal.epistemic_variance, exact.epistemic_variance, rtol=1e-4, atol=1e-7)


def test_a_graph_holds_it(compact: MPGELURegressor, tmp_path: Path) -> None:
    X, _ = table(40, seed=8)
    X[0] += 20
    X[1:4] *= np.array([[1e5], [1e20], [1e37]])
    mp.export_onnx(compact, tmp_path / "small.onnx", (0.05, 0.5, 0.95))
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"features": X.astype(np.float32)}), strict=True))
    parts = compact.predict_parts(X)
    for name in ("mean", "epistemic_std", "aleatoric_std"):
        np.testing.assert_allclose(found[name], getattr(parts, name), rtol=1e-4)
    quantiles = compact.predict_quantile(X, [0.05, 0.5, 0.95])
    np.testing.assert_allclose(found["quantiles"], quantiles, atol=1e-4 * np.abs(quantiles).max())
    (none,) = session.run(["mean"], {"features": np.zeros((0, 3), np.float32)})
    assert none.shape == (0,)


def test_a_graph_without_limit_of_the_features(compact: MPGELURegressor, tmp_path: Path) -> None:
    held, X = compact.ensemble_, table(40, seed=8)[0]
    plain = FeatureScale.standard(held.scaling.center, held.scaling.scale)
    one = torch.ones(1, dtype=torch.float64)
    free = ensemble.Ensemble(held.each_stack(), one, held.likelihood, plain, held.target_mean, held.target_scale)
    mp.export_onnx(free, tmp_path / "free.onnx", ())
    session = onnxruntime.InferenceSession(tmp_path / "free.onnx")
    found = session.run(["mean", "stddev", "epistemic_std"], {"features": X.astype(np.float32)})
    wanted = free(torch.tensor(X))
    for ours, theirs in zip(found, (wanted.mean, wanted.stddev, wanted.epistemic_variance.sqrt()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_variances_that_explode_stay_finite(compact: MPGELURegressor, tmp_path: Path) -> None:
    wild, X = copy.deepcopy(compact), table(40, seed=8)[0]
    network = next(iter(wild.ensemble_.each_stack()[0].unstack()))
    _, shape = list(cast(nn.Sequential, network)[-1].children())
    with torch.no_grad():
        cast(mp.Linear, shape).bias[-SMALL["components"] :] += 500
    wild.ensemble_.stacks[0] = mp.Stack([network])
    stddev = wild.predict(X, return_std=True)[1]
    assert np.isfinite(stddev).all()
    mp.export_onnx(wild, tmp_path / "wild.onnx", ())
    session = onnxruntime.InferenceSession(tmp_path / "wild.onnx")
    np.testing.assert_allclose(session.run(["stddev"], {"features": X.astype(np.float32)})[0], stddev, rtol=1e-4)


def test_a_default_network_that_loses_much_says_so(teacher: MPGELURegressor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_MADE_ROWS", 2_000)
    monkeypatch.setattr(distillation, "default_steps", lambda _: 3)
    with pytest.warns(UserWarning, match="nats per row worse than the ensemble; keep .* more than 3"):
        teacher.distill()


def test_models_of_tables(mpgelu: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_MADE_ROWS", 500)
    monkeypatch.setattr(distillation, "_STEPS", 50)
    frame = houses(120)
    frame.to_csv(tmp_path / "houses.csv", index=False)
    both = mp.TableModel.fit(frame, "price", compact=True, calibrate=0.2, **QUICK)
    assert len(both.regressor.ensemble_) == 1
    assert both.regressor.calibration_scores_ is not None
    big = mp.TableModel.fit(frame, "price", **QUICK)
    big.save(tmp_path / "big")
    told = mpgelu("distill", tmp_path / "big", tmp_path / "houses.csv", "-o", tmp_path / "small", "--steps", 20)
    assert told.code == 0, told.err
    assert "nats a row" in told.out
    small = mp.TableModel.load(tmp_path / "small")
    assert len(small.regressor.ensemble_) == 1
    assert small.predict(frame).shape == (120, 6)
    assert mpgelu("report", tmp_path / "small", tmp_path / "houses.csv", "-o", tmp_path / "page.html").code == 0
    info = mpgelu("info", tmp_path / "small").out
    assert info.count("compact network") == info.count("one network, distilled") == 1
    assert "distilled" not in mpgelu("info", tmp_path / "big").out
    assert len(big.distill(frame, steps=2).regressor.ensemble_) == 1
    refused = mpgelu("distill", tmp_path / "big", "-o", tmp_path / "none")
    assert refused.code == 2
    assert "give the training table" in refused.err
    assert not (tmp_path / "none").exists()


# Its parts


def test_the_loss_and_its_gradient_are_those_of_the_likelihood() -> None:
    rows, likelihood = 5, GaussianMixture(3)
    torch.manual_seed(0)
    network = pupil.compact_network(4, (7, 6), likelihood).double()
    z, values, mean, log_epistemic = (torch.randn(*size, rows).double() for size in ((4,), (4,), (), ()))
    batch = Batch(z.T, values, mean, log_epistemic, torch.rand(rows).double() + 0.2)
    p = likelihood.predictive(network(mp.FactoredMoments.certain(batch.z)))
    wanted = (
        -p[:, None].log_prob(values.T).mean()
        + pupil._MEAN_WEIGHT * 8 * (((p.mean - mean).square() / (4 * batch.variance) + 1).sqrt() - 1).mean()
        + pupil._EPISTEMIC_WEIGHT * (p.epistemic_variance.log() - log_epistemic).square().mean()
    )
    gradients = torch.autograd.grad(wanted, list(network.parameters()))
    parameters = pupil._Parameters(network)
    found = pupil.learn(parameters.body, parameters.head, parameters.of_head, batch)
    torch.testing.assert_close(found.loss(), wanted.detach())
    views = pupil._Parameters(expected := copy.deepcopy(network))
    with torch.no_grad():
        for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
    torch.testing.assert_close(parameters.gradient, views.vector)


def test_gradients_of_the_kernel_are_those_of_torch() -> None:
    """In float32 a kernel evaluates the body of the network, in float64 torch."""
    torch.manual_seed(0)
    network = pupil.compact_network(3, (24, 20, 16), GaussianMixture(3))
    rows = 40
    z, values, mean, log_epistemic = (torch.randn(*size) for size in ((rows, 3), (4, rows), (rows,), (rows,)))
    batch = Batch(z, values, mean, log_epistemic, torch.rand(rows) + 0.2)
    exact, rounded = pupil._Parameters(copy.deepcopy(network).double()), pupil._Parameters(network)
    pupil.learn(exact.body, exact.head, exact.of_head, Batch(*(part.double() for part in batch)))
    with torch.profiler.profile() as profile:
        pupil.learn(rounded.body, rounded.head, rounded.of_head, batch)
    assert ("_Outputs" in {event.key for event in profile.key_averages()}) == native.available()
    torch.testing.assert_close(rounded.gradient.double(), exact.gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [0.01, 100.0])  # below and above the largest norm of a gradient
def test_steps_are_those_of_adam(size: float) -> None:
    torch.manual_seed(0)
    network = pupil.compact_network(2, (5, 4), GaussianMixture(2)).double()
    copied, unit = copy.deepcopy(network), 0.3
    before = [p.detach().clone() for p in copied.parameters()]
    speeds = {name: pupil._SPEEDS.get(name.rpartition(".")[2], 1.0) for name, _ in copied.named_parameters()}
    groups = [{"params": [p], "lr": 0.1 * speeds[name]} for name, p in copied.named_parameters()]
    optimizer, parameters = torch.optim.Adam(groups, betas=pupil._BETAS), pupil._Parameters(network, unit)
    for _ in range(3):
        parameters.gradient.copy_(size * torch.randn(parameters.gradient.shape))
        views = pupil._Parameters(copied_gradients := copy.deepcopy(copied))
        views.vector.copy_(parameters.gradient)
        for p, gradient in zip(copied.parameters(), copied_gradients.parameters(), strict=True):
            p.grad = gradient.detach()
        torch.nn.utils.clip_grad_norm_(copied.parameters(), pupil._CLIP)
        optimizer.step()
        parameters.step(0.1)
    with torch.no_grad():
        for now, then in list(zip(copied.parameters(), before, strict=True))[-2:]:  # two logits, offsets, log-variances
            now[2:4] = then[2:4] + unit * (now[2:4] - then[2:4])
    for ours, theirs in zip(network.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_narrow_distributions_are_learned() -> None:
    """A teacher whose standard deviation is 0.3 to 3 % of the scale of the target, and some rows that are far off."""
    rows = 2_000
    random = torch.Generator().manual_seed(0)
    z = torch.rand(rows, 2, generator=random) * 4 - 2
    stddev = torch.exp(-4.6 + 0.6 * z[:, 1])
    mean = torch.sin(z[:, 0]) + z[:, 1]
    values = mean[:, None] + stddev[:, None] * torch.randn(8, rows, 4, generator=random)
    far = torch.rand(rows, generator=random) < 0.02
    mean = torch.where(far, mean + 0.5 * torch.randn(rows, generator=random), mean)  # nothing that can be learned
    lesson = Lesson(z, values, mean, 2 * stddev.log() - 3, stddev.square(), rows)
    assert lesson.unit == pytest.approx(math.exp(-4.6), rel=0.05)
    likelihood = GaussianMixture(3)
    with single_precision(0):
        network = pupil.compact_network(2, (32, 32), likelihood, lesson.unit)
        pupil.train(network, lesson, 1_000, 0, False)
        found = likelihood.predictive(network(mp.FactoredMoments.certain(z)))
    # 0.3; 0.8 with squares instead of the pseudo-Huber loss, 3.6 with a unit of one, and 4.4 with both
    assert (found.stddev / stddev).log().abs().median() < 0.5
    assert np.corrcoef(found.stddev.detach().log(), stddev.log())[0, 1] > 0.7


def test_a_step_that_is_not_finite_is_left_out() -> None:
    likelihood, rows = GaussianMixture(2), 30
    z, nothing = torch.randn(rows, 2), torch.zeros(rows)
    lesson = Lesson(z, torch.full((8, rows, 4), math.nan), nothing, nothing, nothing + 1, rows)
    with single_precision(0):
        network = pupil.compact_network(2, (5,), likelihood)
        before = [p.detach().clone() for p in network.parameters()]
        pupil.train(network, lesson, 3, 0, False)
    for now, then in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then)


def test_values_stand_for_the_distribution() -> None:
    means, variances = torch.tensor([-2.0, 1.0, 3.0]).double(), torch.tensor([0.5, 0.2, 2.0]).double()
    weights = torch.tensor([0.2, 0.5, 0.3]).double()
    rows = 20_000
    one = Predictive.mixture(
        [Predictive.gaussian(m.expand(rows), v * 0, v) for m, v in zip(means, variances, strict=True)], weights
    )
    (values,) = spread_values(one, 8, torch.Generator().manual_seed(0))
    averages = values.mean(1)
    assert values.mean() == pytest.approx(one.mean[0].item(), abs=5 * averages.std().item() / math.sqrt(rows))
    assert (values <= 0.5).double().mean() == pytest.approx(one.cdf(0.5)[0].item(), abs=0.005)
    assert averages.var() < 0.3 * one.variance[0] / 8  # independent draws would have all of it


def test_made_rows_stay_near_and_keep_codes() -> None:
    random = np.random.default_rng(0)
    X = np.column_stack([random.normal(size=300), random.integers(0, 2, 300), np.full(300, 5.0)])
    between, outside = made_rows(X, robust_scale(X), 4_000, random)
    assert (between.shape, outside.shape) == ((3_600, 3), (400, 3))
    assert (between[:, 2] == 5).all()
    assert (outside[:, 2] == 5).all()
    lowest, highest = X[:, 0].min(), X[:, 0].max()
    assert ((between[:, 0] >= lowest) & (between[:, 0] <= highest)).all()
    assert ((outside[:, 0] < lowest) | (outside[:, 0] > highest)).mean() > 0.05
    assert np.isin(between[:, 1], [0, 1]).mean() > 0.6
    assert made_rows(X[:1], robust_scale(X), 10, random)[0].shape == (9, 3)


@pytest.mark.parametrize("given", [300, 12_000])
def test_a_step_has_fewer_rows_between_the_more_are_given(given: int) -> None:
    """Of 1,000 rows 50 are outside; the share of rows between falls with the number of given ones."""
    between, outside, size = 4_000, 500, 1_000
    nothing = torch.zeros(given + between + outside)
    lesson = Lesson(nothing[:, None], nothing[None, :, None], nothing, nothing, nothing + 1, given, outside)
    at = lesson.draw(size, torch.Generator().manual_seed(0))
    assert len(at) == size
    assert int((at >= given + between).sum()) == 50
    share = 1 / (1 + (given / lesson_module._FEW_GIVEN) ** lesson_module._FALL)
    assert int(((at >= given) & (at < given + between)).sum()) == round(950 * share)


def test_rows_are_drawn_from_given_ones_alone_if_there_are_no_others() -> None:
    nothing = torch.zeros(20)
    lesson = Lesson(nothing[:, None], nothing[None, :, None], nothing, nothing, nothing + 1, 20)
    at = lesson.draw(500, torch.Generator().manual_seed(0))
    assert set(at.tolist()) == set(range(20))


def test_the_embedding_is_that_of_a_member() -> None:
    member = mp.network(3, (16, 16), nonlinearity=SiLU, rate=0, sigma=1.0)
    network = pupil.compact_network(3, (16, 16, 16), GaussianMixture(2))
    with torch.no_grad():
        for parameter in list(member.children())[1].parameters():
            parameter.fill_(2.0)
    before = copy.deepcopy(network.state_dict())
    pupil.adopt(network, member)
    theirs = member.state_dict()
    for name, tensor in network.state_dict().items():
        same = int(name.partition(".")[0]) < 2
        torch.testing.assert_close(tensor, theirs[name] if same else before[name])
    assert not torch.equal(before["0.frequency"], theirs["0.frequency"])


def test_an_embedding_of_another_size_is_not_copied() -> None:
    member = torch.nn.Sequential(mp.layers.Periodic(3, sigma=1.0, frequencies=5), mp.Linear(9, 2))
    network = pupil.compact_network(3, (16,), GaussianMixture(2))
    before = copy.deepcopy(network.state_dict())
    pupil.adopt(network, member)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, before[name])


@pytest.mark.parametrize(("rows", "steps"), [(100, 2_400), (1_400, 5_185), (7_000, 11_593), (10**6, 40_000)])
def test_steps_grow_with_the_rows(rows: int, steps: int) -> None:
    assert distillation.default_steps(rows) == steps


def test_many_rows_have_a_wider_network(monkeypatch: pytest.MonkeyPatch, teacher: MPGELURegressor) -> None:
    def widths(model: MPGELURegressor) -> list[int]:
        layers = model.ensemble_.each_stack()[0].architecture.children()
        return [layer.out_features for layer in layers if isinstance(layer, mp.Linear)]

    assert widths(teacher.distill(steps=2)) == [128, 128, 128]
    monkeypatch.setattr(distillation, "_MANY_ROWS", 50)
    assert widths(teacher.distill(steps=2)) == [192, 192, 128]


def test_the_network_starts_from_the_heaviest_member(teacher: MPGELURegressor) -> None:
    model = copy.deepcopy(teacher.ensemble_)
    model.weights[:] = 0.1
    model.weights[2] = 0.7
    chosen = distillation._heaviest_member(model)
    assert chosen is not None
    wanted = model.each_stack()[0].unstack()[2].state_dict()
    for name, tensor in chosen.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name])


def test_it_starts_from_a_smooth_member_although_another_is_heavier() -> None:
    X, y = table(60)
    estimator = MPGELURegressor((8,), sigma=0.4, folds=2, steps=5, random_state=0).fit(X, y)
    assert "periodic 0.2, piecewise linear" in estimator.kind_weights_
    model = estimator.ensemble_
    stacks = model.each_stack()
    kinked = [any(isinstance(layer, mp.MPGELU) for layer in stack.architecture.children()) for stack in stacks]
    model.weights[:] = torch.cat([torch.full((len(s),), 1.0 + k) for s, k in zip(stacks, kinked, strict=True)])
    chosen = distillation._heaviest_member(model)
    assert chosen is not None
    assert not any(isinstance(layer, mp.MPGELU) for layer in chosen.modules())


def test_without_an_embedding_there_is_no_member_to_start_from() -> None:
    X, y = table(60)
    plain = MPGELURegressor((8,), sigma=None, diverse=False, folds=2, steps=5, random_state=0).fit(X, y)
    assert distillation._heaviest_member(plain.ensemble_) is None
