"""GPT-J: Wang and Komatsuzaki 2021. Interleaved RoPE on some coordinates, one norm per layer, a head with a bias."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.convert.config import Config, Fields, GetField, Key, required
from manyheads.convert.families import HEADLESS, Architecture, Family, last_token_classes
from manyheads.convert.families.gpt2 import BASE
from manyheads.convert.keys import activation
from manyheads.convert.weights import Ignored, renames, token_scores
from manyheads.errors import CheckpointConfigError
from manyheads.spec import Tree, merge_trees, quoted


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
        merge_trees(
            BASE,
            {
                "decoder": {
                    "position": {"kind": "rope", "layout": "interleaved"},
                    "attention": {"bias": False, "output_bias": False},
                    "residual": {"kind": "parallel"},
                }
            },
        ),
        keys=(
            Key("vocab_size", "vocab"),
            Key("n_layer", "decoder.layers"),
            Key("n_embd", "decoder.width"),
            Key("n_head", "decoder.attention.heads"),
            Key("n_inner", "decoder.feedforward.hidden", None),
            activation("activation_function", "decoder.feedforward.activation"),
            Key("layer_norm_epsilon", "decoder.norm.eps"),
            Key("embd_pdrop", "decoder.embed.dropout", 0.0),
            Key("attn_pdrop", "decoder.core.dropout", 0.0),
            Key("resid_pdrop", "decoder.residual.dropout", 0.0),
            RotaryDim(),
        ),
        weights=(
            *renames({"decoder.embed.table": "wte", "decoder.norm": "ln_f"}),
            *renames(LAYER, "decoder.layers.*.", "h.*."),
            Ignored("h.*.attn.bias"),  # the causal mask, which older checkpoints store
            Ignored("h.*.attn.masked_bias"),
        ),
        architectures={
            "GPTJForCausalLM": Architecture(
                head={"kind": "untied", "bias": True},
                weights=token_scores("lm_head", "decoder.embed.table"),
                prefix="transformer.",
            ),
            "GPTJForSequenceClassification": last_token_classes("transformer."),
            "GPTJModel": HEADLESS,
        },
        ignored=(
            "n_ctx", "n_positions", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
    )
}  # fmt: skip
