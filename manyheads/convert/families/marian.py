"""Marian, BART and PEGASUS, which share the layers of the encoder–decoder of Vaswani et al. 2017."""

from __future__ import annotations

from collections.abc import Collection

import torch

from manyheads.convert.config import Config, ConfigRow, Key, WriteOnlyKey, fixed
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.keys import activation, in_both
from manyheads.convert.weights import Ignored, Rename, Rows, Tensors, TiedTensor, renames
from manyheads.model.spec import ModelSpec
from manyheads.parts.position import Sinusoidal, SinusoidalSpec
from manyheads.spec import Tree, merge_trees

STACK: Tree = {"residual": {"kind": "post"}}
BASE: Tree = {"encoder": STACK, "decoder": STACK | {"embed": {"kind": "shared"}, "cross": True}}

DROPOUT: tuple[ConfigRow, ...] = (
    Key("dropout", (*in_both("residual.dropout"), *in_both("embed.dropout")), 0.1),
    Key("attention_dropout", in_both("core.dropout"), 0.0),
    Key("activation_dropout", in_both("feedforward.dropout"), 0.0),
)
KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("d_model", in_both("width")),
    Key("encoder_layers", "encoder.layers"),
    Key("decoder_layers", "decoder.layers"),
    Key("encoder_attention_heads", "encoder.attention.heads"),
    Key("decoder_attention_heads", "decoder.attention.heads"),
    Key("encoder_ffn_dim", "encoder.feedforward.hidden"),
    Key("decoder_ffn_dim", "decoder.feedforward.hidden"),
    activation("activation_function", *in_both("feedforward.activation")),
    Key("scale_embedding", in_both("embed.scale"), False),
    *DROPOUT,
    *fixed(tie_word_embeddings=True, is_encoder_decoder=True),
)
IGNORED = (
    "classifier_dropout",
    "classif_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "is_decoder",
    "num_hidden_layers",
)

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
FEEDFORWARD = {"feedforward.up": "fc1", "feedforward.down": "fc2"}
ENCODER_NORMS = {"residual.norms.0": "self_attn_layer_norm", "residual.norms.1": "final_layer_norm"}
DECODER_NORMS = {
    "residual.norms.0": "self_attn_layer_norm",
    "residual.norms.1": "encoder_attn_layer_norm",
    "residual.norms.2": "final_layer_norm",
}
LAYERS: Rows = (
    *renames(PROJECTIONS, "encoder.layers.*.attention.", "encoder.layers.*.self_attn."),
    *renames(ENCODER_NORMS | FEEDFORWARD, "encoder.layers.*.", "encoder.layers.*."),
    *renames(PROJECTIONS, "decoder.layers.*.attention.", "decoder.layers.*.self_attn."),
    *renames(PROJECTIONS, "decoder.layers.*.cross.", "decoder.layers.*.encoder_attn."),
    *renames(DECODER_NORMS | FEEDFORWARD, "decoder.layers.*.", "decoder.layers.*."),
)
EMBEDDINGS: Rows = (
    *renames({"encoder.embed.table": "shared"}),
    TiedTensor("encoder.embed_tokens.weight", ("encoder.embed.table.weight",)),
    TiedTensor("decoder.embed_tokens.weight", ("encoder.embed.table.weight",)),
)
POSITION_TABLES: Rows = (  # sinusoids, which are computed here
    Ignored("encoder.embed_positions.weight"),
    Ignored("decoder.embed_positions.weight"),
)


def sinusoid_tables(spec: ModelSpec, config: Config, unused: Collection[str]) -> Tensors:
    """The sinusoids as tables, without which transformers reports missing weights."""
    assert spec.encoder is not None
    positions = torch.arange(config["max_position_embeddings"])[None]
    table = Sinusoidal(SinusoidalSpec(layout="halves"), spec.encoder.width).table(positions, torch.float32)[0]
    return {name: table.clone() for name in unused if name.endswith("embed_positions.weight")}


TOKEN_SCORES: Rows = (
    Rename("final_logits_bias", ("head.bias",), shape=(1, -1)),
    TiedTensor("lm_head.weight", ("encoder.embed.table.weight",)),
)
GENERATION = Architecture(head={"kind": "tied", "bias": True}, weights=TOKEN_SCORES, prefix="model.")

