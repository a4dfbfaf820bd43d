"""What the checkpoint of a run says of its own files, and whether they are still that."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

TRAINER, MANIFEST, MEMORY = "trainer.json", "manifest.json", "optimizer.safetensors"
NEEDED = {"model.safetensors", MEMORY, TRAINER}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unsound(checkpoint: Path, *, memory: bool = True) -> str | None:
    """What is wrong with a checkpoint, by its own list of files; without the optimiser's memory, where only the model is wanted."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        if missing := sorted(NEEDED - set(listed)):
            return f"{checkpoint / MANIFEST} does not list {missing[0]}"
        for name, said in listed.items():
            path = checkpoint / name
            if name == MEMORY and not memory:
                continue
            if not path.is_file() or path.stat().st_size != said["bytes"]:
                return f"{path} should have {said['bytes']:,} bytes"
            if sha256(path) != said["sha256"]:
                return f"{path} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint / MANIFEST} is missing or broken"
    return None
