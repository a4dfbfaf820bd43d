"""LLaMA, and the families with its layers, which have RMS norm, a gated MLP and RoPE."""

from __future__ import annotations

from manyheads.convert.config import ConfigRow, Key, fixed
from manyheads.convert.families import HEADLESS, Architecture, Family, decoder_architectures
from manyheads.convert.keys import (
    Choice,
    Labels,
    RopeKeys,
    SlidingWindow,
    activation,
    read_activation,
    sizes,
    tying,
    write_activation,
)
from manyheads.convert.weights import QKV, Ignored, Rows, concatenate, renames, token_scores
from manyheads.spec import Tree, merge_trees

STACK: Tree = {
    "position": {"kind": "rope"},
    "attention": {"bias": False, "output_bias": False},
    "feedforward": {"kind": "gated"},
    "norm": {"kind": "rms"},
}
BASE: Tree = {"decoder": STACK}


def stack_keys(stack: str) -> tuple[ConfigRow, ...]:
    return (
        Key("vocab_size", "vocab"),
        *sizes(stack),
        activation("hidden_act", f"{stack}.feedforward.activation", default="silu"),
        Key("rms_norm_eps", f"{stack}.norm.eps"),
        Key("attention_dropout", f"{stack}.core.dropout", 0.0),
    )


def heads(*, kv_heads: int | None = None, size: int | None = None, stack: str = "decoder") -> tuple[ConfigRow, ...]:
    """Rows for the number of key/value heads and the head size, with their defaults if a config omits them."""
    return (
        Key("num_key_value_heads", f"{stack}.attention.kv_heads", kv_heads),
        Key("head_dim", f"{stack}.attention.size", size),
    )


def biases(stack: str) -> tuple[ConfigRow, ...]:
    return (
        Key("attention_bias", (f"{stack}.attention.bias", f"{stack}.attention.output_bias"), False),
        Key("mlp_bias", f"{stack}.feedforward.bias", False),
    )


KEYS = stack_keys("decoder")
EMBEDDINGS = {"embed.table": "embed_tokens", "norm": "norm"}
LAYER = {
    "residual.norms.0": "input_layernorm",
    "residual.norms.1": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
INV_FREQ = Ignored("layers.*.self_attn.rotary_emb.inv_freq")  # a buffer that older checkpoints store
WEIGHTS: Rows = (
    *renames(EMBEDDINGS, "decoder."),
    *renames(LAYER, "decoder.layers.*.", "layers.*."),
    *renames(QUERY_KEY_NORMS, "decoder.layers.*.", "layers.*.", optional=True),
    INV_FREQ,
)
IGNORED = ("tie_word_embeddings",)
BIASES = biases("decoder")[0]

# "gelu" in the first releases of Gemma means the tanh approximation
GEMMA_ACTIVATION = Key(
    "hidden_act", "decoder.feedforward.activation", "gelu",
    reads=lambda name: "gelu-tanh" if name == "gelu" else read_activation(name),
    writes=lambda name: "gelu_pytorch_tanh" if name == "gelu-tanh" else write_activation(name),
)  # fmt: skip
# a second key for the same activation, which some configs of Gemma have
HIDDEN_ACTIVATION = Choice("hidden_activation", "decoder.feedforward", ((None, {}), ("gelu_pytorch_tanh", {})), None)
PHI3_LAYER = {
    "attention.output": "self_attn.o_proj",
    "feedforward.down": "mlp.down_proj",
    "residual.norms.0": "input_layernorm",
    "residual.norms.1": "post_attention_layernorm",
}
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

FAMILIES = (
    # all versions: Touvron et al. 2023, Dubey et al. 2024
    Family(
        "llama",
        BASE,
        keys=(*KEYS, *heads(), RopeKeys(), *biases("decoder"), *fixed(pretraining_tp=1, rope_interleaved=False)),
        weights=WEIGHTS,
        architectures=decoder_architectures("Llama"),
        ignored_keys=(*IGNORED, "is_llama_config", "max_sequence_length"),
    ),
    # Jiang et al. 2023: windowed attention
    Family(
        "mistral",
        BASE,
        keys=(*KEYS, *heads(kv_heads=8), RopeKeys(), Key("sliding_window", "decoder.mask.window", 4096)),
        weights=WEIGHTS,
        architectures=decoder_architectures("Mistral"),
        ignored_keys=IGNORED,
    ),
    # Yang et al. 2024: biases on q, k and v; each token has one position, not several as in images
    Family(
        "qwen2",
        merge_trees(BASE, {"decoder": {"attention": {"bias": True}}}),
        keys=(*KEYS, heads(kv_heads=32)[0], RopeKeys(), SlidingWindow(), *fixed(use_mrope=False)),
        weights=WEIGHTS,
        architectures=decoder_architectures("Qwen2"),
        ignored_keys=(*IGNORED, "seq_length"),
    ),
    # Yang et al. 2025: norms on q and k
    Family(
        "qwen3",
        merge_trees(BASE, {"decoder": {"attention": {"qk_norm": {"kind": "rms"}}}}),
        keys=(
            *KEYS,
            *heads(kv_heads=32, size=128),
            RopeKeys(),
            SlidingWindow(),
            BIASES,
            Key("rms_norm_eps", "decoder.attention.qk_norm.eps"),
        ),
        weights=WEIGHTS,
        architectures=decoder_architectures("Qwen3"),
        ignored_keys=IGNORED,
    ),
    # Mesnard et al. 2024: embeddings are multiplied by √D, norms by 1 + γ, and the head is tied
    Family(
        "gemma",
        merge_trees(BASE, {"decoder": {"embed": {"scale": True}, "norm": {"kind": "rms-one"}}}),
        keys=(
            *KEYS,
            *heads(kv_heads=16, size=256),
            RopeKeys(),
            BIASES,
            GEMMA_ACTIVATION,
            HIDDEN_ACTIVATION,
            *fixed(use_bidirectional_attention=None),
        ),
        weights=WEIGHTS,
        architectures=decoder_architectures("Gemma", keys=(tying(True),)),
        ignored_keys=IGNORED,
    ),
    # Abdin et al. 2024: q, k and v concatenate, and gate and up concatenate
    Family(
        "phi3",
        BASE,
        keys=(
            *KEYS,
            heads()[0],
            RopeKeys(
                default_fraction=1.0, trained_length=4096, former_kinds=(("su", "longrope"), ("yarn", "longrope"))
            ),
            Key("sliding_window", "decoder.mask.window", None),
            Key("embd_pdrop", "decoder.embed.dropout", 0.0),
            Key("resid_pdrop", "decoder.residual.dropout", 0.0),
            *fixed(attention_bias=False, lm_head_bias=False, mlp_bias=False, full_attn_mod=1, interpolate_factor=1),
        ),
        weights=(
            *renames(EMBEDDINGS, "decoder."),
            *renames(PHI3_LAYER, "decoder.layers.*.", "layers.*."),
            concatenate("layers.*.self_attn.qkv_proj", "decoder.layers.*.attention.", QKV),
            concatenate("layers.*.mlp.gate_up_proj", "decoder.layers.*.feedforward.", ("gate", "up")),
            INV_FREQ,
        ),
        architectures=decoder_architectures("Phi3"),
        ignored_keys=IGNORED,
    ),
    # Boizard et al. 2025: without a causal mask, as an encoder
    Family(
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
        ignored_keys=(*IGNORED, "classifier_pooling", "clf_pooling", "hidden_dropout", "is_causal"),
    ),
)
