"""How every figure of the project looks. One drawing gives two files: ink on a light page, and chalk on a dark one."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, VIOLET, GOLD = "#2f7fc1", "#e8743b", "#2a9d76", "#d3537a", "#8161c9", "#c9962b"
INK, MUTED, GRID, PAPER = "#1d2733", "#6b7785", "#d9dee5", "#fefefe"
_DARK = {INK: "#e6ebf1", MUTED: "#9aa7b5", GRID: "#39424f", PAPER: "#1e2129"}

_SETTINGS = {
    "figure.figsize": (7.2, 3.6),
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "savefig.dpi": 150,
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, PINK, VIOLET, GOLD]),
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Motion:
    """How a figure moves: artists whose ``gid`` begins with ``frame-3-`` are visible in frame 3, all others always.

    Args:
        order: Frames in the order in which they are shown, over and over.
        seconds: Time for which each is shown.
        still: Frame for readers who have asked their system for less motion, and for paper.
    """

    order: Sequence[int]
    seconds: float
    still: int

    @property
    def style(self) -> str:
        """The rules of CSS that show one frame after the other."""
        whole = self.seconds * len(self.order)
        rules = ['[id^="frame-"] { visibility: hidden; }']
        for frame in sorted(set(self.order)):
            places = [place for place, shown in enumerate(self.order) if shown == frame]
            steps = ["0% { visibility: hidden; }"] if places[0] else []
            for place in places:
                start, end = (100 * at / len(self.order) for at in (place, place + 1))
                steps += [f"{start:.3f}% {{ visibility: visible; }}", f"{end:.3f}% {{ visibility: hidden; }}"]
            rules.append(f"@keyframes frame-{frame} {{ {' '.join(steps)} }}")
            playing = f"animation: frame-{frame} {whole:g}s step-end infinite;"
            rules.append(f'[id^="frame-{frame}-"] {{ {playing} }}')
        rules.append(
            "@media (prefers-reduced-motion: reduce), print { "
            f'[id^="frame-"] {{ animation: none; }} [id^="frame-{self.still}-"] {{ visibility: visible; }} }}'
        )
        return "\n".join(rules)


def use() -> None:
    """Draw like this from now on."""
    mpl.rcdefaults()
    mpl.rcParams.update(_SETTINGS)


def save(figure: Figure, folder: Path, name: str, motion: Motion | None = None) -> str:
    """Write ``name-light.svg`` and ``name-dark.svg``; the same bytes for the same figure. Returns the name."""
    written = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    light = re.sub(r"<metadata>.*?</metadata>\s*", "", written.getvalue(), flags=re.DOTALL)
    light = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"\d+\.\d{3,}", _rounded, path[0]), light)
    if motion is not None:
        light = light.replace("<defs>", f"<style>\n{motion.style}\n</style>\n <defs>", 1)
    dark = re.sub("|".join(_DARK), lambda match: _DARK[match[0]], light)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-light.svg").write_text(light, encoding="utf-8")
    (folder / f"{name}-dark.svg").write_text(dark, encoding="utf-8")
    return name


def _rounded(number: re.Match[str]) -> str:
    """To a hundredth of a point, which nobody can see: it halves the file."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def described(figure: Figure) -> str:
    """Words for those who cannot see it: the titles and labels of a figure."""
    titles = [figure.get_suptitle(), *(a.get_title(loc) for a in figure.axes for loc in ("left", "center"))]
    return "; ".join(title.replace("\n", " ") for title in titles if title) or "Figure"


def image(path: str, alternative: str) -> str:
    """Markdown that shows the light file on a light page and the dark file on a dark one."""
    text = alternative.replace("[", "(").replace("]", ")")
    return f"![{text}]({path}-light.svg#only-light)\n![{text}]({path}-dark.svg#only-dark)"
