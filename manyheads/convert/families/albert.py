"""ALBERT: Lan et al. 2020. A narrow token table with a projection, and layers that share their weights."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, Task
from manyheads.convert.families.bert import CLASSES, KEYS, LENGTH, MASKED, MASKED_KEYS, SHAPE, dropout
from manyheads.convert.keys import Labels
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.embed import TokensSpec


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    assert isinstance(spec.encoder.embed, TokensSpec)
    theirs = f"{prefix}embeddings"
    yield Same("encoder.embed.table.weight", f"{theirs}.word_embeddings.weight")
    yield Same("encoder.embed.position.table.weight", f"{theirs}.position_embeddings.weight")
    yield Same("encoder.embed.types.weight", f"{theirs}.token_type_embeddings.weight")
    yield from both("encoder.embed.norm", f"{theirs}.LayerNorm")
    yield Unused(f"{theirs}.position_ids")
    if spec.encoder.embed.size != spec.encoder.width:
        yield from both("encoder.embed.project", f"{prefix}encoder.embedding_hidden_mapping_in")
    for i in range(spec.encoder.distinct or spec.encoder.layers):
        ours, theirs = f"encoder.layers.{i}", f"{prefix}encoder.albert_layer_groups.{i}.albert_layers.0"
        for part in ("query", "key", "value"):
            yield from both(f"{ours}.attention.{part}", f"{theirs}.attention.{part}")
        yield from both(f"{ours}.attention.output", f"{theirs}.attention.dense")
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.attention.LayerNorm")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.ffn")
        yield from both(f"{ours}.feedforward.down", f"{theirs}.ffn_output")
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.full_layer_layer_norm")


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
        (
            *KEYS,
            LENGTH,
            *dropout(0.0),
            Key("embedding_size", "encoder.embed.size"),
            Key("num_hidden_groups", "encoder.distinct", 1),
            Fixed("inner_group_num", 1),
        ),
        tower,
        {
            "AlbertForMaskedLM": Task(MASKED, masked_tokens, MASKED_KEYS, "albert."),
            "AlbertForSequenceClassification": Task(
                CLASSES, classes, (Labels(), Key("classifier_dropout_prob", "head.dropout", 0.1)), "albert."
            ),
            "AlbertModel": Task({"kind": "none"}, bare, (), ""),
        },
        ("classifier_dropout_prob", "tie_word_embeddings", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    )
}
