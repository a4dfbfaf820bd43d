"""ViT-MAE: He et al. 2022. The encoder sees some patches, a narrower decoder restores the others."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Key
from manyheads.convert.families import Family, Task
from manyheads.convert.families.vit import KEYS, SHAPE, TOWER, Picture, layers
from manyheads.convert.families.vit import tower as encoder
from manyheads.convert.keys import activation, in_both
from manyheads.convert.weights import Row, Same, both
from manyheads.model.spec import ModelSpec


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from encoder(spec, prefix)
    assert spec.decoder is not None
    length, width = spec.decoder.position.longest, spec.decoder.width
    assert length is not None
    yield Same("decoder.embed.hidden", "decoder.mask_token")
    yield Same("decoder.embed.position.table.weight", "decoder.decoder_pos_embed", shape=(1, length, width))
    yield from both("decoder.embed.project", "decoder.decoder_embed")
    yield from layers("decoder", spec.decoder, "decoder.decoder_layers")
    yield from both("decoder.norm", "decoder.decoder_norm")


def pixels(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.output", "decoder.decoder_pred")


FAMILIES = {
    "vit_mae": Family(
        "vit_mae",
        SHAPE | {"decoder": TOWER | {"embed": {"kind": "restored", "first": True}, "mask": {"causal": False}}},
        keys=(
            *KEYS,
            Picture(in_both("position.length"), ("encoder.embed.pixels", "head.pixels")),
            Key("decoder_num_hidden_layers", "decoder.layers"),
            Key("decoder_hidden_size", "decoder.width"),
            Key("decoder_num_attention_heads", "decoder.attention.heads"),
            Key("decoder_intermediate_size", "decoder.feedforward.hidden"),
            activation("hidden_act", *in_both("feedforward.activation")),
            Key("layer_norm_eps", in_both("norm.eps")),
            Key("hidden_dropout_prob", in_both("residual.dropout"), 0.0),
            Key("attention_probs_dropout_prob", in_both("core.dropout"), 0.0),
            Key("qkv_bias", in_both("attention.bias"), True),
        ),
        table=tower,
        tasks={"ViTMAEForPreTraining": Task(head={"kind": "pixels", "skip": 1}, table=pixels, prefix="vit.")},
        silent=("mask_ratio", "norm_pix_loss"),
        spellings=(((r"^decoder\.decoder_layers\.", "decoder.decoder_encoder.layer."),),),
    )
}
