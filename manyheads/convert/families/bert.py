"""BERT: Devlin et al. 2019. RoBERTa (Liu et al. 2019) and ERNIE (Sun et al. 2020; 3.0: 2021) share its tower."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.convert.config import ConfigRow, Fixed, Key
from manyheads.convert.families import Family, Task
from manyheads.convert.keys import FirstOf, Labels, activation
from manyheads.convert.tables import renamed
from manyheads.convert.weights import Repeated, Row, Same, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.embed import TokensSpec
from manyheads.spec import Tree

SHAPE: Tree = {
    "encoder": {
        "embed": {"kind": "tokens", "norm": {"kind": "layer"}},
        "position": {"kind": "learned"},
        "attention": {"kind": "heads"},
        "core": {"kind": "dot"},
        "feedforward": {"kind": "mlp"},
        "norm": {"kind": "layer"},
        "residual": {"kind": "post"},
    }
}

KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("num_hidden_layers", "encoder.layers"),
    Key("hidden_size", "encoder.width"),
    Key("num_attention_heads", "encoder.attention.heads"),
    Key("intermediate_size", "encoder.feedforward.hidden"),
    activation("hidden_act", "encoder.feedforward.activation"),
    Key("type_vocab_size", "encoder.embed.types"),
    Key("layer_norm_eps", ("encoder.norm.eps", "encoder.embed.norm.eps"), 1e-12),
    Fixed("is_decoder", False),
    Fixed("add_cross_attention", False),
    Fixed("position_embedding_type", "absolute"),
)
LENGTH = Key("max_position_embeddings", "encoder.position.length")


def dropout(default: float) -> tuple[ConfigRow, ...]:
    """The two keys for it."""
    return (
        Key("hidden_dropout_prob", ("encoder.residual.dropout", "encoder.embed.dropout"), default),
        Key("attention_probs_dropout_prob", "encoder.core.dropout", default),
    )


LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "residual.norms.0": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "residual.norms.1": "output.LayerNorm",
}


def embeddings(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    assert isinstance(spec.encoder.embed, TokensSpec)
    theirs = f"{prefix}embeddings"
    yield Same("encoder.embed.table.weight", f"{theirs}.word_embeddings.weight")
    yield Same("encoder.embed.position.table.weight", f"{theirs}.position_embeddings.weight")
    yield Same("encoder.embed.types.weight", f"{theirs}.token_type_embeddings.weight")
    if spec.encoder.embed.tasks:
        yield Same("encoder.embed.tasks.weight", f"{theirs}.task_type_embeddings.weight")
    yield from both("encoder.embed.norm", f"{theirs}.LayerNorm")
    yield Unused(f"{theirs}.position_ids")
    yield Unused(f"{theirs}.token_type_ids")


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from embeddings(spec, prefix)
    assert spec.encoder is not None
    for i in range(spec.encoder.layers):
        yield from renamed(f"encoder.layers.{i}", f"{prefix}encoder.layer.{i}", LAYER)


def pooler(prefix: str) -> Iterator[Row]:
    yield Unused(f"{prefix}pooler.dense.weight")
    yield Unused(f"{prefix}pooler.dense.bias")


def bare(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from pooler(prefix)


def masked_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.project", "cls.predictions.transform.dense")
    yield from both("head.norm", "cls.predictions.transform.LayerNorm")
    yield Same("head.scores.bias", "cls.predictions.bias")
    yield Repeated("cls.predictions.decoder.weight", same_as=f"{prefix}embeddings.word_embeddings.weight")
    yield Repeated("cls.predictions.decoder.bias", same_as="cls.predictions.bias")
    yield from pooler(prefix)
    yield Unused("cls.seq_relationship.weight")
    yield Unused("cls.seq_relationship.bias")


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.dense", f"{prefix}pooler.dense")
    yield from both("head.output", "classifier")


MASKED: Tree = {"kind": "masked", "norm": {"kind": "layer"}, "scores": {"kind": "tied", "bias": True}}
MASKED_KEYS: tuple[ConfigRow, ...] = (
    activation("hidden_act", "head.activation"),
    Key("layer_norm_eps", "head.norm.eps", 1e-12),
    Fixed("tie_word_embeddings", True),
)
CLASSES: Tree = {"kind": "classes", "pool": "first", "dense": True, "activation": "tanh"}
CLASSES_KEYS: tuple[ConfigRow, ...] = (Labels(), FirstOf(("classifier_dropout", "hidden_dropout_prob"), "head.dropout", 0.1))


def tasks(name: str, prefix: str) -> dict[str, Task]:
    """The tasks of a tower of this kind, by the names of their classes."""
    return {
        f"{name}ForMaskedLM": Task(head=MASKED, table=masked_tokens, keys=MASKED_KEYS, prefix=prefix),
        f"{name}ForPreTraining": Task(head=MASKED, table=masked_tokens, keys=MASKED_KEYS, prefix=prefix),
        f"{name}ForSequenceClassification": Task(head=CLASSES, table=classes, keys=CLASSES_KEYS, prefix=prefix),
        f"{name}Model": Task(head={"kind": "none"}, table=bare),
    }


SILENT = (
    "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "tie_word_embeddings",
)  # fmt: skip
SPELLINGS = (((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta")),)
FAMILIES = {
    "bert": Family(
        "bert", SHAPE, keys=(*KEYS, LENGTH, *dropout(0.1)), table=tower, tasks=tasks("Bert", "bert."), silent=SILENT, spellings=SPELLINGS
    )
}
