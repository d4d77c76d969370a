"""The compact model beside its teacher: what it loses, how sure it is, what it costs.

``python -m mpgelu.research.compact --splits 5 -o results/compact --page docs/compact.md`` measures what is missing in
the folder's records, and writes the tables into the page, with one of the records of ``mpgelu compare``.
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
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.export import export_onnx
from mpgelu.export.graph import Graph
from mpgelu.likelihoods import GaussianMixture
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import Stack
from mpgelu.research.compact_tables import report_table, tables
from mpgelu.research.compare.predicted import scores
from mpgelu.research.datasets import load_uci
from mpgelu.research.store import Record, Store
from mpgelu.storage.files import write_atomically, write_between

Array = NDArray[np.float64]

_OUT = 3.0  # standard deviations that rows are moved by, in a random direction
_ROWS, _ROWS_BY_LAYERS = 4_096, 512  # of a timed prediction
_SECONDS, _CALLS = 4.0, 10  # of timing; of one row in a round
_MOST_TESTED = 1_000  # test rows that are looked at
_KINDS: dict[str, type[Moments]] = {"exact": FactoredMoments, "diagonal": DiagonalMoments}
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
    train, test = found.splits[split].train, found.splits[split].test[:_MOST_TESTED]
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
    return record | _by_layers(compact, new, truth) | _costs(teacher, compact, new)


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
    """Networks like the compact one of up to 7,000 rows without a teacher; scores are averages over those of ten folds.

    How long to train is chosen by the folds' held-out rows, which is early stopping with a learning rate that is down
    to zero at every length that is tried.
    """
    chosen: dict[str, Any] = {
        "hidden": (128, 128, 128),
        "sigma": 0.4,
        "diverse": False,
        "likelihood": GaussianMixture(6),
    }
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


def _by_layers(compact: MPGELURegressor, X: Array, y: torch.Tensor) -> Record:
    """Exact and diagonal moments through the layers one after the other: scores, and times of a row among many."""
    found: Record = {}
    rows = _many(X)[:_ROWS_BY_LAYERS]
    times = _in_turns({name: partial(_moments, compact, kind, rows) for name, kind in _KINDS.items()}, 1)
    for name, kind in _KINDS.items():
        outputs, ensemble, x = _moments(compact, kind, X), compact.ensemble_, torch.as_tensor(X)
        mixture = ensemble.likelihood.predictive(outputs).to(x.dtype).widened(ensemble.scaling.extrapolation(x).sum(-1))
        of_kind = scores(mixture.affine(ensemble.target_scale, ensemble.target_mean), y)
        found |= {f"{name}_{score}": of_kind[score] for score in ("log_likelihood", "crps")}
        found[f"{name}_us"] = times[name] / len(rows)
    return found


def _moments(compact: MPGELURegressor, kind: type[Moments], X: Array) -> Moments:
    (network,) = compact.ensemble_.each_stack()[0].unstack()
    with torch.no_grad():
        outputs: Moments = network(kind.certain(compact.ensemble_.scaling(torch.as_tensor(X)).float()))
    return outputs


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
        single = _in_turns({name: partial(session.run, None, row) for name, session in graphs.items()}, _CALLS)
        sizes: Record = {f"{name}_kilobytes": files[name].stat().st_size / 1e3 for name in ("teacher", "compact")}
        sizes["onnx_nodes"] = len(onnx.load(files["summary"]).graph.node)
    rows, many = _many(X), dict[str, float]()
    for name, model in (("teacher", teacher), ("compact", compact)):
        many |= _in_turns({name: partial(model.predict_parts, rows)}, 1)
    of_rows = {f"{name}_us": value / _ROWS for name, value in many.items()}
    return sizes | of_rows | {f"onnx_{name}_us": value for name, value in single.items()}


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


def _many(X: Array) -> Array:
    return np.resize(X, (_ROWS, X.shape[1]))


def _in_turns(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Processor time of one call of each in microseconds: the best of many short rounds, taken in turns.

    A round that nothing else interrupts is short, so the best of many is little disturbed by a crowded machine.
    """
    best, started = dict.fromkeys(calls, float("inf")), time.perf_counter()
    while time.perf_counter() - started < _SECONDS or float("inf") in best.values():
        for name, call in calls.items():
            now = time.process_time()
            for _ in range(repetitions):
                call()
            best[name] = min(best[name], 1e6 * (time.process_time() - now) / repetitions)
    return best


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="yacht,boston,energy,concrete")
    parser.add_argument("--splits", default="5")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/compact"))
    parser.add_argument("--page", type=Path, help="Markdown file whose tables are written anew.")
    parser.add_argument("--compare", type=Path, default=Path("results/compare"), help="Folder of a comparison.")
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
        write_between(chosen.page, "compact-report", report_table(Store(chosen.compare / "records.jsonl").frame()))


if __name__ == "__main__":
    main()
