"""GPT-J: Wang and Komatsuzaki 2021. Interleaved RoPE on some coordinates, one norm per layer, a head with a bias."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.convert.config import Config, Fields, GetField, required
from manyheads.convert.families import Family, decoder_architectures
from manyheads.convert.families.gpt2 import MASKS, keys
from manyheads.convert.weights import renames
from manyheads.errors import CheckpointConfigError
from manyheads.spec import Tree, quoted


@dataclass(frozen=True)
class RotaryDim:
    """The number of rotated coordinates per head, which a description holds as a fraction of the head."""

    keys: tuple[str, ...] = ("rotary_dim",)

    def read(self, config: Config) -> Fields:
        width, heads, rotated = (config.get(key, 64) for key in ("n_embd", "n_head", "rotary_dim"))
        valid = all(type(count) is int and 0 < count <= 65536 for count in (width, heads, rotated))
        if not valid or rotated * heads > width:
            raise CheckpointConfigError(
                f"rotary_dim is {quoted(rotated)}, with {quoted(heads)} heads in a width of {quoted(width)}"
            )
        return {"decoder.position.fraction": rotated / (width // heads)}

    def write(self, get: GetField) -> Tree:
        size = required(get, "decoder.width") // required(get, "decoder.attention.heads")
        return {"rotary_dim": round(size * (get("decoder.position.fraction") or 1.0))}


LAYER = {
    "residual.norms.0": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.output": "attn.out_proj",
    "feedforward.up": "mlp.fc_in",
    "feedforward.down": "mlp.fc_out",
}

FAMILIES = {
    "gptj": Family(
        "gptj",
        {
            "decoder": {
                "position": {"kind": "rope", "layout": "interleaved"},
                "attention": {"bias": False, "output_bias": False},
                "residual": {"kind": "parallel"},
            }
        },
        keys=(*keys(dropout=0.0), RotaryDim()),
        weights=(
            *renames({"decoder.embed.table": "wte", "decoder.norm": "ln_f"}),
            *renames(LAYER, "decoder.layers.*.", "h.*."),
            *MASKS,
        ),
        architectures=decoder_architectures("GPTJ", "transformer.", head={"kind": "untied", "bias": True}, keys=()),
        ignored=(
            "n_ctx", "n_positions", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
    )
}  # fmt: skip
