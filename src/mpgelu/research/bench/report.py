"""What ``mpgelu bench`` leaves behind: numbers as JSON, a page with tables, a figure each, and the README's table."""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from mpgelu import native
from mpgelu.research.bench.sections import Rows
from mpgelu.storage.files import write_atomically, write_between

Results = dict[str, Any]

_ROW_ALONE, _ROW_AMONG_MANY = 500.0, 25.0  # microseconds that a prediction may take
_STYLES = {"": "o-", "torch only": "o--", "compiled": "o:"}

# What the library promises: name, numerator and denominator (method, width), bound, whether the ratio is at most it.
_EXACT, _TORCH = "MP-GELU exact (factored)", ", torch only"
_PAPER, _MC, _DIAGONAL = "ReLU full as in the paper", "MC dropout, 50 samples", "MP-GELU diagonal"
_SHARED, _BEST_MC = "MC dropout, 50 shared masks", "MC dropout, 50 shared masks, compiled"
_INFERENCE_TARGETS: tuple[tuple[str, tuple[str, int], tuple[str, int], float, bool], ...] = (
    ("exact faster than full ReLU as in the paper, n = 20", (_PAPER, 20), (_EXACT, 20), 12, False),
    ("exact faster than full ReLU as in the paper, n = 100", (_PAPER, 100), (_EXACT, 100), 60, False),
    ("exact faster than MC dropout with 50 samples, n = 20", (_MC, 20), (_EXACT, 20), 15, False),
    ("exact faster than MC dropout with 50 samples, n = 100", (_MC, 100), (_EXACT, 100), 10, False),
    ("exact faster than MC dropout in its fastest form, n = 20", (_BEST_MC, 20), (_EXACT, 20), 2, False),
    ("exact faster than MC dropout in its fastest form, n = 100", (_BEST_MC, 100), (_EXACT, 100), 2, False),
    (
        "library's own full ReLU (DVI) faster than as in the paper, n = 20",
        (_PAPER, 20),
        ("ReLU full, DVI", 20),
        1,
        False,
    ),
    (
        "library's own full ReLU (DVI) faster than as in the paper, n = 100",
        (_PAPER, 100),
        ("ReLU full, DVI", 100),
        1,
        False,
    ),
    ("exact over diagonal, torch only, n = 20", (_EXACT + _TORCH, 20), (_DIAGONAL + _TORCH, 20), 3.5, True),
    ("exact over diagonal, torch only, n = 100", (_EXACT + _TORCH, 100), (_DIAGONAL + _TORCH, 100), 4, True),
    ("exact over diagonal, with native kernels, n = 20", (_EXACT, 20), (_DIAGONAL, 20), 3.5, True),
    ("exact over diagonal, with native kernels, n = 100", (_EXACT, 100), (_DIAGONAL, 100), 4, True),
    (
        "compiled exact over compiled deterministic, n = 20",
        ("MP-GELU exact, compiled", 20),
        ("deterministic, compiled", 20),
        6,
        True,
    ),
    (
        "compiled diagonal over compiled deterministic, n = 20",
        ("MP-GELU diagonal, compiled", 20),
        ("deterministic, compiled", 20),
        2,
        True,
    ),
    (
        "compiled diagonal over compiled deterministic, n = 100",
        ("MP-GELU diagonal, compiled", 100),
        ("deterministic, compiled", 100),
        2,
        True,
    ),
    ("exact at n = 200 over n = 100", (_EXACT, 200), (_EXACT, 100), 4.8, True),
    (
        "library over a hand-written function, torch only, n = 20",
        (_EXACT + _TORCH, 20),
        ("exact, by hand", 20),
        1.3,
        True,
    ),
    (
        "library over a hand-written function, torch only, n = 100",
        (_EXACT + _TORCH, 100),
        ("exact, by hand", 100),
        1.3,
        True,
    ),
)


def environment(threads: int) -> dict[str, str]:
    """Return the conditions of the measurement: processor, versions, threads."""
    return {
        "processor": _processor(),
        "threads": str(threads),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "native kernels": "on" if native.available() else "off",
    }


