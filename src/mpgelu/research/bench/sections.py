"""The measurements behind ``mpgelu bench``, one function each, from settings to rows of a table."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mpgelu import native
from mpgelu.layers import ReLU
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.networks import Nonlinearity, Stack, network, paper_network, propagate
from mpgelu.networks.perceptron import as_function
from mpgelu.predictive import Predictive
from mpgelu.research.bench.baselines import MCDropout, SharedMasks, exact_by_hand, paper_relu
from mpgelu.research.bench.measure import Timing, in_turns, special_functions

ROWS = 4573  # the test set of Protein, the paper's largest
FEATURES = 9
RATE = 0.05
PAPER_CHUNKS = (32, 256)  # the best at n = 100 and at n = 20, of 32 to 4573 tried
HAND_CHUNKS = (1024, ROWS)
MASK_CHUNKS = (256, 1024)
WIDEST_DENSE = 100  # n x n matrices of wider layers take minutes a turn

Rows = list[dict[str, Any]]
Run = Callable[[], object]
Kind = type[DiagonalMoments] | type[FactoredMoments] | type[FullMoments]

# name, nonlinearity, how the covariance is held
METHODS: tuple[tuple[str, Nonlinearity, Kind], ...] = (
    ("MP-GELU diagonal", "mpgelu", DiagonalMoments),
    ("MP-GELU exact (factored)", "mpgelu", FactoredMoments),
    ("MP-GELU full (n x n)", "mpgelu", FullMoments),
    ("ReLU diagonal", "relu", DiagonalMoments),
    ("ReLU full, DVI", "relu", FactoredMoments),  # which ReLU makes full; the kernels take known inputs
)


@dataclass(frozen=True)
class Settings:
    """The amount of measuring.

    Args:
        rounds: turns of every function.
        widths: hidden units in the inference section.
        compiled: also measure ``torch.compile``, which takes minutes to compile.
        quick: a smoke run: tiny sizes, numbers without meaning.
    """

    rounds: int = 9
    widths: tuple[int, ...] = (20, 50, 100, 200)
    compiled: bool = True
    quick: bool = False

    @property
    def rows(self) -> int:
        """Rows predicted at a time."""
        return 64 if self.quick else ROWS


def inference(settings: Settings) -> Rows:
    """Predicting a test set: every method at every width."""
    table: Rows = []
    for width in settings.widths:
        methods, compiled = _inference_methods(width, settings.rows, settings.compiled)
        with torch.no_grad():
            timings = _best_chunk(in_turns(methods, settings.rounds))
            # In turns of their own: after a method of seconds the cache and the clock are not those of a fast one.
            timings |= _best_chunk(in_turns(compiled, 10 * settings.rounds))
        plain = timings["deterministic"].best
        table += [
            {"width": width, "method": name, "ms": 1e3 * t.best, "over deterministic": t.best / plain}
            for name, t in timings.items()
        ]
    return table


def _inference_methods(width: int, rows: int, compiled: bool) -> tuple[dict[str, Run], dict[str, Run]]:
    """Eager methods, and compiled ones."""
    torch.manual_seed(0)
    x = torch.randn(rows, FEATURES)
    mpgelu = paper_network(FEATURES, rate=RATE, hidden=(width, width))
    relu = paper_network(FEATURES, nonlinearity="relu", rate=RATE, hidden=(width, width))
    relu_exact = nn.Sequential(*(ReLU("exact") if isinstance(m, ReLU) else m for m in relu))
    mc = MCDropout(FEATURES, width, 2, RATE)
    networks = {"mpgelu": mpgelu, "relu": relu}
    dense = width <= WIDEST_DENSE
    methods: dict[str, Run] = {"deterministic": partial(mpgelu, x)}
    for name, nonlinearity, kind in METHODS:
        if dense or "full" not in name:
            methods[name] = partial(propagate, networks[nonlinearity], x, moments=kind.certain)
    shared = SharedMasks(mc.network, mc.samples)
    for chunk in sorted({min(chunk, rows) for chunk in MASK_CHUNKS}):
        methods[f"MC dropout, 50 shared masks/{chunk}"] = partial(_in_chunks, shared, x, chunk)
    for chunk in sorted({min(chunk, rows) for chunk in HAND_CHUNKS}):
        methods[f"MC dropout, 50 samples/{chunk}"] = partial(_in_chunks, mc, x, chunk)
        methods[f"exact, by hand/{chunk}"] = partial(exact_by_hand, mpgelu, x, chunk)
    if dense:
        methods["ReLU full, exact"] = partial(propagate, relu_exact, x)
        for chunk in sorted({min(chunk, rows) for chunk in PAPER_CHUNKS}):
            methods[f"ReLU full as in the paper/{chunk}"] = partial(paper_relu, relu, x, chunk)
    for name in ("MP-GELU diagonal", "MP-GELU exact (factored)", "ReLU full, DVI"):
        if name in methods:
            methods[f"{name}, torch only"] = _without_native(methods[name])
    return methods, _compiled(mpgelu, shared, x) if compiled and native.can_compile() else {}


def _in_chunks(function: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, chunk: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(*map(function, torch.split(x, chunk)), strict=True)))


def _compiled(network: nn.Sequential, shared: SharedMasks, x: Tensor) -> dict[str, Run]:
    """The plain network, its moments and Monte-Carlo dropout through ``torch.compile``."""

    def diagonal(x: Tensor) -> tuple[Tensor, Tensor]:
        moments = network(DiagonalMoments.certain(x))
        return moments.mean, moments.variance

    def exact(x: Tensor) -> tuple[Tensor, Tensor]:
        moments = network(FactoredMoments.certain(x))
        return moments.mean, moments.covariance

    return {
        "deterministic, compiled": partial(torch.compile(network.forward, fullgraph=True), x),
        "MP-GELU diagonal, compiled": partial(torch.compile(diagonal, fullgraph=True), x),
        "MP-GELU exact, compiled": partial(torch.compile(exact, fullgraph=True), x),
        **{
            f"MC dropout, 50 shared masks, compiled/{chunk}": partial(
                _in_chunks, torch.compile(shared.forward, fullgraph=True), x, chunk
            )
            for chunk in MASK_CHUNKS
        },
    }


def training(settings: Settings) -> Rows:
    """One step (forward, backward, update) of every method, and many models trained as one."""
    table: Rows = []
    batches = (32,) if settings.quick else (256, 4096)
    for width in (settings.widths[0],) if settings.quick else (20, 50):
        for batch in batches:
            methods = _training_methods(width, batch, settings.compiled)
            timings = _best_chunk(in_turns(methods, settings.rounds))
            table += [
                {"width": width, "batch": batch, "method": name, "ms": 1e3 * t.best, "us per row": 1e6 * t.best / batch}
                for name, t in timings.items()
            ]
    return table


def _training_methods(width: int, batch: int, compiled: bool) -> dict[str, Run]:
    torch.manual_seed(0)
    x, y = torch.randn(batch, FEATURES), torch.randn(batch)
    plain = paper_network(FEATURES, rate=RATE, hidden=(width, width))
    methods: dict[str, Run] = {"deterministic": _step(plain, plain, x, y)}
    for name, nonlinearity, kind in METHODS:
        trained = paper_network(FEATURES, nonlinearity=nonlinearity, rate=RATE, hidden=(width, width))
        methods[name] = _step(trained, partial(_moments, as_function(trained), kind), x, y)
    sampled = MCDropout(FEATURES, width, 2, RATE).network
    methods["dropout network, one sample"] = _step(sampled, sampled, x, y)
    relu = paper_network(FEATURES, nonlinearity="relu", rate=RATE, hidden=(width, width))
    exact = nn.Sequential(*(ReLU("exact") if isinstance(m, ReLU) else m for m in relu))
    methods["ReLU full, exact"] = _step(exact, partial(_moments, as_function(exact), FactoredMoments), x, y)
    for chunk in sorted({min(chunk, batch) for chunk in PAPER_CHUNKS}):
        methods[f"ReLU full as in the paper/{chunk}"] = _step(relu, partial(_paper_moments, relu, chunk), x, y)
    if compiled and native.can_compile():
        torch.compiler.reset()  # of one function only a few versions are kept
        methods["deterministic, compiled"] = _step(plain, torch.compile(plain, fullgraph=True), x, y)
        for name, nonlinearity, kind in METHODS[:2]:
            network = paper_network(FEATURES, nonlinearity=nonlinearity, rate=RATE, hidden=(width, width))
            forward = torch.compile(partial(_moments, network, kind), fullgraph=True)
            methods[f"{name}, compiled"] = _step(network, forward, x, y)
    return methods


def _moments(network: Callable[[Any], Any], kind: Kind, x: Tensor) -> Any:
    return network(kind.certain(x))


def _paper_moments(network: nn.Sequential, chunk: int, x: Tensor) -> FullMoments:
    return FullMoments(*paper_relu(network, x, chunk))


def many_models(settings: Settings) -> Rows:
    """Steps per second of eighty small networks, trained as one stack and one by one."""
    count, batch, width = (4, 32, 8) if settings.quick else (80, 256, 20)
    torch.manual_seed(0)
    networks = [paper_network(FEATURES, rate=RATE, hidden=(width, width)) for _ in range(count)]
    x, y = torch.randn(count, batch, FEATURES), torch.randn(count, batch)
    table: Rows = []
    kinds: dict[str, Kind] = {"diagonal": DiagonalMoments, "exact": FactoredMoments}
    for name, kind in kinds.items():
        stack = Stack(networks)
        steps = [_step(net, partial(_moments, as_function(net), kind), x[i], y[i]) for i, net in enumerate(networks)]
        together = _step(stack, partial(_moments, stack, kind), x, y)
        timings = in_turns({"one by one": partial(_all, steps), "as one": together}, 5)
        table += [
            {"moments": name, "method": method, "model steps per second": count / t.best}
            for method, t in timings.items()
        ]
    return table


def _all(steps: Sequence[Run]) -> None:
    for step in steps:
        step()


def _step(network: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> Run:
    likelihood = HeteroscedasticGaussian()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss = -likelihood.expected_log_prob(forward(x), y).mean(-1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def latency(settings: Settings) -> Rows:
    """One row at a time: median and 99th percentile."""
    torch.manual_seed(0)
    x = torch.randn(1, FEATURES)
    table: Rows = []
    for width in (20, 100):
        mpgelu = paper_network(FEATURES, rate=RATE, hidden=(width, width))
        methods: dict[str, Run] = {
            "deterministic": partial(mpgelu, x),
            "MP-GELU diagonal": partial(_moments, mpgelu, DiagonalMoments, x),
            "MP-GELU exact (factored)": partial(_covariance, mpgelu, x),
            "exact, with predictive": partial(_predictive, mpgelu, x),
            "MC dropout, 50 samples": partial(MCDropout(FEATURES, width, 2, RATE), x),
        }
        with torch.no_grad():
            timings = in_turns(methods, 20 if settings.quick else 300)
        table += [
            {"width": width, "method": name, "median us": 1e6 * t.median, "p99 us": 1e6 * t.p99}
            for name, t in timings.items()
        ]
    return table


def _covariance(network: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, network(FactoredMoments.certain(x)).covariance)


def _predictive(network: nn.Module, x: Tensor) -> Predictive:
    return HeteroscedasticGaussian().predictive(network(FactoredMoments.certain(x)))


def growth(settings: Settings) -> Rows:
    """Exact MP-GELU against width, depth and number of features, with the exponent of a power law."""
    axes: dict[str, Sequence[int]] = {
        "width": (20, 50, 100, 200, 400),
        "depth": (1, 2, 3, 4, 5, 6),
        "features": (4, 16, 64, 256),
    }
    table: Rows = []
    for axis, sizes in axes.items():
        sizes = sizes[:2] if settings.quick else sizes
        base = {"width": 100, "depth": 2, "features": FEATURES}
        runs: dict[str, Run] = {
            str(size): _exact_prediction(**{**base, axis: size}, rows=settings.rows) for size in sizes
        }
        with torch.no_grad():
            timings = in_turns(runs, max(3, settings.rounds // 3))
        seconds = [timings[str(size)].best for size in sizes]
        exponent = np.polyfit(np.log(sizes[-3:]), np.log(seconds[-3:]), 1)[0]
        for size, value in zip(sizes, seconds, strict=True):
            memory = _peak_megabytes({**base, axis: size}, settings.rows)
            table.append(
                {"axis": axis, "size": size, "ms": 1e3 * value, "peak MB": memory, "exponent": float(exponent)}
            )
    return table


def _exact_prediction(width: int, depth: int, features: int, rows: int) -> Run:
    torch.manual_seed(0)
    return partial(propagate, network(features, [width] * depth, rate=RATE), torch.randn(rows, features))


def _peak_megabytes(sizes: dict[str, int], rows: int) -> float:
    """Memory that a prediction adds to a fresh process at its peak."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak, (sizes, rows))


