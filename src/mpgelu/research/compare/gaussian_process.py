"""A Gaussian process with one length scale per feature, exact, for a few thousand rows."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from torch import Tensor

from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows

_ITERATIONS = 200
_AMPLITUDES, _SCALES, _NOISES = (1e-2, 1e3), (1e-2, 1e3), (1e-6, 1e1)  # bounds; target and features have variance 1


class GaussianProcess:
    r"""Matern 5/2 with a length scale per feature, plus noise; all parameters by marginal likelihood.

        k(x, x') = a (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r),    r^2 = \sum_d (x_d - x'_d)^2 / l_d^2

    L-BFGS on the logarithms starts from length scales of sqrt(features) and a noise variance of 0.1; nothing is
    random. Exact in float64; time grows with the cube of the rows.
    """

    def fit(self, X: Rows, y: Rows) -> None:
        """Maximise the marginal likelihood of standardised rows."""
        features = X.shape[1]
        bounds = np.log([_AMPLITUDES, *[_SCALES] * features, _NOISES])
        start = np.log([1.0, *[features**0.5] * features, 0.1])
        self.X, targets = torch.from_numpy(X), torch.from_numpy(y)
        limits = Bounds(*bounds.T)
        loss = partial(_loss, X=self.X, y=targets)
        best = minimize(loss, start, method="L-BFGS-B", jac=True, bounds=limits, options={"maxiter": _ITERATIONS})
        self.amplitude, self.scales, self.noise = _unpack(best.x)
        covariance = _matern(_distances(self.X, self.X, self.scales), self.amplitude)[0]
        self.root = torch.linalg.cholesky(covariance + self.noise * torch.eye(len(y), dtype=torch.float64))
        self.weights = torch.cholesky_solve(targets[:, None], self.root)[:, 0]

    def predict_distribution(self, X: Rows) -> Predictive:
        """The posterior of each row: epistemic variance of the function, noise beside it."""
        across = _matern(_distances(torch.from_numpy(X), self.X, self.scales), self.amplitude)[0]
        explained = torch.linalg.solve_triangular(self.root, across.mT, upper=False).square().sum(0)
        return Predictive.gaussian(across @ self.weights, (self.amplitude - explained).clamp_min(0), self.noise)


def _unpack(logs: NDArray[np.float64]) -> tuple[Tensor, Tensor, Tensor]:
    """Amplitude, length scales (features,) and noise variance."""
    values = torch.from_numpy(np.exp(logs))
    return values[0], values[1:-1], values[-1]


def _distances(X: Tensor, other: Tensor, scales: Tensor) -> Tensor:
    """Distances r in units of the length scales, (rows, others)."""
    return torch.cdist(X / scales, other / scales)


def _matern(r: Tensor, amplitude: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel, and minus twice its derivative by r^2."""
    z = math.sqrt(5) * r
    decay = amplitude * torch.exp(-z)
    return (1 + z + z * z / 3) * decay, 5 / 3 * (1 + z) * decay


def _loss(logs: NDArray[np.float64], X: Tensor, y: Tensor) -> tuple[float, NDArray[np.float64]]:
    r"""Negative log marginal likelihood and its gradient by the logarithms of the parameters.

    With K the covariance of y and W = K^{-1} y y^T K^{-1} - K^{-1}, the gradient is -1/2 tr(W dK). For a length scale
    dK_ij = G_ij (x_id - x_jd)^2 / l_d^2 with G from `_matern`, so that all features take one product with W * G.
    """
    amplitude, scales, noise = _unpack(logs)
    kernel, slope = _matern(_distances(X, X, scales), amplitude)
    root, failed = torch.linalg.cholesky_ex(kernel + noise * torch.eye(len(y), dtype=torch.float64))
    if failed:  # the line search steps back
        return math.inf, np.zeros_like(logs)
    weights = torch.cholesky_solve(y[:, None], root)[:, 0]
    value = 0.5 * y @ weights + root.diagonal().log().sum() + 0.5 * len(y) * math.log(2 * math.pi)
    inner = torch.outer(weights, weights) - torch.cholesky_inverse(root)
    scaled, product = X / scales, inner * slope
    by_scale = product.sum(1) @ scaled.square() - (scaled * (product @ scaled)).sum(0)
    gradient = torch.cat([0.5 * (inner * kernel).sum()[None], by_scale, 0.5 * (noise * inner.trace())[None]])
    return value.item(), -gradient.numpy()
