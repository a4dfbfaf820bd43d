"""PEGASUS: Zhang et al. 2020. Marian's layers with norms before the sublayers and after the last layer."""

from __future__ import annotations

from manyheads.convert.config import fixed
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.families.marian import (
    BASE,
    EMBEDDINGS,
    IGNORED,
    KEYS,
    LAYERS,
    POSITION_TABLES,
    SINUSOID_KEYS,
    SINUSOIDS,
    TOKEN_SCORES,
    sinusoid_tables,
)
from manyheads.convert.weights import renames
from manyheads.spec import merge_trees

STACK = SINUSOIDS | {"residual": {"kind": "pre"}}

FAMILIES = {
    "pegasus": Family(
        "pegasus",
        merge_trees(BASE, {"encoder": STACK, "decoder": STACK}),
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
        architectures={
            "PegasusForConditionalGeneration": Architecture(
                head={"kind": "tied", "bias": True}, weights=TOKEN_SCORES, prefix="model."
            ),
            "PegasusModel": HEADLESS,
        },
        ignored=(*IGNORED, "extra_pos_embeddings", "force_bos_token_to_be_generated"),
        computed=sinusoid_tables,
    )
}
