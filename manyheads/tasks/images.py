"""Masked autoencoding: restores an image from a few of its patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manyheads.errors import DataError, IncompatibleError
from manyheads.metrics.probe import linear_probe
from manyheads.model.builder import Model, build
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import as_transformer
from manyheads.parts.inputs import Inputs
from manyheads.spec import Tree, field
from manyheads.tasks.batch import IGNORE_INDEX, Batch, EncodedRow, Loss, SpecialTokens
from manyheads.tasks.evaluation import EvalResult, Evaluation, evaluate_loss
from manyheads.tasks.suggestion import Lines, Suggestion
from manyheads.tasks.task import TaskSpec, patchify_rows


class MaeSpec(TaskSpec, kind="mae"):
    """Masked autoencoding: ‖x̂ − x‖² / pixels, over the masked patches

    He et al. 2022, arXiv 2111.06377. Most patches are masked, the encoder reads the others, each with its position,
    and a decoder restores the masked ones.
    """

    fields: ClassVar[tuple[str, ...]] = ("image",)
    architectures: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    generates_text: ClassVar[bool] = False
    head_outputs: ClassVar[tuple[str, ...]] = ("pixels",)
    has_source: ClassVar[bool] = True
    is_default: ClassVar[bool] = True
    eval_outputs: ClassVar[str] = "images"
    template: ClassVar[str] = "$A"
    num_special_tokens: ClassVar[int] = 0
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss",)
    architecture_reason: ClassVar[str] = (
        "the encoder reads the visible patches, and a small decoder restores the masked ones"
    )
    file_kind: ClassVar[str | None] = "images"
    default_data: ClassVar[Tree | None] = {"kind": "digits"}

    mask_ratio: float = field(0.75, "fraction of the patches that are masked", gt=0, lt=1)
    norm_pix_loss: bool = field(False, "whether each patch of x is normalized to mean 0 and variance 1")

    def check_model(self, model: ModelSpec) -> None:
        decoder = model.decoder
        if decoder is None or decoder.embed.reads != "memory":
            kind = decoder.embed.kind if decoder else "nothing"
            raise IncompatibleError(
                f"the decoder must not see the masked patches: it reads '{kind}', expected 'mask-tokens'",
                ("model", "decoder", "embed"),
            )
        pixels = model.encoder.embed.patch_pixels() if model.encoder else None
        head_pixels = getattr(model.head, "pixels", None)
        if head_pixels is None or head_pixels != pixels:
            raise IncompatibleError(
                f"the head predicts {head_pixels} pixels per patch, but a patch has {pixels}; set its pixels",
                ("model", "head"),
            )
        if self.norm_pix_loss and pixels == 1:
            raise IncompatibleError("a patch of one pixel has no variance", ("task", "norm_pix_loss"))

    def lengths(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the number of patches of each image, and of its visible ones."""
        return np.stack((lengths[0], self.num_visible(lengths[0])), axis=1)

    def num_visible(self, lengths: np.ndarray) -> np.ndarray:
        """Returns how many patches of each image are visible, at least one and not all."""
        return np.maximum(1, np.minimum(np.rint(lengths * (1 - self.mask_ratio)), lengths - 1)).astype(np.int64)

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        images = torch.from_numpy(np.stack([row[0] for row in rows]))
        batch, length, pixels = images.shape
        count = int(self.num_visible(np.array(length)))
        visible = torch.from_numpy(np.sort(rng.random((batch, length)).argsort(axis=1)[:, :count]))
        source = Inputs(images.gather(1, visible[..., None].expand(-1, -1, pixels)), positions=visible)
        targets = torch.zeros((batch, length), dtype=torch.int64).scatter(1, visible, IGNORE_INDEX)
        return Batch(Inputs(images), targets, source=source)

    def loss(self, model: Model, batch: Batch) -> Loss:
        """Computes the mean squared error of masked patches; the decoder reads only the shape of the images."""
        mask = batch.targets != IGNORE_INDEX
        patches = batch.inputs.tokens[mask]
        restored = model(batch.inputs, batch.source)[mask]
        return Loss((restored - self.normalize(patches)).square().mean(dim=-1).sum(), len(patches), None)

    def moments(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation by which each patch is normalized, or 0 and 1 without norm_pix_loss."""
        if not self.norm_pix_loss:
            return patches.new_zeros(()), patches.new_ones(())
        return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()

    def normalize(self, patches: Tensor) -> Tensor:
        mean, scale = self.moments(patches)
        return (patches - mean) / scale

    def restore(self, model: Model, batch: Batch) -> Tensor:
        """Returns images as patches, B×L×pixels, with the model's output in place of masked patches."""
        images = batch.inputs.tokens
        mean, scale = self.moments(images)  # a model trained with norm_pix_loss does not predict them
        output = model(batch.inputs, batch.source) * scale + mean
        return torch.where((batch.targets != IGNORE_INDEX)[..., None], output, images)

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Computes the error of masked patches and of the mean image; with labels, also linear probes of the encoder.

        The probe reads the mean over the positions. All positions together would have so many numbers that an untrained
        encoder is probed as well as a trained one. Baselines are the probes of an untrained encoder and of the pixels.
        """
        result = replace(evaluate_loss(evaluation)[0], images=tuple(example_images(self, evaluation)))
        data, checkpoint = evaluation.data, evaluation.checkpoint
        if not data.train_rows:
            return result
        patches = [
            torch.from_numpy(
                np.stack(
                    [image_patches for image_patches, *_ in patchify_rows(list(rows), data.fields, checkpoint.spec)]
                )
            )
            for rows in (data.rows, data.train_rows)
        ]
        targets, train_targets = (self.normalize(part) for part in patches)
        mean_error = float((targets - train_targets.mean(0)).square().mean())
        scores = {"model": dict(result.scores["model"]), "pixels": {"loss": mean_error}}
        notes = ["pixels is the error of the mean image"]
        if data.labels:
            untrained = build(checkpoint.spec, seed=evaluation.seed, device=checkpoint.device).eval()
            for name, encoder in {"model": checkpoint.model, "untrained": untrained, "pixels": None}.items():
                x, train_x = (
                    part.flatten(1) if encoder is None else mean_states(evaluation, encoder, part) for part in patches
                )
                accuracy = linear_probe(train_x.numpy(), data.labels[1], x.numpy(), data.labels[0])
                scores.setdefault(name, {})["probe"] = accuracy
            notes = [
                "pixels is the error of the mean image, and a probe of the pixels",
                "the model's probe reads the encoder's mean output",
                "untrained is the same probe for this encoder with random weights",
            ]
        return replace(result, scores=scores, notes=(*result.notes, *notes))

    @classmethod
    def suggest_head(cls, suggestion: Suggestion) -> Lines:
        return [("head", {"kind": "pixels", "pixels": patch_size(suggestion)[0]}, "pixels per patch")]

    @classmethod
    def suggest_stacks(cls, suggestion: Suggestion) -> Iterator[tuple[str, Lines]]:
        pixels, channels, count = patch_size(suggestion)
        embed = {"kind": "patches", "pixels": pixels, "channels": channels}
        position, reason = {"kind": "learned", "length": count}, f"{count} patches per image"
        layers = suggestion.plain_layers(position, activation="gelu")
        yield "model.encoder", suggestion.stack(("embed", embed, reason), *layers)
        width, depth = suggestion.size.width // 2, max(1, suggestion.size.layers // 2)
        yield (
            "model.decoder",
            [
                ("like", "encoder", "but smaller, because only the encoder is used later"),
                ("layers", depth, ""),
                ("width", width, ""),
                ("embed", "mask-tokens", "the encoder's output at its positions, one vector for all masked patches"),
                ("mask", {"causal": False}, "an image has no order"),
                ("feedforward", {"hidden": 4 * width}, ""),
            ],
        )


def patch_size(suggestion: Suggestion) -> tuple[int, int, int]:
    """Returns numbers per patch, channels, and patches per image, for at most 64 square patches of side 2 or more."""
    image = suggestion.corpus.train[0][0]
    channels, height, width = image.shape if image.ndim == 3 else (1, *image.shape)
    sides = [side for side in range(2, height + 1) if height % side == 0 and width % side == 0]
    small = [side for side in sides if (height // side) * (width // side) <= 64]
    if not small:
        raise DataError(f"images of {height} × {width} cannot be cut into 2 to 64 square patches")
    return small[0] ** 2 * channels, channels, (height // small[0]) * (width // small[0])


def example_images(task: MaeSpec, evaluation: Evaluation) -> Iterator[Tree]:
    """Yields the first images with masked patches as 0.5, as restored by the model, and unchanged."""
    rows, checkpoint = evaluation.data.rows[: evaluation.options.examples], evaluation.checkpoint
    encoder = checkpoint.spec.encoder
    if not rows or encoder is None:
        return
    patches = patchify_rows(list(rows), evaluation.data.fields, checkpoint.spec)
    batch = task.batch(patches, evaluation.special_tokens, np.random.default_rng(evaluation.seed)).to(checkpoint.device)
    with torch.no_grad():
        restored = task.restore(checkpoint.model, batch)
    visible = batch.inputs.tokens.masked_fill((batch.targets != IGNORE_INDEX)[..., None], 0.5)
    size, embed = np.shape(rows[0][0])[-2:], encoder.embed
    kinds = {"visible": visible, "restored": restored, "target": batch.inputs.tokens}
    images = {name: embed.unpatchify(part.cpu(), *size).clamp(0, 1) for name, part in kinds.items()}  # type: ignore[attr-defined]
    for i in range(len(rows)):
        yield {name: to_numbers(part[i]) for name, part in images.items()}


def to_numbers(image: Tensor) -> list[Any]:
    """Returns an image as rows of grey values, or of colors."""
    points = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    numbers: list[Any] = points.double().mul(1000).round().div(1000).tolist()
    return numbers


def mean_states(evaluation: Evaluation, model: Model, patches_NLP: Tensor) -> Tensor:
    """Returns the encoder's output for whole images, averaged over positions, N×D."""
    states = list[Tensor]()
    encoder = as_transformer(model, "a linear probe of images")
    with torch.no_grad():
        for batch in patches_NLP.split(256):
            memory = encoder.encode(Inputs(batch).to(evaluation.checkpoint.device))
            assert memory is not None
            states.append(memory.states.mean(dim=1).cpu())
            evaluation.progress("probing", sum(map(len, states)), len(patches_NLP))
    return torch.cat(states)
