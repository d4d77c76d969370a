"""Conversion of torch modules: what is supported and how it is spelt, what is shared, what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.convert import ConversionReport, from_torch
from mpgelu.errors import ConversionError
from reference import TYPES

N = 6


class Function(nn.Module):
    """A linear layer and then any function of its output, of the module itself and of another linear layer."""

    def __init__(self, function: Callable[..., Tensor], rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate
        self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)
        self.scale = nn.Parameter(torch.rand(N) + 0.5)
        self.register_buffer("offset", torch.randn(N))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(F.dropout(x, self.rate, self.training)))


class Residual(nn.Module):
    """Blocks ``h + W dropout(f(A norm(h)))``."""

    def __init__(self, width: int = N, depth: int = 2, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), activation(), nn.Dropout(0.2), nn.Linear(width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)  # type: ignore[no-any-return]


def sequential(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        nn.Linear(width, 1),
    )


def trained_batch_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(N)
    norm(torch.randn(50, N) * 3 + 1)
    nn.init.normal_(norm.weight)
    return norm


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(N, N),
    "Linear without bias": lambda: nn.Linear(N, 3, bias=False),
    "Dropout": lambda: nn.Dropout(0.3),
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "Softplus": lambda: nn.Softplus(2.0),
    "Identity": nn.Identity,
    "Flatten": nn.Flatten,
    "LayerNorm": lambda: nn.LayerNorm(N),
    "LayerNorm without bias": lambda: nn.LayerNorm(N, bias=False),
    "LayerNorm without weights": lambda: nn.LayerNorm(N, elementwise_affine=False),
    "BatchNorm1d": trained_batch_norm,
    "BatchNorm1d without weights": lambda: nn.BatchNorm1d(N, affine=False),
}
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.relu": lambda s, h: F.relu(h),
    "F.relu in place": lambda s, h: F.relu(h, inplace=True),
    "torch.relu": lambda s, h: torch.relu(h),
    ".relu()": lambda s, h: h.relu(),
    ".relu_()": lambda s, h: h.relu_(),
    "F.leaky_relu": lambda s, h: F.leaky_relu(h, 0.2),
    "F.gelu": lambda s, h: F.gelu(h),
    "F.silu": lambda s, h: F.silu(h),
    "torch.tanh": lambda s, h: torch.tanh(h),
    ".tanh()": lambda s, h: h.tanh(),
    "torch.sigmoid": lambda s, h: torch.sigmoid(h),
    ".sigmoid()": lambda s, h: h.sigmoid(),
    "F.softplus": lambda s, h: F.softplus(h, beta=2),
    "F.dropout": lambda s, h: F.dropout(h, 0.4, training=s.training),
    "F.linear": lambda s, h: F.linear(h, s.second.weight, s.second.bias),
    "F.linear without bias": lambda s, h: F.linear(h, s.second.weight),
    "F.layer_norm": lambda s, h: F.layer_norm(h, (N,), s.scale, None, 1e-3),
    "torch.flatten": lambda s, h: torch.flatten(h, 1),
    ".flatten()": lambda s, h: h.flatten(start_dim=1),
    "h + 1": lambda s, h: h + 1,
    "1 + h": lambda s, h: 1 + h,
    "h + parameter": lambda s, h: h + s.scale,
    "buffer + h": lambda s, h: s.offset + h,
    "new tensor + h": lambda s, h: torch.ones(N) + h,
    "torch.add": lambda s, h: torch.add(h, s.scale, alpha=2),
    "h - parameter": lambda s, h: h - s.scale,
    "2 - h": lambda s, h: 2 - h,
    "parameter - h": lambda s, h: s.scale - h,
    "-h": lambda s, h: -h,
    "h * 2": lambda s, h: h * 2,
    "parameter * h": lambda s, h: s.scale * h,
    "h / 2": lambda s, h: h / 2,
    "h += 1": lambda s, h: h.add_(1),
    "residual": lambda s, h: h + s.second(h),
    "residual after dropout": lambda s, h: (lambda d: d + s.second(d))(F.dropout(h, 0.3, s.training)),
    "joined after dropout": lambda s, h: (lambda d: torch.cat([d, s.second(d)], 1))(F.dropout(h, 0.3, s.training)),
    "residual, torch.add": lambda s, h: torch.add(h, s.second(h), alpha=0.5),
    "difference": lambda s, h: s.second(h) - h,
    "h + h": lambda s, h: h + h,
    "torch.cat": lambda s, h: torch.cat([h, s.second(h)], dim=-1),
    "torch.cat, dim 1": lambda s, h: torch.cat((s.second(h), h, h), dim=1),
    "module by keyword": lambda s, h: s.second(input=h),
    "weights used twice": lambda s, h: s.second(s.second(h)),
    "dead code": lambda s, h: (h.view(-1), h + 1)[1],
}
EVERY_MODULE = pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])


def build(name: str, rate: float = 0.1) -> nn.Module:
    if name in FUNCTIONS:
        return Function(FUNCTIONS[name], rate)
    return nn.Sequential(nn.Dropout(rate), nn.Linear(N, N), MODULES[name]())


def sampled(module: nn.Module, x: Tensor) -> Tensor:
    """Monte-Carlo dropout: random as in training, batch normalisation as in evaluation."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()
    with torch.no_grad():
        return module(x).double()  # type: ignore[no-any-return]


