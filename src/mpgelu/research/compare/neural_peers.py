"""The neural peers: deep ensemble, MC dropout and Laplace, each on ReLU networks, of one hidden layer by default.

All train with Adam (1e-2, cosine to 0) for a number of steps that depends on the number of rows. Networks of one
method train side by side, as batched products.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows, held_out

_LEARNING_RATE = 1e-2
_FEW_ROWS = 2000
_SHORT, _LONG = (64, 4000), (256, 8000)  # batch size and steps with fewer rows and with more
_CHECKS = 100  # how often held-out rows are looked at
_MEMBERS = 5
_LEAST_VARIANCE = 1e-6
_RATE = 0.05
_SAMPLES = 50
_TUNING_RATE, _TUNING_STEPS = 0.1, 300
_NOISE_VARIANCES = torch.logspace(-5, 1, 121)

Loss = Callable[[Tensor, Tensor], Tensor]


class DeepEnsemble:
    """Networks with mean and variance outputs, five by default, each with its own tenth of the rows held out.

    Every member keeps the weights that were best on the rows it did not see (Lakshminarayanan et al., 2017).

    Args:
        hidden: Units of the hidden layer, or of each.
        seed: Seed of weights, batches and held-out rows.
        members: Number of networks.
        budget: Batch size and steps; `None` for those of all neural peers.
    """

    def __init__(
        self, hidden: int | Sequence[int], seed: int, members: int = _MEMBERS, budget: tuple[int, int] | None = None
    ) -> None:
        self.hidden, self.seed, self.members, self.budget = hidden, seed, members, budget

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the members side by side."""
        torch.manual_seed(self.seed)
        parts = [held_out(len(y), self.members * self.seed + member) for member in range(self.members)]
        train, test = ([torch.from_numpy(part[i]) for part in parts] for i in (0, 1))
        options: dict[str, Any] = {"test": test, "budget": self.budget}
        self.weights = _train(_tensor(X), _tensor(y), train, self.hidden, 2, _negative_log_density, **options)

    def predict_distribution(self, X: Rows) -> Predictive:
        """The equal mixture of the members."""
        with torch.no_grad():
            means, variances = _mean_and_variance(_forward(self.weights, _tensor(X)))  # (members, rows)
        mean = means.mean(0)
        return Predictive(
            means=means.T,
            variances=variances.T,
            log_weights=mean.new_full((len(means),), -math.log(len(means))),
            mean=mean,
            epistemic_variance=means.var(0, correction=0),
            aleatoric_variance=variances.mean(0),
        )


class MCDropout:
    """A network with dropout before both layers, sampled fifty times (Gal and Ghahramani, 2016).

    The noise variance is the one with the highest density of a tenth of the rows under a network that did not see
    them; the network that predicts has seen all rows. The two train side by side.

    Args:
        hidden: Units of the hidden layer.
        seed: Seed of weights, batches and held-out rows.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        self.hidden, self.seed = hidden, seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Train both networks and choose the noise variance."""
        torch.manual_seed(self.seed)
        train, test = (torch.from_numpy(rows) for rows in held_out(len(y), self.seed))
        inputs, targets = _tensor(X), _tensor(y)
        members = [train, torch.arange(len(y))]
        pair = _train(inputs, targets, members, self.hidden, 1, _squared_error, rate=_RATE)
        samples, answers = _sampled([weight[0] for weight in pair], inputs[test]), targets[test]
        densities = [_noisy(samples, noise).log_prob(answers).mean() for noise in _NOISE_VARIANCES]
        self.noise_variance = _NOISE_VARIANCES[torch.stack(densities).argmax()]
        self.weights = [weight[1] for weight in pair]

    def predict_distribution(self, X: Rows) -> Predictive:
        """The equal mixture of the samples, with the noise added to each."""
        return _noisy(_sampled(self.weights, _tensor(X)), self.noise_variance)


def _sampled(weights: list[Tensor], X: Tensor) -> Tensor:
    """Outputs of a network under random dropout, (rows, samples)."""
    with torch.no_grad():
        return _forward(weights, X.expand(_SAMPLES, *X.shape), _RATE)[..., 0].T


def _noisy(samples: Tensor, noise_variance: Tensor) -> Predictive:
    mean = samples.mean(-1)
    return Predictive(
        means=samples,
        variances=noise_variance.expand(samples.shape),
        log_weights=mean.new_full((_SAMPLES,), -math.log(_SAMPLES)),
        mean=mean,
        epistemic_variance=samples.var(-1, correction=0),
        aleatoric_variance=noise_variance.expand(mean.shape),
    )


