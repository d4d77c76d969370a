import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mpgelu import FactoredMoments, InputError, native, paper_network
from mpgelu.cli import app
from mpgelu.moments import FullMoments
from mpgelu.research.bench import compiled, report, workers
from mpgelu.research.bench.baselines import MCDropout, SharedMasks, exact_by_hand, paper_relu
from mpgelu.research.bench.feature_errors import by_set
from mpgelu.research.bench.in_docs import update_docs
from mpgelu.research.bench.measure import in_turns, special_functions
from mpgelu.research.bench.sections import Settings

SIZES = {"worst": 0.0123, "average": 0.0099, "se": 0.0041}


def test_the_hand_written_baselines_compute_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 9, dtype=torch.float64)
    mpgelu, relu = (
        paper_network(9, nonlinearity=name, rate=0.05, hidden=(12, 12)).double() for name in ("mpgelu", "relu")
    )
    for network, baseline, atol in ((mpgelu, exact_by_hand, 1e-12), (relu, paper_relu, 1e-6)):
        mean, covariance = baseline(network, x, 16)
        wanted = network(FullMoments.certain(x))
        torch.testing.assert_close(mean, wanted.mean, atol=atol, rtol=1e-6)
        torch.testing.assert_close(covariance, wanted.covariance, atol=atol, rtol=1e-6)


def test_shared_masks_sample_the_same_moments() -> None:
    """Against masks of its own for every row: both means within five standard errors, variances within a tenth."""
    torch.manual_seed(0)
    x, usual = torch.randn(3, 9), MCDropout(9, 12, 2, 0.2, samples=4000)
    shared = SharedMasks(usual.network, 4000)
    with torch.no_grad():
        (mean, variance), (wanted, true) = shared(x), usual(x)
        draws = shared.draws(torch.cat([x[:1], x[:1]]))
    assert ((mean - wanted).abs() < 5 * (2 * true / 4000).sqrt()).all()
    torch.testing.assert_close(variance, true, rtol=0.1, atol=0)
    torch.testing.assert_close(draws[:, 0], draws[:, 1])  # all rows have the same mask in a draw
    assert len({tuple(draw) for draw in draws[:, 0].tolist()}) > 3000


def test_sections_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    first = {"environment": report.environment(threads=1), "rounds": 1, "growth": [{"a": 1}], "counts": [{"a": 1}]}
    assert report.merged(first, tmp_path) == first
    report.write_json(first, tmp_path / "bench.json")
    both = report.merged({"rounds": 3, "counts": [{"a": 2}]}, tmp_path)
    assert (both["rounds"], both["growth"], both["counts"]) == (1, [{"a": 1}], [{"a": 2}])
    assert both["apart"] == ["counts"]


def test_what_size_costs() -> None:
    rows = [{"axis": "depth", "size": size, "ms": ms} for size, ms in ((1, 2.0), (2, 5.0), (6, 50.0))]
    assert [(row["from"], row["to"], row["times longer"]) for row in report.costs(rows)] == [(1, 6, 25), (2, 6, 10)]


def test_turns_are_counted_after_the_warm_up() -> None:
    calls: list[str] = []
    timings = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 5
    assert all(0 < t.best <= t.median <= t.p99 for t in timings.values())


def test_special_functions_are_counted_by_element() -> None:
    x = torch.rand(4, 5)
    assert special_functions(lambda: (x.exp(), x.sqrt_(), torch.erfc(x[0]), x + 1)) == {
        "erfc": 5,
        "exp": 20,
        "sqrt": 20,
    }


def test_factored_needs_as_many_special_functions_as_diagonal() -> None:
    x, network = torch.randn(3, 9), paper_network(9, rate=0.05, hidden=(30, 30))
    with torch.no_grad(), native.disabled():
        found = special_functions(lambda: network(FactoredMoments.certain(x)))
    assert found == {"erfc": 3 * 60, "sqrt": 3 * 60}


