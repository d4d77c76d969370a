"""Networks on known inputs in one native call: numbers and gradients of the layers in float64, none stale."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import Stack, native
from mpgelu.layers import Scale, SiLU, Tanh
from mpgelu.networks.description import describe
from mpgelu.networks.plain import plain_form
from mpgelu.networks.prepared import Prepared

NETWORKS: list[Any] = [
    lambda: mp.network(3, (20, 9), nonlinearity=SiLU, rate=0, sigma=0.7),
    lambda: mp.network(3, (128, 128), 1, nonlinearity=SiLU, rate=0),
    lambda: mp.network(3, (7,), nonlinearity="relu", rate=0),
    lambda: mp.network(3, (), 4, rate=0, sigma=2.0),
    lambda: nn.Sequential(Scale(3), mp.Linear(3, 6), mp.MPGELU(), mp.Linear(6, 2, bias=False)),
    lambda: nn.Sequential(mp.Periodic(3, frequencies=5, outputs=1), mp.Linear(6, 2)),
]
NEEDS_KERNELS = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


def stacked(make: Any, count: int = 3) -> Stack:
    torch.manual_seed(0)
    networks = [make() for _ in range(count)]
    for parameter in (p for network in networks for p in network.parameters()):
        nn.init.normal_(parameter, std=0.7)
    return Stack(networks).requires_grad_(False)


@NEEDS_KERNELS
@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("rows", [1, 8, 21, 150])
def test_outputs_are_those_of_the_layers_in_float64(make: Any, rows: int) -> None:
    stack = stacked(make)
    x = 2 * torch.randn(3, rows, 3)
    found = stack._known(x)
    assert found is not None
    exact = torch.stack(
        [net(each) for net, each in zip(copy.deepcopy(stack).double().unstack(), x.double(), strict=True)]
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.detach().abs().max()))
    torch.testing.assert_close(stack(x), found, rtol=0, atol=0)


@pytest.mark.parametrize("make", NETWORKS)
def test_batched_operations_of_training_are_the_layers(make: Any) -> None:
    stack = stacked(make).double().requires_grad_()
    assert stack._is_batched
    x, networks = 2 * torch.randn(3, 11, 3, dtype=torch.float64), stack.unstack()
    found, wanted = stack(x), torch.stack([network(each) for network, each in zip(networks, x, strict=True)])
    torch.testing.assert_close(found, wanted)
    names, held = zip(*stack.state()[0].items(), strict=True)
    gradients = torch.autograd.grad(found.square().sum(), held)
    alone = torch.autograd.grad(wanted.square().sum(), [net.get_parameter(name) for name in names for net in networks])
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), torch.cat([g.flatten() for g in alone]))


@NEEDS_KERNELS
def test_a_row_has_the_same_bits_among_any_others() -> None:
    stack = stacked(NETWORKS[0])
    x = torch.randn(150, 3)
    whole = stack(x.expand(3, -1, -1))
    for rows in (slice(0, 1), slice(17, 90), slice(149, 150)):
        torch.testing.assert_close(stack(x[rows].expand(3, -1, -1)), whole[:, rows], rtol=0, atol=0)
    own = x.expand(3, -1, -1).contiguous()  # the same inputs, of each network for itself
    torch.testing.assert_close(stack(own), whole, rtol=0, atol=0)


@NEEDS_KERNELS
def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stacked(NETWORKS[1], 5)
    x = torch.randn(400, 3).expand(5, -1, -1)
    alone = stack(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.testing.assert_close(stack(x), alone, rtol=0, atol=0)


def gradients(stack: Stack, x: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of a function of them that treats every row and network differently."""
    found = stack(x)
    weights = torch.linspace(0.1, 1.0, found.numel(), dtype=found.dtype).reshape(found.shape)
    return [found.detach(), *torch.autograd.grad((found * weights).sin().sum(), list(stack.parameters()))]


@NEEDS_KERNELS
@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("rows", [1, 8, 21, 150])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_of_the_layers_in_float64(make: Any, rows: int, shared: bool) -> None:
    stack = stacked(make).requires_grad_()
    x = torch.randn(rows, 3).expand(3, -1, -1) if shared else torch.randn(3, rows, 3)
    assert type(stack(x).grad_fn).__name__ == "_OutputsBackward"
    found, wanted = gradients(stack, x), gradients(copy.deepcopy(stack).double(), x.double())
    for ours, exact in zip(found, wanted, strict=True):
        for mine, reference in zip(ours, exact, strict=True):  # of one network each
            scale = float(reference.abs().max())
            torch.testing.assert_close(mine.double(), reference, rtol=1e-3, atol=3e-5 * scale)


