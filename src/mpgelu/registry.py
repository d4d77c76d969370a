"""Registries that give types a name in files: layers, likelihoods, moments. Users register theirs in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from mpgelu.errors import DataError, InputError, closest

T = TypeVar("T")
Settings = Callable[[Any], Mapping[str, Any]]


class Registry(Generic[T]):
    """Types with a name each, and the arguments that build an equal value again.

    A description is what JSON can hold: ``{"kind": name, **arguments}``. Nothing but registered types is ever built
    from one, so a file cannot name code to run.

    Args:
        what: The word for such a value in errors, for example ``"layer"``.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._types: dict[str, Callable[..., T]] = {}
        self._named: dict[type, tuple[str, Settings]] = {}

    def register(self, *settings: str, read: Settings | None = None) -> Callable[[type], Any]:
        """Decorate a class, or call on one: ``registry.register("in_features")(Layer)``.

        Args:
            *settings: Names of constructor arguments that are attributes of the same name.
            read: A function from a value to its constructor arguments, for values whose attributes differ from them.
        """

        def add(cls: type) -> type:
            if cls.__name__ in self._types:
                raise InputError(f"there is a {self.what} called {cls.__name__} already; give yours another name")
            self._types[cls.__name__] = cls
            self._named[cls] = cls.__name__, read or (lambda value: {name: getattr(value, name) for name in settings})
            return cls

        return add

    def name(self, cls: type) -> str:
        """The name of a registered type.

        Raises:
            InputError: The type is not registered.
        """
        if cls not in self._named:
            raise InputError(
                f"{cls.__name__} is not a registered {self.what}; decorate the class with the register of its registry"
            )
        return self._named[cls][0]

    def describe(self, value: T) -> dict[str, Any]:
        """The name and the constructor arguments of a value, for :meth:`build`."""
        return {"kind": self.name(type(value)), **self._named[type(value)][1](value)}

    def type_of(self, name: object) -> Callable[..., T]:
        """The type of a name.

        Raises:
            DataError: There is none.
        """
        if not isinstance(name, str) or name not in self._types:
            hint = closest(name, self._types) if isinstance(name, str) else ""
            raise DataError(
                f"there is no {self.what} called {name!r}{hint}; import the module that registers it before loading"
            )
        return self._types[name]

    def build(self, description: Mapping[str, Any]) -> T:
        """The value that :meth:`describe` described.

        Raises:
            DataError: The kind is unknown or its arguments are not those of the type.
        """
        if not isinstance(description, Mapping):
            raise DataError(f"the description of a {self.what} must be fields, got {str(description)[:60]!r}")
        arguments = {name: value for name, value in description.items() if name != "kind"}
        make = self.type_of(description.get("kind"))
        try:
            return make(**arguments)
        except (TypeError, ValueError) as error:
            raise DataError(f"cannot build the {self.what} {description['kind']}: {error}") from error

    def __contains__(self, cls: object) -> bool:
        """Whether a type is registered."""
        return cls in self._named

    def __iter__(self) -> Iterator[str]:
        """The registered names."""
        return iter(self._types)
