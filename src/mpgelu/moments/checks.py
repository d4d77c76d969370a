"""Validation of user input, performed once where moments are constructed and not repeated inside the rules.

Checks of shapes and dtypes always run. Checks of values run only where values are visible; see
:mod:`mpgelu.visibility`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.moments.base import Moments
from mpgelu.visibility import values_are_visible

_ENTRIES_AT_ONCE = 2**21  # isfinite makes copies: of a part, not of a table that fills the memory


def check_mean(caller: str, mean: object, event_dims: int = 1) -> Tensor:
    """Check that a mean is a finite float tensor with at least one row and one feature.

    Args:
        caller: Name of the function that the error message starts with.
        mean: The value to check, ``(*batch, *event)``.
        event_dims: Number of trailing dimensions that form one random value.

    Returns:
        The mean, unchanged.

    Raises:
        InputError: The value is not such a tensor.
    """
    if not isinstance(mean, Tensor):
        raise InputError(f"{caller}: mean must be a torch.Tensor, got {type(mean).__name__}; use torch.as_tensor(x)")
    if not mean.is_floating_point():
        raise InputError(f"{caller}: mean must have a float dtype, got {mean.dtype}; use x.float()")
    if mean.dim() == 0:
        raise InputError(f"{caller}: mean must have shape (*batch, features), got a scalar; use x.reshape(1)")
    if not 1 <= event_dims <= mean.dim():
        raise InputError(
            f"{caller}: event_dims must be from 1 to {mean.dim()}, the dimensions of mean {tuple(mean.shape)}, "
            f"got {event_dims}"
        )
    if mean.numel() == 0:
        raise InputError(f"{caller}: mean is empty, its shape is {tuple(mean.shape)}; give at least one row")
    _check_finite(caller, "mean", mean)
    return mean


def check_spread(caller: str, mean: Tensor, spread: object, event_dims: int = 1) -> Tensor:
    """Check a variance or a covariance against its mean, and expand it to the batch of the mean.

    Args:
        caller: Name of the function that the error message starts with.
        mean: The mean it belongs to, ``(*batch, n)``.
        spread: A variance that broadcasts to the shape of the mean, or, with one dimension more than the mean, a
            covariance that broadcasts to ``(*batch, n, n)``.
        event_dims: Number of event dimensions of the mean. Only vectors, one dimension, may have a covariance.

    Returns:
        The variance or covariance, expanded.

    Raises:
        InputError: Dtype or shape do not fit, a value is not finite, a variance is negative, or a covariance is not
            symmetric positive semidefinite to rounding.
    """
    if not isinstance(spread, Tensor):
        raise InputError(f"{caller}: the variance or covariance must be a torch.Tensor, got {type(spread).__name__}")
    if spread.dtype != mean.dtype:
        raise InputError(
            f"{caller}: mean is {mean.dtype} but the variance or covariance is {spread.dtype}; "
            "convert one of them, for example with .to(mean.dtype)"
        )
    is_covariance = spread.dim() == mean.dim() + 1 and event_dims == 1
    wanted = (*mean.shape, mean.shape[-1]) if is_covariance else tuple(mean.shape)
    try:
        expanded = spread.expand(wanted)
    except RuntimeError:
        raise InputError(
            f"{caller}: mean has shape {tuple(mean.shape)}, so a variance must broadcast to {tuple(mean.shape)} and a "
            f"covariance to {(*mean.shape, mean.shape[-1])}, got {tuple(spread.shape)}; one covariance for all rows "
            "is covariance[None]"
        ) from None
    name = "covariance" if is_covariance else "variance"
    _check_finite(caller, name, spread)
    if values_are_visible(spread):
        _check_covariance(caller, spread) if is_covariance else _check_variance(caller, spread)
    return expanded


def check_vector(caller: str, moments: Moments) -> None:
    """Check that moments are of vectors, as a dense covariance ``(*batch, n, n)`` requires.

    Raises:
        InputError: The event shape has more than one dimension.
    """
    if moments.event_dims != 1:
        raise InputError(
            f"{caller}: needs moments of vectors (*batch, n), got events of shape {tuple(moments.event_shape)}; use "
            "mpgelu.rules.flatten first"
        )


def check_features(caller: str, weight: Tensor, value: Tensor) -> None:
    """Check that the last dimension of a value is the number of features that a weight matrix takes.

    Args:
        caller: Name of the function that the error message starts with.
        weight: Weight matrix, ``(outputs, n)``.
        value: Input, or mean of the input, ``(*batch, n)``.

    Raises:
        InputError: The number of features or the dtype differs.
    """
    outputs, inputs = weight.shape
    if value.dim() == 0 or value.shape[-1] != inputs:
        came = value.shape[-1] if value.dim() else 0
        raise InputError(
            f"{caller}: weight takes {inputs} features but the input has {came} "
            f"(weight {tuple(weight.shape)}, input {tuple(value.shape)}); did you mean Linear({came}, {outputs})?"
        )
    if value.dtype != weight.dtype:
        raise InputError(
            f"{caller}: weight is {weight.dtype} but the input is {value.dtype}; "
            "use x.to(weight.dtype) or network.to(x.dtype)"
        )


def _check_variance(caller: str, variance: Tensor) -> None:
    """Raise if an entry of a variance is negative."""
    smallest = variance.detach().min().item()
    if smallest < 0:
        raise InputError(f"{caller}: variance must not be negative, the smallest entry is {smallest:.3g}")


def _check_covariance(caller: str, covariance: Tensor) -> None:
    """Raise if a covariance is not symmetric or has a negative eigenvalue, up to the rounding of each matrix."""
    eps = torch.finfo(covariance.dtype).eps
    covariance = covariance.detach().to(torch.promote_types(covariance.dtype, torch.float32))
    tolerance = 100 * eps * covariance.shape[-1] * covariance.abs().amax((-2, -1))  # each matrix has its own scale
    differences = (covariance - covariance.mT).abs().amax((-2, -1))
    asymmetry = differences.max().item()
    if (differences > tolerance).any():
        raise InputError(
            f"{caller}: covariance must be symmetric, C and its transpose differ by up to {asymmetry:.3g}; "
            "use (C + C.mT) / 2"
        )
    eigenvalues = torch.linalg.eigvalsh(covariance)[..., 0]
    if (eigenvalues < -tolerance).any():
        smallest = eigenvalues[eigenvalues < -tolerance].min().item()
        raise InputError(
            f"{caller}: covariance must be positive semidefinite, its smallest eigenvalue is {smallest:.3g}"
        )


def _check_finite(caller: str, name: str, value: Tensor) -> None:
    """Raise if an entry is NaN or infinite; the check runs in parts to bound the memory of its temporaries."""
    if not values_are_visible(value) or all(
        torch.isfinite(part).all() for part in torch.split(value.flatten(), _ENTRIES_AT_ONCE)
    ):
        return
    place = tuple(int(i) for i in torch.nonzero(~torch.isfinite(value))[0])
    raise InputError(
        f"{caller}: {name} must be finite, got {value[place].item()} at index {place}; "
        "remove or impute such entries first"
    )
