"""The programs that build the site are not part of the package; tests import them from where they are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "hooks"))
