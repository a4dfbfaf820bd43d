"""GPT-J: Wang and Komatsuzaki 2021. Interleaved rotation of some coordinates, one norm for both sublayers, a head with a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manyheads.convert.config import Config, Key, Look, Placed, needed
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.families.gpt2 import SHAPE
from manyheads.convert.keys import activation
from manyheads.convert.tables import scores
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, merged, quoted


@dataclass(frozen=True)
class TurnedCoordinates:
    """How many coordinates of a head are turned; as a share of it in ours."""

    keys: tuple[str, ...] = ("rotary_dim",)

    def read(self, config: Config) -> Placed:
        width, heads, turned = (config.get(key, usual) for key, usual in (("n_embd", 0), ("n_head", 0), ("rotary_dim", 64)))
        if not all(type(number) is int and 0 < number <= 65536 for number in (width, heads, turned)) or turned * heads > width:
            raise ValueError(f"rotary_dim in the config is {quoted(turned)}, of {quoted(heads)} heads in a width of {quoted(width)}")
        return {"decoder.position.fraction": turned / (width // heads)}

    def write(self, look: Look) -> Tree:
        size = needed(look, "decoder.width") // needed(look, "decoder.attention.heads")
        return {"rotary_dim": round(size * (look("decoder.position.fraction") or 1.0))}


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", f"{prefix}wte.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"{prefix}h.{i}"
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.ln_1")
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
            yield Same(f"{ours}.attention.{part}.weight", f"{theirs}.attn.{name}.weight")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.fc_in")
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.fc_out")
        yield Unused(f"{theirs}.attn.bias")  # the causal mask, which older checkpoints hold
        yield Unused(f"{theirs}.attn.masked_bias")
    yield from both("decoder.norm", f"{prefix}ln_f")


FAMILIES = {
    "gptj": Family(
        "gptj",
        merged(
            SHAPE,
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
            TurnedCoordinates(),
        ),
        table=tower,
        tasks={
            "GPTJForCausalLM": Task(head={"kind": "free", "bias": True}, table=scores("lm_head", "wte"), prefix="transformer."),
            "GPTJModel": BARE,
        },
        silent=(
            "n_ctx", "n_positions", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj", "tie_word_embeddings",
        ),
    )
}  # fmt: skip
