"""DistilBERT: Sanh et al. 2019. Half the layers, no token types, no pooler."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.families.bert import BASE, LENGTH, MASKED
from manyheads.convert.keys import Labels, activation
from manyheads.convert.weights import Ignored, TiedTensor, renames
from manyheads.spec import merge_trees

EMBEDDINGS = {
    "encoder.embed.table": "embeddings.word_embeddings",
    "encoder.embed.position.table": "embeddings.position_embeddings",
    "encoder.embed.norm": "embeddings.LayerNorm",
}
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
HEAD = {
    "head.project": "vocab_transform",
    "head.norm": "vocab_layer_norm",
    "head.scores.bias": "vocab_projector.bias",
}
EPS = {"kind": "layer", "eps": 1e-12}

FAMILIES = {
    "distilbert": Family(
        "distilbert",
        merge_trees(BASE, {"encoder": {"norm": EPS, "embed": {"norm": EPS}}}),
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
        weights=(
            *renames(EMBEDDINGS),
            Ignored("embeddings.position_ids"),
            *renames(LAYER, "encoder.layers.*.", "transformer.layer.*."),
        ),
        architectures={
            "DistilBertForMaskedLM": Architecture(
                head=MASKED | {"norm": EPS},
                weights=(*renames(HEAD), TiedTensor("vocab_projector.weight", ("encoder.embed.table.weight",))),
                keys=(activation("activation", "head.activation"), Fixed("tie_word_embeddings", True)),
                prefix="distilbert.",
            ),
            "DistilBertForSequenceClassification": Architecture(
                head={"kind": "classes", "pool": "first", "dense": True, "activation": "relu"},
                weights=renames({"head.dense": "pre_classifier", "head.output": "classifier"}),
                keys=(Labels(), Key("seq_classif_dropout", "head.dropout", 0.2)),
                prefix="distilbert.",
            ),
            "DistilBertModel": HEADLESS,
        },
        ignored=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings", "tie_weights_"),
    )
}
