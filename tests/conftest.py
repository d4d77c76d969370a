"""What all tests share: the references beside this file, and the same random numbers whatever ran before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpgelu import native

sys.path.insert(0, str(Path(__file__).parent))  # for `import reference`: test folders are not packages


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch"])
def formulas(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test twice: with the compiled float32 kernels and with the formulas in torch."""
    if request.param == "torch":
        with native.disabled():
            yield
    elif native.available():
        yield
    else:
        pytest.skip("no native kernels on this machine")
