"""Rewrites a model as an equal one with fewer options, which more families can express: only its weights differ."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.model.builder import Model, build_meta
from manyheads.model.spec import ModelSpec
from manyheads.parts.embed import TokensSpec
from manyheads.parts.head import ClassesSpec, MaskedHeadSpec
from manyheads.parts.norm import LayerNormSpec, RMSNormSpec
from manyheads.spec import Part

State = dict[str, Tensor]
SCALED_HEADS = ("tied", "masked", "untied", "classes", "vector", "none")  # of which the use of the table is known


@torch.no_grad()
def fold_weights(model: Model) -> Model:
    """Returns an equal model without embed.scale and without a bias of the classes, as far as that is possible."""
    spec, state = model.spec, dict(model.state_dict())
    for rewrite in (fold_scale, fold_class_bias):
        spec = rewrite(spec, state)
    if spec == model.spec:
        return model
    folded = build_meta(spec)
    folded.load_state_dict(state, assign=True)
    return folded.eval()


def norm_before_head(spec: ModelSpec, *kinds: type[Part]) -> str | None:
    """The name of the norm after the last layer, which only the head reads, if it is of these kinds."""
    stack = spec.decoder or spec.encoder
    name = "decoder" if spec.decoder else "encoder"
    return f"{name}.norm" if stack and isinstance(stack.output_norm(), kinds) else None


def norm_before_scores(spec: ModelSpec) -> str | None:
    """The name of the norm whose output is multiplied by the token table, if it can be scaled."""
    kinds = (LayerNormSpec, RMSNormSpec)
    if isinstance(spec.head, MaskedHeadSpec):
        return "head.norm" if isinstance(spec.head.norm, kinds) else None
    return norm_before_head(spec, *kinds)


def fold_scale(spec: ModelSpec, state: State) -> ModelSpec:
    """Multiplies the token table by √D; the norm before a tied head is divided by it."""
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(spec, name))}
    embeds = [stack.embed for stack in stacks.values() if isinstance(stack.embed, TokensSpec)]
    tables = [name for name in stacks if f"{name}.embed.table.weight" in state]
    scaled = bool(embeds) and all(embed.scale for embed in embeds)
    if not scaled or len(tables) != 1 or spec.head.kind not in SCALED_HEADS:
        return spec
    stack = stacks[tables[0]]
    scale = stack.embed.table_width(stack.width) ** 0.5
    if spec.head.is_tied:
        if (norm := norm_before_scores(spec)) is None:
            return spec
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in state:
                state[name] = state[name] / scale
    table = f"{tables[0]}.embed.table.weight"
    state[table] = state[table] * scale
    changed = {name: stack.replace(embed=stack.embed.replace(scale=False)) for name, stack in stacks.items()}
    return spec.replace(**changed)


def fold_class_bias(spec: ModelSpec, state: State) -> ModelSpec:
    """Adds the bias b of the classes to the norm before the head, as a δ with U·δ = b."""
    head, norm = spec.head, norm_before_head(spec, LayerNormSpec)
    if not isinstance(head, ClassesSpec) or not head.bias or head.dense or f"{norm}.bias" not in state:
        return spec
    weight, bias = (state[name].double() for name in ("head.output.weight", "head.output.bias"))
    delta = torch.linalg.pinv(weight) @ bias
    if not torch.allclose(weight @ delta, bias, rtol=1e-9, atol=1e-9):
        return spec  # more classes than the width, or classes that always have the same score
    state[f"{norm}.bias"] = (state[f"{norm}.bias"].double() + delta).to(state[f"{norm}.bias"].dtype)
    del state["head.output.bias"]
    return spec.replace(head=head.replace(bias=False))
