"""The network that learns what an ensemble says: its layers, its loss with its gradient, its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpgelu.estimators.lesson import Batch, Lesson
from mpgelu.estimators.recipe.steps import learning_rate
from mpgelu.layers import Beside, GaussianLinear, Linear, Periodic, Scale, SiLU
from mpgelu.likelihoods import GaussianMixture
from mpgelu.training import training_progress

_BATCH, _GIVEN_SHARE = 256, 0.1  # rows of a step, and the share of them that are given ones
_PEAK, _CLIP, _BETAS = 1e-2, 5.0, (0.9, 0.98)
_SPEEDS = {"frequency": 3.0, "phase": 3.0, "log_weight_variance": 5.0, "log_bias_variance": 5.0}
_SIGMA = 0.4  # of the frequencies, see Periodic
_EPISTEMIC_WEIGHT, _MEAN_WEIGHT = 0.05, 2.0  # of their terms of the loss
_SHOWN_EVERY = 20  # steps between two updates of the progress bar
_TURN = 2 * math.pi


def compact_network(features: int, hidden: Sequence[int], likelihood: GaussianMixture) -> nn.Sequential:
    """A perceptron after a periodic embedding, sure of everything but the location of its mixture.

    Only the weights of the location are random, so moments begin at the last layer: the network costs what a plain one
    does, and diagonal moments are as exact as full ones.

    Args:
        features: Number of scaled features.
        hidden: Units of each hidden layer.
        likelihood: What the outputs mean.
    """
    embedding = Periodic(features, sigma=_SIGMA)
    modules: list[nn.Module] = [embedding, Scale(embedding.out_features)]
    before = embedding.out_features
    for after in hidden:
        layer = Linear(before, after)
        nn.init.normal_(layer.weight, 0, math.sqrt(2 / before))
        nn.init.normal_(layer.bias, 0, 0.3)
        modules += [layer, SiLU()]
        before = after
    location = GaussianLinear(before, 1, initial_variance=0.01 / before)
    shape = Linear(before, likelihood.outputs - 1)
    weight, bias = torch.randn(likelihood.outputs, before) / math.sqrt(before), torch.zeros(likelihood.outputs)
    likelihood.initialise(weight, bias)
    with torch.no_grad():
        for part, chosen in ((location, slice(0, 1)), (shape, slice(1, None))):
            part.weight.copy_(weight[chosen])
            part.bias.copy_(bias[chosen])
    return nn.Sequential(*modules, Beside(location, shape))


class Taught(NamedTuple):
    """The loss of a batch, and its gradient by the outputs of the network.

    Args:
        loss: ``()``.
        by_location: By the mean of the location, ``(batch,)``.
        by_variance: By the variance of the location, ``(batch,)``.
        by_shape: By the other outputs, ``(3 K, batch)``.
    """

    loss: Tensor
    by_location: Tensor
    by_variance: Tensor
    by_shape: Tensor


def taught(location: Tensor, variance: Tensor, shape: Tensor, batch: Batch) -> Taught:
    r"""Cross entropy of the distributions, and the distances of their means and of their epistemic variances.

    The density is that of :meth:`GaussianMixture.predictive` for these outputs. With the responsibility
    :math:`r_k` of a component for a value y and :math:`d_k = y - m_k`, minus its logarithm has the derivatives

    .. math:: \partial a_k = \pi_k - r_k, \qquad \partial m_k = -r_k \frac{d_k}{v_k}, \qquad
        \partial v_k = \frac{r_k}{2 v_k} \Big(1 - \frac{d_k^2}{v_k}\Big)

    Written out because a step has so few rows that the bookkeeping of automatic derivatives would take longer than
    the arithmetic.

    Args:
        location: Mean of the location of each row, ``(batch,)``.
        variance: Variance of the location, ``(batch,)``.
        shape: Logits, offsets and log-variances, which are known, ``(3 K, batch)``; rows come last, for a sum over
            components is then one over long vectors.
        batch: What the teacher predicts there.
    """
    logits, offsets, log_noises = shape.chunk(3)
    log_weights = logits.log_softmax(0)
    weights, noises = log_weights.exp(), log_noises.exp()
    means, variances = location + offsets, variance + noises
    precisions = variances.reciprocal()
    errors = batch.values - means.unsqueeze(1)  # (K, values, batch)
    ratios = errors * precisions.unsqueeze(1)
    squares = errors * ratios
    heights = (log_weights - 0.5 * variances.log()).unsqueeze(1) - 0.5 * squares
    log_densities = heights.logsumexp(0)
    responsibilities = (heights - log_densities).exp()
    mean = (weights * means).sum(0)
    distance = mean - batch.mean
    away, apart = distance / batch.variance, variance.log() - batch.log_epistemic
    loss = (
        0.5 * math.log(2 * math.pi)
        - log_densities.mean()
        + _MEAN_WEIGHT * (distance * away).mean()
        + _EPISTEMIC_WEIGHT * apart.square().mean()
    )
    pull = 2 * _MEAN_WEIGHT * away * weights
    by_means = pull - (responsibilities * ratios).mean(1)
    by_logits = weights - responsibilities.mean(1) + pull * (means - mean)
    by_variances = 0.5 * precisions * (responsibilities * (1 - squares)).mean(1)
    by_variance = by_variances.sum(0) + 2 * _EPISTEMIC_WEIGHT * apart / variance
    by_shape = torch.cat([by_logits, by_means, by_variances * noises])
    rows = len(location)
    return Taught(loss, by_means.sum(0) / rows, by_variance / rows, by_shape / rows)


class _Layers(NamedTuple):
    """Parameters of a compact network, or their gradients."""

    frequency: Tensor
    phase: Tensor
    combination: Tensor
    scale: Tensor
    hidden: list[tuple[Tensor, Tensor]]  # weight and bias of each
    location: Tensor
    location_bias: Tensor
    log_variance: Tensor
    log_bias_variance: Tensor
    shape: Tensor
    shape_bias: Tensor

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> _Layers:
        """From tensors in the order of the network's parameters."""
        frequency, phase, combination, scale, *hidden, a, b, c, d, e, f = tensors
        pairs = list(zip(hidden[::2], hidden[1::2], strict=True))
        return _Layers(frequency, phase, combination, scale, pairs, a, b, c, d, e, f)


