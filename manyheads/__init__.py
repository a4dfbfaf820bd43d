"""One transformer, every part swappable, every claim testable."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.checkpoint.chat import Conversation as Conversation
    from manyheads.checkpoint.checkpoint import Checkpoint as Checkpoint
    from manyheads.checkpoint.exporter import export as export
    from manyheads.checkpoint.loading import load as load
    from manyheads.errors import ManyheadsError as ManyheadsError
    from manyheads.inspect.audit import audit as audit
    from manyheads.inspect.drawing import draw_model as draw_model
    from manyheads.inspect.notebook import attention_table as attention_table
    from manyheads.labs.lab import run_lab as run_lab
    from manyheads.model.builder import build as build
    from manyheads.model.builder import build_meta as build_meta
    from manyheads.model.cost import size as size
    from manyheads.model.recording import record as record
    from manyheads.model.spec import ModelSpec as ModelSpec
    from manyheads.model.spec import read_model as read_model
    from manyheads.parts.inputs import Inputs as Inputs
    from manyheads.presets import preset as preset
    from manyheads.presets import read as read
    from manyheads.tasks.task import predict as predict
    from manyheads.training.comparison import compare as compare
    from manyheads.training.evaluator import evaluate as evaluate
    from manyheads.training.loop import train as train
    from manyheads.training.loop import train_events as train_events

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

__all__ = list(_MODULES)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
