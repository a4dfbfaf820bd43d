"""Drawings: what they show is what runs, nothing overlaps or is cut off, and every text is text."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
from kinds import LENGTH, WIDTH, decoder, encoder, first_choices, kind_id, ngram, pair, recurrent, stack, tokens
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from raising import raises
from torch import nn

from manyheads import build, draw_model, read, read_model
from manyheads.inspect.drawing import layout_model
from manyheads.inspect.layout import FONT_SIZES, PADDING, text_width
from manyheads.inspect.residual_graph import residual_graph
from manyheads.inspect.svg import texts_svg, to_svg, towards
from manyheads.inspect.tower import BOX_WIDTH
from manyheads.parts.inputs import Inputs
from manyheads.parts.norm import LayerNormSpec, NormSpec
from manyheads.parts.residual import Residual, ResidualSpec
from manyheads.presets import names
from manyheads.spec import SLOTS

PRESETS = tuple(names())
LAYER_SLOTS = ("attention", "core", "position", "feedforward", "norm", "residual")
SVG = "{http://www.w3.org/2000/svg}"


@cache
def layout_of(name):
    return layout_model(read(name))


def boxes_of(drawing):
    boxes = list(drawing.all_boxes())
    assert len({box.name for box in boxes}) == len(boxes)
    return {box.name: box for box in boxes}


def texts_of(svg):
    """All texts that are seen, as one line: a long one has several elements."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert not list(root.iter(f"{SVG}script"))
    return " ".join(element.text for element in root.iter(f"{SVG}text"))


def leaves(drawing):
    return [box for box in drawing.all_boxes() if box.slot != "frame"]


def overlap(one, other):
    slack = 0.01
    wide = min(one.right, other.right) - max(one.x, other.x) > slack
    return wide and min(one.bottom, other.bottom) - max(one.y, other.y) > slack


def on_edge(box, point):
    x, y = point
    in_x, in_y = box.x - 0.01 <= x <= box.right + 0.01, box.y - 0.01 <= y <= box.bottom + 0.01
    at_x = min(abs(x - box.x), abs(x - box.right)) < 0.01
    at_y = min(abs(y - box.y), abs(y - box.bottom)) < 0.01
    return in_x and in_y and (at_x or at_y)


def runs_through(box, start, end):
    """Whether a horizontal or vertical segment has points within the box, not on its edge."""
    (left, right), (top, bottom) = sorted((start[0], end[0])), sorted((start[1], end[1]))
    inside_x = min(right, box.right - 0.01) - max(left, box.x + 0.01)
    inside_y = min(bottom, box.bottom - 0.01) - max(top, box.y + 0.01)
    return inside_x >= 0 and inside_y >= 0


def check_siblings(boxes, around):
    for box in boxes:
        outside = (around[0] - box.x, around[1] - box.y, box.right - around[2], box.bottom - around[3])
        assert max(outside) <= 0.01, box
        check_siblings(box.children, (box.x, box.y, box.right, box.bottom))
    for box, other in combinations(boxes, 2):
        assert not overlap(box, other), (box.name, other.name)


def check_layout(drawing):
    """Boxes are apart and within the drawing, texts within boxes, and arrows go from edge to edge around all boxes."""
    check_siblings(drawing.boxes, (0, 0, drawing.width, drawing.height))
    boxes = boxes_of(drawing)
    for box in boxes.values():
        if box.slot not in ("sum", "fork"):
            assert all(text_width(row, style) <= box.width - 2 * PADDING + 0.01 for style, row in box.texts()), box
            inside = sum(child.height for child in box.children if box.slot != "frame")
            assert box.text_height() + inside <= box.height + 0.01
    for arrow in drawing.arrows:
        assert on_edge(boxes[arrow.source], arrow.points[0]), arrow
        assert on_edge(boxes[arrow.target], arrow.points[-1]), arrow
        for start, end in pairwise(arrow.points):
            assert start[0] == end[0] or start[1] == end[1], arrow
            through = [box.name for box in leaves(drawing) if runs_through(box, start, end)]
            assert not through, (arrow, through)


def titles_of(spec):
    """The titles of the parts of a model that are drawn."""
    stacks = [item for item in (spec.encoder, spec.decoder) if item]
    own = [spec.recurrent.core, spec.recurrent.cell, spec.recurrent.readout] if spec.recurrent else []
    parts = [spec.head, *own, *(item.embed for item in stacks)]
    for layer in (layer for item in stacks for layer in item.expanded_layers()):
        parts += [getattr(layer, slot) for slot in LAYER_SLOTS]
    return {part.caption for part in parts}


