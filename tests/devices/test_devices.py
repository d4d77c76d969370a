"""Nothing assumes a device: no CPU tensor among those of another device, and no tensor on torch's default device.

There is no GPU where these tests run. Two devices without one tell what a GPU would: on "meta" every operation is
checked for tensors of the CPU, with shapes and gradients; and with "meta" as torch's default device every tensor that
is created without a device mixes with those of the CPU, which fails, while values stay real.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mpgelu as mp
from every_layer import LAYERS as EVERY_LAYER
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, layers, likelihoods, native
from mpgelu.likelihoods import Likelihood
from mpgelu.moments import Moments
from mpgelu.rules import add, concatenate, fork

KINDS: list[Any] = [DiagonalMoments, FactoredMoments, FullMoments]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **EVERY_LAYER,
    "Dropout": lambda: layers.Dropout(0.2, rescale=False),
}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "HeteroscedasticGaussian": mp.HeteroscedasticGaussian,
    "Gaussian": lambda: mp.Gaussian(0.5, learn_noise=True),
    "GaussianMixture": lambda: mp.GaussianMixture(3),
    "HeavyTailedGaussian": lambda: likelihoods.HeavyTailedGaussian(0.1, 3.0, 0.01, 2.0),
}
METHODS: dict[str, Callable[[mp.Predictive, Tensor], Any]] = {
    "mean": lambda predictive, y: predictive.mean,
    "variance": lambda predictive, y: predictive.variance,
    "epistemic_variance": lambda predictive, y: predictive.epistemic_variance,
    "log_prob": lambda predictive, y: predictive.log_prob(y),
    "cdf": lambda predictive, y: predictive.cdf(y),
    "quantile": lambda predictive, y: predictive.quantile([0.1, 0.5, 0.9]),
    "interval": lambda predictive, y: predictive.interval(0.9),
    "crps": lambda predictive, y: predictive.crps(y),
    "probability_above": lambda predictive, y: predictive.probability_above(0.3),
    "matched": lambda predictive, y: predictive.matched().variance,
    "mixture": lambda predictive, y: mp.Predictive.mixture([predictive, predictive]).stddev,
}


class OnlyMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every tensor of every operation is on "meta"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                assert tensor.is_meta, f"{func} has a tensor {tuple(tensor.shape)} on {tensor.device}"
        return result


def only_meta() -> Any:
    return OnlyMeta()  # type: ignore[no-untyped-call]


def started(kind: Any, x: Tensor, how: str) -> Moments:
    """Moments of known rows, or of uncertain ones."""
    value: Moments = kind.certain(x) if how == "certain" else kind.of(x, 0.1 + x.square())
    return value


def spread(value: Any) -> Tensor:
    result: Tensor = value.variance if isinstance(value, DiagonalMoments) else value.covariance
    return result


# On "meta": shapes, gradients, and no tensor of the CPU


def test_every_layer_and_likelihood_is_here() -> None:
    assert set(LAYERS) == set(layers.__all__) - {"layers"}
    public = {name: getattr(likelihoods, name) for name in likelihoods.__all__}
    found = {name for name, held in public.items() if isinstance(held, type) and issubclass(held, Likelihood)}
    assert set(LIKELIHOODS) == found - {"Likelihood"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_meta(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(5, 4)
    far, z = LAYERS[name]().to("meta"), x.to("meta").requires_grad_()
    wanted = layer(x)
    with only_meta():
        assert far(z).shape == wanted.shape
    for kind, how in itertools.product(KINDS, ("certain", "uncertain")):
        if name == "Beside" and kind is FullMoments:  # which refuse to join branches
            continue
        wanted, z.grad = layer(started(kind, x, how)), None
        with only_meta():
            found = far(started(kind, z, how))
            (found.mean.sum() + spread(found).sum()).backward()
        assert (found.mean.shape, spread(found).shape) == (wanted.mean.shape, spread(wanted).shape)
        assert found.dtype == wanted.dtype
        assert z.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_branches_on_meta(kind: Any) -> None:
    layer, x = layers.Linear(4, 4).to("meta"), torch.randn(5, 4, device="meta")
    with only_meta():
        value = fork(started(kind, x, "uncertain"))
        if kind is FactoredMoments:
            assert spread(add(layer(value), value)).shape == (5, 4, 4)
            assert spread(concatenate(layer(value), value)).shape == (5, 8, 8)
        assert (value[1:3] * 2 - 1).mean.shape == (2, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_on_meta(name: str, kind: Any) -> None:
    likelihood = LIKELIHOODS[name]()
    network = mp.network(4, (6, 5), likelihood.outputs, sigma=0.5).to("meta")
    likelihood, x, y = likelihood.to("meta"), torch.randn(5, 4, device="meta"), torch.randn(5, device="meta")
    with only_meta():
        moments = network(kind.certain(x))
        expected = likelihood.expected_log_prob(moments, y)
        assert expected.shape == (5,)
        expected.sum().backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())
        for number in (likelihood.variance(moments), likelihood.noise(moments), likelihood.short(moments).mean):
            assert number.shape == (5,)
        for method, run in METHODS.items():
            found = tree_leaves(run(likelihood.predictive(moments), y))
            assert all(part.shape[:1] == (5,) for part in found), method


@pytest.mark.parametrize("kind", [*KINDS, Tensor])
def test_stacks_and_propagation_on_meta(kind: Any) -> None:
    stack = mp.Stack([mp.network(4, (6,)) for _ in range(3)]).to("meta")
    network = mp.network(4, (6,)).to("meta")
    x = torch.randn(3, 5, 4, device="meta")
    with only_meta():
        found = stack(x if kind is Tensor else kind.certain(x))
        assert (found if kind is Tensor else found.mean).shape == (3, 5, 2)
        if kind is not Tensor:
            assert mp.propagate(network, x[0], moments=kind.certain, rows_at_once=2).mean.shape == (5, 2)


# With "meta" as the default device: real values, and no tensor without a device


@contextmanager
def default_device_without_values() -> Iterator[None]:
    with torch.device("meta"):
        yield


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if isinstance(other, Tensor):
            assert one.device == other.device
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_create_nothing_elsewhere(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(5, 4)

    def run() -> list[Tensor]:
        kinds = KINDS[:2] if name == "Beside" else KINDS  # full moments refuse to join branches
        results = [layer(started(kind, x, how)) for kind in kinds for how in ("certain", "uncertain")]
        return [part for found in results for part in (found.mean, found.variance, found.covariance)]

    wanted = run()
    with default_device_without_values():
        same(run(), wanted)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_distributions_create_nothing_elsewhere(name: str) -> None:
    likelihood = LIKELIHOODS[name]()
    moments = mp.network(4, (6,), likelihood.outputs)(FactoredMoments.certain(torch.randn(5, 4)))
    y = torch.randn(5)

    def run() -> list[Any]:
        with torch.no_grad():
            predictive = likelihood.predictive(moments)
            drawn = predictive.sample((3,), generator=torch.Generator("cpu").manual_seed(0))
            return [likelihood.expected_log_prob(moments, y), drawn, *(f(predictive, y) for f in METHODS.values())]

    wanted = run()
    with default_device_without_values():
        same(run(), wanted)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_training_creates_nothing_elsewhere(stacked: bool, kernels: bool, tmp_path: Path) -> None:
    X, y = torch.randn(40, 4), torch.randn(40)
    models = (3,) if stacked else ()
    given = X.expand(*models, -1, -1), y.expand(*models, -1)

    def run(network: nn.Module, name: str) -> list[Tensor]:
        settings: Any = {"epochs": 3, "batch_size": 16, "clip": 0.1, "progress": False}
        history = mp.fit(
            network, mp.HeteroscedasticGaussian(), given, validation=given, checkpoint=tmp_path / name, **settings
        )
        predicted = mp.propagate(network, X) if not stacked else network(FactoredMoments.certain(given[0]))
        return [predicted.mean, spread(predicted), history.loss, history.validation, history.best_epoch]

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        networks = [mp.network(4, (6,)) for _ in range(3)]
        return mp.Stack(networks) if stacked else networks[0]

    (first, second), use = (fresh(), fresh()), native.disabled if not kernels else contextmanager(lambda: iter([None]))
    with use():
        wanted = run(first, "a")
        with default_device_without_values():
            same(run(second, "b"), wanted)


# In the text: no tensor without a device

NOT_SEARCHED = {"research"}  # programs that measure, on the device that they choose
CREATORS = {"zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "tensor", "as_tensor", "eye", "rand"}
CREATORS |= {"randn", "randint", "randperm", "normal", "tril_indices", "triu_indices", "scalar_tensor"}
ALLOWED = {
    # Parameters and buffers of a new module start on torch's default device, as those of torch's own modules do.
    ("likelihoods/gaussian.py", "torch.tensor(math.log(noise_variance))"),
    ("estimators/gaussian_process.py", "torch.zeros(points, dtype=torch.float64)"),
    ("estimators/gaussian_process.py", "torch.zeros(points, in_features, dtype=torch.float64)"),
    ("estimators/gaussian_process.py", "torch.zeros(in_features, dtype=torch.float64)"),
    ("estimators/gaussian_process.py", "torch.ones(in_features, dtype=torch.float64)"),
    ("estimators/gaussian_process.py", "torch.tensor(math.inf, dtype=torch.float64)"),
    ("estimators/gaussian_process.py", "torch.zeros(in_features + 3, dtype=torch.float64)"),
}


def created_without_device(path: Path) -> Iterator[str]:
    """Yield calls of a function that creates a tensor, and such functions as arguments, without a device."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch" or node.attr not in CREATORS:
            continue
        call = calls.get(id(node))
        if call is None or not any(keyword.arg == "device" for keyword in call.keywords):
            yield ast.unparse(call or node)


def test_no_tensor_is_created_without_a_device() -> None:
    root = Path(mp.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), call)
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in NOT_SEARCHED
        for call in created_without_device(path)
    }
    assert found == ALLOWED


def test_the_lint_sees_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("a = torch.zeros(3)\nb = torch.ones(3, device=a.device)\nc = torch.zeros_like(a) + a.new_ones(3)\n")
    assert list(created_without_device(path)) == ["torch.zeros(3)"]
    path.write_text("a, b = map(torch.as_tensor, arrays)\n")
    assert list(created_without_device(path)) == ["torch.as_tensor"]
