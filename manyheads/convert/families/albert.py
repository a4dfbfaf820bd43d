"""ALBERT: Lan et al. 2020. A narrow token embedding with a projection, and layers that share their weights."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.bert import (
    BASE,
    CLASSES,
    EMBEDDINGS,
    KEYS,
    LENGTH,
    MASKED,
    MASKED_KEYS,
    dropout,
    masked,
    pooler,
)
from manyheads.convert.keys import Labels
from manyheads.convert.weights import renames

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


HEAD = masked("predictions.dense", "predictions.LayerNorm", "predictions.bias", "predictions.decoder")

FAMILIES = {
    "albert": Family(
        "albert",
        BASE,
        keys=(
            *KEYS,
            LENGTH,
            *dropout(0.0),
            Key("embedding_size", "encoder.embed.size"),
            Key("num_hidden_groups", "encoder.layer_groups", 1),
            Fixed("inner_group_num", 1),
        ),
        weights=(
            *EMBEDDINGS,
            *renames({"encoder.embed.project": "encoder.embedding_hidden_mapping_in"}, optional=True),
            *renames(LAYER, "encoder.layers.*.", "encoder.albert_layer_groups.*.albert_layers.0."),
        ),
        architectures={
            "AlbertForMaskedLM": Architecture(
                head=MASKED, weights=(*HEAD, *pooler("albert.", "pooler")), keys=MASKED_KEYS, prefix="albert."
            ),
            "AlbertForSequenceClassification": Architecture(
                head=CLASSES,
                weights=renames({"head.dense": "albert.pooler", "head.output": "classifier"}),
                keys=(Labels(), Key("classifier_dropout_prob", "head.dropout", 0.1)),
                prefix="albert.",
            ),
            "AlbertModel": Architecture(head={"kind": "none"}, weights=pooler(name="pooler")),
        },
        ignored=(
            "classifier_dropout_prob",
            "tie_word_embeddings",
            "down_scale_factor",
            "gap_size",
            "net_structure_type",
            "num_memory_blocks",
        ),
    )
}
