"""The report: what stands in it, that it needs nothing else, and how it looks in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from base64 import b64decode
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from houses import QUICK, houses
from mpgelu.tables.evaluation import Evaluation
from mpgelu.tables.model import TableModel
from mpgelu.tables.report import figures, page
from mpgelu.tables.report.groups import least_sure_groups

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "img", "br", "link", "input"}


class Elements(HTMLParser):
    """Elements of a page with their attributes; every one that is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def evaluated(model: TableModel, frame: pd.DataFrame) -> Evaluation:
    return model.evaluate(model.encoder.encode(frame), frame[model.target].to_numpy())


@pytest.fixture(scope="module")
def model() -> TableModel:
    table = houses().rename(columns={"price": "price ($)", "city": "<b>city</b>"})
    return TableModel.fit(table, "price ($)", **QUICK | {"steps": 300})


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    frame = houses(150, seed=1).rename(columns={"price": "price ($)", "city": "<b>city</b>"})
    frame.loc[77, "price ($)"] = 5000.0  # a surprise
    return frame


@pytest.fixture(scope="module")
def text(model: TableModel, rows: pd.DataFrame) -> str:
    return page(model, rows, evaluated(model, rows), 0.9, "new.csv", "model & co")


def test_one_page_that_needs_nothing_else(text: str) -> None:
    elements = Elements(text)
    assert len(text.encode()) < 3e6
    assert not elements.all("script")
    assert not elements.all("link")
    assert all((image["src"] or "").startswith("data:image/svg+xml;base64,") for image in elements.all("img"))
    assert not re.search(r"url\(|@import|https?://", text)
    assert 'name="viewport"' in text
    assert "@media print" in text


def test_every_figure_is_described_and_drawn(text: str) -> None:
    images = Elements(text).all("img")
    assert len(images) == 6
    for image in images:
        assert len(image["alt"] or "") > 40
        drawing = b64decode((image["src"] or "").partition(",")[2]).decode()
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.findall(".//{http://www.w3.org/2000/svg}text")  # letters, not outlines of letters
    drawings = [b64decode((image["src"] or "").partition(",")[2]).decode() for image in images]
    assert any("price ($)" in drawing for drawing in drawings)
    assert "&lt;b&gt;city&lt;/b&gt; Oslo</text>" in drawings[4]


def test_names_are_text_and_never_markup(text: str) -> None:
    assert "<b>" not in text
    assert "&lt;b&gt;city&lt;/b&gt;" in text
    assert "model &amp; co" in text


def test_the_headlines_and_the_baseline(text: str, model: TableModel, rows: pd.DataFrame) -> None:
    evaluation = evaluated(model, rows)
    words = Elements(text).text
    scores, average = evaluation.scores(), model.average(evaluation.actual).scores()
    assert f"{scores['r2']:.3f}" in words
    assert f"average: {average['log_likelihood']:.3f}" in words
    assert f"hold {int(evaluation.inside.sum())} of 150 targets; promised were 135" in words
    for name in ("RMSE", "MAE", "R²", "log-likelihood", "CRPS", "coverage of 90 % intervals", "mean width"):
        assert name in words


def test_the_largest_surprise_comes_first(text: str) -> None:
    surprises = text[text.index("Largest surprises</h2>") :]
    cells = re.findall(r"<td>(.*?)</td>", surprises)
    assert cells[:2] == ["78", "5,000"]
    assert cells[5].startswith("+")


def test_the_same_report_twice_is_the_same_file(text: str, model: TableModel, rows: pd.DataFrame) -> None:
    assert page(model, rows, evaluated(model, rows), 0.9, "new.csv", "model & co") == text


@pytest.mark.parametrize("count", [1, 2, 30])
def test_few_rows_are_enough(count: int, model: TableModel, rows: pd.DataFrame) -> None:
    some = rows.head(count)
    text = page(model, some, evaluated(model, some), 0.9, "new.csv", "model")
    Elements(text)
    assert f"tried on {count} row" in text
    assert "nan" not in re.sub(r"base64,[^\"]+", "", text).lower()


