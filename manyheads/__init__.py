"""One transformer, every part swappable, every claim testable."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.checkpoint.chat import Conversation
    from manyheads.checkpoint.checkpoint import Checkpoint
    from manyheads.checkpoint.exporter import export
    from manyheads.checkpoint.loading import load
    from manyheads.errors import ManyheadsError
    from manyheads.inspect.audit import audit
    from manyheads.inspect.drawing import draw_model
    from manyheads.inspect.notebook import attention_table
    from manyheads.labs.lab import run_lab
    from manyheads.model.builder import build, build_meta
    from manyheads.model.cost import size
    from manyheads.model.recording import record
    from manyheads.model.spec import ModelSpec, read_model
    from manyheads.parts.inputs import Inputs
    from manyheads.presets import preset, read
    from manyheads.tasks.task import predict
    from manyheads.training.comparison import compare
    from manyheads.training.evaluator import evaluate
    from manyheads.training.loop import train, train_events

__version__ = "0.1.0"

# name → its module, imported on first use, so that importing the package is fast
_MODULES = {
    "Checkpoint": "manyheads.checkpoint.checkpoint",
    "Conversation": "manyheads.checkpoint.chat",
    "Inputs": "manyheads.parts.inputs",
    "ManyheadsError": "manyheads.errors",
    "ModelSpec": "manyheads.model.spec",
    "attention_table": "manyheads.inspect.notebook",
    "audit": "manyheads.inspect.audit",
    "build": "manyheads.model.builder",
    "build_meta": "manyheads.model.builder",
    "compare": "manyheads.training.comparison",
    "draw_model": "manyheads.inspect.drawing",
    "evaluate": "manyheads.training.evaluator",
    "export": "manyheads.checkpoint.exporter",
    "load": "manyheads.checkpoint.loading",
    "predict": "manyheads.tasks.task",
    "preset": "manyheads.presets",
    "read": "manyheads.presets",
    "read_model": "manyheads.model.spec",
    "record": "manyheads.model.recording",
    "run_lab": "manyheads.labs.lab",
    "size": "manyheads.model.cost",
    "train": "manyheads.training.loop",
    "train_events": "manyheads.training.loop",
}

__all__ = [
    "Checkpoint",
    "Conversation",
    "Inputs",
    "ManyheadsError",
    "ModelSpec",
    "attention_table",
    "audit",
    "build",
    "build_meta",
    "compare",
    "draw_model",
    "evaluate",
    "export",
    "load",
    "predict",
    "preset",
    "read",
    "read_model",
    "record",
    "run_lab",
    "size",
    "train",
    "train_events",
]


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
