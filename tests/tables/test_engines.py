"""Predictions of tables on Dask, Ray and Spark: the method ``predict`` is all that they need."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mpgelu as mp
from houses import QUICK, houses
from mpgelu.tables.model import OUTPUTS, TableModel

# What engines say of the versions of each other is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:PySpark:FutureWarning")
SCHEMA = ", ".join(f"{name} double" for name in OUTPUTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TableModel:
    """A model as a worker gets it, from a file."""
    path = tmp_path_factory.mktemp("model") / "houses.mpgelu"
    TableModel.fit(houses(), "price", **QUICK).save(path)
    found: TableModel = mp.load(path)
    return found


@pytest.fixture(scope="module")
def new() -> pd.DataFrame:
    return houses(50, seed=1).drop(columns="price")


@pytest.fixture(scope="module")
def expected(model: TableModel, new: pd.DataFrame) -> pd.DataFrame:
    return model.predict(new, level=0.8)


def close(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Equal but for the last bits of sums, which depend on the rows at a time."""
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected.reset_index(drop=True), rtol=1e-6)


def test_a_model_is_sent_as_it_is_and_without_its_training_rows(model: TableModel, new: pd.DataFrame) -> None:
    sent = pickle.dumps(model)
    pd.testing.assert_frame_equal(pickle.loads(sent).predict(new), model.predict(new), rtol=0, atol=0)
    assert len(sent) < 200_000


def test_no_rows_have_the_columns_and_types_of_predictions(model: TableModel, new: pd.DataFrame) -> None:
    meta = model.predict(new.head(0))
    assert list(meta) == list(OUTPUTS)
    assert set(map(str, meta.dtypes)) == {"float64"}
    assert len(meta) == 0


def test_a_dask_data_frame(dask_client: Any, model: TableModel, new: pd.DataFrame, expected: pd.DataFrame) -> None:
    dd = pytest.importorskip("dask.dataframe")
    table = dd.from_pandas(new, npartitions=3)
    predicted = table.map_partitions(model.predict, level=0.8, meta=model.predict(new.head(0)))
    assert list(predicted.columns) == list(OUTPUTS)  # known before anything is computed
    found = predicted.compute()
    close(found, expected)
    pd.testing.assert_index_equal(found.index, new.index)


def test_ray_data(ray_cluster: Any, model: TableModel, new: pd.DataFrame, expected: pd.DataFrame) -> None:
    data = pytest.importorskip("ray.data")
    table = data.from_pandas(new).repartition(2)
    predicted = table.map_batches(model.predict, batch_format="pandas", batch_size=20, fn_kwargs={"level": 0.8})
    close(predicted.to_pandas()[list(OUTPUTS)].astype(float), expected)  # of Arrow types in Ray


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql")
    environment = pytest.MonkeyPatch()
    environment.setenv("PYSPARK_PYTHON", sys.executable)  # workers would be those of python3 on the path
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("spark"))).getOrCreate()
    yield session
    session.stop()
    environment.undo()


def spark_table(spark: Any, frame: pd.DataFrame, folder: Path) -> Any:
    frame.to_parquet(folder / "new.parquet", index=False)
    return spark.read.parquet(str(folder / "new.parquet"))


def test_spark_maps_batches(
    spark: Any, model: TableModel, new: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path
) -> None:
    def score(parts: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for part in parts:
            yield model.predict(part, level=0.8)

    close(spark_table(spark, new, tmp_path).mapInPandas(score, SCHEMA).toPandas(), expected)


def test_a_pandas_udf_of_spark(
    spark: Any, model: TableModel, new: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path
) -> None:
    from pyspark.sql.functions import pandas_udf, struct

    score = pandas_udf(lambda rows: model.predict(rows, level=0.8), SCHEMA)
    table = spark_table(spark, new, tmp_path)
    close(table.select(score(struct(*table.columns)).alias("p")).select("p.*").toPandas(), expected)
