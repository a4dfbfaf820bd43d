"""One transformer, every part swappable, every claim testable."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.answer import predict
    from manyheads.auditing import audit
    from manyheads.checkpoint import export, load
    from manyheads.inspect.page import attention_page
    from manyheads.model.build import build, outline
    from manyheads.model.size import size
    from manyheads.model.spec import ModelSpec, read_model
    from manyheads.parts.batch import Inputs
    from manyheads.parts.record import record
    from manyheads.presets import preset, read
    from manyheads.spec import SpecError

__version__ = "0.1.0"

# name → the module that holds it; loaded when first asked for, so that importing the package costs nothing
_PLACES = {
    "Inputs": "manyheads.parts.batch",
    "ModelSpec": "manyheads.model.spec",
    "SpecError": "manyheads.spec",
    "attention_page": "manyheads.inspect.page",
    "audit": "manyheads.auditing",
    "build": "manyheads.model.build",
    "export": "manyheads.checkpoint",
    "load": "manyheads.checkpoint",
    "outline": "manyheads.model.build",
    "predict": "manyheads.answer",
    "preset": "manyheads.presets",
    "read": "manyheads.presets",
    "read_model": "manyheads.model.spec",
    "record": "manyheads.parts.record",
    "size": "manyheads.model.size",
}

__all__ = [
    "Inputs", "ModelSpec", "SpecError", "attention_page", "audit", "build", "export", "load", "outline", "predict", "preset", "read",
    "read_model", "record", "size",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