# ---------------------------------------------------------------------------------------------------- all drawings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_drawn_with_its_parts_and_the_number_of_its_layers(name):
    spec, drawing = read(name), layout_of(name)
    check_layout(drawing)
    text = texts_of(to_svg(drawing))
    assert all(title in text for title in titles_of(spec))
    for item in (spec.encoder, spec.decoder):
        assert item is None or f"{item.layers} ×" in text


@pytest.mark.parametrize(
    ("slot", "choice"),
    [(slot, choice) for slot in LAYER_SLOTS for choice in first_choices(slot)],
    ids=lambda value: value if isinstance(value, str) else kind_id(value),
)
@pytest.mark.parametrize("architecture", [decoder, encoder, pair])
def test_every_kind_of_every_slot_of_a_layer_is_drawn(architecture, slot, choice):
    spec = architecture(**{slot: choice})
    drawing = layout_model(spec)
    check_layout(drawing)
    text = texts_of(to_svg(drawing))
    assert all(title in text for title in titles_of(spec))


@pytest.mark.parametrize("slot", LAYER_SLOTS)
def test_another_kind_is_another_drawing(slot):
    drawings = {draw_model(decoder(**{slot: choice})) for choice in first_choices(slot)}
    assert len(drawings) == len(SLOTS[slot].kinds)


@pytest.mark.parametrize("changes", [{"layers": 3}, {"width": 32}, {"mask": {"window": 4}}, {"core": {"dropout": 0.1}}])
def test_another_field_is_another_drawing(changes):
    assert draw_model(decoder(**changes)) != draw_model(decoder())


RECURRENT = [
    {"source": source, "attention": attention, "readout": readout, "layers": layers}
    for source in (True, False)
    for attention in (True, False)
    for readout in first_choices("readout")
    for layers in (1, 3)
]


@pytest.mark.parametrize("changes", RECURRENT, ids=str)
def test_recurrent_networks_are_drawn(changes):
    drawing = layout_model(recurrent(**changes))
    check_layout(drawing)
    boxes = boxes_of(drawing)
    attends = changes["source"] and changes["attention"]
    assert ("recurrent.core" in boxes) == attends
    assert ("encoder.output" in boxes) == changes["source"]
    arrows = {(arrow.source, arrow.target) for arrow in drawing.arrows}
    assert (("encoder.output", "recurrent.core") in arrows) == attends


@pytest.mark.parametrize("order", [2, 5])
def test_ngram_networks_are_drawn(order):
    drawing = layout_model(ngram(order=order))
    check_layout(drawing)
    assert boxes_of(drawing)["ngram.window"].shape == f"B × L × {(order - 1) * WIDTH}"


def test_the_drawing_of_2017():
    """Figure 1 of Vaswani et al. 2017, from the bottom to the top."""
    boxes = [box for box in layout_of("transformer-base").all_boxes() if box.title]
    sides = {side: [box.title for box in boxes if box.name.startswith(side)] for side in ("encoder", "decoder")}
    position, norm = "Positional Encoding, sinusoidal", "Add & Norm"
    assert sides["encoder"] == [
        "Inputs", "Token Embedding", "+", position, "Multi-Head Attention", norm, "Feed Forward", norm, "6 ×",
        "Encoder Output",
    ]  # fmt: skip
    assert sides["decoder"] == [
        "Outputs (shifted right)", "Token Embedding, shared", "+", position, "Masked Multi-Head Attention", norm,
        "Multi-Head Attention", norm, "Feed Forward", norm, "6 ×",
    ]  # fmt: skip
    assert [box.title for box in boxes[-3:]] == ["Linear, tied", "Softmax", "Output Probabilities"]
    left, right = (boxes_of(layout_of("transformer-base"))[f"{side}.embed"] for side in ("encoder", "decoder"))
    assert left.right < right.x
    assert left.y == right.y


# ----------------------------------------------------------------------------------------- what is drawn is what runs


def run_graph(nodes, x, norms, sublayers):
    """Computes the output of a layer from its graph."""
    values = {}
    for node in nodes:
        inputs = [values[name] for name in node.inputs]
        if node.role == "norm":
            values[node.name] = norms[int(node.name.removeprefix("norm"))](*inputs)
        elif node.role == "sublayer":
            values[node.name] = sublayers[node.label](*inputs)
        else:
            values[node.name] = sum(inputs) if node.role == "sum" else x
    return values[nodes[-1].name]


