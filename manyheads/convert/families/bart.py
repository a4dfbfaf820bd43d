"""BART: Lewis et al. 2020. Two rows of each position table stand before position 0; a norm behind the embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.families.marian import KEYS, SHAPE, SILENT, layers, next_tokens
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import merged


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Same("encoder.embed.table.weight", f"{prefix}shared.weight")
    for name in ("encoder", "decoder"):
        yield Repeated(f"{prefix}{name}.embed_tokens.weight", same_as=f"{prefix}shared.weight")
        yield Same(f"{name}.embed.position.table.weight", f"{prefix}{name}.embed_positions.weight")
        yield from both(f"{name}.embed.norm", f"{prefix}{name}.layernorm_embedding")
        yield Unused(f"{prefix}{name}.version")
    yield from layers(spec, prefix)


EMBED = {"embed": {"norm": {"kind": "layer"}}, "position": {"kind": "learned", "offset": 2}}

FAMILIES = {
    "bart": Family(
        "bart",
        merged(SHAPE, {"encoder": EMBED, "decoder": EMBED}),
        keys=(
            *KEYS,
            Key("max_position_embeddings", ("encoder.position.length", "decoder.position.length")),
            Fixed("normalize_before", False),
            Fixed("add_final_layer_norm", False),
            Fixed("normalize_embedding", True),
            Fixed("static_position_embeddings", False),
            Fixed("add_bias_logits", False),
        ),
        table=tower,
        tasks={
            "BartForConditionalGeneration": Task(head={"kind": "tied", "bias": True}, table=next_tokens, prefix="model."),
            "BartModel": BARE,
        },
        silent=(*SILENT, "extra_pos_embeddings", "force_bos_token_to_be_generated", "replacing_rate", "save_step", "student_decoder_layers",
         "student_encoder_layers"),
    )
}  # fmt: skip
