"""The compact model beside its teacher: what it loses, how sure it is, what it costs.

``python -m mpgelu.research.compact --splits 0,1 -o results/compact --page docs/compact.md`` measures what is missing in
the folder's records, and writes the tables into the page.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.export import export_onnx
from mpgelu.export.graph import Graph
from mpgelu.likelihoods import GaussianMixture
from mpgelu.moments import DiagonalMoments, FactoredMoments
from mpgelu.networks import Stack
from mpgelu.research.compare.predicted import scores
from mpgelu.research.datasets import load_uci
from mpgelu.research.store import Record, Store
from mpgelu.storage.files import write_atomically, write_between

Array = NDArray[np.float64]

_OUT = 3.0  # standard deviations that rows are moved by, in a random direction
_ROWS = 3_000  # of a timed prediction
_ROUNDS, _SINGLE_CALLS = 3, 500
_SCORES = ("log_likelihood", "crps", "rmse", "coverage90")
_EFFORTS = (0.05, 0.15, 0.4, 1.0)  # shares of the usual steps of a network that has no teacher


def measure(
    dataset: str,
    split: int,
    *,
    data: str | None = None,
    fitted: Path | None = None,
    alone: bool = False,
    **settings: Any,
) -> Record:
    """Fit, distill, and compare on the test rows of one split; times are seconds of the processor.

    Args:
        dataset: One of ``mpgelu.research.datasets.SETS``.
        split: Number of a published split, also the seed.
        data: Folder of the data sets.
        fitted: Folder that keeps fitted ensembles, which a second run does not fit again.
        alone: Train single networks without a teacher too.
        settings: Arguments of the estimator, for quick runs.
    """
    found = load_uci(dataset, data)
    train, test = found.splits[split].train, found.splits[split].test
    X, y, new, truth = found.X[train], found.y[train], found.X[test], torch.from_numpy(found.y[test])
    file = None if fitted is None else fitted / f"{dataset}{split}.pickle"
    if file is not None and file.exists():
        teacher, fit_seconds = pickle.loads(file.read_bytes())
    else:
        teacher, fit_seconds = _timed(lambda: MPGELURegressor(random_state=split, **settings).fit(X, y))
        if file is not None:
            write_atomically(file, pickle.dumps((teacher, fit_seconds)))
    compact, distill_seconds = _timed(lambda: teacher.distill(random_state=split))
    out = _moved_out(new, X.std(axis=0), split)
    record: Record = {"dataset": dataset, "split": split, "rows": len(X), "networks": len(teacher.ensemble_)}
    for name, model in (("teacher", teacher), ("compact", compact)):
        record |= {f"{name}_{score}": value for score, value in _scores(model, new, truth).items()}
    if alone:
        record |= _alone(X, y, new, truth, {"random_state": split} | settings)
    record |= {
        "correlation": _correlation(teacher, compact, new),
        "correlation_out": _correlation(teacher, compact, out),
        "width_out": float(np.median(compact.predict(out, True)[1] / teacher.predict(out, True)[1])),
        "fit_seconds": fit_seconds,
        "distill_seconds": distill_seconds,
    }
    return record | _diagonal(compact, new, truth) | _costs(teacher, compact, new)


def _scores(model: MPGELURegressor, X: Array, y: torch.Tensor) -> dict[str, float]:
    found = scores(model.predict_distribution(X), y)
    return {name: found[name] for name in _SCORES}


def _moved_out(X: Array, spread: Array, seed: int) -> Array:
    directions = np.random.default_rng(seed).standard_normal(X.shape)
    moved: Array = X + _OUT * spread * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    return moved


def _correlation(teacher: MPGELURegressor, compact: MPGELURegressor, X: Array) -> float:
    """Of the logarithms of the epistemic variances."""
    ours, theirs = (np.log(model.predict_parts(X).epistemic_std) for model in (compact, teacher))
    return float(np.corrcoef(ours, theirs)[0, 1])


def _alone(X: Array, y: Array, new: Array, truth: torch.Tensor, settings: dict[str, Any]) -> Record:
    """Networks like the compact one that have no teacher; scores are averages over those of five folds.

    How long to train is chosen by the folds' held-out rows, which is early stopping with a learning rate that is down
    to zero at every length that is tried.
    """
    chosen: dict[str, Any] = {"hidden": (128, 128, 128), "sigma": 0.4, "brief": False, "likelihood": GaussianMixture(6)}
    models = {share: MPGELURegressor(**chosen | {"effort": share} | settings).fit(X, y) for share in _EFFORTS}
    best = max(models, key=lambda share: models[share].score_)
    ends = {"alone": best, "alone_long": _EFFORTS[-1]}
    found = {name: _single_scores(models[share].ensemble_, new, truth) for name, share in ends.items()}
    return {"alone_share": best} | {f"{name}_{score}": v for name, each in found.items() for score, v in each.items()}


def _single_scores(ensemble: Ensemble, new: Array, truth: torch.Tensor) -> dict[str, float]:
    """Averages over the networks of an ensemble, each by itself."""
    found = []
    for network in ensemble.each_stack()[0].unstack():
        single = Ensemble(
            [Stack([network])],
            torch.ones(1, dtype=torch.float64),
            ensemble.likelihood,
            ensemble.scaling,
            ensemble.target_mean,
            ensemble.target_scale,
        )
        with torch.no_grad():
            found.append(scores(single(torch.as_tensor(new)), truth))
    return {name: float(np.mean([each[name] for each in found])) for name in _SCORES}


def _diagonal(compact: MPGELURegressor, X: Array, y: torch.Tensor) -> Record:
    """The compact model with diagonal moments: score, and time of a prediction."""
    compact.ensemble_.moment_type = DiagonalMoments
    try:
        found = {
            "diagonal_log_likelihood": _scores(compact, X, y)["log_likelihood"],
            "diagonal_us": _microseconds(compact, X),
        }
    finally:
        compact.ensemble_.moment_type = FactoredMoments
    return found


def _costs(teacher: MPGELURegressor, compact: MPGELURegressor, X: Array) -> Record:
    """Times of predictions by mean, standard deviation and parts in microseconds a row, and sizes of files."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("teacher", "compact", "summary", "quantiles", "plain")}
        teacher.save(files["teacher"])
        compact.save(files["compact"])
        export_onnx(compact, files["summary"], ())
        export_onnx(compact, files["quantiles"], (0.05, 0.5, 0.95))
        _export_plain(compact, files["plain"])
        graphs = {name: _session(files[name]) for name in ("summary", "quantiles", "plain")}
        row = {"features": X[:1].astype(np.float32)}
        single = _in_turns({name: partial(session.run, None, row) for name, session in graphs.items()})
        sizes = {f"{name}_kilobytes": files[name].stat().st_size / 1e3 for name in ("teacher", "compact")}
    many = {"teacher_us": _microseconds(teacher, X), "compact_us": _microseconds(compact, X)}
    return many | sizes | {f"onnx_{name}_us": value for name, value in single.items()}


