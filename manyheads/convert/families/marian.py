"""Marian: Junczys-Dowmunt et al. 2018, as published for translation by Tiedemann and Thottingal 2020."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manyheads.convert.config import Config, ConfigRow, Fixed, Key, Look, Placed
from manyheads.convert.families import Family, Task
from manyheads.convert.keys import activation
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree, merged

TOWER: Tree = {
    "embed": {"kind": "tokens"},
    "attention": {"kind": "heads"},
    "core": {"kind": "dot"},
    "feedforward": {"kind": "mlp"},
    "norm": {"kind": "layer"},
    "residual": {"kind": "post"},
}
SHAPE: Tree = {"encoder": TOWER, "decoder": TOWER | {"embed": {"kind": "shared"}, "mask": {"causal": True}, "cross": True}}

DROPOUT: tuple[ConfigRow, ...] = (
    Key("dropout", ("encoder.residual.dropout", "decoder.residual.dropout", "encoder.embed.dropout", "decoder.embed.dropout"), 0.1),
    Key("attention_dropout", ("encoder.core.dropout", "decoder.core.dropout"), 0.0),
    Key("activation_dropout", ("encoder.feedforward.dropout", "decoder.feedforward.dropout"), 0.0),
)
KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("d_model", ("encoder.width", "decoder.width")),
    Key("encoder_layers", "encoder.layers"),
    Key("decoder_layers", "decoder.layers"),
    Key("encoder_attention_heads", "encoder.attention.heads"),
    Key("decoder_attention_heads", "decoder.attention.heads"),
    Key("encoder_ffn_dim", "encoder.feedforward.hidden"),
    Key("decoder_ffn_dim", "decoder.feedforward.hidden"),
    activation("activation_function", "encoder.feedforward.activation", "decoder.feedforward.activation"),
    Key("scale_embedding", ("encoder.embed.scale", "decoder.embed.scale"), False),
    *DROPOUT,
    Fixed("tie_word_embeddings", True),
    Fixed("is_encoder_decoder", True),
)
SILENT = ("classifier_dropout", "classif_dropout", "encoder_layerdrop", "decoder_layerdrop", "is_decoder", "num_hidden_layers")


def layers(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    """The layers of both towers."""
    assert spec.encoder is not None
    assert spec.decoder is not None
    for name, tower in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        for i in range(tower.layers):
            ours, theirs = f"{name}.layers.{i}", f"{prefix}{name}.layers.{i}"
            attentions = [("attention", "self_attn"), ("cross", "encoder_attn")][: 2 if tower.cross else 1]
            for at, (part, called) in enumerate(attentions):
                for projection, named in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
                    yield from both(f"{ours}.{part}.{projection}", f"{theirs}.{called}.{named}")
                yield from both(f"{ours}.residual.norms.{at}", f"{theirs}.{called}_layer_norm")
            yield from both(f"{ours}.feedforward.up", f"{theirs}.fc1")
            yield from both(f"{ours}.feedforward.down", f"{theirs}.fc2")
            yield from both(f"{ours}.residual.norms.{len(attentions)}", f"{theirs}.final_layer_norm")


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Same("encoder.embed.table.weight", f"{prefix}shared.weight")
    for name in ("encoder", "decoder"):
        yield Repeated(f"{prefix}{name}.embed_tokens.weight", same_as=f"{prefix}shared.weight")
        yield Unused(f"{prefix}{name}.embed_positions.weight")  # the sinusoids, which the config implies
    yield from layers(spec, prefix)


def next_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert isinstance(spec.vocab, int)
    yield Same("head.bias", "final_logits_bias", shape=(1, spec.vocab))
    yield Repeated("lm_head.weight", same_as=f"{prefix}shared.weight")


@dataclass(frozen=True)
class Begins:
    """The token that begins an answer and fills up a batch: the config must name one, though no number depends on it."""

    keys: tuple[str, ...] = ("pad_token_id", "decoder_start_token_id")

    def read(self, config: Config) -> Placed:
        return {}

    def write(self, look: Look) -> Tree:
        return dict.fromkeys(self.keys, (look("vocab") or 1) - 1)


SINUSOIDS: Tree = {"position": {"kind": "sinusoidal", "layout": "halves"}}

FAMILIES = {
    "marian": Family(
        "marian",
        merged(SHAPE, {"encoder": SINUSOIDS, "decoder": SINUSOIDS}),
        keys=(
            *KEYS,
            Key("decoder_vocab_size", "vocab", None),
            Begins(),
            Fixed("share_encoder_decoder_embeddings", True),
            Fixed("normalize_before", False),
            Fixed("normalize_embedding", False),
            Fixed("add_final_layer_norm", False),
            Fixed("static_position_embeddings", True),
            Fixed("add_bias_logits", False),
        ),
        table=tower,
        tasks={"MarianMTModel": Task(head={"kind": "tied", "bias": True}, table=next_tokens, prefix="model.")},
        silent=(*SILENT, "extra_pos_embeddings", "max_position_embeddings"),
    )
}
