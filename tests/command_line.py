"""What a run of the command line leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    code: int | str | None
    out: str
    err: str


Command = Callable[..., Result]