def test_a_calibrated_model_shows_both_curves(rows: pd.DataFrame) -> None:
    table = houses().rename(columns={"price": "price ($)", "city": "<b>city</b>"})
    model = TableModel.fit(table, "price ($)", calibrate=0.1, **QUICK)
    text = page(model, rows, evaluated(model, rows), 0.9, "new.csv", "model")
    assert "Intervals calibrated on 30 further rows" in text
    drawings = [b64decode(source).decode() for source in re.findall(r"base64,([^\"]+)", text)]
    assert sum("calibrated intervals" in drawing for drawing in drawings) == 1


# what the figures compute


def perfect(rows: int = 4000, scale: float = 1.0) -> Evaluation:
    """Normal targets around zero, predicted with a standard deviation that may be wrong by a factor."""
    actual = np.random.default_rng(0).normal(size=rows)
    return Evaluation.of_average(actual, 0.0, scale, 0.9)


def test_the_curve_of_a_calibrated_model_is_the_diagonal() -> None:
    np.testing.assert_allclose(figures.coverage_by_level(perfect()), figures.LEVELS, atol=0.03)
    assert (figures.coverage_by_level(perfect(scale=0.5)) < figures.LEVELS).all()


def test_the_band_of_chance_holds_95_percent() -> None:
    low, high = figures._band(np.array([0.3]), 200)
    shares = np.random.default_rng(0).binomial(200, 0.3, 10_000) / 200
    assert np.mean((shares >= low) & (shares <= high)) == pytest.approx(0.95, abs=0.02)


def test_descriptions_tell_what_is_to_be_seen() -> None:
    assert "percent" in figures.ranks(perfect()).description
    described = figures.calibration(perfect(scale=10.0), None).description
    assert "100 % observed at 80 % promised" in described
    assert "0 of 4000 intervals miss" in figures.predicted_and_actual(perfect(scale=10.0), "y", 0.9).description


def test_groups_that_the_model_is_least_sure_of(model: TableModel, rows: pd.DataFrame) -> None:
    stddev = np.where(rows["<b>city</b>"] == "Oslo", 3.0, 1.0)
    first, *others = least_sure_groups(rows, model.encoder, stddev)
    assert first.name == "<b>city</b> Oslo"
    assert first.rows == int((rows["<b>city</b>"] == "Oslo").sum())
    assert first.ratio == pytest.approx(3 / stddev.mean())
    assert all(group.ratio < first.ratio for group in others)


def test_groups_of_a_column_of_numbers(model: TableModel, rows: pd.DataFrame) -> None:
    stddev = np.where(rows["area"] > rows["area"].quantile(0.8), 2.0, 1.0)
    first = least_sure_groups(rows, model.encoder, stddev)[0]
    assert re.fullmatch(r"area from \d+", first.name)
    stddev = np.where(rows["year"].isna(), 2.0, 1.0)
    assert least_sure_groups(rows, model.encoder, stddev)[0].name == "year missing"


# in a browser


def chromium(*arguments: object) -> bytes:
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000")
    command = [CHROMIUM, *options, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_width_of_a_phone_and_of_a_desk(width: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "frame.html").write_text(
        f"<iframe id='f' style='width:{width}px;height:900px;border:0' srcdoc='{escape(text)}'></iframe><script>"
        "document.getElementById('f').onload = event => {"
        " const page = event.target.contentDocument;"
        " const images = [...page.images].filter(image => image.complete && image.naturalWidth > 0).length;"
        " document.title = `${page.documentElement.scrollWidth} wide, ${images} images`; }</script>",
        encoding="utf-8",
    )
    dumped = chromium("--dump-dom", f"--window-size={width + 100},1000", (tmp_path / "frame.html").as_uri()).decode()
    assert f"<title>{width} wide, 6 images</title>" in dumped


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_screenshot_is_not_blank(text: str, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    picture = tmp_path / "report.png"
    chromium(f"--screenshot={picture}", "--window-size=1280,4000", (tmp_path / "report.html").as_uri())
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 200
