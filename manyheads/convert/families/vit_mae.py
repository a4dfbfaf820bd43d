"""ViT-MAE: He et al. 2022. The encoder reads some patches, and a narrower decoder reconstructs the others."""

from __future__ import annotations

from manyheads.convert.config import Key
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.vit import BASE, LAYER, POSITION, ImageSize
from manyheads.convert.families.vit import weights as encoder_weights
from manyheads.convert.keys import activation, in_both, sizes
from manyheads.convert.weights import Rename, Rows, renames
from manyheads.model.spec import ModelSpec

DECODER = {
    "decoder.embed.mask_token": "decoder.mask_token",
    "decoder.embed.project": "decoder.decoder_embed",
    "decoder.norm": "decoder.decoder_norm",
    "head.output": "decoder.decoder_pred",
}
EMBED = {"kind": "mask-tokens", "class_token": True}


def weights(spec: ModelSpec) -> Rows:
    assert spec.decoder is not None
    shape = (1, -1, spec.decoder.width)
    return (
        *(row.renamed(lambda name: f"vit.{name}") for row in encoder_weights(spec)),
        *renames(DECODER),
        Rename("decoder.decoder_pos_embed", ("decoder.embed.position.table.weight",), shape=shape),
        *renames(LAYER, "decoder.layers.*.", "decoder.decoder_layers.*."),
    )


FAMILIES = {
    "vit_mae": Family(
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
        weights=weights,
        architectures={"ViTMAEForPreTraining": Architecture(head={"kind": "pixels", "skip": 1})},
        ignored=("mask_ratio", "norm_pix_loss"),
        spellings=(((r"^decoder\.decoder_layers\.", "decoder.decoder_encoder.layer."),),),
    )
}
