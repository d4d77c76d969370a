"""What a built site must not have: raw roles or doctests, LaTeX outside maths, broken links, foreign assets.

Run ``python docs/hooks/check.py site``; ``make docs`` does so at the end of every build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_RAW = {
    "raw role": re.compile(r":(?:func|class|meth|math|mod|data|attr|exc):"),
    "LaTeX outside maths": re.compile(r"\\(?:operatorname|mathrm|mathbb|frac|sqrt|Phi|sum|qquad)(?![a-zA-Z])|\$\$"),
    "raw directive": re.compile(r"^\s*\.\. \w+::", re.MULTILINE),
    "unresolved reference": re.compile(r"\]\[mpgelu"),
}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """Identifiers, addresses and text of one page; text of formulas, code and scripts is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.addresses: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.quoted_doctest = False
        self._open: list[tuple[str, bool]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note identifiers and addresses, and whether text in here counts."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        for name in ("href", "src", "srcset"):
            if name in given and given.get("rel") != "canonical":
                self.addresses.append((tag, given[name].split()[0] if given[name].split() else ""))
        if tag == "blockquote" and sum(opened == tag for opened, _ in self._open) == 2:
            self.quoted_doctest = True  # Markdown takes >>> for a quotation of a quotation of a quotation
        if tag not in _VOID:
            silent = tag in {"code", "pre", "script", "style"} or "arithmatex" in given.get("class", "").split()
            self._open.append((tag, silent))

    def handle_endtag(self, tag: str) -> None:
        """Leave an element, and those in it that were left open."""
        if any(tag == opened for opened, _ in self._open):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Keep text that a reader sees as text."""
        if not any(silent for _, silent in self._open):
            self.text.append(data)


def problems(site: Path) -> Iterator[str]:
    """One line for everything that is wrong in a built site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no pages"
    for page in pages.values():
        name = page.path.relative_to(site)
        text = "".join(page.text)
        for kind, pattern in _RAW.items():
            for match in pattern.finditer(text):
                around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
                yield f"{name}: {kind}: ...{around}..."
        if page.quoted_doctest:
            yield f"{name}: a doctest that is not shown as code"
        if name.name != "404.html":  # its links are absolute, for wherever it is shown
            yield from (f"{name}: {problem}" for problem in _bad_addresses(page, pages))


def _bad_addresses(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for tag, address in page.addresses:
        parts = urlsplit(address)
        if parts.scheme == "data" or parts.scheme in {"mailto", "javascript"}:
            continue
        if parts.scheme or parts.netloc:
            if tag != "a":
                yield f"{tag} from another host: {address}"
            continue
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
        if target.is_dir():
            target /= "index.html"
        if not target.exists():
            yield f"{tag} leads nowhere: {address}"
        elif tag == "a" and parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            yield f"no such place on the page: {address}"


def main() -> None:
    """Check one site; exit code 1 if there is a problem."""
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "the site is whole")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
