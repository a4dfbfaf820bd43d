"""Claims A (attention) and B (masks) of the source documents, where a lab does not show all; each named for its row.

Rows B1, B3, B4 and B5 are invariants of every kind, checked in tests/model/test_invariants.py.
"""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import choices
from raising import raises
from small_attention import make_mask, positions, seeds

from manyheads.inspect.notebook import attention_table
from manyheads.parts.core import ArgmaxSpec, DotSpec, check_rows
from manyheads.spec import SLOTS

sizes = st.integers(1, 6)


# ----------------------------------------------------------------------------------------- A: attention as an operation


@given(queries=sizes, keys=sizes, size=sizes, seed=seeds, core=st.sampled_from(choices("core")))
def test_a1_attention_is_a_distribution_and_a_mean(queries, keys, size, seed, core):
    torch.manual_seed(seed)
    spec = SLOTS["core"].from_config(core)
    width = {"head": size, "memory": size, "none": 0}
    module = (
        spec.build(2, width[spec.query_source], {"head": size, "raw": size, "none": 0}[spec.key_source]).double().eval()
    )
    q = torch.randn(1, 2, queries, width[spec.query_source], dtype=torch.float64)
    k = torch.randn(1, 2, keys, 0 if spec.key_source == "none" else size, dtype=torch.float64)
    v = torch.randn(1, 2, keys, size, dtype=torch.float64)
    context = {"mask": make_mask(queries, keys), "positions": positions(queries, keys)}
    k = module.key_transform(k)
    weights, out = module.weights(q, k, **context), module(q, k, v, **context)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, queries, dtype=torch.float64), rtol=0, atol=1e-6)
    low, high = v.amin(dim=2, keepdim=True), v.amax(dim=2, keepdim=True)
    assert ((out >= low - 1e-9) & (out <= high + 1e-9)).all()


def test_a3_a_wrong_axis_is_an_error_that_names_the_shapes():
    x = torch.randn(3, 1, 5, 8)
    core = DotSpec().build(1, 8, 8)
    with raises("input.shape", (3, 1, 5, 8), (3, 1, 8, 5)):
        core(x, x.transpose(2, 3), x, mask=make_mask(5, 5), positions=positions(5, 5))
    with raises("input.shape", (3, 1, 5, 8), (3, 1, 5, 5)):
        core(x, torch.randn(3, 1, 5, 5), x, mask=make_mask(5, 5), positions=positions(5, 5))


class WeightIndices(HTMLParser):
    """The table of a page: headings, and the cells of each row with their classes."""

    def __init__(self):
        super().__init__()
        self.rows, self.headings, self.tag = [], [], None

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append(dict(attrs) | {"text": ""})

    def handle_data(self, data):
        if self.tag == "th" and data.strip():
            self.headings.append(data)
        elif self.tag == "td" and data.strip():
            self.rows[-1][-1]["text"] = data


def test_a12_the_printed_matrix_renders_and_aligns():
    words = torch.tensor([[0.91, 0.04, 0.05], [0.03, 0.10, 0.87], [0.09, 0.88, 0.03]])
    page = WeightIndices()
    page.feed(attention_table(words, ["kediler", "fareleri", "kovalar"], ["cats", "chase", "mice"]))
    assert page.headings == ["cats", "chase", "mice", "kediler", "fareleri", "kovalar"]
    cells = [row for row in page.rows if row]
    assert [[float(cell["text"]) for cell in row] for row in cells] == [
        [0.91, 0.04, 0.05],
        [0.03, 0.10, 0.87],
        [0.09, 0.88, 0.03],
    ]
    assert [[j for j, cell in enumerate(row) if "highest" in cell["class"]] for row in cells] == [[0], [2], [1]]


def test_a14_some_heads_can_take_the_maximum():
    q, k = torch.randn(2, 2, 2, 6, 4)
    mixed = ArgmaxSpec(heads=(1,)).build(2, 4, 4).weights(q, k, mask=make_mask(6, 6), positions=positions(6, 6))
    assert ((mixed[:, 0] > 0) & (mixed[:, 0] < 1)).all()
    assert set(mixed[:, 1].unique().tolist()) == {0.0, 1.0}
    with raises("config.incompatible", "heads", "head 2", "0 to 1"):
        ArgmaxSpec(heads=(2,)).build(2, 4, 4)


# ------------------------------------------------------------------------------------------------------- B: masks


def test_b2_rows_that_do_not_sum_to_one_are_named():
    with raises("input.invalid", "row (0,)", "0.91", "2 of 3 rows"):
        check_rows(torch.tensor([[0.91, 0, 0], [0.03, 0.74, 0], [0.01, 0.41, 0.58]]))


def test_b6_masked_cells_of_a_page_are_marked_and_its_texts_are_escaped():
    weights, visible = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[True, False], [True, True]])
    text = attention_table(weights, ["<script>x</script>", "b"], ['"a', "b"], mask_LM=visible).page("<b>")
    page = WeightIndices()
    page.feed(text)
    assert [["hidden" in cell["class"] for cell in row] for row in page.rows if row] == [[False, True], [False, False]]
    assert "<script>" not in text
    with raises("input.shape", (2, 2), (3, 2)):
        attention_table(weights, ["a", "b", "c"], ["a", "b"])
