"""ViT: Dosovitskiy et al. 2021. A picture is cut into patches, a learned vector stands before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from manyheads.convert.config import Config, ConfigRow, Key, Look, Placed, write_config
from manyheads.convert.families import Family, Task
from manyheads.convert.keys import Labels, activation
from manyheads.convert.weights import Row, Same, Unused, both
from manyheads.model.spec import ModelSpec, TowerSpec
from manyheads.spec import Tree, quoted


@dataclass(frozen=True)
class Picture:
    """Side of the picture, side of a patch, colours: how many patches, and numbers in each."""

    lengths: tuple[str, ...] = ("encoder.position.length",)
    pixels: tuple[str, ...] = ("encoder.embed.pixels",)
    keys: tuple[str, ...] = ("image_size", "patch_size", "num_channels")

    def read(self, config: Config) -> Placed:
        side, patch, colours = (config.get(key, usual) for key, usual in zip(self.keys, (224, 16, 3), strict=True))
        if not all(type(value) is int and value > 0 for value in (side, patch, colours)) or side % patch:
            raise ValueError(f"a picture of side {quoted(side)} cannot be cut into patches of side {quoted(patch)}")
        sizes = dict.fromkeys(self.lengths, (side // patch) ** 2 + 1) | dict.fromkeys(self.pixels, patch**2 * colours)
        return sizes | {"encoder.embed.channels": colours}

    def write(self, look: Look) -> Tree:
        pixels, colours, patches = look(self.pixels[0]) or 1, look("encoder.embed.channels") or 1, (look(self.lengths[0]) or 2) - 1
        patch = max(1, isqrt(pixels // colours))  # where they are no squares, reading this again tells
        return {"image_size": isqrt(patches) * patch, "patch_size": patch, "num_channels": colours}


def layers(name: str, spec: TowerSpec, theirs: str) -> Iterator[Row]:
    for i in range(spec.layers):
        ours, layer = f"{name}.layers.{i}", f"{theirs}.{i}"
        for part in ("query", "key", "value"):
            yield from both(f"{ours}.attention.{part}", f"{layer}.attention.attention.{part}", bias=spec.attention.bias)
        yield from both(f"{ours}.attention.output", f"{layer}.attention.output.dense")
        yield from both(f"{ours}.feedforward.up", f"{layer}.intermediate.dense")
        yield from both(f"{ours}.feedforward.down", f"{layer}.output.dense")
        yield from both(f"{ours}.residual.norms.0", f"{layer}.layernorm_before")
        yield from both(f"{ours}.residual.norms.1", f"{layer}.layernorm_after")


def tower(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    assert spec.encoder is not None
    theirs, length, width = f"{prefix}embeddings", spec.encoder.position.longest, spec.encoder.width
    assert length is not None
    yield Same("encoder.embed.first", f"{theirs}.cls_token")
    yield Same("encoder.embed.position.table.weight", f"{theirs}.position_embeddings", shape=(1, length, width))
    said = write_config([Picture()], spec)
    kernel = (width, said["num_channels"], said["patch_size"], said["patch_size"])  # as a convolution has it
    yield Same("encoder.embed.project.weight", f"{theirs}.patch_embeddings.projection.weight", shape=kernel)
    yield Same("encoder.embed.project.bias", f"{theirs}.patch_embeddings.projection.bias")
    yield from layers("encoder", spec.encoder, f"{prefix}encoder.layer")
    yield from both("encoder.norm", f"{prefix}layernorm")


def classes(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield from both("head.output", "classifier")


def bare(spec: ModelSpec, prefix: str) -> Iterator[Row]:
    yield Unused(f"{prefix}pooler.dense.weight")
    yield Unused(f"{prefix}pooler.dense.bias")


TOWER: Tree = {
    "position": {"kind": "learned"},
    "attention": {"kind": "heads"},
    "core": {"kind": "dot"},
    "feedforward": {"kind": "mlp"},
    "norm": {"kind": "layer"},
    "residual": {"kind": "pre"},
}
SHAPE: Tree = {"encoder": TOWER | {"embed": {"kind": "patches", "first": True}}}

KEYS: tuple[ConfigRow, ...] = (
    Key("num_hidden_layers", "encoder.layers"),
    Key("hidden_size", "encoder.width"),
    Key("num_attention_heads", "encoder.attention.heads"),
    Key("intermediate_size", "encoder.feedforward.hidden"),
)
SILENT = ("encoder_stride", "pooler_output_size", "pooler_act")

FAMILIES = {
    "vit": Family(
        "vit",
        SHAPE,
        keys=(
            *KEYS,
            Picture(),
            activation("hidden_act", "encoder.feedforward.activation"),
            Key("layer_norm_eps", "encoder.norm.eps"),
            Key("hidden_dropout_prob", ("encoder.residual.dropout", "encoder.embed.dropout"), 0.0),
            Key("attention_probs_dropout_prob", "encoder.core.dropout", 0.0),
            Key("qkv_bias", "encoder.attention.bias", True),
        ),
        table=tower,
        tasks={
            "ViTForImageClassification": Task(head={"kind": "classes", "pool": "first"}, table=classes, keys=(Labels(),), prefix="vit."),
            "ViTModel": Task(head={"kind": "none"}, table=bare),
        },
        silent=SILENT,
    )
}
