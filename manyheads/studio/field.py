"""The tab Receptive field: which input tokens change an output, measured, and what masks and argmax heads allow."""

from __future__ import annotations

import torch
from fastapi import APIRouter
from pydantic import Field
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import InputLengthError, UnsupportedError, UsageError
from manyheads.inspect.measure import pointer_field, pointer_tree, receptive_fields, visible_field
from manyheads.inspect.probe import check_single_stack, layer_names
from manyheads.model.cost import count_parameters
from manyheads.model.recording import Tape, record
from manyheads.model.transformer import Transformer
from manyheads.spec import Tree
from manyheads.studio import forward
from manyheads.studio.session import CheckpointRequest, Sessions

MAX_TOKENS = 64
MAX_FLOPS = 1e12  # of all forward passes: half a minute of one core
REPLACEMENTS = 3  # random tokens that each token is replaced by


class FieldRequest(CheckpointRequest):
    """A text, and the position of the output; by default the last."""

    text: str = Field(max_length=forward.MAX_TEXT)
    position: int | None = Field(None, ge=0, le=1 << 20)


def router(sessions: Sessions) -> APIRouter:
    """The addresses below /api/field."""
    routes = APIRouter(prefix="/field")

    @routes.post("/measure")
    def measure(request: FieldRequest) -> Tree:
        _ = sessions[request.session]
        with sessions.lock:
            return measure_field(sessions.choose(request.checkpoint, request.step).checkpoint, request)

    return routes


@torch.no_grad()
def measure_field(checkpoint: Checkpoint, request: FieldRequest) -> Tree:
    """The receptive field of one output after each layer: measured, and as the masks and pointers bound it."""
    model = check_single_stack(checkpoint.model)
    if forward.reads_images(checkpoint):
        raise UnsupportedError("receptive fields on this page are for models that read tokens")
    text = forward.read(checkpoint, forward.ForwardRequest(request.text))["text"]
    check_work(model, len(text))
    position = len(text) - 1 if request.position is None else request.position
    if position >= len(text):
        raise UsageError(f"there is no position {position}, expected 0 to {len(text) - 1}")
    replacements = replacements_of(checkpoint)

    def outputs(rows: Tensor) -> list[Tensor]:
        return layer_states(checkpoint, rows)[1]

    measured = receptive_fields(outputs, text.ids, position, replacements=replacements)
    tape, _ = layer_states(checkpoint, torch.tensor([text.ids]))
    heads = argmax_heads(tape)
    return {
        "tokens": text.tokens,
        "position": position,
        "replacements": forward.text_of_ids(checkpoint, replacements).tokens,
        "heads": heads,
        "depths": [
            {"name": name, "measured": sorted(field), **bounds(tape, position, depth, heads)}
            for depth, (name, field) in enumerate(zip(layer_names(model), measured, strict=True))
        ],
        "tree": [list(level.items()) for level in pointer_tree(tape, position)] if heads else None,
    }


def bounds(tape: Tape, position: int, layers: int, heads: int | None) -> Tree:
    """What the masks and, if heads are argmax, their pointers let reach an output after some layers."""
    visible = visible_field(tape, position, layers=layers)
    formula = (heads + 1) ** layers if heads else None
    return {
        "visible": sorted(visible),
        "pointers": sorted(pointer_field(tape, position, layers=layers)) if heads else None,
        "formula": formula,
        "bound": None if formula is None else min(len(visible), formula),  # of the pointers
    }


def layer_states(checkpoint: Checkpoint, rows: Tensor) -> tuple[Tape, list[Tensor]]:
    """A recorded forward pass, and the outputs of the embeddings and of each layer, N×L×D."""
    model = check_single_stack(checkpoint.model)
    with record(model) as tape:
        model.last_hidden_state(rows.to(checkpoint.device))
    activations = tape.activations()
    return tape, [activations[name] for name in layer_names(model)]


def replacements_of(checkpoint: Checkpoint) -> list[int]:
    """A few random tokens that have a name."""
    vocab, tokenizer = checkpoint.spec.vocab, checkpoint.tokenizer
    assert isinstance(vocab, int)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0)).tolist()
    return [token for token in ids if tokenizer is None or tokenizer.id_to_token(token) is not None][:REPLACEMENTS]


def argmax_heads(tape: Tape) -> int | None:
    """The number of heads per layer, if all heads of all layers take only the key with the highest weight."""
    heads = {
        attention.query.shape[1] if len(attention.core.hard) == attention.query.shape[1] else None for attention in tape
    }
    return heads.pop() if len(heads) == 1 else None


def check_work(model: Transformer, length: int) -> None:
    """Raises before a measurement that would take too long: it is quadratic in the length."""
    per_token = 2 * count_parameters(model.last.layers)
    limit = min(MAX_TOKENS, int((MAX_FLOPS / (per_token * (REPLACEMENTS + 1))) ** 0.5))
    if length > limit:
        raise InputLengthError(f"the text has {length:,} tokens; for this model the page measures up to {limit:,}")
