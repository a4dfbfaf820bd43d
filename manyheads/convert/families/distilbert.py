"""DistilBERT: Sanh et al. 2019. Half the layers, no token types, no pooler."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import BARE, Family, Task
from manyheads.convert.families.bert import LENGTH, MASKED, SHAPE
from manyheads.convert.keys import Labels, activation
from manyheads.convert.tables import renamed
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import merged

LAYER = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "residual.norms.0": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "residual.norms.1": "output_layer_norm",
}


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    yield Same("encoder.embed.table.weight", f"{prefix}embeddings.word_embeddings.weight")
    yield Same("encoder.embed.position.table.weight", f"{prefix}embeddings.position_embeddings.weight")
    yield from both("encoder.embed.norm", f"{prefix}embeddings.LayerNorm")
    yield Unused(f"{prefix}embeddings.position_ids")
    for i in range(spec.encoder.layers):
        yield from renamed(f"encoder.layers.{i}", f"{prefix}transformer.layer.{i}", LAYER)


def masked_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.project", "vocab_transform")
    yield from both("head.norm", "vocab_layer_norm")
    yield Same("head.scores.bias", "vocab_projector.bias")
    yield Repeated("vocab_projector.weight", same_as=f"{prefix}embeddings.word_embeddings.weight")


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.dense", "pre_classifier")
    yield from both("head.output", "classifier")


EPS = {"kind": "layer", "eps": 1e-12}

FAMILIES = {
    "distilbert": Family(
        "distilbert",
        merged(SHAPE, {"encoder": {"norm": EPS, "embed": {"norm": EPS}}}),
        keys=(
            Key("vocab_size", "vocab"),
            Key("n_layers", "encoder.layers"),
            Key("dim", "encoder.width"),
            Key("n_heads", "encoder.attention.heads"),
            Key("hidden_dim", "encoder.feedforward.hidden"),
            activation("activation", "encoder.feedforward.activation"),
            LENGTH,
            Key("dropout", ("encoder.embed.dropout", "encoder.feedforward.dropout"), 0.1),
            Key("attention_dropout", "encoder.core.dropout", 0.1),
        ),
        table=tower,
        tasks={
            "DistilBertForMaskedLM": Task(
                head=MASKED | {"norm": EPS},
                table=masked_tokens,
                keys=(activation("activation", "head.activation"), Fixed("tie_word_embeddings", True)),
                prefix="distilbert.",
            ),
            "DistilBertForSequenceClassification": Task(
                head={"kind": "classes", "pool": "first", "dense": True, "activation": "relu"},
                table=classes,
                keys=(Labels(), Key("seq_classif_dropout", "head.dropout", 0.2)),
                prefix="distilbert.",
            ),
            "DistilBertModel": BARE,
        },
        silent=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings", "tie_weights_"),
    )
}
