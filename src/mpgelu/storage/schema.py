"""Validation of JSON from files against schemas, before any object is built from it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpgelu.errors import DataError

_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True)
class Optional:
    """A field of a schema that may be missing.

    Args:
        schema: Schema of the field if it is present.
        null: Whether its value may also be ``null``.
    """

    schema: Any
    null: bool = False


@dataclass(frozen=True)
class Either:
    """A schema that a value matches if it matches one of several.

    Args:
        schemas: The schemas.
    """

    schemas: tuple[Any, ...]


@dataclass(frozen=True)
class Count:
    """A whole number between bounds.

    Args:
        least: Smallest allowed number.
        most: Largest allowed number.
    """

    least: int = 0
    most: int = 2**63 - 1


def checked(value: Any, schema: Any, name: str) -> Any:
    """Return a value from a file if it matches a schema.

    A schema is one of the following. Fields that a mapping does not name are refused.

    - a type: ``object`` accepts anything, ``float`` every finite number, ``int`` does not accept ``true``;
    - a tuple of the allowed values;
    - a :class:`Count`: a whole number between bounds;
    - a list with the schema of every item; with two schemas or more, the list has as many items, one of each;
    - a mapping from field names to their schemas, in which ``str`` as a name stands for any other name;
    - an :class:`Optional` of one of these, or :class:`Either` of several.

    Args:
        value: The parsed JSON.
        schema: The schema.
        name: Name of the value in error messages.

    Raises:
        DataError: The value does not match; the message names the place.

    Example:
        >>> checked({"kind": "a", "sizes": [1, 2]}, {"kind": ("a", "b"), "sizes": [int]}, "the model")
        {'kind': 'a', 'sizes': [1, 2]}
        >>> checked({"kind": "c", "sizes": []}, {"kind": ("a", "b"), "sizes": [int]}, "the model")
        Traceback (most recent call last):
        mpgelu.errors.DataError: 'kind' of the model must be 'a' or 'b', got 'c'
    """
    if isinstance(schema, Optional):
        return value if schema.null and value is None else checked(value, schema.schema, name)
    fits = True
    if isinstance(schema, tuple):
        fits = any(type(value) is type(choice) and value == choice for choice in schema)
    elif isinstance(schema, Either):
        fits = any(_matches(value, choice) for choice in schema.schemas)
    elif isinstance(schema, Count):
        fits = schema.least <= _of(int, value, name) <= schema.most
    elif isinstance(schema, list):
        items = _of(list, value, name)
        if len(schema) > 1 and len(items) != len(schema):
            raise _wrong(value, f"a list of {len(schema)}", name)
        for item, wanted in zip(items, itertools.cycle(schema), strict=False):
            checked(item, wanted, f"an item of {name}")
    elif isinstance(schema, Mapping):
        _check_fields(_of(dict, value, name), schema, name)
    else:
        _of(schema, value, name)
    if not fits:
        raise _wrong(value, _words(schema), name)
    return value


def _matches(value: Any, schema: Any) -> bool:
    """Return whether a value matches a schema."""
    try:
        checked(value, schema, "")
    except DataError:
        return False
    return True


def _words(schema: Any) -> str:
    """Return a schema in words."""
    if isinstance(schema, tuple):
        return " or ".join(map(repr, schema))
    if isinstance(schema, Either):
        return " or ".join(map(_words, schema.schemas))
    if isinstance(schema, Count):
        return f"between {schema.least:,} and {schema.most:,}"
    if isinstance(schema, list):
        return f"a list, each item {_words(schema[0])}"
    return _WORDS[dict if isinstance(schema, Mapping) else schema]


def _check_fields(value: Mapping[str, Any], schema: Mapping[Any, Any], name: str) -> None:
    """Check every field of a mapping, and that none is missing or unknown."""
    for field, wanted in schema.items():
        if field is not str and field not in value and not isinstance(wanted, Optional):
            raise DataError(f"{name} lacks {field!r}")
    for field, part in value.items():
        if field not in schema and str not in schema:
            raise DataError(f"{name} has {_short(field)}, which this version does not know")
        checked(part, schema[field if field in schema else str], f"{_short(field)} of {name}")


def _of(wanted: type, value: Any, name: str) -> Any:
    """Return a value if it is of a type in the sense of JSON."""
    if wanted is float:
        fits = type(value) in (int, float) and abs(value) <= sys.float_info.max  # a whole number may exceed any float
    else:
        kind = list if type(value) is tuple else type(value)  # a tuple is a list to JSON
        fits = wanted in (object, kind)  # true is an int to Python, and not here
    if not fits:
        raise _wrong(value, _WORDS[wanted], name)
    return value


def _wrong(value: Any, wanted: str, name: str) -> DataError:
    """Return the error for a value that does not match."""
    return DataError(f"{name} must be {wanted}, got {_short(value)}")


def _short(value: Any) -> str:
    """Return a value in a form short enough for an error message."""
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = repr(value[: 2 * _SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "fields",
}