@EVERY_MODULE
def test_a_tensor_meets_the_module_in_evaluation_mode(name: str) -> None:
    module, x = build(name), torch.randn(5, N)
    network, _ = from_torch(module, example=x)
    module.eval()
    torch.testing.assert_close(network(x), module(x))


@EVERY_MODULE
def test_moments_are_those_of_sampling(name: str) -> None:
    """To sampling error where the report says exact or quadrature: nonlinearities get a Gaussian, without dropout."""
    mean, variance, draws = torch.randn(1, N), torch.rand(1, N), 40_000
    rows = from_torch(build(name))[1].operations
    accuracies = {row.marginals for row in rows}, {row.covariance for row in rows}
    module = build(name, rate=0.3 if accuracies == ({"exact"}, {"exact"}) else 0.0)
    samples = sampled(module, mean + variance.sqrt() * torch.randn(draws, N))
    stddev, error = samples.std(0), 5 / draws**0.5
    scale = stddev.clamp_min(0.1)  # a rectified unit may be dead
    allowed_mean, allowed = (0.3 if "approximated" in accuracy else error for accuracy in accuracies)
    for kind in (FactoredMoments, FullMoments):
        out = from_torch(module)[0](kind.of(mean, variance))
        assert ((out.mean[0] - samples.mean(0)).abs() <= allowed_mean * scale + 1e-6).all()
        assert ((out.variance[0].sqrt() - stddev).abs() <= 2 * allowed_mean * scale).all()
        covariance_error = (torch.cov(samples.mT) - out.covariance[0]).abs() / (scale.unsqueeze(-1) * scale)
        assert covariance_error.max() <= max(allowed, 2 * error) + 2 * error


@EVERY_MODULE
@pytest.mark.parametrize("kind", TYPES)
def test_every_kind_of_moments_runs_in_both_precisions(name: str, kind: Any) -> None:
    if name == "new tensor + h":
        pytest.skip("the module itself is of one precision")
    network, _ = from_torch(build(name).double())
    x, variance = torch.randn(5, N), torch.rand(5, N)
    double = network(kind.of(x.double(), variance.double()))
    single = network.float()(kind.of(x, variance))
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.covariance.double(), double.covariance, rtol=1e-3, atol=1e-4)


# What is shared, and what is left alone


@pytest.mark.parametrize("module", [sequential(), Residual(), build("F.linear"), build("h + parameter")])
def test_parameters_are_the_same_objects_under_the_same_names(module: nn.Module) -> None:
    network, _ = from_torch(module)
    found, wanted = dict(network.named_parameters()), dict(module.named_parameters())
    assert found.keys() <= wanted.keys()
    assert all(found[name] is wanted[name] for name in found)
    assert {"first.weight", "0.weight"} & found.keys()


def test_buffers_are_shared_too() -> None:
    module = nn.Sequential(trained_batch_norm())
    network, _ = from_torch(module)
    assert network.get_buffer("0.running_mean") is module[0].running_mean
    before = module[0].running_mean.clone()
    network.train()(torch.randn(5, N))
    assert torch.equal(module[0].running_mean, before)


def test_the_module_is_left_as_it_was() -> None:
    module = build("new tensor + h")
    module.get_submodule("first").eval()
    modes, names = [part.training for part in module.modules()], set(vars(module))
    from_torch(module, example=torch.randn(2, N))
    assert [part.training for part in module.modules()] == modes
    assert set(vars(module)) == names


