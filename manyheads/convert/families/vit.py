"""ViT and ViT-MAE. Images are split into patches, which follow a learned class token."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from manyheads.convert.config import Config, Fields, GetField, Key, write_config
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.bert import pooler
from manyheads.convert.keys import Labels, activation, in_both, sizes
from manyheads.convert.weights import Rename, Rows, renames
from manyheads.errors import CheckpointConfigError
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, quote


@dataclass(frozen=True)
class ImageSize:
    """Image size, patch size and channels, which a description holds as the number of patches and pixels per patch."""

    lengths: tuple[str, ...] = ("encoder.position.length",)
    pixels: tuple[str, ...] = ("encoder.embed.pixels",)
    keys: tuple[str, ...] = ("image_size", "patch_size", "num_channels")

    def read(self, config: Config) -> Fields:
        side, patch, channels = (config.get(key, default) for key, default in zip(self.keys, (224, 16, 3), strict=True))
        if not all(type(value) is int and value > 0 for value in (side, patch, channels)) or side % patch:
            raise CheckpointConfigError(
                f"image_size {quote(side)} is not a multiple of patch_size {quote(patch)}, or num_channels is invalid"
            )
        sizes = dict.fromkeys(self.lengths, (side // patch) ** 2 + 1) | dict.fromkeys(self.pixels, patch**2 * channels)
        return sizes | {"encoder.embed.channels": channels}

    def write(self, get: GetField) -> Tree:
        pixels, channels = get(self.pixels[0]) or 1, get("encoder.embed.channels") or 1
        patches = (get(self.lengths[0]) or 2) - 1
        # if the numbers are not squares, the config describes another model, which an export detects
        patch = max(1, isqrt(pixels // channels))
        return {"image_size": isqrt(patches) * patch, "patch_size": patch, "num_channels": channels}


LAYER = {
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.output": "attention.output.dense",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "residual.norms.0": "layernorm_before",
    "residual.norms.1": "layernorm_after",
}


def weights(spec: ModelSpec) -> Rows:
    assert spec.encoder is not None
    width, image = spec.encoder.width, write_config([ImageSize()], spec)
    # the shape of a convolution kernel
    kernel = (width, image["num_channels"], image["patch_size"], image["patch_size"])
    return (
        *renames({
            "encoder.embed.cls_token": "embeddings.cls_token",
            "encoder.embed.project.bias": "embeddings.patch_embeddings.projection.bias",
            "encoder.norm": "layernorm",
        }),
        Rename("embeddings.position_embeddings", ("encoder.embed.position.table.weight",), shape=(1, -1, width)),
        Rename("embeddings.patch_embeddings.projection.weight", ("encoder.embed.project.weight",), shape=kernel),
        *renames(LAYER, "encoder.layers.*.", "encoder.layer.*."),
    )  # fmt: skip


POSITION = {"kind": "learned"}
BASE: Tree = {"encoder": {"embed": {"kind": "patches", "class_token": True}, "position": POSITION}}

MAE_DECODER = {
    "decoder.embed.mask_token": "decoder.mask_token",
    "decoder.embed.project": "decoder.decoder_embed",
    "decoder.norm": "decoder.decoder_norm",
    "head.output": "decoder.decoder_pred",
}
EMBED = {"kind": "mask-tokens", "class_token": True}


def mae_weights(spec: ModelSpec) -> Rows:
    assert spec.decoder is not None
    shape = (1, -1, spec.decoder.width)
    return (
        *(row.rename(lambda name: f"vit.{name}") for row in weights(spec)),
        *renames(MAE_DECODER),
        Rename("decoder.decoder_pos_embed", ("decoder.embed.position.table.weight",), shape=shape),
        *renames(LAYER, "decoder.layers.*.", "decoder.decoder_layers.*."),
    )


FAMILIES = (
    # Dosovitskiy et al. 2021
    Family(
        "vit",
        BASE,
        keys=(
            *sizes("encoder"),
            ImageSize(),
            activation("hidden_act", "encoder.feedforward.activation"),
            Key("layer_norm_eps", "encoder.norm.eps"),
            Key("hidden_dropout_prob", ("encoder.residual.dropout", "encoder.embed.dropout"), 0.0),
            Key("attention_probs_dropout_prob", "encoder.core.dropout", 0.0),
            Key("qkv_bias", "encoder.attention.bias", True),
        ),
        weights=weights,
        architectures={
            "ViTForImageClassification": Architecture(
                head={"kind": "classes", "pool": "first"},
                weights=renames({"head.output": "classifier"}),
                keys=(Labels(),),
                prefix="vit.",
            ),
            "ViTModel": Architecture(head={"kind": "none"}, weights=pooler()),
        },
        ignored_keys=("encoder_stride", "pooler_output_size", "pooler_act"),
    ),
    # He et al. 2022: the encoder reads some patches, and a narrower decoder reconstructs the others
    Family(
        "vit_mae",
        BASE | {"decoder": {"embed": EMBED, "position": POSITION, "mask": {"causal": False}}},
        keys=(
            *sizes("encoder"),
            ImageSize(in_both("position.length"), ("encoder.embed.pixels", "head.pixels")),
            *sizes("decoder", "decoder_"),
            activation("hidden_act", *in_both("feedforward.activation")),
            Key("layer_norm_eps", in_both("norm.eps")),
            Key("hidden_dropout_prob", in_both("residual.dropout"), 0.0),
            Key("attention_probs_dropout_prob", in_both("core.dropout"), 0.0),
            Key("qkv_bias", in_both("attention.bias"), True),
        ),
        weights=mae_weights,
        architectures={"ViTMAEForPreTraining": Architecture(head={"kind": "pixels", "skip": 1})},
        ignored_keys=("mask_ratio", "norm_pix_loss"),
        key_mappings=(((r"^decoder\.decoder_layers\.", "decoder.decoder_encoder.layer."),),),
    ),
)
