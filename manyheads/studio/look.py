"""The tab Look: the attention of a text, from the grid of all heads to one cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from manyheads.inspect.measure import PATTERNS
from manyheads.spec import Tree
from manyheads.studio import forward
from manyheads.studio.compare import head_differences
from manyheads.studio.sample_inputs import find_examples
from manyheads.studio.session import MAX_BYTES, CheckpointRequest, Session, Sessions, ShownCheckpoint
from manyheads.studio.views import TILE, ForwardPass

MAX_GENERATED = 256  # tokens
Name = Annotated[str, Field(max_length=200)]
Key = Annotated[str, Query(max_length=64)]
Index = Annotated[int, Query(ge=0, le=1 << 20)]
OffHead = Annotated[tuple[Name, Annotated[int, Field(ge=0, le=1 << 20)]], Field(strict=False)]  # JSON has no tuples


class RunRequest(CheckpointRequest):
    """A text to run, and what to switch off."""

    text: str = Field(max_length=forward.MAX_TEXT)
    target: str | None = Field(None, max_length=forward.MAX_TEXT)
    add: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field([], max_length=4096)
    generate: int = Field(0, ge=0, le=MAX_GENERATED)
    temperature: float = Field(0.0, ge=0, le=10)
    seed: int = Field(0, ge=0, lt=1 << 31)
    off: list[OffHead] = Field([], max_length=4096)

    def to_request(self) -> forward.ForwardRequest:
        add, off = tuple(self.add), tuple(self.off)
        return forward.ForwardRequest(self.text, self.target, add, self.generate, self.temperature, self.seed, off)


def router(sessions: Sessions) -> APIRouter:
    """The addresses below /api/look."""
    routes = APIRouter(prefix="/look")

    @contextmanager
    def forward_pass_of(session: str, run: str, *, background: bool = False) -> Iterator[ForwardPass]:
        """A forward pass. A request in the background waits for other computations, and keeps no tile waiting."""
        forward_pass = sessions[session][run]
        if sessions.run_checkpoints:
            sessions.run_checkpoints.use(forward_pass.checkpoint)
        with sessions.lock if background else forward_pass.lock:
            yield forward_pass

    @routes.get("/info")
    def info(session: Key) -> Tree:
        _ = sessions[session]
        return describe_all(sessions)

    @routes.get("/hash")
    def weights_hash(session: Key, checkpoint: Index, step: Index | None = None) -> Tree:
        _ = sessions[session]
        with sessions.lock:
            return {"sha256": sessions.choose(checkpoint, step).hash}

    @routes.post("/run")
    def run(request: RunRequest) -> Tree:
        session = sessions[request.session]
        with sessions.lock:
            return run_text(sessions, session, request)

    @routes.get("/thumbnails")
    def thumbnails(session: Key, run: Key, name: Name) -> Response:
        with forward_pass_of(session, run) as forward_pass:
            return binary(forward_pass.thumbnails(name))

    @routes.get("/differences")
    def differences(session: Key, run: Key, other: Key, name: Name) -> Response:
        """The share of weight that moved as float32 per head, and then a signed thumbnail per head as int8."""
        first, second = sessions[session][run], sessions[session][other]
        with sessions.lock:
            moved, pictures = head_differences(first, second, name)
        return binary(moved.numpy().tobytes() + pictures.numpy().tobytes())

    @routes.get("/measures")
    def measures(session: Key, run: Key, name: Name) -> Tree:
        with forward_pass_of(session, run, background=True) as forward_pass:
            return forward_pass.measures(name)

    @routes.get("/tile")
    def tile(
        session: Key, run: Key, name: Name, head: Key, row: Index, column: Index,
        level: Annotated[int, Query(ge=0, le=8)] = 0, pool: Literal["max", "mean"] = "max",
    ) -> Response:  # fmt: skip
        with forward_pass_of(session, run) as forward_pass:
            return floats(forward_pass.tile(name, head, level, row, column, pool))

    @routes.get("/cell")
    def cell(session: Key, run: Key, name: Name, head: Index, row: Index, column: Index) -> Tree:
        with forward_pass_of(session, run) as forward_pass:
            return forward_pass.cell(name, head, row, column)

    @routes.get("/next")
    def next_tokens(session: Key, run: Key, position: Index) -> Tree:
        with forward_pass_of(session, run) as forward_pass:
            return forward_pass.next_tokens(position)

    @routes.get("/effect")
    def effect(session: Key, run: Key, name: Name, head: Index) -> Tree:
        with forward_pass_of(session, run, background=True) as forward_pass:
            return forward_pass.effect(name, head)

    return routes


def run_text(sessions: Sessions, session: Session, request: RunRequest) -> Tree:
    """Runs a text, and keeps the forward pass in its session."""
    checkpoint, forward_request = (
        sessions.choose(request.checkpoint, request.step).checkpoint,
        request.to_request(),
    )
    texts = forward.read(checkpoint, forward_request)
    tape, states = forward.forward(checkpoint, texts, forward_request.off, MAX_BYTES)
    forward_pass = ForwardPass(checkpoint, texts, tape, states, forward_request.off)
    generated = texts["target"].ids[1:] if checkpoint.has_source else texts.get("text", texts.get("source"))
    tree = forward_pass.to_tree() | {
        "run": session.add(forward_pass),
        "checkpoint": request.checkpoint,
        "step": request.step,
    }
    return tree | {"add": generated if isinstance(generated, list) else added_ids(checkpoint, forward_request, texts)}


def added_ids(checkpoint: Any, forward_request: forward.ForwardRequest, texts: dict[str, forward.Text]) -> list[int]:
    """The ids after the text itself: those given, and those generated."""
    if not forward_request.add and not forward_request.generate:
        return []
    count = len(forward.encode_text(checkpoint, forward_request.text).ids)
    return texts["text"].ids[count:]


def describe_all(sessions: Sessions) -> Tree:
    """The checkpoints, the steps of a run, the first text, and the patterns of badges."""
    checkpoints = [describe(shown) for shown in sessions.shown]
    patterns = {name: asdict(pattern) for name, pattern in PATTERNS.items()}
    steps = sessions.run_checkpoints and {
        "numbers": sessions.run_checkpoints.numbers,
        "initial": sessions.run_checkpoints.initial,
    }
    return {"checkpoints": checkpoints, "steps": steps, "text": sessions.text, "patterns": patterns, "tile": TILE}


def describe(shown: ShownCheckpoint) -> Tree:
    """A checkpoint for the page."""
    checkpoint = shown.checkpoint
    parameters = list(checkpoint.model.parameters())
    reads = "image" if forward.reads_images(checkpoint) else "text" if checkpoint.tokenizer is not None else "ids"
    return {
        "path": shown.path,
        "architecture": checkpoint.spec.architecture,
        "task": (checkpoint.task or {}).get("kind"),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "device": str(checkpoint.device),
        "has_source": checkpoint.has_source,
        "can_generate": bool(getattr(checkpoint.model, "can_generate", True)) and reads != "image",
        "output": checkpoint.spec.head.output,
        "per_token": checkpoint.spec.head.per_token,
        "reads": reads,
        "max_positions": checkpoint.max_positions,
        "examples": list(find_examples(shown)),
    }


def floats(tensor: Any) -> Response:
    height, width = tensor.shape
    data = tensor.float().cpu().contiguous().numpy().tobytes()
    return Response(data, media_type="application/octet-stream", headers={"X-Shape": f"{height} {width}"})


def binary(data: bytes) -> Response:
    return Response(data, media_type="application/octet-stream")