class LaplaceKron:
    """Laplace approximation of all weights with Kronecker factors, by laplace-torch (Daxberger et al., 2021).

    Prior precision and noise are tuned as the package's regression example does it: Adam on the marginal likelihood.
    With version 0.3 the gradient for the noise lacks the determinant's part; the true maximum gave lower test
    log-likelihoods on yacht, so we leave it at the documented way.

    Args:
        hidden: Units of the hidden layer.
        seed: Seed of weights and batches.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        self.hidden, self.seed = hidden, seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the network on all rows, approximate its posterior and tune that."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated calls of torch in its dependencies
            from laplace import Laplace

            torch.manual_seed(self.seed)
            inputs, targets = _tensor(X), _tensor(y)
            stacked = _train(inputs, targets, [torch.arange(len(y))], self.hidden, 1, _squared_error)
            data = torch.utils.data.TensorDataset(inputs, targets[:, None])
            loader = torch.utils.data.DataLoader(data, batch_size=_LONG[0])
            self.posterior: Any = Laplace(_module([weight[0] for weight in stacked]), "regression", "all", "kron")
            self.posterior.fit(loader)
            self._tune()

    def _tune(self) -> None:
        """Leave the posterior with the prior precision and noise of the last step."""
        logs = [torch.ones(1, requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.Adam(logs, lr=_TUNING_RATE)
        for _ in range(_TUNING_STEPS):
            optimizer.zero_grad()
            evidence: Tensor = self.posterior.log_marginal_likelihood(*(log.exp() for log in logs))
            (-evidence).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def predict_distribution(self, X: Rows) -> Predictive:
        """The Gaussian of the linearised network."""
        mean, covariance = self.posterior(_tensor(X))
        noise_variance = self.posterior.sigma_noise.detach().square()
        return Predictive.gaussian(mean[:, 0].detach(), covariance[:, 0, 0].detach(), noise_variance)


def _train(
    X: Tensor,
    y: Tensor,
    train: list[Tensor],
    hidden: int | Sequence[int],
    outputs: int,
    loss: Loss,
    test: list[Tensor] | None = None,
    rate: float = 0.0,
    budget: tuple[int, int] | None = None,
) -> list[Tensor]:
    """Train one network for each set of row numbers; with held-out rows each keeps its best weights."""
    widths = [hidden] if isinstance(hidden, int) else hidden
    weights = _initial(len(train), [X.shape[1], *widths, outputs])
    best, lowest = weights, torch.full((len(train),), math.inf)
    batch, steps = budget or (_SHORT if len(y) < _FEW_ROWS else _LONG)
    optimizer = torch.optim.Adam(weights, lr=_LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sizes = torch.tensor([[len(rows)] for rows in train])
    padded = nn.utils.rnn.pad_sequence(train, batch_first=True)
    seen = None if test is None else torch.stack(test)
    for step in range(1, steps + 1):
        rows = padded.gather(1, (torch.rand(len(train), batch) * sizes).long())
        optimizer.zero_grad()
        loss(_forward(weights, X[rows], rate), y[rows]).mean(1).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if seen is not None and step % max(1, steps // _CHECKS) == 0:
            with torch.no_grad():
                now = loss(_forward(weights, X[seen]), y[seen]).mean(1)
                better = (now < lowest)[:, None, None]
                lowest = torch.minimum(now, lowest)
                best = [torch.where(better, new, old) for new, old in zip(weights, best, strict=True)]
    return [weight.detach() for weight in (weights if seen is None else best)]


def _initial(members: int, widths: Sequence[int]) -> list[Tensor]:
    """Weights and biases of all layers, each with a leading dimension of members, as `nn.Linear` draws them."""
    shapes = [shape for before, after in pairwise(widths) for shape in ((before, after), (1, after))]
    bounds = [width**-0.5 for width in widths[:-1] for _ in range(2)]
    drawn = zip(shapes, bounds, strict=True)
    return [torch.empty(members, *shape).uniform_(-bound, bound).requires_grad_() for shape, bound in drawn]


def _forward(weights: list[Tensor], X: Tensor, rate: float = 0.0) -> Tensor:
    """Outputs (..., rows, outputs) of one network, or of several at once."""
    *hidden, (weight, bias) = _layers(weights)
    for inner, shift in hidden:
        X = F.relu(F.dropout(X, rate) @ inner + shift)
    return F.dropout(X, rate) @ weight + bias


def _layers(weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weights[::2], weights[1::2], strict=True))


def _mean_and_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    mean, raw = outputs.unbind(-1)
    return mean, F.softplus(raw) + _LEAST_VARIANCE


def _negative_log_density(outputs: Tensor, y: Tensor) -> Tensor:
    mean, variance = _mean_and_variance(outputs)
    return 0.5 * ((y - mean).square() / variance + variance.log())


def _squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[..., 0] - y).square()


def _module(weights: list[Tensor]) -> nn.Sequential:
    """One network as torch's modules."""
    weight1, bias1, weight2, bias2 = weights
    network = nn.Sequential(nn.Linear(*weight1.shape), nn.ReLU(), nn.Linear(*weight2.shape))
    state = {"0.weight": weight1.T, "0.bias": bias1[0], "2.weight": weight2.T, "2.bias": bias2[0]}
    network.load_state_dict(state)
    return network


def _tensor(values: Rows) -> Tensor:
    return torch.from_numpy(values).float()
