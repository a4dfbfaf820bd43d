"""fairseq's Transformer: Ott et al. 2019. Sinusoids whose exponents run to the end of the range, counted from 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manyheads.convert.config import Config, Fixed, Key, Look, Placed
from manyheads.convert.families import Family, Task
from manyheads.convert.families.marian import TOWER, layers
from manyheads.convert.keys import Choice, activation
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, merged


@dataclass(frozen=True)
class Waves:
    """θ^(−i/(h−1)) for h waves, where the paper has θ^(−i/h): the same with a higher θ."""

    keys: tuple[str, ...] = ("encoder_embed_dim", "decoder_embed_dim")

    def read(self, config: Config) -> Placed:
        found: Placed = {}
        for name in ("encoder", "decoder"):
            half = config[f"{name}_embed_dim"] // 2
            found |= {f"{name}.width": config[f"{name}_embed_dim"], f"{name}.position.theta": 10000.0 ** (half / max(half - 1, 1))}
        return found

    def write(self, look: Look) -> Tree:
        return {f"{name}_embed_dim": look(f"{name}.width") for name in ("encoder", "decoder")}


def arranged(name: str) -> Choice:
    kinds = ((True, {"kind": "pre"}), (False, {"kind": "post"}))
    return Choice(f"{name}_normalize_before", f"{name}.residual", kinds, False)


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    for name in ("encoder", "decoder"):
        yield Same(f"{name}.embed.table.weight", f"{name}.embed_tokens.weight")
        yield Unused(f"{name}.version")
        yield Unused(f"{name}.embed_positions._float_tensor")
        tower = getattr(spec, name)
        if tower.closing_norm():
            yield from both(f"{name}.norm", f"{name}.layer_norm")
    yield from layers(spec, prefix)


def next_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Repeated("decoder.output_projection.weight", same_as="decoder.embed_tokens.weight")


SHAPE: Tree = {"encoder": TOWER, "decoder": TOWER | {"mask": {"causal": True}, "cross": True}}
SINUSOIDS: Tree = {"embed": {"kind": "tokens", "scale": True}, "position": {"kind": "sinusoidal", "layout": "halves", "offset": 2}}

FAMILIES = {
    "fairseq": Family(
        "fairseq",
        merged(SHAPE, {"encoder": SINUSOIDS, "decoder": SINUSOIDS}),
        (
            Key("target_tokens", "vocab"),
            Key("source_tokens", "source_vocab"),
            Waves(),
            *(Key(f"{name}_layers", f"{name}.layers") for name in ("encoder", "decoder")),
            *(Key(f"{name}_attention_heads", f"{name}.attention.heads") for name in ("encoder", "decoder")),
            *(Key(f"{name}_ffn_embed_dim", f"{name}.feedforward.hidden") for name in ("encoder", "decoder")),
            *(arranged(name) for name in ("encoder", "decoder")),
            activation("activation_fn", "encoder.feedforward.activation", "decoder.feedforward.activation", default="relu"),
            *(
                Fixed(key, False)
                for key in (
                    "adaptive_input", "cross_self_attention", "decoder_learned_pos", "encoder_learned_pos", "layernorm_embedding",
                    "no_cross_attention", "no_scale_embedding", "no_token_positional_embeddings", "share_all_embeddings",
                )
            ),
            Fixed("adaptive_softmax_cutoff", None),
            Fixed("share_decoder_input_output_embed", True),
        ),
        tower,
        {"TransformerModel": Task({"kind": "tied"}, next_tokens, (), "")},
        ("arch",),
    )
}  # fmt: skip
