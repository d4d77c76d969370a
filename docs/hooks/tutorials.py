"""Tutorials are Python scripts. This runs one, cell by cell, and writes the page with what it printed and drew.

A line ``# %%`` starts a cell of code and ``# %% [markdown]`` one of text, as editors know it. A setting
``steps = 400  # smoke: 5`` is 5 when the tutorials are tried out, ``# %% hidden`` keeps a cell off the page.

Run ``python docs/hooks/tutorials.py docs/tutorials/1_table.py out/`` for one page.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "figures"
sys.path.insert(0, str(FIGURES))

_CELL = re.compile(r"^# %%(?: (?P<kind>\[markdown\]|hidden))?[ \t]*$")
_SETTING = re.compile(r"^(?P<name>\s*[\w, ]+ = ).*?  # smoke: (?P<smoke>.*)$", re.MULTILINE)
_SETTING_COMMENT = re.compile(r"  # (?:smoke: .*|fmt: skip)$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A part of a tutorial: text, code, or code that is not shown."""

    kind: str
    source: str
    line: int

    @property
    def shown(self) -> str:
        """The source as the page has it."""
        return _SETTING_COMMENT.sub("", self.source)


def cells(script: str) -> list[Cell]:
    """The cells of a script in percent format, without empty ones."""
    found: list[Cell] = []
    kind, first, lines = "hidden", 1, list[str]()
    for number, line in enumerate([*script.splitlines(), "# %%"], start=1):
        match = _CELL.match(line)
        if match is None:
            lines.append(line)
            continue
        if "".join(lines).strip():
            found.append(_cell(kind, lines, first))
        kind, first, lines = {None: "code", "hidden": "hidden", "[markdown]": "text"}[match["kind"]], number + 1, []
    return found


def _cell(kind: str, lines: list[str], first: int) -> Cell:
    if kind == "text":
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    return Cell(kind, "\n".join(lines).strip("\n"), first + next(i for i, line in enumerate(lines) if line.strip()))


def smoke(script: str) -> str:
    """The script with its small settings."""
    return _SETTING.sub(lambda match: match["name"] + match["smoke"], script)


def page_of(script: Path, folder: Path, *, quick: bool = False) -> str:
    """Run a tutorial and return its page as Markdown.

    Args:
        script: In percent format.
        folder: Figures are written here, one SVG file for light pages and one for dark ones.
        quick: Take the small settings.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import style

    style.use()
    plt.close("all")  # what others left open is not this tutorial's
    text = script.read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "__main__"}
    page: list[str] = []
    number = 0
    for cell in cells(smoke(text) if quick else text):
        if cell.kind == "text":
            page.append(cell.source)
            continue
        printed = _run(cell, scope, script)
        if cell.kind == "code":
            page.append(f"```python\n{cell.shown}\n```")
        if printed.strip():
            page.append(f'<div class="result" markdown>\n\n```text\n{printed.rstrip()}\n```\n\n</div>')
        for figure in map(plt.figure, plt.get_fignums()):
            number += 1
            page.append(style.image(style.save(figure, folder, f"{script.stem}_{number}"), style.described(figure)))
        plt.close("all")
    return "\n\n".join(page) + "\n"


def _run(cell: Cell, scope: dict[str, Any], script: Path) -> str:
    """Run one cell, with the lines it has in the file, and return what it printed."""
    tree = ast.increment_lineno(ast.parse(cell.source), cell.line - 1)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(tree, str(script), "exec"), scope)
    return output.getvalue()


def main() -> None:
    """Write one page and its figures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    page = page_of(given.script, given.folder, quick=given.smoke)
    (given.folder / f"{given.script.stem}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
