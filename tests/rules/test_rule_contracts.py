"""What every rule must do for every kind of moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import mpgelu.rules
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, InputError
from mpgelu.errors import MissingRuleError
from mpgelu.moments import Moments
from mpgelu.rules.activations import Tanh
from reference import MOMENTS, RULES, TYPES, Rule, map_tensors, row, tensors

N = 4
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
EVERY_KIND = pytest.mark.parametrize("kind", MOMENTS)
CORRELATED = ["factored covariance", "factored shared", "factored scaled"]
MAPPABLE = ["diagonal", "full", "factored covariance", "factored variance"]  # every tensor has the batch dimensions
RULE_FUNCTIONS: dict[str, Any] = {name: getattr(mpgelu.rules, name) for name in mpgelu.rules.__all__}
REGISTRIES = {name: rule for name, rule in RULE_FUNCTIONS.items() if hasattr(rule, "registry")}
WITHOUT_RULE: set[tuple[str, type]] = set()
ON_RESCALE = {"elementwise", "mpgelu", "multiply", "scale"}  # a new type of moments has them once it has rescale


def dense(moments: Moments) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return moments.mean.detach().numpy(), moments.covariance.detach().numpy()


def in_dtype(dtype: torch.dtype, value: Moments, parameters: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return map_tensors(value, lambda tensor: tensor.to(dtype)), *(p.to(dtype) for p in parameters)


def outputs_of(
    rule: Rule, leaves: list[Tensor], structure: Any, parameters: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Mean and covariance as a function of the tensors that moments are made of."""
    value = pytree.tree_unflatten(leaves, structure)
    if isinstance(value, FullMoments):  # a rule may read either triangle
        value = FullMoments(value.mean, (value.covariance + value.covariance.mT) / 2)
    out = rule.apply(value, *parameters)
    return out.mean, out.covariance


# Values


@EVERY_RULE
@EVERY_KIND
def test_structured_equals_dense_algebra(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](3, N), rule.parameters(N)
    mean, covariance = dense(rule.apply(value, *parameters))
    for i in range(3):
        m, c = value.mean[i].numpy(), value.covariance[i].numpy()
        wanted_mean, wanted = rule.reference(m, c, *(p.numpy() for p in parameters))
        if kind == "diagonal":
            wanted = np.diag(np.diag(wanted))
        np.testing.assert_allclose(mean[i], wanted_mean, rtol=1e-10, atol=1e-13 + rule.marginal_error)
        np.testing.assert_allclose(covariance[i].diagonal(), wanted.diagonal(), rtol=1e-10, atol=rule.marginal_error)
        scale = np.sqrt(np.outer(c.diagonal(), c.diagonal())).max() if rule.covariance_error else 0.0
        allowed = rule.covariance_error * scale + rule.marginal_error + 1e-12
        np.testing.assert_allclose(covariance[i], wanted, rtol=1e-10, atol=allowed)


