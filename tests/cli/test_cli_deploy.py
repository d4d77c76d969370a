"""``mpgelu export``, ``explain`` and ``verify`` from saved model and CSV to files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from typer.testing import CliRunner

import mpgelu as mp
from houses import QUICK, houses
from mpgelu.cli import app, deploy
from mpgelu.errors import DataError, InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model and a table with a column more than its features."""
    folder = tmp_path_factory.mktemp("deploy")
    generator = np.random.default_rng(0)
    X = pd.DataFrame(generator.normal(size=(120, 2)), columns=["a", "b"])
    y = X.a + generator.normal(size=120)
    model = mp.MPGELURegressor(
        (6,), rate=0.1, sigma=None, steps=100, folds=2, random_state=0, moments=mp.FactoredMoments, diverse=False
    ).fit(X, y)
    model.save(folder / "model.mpgelu")
    X.assign(y=y).iloc[:, ::-1].to_csv(folder / "data.csv", index=False)
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_export(folder: Path, tmp_path: Path) -> None:
    result = run("export", folder / "model.mpgelu", "--onnx", tmp_path / "m.onnx", "--quantiles", "0.1,0.9")
    assert result.exit_code == 0, result.output
    X = pd.read_csv(folder / "data.csv")[["a", "b"]]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    mean, quantiles = session.run(["mean", "quantiles"], {"features": X.to_numpy(np.float32)})
    model = mp.load(folder / "model.mpgelu")
    np.testing.assert_allclose(mean, model.predict(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(quantiles, model.predict_quantile(X, [0.1, 0.9]), rtol=1e-4, atol=1e-4)


def test_export_of_a_calibrated_model_of_a_table(tmp_path: Path) -> None:
    """Its interval is the calibrated one, and the documented encoding of the columns is the library's."""
    model = mp.TableModel.fit(houses(400), "price", calibrate=0.25, **QUICK)
    model.save(tmp_path / "model")
    result = run("export", tmp_path / "model", "--onnx", tmp_path / "m.onnx")
    assert result.exit_code == 0, result.output
    assert f"takes the {len(model.encoder.features)} encoded columns" in result.output
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    about = session.get_modelmeta().custom_metadata_map
    assert (json.loads(about["feature_names"]), about["target"]) == (model.encoder.features, "price")
    new = houses(50, seed=1)
    new.loc[3, "city"] = "Narvik"
    new["garage"] = new["garage"].fillna("null")
    new.to_csv(tmp_path / "new.csv", index=False)
    (program,) = re.findall(r"```python\n(# encode\.py.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    with (tmp_path / "new.csv").open(newline="") as file:
        rows = [names["encoded"](about, row) for row in csv.DictReader(file)]
    np.testing.assert_array_equal(rows, model.encoder.encode(new).X)
    lower, upper = session.run(["lower", "upper"], {"features": np.array(rows, dtype=np.float32)})
    wanted = model.predict(new, level=0.9)
    np.testing.assert_allclose(lower, wanted.lower, rtol=1e-4)
    np.testing.assert_allclose(upper, wanted.upper, rtol=1e-4)
    mp.export_onnx(model, tmp_path / "lopsided.onnx", q=(0.1, 0.95))
    model.regressor.calibration_scores_ = np.arange(10.0)
    with pytest.warns(UserWarning, match="lower and upper are left out: an interval of level 0.98 needs at least 49"):
        mp.export_onnx(model, tmp_path / "wide.onnx", q=(0.01, 0.99))
    mp.export_onnx(model, tmp_path / "twice.onnx", q=(0.5, 0.5))
    assert "lower" not in [out.name for out in onnxruntime.InferenceSession(tmp_path / "lopsided.onnx").get_outputs()]


def test_explain(folder: Path, tmp_path: Path) -> None:
    paths = tmp_path / "out.csv", tmp_path / "figure.png"
    options = ("-o", paths[0], "--plot", paths[1], "--input-std", "a=0.5")
    result = run("explain", folder / "model.mpgelu", folder / "data.csv", *options)
    assert result.exit_code == 0, result.output
    frame = pd.read_csv(paths[0])
    assert (frame.row.min(), frame.row.max()) == (1, 120)
    X = pd.read_csv(folder / "data.csv")[["a", "b"]]
    _, stddev = mp.load(folder / "model.mpgelu").predict(X, return_std=True, input_std=[0.5, 0.0])
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), stddev**2, rtol=1e-5)
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert "of the variance of all rows" in result.output
    assert all(kind in result.output for kind in ("noise", "input", "dropout", "mpgelu", "disagreement"))


def test_verify(folder: Path) -> None:
    result = run("verify", folder / "model.mpgelu", folder / "data.csv", "--rows", 5, "--draws", 4000, "--networks", 2)
    assert result.exit_code == 0, result.output
    assert "4000 draws, 5 rows" in result.output
    assert "Means and covariances agree with sampling at every layer." in result.output
    assert "skew" in result.output
    model = mp.load(folder / "model.mpgelu")
    model.ensemble_.moment_type = mp.DiagonalMoments
    audit = mp.verify(model, pd.read_csv(folder / "data.csv")[["a", "b"]][:3], draws=4000)
    assert not audit.passed
    assert "Means or covariances disagree with sampling" in audit.words()


def test_verify_with_errors_of_the_features(folder: Path) -> None:
    options = ("--rows", 2, "--draws", 4000, "--networks", 1)
    result = run("verify", folder / "model.mpgelu", folder / "data.csv", *options, "--input-std", "a=0.5, b=0.1")
    assert result.exit_code == 0, result.output
    assert "errors of the features: mean 0." in result.output
    assert "Predictions with errors of the features agree with averaging over random inputs" in result.output
    result = run("verify", folder / "model.mpgelu", folder / "data.csv", "--input-std", "c=0.5")
    assert result.exit_code != 0
    assert "no feature 'c'" in str(result.exception)


def test_verify_says_what_it_cannot_tell(folder: Path, tmp_path: Path) -> None:
    table = pd.read_csv(folder / "data.csv")
    model = mp.MPGELURegressor(
        (6,), rate=1e-4, sigma=None, steps=10, folds=2, random_state=0, moments=mp.FactoredMoments, diverse=False
    )
    model.fit(table[["a", "b"]], table.a).save(tmp_path / "model.mpgelu")
    result = run("verify", tmp_path / "model.mpgelu", folder / "data.csv", "--draws", 100, "--networks", 1)
    assert result.exit_code == 0, result.output
    assert "undecided" in result.output
    assert "neither right nor wrong: too rarely random for 100 draws" in result.output
    assert "FAIL" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,c\n1,2\n", "has no column 'b'; the model wants a, b"),
        ("a,b\n1,x\n", "bad.csv, column 'b', line 2: 'x' is not a number"),
        ("a,b\n1,\n", "bad.csv, column 'b', line 2: missing value; fill it in, or leave out the row"),
        ("a,b\n", "has no rows below its header"),
        ("", "is empty"),
    ],
)
def test_bad_tables(content: str, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        deploy._read(mp.load(folder / "model.mpgelu"), tmp_path / "bad.csv", ",")


def test_rows_far_from_the_training_data(tmp_path: Path) -> None:
    mp.TableModel.fit(houses(100), "price", **QUICK).save(tmp_path / "model")
    frame = houses(5, seed=1)
    frame.loc[2, "area"] = 1e9
    frame.to_csv(tmp_path / "far.csv", index=False)
    result = run("explain", tmp_path / "model", tmp_path / "far.csv", "-o", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    assert "1 cells are far outside the range" in result.output
    assert "features outside the range of the training data" in result.output
    assert "nan" not in result.output
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv").groupby("row").share.sum(), 1)


def test_models_of_tables_are_taken_as_they_are(tmp_path: Path) -> None:
    model, frame = mp.TableModel.fit(houses(100), "price", **QUICK), houses(5, seed=1)
    parts = mp.attribute(model, frame)
    np.testing.assert_allclose(parts.groupby("row").variance.sum(), model.predict(frame).stddev ** 2, rtol=1e-4)
    assert "city = Oslo" in set(parts.unit)
    assert len(mp.verify(model, frame, draws=200, networks=1).layers) > 3


def test_another_delimiter(folder: Path, tmp_path: Path) -> None:
    pd.read_csv(folder / "data.csv").to_csv(tmp_path / "other.csv", index=False, sep=";")
    for command in (("verify", "--draws", 500), ("explain", "-o", tmp_path / "out.csv")):
        result = run(command[0], folder / "model.mpgelu", tmp_path / "other.csv", *command[1:], "--delimiter", ";")
        assert result.exit_code == 0, result.output


def test_errors_of_features() -> None:
    assert deploy._errors("b = 0.5, a=b=0.1", ["a=b", "c", "b"]) == [0.1, 0.0, 0.5]


def test_bad_options(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--quantiles: wants numbers separated by commas, got 'x'"):
        deploy.export(folder / "model.mpgelu", tmp_path / "m.onnx", "x")
    with pytest.raises(InputError, match="no feature 'z'; there are a, b"):
        deploy._errors("z=1", ["a", "b"])
    with pytest.raises(InputError, match="no feature 'wieght'; did you mean 'weight'"):
        deploy._errors("wieght=1", ["weight", "b"])
    with pytest.raises(InputError, match=r"wants pairs such as a=0\.1, got 'a'"):
        deploy._errors("a", ["a", "b"])
    with pytest.raises(InputError, match=r"wants pairs such as a=0\.1, got '0\.5'"):
        deploy._errors("0.5", ["a", "b"])


@pytest.mark.parametrize("plot", ["figure.foo", "figure", "out.png"])
def test_pictures_of_an_unknown_kind(plot: str, folder: Path, tmp_path: Path) -> None:
    options = ("-o", tmp_path / "out.png", "--plot", tmp_path / plot)
    result = run("explain", folder / "model.mpgelu", folder / "data.csv", *options)
    assert isinstance(result.exception, InputError)
    assert "--plot: wants another file that ends in .png, .pdf, .svg, .jpg, got" in str(result.exception)


def test_explanations_that_cannot_be_written(folder: Path) -> None:
    inside_a_file = folder / "data.csv" / "sources.csv"
    result = run("explain", folder / "model.mpgelu", folder / "data.csv", "-o", inside_a_file)
    assert isinstance(result.exception, DataError)
    assert "cannot write" in str(result.exception)
