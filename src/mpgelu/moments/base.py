"""The interface that all types of moments share: mean, marginal variance, covariance, and the protocol of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError

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
    """Mean and covariance of a random value, one for each batch index.

    Subclasses differ only in the structure of the covariance, and rules dispatch on the subclass. Sums, differences
    and products with known factors may be written with operators, which call :func:`mpgelu.rules.add` and
    :func:`mpgelu.rules.scale`. Plain functions of torch raise :class:`mpgelu.errors.MissingRuleError` and name the
    rule or layer to use.

    A random value is a vector of n features, unless a type supports more event dimensions: the shape of the mean is
    ``(*batch_shape, *event_shape)``, as in ``torch.distributions``.

    Attributes:
        mean: Expectation, ``(*batch, n)``.

    Example:
        >>> import torch, mpgelu
        >>> h = mpgelu.DiagonalMoments(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0]))
        >>> (2 * h + 1).mean, (2 * h + 1).stddev
        (tensor([3., 5.]), tensor([4., 6.]))
    """

    __array_ufunc__ = None  # numpy arrays leave `array + moments` to the moments
    mean: Tensor  # (*batch, n)

    if TYPE_CHECKING:  # a field in the subclass that holds it, a computed property in the others

        @property
        def variance(self) -> Tensor:
            """Marginal variances, the diagonal of the covariance, ``(*batch, n)``."""

        @property
        def covariance(self) -> Tensor:
            """Dense covariance matrices, ``(*batch, n, n)``; defined for vectors only."""

    @property
    def stddev(self) -> Tensor:
        """Marginal standard deviations, ``(*batch, n)``."""
        return self.variance.sqrt()

    @property
    def shape(self) -> torch.Size:
        """Shape of the mean: ``batch_shape`` followed by ``event_shape``."""
        return self.mean.shape

    @property
    def event_dims(self) -> int:
        """Number of trailing dimensions of the mean that form one random value: 1, a vector, unless a type has more."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions of the mean: one independent random value for each index."""
        return self.mean.shape[: self.mean.dim() - self.event_dims]

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one random value: ``(n,)`` for a vector, ``(channels, height, width)`` for an image."""
        return self.mean.shape[len(self.batch_shape) :]

    @classmethod
    def certain(cls, x: Tensor) -> Self:
        """Return the moments of a known input, whose covariance is zero.

        Args:
            x: Values, ``(*batch, n)``.
        """
        raise NotImplementedError

    @property
    def is_certain(self) -> bool:
        """Whether there is known to be no randomness, so that rules may return the plain function."""
        return False

    @property
    def features(self) -> int:
        """Length n of the last dimension, to which linear layers apply."""
        return self.mean.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the mean and the covariance."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Device of the mean and the covariance."""
        return self.mean.device

    def dim(self) -> int:
        """Number of dimensions of the mean."""
        return self.mean.dim()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same moments in another dtype or on another device; the arguments are those of ``Tensor.to``."""
        return self.replaced(lambda tensor, event, per_row: tensor.to(*args, **kwargs))

    def detach(self) -> Self:
        """Return the same moments without gradients.

        Detached moments have new sources of randomness: they may be added to, or concatenated with, only values that
        are computed from them.
        """
        return self.replaced(lambda tensor, event, per_row: tensor.detach())

    def __getitem__(self, index: Any) -> Self:
        """Return the moments of some batch indices.

        Args:
            index: Anything that indexes a tensor of shape ``batch_shape``. The event dimensions stay together; the
                moments of one feature are ``moments.mean[..., 0]`` and ``moments.variance[..., 0]``.

        Raises:
            IndexError: The index does not fit the batch dimensions.
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
        """Return moments of the same structure with every tensor replaced.

        Indexing, ``to`` and ``detach`` are implemented with this method, which each subclass defines.

        Args:
            function: Called as ``function(tensor, event, per_row)`` with a tensor, the number of its trailing
                dimensions that belong to one random value, and whether its leading dimensions are those of the batch
                (``False`` for a tensor that all rows share). It returns the replacement.
        """
        raise MissingRuleError(f"{type(self).__name__} does not say how to replace its tensors; define replaced")

    def _describe(self) -> str:
        """Structure of the covariance in words, for ``repr``."""
        return ""

    def __repr__(self) -> str:
        """Return shapes and structure; values are omitted because a batch of covariances does not fit a line."""
        words = [f"mean {tuple(self.shape)}", self._describe(), str(self.dtype).removeprefix("torch.")]
        if self.device.type != "cpu":
            words.append(str(self.device))
        return f"{type(self).__name__}({', '.join(word for word in words if word)})"

    # Operators

    def __add__(self, other: Any) -> Self:
        """Return the moments of the sum with other moments or with a constant; see :func:`mpgelu.rules.add`."""
        return self._by("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        """Return the moments of the difference; see :func:`mpgelu.rules.add`."""
        return self._by("add", other, -1.0)

    def __rsub__(self, other: Any) -> Self:
        """Return the moments of a constant minus this value."""
        return self._by("subtract_from", other)

    def __mul__(self, factor: Any) -> Self:
        """Return the moments of the product with a number or a constant tensor; see :func:`mpgelu.rules.scale`.

        Raises:
            MissingRuleError: The factor is random too.
        """
        if isinstance(factor, Moments):
            raise MissingRuleError(
                f"{type(self).__name__}: the product of two random vectors has no rule; one factor must be a constant"
            )
        return self._by("scale", factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        """Return the moments of the quotient by a number or a constant tensor.

        Raises:
            MissingRuleError: The divisor is random.
        """
        if isinstance(divisor, Moments):
            raise MissingRuleError(f"{type(self).__name__}: a division by a random vector has no rule")
        return self._by("scale", 1 / divisor)

    def __neg__(self) -> Self:
        """Return the moments of the negative."""
        return self._by("scale", -1.0)

    def _by(self, rule: str, *arguments: Any) -> Self:
        """Apply the rule that :mod:`mpgelu.rules` has entered under a name."""
        if rule not in OPERATORS:
            import_module("mpgelu.rules")  # which enters them
        result: Self = OPERATORS[rule](self, *arguments)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reject functions of torch, which plain modules call, with an error that names the rule or layer to use."""
        name = getattr(func, "__name__", str(func))
        remedy = _REMEDIES.get(name.strip("_"), "a rule of mpgelu.rules or a layer of mpgelu.layers")
        raise MissingRuleError(
            f"torch's {name} takes tensors, not {cls.__name__}; use {remedy}, or convert the whole torch module with "
            "mpgelu.from_torch"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an error that points to :mod:`mpgelu.rules` if the attribute is one of ``Tensor``."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Tensor, name):
                message += f"; tensors have it, moments are changed by mpgelu.rules (see also .mean.{name})"
            raise AttributeError(message)


def moments_of(caller: str, moments: type[Moments] | Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return the function from known features to moments that an argument ``moments`` stands for.

    Args:
        caller: Name of the function that the error message starts with.
        moments: A type of moments, which stands for its :meth:`Moments.certain`, or the function itself.

    Raises:
        InputError: The argument is neither.
    """
    if isinstance(moments, type) or not callable(moments):
        check_moment_type(caller, moments)
        return cast(type[Moments], moments).certain
    return moments


def check_moment_type(caller: str, moments: object) -> None:
    """Raise unless an argument ``moments`` is a type of moments, other than the abstract one.

    Raises:
        InputError: It is not.
    """
    if not (isinstance(moments, type) and issubclass(moments, Moments) and moments is not Moments):
        came = moments.__name__ if isinstance(moments, type) else repr(moments)
        raise InputError(f"{caller}: moments must be a type such as mpgelu.DiagonalMoments, got {came}")