@pytest.mark.parametrize("kind", ResidualSpec.kinds)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_graph_of_a_layer_computes_what_the_layer_computes(kind, count):
    sublayers = {f"f{chr(97 + i)}": nn.Linear(WIDTH, WIDTH) for i in range(count)}
    residual = ResidualSpec.kinds[kind](dropout=0.1).build(LayerNormSpec(), WIDTH, count).eval()
    for norm in residual.norms:
        nn.init.normal_(norm.weight)
    nodes, x = residual_graph(residual, list(sublayers)), torch.randn(2, 3, WIDTH)
    expected = residual(x, list(sublayers.values()))
    assert torch.allclose(run_graph(nodes, x, residual.norms, sublayers), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ResidualSpec.kinds)
def test_boxes_are_in_the_order_in_which_modules_run(kind):
    model = build(pair(residual=kind, layers=1)).eval()
    layer, order = model.decoder.layers[0], []
    modules = {"attention": layer.attention, "cross": layer.cross, "feedforward": layer.feedforward}
    modules |= {f"norm{i}": norm for i, norm in enumerate(layer.residual.norms)}
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    model(tokens(), tokens())
    prefix = "decoder.layers.0."
    drawn = [name.removeprefix(prefix) for name in boxes_of(layout_model(model.spec)) if name.startswith(prefix)]
    assert [name for name in drawn if name in modules] == order


@pytest.mark.parametrize("size", [None, 8])
def test_what_follows_the_embedding_is_in_the_order_in_which_it_runs(size):
    embed = {"norm": "layer"} | ({"size": size} if size else {})
    model = build(encoder(embed=embed, position={"kind": "learned", "length": 64})).eval()
    order, own = [], model.encoder.embed
    for name, module in {
        "embed": own.table,
        "position": own.position,
        "norm": own.norm,
        "project": own.project,
    }.items():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    model(tokens())
    names = ["encoder.embed", "encoder.position", "encoder.embed.norm", "encoder.embed.project"]
    drawn = [name for name in boxes_of(layout_model(model.spec)) if name in names]
    assert [name.rpartition(".")[2] for name in drawn] == order[: len(drawn)]
    assert len(drawn) == (4 if size else 3)


def shape_values(text, length, **symbols):
    """'B × (L + 1) × 16' as numbers."""
    words = text.replace("−", "-").replace(",", "").split(" × ")
    return tuple(eval(word, {"B": 2, "L": length, **symbols}) for word in words)


@pytest.mark.parametrize("choice", first_choices("head"), ids=kind_id)
def test_the_shape_of_the_output_is_that_of_the_model(choice):
    spec = read_model({"vocab": 23, "encoder": stack(), "head": choice})
    shape = boxes_of(layout_model(spec))["outputs"].shape
    assert shape_values(shape, LENGTH) == tuple(build(spec).eval()(tokens()).shape)


@pytest.mark.parametrize(("class_token", "skip"), [(False, 0), (True, 0), (True, 1), (False, 1)])
def test_shapes_of_patches_with_a_class_token(class_token, skip):
    embed = {"kind": "patches", "pixels": 4, "channels": 1, "class_token": class_token}
    spec = read_model({"encoder": stack(embed=embed), "head": {"kind": "pixels", "pixels": 4, "skip": skip}})
    drawing, model, patches = layout_model(spec), build(spec).eval(), torch.randn(2, LENGTH, 4)
    check_layout(drawing)
    boxes = boxes_of(drawing)
    assert shape_values(boxes["encoder.inputs"].shape, LENGTH) == tuple(patches.shape)
    assert shape_values(boxes["encoder.embed"].shape, LENGTH) == tuple(model.encoder(Inputs(patches))[0].shape)
    assert shape_values(boxes["outputs"].shape, LENGTH) == tuple(model(patches).shape)


@pytest.mark.parametrize("choice", first_choices("readout"), ids=kind_id)
def test_a_readout_reads_what_it_says(choice):
    spec = SLOTS["readout"].from_config(choice)
    inputs = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(4)]
    output = spec.build(WIDTH, WIDTH, WIDTH)(*inputs).sum()
    gradients = torch.autograd.grad(output, inputs, allow_unused=True)
    used = [gradient is not None and bool(gradient.any()) for gradient in gradients]
    assert {name for name, is_used in zip(("s", "s′", "e", "c"), used, strict=True) if is_used} == spec.reads


