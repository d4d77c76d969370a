"""The conversion: trace the module, replace every operation by a layer, and record its accuracy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from mpgelu.convert.accuracy import ConversionReport, ConvertedOperation, accuracy
from mpgelu.convert.measured import measure
from mpgelu.convert.network import ConvertedNetwork
from mpgelu.convert.operations import plan
from mpgelu.convert.tracing import CALLS, Tracer, in_mode, operation_of, trace
from mpgelu.errors import ConversionError
from mpgelu.layers import Dropout, LeakyReLU, Operation, ReLU
from mpgelu.rules import fork


def from_torch(module: nn.Module, *, example: Tensor | None = None) -> tuple[ConvertedNetwork, ConversionReport]:
    """Convert a torch module to a network of moments that shares its parameters.

    The module is traced with :mod:`torch.fx` and is not modified. Randomness is that of training and statistics are
    those of evaluation: dropout is part of the model whatever the mode of the module, and batch normalisation uses its
    running statistics.

    If a value is used more than once (residual connections), every source of randomness is kept apart so that branches
    add exactly: factored and full moments are factored throughout, and rectifiers propagate covariances by their gain
    instead of the exact rule. With diagonal moments, branches add as if they were independent.

    Args:
        module: A module from one tensor ``(rows, features)`` to one such tensor.
        example: Inputs on which the network must agree with the module in evaluation mode; this check is optional. If
            the module contains layer normalisation, whose moments are approximated, the error is measured too: the
            module is sampled 2,000 times on the first 32 rows, and the report contains the result.

    Returns:
        The network, and a report of the accuracy of every operation.

    Raises:
        ConversionError: ``module`` is not a module or cannot be traced, an operation has no rule, the module cannot run
                on the example, or the two disagree on it.

    Example:
        >>> import torch, mpgelu
        >>> from torch import nn
        >>> from mpgelu.convert import from_torch
        >>> network, report = from_torch(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)))
        >>> network(mpgelu.DiagonalMoments.certain(torch.zeros(3, 4)))
        DiagonalMoments(mean (3, 1), float32)
        >>> print(report)
        name  operation  mean, variance  covariance
        -------------------------------------------
        0     Linear     exact           exact
        1     ReLU       exact           quadrature
        2     Dropout    exact           exact
        3     Linear     exact           exact
        Nonlinearities take their input for Gaussian; diagonal moments drop every covariance.
    """
    _check_module(module)
    root = nn.Sequential(module) if Tracer().is_leaf_module(module) else module
    nodes, constants = trace(root)
    uses: Counter[fx.Node] = Counter()
    for node in nodes:
        fx.node.map_arg((node.args, node.kwargs), lambda used: uses.update([used]))
    branches = any(uses[node] > 1 and node.meta["random"] for node in nodes)

    network, rows = ConvertedNetwork(nodes[0].name), []
    taken = {str(node.target).split(".")[0] for node in nodes if node.op in ("call_module", "get_attr")}
    like, theirs = next(root.parameters(), torch.empty(0, device="cpu")), set(root.modules())
    for node in nodes:
        path = str(node.target)
        if node.op == "get_attr":
            network.append(node.name, path, constants[path])
        elif node.op in CALLS:
            layer, operands = plan(node, root)
            if branches and isinstance(layer, ReLU | LeakyReLU):
                layer = LeakyReLU(getattr(layer, "negative_slope", 0.0), "gain")
            if isinstance(layer, Dropout) and layer not in theirs:
                layer = layer.to(like)
            path = path if node.op == "call_module" else _free(node.name, taken)
            network.append(node.name, path, layer, tuple(None if used is None else used.name for used in operands))
            rows.append(ConvertedOperation(path, operation_of(node, root), *accuracy(layer)))
        if node.meta["random"] and (uses[node] > 1 or (branches and node.op == "placeholder")):
            network.append(node.name, _free(f"{node.name}_fork", taken), Operation(fork), (node.name,))
    report = ConversionReport(tuple(rows), branches)
    if example is not None:
        _check_agreement(root, network, example)
        if report.approximates:
            report = replace(report, measured=measure(root, network, example))
    return network, report


def _check_module(module: object) -> None:
    """Raise if the argument is not a module, or one that torch has already transformed."""
    if not isinstance(module, nn.Module):
        raise ConversionError(
            f"from_torch: module must be a torch.nn.Module, got {type(module).__name__}; a state_dict must first be "
            "loaded into its module"
        )
    if hasattr(module, "_orig_mod"):  # set by torch.compile
        raise ConversionError("from_torch: module comes from torch.compile; convert the module that was compiled")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConversionError("from_torch: module is a TorchScript module; convert the nn.Module that it was made from")


def _free(name: str, taken: set[str]) -> str:
    """Return the name, extended by underscores until it is unique, and record it as taken."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _check_agreement(module: nn.Module, network: nn.Module, example: Tensor) -> None:
    """Raise if network and module differ on plain tensors in evaluation mode by more than rounding."""
    if not isinstance(example, Tensor):
        raise ConversionError(
            f"from_torch: example must be a torch.Tensor, got {type(example).__name__}; use torch.as_tensor(example)"
        )
    with torch.no_grad(), in_mode(module, training=False):
        try:
            wanted, again = module(example), module(example)
        except Exception as error:
            raise ConversionError(
                f"from_torch: the module cannot run on the example, {tuple(example.shape)} of {example.dtype} "
                f"({error}); give rows of the shape, type and device that the module takes"
            ) from error
        found = network(example)
    if not torch.equal(wanted, again):
        raise ConversionError("from_torch: the module is random in evaluation mode too; leave out the example")
    size = 1e3 * torch.finfo(wanted.dtype).eps * wanted.abs().max().item()
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0, atol=size):
        raise ConversionError("from_torch: network and module disagree on the example; please report this module")