@pytest.mark.parametrize("name", ["Dropout", "F.dropout"])
def test_dropout_counts_in_evaluation_mode_too(name: str) -> None:
    module = build(name).eval()
    network, report = from_torch(module)
    assert [row.operation.lower() for row in report.operations].count("dropout") == 2
    assert (network(FactoredMoments.certain(torch.randn(2, N))).variance > 0).all()


def test_dropout_that_is_never_random_stays_so() -> None:
    network, _ = from_torch(nn.Sequential(nn.Linear(N, N), Function(lambda s, h: F.dropout(h, 0.5, training=False))))
    rates = [part for part in network.modules() if isinstance(part, mp.Dropout)]
    assert len(rates) == 1  # the one at the start


def test_the_rate_has_the_precision_of_the_network() -> None:
    network, _ = from_torch(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)).double())
    rate = network.get_buffer("1.rate")
    assert rate.dtype == torch.float64
    assert rate.item() == 0.1
    assert from_torch(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)))[0].get_buffer("1.rate").dtype == torch.float32


def test_layers_of_this_library_are_taken_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(3, 4), mp.MPGELU(), mp.Dropout(0.2, rescale=False), mp.GaussianLinear(4, 2))
    network, report = from_torch(module)
    assert network.get_submodule("3") is module[3]
    assert [row.operation for row in report.operations] == ["Linear", "MPGELU", "Dropout", "GaussianLinear"]
    value = FactoredMoments.certain(torch.randn(2, 3))
    wanted = nn.Sequential(network.get_submodule("0"), module[1], module[2], module[3])(value)
    torch.testing.assert_close(network(value).covariance, wanted.covariance)
    dropout = mp.Dropout(0.2)
    from_torch(nn.Sequential(nn.Linear(3, 4).double(), dropout))
    assert dropout.rate.dtype == torch.float32  # not touched


def test_one_module_used_twice_is_one_layer() -> None:
    activation = nn.ReLU()
    network, report = from_torch(nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 4), activation))
    assert network.get_submodule("1") is not None
    assert [row.name for row in report.operations] == ["0", "1", "2", "1"]


def test_a_function_may_have_the_name_of_a_module() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(F.relu(x))  # type: ignore[no-any-return]

    _, report = from_torch(Clash(), example=torch.randn(4, 3))
    assert [(row.name, row.operation) for row in report.operations] == [("relu_", "relu"), ("relu", "Linear")]


def test_a_converted_network_can_be_copied_and_stored() -> None:
    network, _ = from_torch(Residual())
    x = FactoredMoments.certain(torch.randn(2, 3))
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(x).covariance, network(x).covariance)
        assert all(a is not b for a, b in zip(other.parameters(), network.parameters(), strict=True))


# Branches


def test_without_branches_relu_is_exact_and_with_branches_it_stays_factored() -> None:
    network, report = from_torch(sequential())
    assert not report.branches
    assert report.operations[1].covariance == "quadrature"
    network, report = from_torch(Residual(activation=nn.ReLU))
    assert report.branches
    assert {row.covariance for row in report.operations if row.operation == "ReLU"} == {"approximated"}
    for start in (FactoredMoments.certain, FullMoments.certain):
        out = network(start(torch.randn(2, 3)))
        assert isinstance(out, FactoredMoments)


def test_a_bounded_rank_is_refused_by_branches() -> None:
    network, _ = from_torch(Residual())
    with pytest.raises(mp.InputError, match="needs max_rank=None"):
        network(FactoredMoments.certain(torch.randn(2, 3), max_rank=2))


# The rest of the library


@pytest.mark.parametrize("make", [sequential, Residual])
@pytest.mark.parametrize("kind", TYPES)
def test_propagate_stack_vmap_and_compile(make: Callable[[], nn.Module], kind: Any) -> None:
    networks = [from_torch(make())[0] for _ in range(2)]
    x = torch.randn(9, 3)
    out = networks[0](kind.certain(x))
    parts = mp.propagate(networks[0], x, moments=kind.certain, rows_at_once=4)
    torch.testing.assert_close(parts.covariance, out.covariance)
    stacked = mp.Stack(networks)(kind.certain(torch.stack([x, x])))
    torch.testing.assert_close(stacked.covariance[0], out.covariance)
    rows = torch.func.vmap(lambda x: networks[0](kind.certain(x)).covariance)(x)
    torch.testing.assert_close(rows, out.covariance)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("make", [sequential, Residual, lambda: build("BatchNorm1d"), lambda: build("torch.cat")])
