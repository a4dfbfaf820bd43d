"""BART: Lewis et al. 2020. Position tables start with two unused rows, and a norm follows the embeddings."""

from __future__ import annotations

from manyheads.convert.config import Key, fixed
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.families.marian import BASE, EMBEDDINGS, IGNORED, KEYS, LAYERS, TOKEN_SCORES
from manyheads.convert.keys import in_both
from manyheads.convert.weights import Ignored, renames
from manyheads.spec import merge_trees

EMBED = {"embed": {"norm": {"kind": "layer"}}, "position": {"kind": "learned", "offset": 2}}
NAMES = {"embed.position.table": "embed_positions", "embed.norm": "layernorm_embedding"}

FAMILIES = {
    "bart": Family(
        "bart",
        merge_trees(BASE, {"encoder": EMBED, "decoder": EMBED}),
        keys=(
            *KEYS,
            Key("max_position_embeddings", in_both("position.length")),
            *fixed(normalize_before=False, add_final_layer_norm=False, normalize_embedding=True),
            *fixed(static_position_embeddings=False, add_bias_logits=False),
        ),
        weights=(
            *EMBEDDINGS,
            *renames(NAMES, "encoder.", "encoder."),
            *renames(NAMES, "decoder.", "decoder."),
            Ignored("encoder.version"),
            Ignored("decoder.version"),
            *LAYERS,
        ),
        architectures={
            "BartForConditionalGeneration": Architecture(
                head={"kind": "tied", "bias": True}, weights=TOKEN_SCORES, prefix="model."
            ),
            "BartModel": HEADLESS,
        },
        ignored=(
            *IGNORED, "extra_pos_embeddings", "force_bos_token_to_be_generated", "replacing_rate", "save_step",
            "student_decoder_layers", "student_encoder_layers",
        ),
    )
}  # fmt: skip
