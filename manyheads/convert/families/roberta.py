"""RoBERTa: Liu et al. 2019. The position table starts with two unused rows."""

from __future__ import annotations

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.bert import (
    BASE,
    CLASSES,
    CLASSES_KEYS,
    IGNORED,
    KEYS,
    MASKED,
    WEIGHTS,
    dropout,
    masked,
    pooler,
)
from manyheads.convert.weights import renames
from manyheads.spec import merge_trees

OFFSET = 2  # the first position is the id of the padding token, 1, plus 1
LENGTH = Key(
    "max_position_embeddings",
    "encoder.position.length",
    reads=lambda rows: rows - OFFSET,
    writes=lambda length: length + OFFSET,
)
HEAD = masked("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder")

FAMILIES = {
    "roberta": Family(
        "roberta",
        merge_trees(BASE, {"encoder": {"position": {"offset": OFFSET}}}),
        keys=(*KEYS, LENGTH, *dropout(0.1), Fixed("pad_token_id", 1)),
        weights=WEIGHTS,
        architectures={
            "RobertaForMaskedLM": Architecture(
                head=MASKED | {"activation": "gelu"},
                weights=(*HEAD, *pooler("roberta.")),
                keys=(Key("layer_norm_eps", "head.norm.eps", 1e-12), Fixed("tie_word_embeddings", True)),
                prefix="roberta.",
            ),
            "RobertaForSequenceClassification": Architecture(
                head=CLASSES,
                weights=(
                    *renames({"head.dense": "classifier.dense", "head.output": "classifier.out_proj"}),
                    *pooler("roberta."),
                ),
                keys=CLASSES_KEYS,
                prefix="roberta.",
            ),
            "RobertaModel": Architecture(head={"kind": "none"}, weights=pooler()),
        },
        ignored=IGNORED,
    )
}
