"""The compact network of distillation: its layers, its loss with an analytic gradient, and its training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpgelu.estimators.lesson import Batch, Lesson
from mpgelu.estimators.recipe.steps import learning_rate
from mpgelu.layers import Beside, GaussianLinear, Linear, Periodic, Scale, SiLU
from mpgelu.likelihoods import GaussianMixture
from mpgelu.networks import Stack
from mpgelu.training import training_progress

_BATCH = 256  # rows of a step
_CLIP, _BETAS, _EPSILON = 5.0, (0.9, 0.98), 1e-8  # settings of Adam
_PEAK, _FEW_STEPS = 1e-2, 2_400  # largest learning rate, for up to so many steps; inversely proportional beyond
# Learning rates of parameters relative to the others.
_SPEEDS = {"frequency": 3.0, "phase": 3.0, "log_weight_variance": 5.0, "log_bias_variance": 5.0}
_EMBEDDED = 2  # layers before the first linear map: embedding and scale
_SIGMA = 0.4  # standard deviation of the initial frequencies, see Periodic
_EPISTEMIC_WEIGHT, _MEAN_WEIGHT = 0.05, 2.0  # weights of terms of the loss
_LEAST_LOG = -60.0  # logarithm of the smallest responsibility before division; exponentials that underflow are slow
_FAR = 2.0  # distance of the means in standard deviations of the teacher beyond which their term grows linearly
_SHOWN_EVERY = 20  # steps between two updates of the progress bar


def compact_network(
    features: int, hidden: Sequence[int], likelihood: GaussianMixture, unit: float = 1.0
) -> nn.Sequential:
    """Return an untrained perceptron with a periodic embedding, whose location alone is random.

    The last layer predicts the location of the mixture with Gaussian weights, and its shape (logits, offsets and
    log-variances) with deterministic ones. Moments therefore start at the last layer: the network takes the time of a
    deterministic one, and diagonal moments are exact.

    Args:
        features: Number of scaled features.
        hidden: Number of units of each hidden layer.
        likelihood: Likelihood of the outputs.
        unit: Unit of the initial offsets and standard deviations, see :attr:`Lesson.unit`. Without it components would
            start so far from the values of a narrow distribution that they remain wide.
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
    location = GaussianLinear(before, 1, initial_variance=0.01 * unit**2 / before)
    shape = Linear(before, likelihood.outputs - 1)
    weight = torch.randn(likelihood.outputs, before, device="cpu") / math.sqrt(before)
    bias = torch.zeros(likelihood.outputs, device="cpu")
    likelihood.initialise(weight, bias)
    offsets, log_noises = (slice(1 + i * likelihood.components, 1 + (i + 1) * likelihood.components) for i in (1, 2))
    weight[offsets] *= unit
    bias[offsets] *= unit
    bias[log_noises] += 2 * math.log(unit)
    with torch.no_grad():
        for part, chosen in ((location, slice(0, 1)), (shape, slice(1, None))):
            part.weight.copy_(weight[chosen])
            part.bias.copy_(bias[chosen])
    return nn.Sequential(*modules, Beside(location, shape))


def adopt(network: nn.Sequential, member: nn.Module) -> None:
    """Copy the embedding of a trained network and the scale behind it, as far as their types and shapes are the same.

    The compact network then starts at frequencies that suit the function; from random ones it needs many times the
    steps where the ensemble is much narrower than the target. Copies of hidden layers were no better where this was
    measured (docs/compact.md).

    Args:
        network: A network of :func:`compact_network`, which is changed in place.
        member: A member of the ensemble.
    """
    for ours, theirs in zip(islice(network, _EMBEDDED), member.children(), strict=False):
        shapes = [{name: tensor.shape for name, tensor in layer.state_dict().items()} for layer in (ours, theirs)]
        if type(ours) is not type(theirs) or shapes[0] != shapes[1]:
            return
        ours.load_state_dict(theirs.state_dict())


class Taught(NamedTuple):
    r"""The terms of the loss of a batch, and its gradient with respect to the outputs of the network.

    Attributes:
        log_densities: Log densities of the values of each row, up to a constant, ``(values, batch)``.
        distances: The terms :math:`\rho` of the differences of the means, ``(batch,)``.
        apart: Differences of the logarithms of the epistemic variances, ``(batch,)``.
        by_variance: Gradient with respect to the variance of the location, ``(batch,)``.
        by_outputs: Gradient with respect to the other outputs, ``(1 + 3 K, batch)``.
    """

    log_densities: Tensor
    distances: Tensor
    apart: Tensor
    by_variance: Tensor
    by_outputs: Tensor

    def loss(self) -> Tensor:
        r"""Return the loss, ``()``, for the progress bar; training uses its gradient only.

        .. math:: -\overline{\log p(y)} + 2\, \overline{\rho} + 0.05\, \overline{(\log e - \log e_t)^2}, \qquad
            \rho = 8 \Big(\sqrt{1 + (\mu - \mu_t)^2 / (4 v_t)} - 1\Big)

        averages over values y and rows, with mean :math:`\mu` and epistemic variance e of the network, and mean,
        variance and epistemic variance of the teacher t. The term :math:`\rho` is :math:`(\mu - \mu_t)^2 / v_t` for
        means that are close and grows linearly with their distance beyond two standard deviations (pseudo-Huber loss).
        The squares would let the few rows that are far off, mostly outside the data, decide about each step.
        """
        cross_entropy = 0.5 * math.log(2 * math.pi) - self.log_densities.mean()
        return cross_entropy + _MEAN_WEIGHT * self.distances.mean() + _EPISTEMIC_WEIGHT * self.apart.square().mean()


