"""The audit of propagated moments against Monte-Carlo samples of the same random network, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators import Ensemble
from mpgelu.estimators.measurement import checked_errors
from mpgelu.inspect.audit.findings import Audit, LayerAudit
from mpgelu.inspect.audit.inputs import InputAudit, audit_inputs
from mpgelu.inspect.audit.samples import Samples, Source, draw
from mpgelu.inspect.audit.tally import Tally
from mpgelu.inspect.hooks import after_each_layer
from mpgelu.moments import FactoredMoments, Moments, moments_of
from mpgelu.networks import Parts, is_random, parts_of

_DRAWS = 20_000
_CACHED, _CHUNK = 2**17, 2**22  # sampled values of a layer at a time: what is fastest, and at most
_AT_ONCE = 256  # draws for which a chunk may be larger than the fastest, as each chunk propagates moments once


def verify(
    model: Any,
    X: Any,
    *,
    moments: type[Moments] | Callable[[Tensor], Moments] | None = None,
    draws: int | None = None,
    tolerance: float = 0.01,
    seed: int = 0,
    networks: int = 3,
    input_std: ArrayLike | None = None,
) -> Audit:
    """Compare propagated moments with samples of the same random network after every layer.

    Sampling draws dropout masks, Gaussian weights and MP-GELU masks (with the keep-probabilities of the propagation)
    and applies other nonlinearities to the sampled values. MP-GELU networks with full and factored moments agree to
    sampling error at any depth. ReLU assumes Gaussian inputs, which the skewness of a layer lets you judge.

    Every outcome of a mask occurs in some draws, with a weight that corrects for its probability. An exact layer fails
    with a probability of about 1/1000 at most, counted on skewed ReLU units with 500 draws too. Units that vary too
    rarely for the number of draws, such as a Gaussian unit that is hardly ever positive, are left out; a layer with
    many such units is *undecided*.

    These audits compare propagation and sampling with the same keep-probabilities. With ``input_std`` the function
    itself is audited too: predictions for features with errors against predictions for known features, averaged over
    random inputs (:class:`InputAudit`, in ``Audit.inputs``). For an estimator or ensemble these are its predictions
    with ``input_std``; for a network it is the propagation of ``FactoredMoments.of(x, input_std ** 2)``, which differs
    for MP-GELU, whose keep-probabilities depend on the variance of the inputs.

    Args:
        model: A network of layers of this library, possibly converted; or a fitted estimator, table model or
            ensemble, whose layers are named with the number of the network, as in ``3:0``.
        X: Inputs, ``(rows, features)``: a tensor, or raw features in any form for an estimator. A dozen rows suffice.
        moments: Type of moments, or function from inputs to moments, for example ``DiagonalMoments`` to measure the
            cost of dropped correlations; by default exact moments, or those that an estimator predicts with.
        draws: Samples per row, by default 20,000.
        tolerance: Error allowed in addition to sampling error, in standard deviations of the units.
        seed: Seed of the sampling.
        networks: Number of networks of an ensemble to audit, those of the largest weights.
        input_std: Standard deviation of independent errors of the features: one number, one for each feature, or one
            for each row and feature.

    Returns:
        The audit, which prints as a table.

    Raises:
        InputError: The inputs are not rows, or ``draws`` is smaller than 100.

    Example:
        >>> import torch, mpgelu
        >>> audit = mpgelu.verify(mpgelu.network(3, hidden=(8,)), torch.randn(4, 3))
        >>> audit.passed
        True
    """
    if not isinstance(model, nn.Module) or isinstance(model, Ensemble):
        parts = parts_of(model, "verify")
        audit = _verify_members(parts, X, moments, draws, tolerance, seed, networks)
        return audit if input_std is None else replace(audit, inputs=_model_inputs(parts, X, input_std, audit, seed))
    draws = _DRAWS if draws is None else draws
    if draws < 100:
        raise InputError(f"verify: draws must be at least 100, got {draws}")
    start = moments_of("verify", moments or FactoredMoments)(X)
    if len(start.batch_shape) != 1:
        raise InputError(
            f"verify: X must have shape (rows, features), got {tuple(X.shape)}; for inputs of more dimensions use "
            "moments=lambda x: DiagonalMoments.certain(x, event_dims=x.dim() - 1)"
        )
    source = Source(seed, X.device, draws)
    tallies = _tallied(model, start, draws, source)
    layers = tuple(tally.result(name, tolerance, source) for name, tally in tallies.items())
    audit = Audit(layers, draws, len(X), tolerance)
    return audit if input_std is None else replace(audit, inputs=_network_inputs(model, start, input_std, audit, seed))


def _tallied(network: nn.Module, start: Moments, draws: int, source: Source) -> dict[str, Tally]:
    """Return the running sums of all layers of a network, in the order of their execution.

    A first pass with one draw counts the layers with masks, which the importance weights depend on. A module that is
    called several times has one tally for each call.

    Args:
        network: The network.
        start: Moments of its inputs, ``(rows, *event)``.
        draws: Number of samples of each row.
        source: Source of the random numbers.
    """
    tallies: dict[str, Tally] = {}

    def record(name: str, module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Samples):
            if name not in tallies:
                tallies[name] = Tally(_kind(module), output.moments)
            tallies[name].add(output)

    with torch.no_grad():
        try:
            network(draw(start, 1, source))
        except TypeError:
            network(start)  # plain torch modules refuse moments, with the remedy
            raise
    source.layers = source.done
    widest = max([start.event_shape.numel(), *(max(p.shape) for p in network.parameters() if p.dim() > 1)])
    chunk = _draws_at_a_time(widest * len(start.mean))
    for first in range(0, draws, chunk):
        source.begin(first)
        with torch.no_grad(), after_each_layer(network, record):
            network(draw(start, min(chunk, draws - first), source))
    return tallies


def _network_inputs(network: nn.Module, start: Moments, input_std: ArrayLike, audit: Audit, seed: int) -> InputAudit:
    """Compare the propagated moments of measurement errors with the same network at sampled inputs."""

    def propagated(moments: Moments) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = network(moments)
        return output.mean, output.variance

    x = start.mean
    kind: Any = type(start)  # every type of moments starts from a variance, or from none
    errors = torch.as_tensor(checked_errors("verify", input_std, tuple(x.shape)).copy(), device=x.device).to(x)
    stated = propagated(kind.of(x, errors.square()))

    def known(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return propagated(kind.certain(inputs))

    return audit_inputs(stated, known, x, errors, draws=audit.draws, seed=seed, propagated=True)


def _model_inputs(parts: Parts, X: Any, input_std: ArrayLike, audit: Audit, seed: int) -> InputAudit:
    """Compare predictions of a model for features with errors with its predictions at sampled features."""
    x, ensemble = parts.raw("verify", X), parts.whole
    assert ensemble is not None
    errors = torch.tensor(checked_errors("verify", input_std, tuple(x.shape)), device=x.device)

    def predicted(inputs: Tensor, errors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = ensemble(inputs, errors, 2)
        return p.mean[:, None], p.variance[:, None]

    stated = predicted(x, errors)
    return audit_inputs(stated, predicted, x, errors, draws=audit.draws, seed=seed, propagated=False)


def _kind(module: nn.Module) -> str:
    """Return the name of a layer as its user knows it: a leaky ReLU without slope stands for a converted ReLU."""
    return "ReLU" if getattr(module, "negative_slope", None) == 0 else type(module).__name__


def _draws_at_a_time(size: int) -> int:
    """Return the number of draws in a chunk for a layer with this many values per draw."""
    return max(1, _CACHED // size, min(_AT_ONCE, _CHUNK // size))


def _verify_members(
    parts: Parts,
    X: Any,
    moments: type[Moments] | Callable[[Tensor], Moments] | None,
    draws: int | None,
    tolerance: float,
    seed: int,
    networks: int,
) -> Audit:
    """Audit the networks of an ensemble with the largest weights, and join the results."""
    if networks < 1:
        raise InputError(f"verify: networks must be at least 1, got {networks}")
    start = moments or parts.moments
    x = parts.scaled("verify", X)
    order = parts.weights.argsort(descending=True, stable=True).tolist()
    heaviest = [place for place in order if is_random(parts.networks[place])][:networks]  # others have no moments
    layers: list[LayerAudit] = []
    for place in sorted(heaviest):
        audit = verify(parts.networks[place], x, moments=start, draws=draws, tolerance=tolerance, seed=seed + place)
        layers += [replace(layer, layer=f"{place}:{layer.layer}") for layer in audit.layers]
    return Audit(tuple(layers), _DRAWS if draws is None else draws, len(x), tolerance)
