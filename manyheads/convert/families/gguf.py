"""Decoder families of GGUF files, with llama.cpp's names. Config keys are those of the file without the architecture's
prefix. Properties that follow from the tensors of a file (a tied head, biases, RoPE factors) are keys here, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from manyheads.convert.config import Config, ConfigRow, Fields, Fixed, GetField, Key, require
from manyheads.convert.families import Architecture, Family
from manyheads.convert.families.gpt2 import BASE as PLAIN
from manyheads.convert.families.gpt_neox import PARALLEL
from manyheads.convert.families.llama import BASE as GATED
from manyheads.convert.keys import number, tying
from manyheads.convert.weights import (
    QKV,
    AddConstant,
    Ignored,
    PermuteForRope,
    Rows,
    Table,
    concatenate,
    renames,
    token_scores,
)
from manyheads.errors import CheckpointConfigError, ExportError
from manyheads.model.spec import ModelSpec
from manyheads.parts.rope import (
    BandedScalingSpec,
    LongRopeScalingSpec,
    NoScalingSpec,
    RopeScalingSpec,
    RopeSpec,
    YarnScalingSpec,
)
from manyheads.spec import MAX_COUNT, Part, Tree, merge_trees, quote

# keys that are true if a file has this tensor
BY_NAME = {
    "attention_bias": "blk.0.attn_q.bias",
    "output_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
}
TIED, HEAD = "tie_word_embeddings", "output.weight"
NEEDS_HEAD = ("gguf-gptneox",)  # llama.cpp needs the head in a file even if it is tied
FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")  # one number per rotated pair


@dataclass(frozen=True)
class Rotation:
    """θ, the number of rotated coordinates, and the scaling, which is linear, YaRN, or given by factors in a tensor."""

    partial: bool = False
    factors: tuple[str, ...] = ()
    keys: tuple[str, ...] = (
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", *FACTORS,
    )  # fmt: skip

    def read(self, config: Config) -> Fields:
        size = head_dim(config)
        rotated = number(config.get("rope.dimension_count", size), "rope.dimension_count")
        if rotated != size and not self.partial:
            raise CheckpointConfigError(
                f"rope.dimension_count is {quote(rotated)}, but this family rotates whole heads, of size {size}"
            )
        return {
            "decoder.position.theta": number(config.get("rope.freq_base", 10000.0), "rope.freq_base"),
            "decoder.position.fraction": rotated / size,
            "decoder.position.scaling": self.scaling(config),
        }

    def scaling(self, config: Config) -> Tree:
        def get(name: str, default: float) -> float:
            return number(config.get(f"rope.scaling.{name}", default), f"rope.scaling.{name}")

        kind = config.get("rope.scaling.type") or "none"
        factors = [config[name] for name in self.factors if name in config]
        if kind not in ("linear", "yarn") and get("factor", 1.0) not in (0, 1):
            raise CheckpointConfigError(f"rope.scaling.factor = {quote(get('factor', 1.0))} without a type")
        attention = get("attn_factor", 1.0)
        if attention != 1 and not factors:
            raise CheckpointConfigError(f"rope.scaling.attn_factor = {quote(attention)} is not supported")
        length = get("original_context_length", number(config.get("context_length", 2048), "context_length"))
        if not 1 <= length <= MAX_COUNT:
            raise CheckpointConfigError(
                f"rope.scaling.original_context_length is {quote(length)}, expected 1 to {MAX_COUNT} tokens"
            )
        if unknown := [name for name in FACTORS if name in config and name not in self.factors]:
            raise CheckpointConfigError(f"{unknown[0]}.weight is not supported in this family")
        if factors and kind in ("none", "longrope"):
            fields = {
                "short_factor": factors[0],
                "long_factor": factors[-1],
                "factor": 1.0,
                "attention_factor": attention,
            }
            return {"kind": "longrope", "length": int(length)} | fields
        if factors:
            raise CheckpointConfigError(
                f"{self.factors[0]}.weight together with rope.scaling.type = {quote(kind)} is not supported"
            )
        if kind == "none":
            return {"kind": "none"}
        if kind == "linear":
            return {"kind": "linear", "factor": get("factor", 1.0)}
        if kind == "yarn":
            band = {"beta_fast": get("yarn_beta_fast", 32.0), "beta_slow": get("yarn_beta_slow", 1.0)}
            return {"kind": "yarn", "factor": get("factor", 1.0), "length": int(length)} | band
        raise CheckpointConfigError(f"rope.scaling.type = {quote(kind)} is not supported")

    def write(self, get: GetField) -> Tree:
        size = get("decoder.attention.size") or get("decoder.width") // get("decoder.attention.heads")
        scaling = get("decoder.position.scaling") or {}
        kind = scaling.get("kind", "none")
        config = {
            "rope.freq_base": get("decoder.position.theta"),
            "rope.dimension_count": round(require(get, "decoder.position.fraction") * size),
        }
        if kind == "longrope":
            config |= dict(zip(self.factors, (scaling["short_factor"], scaling["long_factor"]), strict=False))
            config |= {"rope.scaling.attn_factor": scaling["attention_factor"]}
        elif kind in ("linear", "yarn"):
            config |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
        if kind == "yarn":
            config |= {
                "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
                "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
            }
        return config | ({"rope.scaling.original_context_length": scaling["length"]} if "length" in scaling else {})


def resolve_sizes(spec: ModelSpec) -> ModelSpec:
    """The same model with default sizes resolved, and RoPE scalings without a key in GGUF converted to factors."""
    stack = spec.decoder
    if stack is None or spec.encoder is not None:
        raise ExportError(f"GGUF export needs a decoder-only model; this one is {spec.architecture}")
    attention, position = stack.attention, stack.position
    size = attention.head_dim(stack.width)
    if isinstance(position, RopeSpec):
        position = position.replace(scaling=resolve_scaling(position, size))
    parts = {
        "attention": with_sizes(attention, size=size, kv_heads=attention.num_kv_heads()),
        "feedforward": with_sizes(stack.feedforward, hidden=stack.feedforward.hidden_size(stack.width)),
        "position": position,
    }
    return spec.replace(decoder=stack.replace(**parts))


def with_sizes(part: Part, **sizes: int | None) -> Part:
    """Sets those of the sizes that are fields of the part."""
    return part.replace(**{name: size for name, size in sizes.items() if name in type(part).model_fields})


def resolve_scaling(position: RopeSpec, size: int) -> RopeScalingSpec:
    """Converts a banded scaling to factors, and resolves the default attention scaling of other scalings."""
    scaling = position.scaling
    if isinstance(scaling, BandedScalingSpec):
        rotated = position.rotated_size(size)
        plain_frequencies, frequencies = (
            part.frequencies(position.theta, rotated, torch.tensor(1)) for part in (NoScalingSpec(), scaling)
        )
        factors = tuple(shortest_float32(float(factor)) for factor in plain_frequencies / frequencies)
        return LongRopeScalingSpec(
            short_factor=factors, long_factor=factors, length=scaling.length, factor=1.0, attention_factor=1.0
        )
    if isinstance(scaling, LongRopeScalingSpec):
        return scaling.replace(factor=1.0, attention_factor=shortest_float32(scaling.attention_scaling()))
    if isinstance(scaling, YarnScalingSpec):
        default_scaling = scaling.replace(attention_factor=None)
        return default_scaling if scaling.attention_factor == default_scaling.attention_scaling() else scaling
    return scaling


def shortest_float32(value: float) -> float:
    """The shortest decimal number that rounds to the same float32, such as 1e-05 for 9.999999747378752e-06."""
    return float(str(numpy.float32(value)))


def head_dim(config: Config, *, key_length: bool = True) -> int:
    """The size of a head, which is `key_length` if present, else width / heads."""
    width, heads = (number(config.get(key), key) for key in ("embedding_length", "attention.head_count"))
    size, value = width // max(heads, 1), config.get("attention.key_length")
    size = number(value, "attention.key_length") if key_length and value is not None else size
    if not 1 <= size <= 1 << 16:
        raise CheckpointConfigError(f"the size of a head is {quote(size)}, expected 1 to {1 << 16}")
    return int(size)


@dataclass(frozen=True)
class HeadSize:
    """The size of a head, stored for keys and for values. `any_size` allows a size other than width / heads."""

    any_size: bool = False
    keys: tuple[str, ...] = ("attention.key_length", "attention.value_length")

    def read(self, config: Config) -> Fields:
        size, share = head_dim(config), head_dim(config, key_length=False)
        values = config.get("attention.value_length")
        if values not in (None, size):
            raise CheckpointConfigError(f"keys of size {size} with values of size {quote(values)} are not supported")
        if size != share and not self.any_size:
            raise CheckpointConfigError(
                f"the size of a head is {size}, but in this family it is width / heads, {share}"
            )
        return {"decoder.attention.size": size}

    def write(self, get: GetField) -> Tree:
        return dict.fromkeys(self.keys, get("decoder.attention.size")) if self.any_size else {}


NORMS = {
    "decoder.layers.*.residual.norms.0": "blk.*.attn_norm",
    "decoder.layers.*.residual.norms.1": "blk.*.ffn_norm",
    "decoder.norm": "output_norm",
}
OTHERS = {
    "decoder.embed.table": "token_embd",
    "decoder.embed.position.table": "position_embd",
    "decoder.layers.*.attention.query_norm": "blk.*.attn_q_norm",
    "decoder.layers.*.attention.key_norm": "blk.*.attn_k_norm",
    "decoder.layers.*.attention.output": "blk.*.attn_output",
    "decoder.layers.*.feedforward.up": "blk.*.ffn_up",
    "decoder.layers.*.feedforward.down": "blk.*.ffn_down",
}
SEPARATE = {"decoder.layers.*.attention.value": "blk.*.attn_v", "decoder.layers.*.feedforward.gate": "blk.*.ffn_gate"}


def table(*, fuse: bool = False, interleaved: bool = False, shift: float = 0.0) -> Table:
    """A weight table with q, k and v concatenate (`fuse`), permuted (`interleaved`), or norms plus `shift`."""

    def rows(spec: ModelSpec) -> Rows:
        assert spec.decoder is not None
        norms: Rows = renames(NORMS, optional=True)
        if shift:
            norms = tuple(
                AddConstant(row.tensor_name, row.parameter_names, shift=shift, optional=True) for row in norms
            )
        projections: Rows = renames({"query": "q", "key": "k"}, "decoder.layers.*.attention.", "blk.*.attn_")
        if interleaved:
            heads = (spec.decoder.attention.heads, spec.decoder.attention.num_kv_heads())
            pairs = zip(projections, heads, strict=True)
            projections = tuple(
                PermuteForRope(row.tensor_name, row.parameter_names, heads=count) for row, count in pairs
            )
        if fuse:
            projections = (
                concatenate("blk.*.attn_qkv", "decoder.layers.*.attention.", QKV),
                concatenate("blk.*.ffn_up", "decoder.layers.*.feedforward.", ("gate", "up"), optional=True),
            )
        others = renames(OTHERS if fuse else OTHERS | SEPARATE, optional=True)
        return (*norms, *projections, *others, *(Ignored(f"{name}.weight") for name in FACTORS))

    return rows


SIZES: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("block_count", "decoder.layers"),
    Key("embedding_length", "decoder.width"),
    Key("feed_forward_length", "decoder.feedforward.hidden"),
    Key("attention.head_count", "decoder.attention.heads"),
    Key("attention.head_count_kv", "decoder.attention.kv_heads", None),
    Fixed("attention.causal", True),
    Fixed("expert_count", 0),
    Fixed("expert_used_count", 0),
)
RMS_EPS = Key("attention.layer_norm_rms_epsilon", "decoder.norm.eps")
LAYER_EPS = Key("attention.layer_norm_epsilon", "decoder.norm.eps")
BIASES = (
    Key("attention_bias", "decoder.attention.bias", False),
    Key("output_bias", "decoder.attention.output_bias", False),
    Key("mlp_bias", "decoder.feedforward.bias", False),
)
OWN_SIZE = ("llama", "qwen2", "qwen3", "gemma")


def decoder(base: Tree, activation: str, **fields: Any) -> Tree:
    return merge_trees(base, {"decoder": {"feedforward": {"activation": activation}} | fields})


def gguf_family(
    name: str, base_fields: Tree, keys: tuple[ConfigRow, ...], weights: Table, head: Tree | None = None
) -> Family:
    """The family of one llama.cpp architecture. Without a `head`, the file determines whether it is tied."""
    architecture = Architecture(
        head=head or {},
        weights=token_scores("output", "decoder.embed.table"),
        keys=() if head else (tying(False),),
    )
    return Family(
        f"gguf-{name}",
        base_fields,
        keys=(*SIZES, HeadSize(any_size=name in OWN_SIZE), *keys),
        weights=weights,
        architectures={"CausalLM": architecture},
        ignored_keys=("context_length", "tensor_data_layout", *BY_NAME, TIED),
    )


FAMILIES = (
    gguf_family(
        "llama",
        decoder(GATED, "silu"),
        (RMS_EPS, *BIASES, Rotation(factors=FACTORS[:1])),
        table(interleaved=True),
    ),
    gguf_family("qwen2", decoder(GATED, "silu", attention={"bias": True}), (RMS_EPS, Rotation()), table()),
    gguf_family(
        "qwen3",
        decoder(GATED, "silu", attention={"qk_norm": {"kind": "rms"}}),
        (RMS_EPS, Key(RMS_EPS.key, "decoder.attention.qk_norm.eps"), Rotation()),
        table(),
    ),
    gguf_family(
        "phi3",
        decoder(GATED, "silu"),
        (RMS_EPS, Rotation(partial=True, factors=FACTORS[1:])),
        table(fuse=True),
    ),
    gguf_family(
        "gemma",
        decoder(GATED, "gelu-tanh", embed={"scale": True}, norm={"kind": "rms-one"}),
        (RMS_EPS, Rotation()),
        table(shift=1.0),
        {"kind": "tied"},
    ),
    gguf_family(
        "gpt2",
        decoder(PLAIN, "gelu-tanh"),
        (LAYER_EPS, Key("context_length", "decoder.position.length")),
        table(fuse=True),
    ),
    gguf_family(
        "gptneox",
        decoder(PLAIN, "gelu", position={"kind": "rope"}),
        (LAYER_EPS, Rotation(partial=True), PARALLEL),
        table(fuse=True),
    ),
    gguf_family(
        "phi2",
        decoder(PLAIN, "gelu-tanh", position={"kind": "rope"}, residual={"kind": "parallel"}),
        (LAYER_EPS, Rotation(partial=True)),
        table(),
        {"kind": "untied", "bias": True},
    ),
)
