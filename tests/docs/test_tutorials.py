"""The tutorials run, with small settings, and their pages have what they print and draw."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import pytest
import tutorials  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).parents[2]

SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


def test_there_are_seven() -> None:
    assert len(SCRIPTS) == 7


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_smoke(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with mpl.rc_context():
        page = tutorials.page_of(script, tmp_path, quick=True)
    figures = re.findall(r"\((\S+-light\.svg)#only-light\)", page)
    assert page.startswith("# ")
    assert "```text\n" in page
    assert figures
    assert "# smoke" not in page
    for name in figures:
        light, dark = tmp_path / name, tmp_path / name.replace("-light", "-dark")
        assert light.stat().st_size == dark.stat().st_size < 400_000
        assert light.read_text(encoding="utf-8") != dark.read_text(encoding="utf-8")


def test_cells_and_settings(tmp_path: Path) -> None:
    script = tmp_path / "made_up.py"
    script.write_text(
        "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %% hidden\nsecret = 1\n\n"
        "# %%\nsteps = 400  # smoke: 3\nprint(steps, secret)\n",
        encoding="utf-8",
    )
    shown = "# Title\n\nText.\n\n```python\nsteps = 400\nprint(steps, secret)\n```\n\n"
    with mpl.rc_context():
        assert tutorials.page_of(script, tmp_path).startswith(shown)
        assert "400 1" in tutorials.page_of(script, tmp_path)
        assert "\n3 1\n" in tutorials.page_of(script, tmp_path, quick=True)


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 1\nraise ValueError(x)\n", encoding="utf-8")
    with mpl.rc_context(), pytest.raises(ValueError, match="1") as caught:
        tutorials.page_of(script, tmp_path)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (script, 6)