@pytest.mark.parametrize("kind", TYPES)
def test_compiled_whole_with_gradients(make: Callable[[], nn.Module], kind: Any) -> None:
    torch.compiler.reset()
    network, _ = from_torch(make())
    features = next(network.parameters()).shape[-1]

    def loss(x: Tensor) -> Tensor:
        out = network(kind.certain(x))
        return out.mean.sum() + out.covariance.square().sum()  # type: ignore[no-any-return]

    x = torch.randn(5, features)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), loss(x))
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x), list(network.parameters()), allow_unused=True),
        torch.autograd.grad(loss(x), list(network.parameters()), allow_unused=True),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [sequential, Residual])
def test_fit_trains_the_module_itself(make: Callable[[], nn.Module]) -> None:
    module = make()
    network, _ = from_torch(module)
    x = torch.rand(64, 3)
    before = [p.clone() for p in module.parameters()]
    history = mp.fit(network, mp.Gaussian(), (x, x.sum(-1)), epochs=30, progress=False)
    assert history.loss[-1] < history.loss[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_verify_audits_every_operation() -> None:
    branching = Function(lambda s, h: torch.cat([2 - h, s.scale * s.second(h) + h], 1))
    network, report = from_torch(nn.Sequential(branching, nn.Linear(2 * N, 2)))
    audit = mp.verify(network, torch.randn(4, N), draws=5000)
    assert audit.passed
    assert {row.name for row in report.operations} <= {row.layer for row in audit.layers}


def test_verify_says_what_an_approximation_costs() -> None:
    torch.manual_seed(0)
    for name in ("LayerNorm", "Tanh", "LeakyReLU", "Flatten"):
        network, _ = from_torch(build(name))
        audit = mp.verify(network, torch.randn(3, N), draws=5000)
        assert len(audit.layers) == 3
        assert audit.layers[1].passed
        assert audit.layers[2].mean_error < 1


# The report


def test_the_report_is_a_table() -> None:
    module = Residual(depth=1)
    module.last = nn.Sequential(nn.LayerNorm(N), nn.Tanh(), nn.Linear(N, 1))  # type: ignore[assignment]
    _, report = from_torch(module)
    assert isinstance(report, ConversionReport)
    lines = str(report).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[2:-3]}
    assert table["first"] == ["Linear", "exact", "exact"]
    assert table["blocks.0.1"] == ["GELU", "quadrature", "approximated"]
    assert table["blocks.0.2"] == ["Dropout", "exact", "exact"]
    assert table["add"] == ["add", "exact", "exact"]
    assert table["last.0"] == ["LayerNorm", "approximated", "approximated"]
    assert len(table) == len(report.operations) == 9
    assert "Gaussian" in lines[-3]
    assert "Branches" in lines[-2]
    assert set(lines[1]) == {"-"}


# What is refused


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "no rule": (lambda s, h: torch.erf(h), r"node 'erf' \(erf\) has no rule; replace it"),
    "method": (lambda s, h: h.view(-1, N), r"node 'view' \(view\) has no rule; use nn.Flatten"),
    "squeeze": (lambda s, h: h.squeeze(-1), r"\(squeeze\) has no rule; leave it out, return \(rows, features\)"),
    "softmax": (lambda s, h: torch.softmax(h, -1), r"\(softmax\) has no rule; convert the network up to its logits"),
    "matmul": (lambda s, h: h @ s.second.weight, r"\(matmul\) has no rule; use nn.Linear"),
    "product": (lambda s, h: h * s.second(h), r"node 'mul' \(mul\): a product of two values .* one must be constant"),
    "random weight": (lambda s, h: F.linear(h, h), r"\(linear\): a product of two values"),
    "division": (lambda s, h: h / s.scale, r"\(truediv\): only a division by a number has a rule; multiply"),
    "constant": (lambda s, h: h * s.scale.exp(), r"node 'exp' \(exp\) computes a constant; compute it before"),
    "rows": (lambda s, h: torch.cat([h, h]), r"node 'cat' \(cat\): must join values .* along their features.* dim=0"),
    "approximate": (lambda s, h: F.gelu(h, approximate="tanh"), r"\(gelu\): approximate='tanh' has no rule"),
    "normalised": (lambda s, h: F.layer_norm(h, (2, N)), r"normalized_shape must be that of the features alone"),
    "rate": (lambda s, h: F.dropout(h, 1.0), r"node 'dropout_1' \(dropout\): Dropout: rate must be in \[0, 1\)"),
    "arguments": (lambda s, h: torch.tanh(h, out=None), r"node 'tanh' \(tanh\): .*unexpected keyword argument 'out'"),
    "two outputs": (lambda s, h: (h, s.second(h)), r"Function must give one tensor, it gives \(first, second\)"),
    "control flow": (
        lambda s, h: h if h.sum() > 0 else -h,
        r"Function cannot be traced by torch.fx \(.*\); its forward",
    ),
    "loop": (lambda s, h: sum(row for row in h), r"Function cannot be traced by torch.fx"),
    "in place, unused": (lambda s, h: (h.relu_(), h)[1], r"node 'relu_' \(relu_\) changes a value in place and its"),
    "in place, used": (lambda s, h: F.relu(h, inplace=True) + h, r"changes a value in place that is used again later"),
}