def test_the_encoder_reaches_each_layer_with_cross_attention():
    encoder_stack, decoder_stack = stack(), stack(layers=4, cross=True, pattern=[{}, {"cross": False}, {}, {}])
    drawing = layout_model(read_model({"vocab": 9, "encoder": encoder_stack, "decoder": decoder_stack}))
    check_layout(drawing)
    targets = [arrow.target for arrow in drawing.arrows if arrow.style == "memory"]
    assert targets == ["decoder.layers.0.cross", "decoder.layers.2.cross"]
    memory = [arrow for arrow in layout_of("mae-tiny").arrows if arrow.style == "memory"]
    assert [(arrow.source, arrow.target) for arrow in memory] == [("encoder.output", "decoder.embed")]


@pytest.mark.parametrize(
    ("layers", "pattern", "frames"),
    [
        (1, [{}], ["1 ×"]),
        (6, [{"mask": {"window": 2}}, {}], ["1 ×", "1 ×", "3 ×"]),
        (7, [{"mask": {"window": 2}}, {"mask": {"window": 2}}, {}], ["2 ×", "1 ×", "2 ×", "1 ×"]),
        (3, [{"norm": "rms"}, {}, {}], ["1 ×", "2 ×"]),
        (4, [{"norm": "rms"}, {"norm": "rms"}], ["4 ×"]),
        (0, [], []),
    ],
)
def test_runs_and_patterns_of_layers_are_frames(layers, pattern, frames):
    drawing = layout_model(decoder(layers=layers, pattern=pattern))
    check_layout(drawing)
    labels = [box.title for box in drawing.all_boxes() if box.slot == "label" and box.title]
    assert labels == frames
    repeats = [int(label.split()[0]) for label in labels]
    assert sum(box.slot == "frame" for box in drawing.all_boxes()) == len(repeats)


def test_shared_weights_and_unknown_sizes_are_named():
    assert "shared weights" in texts_of(draw_model(read("albert-base-v2")))
    spec = read_model({"vocab": "tokenizer", "encoder": stack(), "head": {"kind": "classes", "classes": "data"}})
    boxes = boxes_of(layout_model(spec))
    assert (boxes["outputs"].shape, boxes["encoder.embed"].lines[0]) == ("B × C", f"V × {WIDTH}")


@pytest.mark.parametrize("join", ["add", "concat", "multiply"])
def test_a_position_is_drawn_where_it_acts(join):
    joined = boxes_of(layout_model(decoder(position={"kind": "sinusoidal", "join": join})))
    assert {"decoder.position", "decoder.join"} <= set(joined)
    within = boxes_of(layout_model(decoder(position="rope")))
    inside, attention = within["decoder.layers.0.attention.position"], within["decoder.layers.0.attention"]
    assert inside in attention.children
    assert "decoder.join" not in within


# ------------------------------------------------------------------------------------------------ other people's parts


@pytest.fixture
def own_kinds():
    """Restores the kinds that a test adds to."""
    kinds = {slot: dict(base.kinds) for slot, base in SLOTS.items()}
    yield
    for slot, base in SLOTS.items():
        base.kinds.clear()
        base.kinds.update(kinds[slot])


HOSTILE = "<img onerror=alert(1)>&\"']]>\x00\x1b"


@pytest.mark.usefixtures("own_kinds")
def test_a_name_of_anybody_is_text():
    class Hostile(NormSpec, kind=HOSTILE):
        __doc__ = HOSTILE

        def build(self, width):
            return nn.LayerNorm(width)

    svg = draw_model(decoder(norm={"kind": HOSTILE}), title=HOSTILE + "\ud800")
    svg.encode()
    assert "<img" not in svg
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "style", "g", "rect", "circle", "path", "text"
    }  # fmt: skip
    assert "<img onerror=alert(1)>" in root.find(f"{SVG}title").text
    assert "alert(1)" in texts_of(svg)
    check_layout(layout_model(decoder(norm={"kind": HOSTILE}), title="wide " * 200 + "W" * 500))


@pytest.mark.usefixtures("own_kinds")
def test_an_own_residual_connection_is_traced():
    class Scaled(ResidualSpec, kind="test-scaled"):
        """norm(2x + f(x)) + x of the layer"""

        def build(self, norm, width, sublayers):
            return ScaledModule(self, norm, width, sublayers)

    class ScaledModule(Residual):
        def forward(self, x_BLD, sublayers):
            first = x_BLD
            for norm, sublayer in zip(self.norms, sublayers, strict=True):
                x_BLD = norm(2 * x_BLD + sublayer(x_BLD))
            unused = self.norms[0](x_BLD)  # noqa: F841
            return x_BLD + first

    drawing = layout_model(pair(residual="test-scaled"))
    check_layout(drawing)
    text = texts_of(to_svg(drawing))
    assert "test-scaled residual" in text
    assert text.count("mul") == 5  # 2 in the encoder, 3 in the decoder
    boxes = boxes_of(drawing)
    assert [name for name in boxes if re.search(r"encoder.*norm\d$", name)] == [
        f"encoder.layers.0.norm{i}" for i in range(2)
    ]
    assert ("encoder.layers.0.input", "encoder.layers.0.sum2") in {
        (arrow.source, arrow.target) for arrow in drawing.arrows
    }


