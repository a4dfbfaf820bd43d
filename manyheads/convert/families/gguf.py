"""The decoders of GGUF files, by the names llama.cpp gives them. Their keys are those that stand behind the name in the file; what a
file says by the tensors it has (whether the head is tied, where there are biases, tables of rotation) is a key here too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from manyheads.convert.config import Config, ConfigRow, Fixed, Key, Look, Placed, needed
from manyheads.convert.families import Family, Task
from manyheads.convert.families.gpt2 import SHAPE as PLAIN
from manyheads.convert.families.llama import SHAPE as GATED
from manyheads.convert.keys import Choice, number, tying
from manyheads.convert.tables import Table
from manyheads.convert.weights import Joined, Paired, Repeated, Row, Same, Shifted, Unused, both
from manyheads.model.spec import ModelSpec
from manyheads.parts.norm import LayerNormSpec, NoNormSpec
from manyheads.parts.position import LearnedSpec
from manyheads.parts.rope import BandedScalingSpec, LongRopeScalingSpec, NoScalingSpec, RopeScalingSpec, RopeSpec, YarnScalingSpec
from manyheads.spec import LARGEST, Tree, merged, quoted

# keys that a file says by its tensors; the three tables hold a factor for each pair that is turned
BY_NAME = {"attention_bias": "blk.0.attn_q.bias", "output_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_up.bias"}
TIED, HEAD = "tie_word_embeddings", "output.weight"
NEEDS_HEAD = ("gguf-gptneox",)  # which llama.cpp does not open without one, tied or not
TABLES = ("rope_freqs", "rope_factors_short", "rope_factors_long")


@dataclass(frozen=True)
class Rotation:
    """θ, how many coordinates are turned, and the scaling: by a factor, by yarn, or by a table that the file holds as a tensor."""

    partial: bool = False
    tables: tuple[str, ...] = ()
    keys: tuple[str, ...] = (
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", *TABLES,
    )  # fmt: skip

    def read(self, config: Config) -> Placed:
        size = head_size(config)
        turned = number(config.get("rope.dimension_count", size), "rope.dimension_count")
        if turned != size and not self.partial:
            raise ValueError(
                f"rope.dimension_count is {quoted(turned)}, and heads of this family, with {quoted(size)}, are turned as a whole"
            )
        return {
            "decoder.position.theta": number(config.get("rope.freq_base", 10000.0), "rope.freq_base"),
            "decoder.position.fraction": turned / size,
            "decoder.position.scaling": self.scaling(config),
        }

    def scaling(self, config: Config) -> Tree:
        def said(name: str, default: float) -> float:
            return number(config.get(f"rope.scaling.{name}", default), f"rope.scaling.{name}")

        kind, tables = config.get("rope.scaling.type") or "none", [config[name] for name in self.tables if name in config]
        if kind not in ("linear", "yarn") and said("factor", 1.0) not in (0, 1):
            raise ValueError(f"rope.scaling.factor = {quoted(said('factor', 1.0))} without a type that says how")
        if said("attn_factor", 1.0) != 1 and not tables:
            raise ValueError(
                f"rope.scaling.attn_factor = {quoted(said('attn_factor', 1.0))} changes the model in a way that is not supported"
            )
        length = said("original_context_length", number(config.get("context_length", 2048), "context_length"))
        if not 1 <= length <= LARGEST:
            raise ValueError(f"rope.scaling.original_context_length is {quoted(length)}, expected a number of tokens")
        length = int(length)
        if given := [name for name in TABLES if name in config and name not in self.tables]:
            raise ValueError(f"{given[0]}.weight changes the rotation in a way that is not supported")
        if tables and kind in ("none", "longrope"):
            short, long = tables[0], tables[-1]
            return {
                "kind": "longrope",
                "short": short,
                "long": long,
                "length": length,
                "stretch": 1.0,
                "attention": said("attn_factor", 1.0),
            }
        if tables:
            raise ValueError(f"{self.tables[0]}.weight beside rope.scaling.type = {quoted(kind)} is not supported")
        if kind == "none":
            return {"kind": "none"}
        if kind == "linear":
            return {"kind": "linear", "factor": said("factor", 1.0)}
        if kind == "yarn":
            band = {"fast": said("yarn_beta_fast", 32.0), "slow": said("yarn_beta_slow", 1.0)}
            return {"kind": "yarn", "factor": said("factor", 1.0), "length": length} | band
        raise ValueError(f"rope.scaling.type = {quoted(kind)} changes the rotation in a way that is not supported")

    def write(self, look: Look) -> Tree:
        size = look("decoder.attention.size") or look("decoder.width") // look("decoder.attention.heads")
        ours = look("decoder.position.scaling") or {}
        kind = ours.get("kind", "none")
        config = {
            "rope.freq_base": look("decoder.position.theta"),
            "rope.dimension_count": round(needed(look, "decoder.position.fraction") * size),
        }
        if kind == "longrope":
            config |= dict(zip(self.tables, (ours["short"], ours["long"]), strict=False))
            config |= {"rope.scaling.attn_factor": ours["attention"]}
        elif kind in ("linear", "yarn"):
            config |= {"rope.scaling.type": kind, "rope.scaling.factor": ours["factor"]}
        if kind == "yarn":
            config |= {"rope.scaling.yarn_beta_fast": ours["fast"], "rope.scaling.yarn_beta_slow": ours["slow"]}
        return config | ({"rope.scaling.original_context_length": ours["length"]} if "length" in ours else {})


def outright(spec: ModelSpec) -> ModelSpec:
    """The same model with nothing left to be understood: every size said, and scalings of rotation that no key names as tables."""
    tower = spec.decoder
    if tower is None or spec.encoder is not None:
        raise ValueError(f"a GGUF file holds a decoder; this model is {spec.shape}")
    attention, position = tower.attention, tower.position
    size = attention.head_size(tower.width)
    if isinstance(position, RopeSpec):
        position = position.changed(scaling=tabled(position, size))
    return spec.changed(
        decoder=tower.changed(
            attention=attention.changed(size=size, groups=attention.key_heads()),
            feedforward=tower.feedforward.changed(hidden=tower.feedforward.hidden_size(tower.width)),
            position=position,
        )
    )


def tabled(position: RopeSpec, size: int) -> RopeScalingSpec:
    """A scaling as a table of factors, where it is one that files say so; and its amplitude said."""
    scaling = position.scaling
    if isinstance(scaling, BandedScalingSpec):
        turned = position.rotated(size)
        plain, own = (part.frequencies(position.theta, turned, torch.tensor(1)) for part in (NoScalingSpec(), scaling))
        factors = tuple(shortest(float(factor)) for factor in plain / own)
        return LongRopeScalingSpec(short=factors, long=factors, length=scaling.length, stretch=1.0, attention=1.0)
    if isinstance(scaling, LongRopeScalingSpec):
        return scaling.changed(stretch=1.0, attention=shortest(scaling.amplitude()))
    if isinstance(scaling, YarnScalingSpec) and scaling.attention == scaling.changed(attention=None).amplitude():
        return scaling.changed(attention=None)
    return scaling


def shortest(number: float) -> float:
    """The number with the fewest digits that has the same 32 bits: 1e-05 and not 9.999999747378752e-06."""
    return float(str(numpy.float32(number)))


def head_size(config: Config, *, named: bool = True) -> int:
    width, heads = (number(config.get(key), key) for key in ("embedding_length", "attention.head_count"))
    size, said = width // max(heads, 1), config.get("attention.key_length")
    size = number(said, "attention.key_length") if named and said is not None else size
    if not 1 <= size <= 1 << 16:
        raise ValueError(f"a head of size {quoted(size)} is none")
    return int(size)


@dataclass(frozen=True)
class HeadSize:
    """How wide a head is, said of its keys and of its values; where it has no size of its `own`, heads share the width among them."""

    own: bool = False
    keys: tuple[str, ...] = ("attention.key_length", "attention.value_length")

    def read(self, config: Config) -> Placed:
        size, shared = head_size(config), head_size(config, named=False)
        values = config.get("attention.value_length")
        if values not in (None, size):
            raise ValueError(f"keys of size {size} and values of {quoted(values)}: two sizes are not supported")
        if size != shared and not self.own:
            raise ValueError(f"heads of this family share the width among them, {shared} each, and these have {size}")
        return {"decoder.attention.size": size}

    def write(self, look: Look) -> Tree:
        return dict.fromkeys(self.keys, look("decoder.attention.size")) if self.own else {}


def table(*, joined: bool = False, paired: bool = False, shift: float = 0.0) -> Table:
    """The tower's weights: q, k and v in one or apart, in the order they are turned in, and norms with a number added."""

    def norm(ours: str, theirs: str, *, bias: bool) -> Iterator[Row]:
        yield from [Shifted(f"{ours}.weight", f"{theirs}.weight", shift)] if shift else both(ours, theirs, bias=bias)

    def rows(spec: ModelSpec, prefix: str) -> Iterator[Row]:
        assert spec.decoder is not None
        tower, attention, feedforward = spec.decoder, spec.decoder.attention, spec.decoder.feedforward
        bias = isinstance(tower.norm, LayerNormSpec)
        yield Same("decoder.embed.table.weight", "token_embd.weight")
        if isinstance(tower.position, LearnedSpec):
            yield Same("decoder.embed.position.table.weight", "position_embd.weight")
        for i in range(tower.layers):
            ours, theirs = f"decoder.layers.{i}", f"blk.{i}"
            yield from norm(f"{ours}.residual.norms.0", f"{theirs}.attn_norm", bias=bias)
            if tower.residual.kind != "parallel":
                yield from norm(f"{ours}.residual.norms.1", f"{theirs}.ffn_norm", bias=bias)
            for kind in ("weight", "bias") if attention.bias else ("weight",):
                query, key, value = (f"{ours}.attention.{part}.{kind}" for part in ("query", "key", "value"))
                if joined:
                    yield Joined((query, key, value), f"{theirs}.attn_qkv.{kind}")
                    continue
                for name, count, to in ((query, attention.heads, "attn_q"), (key, attention.key_heads(), "attn_k")):
                    yield Paired(name, f"{theirs}.{to}.{kind}", count) if paired else Same(name, f"{theirs}.{to}.{kind}")
                yield Same(value, f"{theirs}.attn_v.{kind}")
            if not isinstance(attention.query_key_norm, NoNormSpec):
                for part, to in (("query_norm", "attn_q_norm"), ("key_norm", "attn_k_norm")):
                    yield Same(f"{ours}.attention.{part}.weight", f"{theirs}.{to}.weight")
            yield from both(f"{ours}.attention.output", f"{theirs}.attn_output", bias=attention.output_bias)
            wide = getattr(feedforward, "bias", True)
            if feedforward.kind == "gated" and joined:
                yield Joined((f"{ours}.feedforward.gate.weight", f"{ours}.feedforward.up.weight"), f"{theirs}.ffn_up.weight")
            else:
                for part in ("gate", "up") if feedforward.kind == "gated" else ("up",):
                    yield from both(f"{ours}.feedforward.{part}", f"{theirs}.ffn_{part}", bias=wide)
            yield from both(f"{ours}.feedforward.down", f"{theirs}.ffn_down", bias=wide)
        yield from norm("decoder.norm", "output_norm", bias=bias)
        for name in TABLES:
            yield Unused(f"{name}.weight")

    return rows


