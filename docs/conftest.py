"""The pages here are doctested; the programs beside them are run by ``tests/docs`` and by ``make docs``."""

from __future__ import annotations

from pathlib import Path

import pytest

collect_ignore_glob = ["*.py"]


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every page in an empty folder, since examples write files."""
    monkeypatch.chdir(tmp_path)