@pytest.mark.usefixtures("own_kinds")
def test_a_residual_connection_that_depends_on_values_says_so():
    class Branching(ResidualSpec, kind="test-branching"):
        """x + f(x) if x is small"""

        def build(self, norm, width, sublayers):
            return BranchingModule(self, norm, width, sublayers)

    class BranchingModule(Residual):
        def forward(self, x_BLD, sublayers):
            for sublayer in sublayers:
                x_BLD = x_BLD + sublayer(x_BLD) if x_BLD.sum() < 9 else x_BLD
            return x_BLD

    drawing = layout_model(decoder(residual="test-branching"))
    check_layout(drawing)
    assert {"decoder.layers.0.attention", "decoder.layers.0.feedforward"} <= set(boxes_of(drawing))
    assert "depend on values" in texts_of(to_svg(drawing))


def test_texts_fit_in_a_wide_font():
    """The estimate of the width of a text is an upper bound: that of DejaVu Sans, one of the widest common fonts."""
    measure, rows = TextToPath(), set()
    for name in PRESETS:
        rows |= {row for box in layout_of(name).all_boxes() for row in box.texts()}
    for style, row in rows:
        font = FontProperties(family="DejaVu Sans", size=FONT_SIZES[style], weight="bold" if style == "title" else None)
        assert measure.get_text_width_height_descent(row, font, ismath=False)[0] <= text_width(row, style), row


def test_a_drawing_is_for_readers_of_screens_and_of_dark_pages():
    svg = draw_model(read("gpt2"), title="my model")
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert [child.tag.removeprefix(SVG) for child in root[:3]] == ["title", "desc", "style"]
    assert root[0].text == "my model"
    assert "Masked Multi-Head Attention" in root[1].text
    assert "prefers-color-scheme: dark" in root[2].text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|href", svg)


def test_only_a_spec_is_drawn():
    with raises("config.wrong-type", "str"):
        draw_model("gpt2")


def test_boxes_have_one_width():
    widths = {box.width for box in layout_of("t5-small").all_boxes() if box.slot in ("attention", "norm", "embed")}
    assert widths == {BOX_WIDTH}


def test_an_arrow_has_a_tip_where_it_ends_and_a_line_that_joins_another_has_none():
    drawing = layout_of("transformer-base")
    tips = [arrow.has_tip for arrow in drawing.arrows]
    assert len(set(tips)) == 2
    assert to_svg(drawing).count('class="mh-tip"') == sum(tips)


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "rnnsearch"])
def test_every_text_is_inside_its_box(name):
    for box in layout_of(name).all_boxes():
        heights = [float(y) for y in re.findall(r'y="([-\d.]+)"', texts_svg(box))]
        assert all(box.y < y < box.bottom for y in heights), box.name
        assert heights == sorted(heights)


def test_a_point_on_the_way_from_one_to_another():
    assert towards((1.0, 2.0), (4.0, 6.0), 2.5) == (2.5, 4.0)
    assert towards((1.0, 2.0), (1.0, 2.0), 2.5) == (1.0, 2.0)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "transformer-base", "mae-tiny", "rnnsearch"])
def test_only_inputs_and_positions_read_nothing_and_only_the_output_is_not_read(name):
    drawing = layout_of(name)
    boxes = {box.name for box in drawing.all_boxes() if box.slot not in ("heading", "frame", "label")}
    first, last = (boxes - {getattr(arrow, end) for arrow in drawing.arrows} for end in ("target", "source"))
    assert {name.rpartition(".")[2] for name in first} <= {"inputs", "position"}
    assert last == {"outputs"}


@pytest.mark.usefixtures("own_kinds")
def test_only_a_sum_is_drawn_as_one():
    class Largest(ResidualSpec, kind="test-largest"):
        """max(x, f(x))"""

        def build(self, norm, width, sublayers):
            return LargestModule(self, norm, width, sublayers)

    class LargestModule(Residual):
        def forward(self, x_BLD, sublayers):
            for sublayer in sublayers:
                x_BLD = torch.maximum(x_BLD, sublayer(x_BLD))
            return x_BLD

    text = texts_of(to_svg(layout_model(decoder(residual="test-largest"))))
    assert text.count("maximum") == 2