@NEEDS_KERNELS
def test_gradients_do_not_depend_on_threads_or_on_other_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stacked(NETWORKS[0], 5).requires_grad_()
    x = torch.randn(5, 400, 3)
    together = gradients(stack, x)
    alone = Stack(stack.unstack()[3:4])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for one, two in zip(together, gradients(stack, x), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0)
    upstream = torch.randn(5, 400, 2)
    of_all = torch.autograd.grad(stack(x), list(stack.parameters()), upstream)
    of_one = torch.autograd.grad(alone(x[3:4]), list(alone.parameters()), upstream[3:4])
    for whole, part in zip(of_all, of_one, strict=True):
        torch.testing.assert_close(part, whole[3:4], rtol=0, atol=0)


@NEEDS_KERNELS
def test_some_parameters_may_be_fixed_and_second_derivatives_are_refused() -> None:
    stack, x = stacked(NETWORKS[0]), torch.randn(3, 5, 3)
    last = list(stack.parameters())[-1].requires_grad_()
    (found,) = torch.autograd.grad(stack(x).square().sum(), last, create_graph=True)
    torch.testing.assert_close(found, 2 * stack(x).detach().sum(1), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()  # type: ignore[no-untyped-call]


@NEEDS_KERNELS
def test_inputs_changed_before_the_backward_pass_are_noticed() -> None:
    stack, x = stacked(NETWORKS[0]).requires_grad_(), torch.randn(3, 21, 3)
    loss = stack(x).sum()
    twice = [torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*twice, strict=True))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, list(stack.parameters()))


@NEEDS_KERNELS
def test_gradients_of_a_network_that_is_not_finite_leave_the_others_alone() -> None:
    stack, x = stacked(NETWORKS[0]).requires_grad_(), torch.randn(3, 21, 3)
    clean = gradients(stack, x)
    x[1, 4, 1] = torch.nan
    for before, after in zip(clean, gradients(stack, x), strict=True):
        torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=0)
        assert after[1].isnan().any()


@NEEDS_KERNELS
def test_slopes_at_their_limits() -> None:
    """SiLU is linear or zero far from zero, ReLU's slope at zero is zero as in torch."""
    for make in (NETWORKS[1], NETWORKS[2]):
        networks = [make() for _ in range(3)]
        for bias in (p for network in networks for name, p in network.named_parameters() if name.endswith("bias")):
            nn.init.zeros_(bias)  # so that the units of a row of zeros are at the hinge
        stack = Stack(networks)
        x = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30])[:, None].expand(3, 7, 3)
        for row in torch.split(x, 1, 1):
            wanted = torch.autograd.grad(stack.double()(row.double()).sum(), list(stack.parameters()))
            found = torch.autograd.grad(stack.float()(row.contiguous()).sum(), list(stack.parameters()))
            for ours, exact in zip(found, wanted, strict=True):
                torch.testing.assert_close(
                    ours.double(), exact.double(), rtol=1e-4, atol=1e-5 * float(exact.abs().max())
                )


@NEEDS_KERNELS
def test_not_a_number_stays_one() -> None:
    x = torch.randn(3, 20, 3)
    x[:, 4, 1] = torch.nan
    for make in NETWORKS[:3]:
        found = stacked(make)(x)
        assert found[:, 4].isnan().all()
        assert found[:, [3, 5]].isfinite().all()


def test_other_networks_and_gradients_of_inputs_are_left_to_torch() -> None:
    assert plain_form(mp.network(3, (4,), nonlinearity=Tanh, rate=0)) is None
    assert plain_form(mp.network(3, (4,), rate=0.1)) is None
    assert plain_form(nn.Sequential(mp.Linear(3, 4), SiLU(), mp.Linear(4, 4), mp.ReLU(), mp.Linear(4, 1))) is None
    assert plain_form(nn.Sequential(mp.Linear(3, 4), SiLU())) is None
    assert plain_form(nn.Sequential()) is None
    stack = stacked(NETWORKS[0])
    x = torch.randn(3, 5, 3)
    assert stack._known(x.clone().requires_grad_()) is None
    assert stack._known(x.double()) is None
    assert stack._known(x[:2]) is None
    assert stack.requires_grad_()(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "data of another dtype"])
