"""ONNX files, out: one graph for every batch and length, which other runtimes open."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.convert.config import write_config
from manyheads.convert.families import vit
from manyheads.convert.files import check_free, published
from manyheads.convert.folder import Origin, write_beside
from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec, TowerSpec
from manyheads.parts.batch import Inputs
from manyheads.parts.embed import PatchesSpec
from manyheads.spec import one_line


def write_onnx(model: Model, folder: Path, origin: Origin | None = None, tokenizer: Any = None) -> None:
    """Writes model.onnx and the tokenizer; weights of more than 1.5 GB stand in a file beside, as the format holds no more than 2."""
    check_free(folder)
    check_packages()
    drawn = Drawn(plain_copy(model), picture_of(model.spec, origin))
    with published(folder) as draft:
        draft.mkdir()
        write_beside(draft, origin, tokenizer)
        with quiet():
            graph_of(drawn).save(draft / "model.onnx")


def check_packages() -> None:
    for name in ("onnx", "onnxscript"):
        if find_spec(name) is None:
            raise ValueError(f"an ONNX file is written with {name}, which is not installed: pip install 'manyheads[onnx]'")


def plain_copy(model: Model) -> Model:
    """The model in float32 and out of training; where it is in float32 already, with the same weights."""
    held = [*model.parameters(), *model.buffers()]
    ready = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in held)
    return deepcopy(model, {id(tensor): tensor for tensor in held} if ready else None).to("cpu", torch.float32).eval()


# ---------------------------------------------------------------------------------------------- what goes in, what comes out


@dataclass(frozen=True)
class Taken:
    """One input: its sizes, each a number or the name of one that is known only when the graph is run."""

    sizes: tuple[int | str, ...]
    dtype: torch.dtype = torch.int64

    def example(self) -> Tensor:
        """Zeros to draw the graph with; sizes of 0 and 1 would be taken for rules."""
        usual = {"batch": 2, "length": 3, "target_length": 4, "visible_length": 2}
        return torch.zeros([usual[size] if isinstance(size, str) else size for size in self.sizes], dtype=self.dtype)

    def named(self) -> dict[int, str]:
        return {i: size for i, size in enumerate(self.sizes) if isinstance(size, str)}


Picture = tuple[int, int, int]  # colours, height and width


def picture_of(spec: ModelSpec, origin: Origin | None) -> Picture | None:
    """The pictures of the family that a model came from; without one, a model is given patches."""
    reads_pictures = spec.encoder is not None and spec.encoder.embed.reads == "patches"
    if origin is None or not reads_pictures:
        return None
    said = write_config([vit.Picture()], spec)
    return said["num_channels"], said["image_size"], said["image_size"]


def first_inputs(tower: TowerSpec, picture: Picture | None) -> dict[str, Taken]:
    """What the tower takes that reads first."""
    if tower.embed.reads == "patches":
        if picture is None:
            return {"patches": Taken(("batch", "length", tower.embed.patch() or 1), torch.float32)}
        return {"pixel_values": Taken(("batch", *picture), torch.float32)}
    given = {"input_ids": EACH_TOKEN, "attention_mask": EACH_TOKEN}
    for name, field in (("token_type_ids", "types"), ("task_type_ids", "tasks")):
        if getattr(tower.embed, field, 0) > 1:
            given[name] = EACH_TOKEN
    if any(layer.mask.prefix for layer in tower.expanded()):
        given["prefix_lengths"] = Taken(("batch",))
    return given


EACH_TOKEN = Taken(("batch", "length"))


def inputs_of(spec: ModelSpec, picture: Picture | None) -> dict[str, Taken]:
    """All that a model takes, by the names that other ONNX files have for it."""
    if spec.recurrent:
        raise ValueError(
            "a recurrent network reads in steps, as many as there are tokens, and only what is read at once is written as ONNX"
        )
    first = spec.encoder or spec.decoder
    if first is None:
        return {"input_ids": EACH_TOKEN, "attention_mask": EACH_TOKEN}
    given = first_inputs(first, picture)
    if spec.encoder is None or spec.decoder is None:
        return given
    target = spec.decoder.embed.reads
    if target == "memory":
        return given | {"visible_patches": Taken(("batch", "visible_length"))}
    if target != "tokens" or any(layer.mask.prefix for layer in spec.decoder.expanded()):
        raise ValueError("of a decoder beside an encoder only one that reads tokens, without a prefix, is written as ONNX")
    return given | {"decoder_input_ids": Taken(("batch", "target_length"))}


class Drawn(nn.Module):
    """A model that is given plain tensors, in the order of its inputs; the mask of attention is 1 at real tokens."""

    def __init__(self, model: Model, picture: Picture | None) -> None:
        super().__init__()
        self.model = model
        self.takes = inputs_of(model.spec, picture)
        kind = model.spec.head.kind
        self.gives = {"none": "last_hidden_state", "vector": "sentence_embedding"}.get(kind, "logits")

    def forward(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.takes, tensors, strict=True))
        source = self.source(given)
        if "visible_patches" in given:  # of the target only the shape is read
            places = given["visible_patches"]
            visible = source.tokens.gather(1, places[..., None].expand(-1, -1, source.tokens.shape[-1]))
            return self.model(source.tokens, Inputs(visible, positions=places))
        return self.model(given["decoder_input_ids"], source) if "decoder_input_ids" in given else self.model(source)

    def source(self, given: dict[str, Tensor]) -> Inputs:
        if "pixel_values" in given:
            encoder = self.model.spec.encoder
            assert encoder is not None
            assert isinstance(encoder.embed, PatchesSpec)
            return Inputs(encoder.embed.cut(given["pixel_values"]))
        if "patches" in given:
            return Inputs(given["patches"])
        return Inputs(
            given["input_ids"], padding=given["attention_mask"] == 0, types=given.get("token_type_ids"),
            tasks=given.get("task_type_ids"), prefix=given.get("prefix_lengths"),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the graph


def graph_of(drawn: Drawn) -> torch.onnx.ONNXProgram:
    """The graph of a model, with the names of its inputs and of the sizes that may change."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    examples = tuple(taken.example() for taken in drawn.takes.values())
    named = [taken.named() for taken in drawn.takes.values()]
    free = tuple(dict.fromkeys(sizes, torch.export.Dim.DYNAMIC) for sizes in named)
    try:
        with torch.no_grad():
            traced = torch.export.export(drawn, examples, dynamic_shapes=(free,))
        program = torch.onnx.export(
            traced, dynamo=True, verbose=False, input_names=list(drawn.takes), output_names=[drawn.gives], dynamic_shapes=(tuple(named),)
        )
    except ValueError:
        raise
    except Exception as error:
        reason = one_line(str(error.__cause__ or error).strip().partition("\n")[0])
        raise ValueError(f"this model cannot be drawn as one graph for every length: {reason}") from error
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # it tells where files lie on this computer
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch has to say about packages that nobody asked for, and about its own future."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
