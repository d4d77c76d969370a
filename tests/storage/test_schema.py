"""What a description may look like, and what is said of one that does not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mpgelu import DataError
from mpgelu.storage.schema import Count, Either, Optional, checked

SCHEMA = {
    "size": int,
    "scale": float,
    "kind": ("a", "b", None),
    "names": [str],
    "deep": {str: [bool]},
    "new": Optional(str),
    "rare": Optional([int], null=True),
    "rest": object,
}
GOOD: dict[str, Any] = {
    "size": 3,
    "scale": 1,
    "kind": "b",
    "names": ["x"],
    "deep": {"any": [True]},
    "rare": None,
    "rest": {"x": [1, None]},
}


@pytest.mark.parametrize("change", [{}, {"scale": -1.5}, {"new": "y"}, {"rare": [1]}, {"names": []}, {"kind": None}])
def test_what_fits_comes_back(change: dict[str, Any]) -> None:
    value = json.loads(json.dumps(GOOD | change))
    assert checked(value, SCHEMA, "it") is value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": True}, "'size' of it must be a whole number, got True"),
        ({"size": 1.0}, "'size' of it must be a whole number, got 1.0"),
        ({"scale": float("nan")}, "'scale' of it must be a finite number, got nan"),
        ({"scale": "1"}, "'scale' of it must be a finite number, got '1'"),
        ({"kind": "c"}, "'kind' of it must be 'a' or 'b' or None, got 'c'"),
        ({"kind": ["a"]}, "'kind' of it must be 'a' or 'b' or None, got a list of 1"),
        ({"names": "x"}, "'names' of it must be a list, got 'x'"),
        ({"names": ["x", 1]}, "an item of 'names' of it must be a text, got 1"),
        ({"deep": {"any": [0]}}, "an item of 'any' of 'deep' of it must be true or false, got 0"),
        ({"deep": [1]}, "'deep' of it must be fields, got a list of 1"),
        ({"new": None}, "'new' of it must be a text, got None"),
        ({"odd": 1}, "it has 'odd', which this version does not know"),
        ({"names": "x" * 1000}, "'names' of it must be a list, got '" + "x" * 59 + "..."),
    ],
    ids=range(13),
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        checked(GOOD | change, SCHEMA, "it")
    assert str(caught.value) == message


def test_what_is_missing_is_named() -> None:
    with pytest.raises(DataError, match=r"^it lacks 'names'$"):
        checked({name: value for name, value in GOOD.items() if name != "names"}, SCHEMA, "it")


@pytest.mark.parametrize(
    ("value", "schema", "message"),
    [
        (3, Either((int, [int])), None),
        ([3], Either((int, [int])), None),
        (-math.inf, Either((float, (-math.inf,))), None),
        (["a", 1.5], [str, float], None),
        (5, Count(1, 5), None),
        ("3", Either((int, [int])), "it must be a whole number or a list, each item a whole number, got '3'"),
        (math.nan, Either((float, (-math.inf,))), "it must be a finite number or -inf, got nan"),
        (["a"], [str, float], "it must be a list of 2, got a list of 1"),
        (["a", "b"], [str, float], "an item of it must be a finite number, got 'b'"),
        (6, Count(1, 5), "it must be between 1 and 5, got 6"),
        (True, Count(), "it must be a whole number, got True"),
        (
            0,
            Either((Count(1, 5), [Count(7, 9)])),
            "it must be between 1 and 5 or a list, each item between 7 and 9, got 0",
        ),
        (0, Either(({"a": int}, str)), "it must be fields or a text, got 0"),
        (10**400, float, "it must be a finite number, got 1" + "0" * 59 + "..."),
    ],
    ids=range(14),
)
def test_alternatives_counts_and_pairs(value: Any, schema: Any, message: str | None) -> None:
    if message is None:
        assert checked(value, schema, "it") is value
        return
    with pytest.raises(DataError) as caught:
        checked(value, schema, "it")
    assert str(caught.value) == message