def test_changed_parameters_are_seen(change: str) -> None:
    stack, other = stacked(NETWORKS[0]), stacked(NETWORKS[0])
    x = torch.randn(3, 5, 3)
    before = stack(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    if change == "in place":
        for mine, theirs in zip(stack.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    elif change == "replaced":
        stack.load_state_dict(other.state_dict(), assign=True)
    elif change == "loaded":
        stack.load_state_dict(other.state_dict())
    else:
        stack.double().load_state_dict(other.state_dict())
        stack.float()
    assert not torch.equal(stack(x), before)
    torch.testing.assert_close(stack(x), other(x), rtol=0, atol=0)


def test_steps_of_a_fused_optimiser_are_seen() -> None:
    """They do not count as changes of the parameters."""
    stack, x = stacked(NETWORKS[0]).requires_grad_(), torch.randn(3, 5, 3)
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        before = stack(x)
    stack(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        after = stack(x)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, stack(x).detach(), rtol=1e-5, atol=1e-5)


def test_prepared_is_made_once_and_not_copied() -> None:
    made: list[int] = []
    tensor, prepared = torch.ones(2), Prepared[int]()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [prepared.of([tensor], make) for _ in range(2)] == [0, 0]
    tensor.add_(1)
    assert [prepared.of([tensor], make) for _ in range(2)] == [1, 1]
    assert prepared.of([tensor.clone()], make) == 2
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert twin._kept is None
    with torch.inference_mode():
        uncounted = torch.ones(2)
    assert prepared.of([uncounted], make) != prepared.of([uncounted], make)


@pytest.mark.parametrize("activation", [SiLU, mp.ReLU, mp.MPGELU, Tanh])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_activation_may_be_used_in_several_places(activation: Any, dtype: torch.dtype) -> None:
    shared = activation()
    network = nn.Sequential(mp.Linear(3, 8), shared, mp.Linear(8, 8), shared, mp.Linear(8, 1)).to(dtype)
    x = torch.randn(1, 5, 3, dtype=dtype)
    stack = Stack([network])
    torch.testing.assert_close(stack(x)[0], network(x[0]))
    assert len(stack.description.children) == 5
    rebuilt = Stack.empty(stack.description, 1)
    rebuilt.load_state_dict(stack.state_dict(), assign=True)
    torch.testing.assert_close(rebuilt(x), stack(x))


def test_a_layer_with_parameters_in_several_places_is_right_and_cannot_be_described() -> None:
    shared = mp.Linear(8, 8)
    network = nn.Sequential(mp.Linear(3, 8), SiLU(), shared, SiLU(), shared, mp.Linear(8, 1))
    x = torch.randn(1, 5, 3)
    torch.testing.assert_close(Stack([network])(x)[0], network(x[0]))
    with pytest.raises(mp.InputError, match="has a layer in several places; give each place a layer of its own"):
        describe(network)


def test_inputs_that_do_not_fit_are_named() -> None:
    stack = stacked(NETWORKS[2])
    for x in (torch.randn(3, 5, 4), torch.randn(2, 5, 3)):
        with pytest.raises(mp.InputError, match=r"Stack: Linear of 3 networks takes an input \(3, rows, 3\), got"):
            stack(x)
    for make in (NETWORKS[0], NETWORKS[4]):
        with pytest.raises(
            mp.InputError, match=r"(Periodic|Scale) has parameters of torch.float32 .* is torch.float64"
        ):
            stacked(make)(torch.randn(3, 5, 3).double())


def test_parameters_may_be_replaced_for_a_call() -> None:
    stack, x = stacked(NETWORKS[0]).requires_grad_(), torch.randn(3, 5, 3)
    given = {name: 2 * parameter.detach() for name, parameter in stack.named_parameters()}
    doubled = copy.deepcopy(stack)
    doubled.load_state_dict(given)
    torch.testing.assert_close(torch.func.functional_call(stack, given, (x,)), doubled(x))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(stack, parameters, (x,))
        return found.square().sum()

    found = torch.func.grad(loss)(given)
    wanted = torch.autograd.grad(doubled(x).square().sum(), list(doubled.parameters()))
    for ours, theirs in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
