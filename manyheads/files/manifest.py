"""The manifest of a run's checkpoint: size and hash of each of its files."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

from manyheads.errors import UnsafeFileError
from manyheads.files.read import MAX_CONFIG_BYTES, read_json, safe_join, sha256
from manyheads.spec import shorten

TRAINER, MANIFEST, OPTIMIZER = "trainer.json", "manifest.json", "optimizer.safetensors"
REQUIRED = {"model.safetensors", OPTIMIZER, TRAINER}


def verify_manifest(checkpoint: Path, *, optimizer: bool = True) -> str | None:
    """Returns what is wrong with the files of a checkpoint, or None; without `optimizer`, its state is not checked."""
    manifest = checkpoint / MANIFEST
    try:
        files = read_json(manifest, MAX_CONFIG_BYTES)["files"]
        if missing := sorted(REQUIRED - set(files)):
            return f"{manifest} does not list {missing[0]}"
        for name, entry in files.items():
            path = reduce(safe_join, name.split("/"), checkpoint)
            if name == OPTIMIZER and not optimizer:
                continue
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return f"{shorten(str(path), 500)} should have {entry['bytes']:,} bytes"
            if sha256(path) != entry["sha256"]:
                return f"{path} is not the file that was saved"
    except UnsafeFileError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} is missing or broken"
    return None