def targets(results: Results) -> Rows:
    """Each promised ratio beside the measured one, as far as it was measured."""
    seconds = {(row["method"], row["width"]): row["ms"] for row in results.get("inference", [])}
    table: Rows = []
    for name, top, bottom, bound, at_most in _INFERENCE_TARGETS:
        if top in seconds and bottom in seconds:
            table.append(_target(name, seconds[top] / seconds[bottom], bound, at_most))
    steps = {(row["method"], row["width"], row["batch"]): row["ms"] for row in results.get("training", [])}
    for _, width, batch in [key for key in steps if key[0] == _EXACT and (_PAPER, *key[1:]) in steps]:
        ratio = steps[_PAPER, width, batch] / steps[_EXACT, width, batch]
        name = f"training step, exact faster than full ReLU as in the paper, n = {width}, batch {batch}"
        table.append(_target(name, ratio, 12, at_most=False))
    if conversion := results.get("conversion"):
        sampled, converted = conversion
        name = f"converted torch network faster than {sampled['method']}"
        table.append(_target(name, converted["times faster"], 50, at_most=False))
    over = [(row["method"], row["over deterministic"]) for row in results.get("onnx", [])]
    for kind in ("diagonal", "exact"):
        if ratios := [ratio for method, ratio in over if method == f"MP-GELU {kind}"]:
            table.append(_target(f"one row in onnxruntime, {kind} over a plain network", max(ratios), 3, at_most=True))
    for row in results.get("threads", []):
        name = f"two threads faster than one, {row['method']}, trained on {row['trained on']} rows"
        table.append(_target(name, row["times faster"], 1.8, at_most=False))
    for row in results.get("prediction", []):
        if row["method"] in ("mean", "everything at once"):
            wanted = _ROW_ALONE if row["rows"] == 1 else _ROW_AMONG_MANY
            name = f"{row['method']}, {row['rows']} at once, {row['networks']} networks: us a row over {wanted:g}"
            table.append(_target(name, row["us a row"] / wanted, 1, at_most=True))
    for row in results.get("imports", [])[1:]:
        table.append(_target(f"import of {row['what']}", row["over the first"], 1.3, at_most=True))
    return table


def _target(name: str, ratio: float, bound: float, at_most: bool) -> dict[str, Any]:
    met = ratio <= bound if at_most else ratio >= bound
    wanted = f"{'at most' if at_most else 'at least'} {bound:g}x"
    return {"ratio": name, "measured": f"{ratio:.2f}x", "target": wanted, "met": "yes" if met else "no"}


def markdown(rows: Rows) -> str:
    """A Markdown table; numbers with three significant digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def write(results: Results, folder: Path) -> None:
    """Write ``bench.json``, ``bench.md`` and a figure of each section."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(results, folder / "bench.json")
    page = ["# Benchmarks", "", where(results), ""]
    sections = {"targets": targets(results), "what size costs": costs(results.get("growth", [])), **results}
    for name, rows in sections.items():
        if name != "apart" and isinstance(rows, list) and rows:
            page += [f"## {name}", "", *([NOTES[name], ""] if name in NOTES else []), markdown(rows), ""]
    write_atomically(folder / "bench.md", "\n".join(page))
    for name, (draw, panels) in _FIGURES.items():
        if results.get(name):
            _save(folder / f"{name}.png", partial(draw, rows=results[name]), panels)


def merged(results: Results, folder: Path) -> Results:
    """Results with the sections that an earlier run left in a folder and this one did not measure.

    The sections of this run are listed as measured apart, since they share neither turns nor a moment with the others.
    """
    path = folder / "bench.json"
    if not path.is_file():
        return results
    earlier = json.loads(path.read_text(encoding="utf-8"))
    measured = {name: rows for name, rows in results.items() if isinstance(rows, list)}
    apart = list(dict.fromkeys([*earlier.get("apart", []), *measured]))
    return {**earlier, **measured, "apart": apart}


