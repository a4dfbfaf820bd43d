"""One transformer, every part swappable, every claim testable."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# name → the module that holds it; loaded when first asked for, so that importing the package costs nothing
_PLACES = {
    "Inputs": "manyheads.parts.embed",
    "ModelSpec": "manyheads.model.spec",
    "SpecError": "manyheads.spec",
    "build": "manyheads.model.build",
    "outline": "manyheads.model.build",
    "preset": "manyheads.presets",
    "read": "manyheads.presets",
    "read_model": "manyheads.model.spec",
    "size": "manyheads.model.size",
}

__all__ = sorted(_PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
