"""Arguments of a wrong kind get an error that names the function, the argument and what is wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpgelu as mp

X, Y = np.linspace(-1, 1, 40).reshape(20, 2), np.linspace(-1, 1, 20)
ROWS = torch.zeros(4, 2)
WRONG: Any = "nonsense"  # what the type checker would not let through
MOMENTS = "moments must be a type such as mpgelu.DiagonalMoments, got "
LIKELIHOOD = "likelihood must be a Likelihood, such as HeteroscedasticGaussian(), got str"


def net() -> torch.nn.Module:
    return mp.network(2, hidden=(4,))


def estimated(**arguments: Any) -> object:
    return mp.MPGELURegressor(hidden=(4,), steps=2, folds=2, **arguments).fit(X, Y)


def loss() -> Any:
    return mp.HeteroscedasticGaussian()


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "attribute moments": (lambda: mp.attribute(net(), ROWS, moments=WRONG), f"attribute: {MOMENTS}'nonsense'"),
    "attribute none": (lambda: mp.attribute(net(), ROWS, moments=None), f"attribute: {MOMENTS}None"),  # type: ignore[arg-type]
    "attribute abstract": (lambda: mp.attribute(net(), ROWS, moments=mp.Moments), f"attribute: {MOMENTS}Moments"),
    "attribute likelihood": (lambda: mp.attribute(net(), ROWS, likelihood=WRONG), f"attribute: {LIKELIHOOD}"),
    "propagate": (lambda: mp.propagate(net(), ROWS, moments=WRONG), f"propagate: {MOMENTS}'nonsense'"),
    "propagate a type": (lambda: mp.propagate(net(), ROWS, moments=int), f"propagate: {MOMENTS}int"),  # type: ignore[arg-type]
    "verify": (lambda: mp.verify(net(), ROWS, moments=WRONG), f"verify: {MOMENTS}'nonsense'"),
    "fit": (lambda: mp.fit(net(), loss(), (ROWS, ROWS[:, 0]), epochs=1, moments=WRONG), f"fit: {MOMENTS}'nonsense'"),
    "regressor moments": (lambda: estimated(moments=mp.Moments), f"MPGELURegressor: {MOMENTS}Moments"),
    "regressor likelihood": (lambda: estimated(likelihood="gaussian"), f"MPGELURegressor: {LIKELIHOOD}"),
    "regressor class": (lambda: estimated(likelihood=mp.Gaussian), "got a class; did you mean Gaussian()?"),
    "regressor network": (lambda: estimated(network="mlp"), "MPGELURegressor: network must be a function (features,"),
    "elementwise": (lambda: mp.Elementwise(torch.tanh), "Elementwise: activation must be an Activation, a function"),  # type: ignore[arg-type]
    "nonlinearity": (lambda: mp.network(3, nonlinearity=torch.tanh), "network: nonlinearity must be a name or a func"),  # type: ignore[arg-type]
    "width": (lambda: mp.network(3, hidden=(True,)), "network: hidden must be a positive whole number, got True"),
    "rate": (lambda: mp.network(3, rate=WRONG), "Dropout: rate must be in [0, 1), got nonsense"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(mp.InputError, match=re.escape(message)):
        call()


def test_wrong_arguments_of_an_export_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    with pytest.raises(mp.InputError, match=f"export_onnx: {MOMENTS}'nonsense'"):
        mp.export_onnx(net(), path, features=2, moments=WRONG)
    with pytest.raises(mp.InputError, match=re.escape("export_onnx: likelihood must be an object, got a class")):
        mp.export_onnx(net(), path, features=2, likelihood=mp.Gaussian)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
