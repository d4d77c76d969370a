"""The errors this library raises, so that callers can catch them apart from Python's own.

Every message names the function and the argument, what was wanted, what came, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MPGELUError(Exception):
    """Base class of every error raised on purpose by this library."""


class InputError(MPGELUError, ValueError):
    """An argument has the wrong shape, type or value."""


class MissingRuleError(MPGELUError, TypeError):
    """An operation has no rule for this kind of moments."""


class ConversionError(MPGELUError, ValueError):
    """A torch module has a part that cannot be turned into moments."""


class DataError(MPGELUError):
    """A data set could not be found, downloaded, read or trusted."""


class TrainingError(MPGELUError):
    """Training cannot go on, for example because the loss stays non-finite."""


def closest(word: str, options: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the option most like a word, or nothing."""
    by_lower = {option.lower(): option for option in options}
    matches = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""
