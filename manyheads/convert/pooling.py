"""How a folder of sentence-transformers makes one vector of many: read from its own small files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from manyheads.convert.files import LARGEST_CONFIG, FileError, inside, read_json
from manyheads.parts.head import PoolSpec
from manyheads.spec import quoted

STEPS = ("Transformer", "Pooling", "Normalize")
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True)
class Pooling:
    """Which vector speaks for the text, and whether it is brought to length one."""

    kind: str = "mean"
    unit: bool = False
    refused: str | None = None  # why its files cannot be followed, to be said when a vector is asked for

    def pool(self, x_BLD: Tensor, padding: Tensor | None) -> Tensor:
        if self.refused is not None:
            raise FileError(self.refused)
        pooled: Tensor = PoolSpec.choose(self.kind).pool(x_BLD, padding)  # type: ignore[attr-defined]
        return F.normalize(pooled, dim=-1) if self.unit else pooled


def read_pooling(folder: Path) -> Pooling | None:
    """What modules.json says, or why that cannot be followed; None where there is no such file."""
    try:
        path = inside(folder, "modules.json")
        return followed(folder, path) if path.is_file() else None
    except FileError as error:
        return Pooling(refused=str(error))


def followed(folder: Path, path: Path) -> Pooling:
    """The pooling of a transformer, a pool and a normalisation, in this order."""
    if path.stat().st_size > LARGEST_CONFIG:
        raise FileError(f"{path} has {path.stat().st_size:,} bytes, expected at most {LARGEST_CONFIG:,}")
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))
        names = [step["type"].rpartition(".")[2] for step in steps]
        places = [str(step.get("path", "")) for step in steps]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FileError(f"{path} cannot be read: expected a list of steps, each with a type and a path") from None
    if not names or names != list(STEPS[: len(names)]):
        raise FileError(f"{path} has the steps {quoted(', '.join(names))}, expected {', '.join(STEPS)} in this order")
    config = read_json(inside(inside(folder, places[1]), "config.json"), LARGEST_CONFIG) if len(names) > 1 else {}
    if wrong := [
        key for key, value in config.items() if key.startswith("pooling_mode") and (key == "pooling_mode" or type(value) is not bool)
    ]:
        raise FileError(f"{path}: {wrong[0]} is {quoted(config[wrong[0]])}, which is not known")
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(on) > 1 or any(key not in MODES for key in on):
        raise FileError(f"{path} pools by {', '.join(on)}, expected one of {', '.join(MODES)}")
    return Pooling(MODES[on[0]] if on else "mean", "Normalize" in names)
