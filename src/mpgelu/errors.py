"""The exceptions that this library raises.

All of them derive from :class:`MPGELUError`, and additionally from the builtin exception that Python code would raise
in the same situation, so both ``except MPGELUError`` and ``except ValueError`` work. Every message names the function
and the argument, what was expected, what was received, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MPGELUError(Exception):
    """Base class of all exceptions that this library raises deliberately."""


class InputError(MPGELUError, ValueError):
    """An argument has the wrong shape, type or value."""


class MissingRuleError(MPGELUError, TypeError):
    """An operation has no rule for the given type of moments."""


class ConversionError(MPGELUError, ValueError):
    """A torch module contains a part that cannot be converted to a network of moments."""


class DataError(MPGELUError):
    """A file or a data set could not be found, downloaded, read or verified."""


class TrainingError(MPGELUError):
    """Training cannot continue, for example because the loss stays non-finite after repeated recoveries."""


def closest(word: str, options: Iterable[str]) -> str:
    """Return the hint "; did you mean ...?" for a misspelt word.

    Args:
        word: The word that was given.
        options: The words that would have been valid.

    Returns:
        The hint with the most similar option, or an empty string if none is similar. Case is ignored.

    Example:
        >>> closest("gelU", ["GELU", "Tanh"])
        "; did you mean 'GELU'?"
        >>> closest("softmax", ["GELU", "Tanh"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    matches = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""