def test_smoke_run_writes_everything(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:start -->\nold\n<!-- bench:end -->\nafter\n")
    docs = tmp_path / "docs.md"
    docs.write_text("before\n<!-- feature-errors:start -->\nold\n<!-- feature-errors:end -->\nafter\n")
    arguments = ["--quick", "--no-compiled", "--rounds", "1", "-o", str(tmp_path / "out"), "--docs", str(docs)]
    result = CliRunner().invoke(app, ["bench", *arguments, "--json", str(tmp_path / "b.json"), "--readme", str(readme)])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "b.json").read_text())
    assert {"environment", "inference", "training", "models", "latency", "growth", "counts"} <= set(results)
    plain, converted = results["conversion"]
    assert converted["times faster"] == pytest.approx(plain["ms"] / converted["ms"])
    assert 0 < converted["stddev error"] <= converted["stddev error, worst row"] < 0.5
    errors = {row["method"]: (row["mean error"], row["stddev error"]) for row in results["accuracy"]}
    assert max(errors["MP-GELU exact (factored)"]) < 1e-3 < min(errors["MC dropout, 10 draws"])
    for name in ("inference", "training", "latency", "growth", "counts", "accuracy"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (errors_of_features,) = results["feature-errors"]
    for name in ("mean", "stddev"):
        assert 0 < errors_of_features[f"{name} average"] <= errors_of_features[f"{name} worst"]
        assert errors_of_features[f"{name} worst"] < 5 * errors_of_features[f"{name} se"] + 0.05
    rates = {(row["task"], row["method"]): row["rows per second"] for row in results["workers"]}
    assert {("fit", "MP-GELU"), ("predict", "MP-GELU")} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
    predicted = {(row["rows"], row["method"]): row["us a row"] for row in results["prediction"]}
    assert {(1, "mean"), (1, "interval, torch only"), (50, "everything at once")} <= set(predicted)
    assert all(time > 0 for time in predicted.values())
    for row in results["threads"]:
        assert row["times faster"] == pytest.approx(row["seconds, 1 threads"] / row["seconds, 2 threads"])
    for row in results["kernels"]:
        assert row["times faster"] == pytest.approx(row["torch only, ms"] / row["ms"])
    (memory,) = results["memory"]
    assert memory["before, MB"] > 50
    assert min(memory["fit adds, MB"], memory["100 intervals add, MB"]) >= 0
    without, with_estimator = results["imports"]
    assert with_estimator["over the first"] == pytest.approx(with_estimator["seconds"] / without["seconds"])
    assert "| 0.05: mean, in standard deviations | " in docs.read_text()
    assert "old" not in docs.read_text()
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| MP-GELU exact (factored) |" in text


def test_the_table_of_feature_errors_has_a_column_for_each_set() -> None:
    sizes = {f"{name} {word}": value for name in ("mean", "stddev") for word, value in SIZES.items()}
    rows = [{"set": name, "error": error, **sizes} for name in ("boston", "yacht") for error in (0.05, 0.2)]
    table = by_set(rows)
    assert [line["error"] for line in table] == [
        f"{error}: {words}"
        for error in ("0.05", "0.2")
        for words in ("mean, in standard deviations", "standard deviation")
    ]
    assert table[0] == {
        "error": "0.05: mean, in standard deviations",
        "Boston": "0.012 (0.010; 0.004)",
        "Yacht": "0.012 (0.010; 0.004)",
    }
    assert table[1]["Yacht"] == "1.2% (1.0%; 0.4%)"


def test_a_table_of_what_is_not_measured_is_refused(tmp_path: Path) -> None:
    for arguments in (["--sections", "counts", "--docs", "x.md"], ["--sections", "feature-errors", "--docs", "x.md"]):
        result = CliRunner().invoke(app, ["bench", *arguments, "-o", str(tmp_path)])
        assert result.exit_code != 0
        assert "--docs" in str(result.exception)


def test_targets_are_ratios_of_one_run() -> None:
    rows = [
        {"method": "ReLU full as in the paper", "width": 20, "ms": 130.0},
        {"method": "MP-GELU exact (factored)", "width": 20, "ms": 10.0},
        {"method": "MC dropout, 50 samples", "width": 20, "ms": 100.0},
    ]
    met = {row["ratio"]: (row["measured"], row["met"]) for row in report.targets({"inference": rows})}
    assert met["exact faster than full ReLU as in the paper, n = 20"] == ("13.00x", "yes")
    assert met["exact faster than MC dropout with 50 samples, n = 20"] == ("10.00x", "no")


def test_a_readme_without_marks_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    environment = {"environment": report.environment(threads=1)}
    with pytest.raises(InputError, match=r"README.md has no marks <!-- bench:start -->"):
        report.update_readme({"inference": [], "predicted_rows": 1, "features": 1, "rounds": 1} | environment, readme)


def test_the_table_of_workers_goes_where_its_marks_are(tmp_path: Path) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text("before\n<!-- workers:start -->\nold\n<!-- workers:end -->\nafter\n")
    arguments = ["--sections", "workers", "--quick", "--rounds", "1", "-o", str(tmp_path / "out"), "--docs", str(docs)]
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    assert "| fit | MP-GELU | 1 | 60 |" in docs.read_text()
    assert "old" not in docs.read_text()


def test_a_page_gets_the_tables_whose_marks_it_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- onnx:start -->\nold\n<!-- onnx:end -->\n<!-- conversion:start -->\n<!-- conversion:end -->\n")
    times = (("deterministic", 8.0, 1.0), ("MP-GELU exact", 32.0, 4.0), ("MP-GELU exact, quantiles", 48.0, 6.0))
    errors = {"mean error": 0.01, "mean error, worst row": 0.03, "stddev error": 0.02, "stddev error, worst row": 0.07}
    results = {
        "environment": report.environment(threads=1),
        "rounds": 3,
        "onnx": [
            {"width": 48, "networks": 1, "method": name, "us": us, "over deterministic": ratio}
            for name, us, ratio in times
        ],
        "conversion": [{"method": "MC dropout, 20 samples"}, {"rows": 7, "times faster": 30.4, **errors}],
    }
    update_docs(results, page)
    text = page.read_text()
    assert "old" not in text
    assert "| 2 x 48 | 1 | 8 | 4.0x | 6.0x |" in text
    assert "7 rows; 30 times faster than MC dropout, 20 samples." in text
    assert "| standard deviation | 2.0% | 7.0% |" in text
    del results["onnx"]
    with pytest.raises(InputError, match="wants tables of sections that were not measured: onnx"):
        update_docs(results, page)
    page.write_text("no marks")
    with pytest.raises(InputError, match="feature-errors, conversion, onnx, workers"):
        update_docs(results, page)


def test_the_table_of_rows_goes_where_its_marks_are(tmp_path: Path) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text("<!-- rows:start -->\nold\n<!-- rows:end -->\n")
    arguments = ["--sections", "rows", "--quick", "--rounds", "1", "-o", str(tmp_path / "out"), "--docs", str(docs)]
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    held = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert isinstance(held["predicted_rows"], int)  # not the section of this name
    (first, *_) = held["rows"]
    assert first["fit, rows per second"] == pytest.approx(60 / first["fit, s"])
    assert 0.1 < first["error of the mean"] < 3
    assert "| 60 | MP-GELU |" in docs.read_text()


def test_the_clock_of_turns_can_be_chosen() -> None:
    times = iter(range(100))
    found = in_turns({"a": lambda: next(times)}, rounds=2, clock=lambda: float(next(times)))
    assert found["a"].best == found["a"].median == 2.0  # the function itself takes a tick


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
def test_a_compiled_network_is_one_graph_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = functools.partial(torch.compile, backend="aot_eager")  # the graph, without minutes of a C++ compiler
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(native, "can_compile", lambda: True)
    table = compiled.compiled(Settings(rounds=1, quick=True))
    assert [(row["moments"], row["task"]) for row in table][:2] == [
        ("diagonal", "prediction"),
        ("diagonal", "training step"),
    ]
    for row in table:
        assert row["times faster than eager"] == pytest.approx(row["eager, ms"] / row["compiled, ms"])
        assert (row["kernel, ms"] == "-") == ("Gaussian" in row["moments"])
    assert not compiled.compiled(Settings(compiled=False))


def test_numbers_of_workers_double_up_to_the_cores() -> None:
    assert workers._counts(1) == [1]
    assert workers._counts(6) == [1, 2, 4]
    assert workers._counts(8) == [1, 2, 4, 8]