def learn(layers: _Layers, gradients: _Layers, batch: Batch) -> Tensor:
    """The loss of a batch; its gradient is written into the tensors for it.

    Args:
        layers: Of the network that :func:`compact_network` makes.
        gradients: Tensors of the same shapes.
        batch: What it is to predict.
    """
    z = batch.z.unsqueeze(-1)
    angles = torch.addcmul(_TURN * layers.phase, z, _TURN * layers.frequency)  # (batch, n, frequencies)
    cosines = angles.cos().transpose(0, 1)
    embedded = torch.cat([z, torch.bmm(cosines, layers.combination).transpose(0, 1)], -1).flatten(1)
    inputs, sums = [embedded * layers.scale], []
    for weight, bias in layers.hidden:
        sums.append(torch.addmm(bias, inputs[-1], weight.T))
        inputs.append(F.silu(sums[-1]))
    last = inputs[-1]
    squares, variances, bias_variance = last.square(), layers.log_variance[0].exp(), layers.log_bias_variance.exp()
    location = torch.addmv(layers.location_bias, last, layers.location[0])
    variance = torch.addmv(bias_variance, squares, variances)
    found = taught(location, variance, torch.addmm(layers.shape_bias[:, None], layers.shape, last.T), batch)

    torch.mm(found.by_shape, last, out=gradients.shape)
    torch.sum(found.by_shape, 1, out=gradients.shape_bias)
    gradients.location[0] = found.by_location @ last
    gradients.location_bias[0] = found.by_location.sum()
    gradients.log_variance[0] = (found.by_variance @ squares) * variances
    gradients.log_bias_variance[0] = found.by_variance.sum() * bias_variance[0]
    by = torch.addr(found.by_shape.T @ layers.shape, found.by_location, layers.location[0])
    by = by.addcmul_(last, torch.outer(found.by_variance, variances), value=2)
    backwards = zip(layers.hidden[::-1], gradients.hidden[::-1], inputs[-2::-1], sums[::-1], strict=True)
    for (weight, _), (of_weight, of_bias), given, total in backwards:
        by = torch.ops.aten.silu_backward(by, total)
        torch.mm(by.T, given, out=of_weight)
        torch.sum(by, 0, out=of_bias)
        by = by @ weight
    torch.sum(by * embedded, 0, out=gradients.scale)
    by = (by * layers.scale).reshape(len(by), len(cosines), -1)[..., 1:].transpose(0, 1)  # (n, batch, outputs)
    torch.bmm(cosines.mT, by, out=gradients.combination)
    by = torch.bmm(by, layers.combination.mT).transpose(0, 1) * angles.sin_()
    torch.mul(by.sum(0), -_TURN, out=gradients.phase)
    torch.mul((by * z).sum(0), -_TURN, out=gradients.frequency)
    return found.loss


