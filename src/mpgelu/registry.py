"""Registries that map types to the names under which files store them.

Layers, likelihoods and types of moments each have a registry. User code registers its own types in the same way as
this package does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from mpgelu.errors import DataError, InputError, closest

T = TypeVar("T")
Settings = Callable[[Any], Mapping[str, Any]]


class Registry(Generic[T]):
    """A mapping between types, their names in files, and the constructor arguments that rebuild an equal value.

    A value is described by a dictionary that JSON can represent: ``{"kind": name, **arguments}``. Only registered
    types are ever constructed from such a description, so a file cannot name code to execute.

    Args:
        what: Singular noun for the registered values, used in error messages, for example ``"layer"``.

    Example:
        >>> from dataclasses import dataclass
        >>> shapes = Registry("shape")
        >>> @shapes.register("radius")
        ... @dataclass
        ... class Circle:
        ...     radius: float
        >>> shapes.describe(Circle(2.0))
        {'kind': 'Circle', 'radius': 2.0}
        >>> shapes.build({"kind": "Circle", "radius": 2.0})
        Circle(radius=2.0)
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._types: dict[str, Callable[..., T]] = {}
        self._named: dict[type, tuple[str, Settings]] = {}

    def register(self, *settings: str, read: Settings | None = None) -> Callable[[type], Any]:
        """Return a decorator that registers a class under its own name.

        It may also be called on an existing class: ``registry.register("in_features")(Layer)``.

        Args:
            *settings: Names of the constructor arguments that are attributes of the same name.
            read: A function from a value to its constructor arguments, for classes whose attributes have other names.

        Raises:
            InputError: A class of the same name is registered already.
        """

        def add(cls: type) -> type:
            if cls.__name__ in self._types:
                raise InputError(f"there is a {self.what} called {cls.__name__} already; give yours another name")
            self._types[cls.__name__] = cls
            self._named[cls] = cls.__name__, read or (lambda value: {name: getattr(value, name) for name in settings})
            return cls

        return add

    def name(self, cls: type) -> str:
        """Return the name of a registered type.

        Raises:
            InputError: The type is not registered.
        """
        if cls not in self._named:
            raise InputError(
                f"{cls.__name__} is not a registered {self.what}; decorate the class with the register of its registry"
            )
        return self._named[cls][0]

    def describe(self, value: T) -> dict[str, Any]:
        """Return the name and the constructor arguments of a value, as :meth:`build` takes them.

        Raises:
            InputError: The type of the value is not registered.
        """
        return {"kind": self.name(type(value)), **self._named[type(value)][1](value)}

    def type_of(self, name: object) -> Callable[..., T]:
        """Return the type that is registered under a name.

        Raises:
            DataError: No type is registered under this name.
        """
        if not isinstance(name, str) or name not in self._types:
            hint = closest(name, self._types) if isinstance(name, str) else ""
            raise DataError(
                f"there is no {self.what} called {name!r}{hint}; import the module that registers it before loading"
            )
        return self._types[name]

    def build(self, description: Mapping[str, Any]) -> T:
        """Construct the value that :meth:`describe` has described.

        Args:
            description: A mapping with the key ``"kind"`` and the constructor arguments.

        Raises:
            DataError: The kind is not registered, or its constructor does not accept the arguments, or has no use for
                the value of one; see :meth:`check`.
        """
        if not isinstance(description, Mapping):
            raise DataError(f"the description of a {self.what} must be fields, got {str(description)[:60]!r}")
        arguments = {name: value for name, value in description.items() if name != "kind"}
        make = self.type_of(description.get("kind"))
        try:
            made = make(**arguments)
        except (TypeError, ValueError) as error:
            raise DataError(f"cannot build the {self.what} {description['kind']}: {error}") from error
        self.check(made, arguments)
        return made

    def check(self, made: T, arguments: Mapping[str, Any]) -> None:
        """Check that a value has the arguments that it was constructed from; a constructor may take a text for a flag.

        Raises:
            DataError: The description of the value has another argument.
        """
        kind, held = self.name(type(made)), self.describe(made)
        for name, value in arguments.items():
            if list(held[name]) != value if isinstance(held.get(name), tuple) else held.get(name) != value:
                raise DataError(f"cannot build the {self.what} {kind}: its {name} cannot be {str(value)[:60]!r}")

    def __contains__(self, cls: object) -> bool:
        """Return whether a type is registered."""
        return cls in self._named

    def __iter__(self) -> Iterator[str]:
        """Iterate over the registered names."""
        return iter(self._types)
