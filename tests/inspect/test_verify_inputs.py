"""The audit of predictions with errors of the features, against averages over random inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import FactoredMoments, InputError, Predictive, verify
from mpgelu.inspect.audit.inputs import audit_inputs
from mpgelu.networks import FeatureScale

X = np.array([[62.0, 50.0, 43.0], [41.0, 58.0, 50.0]])


class Steep(mp.Ensemble):
    """Two networks whose first layer is steep, so that errors of the features matter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        networks = [mp.network(3, (8,), rate=0.1) for _ in range(2)]
        scaling = FeatureScale.standard(torch.full((3,), 50.0), torch.full((3,), 10.0))
        weights, target = torch.tensor([0.4, 0.6]), (torch.tensor(0.0), torch.tensor(1.0))
        super().__init__([mp.Stack(networks)], weights, mp.HeteroscedasticGaussian(), scaling, *target)
        with torch.no_grad():
            *_, weight, bias = self.each_stack()[0].parameters()
            weight[:, 1], bias[:, 1] = 0, -4  # little noise
            next(iter(self.each_stack()[0].parameters())).mul_(3)


class Propagating(Steep):
    """As predictions with errors were before: their moments through the networks."""

    def forward(self, x: Tensor, input_std: Tensor | None = None, nodes: int = 32) -> Predictive:
        if input_std is None:
            return super().forward(x, None, nodes)
        mean = self.scaling(x).float().expand(2, *x.shape)
        variance = (input_std / self.scaling.scale).float().square().expand(2, *x.shape)
        members = self.likelihood.predictive(self.each_stack()[0](FactoredMoments.of(mean, variance)), nodes)
        return members.mixture_over(0, self.weights).to(x.dtype)


def test_an_ensemble_that_averages_passes_and_one_that_propagates_does_not() -> None:
    audit = verify(Steep(), X, input_std=5.0, networks=1)
    assert audit.inputs is not None
    assert audit.passed
    assert audit.decided
    assert audit.inputs.verdict == "pass"
    assert "agree with averaging over random inputs: the largest differences are 0.0" in audit.words()
    assert "20000 random inputs, passes within sampling error + 0.05" in str(audit)
    wrong = verify(Propagating(), X, input_std=5.0, networks=1)
    assert wrong.inputs is not None
    assert all(layer.passed for layer in wrong.layers)  # the propagation agrees with itself
    assert not wrong.passed
    assert max(wrong.inputs.mean_error, wrong.inputs.stddev_error) > 0.1
    assert "are not the average over such inputs, by up to" in wrong.words()
    assert verify(Propagating(), X, input_std=0.0, networks=1, draws=200).passed


def test_propagated_moments_of_a_network() -> None:
    """A linear network averages by itself; MP-GELU does not, and the audit says why."""
    x = torch.randn(3, 2)
    linear = nn.Sequential(mp.Dropout(0.2), mp.Linear(2, 4), mp.Linear(4, 1))
    assert verify(linear, x, input_std=[0.5, 0.3]).passed
    steep = nn.Sequential(mp.Linear(2, 8), mp.MPGELU(), mp.Linear(8, 1))
    audit = verify(steep, x, input_std=1.0)
    assert not audit.passed
    assert "MP-GELU keeps a unit by its mean and variance" in audit.words()
    assert verify(linear, x).inputs is None


def test_the_sampling_error_is_stated_and_no_seed_raises_a_false_alarm() -> None:
    """A linear function, whose moments are known; a wrong mean of 0.1 standard deviations is found."""
    x, errors = torch.zeros(10, 2, dtype=torch.float64), torch.tensor([[3.0, 4.0]] * 10, dtype=torch.float64)
    right = x.sum(1, keepdim=True), torch.full((10, 1), 25.0 + 1.0).double()
    wrong = right[0] + 0.15 * 26**0.5, right[1]

    def predict(at: Tensor) -> tuple[Tensor, Tensor]:
        return at.sum(1, keepdim=True), torch.ones(len(at), 1, dtype=at.dtype)

    for seed in range(20):
        settings = {"draws": 10_000, "seed": seed, "propagated": False}
        found = audit_inputs(right, predict, x, errors, **settings)  # type: ignore[arg-type]
        assert found.passed
        assert found.decided
        assert found.mean_se == pytest.approx(0.01 * (25 / 26) ** 0.5, rel=0.05)
        assert found.stddev_se == pytest.approx(0.01 * 2**0.5 / 2 * 25 / 26, rel=0.1)
    assert not audit_inputs(wrong, predict, x, errors, **settings).passed  # type: ignore[arg-type]
    few = audit_inputs(right, predict, x, errors, draws=500, seed=0, propagated=False)
    assert (few.verdict, few.decided) == ("undecided", False)
    assert "more draws tell more" in few.words()
    narrow = right[0], right[1] * 0.8
    assert not audit_inputs(narrow, predict, x, errors, **settings).passed  # type: ignore[arg-type]


def test_bad_input() -> None:
    with pytest.raises(InputError, match="verify: input_std must be a number, one for each feature"):
        verify(Steep(), X, input_std=[1, 2], draws=100, networks=1)
    with pytest.raises(InputError, match="verify: input_std must be finite and not negative"):
        verify(nn.Sequential(mp.Linear(2, 1)), torch.ones(1, 2), input_std=-1, draws=100)
