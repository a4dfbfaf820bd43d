"""EuroBERT: Boizard et al. 2025. LLaMA's layers without a causal mask, as an encoder."""

from __future__ import annotations

from manyheads.convert.config import Key, fixed
from manyheads.convert.families import HEADLESS, Architecture, Family
from manyheads.convert.families.llama import EMBEDDINGS, IGNORED, LAYER, STACK, biases, heads, stack_keys
from manyheads.convert.keys import Choice, Labels, RopeKeys, tying
from manyheads.convert.weights import renames, token_scores

POOLING = Choice(
    "classifier_pooling",
    "head",
    (
        ("late", {"pool.kind": "mean", "dense_before_pool": True}),
        ("mean", {"pool.kind": "mean", "dense_before_pool": False}),
        ("bos", {"pool.kind": "first", "dense_before_pool": False}),
    ),
    "late",
)

FAMILIES = {
    "eurobert": Family(
        "eurobert",
        {"encoder": STACK},
        keys=(
            *stack_keys("encoder"),
            *heads(stack="encoder"),
            RopeKeys(stack="encoder"),
            *biases("encoder"),
            *fixed(pretraining_tp=1),
        ),
        weights=(*renames(EMBEDDINGS, "encoder."), *renames(LAYER, "encoder.layers.*.", "layers.*.")),
        architectures={
            "EuroBertForMaskedLM": Architecture(
                weights=token_scores("lm_head", "encoder.embed.table"),
                keys=(tying(False), Key("mlp_bias", "head.bias", False)),
                prefix="model.",
            ),
            "EuroBertForSequenceClassification": Architecture(
                head={"kind": "classes", "dense": True, "activation": "gelu"},
                weights=renames({"head.dense": "dense", "head.output": "classifier"}),
                keys=(Labels(), POOLING),
                prefix="model.",
            ),
            "EuroBertModel": HEADLESS,
        },
        ignored=(*IGNORED, "classifier_pooling", "clf_pooling", "hidden_dropout", "is_causal"),
    )
}
