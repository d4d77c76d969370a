"""The check of a built site finds what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest
from check import problems  # type: ignore[import-not-found, unused-ignore]


def site(folder: Path, body: str) -> list[str]:
    (folder / "index.html").write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    (folder / "other.html").write_text('<h2 id="there">There</h2>', encoding="utf-8")
    (folder / "image.svg").write_text("<svg/>", encoding="utf-8")
    return list(problems(folder))


@pytest.mark.parametrize(
    "body",
    [
        r'<span class="arithmatex">\(\operatorname{diag}\)</span>',
        '<a href="other.html#there">link</a> <img src="image.svg#only-light">',
        r"<pre><code>:func:`x` and \frac</code></pre>",
        '<a href="https://arxiv.org/abs/2211.13402">paper</a>',
        '<script>":func:"</script>',
        "<blockquote><p>said</p></blockquote>",
    ],
)
def test_a_whole_site_passes(tmp_path: Path, body: str) -> None:
    assert site(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("<p>see :func:`add`</p>", "raw role"),
        (r"<p>the \operatorname{diag} of it</p>", "LaTeX outside maths"),
        (r'<span class="arithmatex">\(x\)</span> and \frac12', "LaTeX outside maths"),
        ("<p>\n.. math:: x\n</p>", "raw directive"),
        ('<a href="missing.html">x</a>', "leads nowhere: missing.html"),
        ('<a href="other.html#nowhere">x</a>', "no such place on the page: other.html#nowhere"),
        ('<a href="#nowhere">x</a>', "no such place"),
        ('<img src="missing.png">', "leads nowhere: missing.png"),
        (
            "<blockquote><blockquote><blockquote><p>import x</p></blockquote></blockquote></blockquote>",
            "not shown as code",
        ),
        ('<script src="https://cdn.example/katex.js"></script>', "from another host"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, body: str, found: str) -> None:
    (problem,) = site(tmp_path, body)
    assert found in problem
    assert problem.startswith("index.html: ")


def test_an_empty_site_is_a_problem(tmp_path: Path) -> None:
    assert len(list(problems(tmp_path))) == 1
