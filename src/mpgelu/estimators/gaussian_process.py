"""A Gaussian process as a member of the ensemble; it is the best member for a few hundred rows with little noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from mpgelu.errors import MissingRuleError
from mpgelu.layers import layers
from mpgelu.likelihoods import MeanAndLogVariance
from mpgelu.native.perceptron import can_take
from mpgelu.native.process import process_mean
from mpgelu.networks.batched import batched

if TYPE_CHECKING:
    from mpgelu.estimators.recipe.folds import Folds

PROCESS_STATE = ("weight", "points", "center", "scale", "limit", "kernel")  # in the order of the compiled kernel
_JITTER = 1e-6  # smallest variance of the noise
_FARTHEST = 8.0  # standard deviations at which features are clipped
_ROWS_OF_SEARCH, _STEPS_OF_SEARCH = 500, 60  # rows and iterations of the estimation of the kernel
_SMALLEST_SCALE = 1e-12


@layers.register(read=lambda process: {"points": process.weight.shape[-1], "in_features": process.points.shape[-1]})
class GaussianProcess(nn.Module):
    r"""Posterior mean of a Gaussian process given its training rows, and the logarithm of its noise variance.

    .. math:: m(x) = \sum_i \alpha_i\, k(x, x_i), \qquad
        k(x, x') = a^2 \Big(1 + r + \frac{r^2}{3}\Big) e^{-r} + b^2 \Big(1 + \frac{x \cdot x'}{n}\Big), \qquad
        r^2 = 5 \sum_j \frac{(x_j - x'_j)^2}{l_j^2}

    The kernel is the sum of a Matérn kernel of order 5/2 with a length scale for each feature and of a linear kernel.
    The sum is computed in float64 for inputs of any dtype, because for data without noise the weights :math:`\alpha`
    are large and cancel. The posterior variance of the function is not used: the ensemble learns its noise from
    held-out rows (:class:`NoiseHead`).

    Args:
        points: Number P of training rows.
        in_features: Number of features n.

    Attributes:
        weight: Weights :math:`\alpha`, ``(P,)``.
        points: Standardised features of the training rows, ``(P, n)``.
        center: Mean of each feature, ``(n,)``.
        scale: Standard deviation of each feature, ``(n,)``.
        limit: Smooth limit of the features, which is undone before they are standardised, ``()``.
        kernel: Logarithms of the length scales l, of a, of the standard deviation of the noise, and of b, ``(n + 3,)``.
    """

    weight: nn.Parameter
    points: Tensor
    center: Tensor
    scale: Tensor
    limit: Tensor
    kernel: Tensor

    def __init__(self, points: int, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.zeros(points, dtype=torch.float64), requires_grad=False)
        self.register_buffer("points", torch.zeros(points, in_features, dtype=torch.float64))
        self.register_buffer("center", torch.zeros(in_features, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(in_features, dtype=torch.float64))
        self.register_buffer("limit", torch.tensor(math.inf, dtype=torch.float64))
        self.register_buffer("kernel", torch.zeros(in_features + 3, dtype=torch.float64))

    @staticmethod
    def log_noise_variance(kernel: Tensor) -> Tensor:
        """Return the logarithm of the variance of the noise, ``()``, for parameters of the kernel ``(n + 3,)``."""
        return torch.log(_noise_variance(kernel))

    def forward(self, input: Tensor) -> Tensor:
        """Return posterior mean and log-variance of the noise, ``(*batch, 2)``, for limited features ``(*batch, n)``.

        Raises:
            MissingRuleError: The input is not a tensor.
        """
        if not isinstance(input, Tensor):
            raise MissingRuleError(
                f"GaussianProcess: takes a tensor, got {type(input).__name__}; the estimator's input_std is the way to "
                "predict with uncertain features"
            )
        return _outputs(input, {"weight": self.weight, **dict(self.named_buffers())})


@batched.register
def _(layer: GaussianProcess, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([_outputs(*each) for each in zip(x, _unbound(state), strict=True)])


def _unbound(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the parameters and buffers of each of several processes, from those with a leading dimension."""
    return [dict(zip(state, values, strict=True)) for values in zip(*(v.unbind() for v in state.values()), strict=True)]


def _outputs(limited: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return posterior mean and log-variance of the noise, ``(*batch, 2)``, in the dtype of the features."""
    mean = _mean(limited.double(), state)
    noise = GaussianProcess.log_noise_variance(state["kernel"])
    return MeanAndLogVariance(mean, noise.expand(mean.shape)).joined().to(limited.dtype)


def _mean(limited: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the posterior mean ``(*batch,)``, by the compiled kernel if it is applicable."""
    held = [state[name] for name in PROCESS_STATE]
    fixed = not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (limited, *held))
    if fixed and limited.dim() == 2 and can_take(limited, *held, dtype=torch.float64):
        return process_mean(limited, *held)
    return _kernel(state["kernel"], _standardised(limited, state), state["points"]) @ state["weight"]


def _standardised(limited: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    r"""Return standardised features ``(*batch, n)``, after the smooth limit is undone.

    The inverse of :math:`u = z / \sqrt{1 + (z / L)^2}` is :math:`z = u / \sqrt{1 - (u / L)^2}`.
    """
    inside = (1 - (limited / state["limit"]).square()).clamp_min(1e-6)
    return ((limited / inside.sqrt() - state["center"]) / state["scale"]).clamp(-_FARTHEST, _FARTHEST)


class LeftOut(NamedTuple):
    """A Gaussian process, with cross-validated predictions of its training rows.

    Attributes:
        process: The process, conditioned on all rows.
        means: Prediction of each row from the rows of the other folds, ``(rows,)``.
        single: Prediction of each row from all other rows, ``(rows,)``.
    """

    process: GaussianProcess
    means: Tensor
    single: Tensor


def fit_process(X: Tensor, y: Tensor, limit: float, folds: Folds) -> LeftOut:
    r"""Return a Gaussian process with the most likely kernel, and its predictions of left-out folds and rows.

    With the covariance C of the targets, the prediction of the rows F of a fold from all other rows is

    .. math:: y_F - \big[C^{-1}\big]_{FF}^{-1} \big[C^{-1} y\big]_F,

    which is exact and needs one factorisation for all folds; with single rows as folds it is
    :math:`y_i - [C^{-1} y]_i / [C^{-1}]_{ii}`. Whole folds are left out for the comparison with the networks, in which
    the accuracy of left-out single rows would be optimistic. The error of a process on new rows is that of left-out
    single rows, because it is conditioned on all rows. The kernel is estimated once, from at most 500 rows, by the
    marginal likelihood with weak priors, which keep the length scales of irrelevant features finite.

    Args:
        X: Limited features, ``(rows, n)``.
        y: Targets, ``(rows,)``, with mean zero and variance one.
        limit: Smooth limit of the features; see :class:`mpgelu.networks.FeatureScale`.
        folds: The folds.
    """
    with X.device:
        process = GaussianProcess(*X.shape)
    process.limit.fill_(limit)
    state, target = dict(process.named_buffers()), y.double()
    unlimited = _standardised(X.double(), state)
    process.center.copy_(unlimited.mean(0))
    process.scale.copy_(unlimited.std(0, correction=0).clamp_min(_SMALLEST_SCALE))
    x = _standardised(X.double(), state)
    chosen = np.random.default_rng(0).permutation(len(x))[:_ROWS_OF_SEARCH]
    process.kernel.copy_(_most_likely_kernel(x[chosen], target[chosen]))
    process.points.copy_(x)
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    covariance = _kernel(process.kernel, x, x) + _noise_variance(process.kernel) * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    with torch.no_grad():
        process.weight.copy_(inverse @ target)
    means = target.clone()
    for held, counts in zip(folds.held, folds.counts, strict=True):
        rows = held[counts]
        means[rows] -= torch.linalg.solve(inverse[rows][:, rows], process.weight[rows])
    single = target - process.weight / inverse.diagonal()
    return LeftOut(process, means.to(y.dtype), single.detach().to(y.dtype))


def _kernel(parameters: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the covariance of the function at two sets of points, ``(*batch, rows, points)``.

    Args:
        parameters: Parameters of the kernel, ``(n + 3,)``; see :class:`GaussianProcess`.
        a: Standardised features, ``(*batch, rows, n)``.
        b: Standardised features, ``(points, n)``.
    """
    n = b.shape[-1]
    lengths, (amplitude, _, slope) = parameters[:n].exp(), parameters[n:].unbind()
    u, v = a / lengths, b / lengths
    squares = u.square().sum(-1)[..., None] + v.square().sum(-1) - 2 * u @ v.mT
    r = (5 * squares.clamp_min(1e-12)).sqrt()
    return (2 * amplitude).exp() * (1 + r + r * r / 3) * (-r).exp() + (2 * slope).exp() * (1 + a @ b.mT / n)


def _noise_variance(parameters: Tensor) -> Tensor:
    """Return the variance of the noise, ``()``, at least 1e-6."""
    return (2 * parameters[-2]).exp() + _JITTER


def _most_likely_kernel(x: Tensor, y: Tensor) -> Tensor:
    r"""Return the parameters of the kernel that maximise the marginal likelihood with Gaussian priors, by L-BFGS.

    .. math:: \tfrac12 y^\top C^{-1} y + \tfrac12 \log |C|
        + \tfrac12 \sum_i \Big(\frac{\theta_i - \text{center}_i}{\text{width}_i}\Big)^2

    is minimised over the logarithms :math:`\theta` of length scales, amplitude, noise and slope, ``(n + 3,)``.

    Args:
        x: Standardised features, ``(rows, n)``.
        y: Targets, ``(rows,)``.
    """
    n, identity = x.shape[1], torch.eye(len(x), dtype=x.dtype, device=x.device)
    start = torch.tensor([0.5 * math.log(n)] * n + [0.0, math.log(0.3), math.log(0.5)], dtype=x.dtype, device=x.device)
    center = torch.tensor([1.0] * n + [0.0, -2.0, -1.0], dtype=x.dtype, device=x.device)
    width = torch.tensor([1.5] * n + [1.0, 2.0, 1.5], dtype=x.dtype, device=x.device)

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        parameters = torch.tensor(values, requires_grad=True, device="cpu")
        with torch.enable_grad():
            covariance = _kernel(parameters, x, x) + _noise_variance(parameters) * identity
            root, failed = torch.linalg.cholesky_ex(covariance)
            if failed:
                return 1e6, np.zeros_like(values)
            fit = 0.5 * y @ torch.cholesky_solve(y[:, None], root)[:, 0] + root.diagonal().log().sum()
            total = fit + 0.5 * ((parameters - center) / width).square().sum()
            total.backward()
        assert parameters.grad is not None
        return total.item(), parameters.grad.numpy()

    found = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": _STEPS_OF_SEARCH})
    return torch.as_tensor(found.x, device="cpu")
