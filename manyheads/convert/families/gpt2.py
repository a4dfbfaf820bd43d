"""GPT-2: Radford et al. 2019. Its matrices are stored in×out, with q, k and v in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.convert.activation import activation
from manyheads.convert.weights import Joined, Repeated, Row, Same, both
from manyheads.model.spec import ModelSpec, read_model
from manyheads.spec import Tree


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(key):
            raise ValueError(f"{key} = true changes the model in a way that is not supported")
    core: Tree = {"kind": "dot", "dropout": config["attn_pdrop"]}
    if not config.get("scale_attn_weights", True):
        core["scale"] = 1.0
    tower = {
        "layers": config["n_layer"],
        "width": config["n_embd"],
        "embed": {"kind": "tokens", "dropout": config["embd_pdrop"]},
        "position": {"kind": "learned", "length": config["n_positions"]},
        "attention": {"kind": "heads", "heads": config["n_head"]},
        "core": core,
        "mask": {"causal": True},
        "feedforward": {"hidden": config["n_inner"] or 4 * config["n_embd"], "activation": activation(config["activation_function"])},
        "norm": {"kind": "layer", "eps": config["layer_norm_epsilon"]},
        "residual": {"kind": "pre", "dropout": config["resid_pdrop"]},
    }
    return read_model({"vocab": config["vocab_size"], "decoder": tower, "head": "tied"})


def table(spec: ModelSpec) -> Iterator[Row]:
    assert spec.decoder is not None
    yield Same("decoder.embed.table.weight", "transformer.wte.weight")
    yield Same("decoder.embed.position.table.weight", "transformer.wpe.weight")
    for i in range(spec.decoder.layers):
        ours, theirs = f"decoder.layers.{i}", f"transformer.h.{i}"
        yield from both(f"{ours}.residual.norms.0", f"{theirs}.ln_1")
        for kind in ("weight", "bias"):
            parts = tuple(f"{ours}.attention.{part}.{kind}" for part in ("query", "key", "value"))
            yield Joined(parts, f"{theirs}.attn.c_attn.{kind}", transposed=kind == "weight")
        yield from both(f"{ours}.attention.output", f"{theirs}.attn.c_proj", transposed=True)
        yield from both(f"{ours}.residual.norms.1", f"{theirs}.ln_2")
        yield from both(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from both(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj", transposed=True)
    yield from both("decoder.norm", "transformer.ln_f")
    yield Repeated("lm_head.weight", same_as="transformer.wte.weight")
