"""Badges that are true: what they say is read from ``pyproject.toml``, and no other host is asked to draw them.

Run ``python docs/hooks/badges.py`` to write them into ``docs/images``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {text}">
<clipPath id="r"><rect width="{width}" height="20" rx="4"/></clipPath>
<g clip-path="url(#r)"><rect width="{left}" height="20" fill="#47525f"/>
<rect x="{left}" width="{right}" height="20" fill="#2f7fc1"/></g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{label_at}" y="14">{label}</text><text x="{text_at}" y="14">{text}</text></g></svg>
"""


def said(project: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Name, label and text of every badge."""
    prefix = "Programming Language :: Python :: 3."
    minors = sorted(
        int(line.removeprefix(prefix)) for line in project["project"]["classifiers"] if line.startswith(prefix)
    )
    strict = project["tool"]["mypy"]["strict"]
    return {
        "python": ("python", f"3.{minors[0]} to 3.{minors[-1]}"),
        "licence": ("licence", project["project"]["license"]),
        "types": ("types", "mypy --strict" if strict else "mypy"),
    }


def badge(label: str, text: str) -> str:
    """One badge as SVG."""
    left, right = 7 * len(label) + 12, 7 * len(text) + 12
    return _BADGE.format(
        label=label, text=text, left=left, right=right, width=left + right, label_at=left / 2, text_at=left + right / 2
    )


def main() -> None:
    """Write every badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name, (label, text) in said(project).items():
        (ROOT / "docs" / "images" / f"badge-{name}.svg").write_text(badge(label, text), encoding="utf-8")


if __name__ == "__main__":
    main()
