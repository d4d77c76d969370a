"""What every kind of moments has in common: a mean, a marginal variance, a covariance, and the manners of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError

# The rules behind operators, by name. mpgelu.rules enters them: rules are built on moments and not the other way.
OPERATORS: dict[str, Callable[..., Any]] = {}

# What stands for a torch function, by the function's name.
_REMEDIES = {
    "linear": "mpgelu.Linear",
    "dropout": "mpgelu.Dropout",
    "relu": "mpgelu.ReLU",
    **{name: f"mpgelu.layers.{layer}" for name, layer in (("gelu", "GELU"), ("silu", "SiLU"), ("tanh", "Tanh"))},
    **{name: f"mpgelu.layers.{layer}" for name, layer in (("sigmoid", "Sigmoid"), ("softplus", "Softplus"))},
    **{name: f"mpgelu.layers.{layer}" for name, layer in (("leaky_relu", "LeakyReLU"), ("layer_norm", "LayerNorm"))},
    "batch_norm": "mpgelu.layers.BatchNorm1d",
    **dict.fromkeys(("cat", "concat", "concatenate"), "mpgelu.rules.concatenate"),
    "flatten": "mpgelu.rules.flatten",
}

# Replaces one tensor of some moments: takes the tensor, how many of its last dimensions belong to one random vector,
# and whether each row has its own.
Replacement = Callable[[Tensor, int, bool], Tensor]


class Moments:
    """Mean and covariance of a random vector, one per leading batch index.

    Subclasses differ only in how they hold the covariance. Rules dispatch on the subclass. Sums, differences and
    products with known factors may be written with operators, which call :func:`mpgelu.rules.add` and
    :func:`mpgelu.rules.scale`.
    """

    __array_ufunc__ = None  # numpy arrays leave `array + moments` to the moments
    mean: Tensor  # (*batch, n)

    if TYPE_CHECKING:  # a field in the subclass that holds it, a computed property in the others

        @property
        def variance(self) -> Tensor:
            """Marginal variances, the diagonal of the covariance, ``(*batch, n)``."""

        @property
        def covariance(self) -> Tensor:
            """Dense covariance, ``(*batch, n, n)``."""

    @property
    def stddev(self) -> Tensor:
        """Marginal standard deviations ``(*batch, n)``."""
        return self.variance.sqrt()

    @property
    def shape(self) -> torch.Size:
        """Shape of the mean: ``batch_shape`` followed by ``event_shape``."""
        return self.mean.shape

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions: one random vector for each index."""
        return self.mean.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one random value, ``(n,)``."""
        return self.mean.shape[len(self.batch_shape) :]

    @classmethod
    def certain(cls, x: Tensor) -> Self:
        """A known input: zero covariance.

        Args:
            x: ``(*batch, n)``.
        """
        raise NotImplementedError

    @property
    def features(self) -> int:
        """Length n of the random vector."""
        return self.mean.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.mean.device

    def dim(self) -> int:
        """Number of dimensions of the mean."""
        return self.mean.dim()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same moments with another dtype or on another device; arguments as of :meth:`torch.Tensor.to`."""
        return self.replaced(lambda tensor, event, per_row: tensor.to(*args, **kwargs))

    def detach(self) -> Self:
        """The same moments without gradients.

        They count as new randomness: add or join them only with what is computed from them.
        """
        return self.replaced(lambda tensor, event, per_row: tensor.detach())

    def __getitem__(self, index: Any) -> Self:
        """The moments of some rows, by any index that a tensor of shape ``batch_shape`` takes.

        Features stay together: ``moments.mean[..., 0]`` and ``moments.variance[..., 0]`` are those of one feature.
        """
        rows = self.batch_shape
        try:
            places = torch.arange(rows.numel(), device=self.device).view(rows)[index]
        except IndexError as error:
            raise IndexError(
                f"{type(self).__name__}: an index is over the batch dimensions {tuple(rows)} and leaves the features "
                f"{tuple(self.event_shape)} together, got {index!r}: {error}"
            ) from None

        def pick(tensor: Tensor, event: int, per_row: bool) -> Tensor:
            event_shape = tensor.shape[tensor.dim() - event :]
            return tensor.expand(*rows, *event_shape).reshape(-1, *event_shape)[places] if per_row else tensor

        return self.replaced(pick)

    def replaced(self, function: Replacement) -> Self:
        """These moments with every tensor replaced.

        Args:
            function: Takes a tensor, how many of its last dimensions belong to one random vector, and whether each row
                has its own; gives the tensor that takes its place.
        """
        raise MissingRuleError(f"{type(self).__name__} does not say how to replace its tensors; define replaced")

    def _describe(self) -> str:
        """The covariance in words, for ``repr``."""
        return ""

    def __repr__(self) -> str:
        """Shapes and structure, never the numbers: a batch of covariances does not fit a line."""
        words = [f"mean {tuple(self.shape)}", self._describe(), str(self.dtype).removeprefix("torch.")]
        if self.device.type != "cpu":
            words.append(str(self.device))
        return f"{type(self).__name__}({', '.join(word for word in words if word)})"

    # Operators

    def __add__(self, other: Any) -> Self:
        """The sum with moments or with a constant; see :func:`mpgelu.rules.add`."""
        return self._by("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        """The difference; see :func:`mpgelu.rules.add`."""
        return self._by("add", other, -1.0)

    def __rsub__(self, other: Any) -> Self:
        """A constant minus these."""
        return self._by("subtract_from", other)

    def __mul__(self, factor: Any) -> Self:
        """The product with a number or a constant tensor; see :func:`mpgelu.rules.scale`."""
        if isinstance(factor, Moments):
            raise MissingRuleError(
                f"{type(self).__name__}: the product of two random vectors has no rule; one factor must be a constant"
            )
        return self._by("scale", factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        """The quotient by a number or a constant tensor."""
        if isinstance(divisor, Moments):
            raise MissingRuleError(f"{type(self).__name__}: a division by a random vector has no rule")
        return self._by("scale", 1 / divisor)

    def __neg__(self) -> Self:
        """The negative."""
        return self._by("scale", -1.0)

    def _by(self, rule: str, *arguments: Any) -> Self:
        """Apply a rule."""
        if rule not in OPERATORS:
            import_module("mpgelu.rules")  # which enters them
        result: Self = OPERATORS[rule](self, *arguments)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse functions of torch, which plain torch modules call, and say what to use."""
        name = getattr(func, "__name__", str(func))
        remedy = _REMEDIES.get(name.strip("_"), "a rule of mpgelu.rules or a layer of mpgelu.layers")
        raise MissingRuleError(
            f"torch's {name} takes tensors, not {cls.__name__}; use {remedy}, or convert the whole torch module with "
            "mpgelu.from_torch"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say of methods of tensors that moments have no such method."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Tensor, name):
                message += f"; tensors have it, moments are changed by mpgelu.rules (see also .mean.{name})"
            raise AttributeError(message)
