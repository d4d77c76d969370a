"""What fit takes: tensors, arrays, loaders, and clear words about everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mpgelu as mp
from mpgelu import HeteroscedasticGaussian, InputError
from mpgelu.training import History


def data(rows: int = 40) -> tuple[Tensor, Tensor]:
    X = torch.rand(rows, 2, generator=torch.Generator().manual_seed(1))
    return X, X[:, 0] - X[:, 1]


def trained(given: Any, **settings: Any) -> tuple[Tensor, History]:
    torch.manual_seed(0)
    network = mp.network(2, hidden=(8,))
    chosen = {"epochs": 3, "batch_size": 16, "progress": False, **settings}
    history = mp.fit(network, HeteroscedasticGaussian(), given, **chosen)
    return torch.cat([p.detach().flatten() for p in network.parameters()]), history


def test_arrays_are_trained_on_as_tensors_are() -> None:
    X, y = data()
    wanted, history = trained((X, y), validation=(X, y))
    frame = pd.DataFrame(X.double().numpy()).assign(y=y.double().numpy())
    for arrays in ((X.double().numpy(), y.double().numpy()), [X.numpy(), y.tolist()], (frame[[0, 1]], frame.y)):
        found, same = trained(arrays, validation=arrays)
        assert torch.equal(found, wanted)
        assert torch.equal(same.validation, history.validation)


def test_arrays_of_whole_numbers() -> None:
    X = np.arange(20).reshape(10, 2) % 3
    assert trained((X, X[:, 0]))[0].isfinite().all()


@pytest.mark.parametrize("as_list", [False, True])
def test_a_loader_gives_the_batches_of_each_epoch(as_list: bool) -> None:
    X, y = data(40)
    loader: Any = DataLoader(TensorDataset(X, y), batch_size=16)
    batches = [(X[:16], y[:16]), (X[16:32], y[16:32]), (X[32:], y[32:])]
    found, history = trained(batches if as_list else loader, validation=loader)
    torch.manual_seed(0)
    network, likelihood = mp.network(2, hidden=(8,)), HeteroscedasticGaussian()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for features, targets in batches:
            optimizer.zero_grad()
            loss = -likelihood.expected_log_prob(network(mp.FactoredMoments.certain(features)), targets).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in network.parameters()]))
    torch.testing.assert_close(history.loss, torch.stack(losses).view(3, 3).mean(1))
    last = -likelihood.expected_log_prob(network(mp.FactoredMoments.certain(X)), y).mean()
    torch.testing.assert_close(history.validation[-1], last.detach())


def test_a_shuffling_loader_trains() -> None:
    X, y = data(64)
    loader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    _, history = trained(loader, epochs=60)
    assert history.loss[-1] < history.loss[0] - 0.3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (data()[0], r"data must be a pair \(features, targets\) .* or a DataLoader of such pairs, got Tensor"),
        (data()[0].numpy(), "data must be a pair .* got ndarray"),
        (3, "data must be a pair .* got int"),
        ([], "data gave no batch"),
        (DataLoader(TensorDataset(data()[0])), "data must be a pair .* got list"),
        ((pair for pair in [data()]), r"data is an iterator \(generator\), which gives its batches once"),
        (
            (data()[0], data()[1][:, None]),
            r"data must be .* targets \(rows,\), got \(40, 2\) and \(40, 1\); use y.squeeze\(-1\)",
        ),
        ((np.array([["a", "b"]]), np.ones(1)), "data: X must hold numbers, got <U1 from ndarray"),
        ((np.array([[1.0, np.nan]]), np.ones(1)), r"data: X must be finite, got nan at index \(0, 1\)"),
    ],
)
def test_other_data_is_refused_in_words(given: Any, text: str) -> None:
    with pytest.raises(InputError, match=f"fit: {text}"):
        trained(given)


@pytest.mark.parametrize(
    ("likelihood", "text"),
    [
        (nn.MSELoss(), r"must have a method expected_log_prob\(moments, y\), as .* have, got MSELoss; losses of torch"),
        (nn.functional.mse_loss, "must have a method expected_log_prob.* got function"),
        (HeteroscedasticGaussian, r"must be an object, got a class; did you mean HeteroscedasticGaussian\(\)\?"),
    ],
)
def test_a_loss_is_not_a_likelihood(likelihood: Any, text: str) -> None:
    with pytest.raises(InputError, match=f"fit: likelihood {text}"):
        mp.fit(mp.network(2), likelihood, data(), epochs=1)
