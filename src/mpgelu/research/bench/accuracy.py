"""Error of mean and standard deviation against time: Monte-Carlo dropout with more and more draws beside moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.convert import from_torch
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.networks import network, propagate
from mpgelu.research.bench.baselines import SharedMasks
from mpgelu.research.bench.conversion import standardised_diabetes, trained
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import Kind, Rows, Settings
from mpgelu.training import fit

DRAWS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
_REFERENCE_DRAWS = 100_000
_AT_ONCE = 100  # draws in one batch, whose numbers still fit into the cache
_WIDTH, _RATE, _ROWS, _EPOCHS = 64, 0.1, 100, 40

Pair = tuple[Tensor, Tensor]  # mean and standard deviation of each row, (rows,)


def accuracy(settings: Settings) -> Rows:
    """Time and error of every way to the mean and the standard deviation of a network with dropout.

    Two networks of two hidden layers of 64 units, trained on the diabetes data, predict 100 rows. The ReLU network is
    sampled in the fastest form we know (`SharedMasks`, compiled where there is a compiler), and propagated as moments,
    with the exact covariance of pairs of Gaussian units or diagonal. The MP-GELU network is propagated with exact
    covariance and diagonal. Errors of the mean are in standard deviations, those of the standard deviation relative,
    root mean square over rows. The ReLU network's reference is 100,000 draws in float64, good to 0.3 and 0.2 %; the
    MP-GELU network's is its exact covariance in float64.
    """
    X, y = standardised_diabetes()
    draws: Sequence[int] = DRAWS
    x, epochs, reference_draws = X[:_ROWS], _EPOCHS, _REFERENCE_DRAWS
    if settings.quick:
        x, epochs, draws, reference_draws = X[:10], 1, (10, 500), 2 * _AT_ONCE
    torch.manual_seed(0)
    relu, mpgelu = _networks(X, y, epochs)
    converted, _ = from_torch(relu, example=x)
    sampler = _Sampler(relu, settings.compiled and native.can_compile())
    methods: dict[str, Callable[[], Pair]] = {
        **{f"MC dropout, {count:,} draws": partial(sampler, x, count) for count in draws},
        "ReLU moments, exact covariance": partial(_moments, converted, x, FullMoments),
        "ReLU moments, diagonal": partial(_moments, converted, x, DiagonalMoments),
        "MP-GELU exact (factored)": partial(_moments, mpgelu, x, FactoredMoments),
        "MP-GELU diagonal": partial(_moments, mpgelu, x, DiagonalMoments),
    }
    with torch.no_grad():
        timings = in_turns(methods, 1 if settings.quick else max(3, settings.rounds // 3))
        found = {name: run() for name, run in methods.items()}
        reference = _Sampler(deepcopy(relu).double(), compiled=False)(x.double(), reference_draws)
        exact = _moments(deepcopy(mpgelu).double(), x.double(), FactoredMoments)
    return [
        {"method": name, "rows": len(x), "ms": 1e3 * timings[name].best}
        | _errors(pair, exact if name.startswith("MP-GELU") else reference)
        for name, pair in found.items()
    ]


def _networks(X: Tensor, y: Tensor, epochs: int) -> tuple[nn.Sequential, nn.Module]:
    """A ReLU network trained with dropout as in torch, and an MP-GELU network trained on its expected likelihood."""
    sizes = (X.shape[1], _WIDTH, _WIDTH)
    hidden = [
        layer for before, after in pairwise(sizes) for layer in (nn.Linear(before, after), nn.ReLU(), nn.Dropout(_RATE))
    ]
    relu = nn.Sequential(*hidden, nn.Linear(_WIDTH, 1))
    trained(relu, X, y, epochs)
    mpgelu = network(X.shape[1], (_WIDTH, _WIDTH), rate=_RATE)
    fit(mpgelu, HeteroscedasticGaussian(), (X, y), epochs=epochs, clip=10)
    return relu, mpgelu


class _Sampler:
    """Sample moments of a network over any number of draws, in batches; sums in float64.

    Args:
        relu: The network.
        compiled: Compile the forward pass of a batch, once for each size of batch.
    """

    def __init__(self, relu: nn.Sequential, compiled: bool) -> None:
        self.relu, self.compiled = relu, compiled
        self.forwards: dict[int, Callable[[Tensor], Tensor]] = {}

    def __call__(self, x: Tensor, draws: int) -> Pair:
        """Mean and standard deviation over so many draws."""
        sizes = [min(_AT_ONCE, draws - start) for start in range(0, draws, _AT_ONCE)]
        values = torch.cat([self._forward(size)(x)[..., 0] for size in sizes]).double()
        return values.mean(0), values.std(0)

    def _forward(self, size: int) -> Callable[[Tensor], Tensor]:
        if size not in self.forwards:
            forward = SharedMasks(self.relu, size).draws
            self.forwards[size] = torch.compile(forward, fullgraph=True) if self.compiled else forward
        return self.forwards[size]


def _moments(layers: nn.Module, x: Tensor, kind: Kind) -> Pair:
    moments = propagate(layers, x, moments=kind.certain)
    return moments.mean[:, 0].double(), moments.variance[:, 0].double().sqrt()


def _errors(found: Pair, wanted: Pair) -> dict[str, float]:
    """Root mean square over rows of both errors, in standard deviations and relative."""
    (mean, stddev), (true_mean, true_stddev) = found, wanted
    errors = {"mean error": (mean - true_mean) / true_stddev, "stddev error": stddev / true_stddev - 1}
    return {name: error.square().mean().sqrt().item() for name, error in errors.items()}