@EVERY_RULE
@EVERY_KIND
def test_batch_equals_loop_over_rows(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](2, 3, N), rule.parameters(N)
    out = rule.apply(value, *parameters)
    assert out.batch_shape == (2, 3)
    for index in np.ndindex(2, 3):
        alone = rule.apply(row(value, index), *parameters)
        torch.testing.assert_close(alone.mean, out.mean[index], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(alone.variance, out.variance[index], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(alone.covariance, out.covariance[index], rtol=1e-11, atol=1e-13)


@EVERY_RULE
@EVERY_KIND
def test_covariance_is_symmetric_positive_semidefinite_and_has_the_variance_on_its_diagonal(
    rule: Rule, kind: str
) -> None:
    out = rule.apply(MOMENTS[kind](50, N), *rule.parameters(N))
    torch.testing.assert_close(out.covariance, out.covariance.mT, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(out.variance, out.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=0)
    if rule.name != "relu, dvi":  # documented not to be
        smallest = torch.linalg.eigvalsh(out.covariance)[..., 0]
        size = out.variance.amax(-1)
        assert (smallest >= -(rule.covariance_error + 1e-12) * size).all()


# Kind, shape, dtype and device of the result


@EVERY_RULE
@EVERY_KIND
def test_kind_shape_and_dtype_are_kept(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](2, 3, N), rule.parameters(N)
    for dtype in (torch.float32, torch.float64):
        out = rule.apply(*in_dtype(dtype, value, parameters))
        wanted = FullMoments if rule.name.startswith("relu") and kind != "diagonal" else type(value)
        wanted = FactoredMoments if rule.name == "fork" and kind == "full" else wanted
        wanted = FullMoments if rule.name == "periodic" and kind in CORRELATED else wanted
        assert type(out) is wanted
        assert out.mean.dtype == out.variance.dtype == out.covariance.dtype == dtype
        assert out.mean.shape == out.variance.shape == (2, 3, rule.outputs or N)
        assert out.covariance.shape == (2, 3, rule.outputs or N, rule.outputs or N)


@EVERY_RULE
@EVERY_KIND
def test_device_is_kept(rule: Rule, kind: str) -> None:
    value = map_tensors(MOMENTS[kind](3, N), lambda t: t.to("meta"))
    out = rule.apply(value, *(p.to("meta") for p in rule.parameters(N)))
    assert {t.device.type for t in (*tensors(out), out.mean, out.variance, out.covariance)} == {"meta"}


@EVERY_RULE
@EVERY_KIND
def test_half_precision_runs(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](3, N), rule.parameters(N)
    wanted = rule.apply(value, *parameters)
    for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):
        out = rule.apply(*in_dtype(dtype, value, parameters))
        assert out.mean.dtype == out.covariance.dtype == dtype
        torch.testing.assert_close(out.mean.double(), wanted.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.covariance.double(), wanted.covariance, rtol=tolerance, atol=2 * tolerance)


@EVERY_RULE
@EVERY_KIND
def test_float32_is_close_to_float64(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](20, N), rule.parameters(N)
    wanted = rule.apply(value, *parameters)
    out = rule.apply(*in_dtype(torch.float32, value, parameters))
    for name in ("mean", "covariance"):
        single, double = getattr(out, name).double(), getattr(wanted, name)
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-6 * double.abs().max().item())


# Gradients and transforms


@EVERY_RULE
@EVERY_KIND
def test_gradcheck(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](2, 3), rule.parameters(3)
    leaves, structure = pytree.tree_flatten(value)
    inputs = [t.detach().clone().requires_grad_() for t in (*leaves, *parameters)]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs_of(rule, list(inputs[: len(leaves)]), structure, inputs[len(leaves) :])

    assert torch.autograd.gradcheck(function, inputs)  # exact ReLU: its gradients are analytic, its value a quadrature


@pytest.mark.parametrize("name", ["dropout, rescaled", "dropout, paper"])
@EVERY_KIND
def test_gradcheck_of_the_rate(name: str, kind: str) -> None:
    rule, value = next(rule for rule in RULES if rule.name == name), MOMENTS[kind](2, 3)
    rate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    leaves, structure = pytree.tree_flatten(value)
    assert torch.autograd.gradcheck(lambda rate: outputs_of(rule, leaves, structure, (rate,)), rate)


@EVERY_RULE
@pytest.mark.parametrize("kind", MAPPABLE)
def test_second_derivatives_are_right_or_refused(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](1, 2), rule.parameters(2)
    leaves, structure = pytree.tree_flatten(value)
    inputs = [t.detach().clone().requires_grad_() for t in leaves]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs_of(rule, list(inputs), structure, parameters)

    try:
        assert torch.autograd.gradgradcheck(function, inputs)
    except NotImplementedError:  # what a function without a second derivative raises
        assert rule.name.startswith("relu")


@EVERY_RULE
@pytest.mark.parametrize("kind", MAPPABLE)
def test_vmap_equals_batch(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](5, N), rule.parameters(N)
    leaves, structure = pytree.tree_flatten(value)
    out = rule.apply(value, *parameters)

    def function(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        return outputs_of(rule, leaves, structure, parameters)

    mean, covariance = torch.func.vmap(function)(leaves)
    torch.testing.assert_close(mean, out.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(covariance, out.covariance, rtol=1e-11, atol=1e-13)


@EVERY_RULE
@pytest.mark.parametrize("kind", MAPPABLE)
def test_gradients_of_each_row_by_vmap(rule: Rule, kind: str) -> None:
    value, parameters = MOMENTS[kind](3, N), rule.parameters(N)
    leaves, structure = pytree.tree_flatten(value)

    def total(leaves: list[Tensor]) -> Tensor:
        mean, covariance = outputs_of(rule, leaves, structure, parameters)
        return mean.sum() + covariance.square().sum()

    each = torch.func.vmap(torch.func.grad(total))(leaves)
    whole = torch.func.grad(total)(leaves)
    for one, other in zip(each, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# Registration


def test_every_rule_knows_every_kind() -> None:
    linear = {"linear", "gaussian_linear", "multiply", "scale", "rescale", "add", "concatenate", "flatten", "fork"}
    assert set(REGISTRIES) == linear | {"mpgelu", "relu", "leaky_relu", "elementwise", "layer_norm", "periodic"}
    kinds = {Tensor, *(kind for kind in Moments.__subclasses__() if kind.__module__.startswith("mpgelu.moments."))}
    assert kinds >= set(TYPES)
    missing = {
        (name, kind)
        for name, rule in REGISTRIES.items()
        for kind in kinds
        if rule.dispatch(kind) is rule.dispatch(object)
    }
    assert missing == WITHOUT_RULE


class Unknown(Moments):
    """A type without rules; those that need nothing but ``rescale`` ask for that."""

    mean = variance = torch.ones(1, 1)


ONE = torch.ones(1, 1)
CALLS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda value: mpgelu.rules.linear(value, ONE),
    "gaussian_linear": lambda value: mpgelu.rules.gaussian_linear(value, ONE, ONE, None, None),
    "multiply": lambda value: mpgelu.rules.dropout(value, 0.1),
    "mpgelu": mpgelu.rules.mpgelu,
    "rescale": lambda value: mpgelu.rules.rescale(value, ONE, ONE),
    "relu": mpgelu.rules.relu,
    "leaky_relu": mpgelu.rules.leaky_relu,
    "elementwise": lambda value: mpgelu.rules.elementwise(value, Tanh()),
    "layer_norm": mpgelu.rules.layer_norm,
    "periodic": lambda value: mpgelu.rules.periodic(value, ONE, ONE, ONE.unsqueeze(0)),
    "scale": lambda value: mpgelu.rules.batch_norm(value, ONE, ONE),
    "add": lambda value: mpgelu.rules.add(value, 1.0),
    "concatenate": mpgelu.rules.concatenate,
    "flatten": mpgelu.rules.flatten,
    "fork": mpgelu.rules.fork,
}


@pytest.mark.parametrize("name", REGISTRIES)
@pytest.mark.parametrize("value", [Unknown(), [1.0], np.ones((1, 1)), None], ids=lambda value: type(value).__name__)
def test_unregistered_kind_raises(name: str, value: object) -> None:
    missing = "rescale" if isinstance(value, Moments) and name in ON_RESCALE else name
    with pytest.raises(MissingRuleError, match=rf"{missing}: no rule for {type(value).__name__}; .*@{missing}\."):
        CALLS[name](value)


def test_a_new_kind_needs_one_registration() -> None:
    class Doubled(DiagonalMoments):
        pass

    # A subclass uses its parent's rule until it has its own.
    out = mpgelu.rules.mpgelu(Doubled(torch.ones(1, 2), torch.ones(1, 2)))
    assert type(out) is DiagonalMoments


# Bad input


@pytest.mark.parametrize("kind", TYPES)
def test_wrong_feature_count_names_shapes_and_fix(kind: Any) -> None:
    value, weight = kind.certain(torch.ones(32, 4)), torch.ones(16, 8)
    for given in (value, value.mean):
        with pytest.raises(InputError) as plain:
            mpgelu.rules.linear(given, weight)
        with pytest.raises(InputError) as gaussian:
            mpgelu.rules.gaussian_linear(given, weight, weight, None, None)
        for error in (plain, gaussian):
            for part in ("linear", "weight takes 8", "has 4", "(16, 8)", "(32, 4)", "Linear(4, 16)"):
                assert part in str(error.value)


@pytest.mark.parametrize("kind", TYPES)
def test_mismatched_dtypes_name_both_and_the_fix(kind: Any) -> None:
    value, weight = kind.certain(torch.ones(2, 4, dtype=torch.float64)), torch.ones(3, 4)
    for given in (value, value.mean, torch.ones(2, 4, dtype=torch.int64)):
        with pytest.raises(
            InputError, match=r"linear: weight is torch.float32 .*torch\.\w*64; use x\.to\(weight\.dtype\)"
        ):
            mpgelu.rules.linear(given, weight)


def test_scalar_input_is_refused() -> None:
    with pytest.raises(InputError, match="linear: weight takes 4 features"):
        mpgelu.rules.linear(torch.tensor(1.0), torch.ones(3, 4))
