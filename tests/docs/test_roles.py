"""Docstrings with Sphinx roles become Markdown with links and formulas."""

from __future__ import annotations

import re
from pathlib import Path

from roles import function_of, markdown_of  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).parents[2]


def convert(text: str) -> str:
    return str(markdown_of(text, {"add": "mpgelu.rules.add.add", "a.B.c": "mpgelu.a.B.c"}.get))


def test_names_become_links_or_code() -> None:
    link = '<autoref optional identifier="mpgelu.rules.add.add"><code>add</code></autoref>'
    assert convert("see :func:`add`.") == f"see {link}."
    assert convert(":class:`Unknown`") == "<code>Unknown</code>"
    assert "<code>c</code>" in convert(":meth:`~a.B.c`")
    assert convert(":func:`sum of two <add>`") == link.replace("<code>add", "<code>sum of two")


def test_a_function_is_found_behind_the_module_of_its_name() -> None:
    paths = {"mpgelu.rules.add", "mpgelu.rules.add.add", "mpgelu.rules.normalise", "mpgelu.rules.normalise.layer_norm"}
    assert function_of("mpgelu.rules.add", paths) == "mpgelu.rules.add.add"
    assert function_of("mpgelu.rules.normalise", paths) == "mpgelu.rules.normalise"
    assert function_of("mpgelu.rules.normalise.layer_norm", paths) == "mpgelu.rules.normalise.layer_norm"


def test_formulas_become_dollars() -> None:
    assert convert(r"of :math:`k = \Phi(m /" + "\n    " + r"\sqrt v)` here") == r"of $k = \Phi(m / \sqrt v)$ here"
    text = "First.\n\n    .. math:: a + b\n        + c\n\n    Then."
    assert convert(text) == "First.\n\n\n    $$\n    a + b\n    + c\n    $$\n\n    Then."
    assert convert(".. math::\n\n    a = b\n\nThen.") == "\n$$\na = b\n$$\n\nThen."


def test_an_example_becomes_a_section_of_doctests() -> None:
    assert convert("Add.\n\n    Example:\n        >>> 1 + 1\n        2") == (
        "Add.\n\n    Examples:\n        >>> 1 + 1\n        2"
    )
    assert convert("Example: one of these") == "Example: one of these"


def test_plain_text_stays() -> None:
    text = "``code``, a ratio 1:2, a :word: and `one`."
    assert convert(text) == text


def test_no_role_of_the_package_is_left() -> None:
    found = 0
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found += len(re.findall(r":(?:func|class|meth|math|mod|data):`", text))
        assert not re.search(r":(?:func|class|meth|math|mod|data|attr|exc|obj|ref|doc):`|\.\. \w+::", convert(text)), (
            path
        )
    assert found > 100  # there is something to convert
