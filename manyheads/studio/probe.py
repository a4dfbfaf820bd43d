"""The tab Probe: what a linear classifier reads from every layer, with chance and controls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import torch
from fastapi import APIRouter, Query
from pydantic import Field

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import EmptyDataError, UnsupportedError, UsageError
from manyheads.inspect.probe import (
    Label,
    LabelledTokens,
    LayerProbe,
    check_single_stack,
    hash_weights,
    layer_names,
    next_token,
    only_frequent,
    position,
    previous_token,
    probe_layers,
)
from manyheads.model.spec import StackSpec
from manyheads.spec import Tree
from manyheads.studio import forward
from manyheads.studio.session import CheckpointRequest, Sessions
from manyheads.tasks.prediction import parse_row

MIN_WINDOWS = 20  # of a text; with fewer, a fifth of them says nothing
MAX_LENGTH = 64  # tokens per window
MAX_TOKENS = 2048  # of all windows
MAX_CLASSES = 32  # labels; rarer ones are left out
MAX_WORK = 1 << 24  # tokens × width × labels, which a step of a fit is proportional to: seconds per layer
MAX_STATES = 1 << 25  # floats of the outputs of all layers

LABELS = {
    "position": "position in the window",
    "next": f"next token, of the {MAX_CLASSES} most frequent",
    "previous": f"previous token, of the {MAX_CLASSES} most frequent",
    "length": "characters of the token",
}


class ProbeRequest(CheckpointRequest):
    """What to probe for, and on which windows."""

    text: str = Field("", max_length=forward.MAX_TEXT)
    windows: Literal["auto", "text", "random"] = "auto"
    label: Literal["position", "next", "previous", "length"] = "position"
    length: int = Field(8, ge=2, le=MAX_LENGTH)
    seed: int = Field(0, ge=0, lt=1 << 31)


@dataclass
class RunningProbe:
    """Probes that the page fits layer by layer."""

    checkpoint: Checkpoint
    weights_hash: str  # before
    layers: Iterator[LayerProbe]
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    fitted: list[LayerProbe] = field(default_factory=list)

    def layer(self, index: int) -> Tree:
        """The probe of a layer; after the last one, the hash of the weights again."""
        names = layer_names(check_single_stack(self.checkpoint.model))
        if index >= len(names):
            raise UsageError(f"there is no layer {index}, expected 0 to {len(names) - 1}")
        while len(self.fitted) <= index:
            self.fitted.append(next(self.layers))
        is_last = index == len(names) - 1
        return asdict(self.fitted[index]) | {"hash_after": hash_weights(self.checkpoint.model) if is_last else None}


def router(sessions: Sessions) -> APIRouter:
    """The addresses below /api/probe."""
    routes = APIRouter(prefix="/probe")

    @routes.get("/labels")
    def labels(session: Annotated[str, Query(max_length=64)]) -> Tree:
        _ = sessions[session]
        return {"labels": LABELS, "max_length": MAX_LENGTH}

    @routes.post("/start")
    def start(request: ProbeRequest) -> Tree:
        session = sessions[request.session]
        with sessions.lock:
            checkpoint = sessions.choose(request.checkpoint, request.step).checkpoint
            rows, source = windows(checkpoint, request)
            tokens = LabelledTokens.from_rows(rows, label_of(checkpoint, request.label, rows), seed=request.seed)
            running = RunningProbe(
                checkpoint, hash_weights(checkpoint.model), probe_layers(checkpoint.model, tokens, seed=request.seed)
            )
        session.probe = running
        return {
            "probe": running.key,
            "layers": layer_names(check_single_stack(checkpoint.model)),
            "windows": len(rows),
            "length": request.length,
            "source": source,
            "chance": tokens.chance,
            "classes": len(tokens.names),
            "fitted": int(tokens.fit.sum()),
            "tested": tokens.tested,
            "repeated": tokens.repeated,
            "hash_before": running.weights_hash,
        }

    @routes.get("/layer")
    def layer(
        session: Annotated[str, Query(max_length=64)],
        probe: Annotated[str, Query(max_length=64)],
        index: Annotated[int, Query(ge=0, le=1 << 20)],
    ) -> Tree:
        running = sessions[session].probe
        if running is None or running.key != probe:
            raise UsageError("these probes are no longer in memory; start them again")
        with sessions.lock:
            return running.layer(index)

    return routes


# ------------------------------------------------------------------------------------------------------------- windows


def windows(checkpoint: Checkpoint, request: ProbeRequest) -> tuple[list[list[int]], str]:
    """Rows of equal length without begin and end tokens, which would give positions away, and where they are from."""
    model = check_single_stack(checkpoint.model)
    if forward.reads_images(checkpoint):
        raise UnsupportedError("probes on this page are for models that read tokens")
    checkpoint.check_length(request.length)
    count = max_tokens(model.last.spec, request) // request.length
    if count < MIN_WINDOWS:
        raise UsageError(f"{MIN_WINDOWS} windows of {request.length} tokens are too much for this model on a page")
    rows = [] if request.windows == "random" else split_into_windows(text_ids(checkpoint, request.text), request.length)
    if len(rows) >= MIN_WINDOWS:
        windows = checkpoint.to_input_ids(rows[:count])
        of_all = f", the first of {len(rows):,}" if len(rows) > count else ""
        return windows, f"{len(windows):,} windows of {request.length} tokens of the text{of_all}"
    too_few = f"the text gives {len(rows):,} windows of {request.length} tokens, and a probe needs {MIN_WINDOWS}"
    if request.windows == "text":
        raise EmptyDataError(too_few, hint="give a longer text, shorter windows, or random ids")
    generator, vocab = torch.Generator().manual_seed(request.seed), model.spec.vocab
    assert isinstance(vocab, int)
    ids = torch.randint(0, vocab, (count, request.length), generator=generator).tolist()
    reason = f"; {too_few}" if request.windows == "auto" else ""
    return ids, f"{count:,} windows of {request.length} random ids{reason}"


def max_tokens(stack: StackSpec, request: ProbeRequest) -> int:
    """How many tokens a page may probe, by the time of a fit and the memory of all layers."""
    classes = request.length if request.label == "position" else MAX_CLASSES
    by_memory = MAX_STATES // (stack.width * (stack.layers + 1))
    return min(MAX_TOKENS, MAX_WORK // (stack.width * classes), by_memory)


def text_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    """The ids of a text of any length, without begin and end tokens."""
    if checkpoint.tokenizer is None:
        return parse_row(text) if text.strip() else []
    ids: list[int] = checkpoint.encode_pieces([text])[0].ids
    return ids


def split_into_windows(ids: Sequence[int], length: int) -> list[list[int]]:
    """Windows one after another; tokens after the last whole window are left out."""
    return [list(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]


def label_of(checkpoint: Checkpoint, name: str, rows: Sequence[Sequence[int]]) -> Label:
    """The label of a request; those with many classes keep the most frequent."""
    if name == "position":
        return position
    if name == "length":
        if checkpoint.tokenizer is None:
            raise UnsupportedError("without a tokenizer a token has no characters")
        names = {token: len(checkpoint.text_generator.token_name(token)) for row in rows for token in row}
        return only_frequent(lambda ids, index: names[ids[index]], rows, MAX_CLASSES)
    return only_frequent(next_token if name == "next" else previous_token, rows, MAX_CLASSES)