def costs(rows: Rows) -> Rows:
    """Return the ratio of the times of exact predictions at the largest size of each axis and at another size.

    Args:
        rows: Rows of the section growth.
    """
    table: Rows = []
    for axis in dict.fromkeys(row["axis"] for row in rows):
        mine = [row for row in rows if row["axis"] == axis]
        for row in mine[:-1]:
            times = mine[-1]["ms"] / row["ms"]
            table.append({"axis": axis, "from": row["size"], "to": mine[-1]["size"], "times longer": times})
    return table


def write_json(results: Results, path: Path) -> None:
    """All numbers, as measured."""
    write_atomically(path, json.dumps(results, indent=1) + "\n")


def update_readme(results: Results, readme: Path) -> None:
    """Replace the table between the README's ``bench`` marks by the measured one."""
    widths = sorted({row["width"] for row in results["inference"]})
    sampled = [name for name in (_BEST_MC, _SHARED, _MC) if any(row["method"] == name for row in results["inference"])]
    names = ["deterministic", _DIAGONAL, _EXACT, "MP-GELU full (n x n)", "ReLU full, DVI", _PAPER, *sampled]
    ms = {(row["method"], row["width"]): row["ms"] for row in results["inference"]}
    rows = [{"milliseconds": name} | {f"n = {width}": ms.get((name, width), "-") for width in widths} for name in names]
    sizes = f"{results['predicted_rows']} rows, {results['features']} features"
    rows_told = f"{sizes}, two hidden layers of n units, float32. "
    write_between(readme, "bench", f"{rows_told}{where(results)}\n\n{markdown(rows)}")


def where(results: Results) -> str:
    """On what, with how many threads and how often it was measured."""
    environment = results["environment"]
    apart = f" Measured in runs of their own: {', '.join(results['apart'])}." if results.get("apart") else ""
    return (
        f"Measured on {environment['processor']}, {environment['threads']} thread, torch {environment['torch']}, "
        f"native kernels {environment['native kernels']}; methods in turns, best of {results['rounds']} rounds.{apart}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _save(path: Path, draw: Callable[[Any], None], panels: int) -> None:
    figure = Figure(figsize=(7.5, 4.6) if panels == 1 else (11, 3.6 if panels == 3 else 4.6), layout="constrained")
    draw(figure.subplots(1, panels))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    write_atomically(path, buffer.getvalue())


def _lines(axes: Axes, rows: Rows, x: str, y: str, by: str = "method") -> None:
    """One line per method; variants of a method (torch only, compiled) in its colour and another style."""
    colours: dict[str, str] = {}
    for name in dict.fromkeys(row[by] for row in rows):
        mine = [row for row in rows if row[by] == name]
        stem, _, variant = name.replace(" (factored)", "").rpartition(", ")
        variant = variant if variant in _STYLES else ""
        stem = stem if variant else name.replace(" (factored)", "")
        colour = colours.setdefault(stem, f"C{len(colours)}")
        axes.plot([r[x] for r in mine], [r[y] for r in mine], _STYLES[variant], color=colour, ms=4, label=name)
    sizes = sorted({row[x] for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _draw_inference(axes: Axes, rows: Rows) -> None:
    _lines(axes, [row for row in rows if "by hand" not in row["method"]], "width", "ms")
    axes.set_title("Predicting a test set")
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_training(axes: Axes, rows: Rows) -> None:
    largest = max(row["batch"] for row in rows)
    _bars(axes, [row for row in rows if row["batch"] == largest], "us per row", "width")
    axes.set_title(f"One training step, batch {largest}")


def _draw_latency(axes: Axes, rows: Rows) -> None:
    _bars(axes, rows, "median us", "width")
    axes.set_title("One row")


def _draw_counts(axes: Axes, rows: Rows) -> None:
    _lines(axes, rows, "width", "total")
    axes.set_ylabel("special functions per row")
    axes.set_title("erf, exp, sqrt, arcsin evaluations")
    axes.legend(fontsize=7)


def _draw_growth(panels: Sequence[Axes], rows: Rows) -> None:
    for axes, axis in zip(panels, dict.fromkeys(row["axis"] for row in rows), strict=False):
        mine = [row for row in rows if row["axis"] == axis]
        _lines(axes, mine, "size", "ms", by="axis")
        axes.set_xlabel(axis)
        axes.set_title(f"exact, exponent {mine[0]['exponent']:.2f}", fontsize=10)


def _bars(axes: Axes, rows: Rows, value: str, group: str) -> None:
    methods, groups = list(dict.fromkeys(row["method"] for row in rows)), sorted({row[group] for row in rows})
    height = 0.8 / len(groups)
    for shift, chosen in enumerate(groups):
        values = {row["method"]: row[value] for row in rows if row[group] == chosen}
        places = [index + shift * height for index in range(len(methods))]
        axes.barh(places, [values[method] for method in methods], height, label=f"{group} {chosen}")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(methods))], methods, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(value)
    axes.legend(fontsize=8)


def _draw_accuracy(panels: Sequence[Axes], rows: Rows) -> None:
    """Errors against time: a line for more and more draws, a point for each kind of moments."""
    sampled = [row for row in rows if row["method"].startswith("MC dropout")]
    for axes, error in zip(panels, ("mean error", "stddev error"), strict=True):
        axes.plot([row["ms"] for row in sampled], [row[error] for row in sampled], "o-", color="C0", label="MC dropout")
        for row in sampled[:: len(sampled) - 1]:
            draws = row["method"].removeprefix("MC dropout, ")
            axes.annotate(draws, (row["ms"], row[error]), (6, 4), textcoords="offset points", fontsize=8)
        for place, row in enumerate([row for row in rows if row not in sampled], 1):
            axes.plot(row["ms"], row[error], "s", color=f"C{place}", label=row["method"])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"milliseconds for {rows[0]['rows']} rows")
        axes.set_title("error of the mean, in standard deviations" if "mean" in error else "relative error of the std")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)


