"""What all tests share: the references beside this file, and the same random numbers whatever ran before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `import reference`: test folders are not packages


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
