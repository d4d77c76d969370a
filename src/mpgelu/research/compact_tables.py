"""What was measured of the compact model, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from mpgelu.research.compare.summary import ALL_ROWS, counted
from mpgelu.research.store import Record

_COMPACT, _TEACHER, _PEER = "mpgelu-compact", "mpgelu", "deep-ensemble"  # methods of the comparison


def tables(records: Sequence[Record]) -> str:
    """Everything that `mpgelu.research.compact.measure` found."""
    records = sorted(records, key=lambda record: (record["split"], record["dataset"]))
    timed = [record for record in records if "onnx_nodes" in record]
    by_layers = [record for record in timed if "diagonal_us" in record]
    parts = [_quality_lines(records), _cost_lines(timed), _moment_lines(by_layers), _alone_lines(records)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def report_table(frame: pd.DataFrame) -> str:
    """The compact model beside its teacher and a deep ensemble of five, averages over the report splits of all three.

    Args:
        frame: Records of `mpgelu compare`.
    """
    rows = counted(frame)
    rows = rows[~rows["dataset"].isin(ALL_ROWS.values())]  # of sets with repeated rows, new ones count
    scores = {
        name: rows.pivot_table(name, ["dataset", "split"], "method", sort=False)[[_TEACHER, _COMPACT, _PEER]].dropna()
        for name in ("log_likelihood", "crps", "rmse")
    }
    means = {name: table.groupby("dataset", sort=False).mean() for name, table in scores.items()}
    splits = scores["crps"].groupby("dataset", sort=False).size()
    likelihood, crps, rmse = means["log_likelihood"], means["crps"], means["rmse"]
    lost = likelihood[_COMPACT] - likelihood[_TEACHER]
    more = {name: means[name][_COMPACT] / means[name][_TEACHER] - 1 for name in ("crps", "rmse")}
    lines = [
        "| report splits | log-likelihood: ensemble | compact | deep ensemble of 5 | difference | CRPS | RMSE "
        "| ahead of the deep ensemble |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in splits.index:
        three = " | ".join(f"{likelihood[method][name]:.3f}" for method in (_TEACHER, _COMPACT, _PEER))
        ahead = {
            "log-likelihood": likelihood[_COMPACT][name] > likelihood[_PEER][name],
            "CRPS": crps[_COMPACT][name] < crps[_PEER][name],
            "RMSE": rmse[_COMPACT][name] < rmse[_PEER][name],
        }
        shares = f"{lost[name]:+.3f} | {more['crps'][name]:+.1%} | {more['rmse'][name]:+.1%}"
        lines.append(f"| {name} [{splits[name]}] | {three} | {shares} | {_listed(ahead)} |")
    shares = f"{lost.mean():+.3f} (worst {lost.min():+.3f}) | {more['crps'].mean():+.1%} | {more['rmse'].mean():+.1%}"
    return "\n".join([*lines, f"| mean | | | | {shares} | |"])


def _listed(which: dict[str, bool]) -> str:
    return ", ".join(name for name, holds in which.items() if holds) or "nothing"


def _quality_lines(records: Sequence[Record]) -> list[str]:
    lines = [
        "| set, split | ensemble | compact | difference | CRPS | RMSE | correlation, test rows | rows 3 sd out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        r["difference"] = r["compact_log_likelihood"] - r["teacher_log_likelihood"]
        r |= {f"more_{name}": r[f"compact_{name}"] / r[f"teacher_{name}"] - 1 for name in ("crps", "rmse")}
        both = f"{r['teacher_log_likelihood']:.3f} | {r['compact_log_likelihood']:.3f}"
        lines.append(f"| {r['dataset']} {r['split']} | {both} | {_compared(r)} |")
    names = ("difference", "more_crps", "more_rmse", "correlation", "correlation_out")
    return [*lines, f"| mean | | | {_compared({name: _mean(records, name) for name in names})} |"]


def _compared(r: Record) -> str:
    ratios = f"{r['difference']:+.3f} | {r['more_crps']:+.1%} | {r['more_rmse']:+.1%}"
    return f"{ratios} | {r['correlation']:.2f} | {r['correlation_out']:.2f}"


def _cost_lines(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    shares = [r["distill_seconds"] / r["fit_seconds"] for r in records]
    times = [r["onnx_summary_us"] / r["onnx_plain_us"] for r in records]
    alone = f"one row alone in onnxruntime, {records[0]['onnx_nodes']} nodes: mean, std and parts"
    widths = [r["width_out"] for r in records]
    costs = {
        "distilling, share of the fit's processor time": f"{np.mean(shares):.2f} (at most {max(shares):.2f})",
        "one row among many, ensemble": f"{_mean(records, 'teacher_us'):.0f} us",
        "one row among many, compact": f"{_mean(records, 'compact_us'):.1f} us",
        alone: f"{_mean(records, 'onnx_summary_us'):.0f} us",
        "a plain network of the same layers, for scaled features": f"{_mean(records, 'onnx_plain_us'):.0f} us",
        "the first over the second": f"{np.mean(times):.1f} (at most {max(times):.1f})",
        "with three quantiles": f"{_mean(records, 'onnx_quantiles_us'):.0f} us",
        "model file, ensemble": f"{_mean(records, 'teacher_kilobytes'):.0f} KB",
        "model file, compact": f"{_mean(records, 'compact_kilobytes'):.0f} KB",
        "standard deviation 3 sd out, compact over ensemble, median": f"{np.median(widths):.2f} "
        f"({min(widths):.2f} to {max(widths):.2f})",
    }
    return ["| cost | mean over the sets |", "|---|---|", *(f"| {name} | {value} |" for name, value in costs.items())]


def _moment_lines(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    measured = ", ".join(f"{record['dataset']} {record['split']}" for record in records)
    lines = [
        f"| moments by the layers of the compact network ({measured}) | us a row | log-likelihood | CRPS |",
        "|---|---|---|---|",
    ]
    for kind in ("exact", "diagonal"):
        numbers = f"{_mean(records, f'{kind}_log_likelihood'):.6f} | {_mean(records, f'{kind}_crps'):.6f}"
        lines.append(f"| {kind} | {_mean(records, f'{kind}_us'):.1f} | {numbers} |")
    numbers = f"{_mean(records, 'compact_log_likelihood'):.6f} | {_mean(records, 'compact_crps'):.6f}"
    return [*lines, f"| as it predicts, in one native call | {_mean(records, 'compact_us'):.1f} | {numbers} |"]


def _alone_lines(records: Sequence[Record]) -> list[str]:
    records = [record for record in records if "alone_share" in record]
    if not records:
        return []
    kinds = {
        "alone_long": "no teacher, all steps",
        "alone": "no teacher, held-out length",
        "compact": "taught",
        "teacher": "ensemble",
    }
    heads = [f"{words}: {name}" for name in ("log-likelihood", "CRPS") for words in kinds.values()]
    lines = [f"| set, split | share of the steps | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for r in records:
        numbers = [f"{r[f'{kind}_{score}']:.3f}" for score in ("log_likelihood", "crps") for kind in kinds]
        lines.append(f"| {r['dataset']} {r['split']} | {r['alone_share']:g} | {' | '.join(numbers)} |")
    return lines


def _mean(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))
