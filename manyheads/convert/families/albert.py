"""ALBERT: Lan et al. 2020. A narrow token table with a projection, and layers that share their weights."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, Task
from manyheads.convert.families.bert import CLASSES, KEYS, LENGTH, MASKED, MASKED_KEYS, SHAPE, dropout, embeddings
from manyheads.convert.keys import Labels
from manyheads.convert.tables import renamed
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.embed import TokensSpec

LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.output": "attention.dense",
    "residual.norms.0": "attention.LayerNorm",
    "feedforward.up": "ffn",
    "feedforward.down": "ffn_output",
    "residual.norms.1": "full_layer_layer_norm",
}


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    assert isinstance(spec.encoder.embed, TokensSpec)
    yield from embeddings(spec, prefix)
    if spec.encoder.embed.size != spec.encoder.width:
        yield from both("encoder.embed.project", f"{prefix}encoder.embedding_hidden_mapping_in")
    for i in range(spec.encoder.distinct or spec.encoder.layers):
        yield from renamed(f"encoder.layers.{i}", f"{prefix}encoder.albert_layer_groups.{i}.albert_layers.0", LAYER)


def pooler(prefix: str) -> Iterator[Row]:
    yield Unused(f"{prefix}pooler.weight")
    yield Unused(f"{prefix}pooler.bias")


def bare(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from pooler(prefix)


def masked_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.project", "predictions.dense")
    yield from both("head.norm", "predictions.LayerNorm")
    yield Same("head.scores.bias", "predictions.bias")
    yield Repeated("predictions.decoder.weight", same_as=f"{prefix}embeddings.word_embeddings.weight")
    yield Repeated("predictions.decoder.bias", same_as="predictions.bias")
    yield from pooler(prefix)


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.dense", f"{prefix}pooler")
    yield from both("head.output", "classifier")


FAMILIES = {
    "albert": Family(
        "albert",
        SHAPE,
        keys=(
            *KEYS,
            LENGTH,
            *dropout(0.0),
            Key("embedding_size", "encoder.embed.size"),
            Key("num_hidden_groups", "encoder.distinct", 1),
            Fixed("inner_group_num", 1),
        ),
        table=tower,
        tasks={
            "AlbertForMaskedLM": Task(head=MASKED, table=masked_tokens, keys=MASKED_KEYS, prefix="albert."),
            "AlbertForSequenceClassification": Task(
                head=CLASSES, table=classes, keys=(Labels(), Key("classifier_dropout_prob", "head.dropout", 0.1)), prefix="albert."
            ),
            "AlbertModel": Task(head={"kind": "none"}, table=bare),
        },
        silent=(
            "classifier_dropout_prob",
            "tie_word_embeddings",
            "down_scale_factor",
            "gap_size",
            "net_structure_type",
            "num_memory_blocks",
        ),
    )
}
