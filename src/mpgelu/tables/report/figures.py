"""The figures of the report, each with a caption and with a description for readers who cannot see it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from mpgelu.tables.evaluation import Evaluation, compact, shown
from mpgelu.tables.report.groups import Group

INK, GREY, BLUE, ORANGE, RED = "#26323d", "#8a97a3", "#2a6fb0", "#dd8a2e", "#c8402f"
_WIDTH, _HEIGHT = 4.9, 3.6  # inches; the text stays readable at the width of a phone
_MOST_DOTS = 300
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#b9c2ca",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ecef",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text instead of paths: smaller, and searchable
    "svg.hashsalt": "mpgelu",  # makes the file reproducible
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # names of columns may contain dollar signs
}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Picture:
    """A figure in the form that the page includes.

    Args:
        title: Title of a few words.
        caption: What the figure shows and how to read it, in one or two sentences.
        description: Description of what is visible, for readers who cannot see it.
        source: The image as a data URL, which needs no network.
    """

    title: str
    caption: str
    description: str
    source: str


def predicted_and_actual(evaluation: Evaluation, target: str, level: float) -> Picture:
    """Draw predicted against actual values, with the interval of each row.

    Args:
        evaluation: Evaluation of the test rows; at most 300 of them are drawn.
        target: Name of the target.
        level: Probability of the intervals.
    """
    rows = _sample(len(evaluation.actual))
    actual, mean = evaluation.actual[rows], evaluation.mean[rows]
    lower, upper, inside = evaluation.lower[rows], evaluation.upper[rows], evaluation.inside[rows]
    with _drawing() as (axes, drawn):
        for chosen, colour, label in ((inside, BLUE, "inside its interval"), (~inside, RED, "outside")):
            axes.vlines(actual[chosen], lower[chosen], upper[chosen], color=colour, alpha=0.3, linewidth=1)
            axes.scatter(actual[chosen], mean[chosen], s=9, color=colour, label=label, zorder=3, linewidths=0)
        axes.axline((float(actual.mean()), float(actual.mean())), slope=1, color=INK, linewidth=0.8, zorder=2)
        margin = 0.04 * float(np.ptp(actual)) or 1.0
        axes.set(xlabel=f"actual {target}", ylabel="predicted", xlim=(actual.min() - margin, actual.max() + margin))
        axes.legend(loc="upper left", handletextpad=0.2)
    some = "" if len(rows) == len(evaluation.actual) else f" Shown are {len(rows)} rows drawn at random."
    missed = int(np.sum(~evaluation.inside))
    varies = np.ptp(evaluation.actual) > 0 and np.ptp(evaluation.mean) > 0
    correlation = float(np.corrcoef(evaluation.actual, evaluation.mean)[0, 1]) if varies else float("nan")
    return Picture(
        "Predicted and actual",
        f"Each dot is a row and its bar the {_percent(level)} interval. On the diagonal the prediction is exact; a bar "
        f"that does not reach the diagonal missed (red: {missed:,} of {len(evaluation.actual):,}).{some}",
        f"Scatter plot of predicted against actual {target} with {_percent(level)} intervals; their correlation is "
        f"{shown(correlation, 2)}; {missed} of {len(evaluation.actual)} intervals miss.",
        drawn.source,
    )


def calibration(evaluation: Evaluation, calibrated: Array | None) -> Picture:
    """Draw the observed coverage of intervals against their nominal level.

    Args:
        evaluation: Evaluation of the test rows.
        calibrated: Observed coverage of the calibrated intervals at :data:`LEVELS`, if there are such.
    """
    observed = coverage_by_level(evaluation)
    band = _band(LEVELS, len(evaluation.pit))
    with _drawing() as (axes, drawn):
        axes.fill_between(100 * LEVELS, 100 * band[0], 100 * band[1], color="#e3e7ea", label="chance", zorder=1)
        axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8)
        axes.plot(100 * LEVELS, 100 * observed, color=BLUE, linewidth=2, label="predictive distribution")
        if calibrated is not None:
            axes.plot(100 * LEVELS, 100 * calibrated, color=ORANGE, linewidth=2, label="calibrated intervals")
        axes.set(xlabel="promised coverage, %", ylabel="observed coverage, %", xlim=(0, 100), ylim=(0, 100))
        axes.legend(loc="upper left")
    at = {level: float(np.interp(level, LEVELS, observed)) for level in (0.5, 0.8, 0.95)}
    listed = ", ".join(f"{_percent(value)} observed at {_percent(level)} promised" for level, value in at.items())
    return Picture(
        "Does it keep its promises?",
        "When the model promises 80 %, it should be right 80 % of the time: the line should follow the diagonal, "
        "within the grey band of chance. Below it the model is too sure, above it too cautious.",
        f"Calibration curve: {listed}.",
        drawn.source,
    )


def ranks(evaluation: Evaluation) -> Picture:
    """Draw a histogram of the probability integral transform F(y) of the actual values.

    F is the predictive distribution function of a row. The transform is uniform if the model is calibrated.

    Args:
        evaluation: Evaluation of the test rows.
    """
    bins = 20 if len(evaluation.pit) >= 400 else 10
    counts, edges = np.histogram(evaluation.pit, bins, (0, 1))
    shares = 100 * counts / len(evaluation.pit)
    low, high = (float(end[0]) for end in _band(np.array([1 / bins]), len(evaluation.pit), bins))
    with _drawing() as (axes, drawn):
        axes.axhspan(100 * low, 100 * high, color="#e3e7ea", zorder=0.5)
        axes.bar(edges[:-1], shares, width=0.92 / bins, align="edge", color=BLUE, alpha=0.85)
        axes.axhline(100 / bins, color=INK, linewidth=0.8)
        axes.set(xlabel="predicted probability of a lower value", ylabel="rows, %", xlim=(0, 1))
        axes.grid(visible=False, axis="x")
    return Picture(
        "Where the actual values fell",
        "Every row's actual value, placed within its predicted distribution: 0 is below all that was thought possible, "
        "1 above. Flat is right, within the grey band of chance. A valley means too sure, a hill too cautious, a slope "
        "that predictions lean to one side.",
        f"Histogram in {bins} bins, of which each should hold {_percent(1 / bins)} of the rows; from the lowest to the "
        f"highest they hold {', '.join(f'{share:.0f}' for share in shares)} percent.",
        drawn.source,
    )


def coverage_by_width(evaluation: Evaluation, level: float) -> Picture:
    """Draw the observed coverage in groups of rows, from the narrowest intervals to the widest.

    Args:
        evaluation: Evaluation of the test rows, in up to eight groups of equal size.
        level: Probability of the intervals.
    """
    width = evaluation.upper - evaluation.lower
    groups = np.array_split(np.argsort(width), max(1, min(8, len(width) // 25)))
    observed = np.array([evaluation.inside[rows].mean() for rows in groups])
    middle = np.array([np.median(width[rows]) for rows in groups])
    low, high = np.array([_exact_interval(evaluation.inside[rows]) for rows in groups]).T
    with _drawing() as (axes, drawn):
        axes.axhline(100 * level, color=INK, linewidth=0.8, label=f"promised {_percent(level)}")
        places = np.arange(len(groups))
        axes.vlines(places, 100 * low, 100 * high, color=BLUE, alpha=0.35, linewidth=5, label="chance")
        axes.scatter(places, 100 * observed, color=BLUE, s=36, zorder=3, label="observed")
        axes.set_xticks(places, [compact(value) for value in middle])
        axes.set(
            xlabel="width of the interval (middle of each group)", ylabel="coverage, %", xlim=(-0.5, places[-1] + 0.5)
        )
        axes.set_ylim(max(0, 100 * float(low.min()) - 5), 102)
        axes.grid(visible=False, axis="x")
        axes.legend(loc="lower right", ncols=3, columnspacing=1, handletextpad=0.4)
    return Picture(
        "Are narrow intervals as good as wide ones?",
        f"Rows in groups, from the narrowest intervals to the widest. In every group {_percent(level)} should hold "
        "their target: then a narrow interval is deserved, and a wide one needed.",
        f"Coverage of {len(groups)} groups of growing width: {', '.join(f'{100 * share:.0f}' for share in observed)} "
        f"percent, where {_percent(level)} were promised.",
        drawn.source,
    )


def least_sure(groups: Sequence[Group]) -> Picture:
    """Draw the groups of rows with the largest predicted standard deviation, relative to the average of all rows."""
    names = [group.name for group in groups][::-1]
    ratios = np.array([group.ratio for group in groups][::-1])
    with _drawing(height=max(2.2, 0.55 + 0.36 * len(groups))) as (axes, drawn):
        axes.barh(np.arange(len(groups)), ratios, color=BLUE, alpha=0.85, height=0.62)
        axes.set_yticks(np.arange(len(groups)), names)
        axes.axvline(1, color=INK, linewidth=0.8)
        for place, ratio in enumerate(ratios):
            axes.text(ratio + 0.01 * ratios.max(), place, f"{ratio:.2f}", va="center", fontsize=9)
        axes.set(xlabel="uncertainty, average of all rows = 1", xlim=(0, 1.12 * ratios.max()))
        axes.grid(visible=False, axis="y")
    listed = "; ".join(f"{group.name}: {group.ratio:.2g} times the average, {group.rows} rows" for group in groups)
    return Picture(
        "Where the model is least sure",
        "Kinds of rows with the largest predicted standard deviation, in multiples of the average. Look twice at "
        "predictions for such rows, or collect more of them.",
        f"Bar chart. {listed}.",
        drawn.source,
    )


def parts(evaluation: Evaluation, target: str) -> Picture:
    """Draw the epistemic and the aleatoric standard deviation against the predicted value.

    Args:
        evaluation: Evaluation of the test rows, in up to 15 groups by their predicted value.
        target: Name of the target.
    """
    groups = np.array_split(np.argsort(evaluation.mean), max(1, min(15, len(evaluation.mean) // 15)))
    place = np.array([evaluation.mean[rows].mean() for rows in groups])
    kinds = (("epistemic", evaluation.epistemic_std, BLUE), ("aleatoric", evaluation.aleatoric_std, ORANGE))
    with _drawing() as (axes, drawn):
        for name, values, colour in kinds:
            low, middle, high = (np.array([np.quantile(values[rows], q) for rows in groups]) for q in (0.1, 0.5, 0.9))
            axes.fill_between(place, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(place, middle, color=colour, linewidth=2, label=name, marker="o" if len(groups) == 1 else None)
        axes.set(xlabel=f"predicted {target}", ylabel="standard deviation")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
    share = float(np.mean(evaluation.epistemic_std**2) / np.mean(evaluation.stddev**2))
    return Picture(
        "What the uncertainty is made of",
        "Epistemic: what the model does not know; more rows of this kind would reduce it. Aleatoric: noise in the data "
        f"that more rows cannot remove. Here {100 * share:.0f} % of the variance is epistemic. Bands hold 80 % of the "
        "rows.",
        f"Median epistemic standard deviation {shown(float(np.median(evaluation.epistemic_std)), 3)}, aleatoric "
        f"{shown(float(np.median(evaluation.aleatoric_std)), 3)}, drawn along the predicted {target}.",
        drawn.source,
    )


LEVELS: Array = np.linspace(0.02, 0.98, 49)


def coverage_by_level(evaluation: Evaluation) -> Array:
    """Return the share of rows inside the central interval of each of :data:`LEVELS`."""
    distance = np.abs(2 * evaluation.pit - 1)
    return np.array([np.mean(distance <= level) for level in LEVELS])


def _band(probability: Array, rows: int, shares: int = 1) -> tuple[Array, Array]:
    """95 % bounds of the observed share of rows for a correct probability, Bonferroni-corrected for several shares."""
    low, high = (stats.binom.ppf(q, rows, probability) / rows for q in (0.025 / shares, 1 - 0.025 / shares))
    return np.asarray(low), np.asarray(high)


def _exact_interval(inside: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of 95 % for a share."""
    result = stats.binomtest(int(inside.sum()), len(inside)).proportion_ci(0.95)
    return float(result.low), float(result.high)


def _sample(rows: int) -> NDArray[np.int64]:
    """Return the numbers of at most as many rows as a figure can show."""
    return np.sort(np.random.default_rng(0).permutation(rows)[:_MOST_DOTS])


def _percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.3g} %"


@dataclass
class _Drawn:
    """The finished image.

    Attributes:
        source: The image as a data URL, empty until the drawing has ended.
    """

    source: str = ""


@contextmanager
def _drawing(height: float = _HEIGHT) -> Iterator[tuple[Axes, _Drawn]]:
    """Yield axes to draw on; the image is available when the context ends."""
    drawn, stream = _Drawn(), BytesIO()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.xaxis.set_major_formatter(lambda value, _: compact(value))
        axes.yaxis.set_major_formatter(lambda value, _: compact(value))
        yield axes, drawn
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    drawn.source = "data:image/svg+xml;base64," + b64encode(stream.getvalue()).decode()
