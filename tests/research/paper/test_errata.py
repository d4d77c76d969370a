"""The misprints that docs/errata.md lists: the printed form is off, the corrected one is right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from made_up import BOSTON, only_row
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import FullMoments
from mpgelu.research.paper.tables import paper_table
from mpgelu.rules.normal import cdf
from mpgelu.rules.relu_pairs import Units, dvi_pairs, exact_pairs


def test_equation_1_has_the_log_variance_where_the_mean_is_printed() -> None:
    mean, covariance, y = np.array([0.7, -0.4]), np.array([[0.3, 0.1], [0.1, 0.2]]), 1.5
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    root = np.linalg.cholesky(covariance)
    expected = 0.0
    for (z1, w1), (z2, w2) in itertools.product(zip(nodes, weights, strict=True), repeat=2):
        h = mean + root @ np.array([z1, z2])
        expected -= w1 * w2 * (math.log(2 * math.pi) + h[1] + (h[0] - y) ** 2 / math.exp(h[1])) / (4 * math.pi)
    moments = FullMoments(torch.tensor(mean), torch.tensor(covariance))
    ours = HeteroscedasticGaussian().expected_log_prob(moments, torch.tensor(y, dtype=torch.float64)).item()
    printed = ours + mean[1] / 2 - mean[0] / 2
    assert abs(ours - expected) < 1e-9
    assert abs(printed - expected) > 0.5


def test_the_covariance_of_a_dense_layer_has_indices_i_and_j() -> None:
    generator = np.random.default_rng(0)
    h, w = generator.normal(size=(3, 2)), generator.normal(size=(4, 2, 2))  # equally likely values, independent
    outputs = np.array([weights @ value for weights in w for value in h])
    truth = np.cov(outputs.T, bias=True)
    second, cov_h = np.einsum("ni,nj->ij", h, h) / 3, np.cov(h.T, bias=True)
    mean_w = w.mean(0)
    cov_w = np.einsum("nki,nlj->kilj", w - mean_w, w - mean_w) / 4
    first = np.einsum("ij,kilj->kl", second, cov_w)
    right = first + np.einsum("ki,ij,lj->kl", mean_w, cov_h, mean_w)
    printed = first + np.einsum("ki,il,lj->kl", mean_w, cov_h, mean_w)
    np.testing.assert_allclose(right, truth, atol=1e-12)
    assert np.abs(printed - truth).max() > 0.05


def test_the_covariance_of_relu_as_dvi_prints_it() -> None:
    grid = torch.linspace(-4, 4, 33, dtype=torch.float64)
    a1, a2, rho = torch.meshgrid(grid, grid, torch.linspace(-0.999, 0.999, 80, dtype=torch.float64), indexing="ij")
    one, two = (Units(a, cdf(a), torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)) for a in (a1, a2))
    exact = exact_pairs(one, two, rho)

    def error(sign: int, factor: torch.Tensor | int) -> float:
        lean = rho / (1 + (1 - rho * rho).sqrt())
        g = torch.asin(rho) + sign * lean
        exponent = -lean / (2 * g) * (a1 * a1 + a2 * a2) + (torch.asin(rho) - rho) / (rho * g) * a1 * a2
        value = rho * one.probability * two.probability + factor * g / (2 * math.pi) * exponent.exp()
        return (value - exact).abs().max().item()

    assert round(error(+1, 1), 2) == 0.49  # as printed
    assert round(error(+1, rho), 2) == 0.30  # the sign alone is wrong
    assert round(error(-1, 1), 2) == 0.18  # the factor alone is missing
    assert round(error(-1, rho), 3) == 0.013
    assert (dvi_pairs(one, two, rho) - exact).abs().max().item() < 0.0133


def test_the_one_output_tables_are_those_of_unit_noise() -> None:
    table = paper_table()
    rows = table[table["outputs"] == 1]
    unit_noise = 0.5 * math.log(2 * math.pi) + rows["rmse"] ** 2 / 2  # without the spread of squares over splits
    assert (rows["nll"] - unit_noise).abs().max() < 0.045
    assert (rows["nll"] - unit_noise).median() < 0.005
    assert (rows["nll"] >= unit_noise - 0.001).all()  # the mean of squares is at least the square of the mean


def test_misprinted_numbers_are_corrected_to_the_size_of_their_neighbours() -> None:
    table = paper_table()
    assert only_row(table, **BOSTON | {"dataset": "energy", "nonlinearity": "relu"})["runtime_s"] == 0.022
    assert only_row(table, **BOSTON | {"dataset": "power"})["nll_se"] == 0.007
    power = table[(table["dataset"] == "power") & (table["outputs"] == 2)]
    assert sorted(power["nll_se"]) == [0.006, 0.007, 0.007, 0.008]


def test_27_percent_is_the_mean_and_not_the_most() -> None:
    table = paper_table()
    rows = table[(table["outputs"] == 2) & (table["covariance"] == "full")]
    runtime = rows.pivot(index="dataset", columns="nonlinearity", values="runtime_s")
    saved = 1 - runtime["mpgelu"] / runtime["relu"]
    assert 0.27 <= saved.mean() < 0.28
    assert 0.37 <= saved.max() < 0.38