def next_tokens(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    if spec.head.kind == "tied":
        yield Repeated(HEAD, same_as="token_embd.weight")
        return
    yield Same("head.output.weight", HEAD)
    if getattr(spec.head, "bias", False):
        yield Same("head.bias", "output.bias")


SIZES: tuple[ConfigRow, ...] = (
    Key("vocab_size", "vocab"),
    Key("block_count", "decoder.layers"),
    Key("embedding_length", "decoder.width"),
    Key("feed_forward_length", "decoder.feedforward.hidden"),
    Key("attention.head_count", "decoder.attention.heads"),
    Key("attention.head_count_kv", "decoder.attention.groups", None),
    Fixed("attention.causal", True),
    Fixed("expert_count", 0),
    Fixed("expert_used_count", 0),
)
RMS = Key("attention.layer_norm_rms_epsilon", "decoder.norm.eps")
LAYER = Key("attention.layer_norm_epsilon", "decoder.norm.eps")
BIASES = (
    Key("attention_bias", "decoder.attention.bias", False),
    Key("output_bias", "decoder.attention.output_bias", False),
    Key("mlp_bias", "decoder.feedforward.bias", False),
)
SILENT = ("context_length", "tensor_data_layout", *BY_NAME, TIED)


def activated(shape: Tree, activation: str, **more: Any) -> Tree:
    return merged(shape, {"decoder": {"feedforward": {"activation": activation}} | more})


OWN_SIZE = ("llama", "qwen2", "qwen3", "gemma")


def architecture(name: str, shape: Tree, keys: tuple[ConfigRow, ...], weights: Table, head: Tree | None = None) -> Family:
    """One of them: what all have, and a head, which is tied or free where nothing is said."""
    task = Task(head=head or {}, table=next_tokens, keys=() if head else (tying(False),))
    return Family(
        f"gguf-{name}", shape, keys=(*SIZES, HeadSize(own=name in OWN_SIZE), *keys), table=weights, tasks={"CausalLM": task}, silent=SILENT
    )


FAMILIES = {
    family.model_type: family
    for family in (
        architecture("llama", activated(GATED, "silu"), (RMS, *BIASES, Rotation(tables=TABLES[:1])), table(paired=True)),
        architecture("qwen2", activated(GATED, "silu", attention={"bias": True}), (RMS, Rotation()), table()),
        architecture(
            "qwen3",
            activated(GATED, "silu", attention={"query_key_norm": {"kind": "rms"}}),
            (RMS, Key(RMS.theirs, "decoder.attention.query_key_norm.eps"), Rotation()),
            table(),
        ),
        architecture("phi3", activated(GATED, "silu"), (RMS, Rotation(partial=True, tables=TABLES[1:])), table(joined=True)),
        architecture(
            "gemma",
            activated(GATED, "gelu-tanh", embed={"scale": True}, norm={"kind": "rms-one"}),
            (RMS, Rotation()),
            table(shift=1.0),
            {"kind": "tied"},
        ),
        architecture("gpt2", activated(PLAIN, "gelu-tanh"), (LAYER, Key("context_length", "decoder.position.length")), table(joined=True)),
        architecture(
            "gptneox",
            activated(PLAIN, "gelu", position={"kind": "rope"}),
            (
                LAYER,
                Rotation(partial=True),
                Choice("use_parallel_residual", "decoder.residual", ((True, {"kind": "parallel-norms"}), (False, {"kind": "pre"})), True),
            ),
            table(joined=True),
        ),
        architecture(
            "phi2",
            activated(PLAIN, "gelu-tanh", position={"kind": "rope"}, residual={"kind": "parallel"}),
            (LAYER, Rotation(partial=True)),
            table(),
            {"kind": "free", "bias": True},
        ),
    )
}
