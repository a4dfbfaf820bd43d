"""RoBERTa: Liu et al. 2019. Two rows of the position table stand before position 0."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import Fixed, Key
from manyheads.convert.families import Family, Task
from manyheads.convert.families.bert import CLASSES, CLASSES_KEYS, KEYS, MASKED, SHAPE, SILENT, bare, dropout, pooler, tower
from manyheads.convert.weights import Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec
from manyheads.spec import merged

OFFSET = 2  # the padding token's id, 1, and one
LENGTH = Key("max_position_embeddings", "encoder.position.length", reads=lambda rows: rows - OFFSET, writes=lambda length: length + OFFSET)


def masked_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.project", "lm_head.dense")
    yield from both("head.norm", "lm_head.layer_norm")
    yield Same("head.scores.bias", "lm_head.bias")
    yield Repeated("lm_head.decoder.weight", same_as=f"{prefix}embeddings.word_embeddings.weight")
    yield Repeated("lm_head.decoder.bias", same_as="lm_head.bias")
    yield from pooler(prefix)


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.dense", "classifier.dense")
    yield from both("head.output", "classifier.out_proj")
    yield from pooler(prefix)


FAMILIES = {
    "roberta": Family(
        "roberta",
        merged(SHAPE, {"encoder": {"position": {"offset": OFFSET}}}),
        keys=(*KEYS, LENGTH, *dropout(0.1), Fixed("pad_token_id", 1)),
        table=tower,
        tasks={
            "RobertaForMaskedLM": Task(
                head=MASKED | {"activation": "gelu"},
                table=masked_tokens,
                keys=(Key("layer_norm_eps", "head.norm.eps", 1e-12), Fixed("tie_word_embeddings", True)),
                prefix="roberta.",
            ),
            "RobertaForSequenceClassification": Task(head=CLASSES, table=classes, keys=CLASSES_KEYS, prefix="roberta."),
            "RobertaModel": Task(head={"kind": "none"}, table=bare),
        },
        silent=SILENT,
    )
}