def _export_plain(compact: MPGELURegressor, path: Path) -> None:
    """A plain network of the same hidden layers with two outputs, for scaled features."""
    (network,) = compact.ensemble_.each_stack()[0].unstack()
    hidden = [layer.out_features for layer in network.children() if isinstance(layer, nn.Linear)]
    features, graph, random = compact.n_features_in_, Graph(), np.random.default_rng(0)
    value = graph.value("features")
    for before, after in pairwise([features, *hidden]):
        value = value.op("Gemm", random.normal(size=(before, after)) / before**0.5, np.zeros(after))
        value = value * value.op("Sigmoid")
    value = value.op("Gemm", random.normal(size=(hidden[-1], 2)), np.zeros(2))
    content = graph.model({"features": ["rows", features]}, {"outputs": (value, ["rows", 2])}, {})
    write_atomically(path, content.SerializeToString())


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _microseconds(model: MPGELURegressor, X: Array) -> float:
    """Processor time of mean, standard deviation and parts of a row among many; the best of a few rounds."""
    rows = np.resize(X, (_ROWS, X.shape[1]))
    return 1e6 * min(_timed(lambda: model.predict_parts(rows))[1] for _ in range(_ROUNDS)) / _ROWS


def _in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Processor time of one call of each, in microseconds; the best round, taken in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            _, seconds = _timed(partial(_repeated, call))
            best[name] = min(best[name], 1e6 * seconds / _SINGLE_CALLS)
    return best


def _repeated(call: Callable[[], object]) -> None:
    for _ in range(_SINGLE_CALLS):
        call()


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


# Tables


def tables(records: Sequence[Record]) -> str:
    """Everything that was measured as Markdown."""
    records = sorted(records, key=lambda record: (record["dataset"], record["split"]))
    return "\n".join([*_quality_lines(records), "", *_cost_lines(records), "", *_alone_lines(records)])


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
    shares = [r["distill_seconds"] / r["fit_seconds"] for r in records]
    apart = max(abs(r["compact_log_likelihood"] - r["diagonal_log_likelihood"]) for r in records)
    costs = {
        "distilling, share of the fit's processor time": f"{np.mean(shares):.2f} (at most {max(shares):.2f})",
        "one row among many, ensemble": f"{_mean(records, 'teacher_us'):.0f} us",
        "one row among many, compact, exact moments": f"{_mean(records, 'compact_us'):.1f} us",
        "one row among many, compact, diagonal moments": f"{_mean(records, 'diagonal_us'):.1f} us",
        "one row alone in onnxruntime: mean, std and parts": f"{_mean(records, 'onnx_summary_us'):.0f} us",
        "the same with three quantiles": f"{_mean(records, 'onnx_quantiles_us'):.0f} us",
        "a plain network of the same layers, for scaled features": f"{_mean(records, 'onnx_plain_us'):.1f} us",
        "model file, ensemble": f"{_mean(records, 'teacher_kilobytes'):.0f} KB",
        "model file, compact": f"{_mean(records, 'compact_kilobytes'):.0f} KB",
        "log-likelihood, exact against diagonal moments": f"{apart:.0e} nats apart at most",
        "standard deviation 3 sd out, compact over ensemble": f"{_mean(records, 'width_out'):.2f}",
    }
    return ["| cost | mean over the sets |", "|---|---|", *(f"| {name} | {value} |" for name, value in costs.items())]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="yacht,boston,energy,concrete")
    parser.add_argument("--splits", default="0,1")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/compact"))
    parser.add_argument("--page", type=Path, help="Markdown file whose tables are written anew.")
    parser.add_argument("--data", help="Folder of the data sets.")
    parser.add_argument("--fitted", type=Path, help="Folder that keeps fitted ensembles for the next run.")
    parser.add_argument("--alone", action="store_true", help="Train single networks without a teacher too.")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    store = Store(chosen.output / "records.jsonl", ("dataset", "split"))
    for split in map(int, chosen.splits.split(",")):
        for dataset in chosen.sets.split(","):
            if not store.has({"dataset": dataset, "split": split}):
                store.append(measure(dataset, split, data=chosen.data, fitted=chosen.fitted, alone=chosen.alone))
    found = tables(list(store))
    write_atomically(chosen.output / "compact.md", found + "\n")
    if chosen.page is not None:
        write_between(chosen.page, "compact", found)


if __name__ == "__main__":
    main()
