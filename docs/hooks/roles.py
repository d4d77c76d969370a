"""Docstrings are written with Sphinx roles; the site is Markdown. This turns one into the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

_ROLE = re.compile(r":(?P<role>class|func|meth|mod|data|attr|exc|math):`(?P<body>[^`]+)`")
_TITLED = re.compile(r"(?P<title>.+?)\s*<(?P<target>[^>]+)>$", re.DOTALL)
_DISPLAYED = re.compile(r"^(?P<indent>[ \t]*)\.\. math::[ \t]*(?P<rest>.*)$")

_EXAMPLE = re.compile(r"^([ \t]*)Example:[ \t]*$", re.MULTILINE)

Resolve = Callable[[str], str | None]


def markdown_of(text: str, resolve: Resolve) -> str:
    """A docstring as Markdown.

    Args:
        text: With roles such as ``:func:`add``` and ``.. math::`` blocks.
        resolve: Full path of a name, or ``None`` if the name is not documented, which then is shown as code.
    """
    text = _EXAMPLE.sub(r"\1Examples:", _displayed(text))  # griffe reads only the plural as a section of doctests
    return _ROLE.sub(lambda match: _inline(match["role"], match["body"], resolve), text)


def function_of(path: str, paths: set[str]) -> str:
    """The function that has the name of its module, as ``mpgelu.rules.add.add`` has; for all else the path itself."""
    function = f"{path}.{path.rpartition('.')[2]}"
    return function if function in paths else path


def _inline(role: str, body: str, resolve: Resolve) -> str:
    words = " ".join(body.split())
    if role == "math":
        return f"${words}$"
    titled = _TITLED.match(words)
    target = (titled["target"] if titled else words).removeprefix("~")
    title = titled["title"] if titled else target.rpartition(".")[2] if words.startswith("~") else words
    code = f"<code>{escape(title)}</code>"
    path = resolve(target)
    return code if path is None else f'<autoref optional identifier="{escape(path)}">{code}</autoref>'


def _displayed(text: str) -> str:
    """Every ``.. math::`` block as ``$$ ... $$`` in a paragraph of its own."""
    lines, done = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        match = _DISPLAYED.match(line)
        if match is None:
            done.append(line)
            continue
        indent, formula = match["indent"], [match["rest"].strip()]
        while lines and (not lines[0].strip() or _width(lines[0]) > len(indent)):
            formula.append(lines.pop(0).strip())
        written = [part for part in formula if part]
        done += ["", *(indent + part for part in ("$$", *written, "$$")), ""]
    return "\n".join(done)


def _width(line: str) -> int:
    return len(line) - len(line.lstrip())