def _measure_peak(sizes: dict[str, int], rows: int) -> float:
    torch.set_num_threads(1)
    with torch.no_grad():
        _exact_prediction(**sizes, rows=64)()
        run = _exact_prediction(**sizes, rows=rows)
        before = _high_water_mark()
        run()
    return _high_water_mark() - before


def _high_water_mark() -> float:
    """Largest resident memory of this process so far, in megabytes; ``ru_maxrss`` would inherit the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def counts(settings: Settings) -> Rows:
    """Special-function evaluations per row, counted while the plain torch rules run."""
    table: Rows = []
    rows = 16
    torch.manual_seed(0)
    x = torch.randn(rows, FEATURES)
    for width in settings.widths[:3]:
        for name, nonlinearity, kind in METHODS:
            counted = paper_network(FEATURES, nonlinearity=nonlinearity, rate=RATE, hidden=(width, width))
            with torch.no_grad(), native.disabled():
                found = special_functions(partial(_moments, counted, kind, x))
            per_row = {function: number / rows for function, number in found.items()}
            table.append({"width": width, "method": name, "total": sum(per_row.values()), **per_row})
    return table


def _without_native(run: Run) -> Run:
    def wrapped() -> object:
        with native.disabled():
            return run()

    return wrapped


def _best_chunk(timings: dict[str, Timing]) -> dict[str, Timing]:
    """Methods measured with several chunk sizes (name/size) count with their best."""
    best: dict[str, Timing] = {}
    for name, timing in timings.items():
        stem = name.split("/")[0]
        if stem not in best or timing.best < best[stem].best:
            best[stem] = timing
    return best


SECTIONS: dict[str, Callable[[Settings], Rows]] = {
    "inference": inference,
    "training": training,
    "models": many_models,
    "latency": latency,
    "growth": growth,
    "counts": counts,
}
