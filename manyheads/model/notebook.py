"""Shows a value in a notebook as HTML, by a renderer in a layer above that is imported when a notebook asks for it."""

from __future__ import annotations

from importlib import import_module

# It draws models and recorded attention, so it imports this package. Naming it here is the one reference upwards.
RENDERER = "manyheads.inspect.notebook"


class ShownInNotebook:
    """A value that a notebook shows as HTML; `to_html` of the renderer has a function for its class."""

    def _repr_html_(self) -> str:
        html: str = import_module(RENDERER).to_html(self)
        return html
