"""Drawings of the three shapes, which follow from their descriptions."""

from __future__ import annotations

from typing import Annotated
from xml.etree import ElementTree

from manyheads.inspect.drawing import draw_model, layout_model
from manyheads.labs.chapters.shapes import CAUSAL, STACK, VOCAB
from manyheads.labs.figures import Drawing
from manyheads.labs.finding import Finding, equals, is_true
from manyheads.labs.lab import lab
from manyheads.model.spec import ModelSpec, read_model
from manyheads.presets import names, read, read_about

ENCODER_2017 = ("Multi-Head Attention", "Add & Norm", "Feed Forward", "Add & Norm")
DECODER_2017 = ("Masked Multi-Head Attention", "Add & Norm", *ENCODER_2017)


def drawing(spec: ModelSpec, title: str) -> Drawing:
    """The drawing of a model, and its boxes as lines, from the input to the output."""
    boxes = [box for box in layout_model(spec).all_boxes() if len(box.title) > 1 and box.slot != "heading"]
    lines = [" · ".join(filter(None, (box.title, *box.lines, box.shape))) for box in boxes]
    return Drawing(title, draw_model(spec, title=title), "\n".join(lines))


def titles_in(spec: ModelSpec, name: str) -> str:
    """The titles of the boxes of a layer, from its input to its output."""
    boxes = [box for box in layout_model(spec).all_boxes() if box.name.startswith(f"{name}.") and len(box.title) > 1]
    return " · ".join(box.title for box in boxes if box.slot != "label")


@lab("shapes", rows=("P9",), seconds=(2, 2), counterexample={"preset": "gpt2"},
     try_next=("--preset llama-7b", "--preset rnnsearch"))  # fmt: skip
def drawings(*, preset: Annotated[str, "published model beside the small ones"] = "transformer-base") -> Finding:
    """Every model draws itself, and the drawing of the Transformer is that of its paper.

    A model is described by its parts, and each part describes itself: its name, its sizes, what it reads. So the
    drawing follows from the description alone. For the Transformer of 2017 it shows the two towers of figure 1 of its
    paper: six layers each, Add & Norm after every sublayer, and an arrow from the encoder to the decoder's
    cross-attention.
    """
    small = {
        "Encoder": {"encoder": STACK, "head": {"kind": "classes", "classes": 3}},
        "Decoder": {"decoder": STACK | CAUSAL},
        "Encoder–decoder": {"encoder": STACK, "decoder": STACK | CAUSAL | {"embed": "shared", "cross": True}},
    }
    figures = [drawing(read_model({"vocab": VOCAB} | tables), title) for title, tables in small.items()]
    figures.append(drawing(read(preset), read_about(preset)["title"]))
    well_formed = [ElementTree.fromstring(draw_model(read(name))).tag.endswith("svg") for name in names()]
    spec, layout = read(preset), layout_model(read(preset))
    arrows = [(arrow.source, arrow.target) for arrow in layout.arrows if arrow.style == "memory"]
    counts = [box.title for box in layout.all_boxes() if box.slot == "label" and "×" in box.title]
    return Finding(
        (
            equals("published models that are drawn", sum(well_formed), len(names())),
            equals("encoder layer", titles_in(spec, "encoder.layers.0"), " · ".join(ENCODER_2017)),
            equals("decoder layer", titles_in(spec, "decoder.layers.0"), " · ".join(DECODER_2017)),
            equals("layers", ", ".join(counts), "6 ×, 6 ×"),
            is_true("the encoder reaches cross-attention", arrows == [("encoder.output", "decoder.layers.0.cross")]),
        ),
        tuple(figures),
    )