def test_a_state_dict_is_no_module() -> None:
    with pytest.raises(
        ConversionError, match=r"^from_torch: module must be a torch.nn.Module, got OrderedDict; a state"
    ):
        from_torch(nn.Linear(2, 1).state_dict())  # type: ignore[arg-type]


def test_an_audit_calls_a_converted_relu_by_its_name() -> None:
    network, _ = from_torch(nn.Sequential(nn.Dropout(0.2), nn.Linear(N, 3), nn.ReLU(), nn.Linear(3, 1)))
    kinds = [row.kind for row in mp.verify(network, torch.randn(2, N), draws=200).layers]
    assert kinds == ["Dropout", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_named(name: str) -> None:
    function, message = REFUSED[name]
    module = Function(function)
    attributes = set(vars(module))
    with pytest.raises(ConversionError, match=rf"^from_torch: .*{message}"):
        from_torch(module)
    assert set(vars(module)) == attributes


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv1d(3, 3, 1), r"node '_0' \(Conv1d\) has no rule; only fully connected layers have rules"),
        (nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)), r"node '_1' \(Softmax\) has no rule; .* logits"),
        (nn.BatchNorm1d(3, track_running_stats=False), r"\(BatchNorm1d\): there are no running statistics"),
        (nn.LayerNorm((2, 3)), r"\(LayerNorm\): normalized_shape must be that of the features alone, got \(2, 3\)"),
        (nn.GELU(approximate="tanh"), r"\(GELU\): approximate='tanh' has no rule; use approximate='none'"),
        (nn.Bilinear(3, 3, 3), r"cannot be traced|must depend on one input|has no rule"),
    ],
)
def test_modules_without_a_rule_are_named(module: nn.Module, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        from_torch(module)


def test_more_than_one_input_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(3)

    with pytest.raises(ConversionError, match="output of Two must depend on one input, it depends on x, y"):
        from_torch(Two())
    with pytest.raises(ConversionError, match=r"Nothing|one input"):
        from_torch(Nothing())


def test_an_example_that_disagrees_is_refused() -> None:
    class Unlike(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.training else x - 1

    assert from_torch(Unlike())[0](torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]
    with pytest.raises(ConversionError, match="network and module disagree on the example"):
        from_torch(Unlike(), example=torch.zeros(1, 2))
    with pytest.raises(ConversionError, match="random in evaluation mode too; leave out the example"):
        from_torch(Function(lambda s, h: F.dropout(h, 0.5)), example=torch.randn(2, N))


def test_an_input_that_is_not_a_vector_must_be_flattened_before() -> None:
    network, _ = from_torch(nn.Sequential(nn.Flatten(), nn.Linear(8, 1)))
    assert network(torch.ones(5, 2, 4)).shape == (5, 1)
    with pytest.raises(mp.InputError, match="flatten the input before it becomes moments"):
        network(DiagonalMoments.certain(torch.ones(5, 2, 4)))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(3, 5), r"cannot run on the example, \(3, 5\) of torch.float32 .*; give rows of the shape"),
        (torch.zeros(3, 4, dtype=torch.float64), r"cannot run on the example, \(3, 4\) of torch.float64"),
        (torch.zeros(3, 4).numpy(), "example must be a torch.Tensor, got ndarray; use torch.as_tensor"),
    ],
)
def test_an_example_that_the_module_does_not_take_is_refused(example: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        from_torch(nn.Sequential(nn.Linear(4, 2)), example=example)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_modules_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConversionError, match=r"comes from torch.compile; convert the module that was compiled"):
        from_torch(cast(nn.Module, torch.compile(nn.Sequential(nn.Linear(4, 2)))))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConversionError, match=r"TorchScript module; convert the nn.Module that it was made from"):
        from_torch(torch.jit.script(nn.Sequential(nn.Linear(4, 2))))
