"""Tables of ``mpgelu bench`` in pages of the documentation, between marks that have the names of sections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpgelu.errors import InputError
from mpgelu.research.bench.feature_errors import by_set
from mpgelu.research.bench.report import NOTES, Results, markdown, where
from mpgelu.storage.files import write_between


def update_docs(results: Results, page: Path) -> None:
    """Replace the tables between a page's marks, which have the names of sections, by the measured ones.

    Args:
        results: With every section whose marks the page has.
        page: A page with the marks of at least one of :data:`IN_DOCS`.
    """
    text = page.read_text(encoding="utf-8")
    marked = [name for name in IN_DOCS if f"<!-- {name}:start -->" in text]
    missing = [name for name in marked if name not in results] or ([] if marked else list(IN_DOCS))
    if missing:
        raise InputError(f"--docs: {page} wants tables of sections that were not measured: {', '.join(missing)}")
    for name in marked:
        write_between(page, name, _FOR_DOCS[name](results))


def _errors_told(results: Results) -> str:
    rows = results["feature-errors"]
    told = (
        f"Default models of split 0, the first {rows[0]['rows']} test "
        f"rows, {rows[0]['draws']:,} random inputs for each, errors of all features at once. Largest difference "
        "(average; largest standard error of the random inputs):"
    )
    return f"{told}\n\n{markdown(by_set(rows))}"


def _conversion_told(results: Results) -> str:
    sampled, converted = results["conversion"]
    rows = [
        {
            "error of the": name,
            "root mean square": f"{converted[f'{key} error']:.1%}",
            "worst row": f"{converted[f'{key} error, worst row']:.1%}",
        }
        for name, key in (("mean, in standard deviations", "mean"), ("standard deviation", "stddev"))
    ]
    faster = f"{converted['rows']} rows; {converted['times faster']:,.0f} times faster than {sampled['method']}."
    return f"{faster} {where(results | {'apart': []})}\n\n{markdown(rows)}"


def _onnx_told(results: Results) -> str:
    table: dict[tuple[int, int], dict[str, Any]] = {}
    for row in results["onnx"]:
        line = table.setdefault(
            (row["width"], row["networks"]), {"hidden units": f"2 x {row['width']}", "networks": row["networks"]}
        )
        plain = row["method"] == "deterministic"
        line["plain, us" if plain else row["method"]] = row["us"] if plain else f"{row['over deterministic']:.1f}x"
    return f"{where(results | {'apart': []})}\n\n{markdown(list(table.values()))}"


def _workers_told(results: Results) -> str:
    return f"{where(results)}\n\n{markdown(results['workers'])}"


def _compile_told(results: Results) -> str:
    return f"{where(results | {'apart': []})} {NOTES['compile']}\n\n{markdown(results['compile'])}"


def _rows_told(results: Results) -> str:
    return f"{NOTES['rows']}\n\n{markdown(results['rows'])}"


_FOR_DOCS: dict[str, Callable[[Results], str]] = {
    "feature-errors": _errors_told,
    "conversion": _conversion_told,
    "onnx": _onnx_told,
    "workers": _workers_told,
    "compile": _compile_told,
    "rows": _rows_told,
}
IN_DOCS = tuple(_FOR_DOCS)
"""Sections that have a table in the documentation."""