def taught(outputs: Tensor, variance: Tensor, batch: Batch) -> Taught:
    r"""Return the terms of the loss (:meth:`Taught.loss`) and its gradient with respect to the outputs.

    The density p is that of :meth:`GaussianMixture.predictive` for these outputs. With the responsibility
    :math:`r_k` of component k for a value y and :math:`d_k = y - m_k`, the derivatives of :math:`-\log p(y)` are

    .. math:: \partial a_k = \pi_k - r_k, \qquad \partial m_k = -r_k \frac{d_k}{v_k}, \qquad
        \partial v_k = \frac{r_k}{2 v_k} \Big(1 - \frac{d_k^2}{v_k}\Big)

    The gradient is analytic because a step has so few rows that the overhead of automatic differentiation would exceed
    the arithmetic. For the same reason operations of torch are fused where this is possible.

    Args:
        outputs: Mean of the location, followed by the deterministic logits, offsets and log-variances,
            ``(1 + 3 K, batch)``; rows are the last dimension, so that sums over components run over long vectors.
        variance: Variance of the location, ``(batch,)``.
        batch: Rows, and the predictions of the teacher for them.
    """
    count, rows = len(outputs) // 3, len(variance)
    location, logits, offsets, log_noises = torch.split(outputs, [1, count, count, count])
    log_weights = logits.log_softmax(0)
    weights, noises = log_weights.exp(), log_noises.exp()
    means, variances = location + offsets, variance + noises
    precisions = variances.reciprocal()
    errors = batch.values - means.unsqueeze(1)  # (K, values, batch)
    ratios = errors * precisions.unsqueeze(1)
    squares = errors * ratios
    heights = torch.sub(torch.sub(log_weights, variances.log(), alpha=0.5).unsqueeze(1), squares, alpha=0.5)
    highest = heights.amax(0)
    responsibilities = heights.sub_(highest).clamp_min_(_LEAST_LOG).exp_()
    total = responsibilities.sum(0)
    responsibilities /= len(total) * total  # divided by the number of values, so that their sums are averages
    log_densities = total.log_().add_(highest)

    mean = (weights * means).sum(0)
    distance = mean - batch.mean
    stretch = torch.addcdiv(torch.ones_like(mean), distance.square(), batch.variance, value=_FAR**-2).sqrt_()
    away, apart = distance / (batch.variance * stretch), variance.log() - batch.log_epistemic
    share, pull = responsibilities.sum(1), weights * (2 * _MEAN_WEIGHT * away)
    by_means = pull - ratios.mul_(responsibilities).sum(1)
    by_logits = torch.addcmul(weights - share, pull, means - mean)
    by_variances = 0.5 * precisions * (share - squares.mul_(responsibilities).sum(1))
    by_variance = by_variances.sum(0) + 2 * _EPISTEMIC_WEIGHT * apart / variance
    by_outputs = torch.cat([by_means.sum(0, keepdim=True), by_logits, by_means, by_variances * noises])
    return Taught(log_densities, 2 * _FAR**2 * (stretch - 1), apart, by_variance / rows, by_outputs / rows)


class _Head(NamedTuple):
    """Parameters of the last layer of a compact network, or their gradients.

    Attributes:
        weight: Weights of the location and then of the shape, ``(1 + 3 K, units)``.
        bias: Biases in the same order, ``(1 + 3 K,)``.
        log_variance: Log-variances of the weights of the location, ``(1, units)``.
        log_bias_variance: Log-variance of the bias of the location, ``(1,)``.
    """

    weight: Tensor
    bias: Tensor
    log_variance: Tensor
    log_bias_variance: Tensor


def learn(body: Stack, head: _Head, gradients: _Head, batch: Batch) -> Taught:
    """Return the terms of the loss of a batch, and write or accumulate its gradient.

    Args:
        body: The layers up to the last hidden linear map, whose gradients are accumulated in ``grad``.
        head: Parameters of the last layer.
        gradients: Tensors of the same shapes, which are overwritten with the gradient.
        batch: Rows, and the predictions of the teacher for them.
    """
    (sums,) = body(batch.z.unsqueeze(0))
    with torch.no_grad():
        last = F.silu(sums)
        squares, variances, bias_variance = last.square(), head.log_variance[0].exp(), head.log_bias_variance.exp()
        outputs = torch.addmm(head.bias.unsqueeze(1), head.weight, last.T)
        found = taught(outputs, torch.addmv(bias_variance, squares, variances), batch)
        torch.mm(found.by_outputs, last, out=gradients.weight)
        torch.sum(found.by_outputs, 1, out=gradients.bias)
        torch.mul(found.by_variance @ squares, variances, out=gradients.log_variance[0])
        torch.mul(found.by_variance.sum(), bias_variance, out=gradients.log_bias_variance)
        by = found.by_outputs.T @ head.weight
        by.addcmul_(last, torch.outer(found.by_variance, variances), value=2)
        by = torch.ops.aten.silu_backward(by, sums)
    sums.backward(by)
    return found


