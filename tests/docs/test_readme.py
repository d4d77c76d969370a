"""The README's commands print what it says, its pictures exist and its badges are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import badges  # type: ignore[import-not-found, unused-ignore]
import pytest

import mpgelu as mp
from command_line import Command

ROOT = Path(__file__).parents[2]

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[tuple[str, list[str]]]:
    """Every command of a console block with the lines that it is said to print."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    parts = [part.splitlines() for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(lines[0], lines[1:]) for lines in parts]


def pattern(lines: list[str]) -> str:
    """Any number stands for any number, and ``...`` for any lines."""
    masked = [".*" if line == "..." else re.sub(r"\d+(\\\.\d+)?", r"[0-9.e+]+", re.escape(line)) for line in lines]
    return r"\s*".join(masked)


def test_commands_print_what_the_readme_says(mpgelu: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    assert mpgelu("example", "data").code == 0
    assert len(commands()) == 2
    for command, lines in commands():
        name, *arguments = command.split()
        assert name == "mpgelu"
        result = mpgelu(*arguments)
        assert result.code == 0, result.err
        assert re.search(pattern(lines), result.err + result.out, re.DOTALL), result


def test_it_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 150
    addresses = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    local = [address for pair in addresses for address in pair if address and not address.startswith("http")]
    assert len(local) > 20
    assert [address for address in local if not (ROOT / address.partition("#")[0]).exists()] == []


def test_badges_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name, said in badges.said(project).items():
        assert (ROOT / "docs" / "images" / f"badge-{name}.svg").read_text(encoding="utf-8") == badges.badge(*said)
        assert f"docs/images/badge-{name}.svg" in README


def test_every_python_that_is_claimed_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    prefix = "Programming Language :: Python :: 3."
    claimed = [f"3.{line.removeprefix(prefix)}" for line in project["classifiers"] if line.startswith(prefix)]
    assert re.findall(r"3\.\d+", matrix) == claimed
    assert project["requires-python"] == f">={claimed[0]}"
    assert "- run: .ci/run\n" in workflow


def test_figures_are_small_and_come_in_pairs() -> None:
    images = list((ROOT / "docs" / "images").iterdir())
    drawn = {path.stem for path in (ROOT / "docs" / "figures").glob("*.py")} - {"make", "style"}
    assert {path.stem.rpartition("-")[0] for path in images if not path.name.startswith("badge-")} == drawn
    assert all(
        (path.with_name(f"{name}-dark.svg")).exists()
        for path in images
        if (name := path.name.removesuffix("-light.svg")) != path.name
    )
    assert max(path.stat().st_size for path in images) < 200_000
    assert sum(path.stat().st_size for path in images) < 3_000_000


def test_figures_that_move_show_every_frame_and_stand_still_for_those_who_ask() -> None:
    moving = [path for path in (ROOT / "docs" / "images").glob("*.svg") if "@keyframes" in path.read_text("utf-8")]
    assert {path.stem for path in moving} == {
        f"{name}-{page}" for name in ("growth", "sweep") for page in ("light", "dark")
    }
    for path in moving:
        text = path.read_text(encoding="utf-8")
        drawn = set(re.findall(r'<g id="frame-(\d+)-', text))
        assert set(re.findall(r"@keyframes frame-(\d+) ", text)) == drawn
        (still,) = re.findall(
            r"prefers-reduced-motion: reduce.*\[id\^=\"frame-(\d+)-\"\] { visibility: visible; } }", text
        )
        assert still in drawn


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    released = mp.__version__.partition(".dev")[0]
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f" {released}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()[2]