SINUSOID_KEYS: tuple[ConfigRow, ...] = (
    # transformers requires the id of the token that starts a target and pads a batch
    WriteOnlyKey(("pad_token_id", "decoder_start_token_id"), lambda get: (get("vocab") or 1) - 1),
    WriteOnlyKey(("forced_eos_token_id",), lambda get: None),  # otherwise that of the published models
    WriteOnlyKey(("max_position_embeddings",), lambda get: MAX_SINUSOIDS),
)
MAX_SINUSOIDS = 2048  # rows of the tables in transformers; sinusoids themselves have no limit
SINUSOIDS: Tree = {"position": {"kind": "sinusoidal", "layout": "halves"}}

BART_STACK: Tree = {"embed": {"norm": {"kind": "layer"}}, "position": {"kind": "learned", "offset": 2}}
BART_EMBEDDINGS = {"embed.position.table": "embed_positions", "embed.norm": "layernorm_embedding"}
PEGASUS_STACK: Tree = SINUSOIDS | {"residual": {"kind": "pre"}}

FAMILIES = (
    # Junczys-Dowmunt et al. 2018, as published for translation by Tiedemann and Thottingal 2020
    Family(
        "marian",
        merge_trees(BASE, {"encoder": SINUSOIDS, "decoder": SINUSOIDS}),
        keys=(
            *KEYS,
            Key("decoder_vocab_size", "vocab", None),
            *SINUSOID_KEYS,
            *fixed(share_encoder_decoder_embeddings=True, normalize_before=False, normalize_embedding=False),
            *fixed(add_final_layer_norm=False, static_position_embeddings=True, add_bias_logits=False),
        ),
        weights=(*EMBEDDINGS, *POSITION_TABLES, *LAYERS),
        architectures={"MarianMTModel": GENERATION},
        ignored_keys=(*IGNORED, "extra_pos_embeddings"),
        computed_tensors=sinusoid_tables,
    ),
    # Lewis et al. 2020: position tables start with two unused rows, and a norm follows the embeddings
    Family(
        "bart",
        merge_trees(BASE, {"encoder": BART_STACK, "decoder": BART_STACK}),
        keys=(
            *KEYS,
            Key("max_position_embeddings", in_both("position.length")),
            *fixed(normalize_before=False, add_final_layer_norm=False, normalize_embedding=True),
            *fixed(static_position_embeddings=False, add_bias_logits=False),
        ),
        weights=(
            *EMBEDDINGS,
            *renames(BART_EMBEDDINGS, "encoder.", "encoder."),
            *renames(BART_EMBEDDINGS, "decoder.", "decoder."),
            Ignored("encoder.version"),
            Ignored("decoder.version"),
            *LAYERS,
        ),
        architectures={"BartForConditionalGeneration": GENERATION, "BartModel": HEADLESS},
        ignored_keys=(
            *IGNORED, "extra_pos_embeddings", "force_bos_token_to_be_generated", "replacing_rate", "save_step",
            "student_decoder_layers", "student_encoder_layers",
        ),
    ),
    # Zhang et al. 2020: norms before the sublayers and after the last layer
    Family(
        "pegasus",
        merge_trees(BASE, {"encoder": PEGASUS_STACK, "decoder": PEGASUS_STACK}),
        keys=(
            *KEYS,
            *SINUSOID_KEYS,
            *fixed(normalize_before=True, normalize_embedding=False, add_final_layer_norm=True),
            *fixed(static_position_embeddings=True, add_bias_logits=False),
        ),
        weights=(
            *EMBEDDINGS,
            *POSITION_TABLES,
            *LAYERS,
            *renames({"encoder.norm": "encoder.layer_norm", "decoder.norm": "decoder.layer_norm"}),
        ),
        architectures={"PegasusForConditionalGeneration": GENERATION, "PegasusModel": HEADLESS},
        ignored_keys=(*IGNORED, "extra_pos_embeddings", "force_bos_token_to_be_generated"),
        computed_tensors=sinusoid_tables,
    ),
)  # fmt: skip