def train(network: nn.Sequential, lesson: Lesson, steps: int, seed: int, progress: bool) -> None:
    """Train a compact network by Adam, with a warm-up and a cosine decay of the learning rate to zero.

    Args:
        network: A network of :func:`compact_network`, which is trained in place.
        lesson: Predictions of the teacher.
        steps: Number of steps.
        seed: Seed of the batches.
        progress: Whether to show a progress bar on a terminal.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = _Parameters(network, lesson.unit)
    peak = _PEAK * min(1.0, _FEW_STEPS / steps)
    with training_progress(progress) as bar:
        task = bar.add_task("compact network", total=steps, loss=math.nan)
        for step in range(steps):
            at = lesson.draw(_BATCH, generator)
            parameters.gradient.zero_()
            found = learn(parameters.body, parameters.head, parameters.of_head, lesson.batch(at, step))
            parameters.step(learning_rate(peak, (step + 1) / steps))
            if step % _SHOWN_EVERY == 0:
                bar.update(task, completed=step, loss=found.loss().item())


class _Parameters:
    """Parameters of a compact network as one vector, with the state of Adam.

    The parameters of the network become views of the vector, so that a step is a few operations of torch for all
    parameters together.

    Args:
        network: A network of :func:`compact_network`; its parameters are moved into the vector.
        unit: Unit of the offsets, by which their learning rate is multiplied.

    Attributes:
        vector: All parameters, ``(parameters,)``.
        speed: Learning rate of each parameter relative to the others.
        gradient: Gradient of the loss.
        mean: First moment of Adam.
        square: Second moment of Adam.
        body: The layers up to the last hidden linear map, whose parameters and gradients are views of the vectors.
        head: Views of the vector, the parameters of the last layer.
        of_head: Views of the gradient, in the same order.
        taken: Number of steps.
    """

    def __init__(self, network: nn.Sequential, unit: float = 1.0) -> None:
        names, held = zip(*network.named_parameters(), strict=True)
        *first, a, a_bias, log_variance, log_bias_variance, b, b_bias = held
        parts = [*first, torch.cat([a, b]), torch.cat([a_bias, b_bias]), log_variance, log_bias_variance]
        speeds = [_SPEEDS.get(name.rpartition(".")[2], 1.0) for name in (*names[:-6], "head", "bias", *names[-4:-2])]
        self.vector = _joined(parts)
        speed = [torch.full_like(part, speed) for part, speed in zip(parts, speeds, strict=True)]
        components = len(b_bias) // 3
        for of_head in speed[-4:-2]:
            of_head[1 + components : 1 + 2 * components] *= unit
        self.speed = _joined(speed)
        self.gradient, self.mean, self.square = (torch.zeros_like(self.vector) for _ in range(3))
        self.taken = 0
        *body, head, bias, log_variance, log_bias_variance = _split(self.vector, parts)
        views = [*body, head[:1], bias[:1], log_variance, log_bias_variance, head[1:], bias[1:]]
        for parameter, view in zip(held, views, strict=True):
            parameter.data = view
        *of_body, weight, bias_, of_variance, of_bias_variance = _split(self.gradient, parts)
        self.head = _Head(head, bias, log_variance, log_bias_variance)
        self.of_head = _Head(weight, bias_, of_variance, of_bias_variance)
        self.body = Stack([network[:-2]])
        for parameter, value, gradient in zip(self.body.parameters(), body, of_body, strict=True):
            parameter.data, parameter.grad = value.unsqueeze(0), gradient.unsqueeze(0)

    def step(self, rate: float) -> None:
        """Take a step of Adam with a clipped gradient; a gradient that is not finite is skipped.

        Args:
            rate: Learning rate of this step.
        """
        norm = self.gradient.norm().item()
        if not math.isfinite(norm):
            return
        if norm > _CLIP:
            self.gradient *= _CLIP / norm
        self.taken += 1
        of_mean, of_square = (1 - beta**self.taken for beta in _BETAS)
        self.mean.lerp_(self.gradient, 1 - _BETAS[0])
        self.square.mul_(_BETAS[1]).addcmul_(self.gradient, self.gradient, value=1 - _BETAS[1])
        root = self.square.sqrt().mul_(of_square**-0.5).add_(_EPSILON)
        self.vector.addcmul_(torch.div(self.mean, root, out=root), self.speed, value=-rate / of_mean)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([part.detach().flatten() for part in parts])


def _split(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive parts of a vector in the shapes of other tensors."""
    parts = torch.split(whole, [part.numel() for part in like])
    return [part.view_as(shape) for part, shape in zip(parts, like, strict=True)]
