"""BERT: Devlin et al. 2019. RoBERTa (Liu et al. 2019) and ERNIE (Sun et al. 2020; 3.0: 2021) share its layers."""

from __future__ import annotations

from manyheads.convert.config import ConfigRow, Key, fixed
from manyheads.convert.families import Architecture, Family
from manyheads.convert.keys import FirstOf, Labels, activation, sizes
from manyheads.convert.weights import Ignored, Rows, TiedTensor, renames
from manyheads.spec import Tree

BASE: Tree = {
    "encoder": {
        "embed": {"norm": {"kind": "layer"}},
        "position": {"kind": "learned"},
        "residual": {"kind": "post"},
    }
}

KEYS: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    *sizes("encoder"),
    activation("hidden_act", "encoder.feedforward.activation"),
    Key("type_vocab_size", "encoder.embed.type_vocab_size"),
    Key("layer_norm_eps", ("encoder.norm.eps", "encoder.embed.norm.eps"), 1e-12),
    *fixed(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute"),
)
LENGTH = Key("max_position_embeddings", "encoder.position.length")


def dropout(default: float) -> tuple[ConfigRow, ...]:
    return (
        Key("hidden_dropout_prob", ("encoder.residual.dropout", "encoder.embed.dropout"), default),
        Key("attention_probs_dropout_prob", "encoder.core.dropout", default),
    )


EMBEDDINGS: Rows = (
    *renames({
        "encoder.embed.table": "embeddings.word_embeddings",
        "encoder.embed.position.table": "embeddings.position_embeddings",
        "encoder.embed.types": "embeddings.token_type_embeddings",
        "encoder.embed.norm": "embeddings.LayerNorm",
    }),
    *renames({"encoder.embed.tasks": "embeddings.task_type_embeddings"}, optional=True),
    Ignored("embeddings.position_ids"),
    Ignored("embeddings.token_type_ids"),
)  # fmt: skip
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
WEIGHTS: Rows = (*EMBEDDINGS, *renames(LAYER, "encoder.layers.*.", "encoder.layer.*."))


def pooler(prefix: str = "", name: str = "pooler.dense") -> Rows:
    return Ignored(f"{prefix}{name}.weight"), Ignored(f"{prefix}{name}.bias")


MASKED: Tree = {"kind": "masked", "norm": {"kind": "layer"}, "scores": {"kind": "tied", "bias": True}}
MASKED_KEYS: tuple[ConfigRow, ...] = (
    activation("hidden_act", "head.activation"),
    Key("layer_norm_eps", "head.norm.eps", 1e-12),
    *fixed(tie_word_embeddings=True),
)


def masked(dense: str, norm: str, bias: str, decoder: str) -> Rows:
    """The rows of a masked-language-model head, whose matrix is tied to the token embedding."""
    return (
        *renames({"head.project": dense, "head.norm": norm, "head.scores.bias": bias}),
        TiedTensor(f"{decoder}.weight", ("encoder.embed.table.weight",)),
        TiedTensor(f"{decoder}.bias", ("head.scores.bias",)),
    )


CLASSES: Tree = {"kind": "classes", "pool": "first", "dense": True, "activation": "tanh"}
CLASSES_KEYS: tuple[ConfigRow, ...] = (
    Labels(),
    FirstOf(("classifier_dropout", "hidden_dropout_prob"), "head.dropout", 0.1),
)


def architectures(name: str, prefix: str) -> dict[str, Architecture]:
    head = "cls.predictions"
    rows = (
        *masked(f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.bias", f"{head}.decoder"),
        *pooler(prefix),
        Ignored("cls.seq_relationship.weight"),
        Ignored("cls.seq_relationship.bias"),
    )
    classes = renames({"head.dense": f"{prefix}pooler.dense", "head.output": "classifier"})
    language = Architecture(head=MASKED, weights=rows, keys=MASKED_KEYS, prefix=prefix)
    return {
        f"{name}ForMaskedLM": language,
        f"{name}ForPreTraining": language,
        f"{name}ForSequenceClassification": Architecture(
            head=CLASSES, weights=classes, keys=CLASSES_KEYS, prefix=prefix
        ),
        f"{name}Model": Architecture(head={"kind": "none"}, weights=pooler()),
    }


IGNORED = (
    "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "tie_word_embeddings",
)  # fmt: skip
FAMILIES = {
    "bert": Family(
        "bert",
        BASE,
        keys=(*KEYS, LENGTH, *dropout(0.1)),
        weights=WEIGHTS,
        architectures=architectures("Bert", "bert."),
        ignored=IGNORED,
        spellings=(((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta")),),
    )
}
