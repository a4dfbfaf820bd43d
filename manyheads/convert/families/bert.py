"""BERT, and the families with its layers: a norm after the embeddings and after each sublayer, learned positions."""

from __future__ import annotations

from manyheads.convert.config import Config, ConfigRow, Fields, GetField, Key, fixed
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.keys import FirstOf, Labels, activation, sizes
from manyheads.convert.weights import Ignored, Rows, TiedTensor, renames
from manyheads.spec import Tree, merge_trees

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


TABLES = {
    "encoder.embed.table": "embeddings.word_embeddings",
    "encoder.embed.position.table": "embeddings.position_embeddings",
}
TYPES = {"encoder.embed.types": "embeddings.token_type_embeddings"}
NORM = {"encoder.embed.norm": "embeddings.LayerNorm"}
EMBEDDINGS: Rows = (
    *renames(TABLES | TYPES | NORM),
    *renames({"encoder.embed.tasks": "embeddings.task_type_embeddings"}, optional=True),
    Ignored("embeddings.position_ids"),
    Ignored("embeddings.token_type_ids"),
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
WEIGHTS: Rows = (*EMBEDDINGS, *renames(LAYER, "encoder.layers.*.", "encoder.layer.*."))


def pooler(prefix: str = "", name: str = "pooler.dense") -> Rows:
    return Ignored(f"{prefix}{name}.weight"), Ignored(f"{prefix}{name}.bias")


MASKED: Tree = {"kind": "masked", "norm": {"kind": "layer"}, "scores": {"kind": "tied", "bias": True}}
MASKED_KEYS: tuple[ConfigRow, ...] = (
    activation("hidden_act", "head.activation"),
    Key("layer_norm_eps", "head.norm.eps", 1e-12),
    *fixed(tie_word_embeddings=True),
)


def masked_head(dense: str, norm: str, bias: str, decoder: str) -> Rows:
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
        *masked_head(f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.bias", f"{head}.decoder"),
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

# RoBERTa: the first position is the id of the padding token, 1, plus 1
OFFSET = 2
ROBERTA_LENGTH = Key(
    "max_position_embeddings",
    "encoder.position.length",
    reads=lambda rows: rows - OFFSET,
    writes=lambda length: length + OFFSET,
)
ROBERTA_HEAD = masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder")


class TaskTypes:
    """The number of task types; 0 without task type embeddings."""

    keys = ("use_task_id", "task_type_vocab_size")

    def read(self, config: Config) -> Fields:
        count = config.get("task_type_vocab_size", 3) if config.get("use_task_id", False) else 0
        return {"encoder.embed.task_type_vocab_size": count}

    def write(self, get: GetField) -> Tree:
        count = get("encoder.embed.task_type_vocab_size")
        return {"use_task_id": True, "task_type_vocab_size": count} if count else {"use_task_id": False}


DISTILBERT_LAYER = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "residual.norms.0": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "residual.norms.1": "output_layer_norm",
}
DISTILBERT_HEAD = {
    "head.project": "vocab_transform",
    "head.norm": "vocab_layer_norm",
    "head.scores.bias": "vocab_projector.bias",
}
DISTILBERT_NORM = {"kind": "layer", "eps": 1e-12}
ALBERT_LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.output": "attention.dense",
    "residual.norms.0": "attention.LayerNorm",
    "feedforward.up": "ffn",
    "feedforward.down": "ffn_output",
    "residual.norms.1": "full_layer_layer_norm",
}
ALBERT_HEAD = masked_head("predictions.dense", "predictions.LayerNorm", "predictions.bias", "predictions.decoder")

FAMILIES = (
    # BERT: Devlin et al. 2019
    Family(
        "bert",
        BASE,
        keys=(*KEYS, LENGTH, *dropout(0.1)),
        weights=WEIGHTS,
        architectures=architectures("Bert", "bert."),
        ignored_keys=IGNORED,
        key_mappings=(((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta")),),
    ),
    # RoBERTa: Liu et al. 2019; the position table starts with two unused rows
    Family(
        "roberta",
        merge_trees(BASE, {"encoder": {"position": {"offset": OFFSET}}}),
        keys=(*KEYS, ROBERTA_LENGTH, *dropout(0.1), *fixed(pad_token_id=1)),
        weights=WEIGHTS,
        architectures={
            "RobertaForMaskedLM": Architecture(
                head=MASKED | {"activation": "gelu"},
                weights=(*ROBERTA_HEAD, *pooler("roberta.")),
                keys=(Key("layer_norm_eps", "head.norm.eps", 1e-12), *fixed(tie_word_embeddings=True)),
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
        ignored_keys=IGNORED,
    ),
    # ERNIE 2.0 and 3.0: Sun et al. 2020 and 2021; task types from 3.0 on
    Family(
        "ernie",
        BASE,
        keys=(*KEYS, LENGTH, *dropout(0.1), TaskTypes()),
        weights=WEIGHTS,
        architectures=architectures("Ernie", "ernie."),
        ignored_keys=IGNORED,
    ),
    # DistilBERT: Sanh et al. 2019; half the layers, no token types, no pooler
    Family(
        "distilbert",
        merge_trees(BASE, {"encoder": {"norm": DISTILBERT_NORM, "embed": {"norm": DISTILBERT_NORM}}}),
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
            *renames(TABLES | NORM),
            Ignored("embeddings.position_ids"),
            *renames(DISTILBERT_LAYER, "encoder.layers.*.", "transformer.layer.*."),
        ),
        architectures={
            "DistilBertForMaskedLM": Architecture(
                head=MASKED | {"norm": DISTILBERT_NORM},
                weights=(
                    *renames(DISTILBERT_HEAD),
                    TiedTensor("vocab_projector.weight", ("encoder.embed.table.weight",)),
                ),
                keys=(activation("activation", "head.activation"), *fixed(tie_word_embeddings=True)),
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
        ignored_keys=(
            "sinusoidal_pos_embds",
            "qa_dropout",
            "seq_classif_dropout",
            "tie_word_embeddings",
            "tie_weights_",
        ),
    ),
    # ALBERT: Lan et al. 2020; a narrow token embedding with a projection, and layers that share their weights
    Family(
        "albert",
        BASE,
        keys=(
            *KEYS,
            LENGTH,
            *dropout(0.0),
            Key("embedding_size", "encoder.embed.size"),
            Key("num_hidden_groups", "encoder.layer_groups", 1),
            *fixed(inner_group_num=1),
        ),
        weights=(
            *EMBEDDINGS,
            *renames({"encoder.embed.project": "encoder.embedding_hidden_mapping_in"}, optional=True),
            *renames(ALBERT_LAYER, "encoder.layers.*.", "encoder.albert_layer_groups.*.albert_layers.0."),
        ),
        architectures={
            "AlbertForMaskedLM": Architecture(
                head=MASKED, weights=(*ALBERT_HEAD, *pooler("albert.", "pooler")), keys=MASKED_KEYS, prefix="albert."
            ),
            "AlbertForSequenceClassification": Architecture(
                head=CLASSES,
                weights=renames({"head.dense": "albert.pooler", "head.output": "classifier"}),
                keys=(Labels(), Key("classifier_dropout_prob", "head.dropout", 0.1)),
                prefix="albert.",
            ),
            "AlbertModel": Architecture(head={"kind": "none"}, weights=pooler(name="pooler")),
        },
        ignored_keys=(
            "classifier_dropout_prob",
            "tie_word_embeddings",
            "down_scale_factor",
            "gap_size",
            "net_structure_type",
            "num_memory_blocks",
        ),
    ),
)
