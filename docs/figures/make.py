"""Draw every figure of the documentation, or those named: ``python docs/figures/make.py bands``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import style

IMAGES = HERE.parent / "images"


def main() -> None:
    """Write a light and a dark SVG file for each figure into ``docs/images``."""
    names = sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.py") if path.stem not in {"make", "style"})
    for name in names:
        style.use()
        module = importlib.import_module(name)
        style.save(module.draw(), IMAGES, name, getattr(module, "MOTION", None))
        size = (IMAGES / f"{name}-light.svg").stat().st_size
        print(f"{name}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
