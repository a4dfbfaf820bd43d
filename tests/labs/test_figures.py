"""Figures as text and as SVG: axes that hold their values, labels that do not overlap, and nothing from elsewhere."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.inspect.layout import text_width
from manyheads.labs.figures import Bars, Drawing, Heatmap, Lines, Table
from manyheads.labs.results import figure_from, figure_tree
from manyheads.labs.views.axes import format_number, make_axis
from manyheads.labs.views.figures_svg import to_svg
from manyheads.labs.views.figures_text import to_text, x_ticks
from manyheads.labs.views.heatmap_svg import MAX_SIDE, cell_size
from manyheads.labs.views.page_html import figure_html

CURVES = {"measured": [(1, 0.5), (2, 0.25), (4, 0.125)], "bound": [(1, 1.0), (2, 0.5), (4, 0.25)]}
LINES = Lines("A title", "length", "distance", CURVES, {"chance": 0.1})
BARS = Bars("Scores", "BLEU", {"none": -2.0, "sinusoidal": 34.5, "a": 0.0}, {"none": 0.5}, {"copying": 8.0})
MATRIX = Heatmap("Weights", [[1.0, None], [0.25, -0.75]], ["the", "dog"], ["the", "dog"], "query", "key")
LARGE = Heatmap("Large", [[None if j > i else math.cos(i - j) for j in range(120)] for i in range(120)])
TABLE = Table("Costs", ["part", "count"], [["encoder", 1048576], ["all", None]])
CLOSE = Lines("Close lengths", "length", "y", {"": [(x, 1.0) for x in (1000, 1001, 1002, 2000)]}, log_x=True)
DRAWN = [LINES, replace(LINES, log_x=True, log_y=True), CLOSE, BARS, MATRIX, LARGE]
HOSTILE = "<script>alert('x')</script> & \x00"
numbers = st.floats(-1e12, 1e12).map(lambda x: x if abs(x) > 1e-12 else 0.0)


def texts(svg):
    """The labels of an SVG with their place, their anchor and an upper estimate of their width."""
    for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "transform" not in one.attrib:
            width = text_width(one.text or "", "title" if one.get("class") == "mh-text-title" else "line")
            shift = {"middle": 0.5, "end": 1.0}.get(one.get("text-anchor"), 0.0)
            yield float(one.get("x")) - shift * width, float(one.get("y")), width, one.text


@given(values=st.lists(numbers, min_size=1, max_size=20), zero=st.booleans(), ticks=st.integers(2, 10))
def test_a_linear_axis_holds_its_values_between_even_ticks(values, zero, ticks):
    axis = make_axis(values, log=False, zero=zero, max_ticks=ticks)
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    steps = [b - a for a, b in pairwise(axis.ticks)]
    assert min(steps) > 0
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    assert 2 <= len(axis.ticks) <= ticks + 3
    assert len(set(axis.labels)) == len(axis.labels), axis.labels


positive = st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20)
lengths = st.lists(st.integers(1, 4096).map(float), min_size=1, max_size=8)  # few: all of them are ticks


@given(values=positive | lengths, ticks=st.integers(2, 10))
def test_a_logarithmic_axis_holds_its_values(values, ticks):
    axis = make_axis(values, log=True, max_ticks=ticks)
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert len(set(axis.labels)) == len(axis.labels), axis.labels
    assert len(axis.ticks) <= ticks + 3


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 0.3, 1], "0 0.2 0.4 0.6 0.8 1.0"), ([1, 2, 3], "1 2 3"), ([0, 24], "0 5 10 15 20 25"),
        ([-0.08, 0.12], "−0.10 −0.05 0 0.05 0.10 0.15"), ([0, 52000], "0 20,000 40,000 60,000"),
    ],
)  # fmt: skip
def test_ticks_are_round_numbers(values, labels):
    assert " ".join(make_axis(values, log=False).labels) == labels


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345, "12,345"), (0.0123, "0.0123"), (1.5e-12, "1.5e-12"), (-0.25, "−0.25"), (3.14159, "3.14"), (0.0, "0")],
)
def test_a_number_has_few_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: f"{type(figure).__name__} {figure.title}")
def test_an_svg_is_whole_and_its_labels_are_inside_and_apart(figure):
    svg = to_svg(figure)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find("{http://www.w3.org/2000/svg}title").text == figure.title
    assert root.find("{http://www.w3.org/2000/svg}desc").text
    assert "prefers-color-scheme: dark" in svg
    assert "<script" not in svg
    assert not re.search(r'(?:href|src)="(?!data:|#)', svg)
    labels = list(texts(svg))
    for x, y, width, text in labels:
        assert -1 <= x <= x + width <= float(root.get("width")) + 1, text
        assert 0 <= y <= float(root.get("height")), text
    rows = sorted((y, x, width, text) for x, y, width, text in labels if text)
    for (y, x, width, text), (y2, x2, _, text2) in pairwise(rows):
        assert y != y2 or x + width <= x2 + 1, (text, text2)


def test_a_style_is_left_to_the_page():
    assert "<style>" not in to_svg(LINES, has_style=False)
    assert "<style>" in to_svg(LINES)


def test_masked_cells_are_hatched_and_large_matrices_stay_small():
    assert "url(#mh-hatch-" in to_svg(MATRIX)
    assert "url(#mh-hatch-" not in to_svg(Heatmap("a", [[1.0]]))
    assert len(to_svg(LARGE)) < 40_000
    assert to_svg(LARGE).count("<image") == 2, "positive and negative values"
    assert "╱" in to_text(MATRIX)
    assert "╱" in to_text(LARGE)


def test_texts_show_every_name_and_stay_within_their_width():
    for figure in (LINES, replace(LINES, log_x=True, log_y=True), BARS, LARGE):
        assert all(len(line) <= 60 for line in to_text(figure, 60).splitlines()), to_text(figure, 60)
    for name in ("measured", "bound", "chance: 0.1", "length", "distance", "A title"):
        assert name in to_text(LINES)
    assert re.search(r"sinusoidal │ +█+ +34.5", to_text(BARS))
    assert "34.5" in to_svg(BARS)
    assert "1,048,576" in to_text(TABLE)
    assert "1,048,576" in figure_html(TABLE)


def test_a_value_without_a_place_on_a_logarithmic_axis_is_left_out_and_said():
    figure = Lines("Errors", "x", "y", {"": [(0, 0.0), (1, 0.1), (2, 0.01)]}, log_y=True)
    assert "not shown" in to_text(figure)
    assert "not shown" in to_svg(figure)
    assert "not shown" not in to_text(LINES)


@pytest.mark.parametrize("figure", [*DRAWN, TABLE, Drawing("A model", "<svg/>", "a model")], ids=lambda one: one.title)
def test_a_figure_comes_back_from_json(figure):
    again = figure_from(figure_tree(figure))
    assert figure_tree(again) == figure_tree(figure)
    assert type(again) is type(figure)
    assert to_text(again) == to_text(figure)


def test_texts_of_anybody_are_text():
    figures = [
        Lines(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: [(0, 1), (1, 2)]}, {HOSTILE: 1.5}), Bars(HOSTILE, HOSTILE, {HOSTILE: 1}),
        Heatmap(HOSTILE, [[1.0]], [HOSTILE], [HOSTILE], HOSTILE, HOSTILE), Table(HOSTILE, [HOSTILE], [[HOSTILE]]),
    ]  # fmt: skip
    for figure in figures:
        assert "<script" not in figure_html(figure)
        if not isinstance(figure, Table):
            ElementTree.fromstring(to_svg(figure))


def test_a_label_is_below_its_tick():
    axis = make_axis([0, 1000], log=False, max_ticks=5)
    line, labels = x_ticks(axis, 80)
    ticks = [i for i, mark in enumerate(line) if mark == "┬"]
    for tick, match in list(zip(ticks, re.finditer(r"\S+", labels), strict=True))[
        1:-1
    ]:  # those at the ends move inwards
        assert abs(tick - (match.start() + match.end() - 1) / 2) <= 1


@pytest.mark.parametrize(("rows", "columns"), [(100, 60), (60, 100), (300, 2)])
def test_a_heatmap_is_not_higher_than_it_may_be(rows, columns):
    figure = Heatmap("a", [[0.5] * columns for _ in range(rows)])
    width, height = cell_size(figure, False, 0.0, 1.0)
    assert rows * height <= MAX_SIDE + 1e-9
    assert columns * width <= 520 + 1e-9
