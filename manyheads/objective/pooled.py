"""Learning one thing of a whole text or picture, its class; or a picture from a few of its patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.objective.score import NOTHING, Batch, ObjectiveSpec, Row, Score, Tokens, padded
from manyheads.parts.batch import Inputs
from manyheads.spec import SpecError, field


class ClassifySpec(ObjectiveSpec, kind="classify"):
    """−log p(class | x), with x a text or a picture"""

    fields: ClassVar[tuple[str, ...]] = ("text", "label")
    shapes: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    frame: ClassVar[str] = "<s> $A </s>"
    added: ClassVar[int] = 2

    def reads(self, given: Sequence[str]) -> tuple[str, ...]:
        return ("picture", "label") if "picture" in given else self.fields

    def check(self, model: ModelSpec) -> None:
        if not hasattr(model.head, "classes"):
            raise SpecError(f"{self.kind} asks for a class, and the head '{model.head.kind}' gives none; take classes", ("model", "head"))

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        wanted = torch.from_numpy(np.array([int(label[0]) for _, label in rows]))
        if rows[0][0].ndim > 1:
            return Batch(Inputs(side_by_side(rows)), wanted)
        given = [tokens.framed(text, self.frame) for text, _ in rows]
        return Batch(padded(given, tokens.pad), wanted)


class PatchesSpec(ObjectiveSpec, kind="patches"):
    """‖x̂ − x‖² / pixels, over the patches that were hidden

    He et al. 2022, arXiv 2111.06377: most of a picture is hidden, the encoder reads the rest, each patch with its place, and a
    decoder restores what it did not see.
    """

    fields: ClassVar[tuple[str, ...]] = ("picture",)
    shapes: ClassVar[tuple[str, ...]] = ("encoder–decoder",)
    frame: ClassVar[str] = "$A"
    added: ClassVar[int] = 0
    guesses: ClassVar[bool] = False

    share: float = field(0.75, "of the patches that are hidden", gt=0, lt=1)
    normalised: bool = field(False, "whether x is brought to mean 0 and variance 1 within each patch")

    def check(self, model: ModelSpec) -> None:
        decoder = model.decoder
        if decoder is None or decoder.embed.reads != "memory":
            given = decoder.embed.kind if decoder else "nothing"
            raise SpecError(f"the decoder would see what is hidden: it reads '{given}', expected 'restored'", ("model", "decoder", "embed"))
        pixels, said = model.encoder.embed.patch() if model.encoder else None, getattr(model.head, "pixels", None)
        if said is None or said != pixels:
            raise SpecError(f"says {said} pixels of a patch, and a patch has {pixels}; take pixels with as many", ("model", "head"))
        if self.normalised and pixels == 1:
            raise SpecError("a patch of one pixel has no variance", ("objective", "normalised"))

    def length(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Of the picture, and of what is shown of it."""
        return np.stack((lengths[0], self.shown(lengths[0])), axis=1)

    def shown(self, lengths: np.ndarray) -> np.ndarray:
        """How many patches of each picture are: at least one and not all."""
        return np.maximum(1, np.minimum(np.rint(lengths * (1 - self.share)), lengths - 1)).astype(np.int64)

    def batch(self, rows: Sequence[Row], tokens: Tokens, chance: np.random.Generator) -> Batch:
        pictures = side_by_side(rows)
        batch, length, pixels = pictures.shape
        count = int(self.shown(np.array(length)))
        shown = torch.from_numpy(np.sort(chance.random((batch, length)).argsort(axis=1)[:, :count]))
        source = Inputs(pictures.gather(1, shown[..., None].expand(-1, -1, pixels)), positions=shown)
        wanted = torch.zeros((batch, length), dtype=torch.int64).scatter(1, shown, NOTHING)
        return Batch(Inputs(pictures), wanted, source=source)

    def score(self, model: Model, batch: Batch) -> Score:
        """Of the pictures themselves the model is given only the shape."""
        hidden = batch.wanted != NOTHING
        wanted = batch.inputs.tokens[hidden]
        mean, scale = self.level(wanted)
        restored = model(batch.inputs, batch.source)[hidden]
        return Score((restored - (wanted - mean) / scale).square().mean(dim=-1).sum(), len(wanted), None)

    def level(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken from each patch, and by what the rest is divided, before it is asked for."""
        if not self.normalised:
            return patches.new_zeros(()), patches.new_ones(())
        return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()

    def restored(self, model: Model, batch: Batch) -> Tensor:
        """Pictures as patches, B×L×pixels: those that were shown, and what the model makes of the others."""
        pictures = batch.inputs.tokens
        mean, scale = self.level(pictures)  # a model that learned normalised patches knows neither
        made = model(batch.inputs, batch.source) * scale + mean
        return torch.where((batch.wanted != NOTHING)[..., None], made, pictures)


def side_by_side(rows: Sequence[Row]) -> Tensor:
    """Pictures as patches, B×L×pixels."""
    return torch.from_numpy(np.stack([row[0] for row in rows]))