_FIGURES: dict[str, tuple[Callable[..., None], int]] = {  # how each is drawn, in how many panels
    "inference": (_draw_inference, 1),
    "training": (_draw_training, 1),
    "latency": (_draw_latency, 1),
    "growth": (_draw_growth, 3),
    "counts": (_draw_counts, 1),
    "accuracy": (_draw_accuracy, 2),
}
NOTES = {
    "what size costs": (
        "The covariance is carried as blocks, one per earlier layer, so a layer costs more the deeper it lies, and "
        "the first block has as many columns as there are features. Diagonal moments take two products per layer where "
        "the plain network takes one, at any depth and number of features."
    ),
    "accuracy": (
        "Two hidden layers of 64 units, diabetes data. Monte-Carlo dropout in its fastest form: one mask per draw for "
        "all rows, draws batched, compiled. Errors are root mean square over rows: of the mean in standard deviations, "
        "of the standard deviation relative. The reference of the ReLU network is 100,000 draws, good to 0.003 and "
        "0.002; that of the MP-GELU network is its exact covariance in float64, so that its error is rounding."
    ),
    "prediction": (
        "The default estimator with diagonal moments after 100 steps on made-up rows of 8 features. Everything: "
        "mean, standard deviation, its parts and a 90 % interval."
    ),
    "kernels": (
        "One network of two hidden layers and 256 rows. Kernels are used for diagonal moments of any width and for "
        "exact ones up to 200 units; gradients include the prediction."
    ),
    "compile": (
        "Networks of two hidden layers, one thread, processor time. A training step is a forward and a backward pass. "
        "Kernels know plain perceptrons: diagonal moments of any width, exact ones up to 200 units."
    ),
    "rows": (
        "The synthetic problem of docs/scale.md, one thread, processor time, one fit each: a fifth of the default "
        "steps, beside xgboost with 500 trees. Error of the mean: root mean square, against the true mean."
    ),
    "memory": "The process before holds torch, scikit-learn and a tiny model; rows take 8 bytes a feature.",
    "workers": (
        "Kin8nm: a fit with a fifth of the default steps beside xgboost with 500 trees. Workers of our fit are "
        "processes of joblib's loky, those of predictions and of xgboost threads. Best of two rounds. Predictions of "
        "MP-GELU are distributions, those of xgboost are means."
    ),
}