@torch.no_grad()
def train(network: nn.Sequential, lesson: Lesson, steps: int, seed: int, progress: bool) -> None:
    """Adam, with a learning rate that falls to zero; a step that is not finite is left out.

    Args:
        network: As :func:`compact_network` makes it; changed in place.
        lesson: What it is to learn.
        steps: Number of steps.
        seed: Of the batches.
        progress: Show a progress bar on a terminal.
    """
    generator = torch.Generator().manual_seed(seed)
    vectors, layers, gradients = _flat(network)
    optimizer = torch.optim.Adam(
        [{"params": [vector], "speed": speed} for speed, vector in vectors.items()], lr=_PEAK, betas=_BETAS, fused=True
    )
    of_given = round(_GIVEN_SHARE * _BATCH)
    with training_progress(progress) as bar:
        task = bar.add_task("compact network", total=steps, loss=math.nan)
        for step in range(steps):
            at = torch.randint(len(lesson.z), (_BATCH,), generator=generator)
            at[:of_given] = torch.randint(lesson.given, (of_given,), generator=generator)
            loss = learn(layers, gradients, lesson.batch(at, step))
            for group in optimizer.param_groups:
                group["lr"] = group["speed"] * learning_rate(_PEAK, (step + 1) / steps)
            if nn.utils.clip_grad_norm_(vectors.values(), _CLIP).isfinite():
                optimizer.step()
            if step % _SHOWN_EVERY == 0:
                bar.update(task, completed=step, loss=loss.item())


def _flat(network: nn.Module) -> tuple[dict[float, nn.Parameter], _Layers, _Layers]:
    """Parameters of each speed as one vector with its gradient, and both as views by layer; the network's are views."""
    named = dict(network.named_parameters())
    speeds = {name: _SPEEDS.get(name.rpartition(".")[2], 1.0) for name in named}
    vectors: dict[float, nn.Parameter] = {}
    gradients: dict[str, Tensor] = {}
    for speed in sorted(set(speeds.values())):
        chosen = {name: p for name, p in named.items() if speeds[name] == speed}
        vector = vectors[speed] = nn.Parameter(torch.cat([p.detach().flatten() for p in chosen.values()]))
        vector.grad = torch.zeros_like(vector)
        sizes = [p.numel() for p in chosen.values()]
        parts = (torch.split(whole, sizes) for whole in (vector.detach(), vector.grad))
        for (name, p), values, gradient in zip(chosen.items(), *parts, strict=True):
            p.data, gradients[name] = values.view_as(p), gradient.view_as(p)
    return vectors, _Layers.of(p.detach() for p in named.values()), _Layers.of(gradients[name] for name in named)
