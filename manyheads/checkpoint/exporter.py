"""Exports a checkpoint to the formats of other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import check_path, load
from manyheads.convert.gguf.model import write_gguf
from manyheads.convert.hf import export_form, write_folder
from manyheads.errors import ExportError, OutputError, UsageError
from manyheads.files.write import check_absent
from manyheads.model.builder import Model
from manyheads.model.quantization import is_quantized
from manyheads.spec import quote

FORMATS = ("hf", "gguf", "onnx", "manyheads")


def export(
    checkpoint: Checkpoint | Model | str | Path, path: str | Path, to: str = "hf", outtype: str | None = None
) -> None:
    """Writes a folder for transformers (`hf`) or onnxruntime (`onnx`), a GGUF file, or the native format (`manyheads`).

    `outtype` is the type of matrices in a GGUF file, which is f32, f16 or q8_0.
    """
    if to not in FORMATS:
        raise UsageError(f"given {to!r}, expected one of {', '.join(FORMATS)}")
    if outtype is not None and to != "gguf":
        raise UsageError(f"outtype is {quote(outtype)}, but only the export to GGUF has an outtype")
    path = check_path(path)
    check_absent(path)
    if isinstance(checkpoint, str | Path):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(check_path(checkpoint))):
            raise OutputError(f"{path} is inside {checkpoint}; give a path outside it")
        checkpoint = load(checkpoint, verify=True)
    if isinstance(checkpoint, Model):
        checkpoint = Checkpoint(checkpoint)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(f"given a {type(checkpoint).__name__}, expected a checkpoint, a model or a path")
    if is_quantized(checkpoint.model):
        raise ExportError("the weights were quantized when they were loaded", hint="load it without `weights`")
    try:
        write(checkpoint, path, to, outtype)
    except ExportError as error:
        formats = " or ".join(name for name in other_formats(checkpoint) if name != to)
        raise ExportError(error.message, hint=error.hint or f"this model can be exported to {formats}") from error


def write(checkpoint: Checkpoint, path: Path, to: str, outtype: str | None) -> None:
    model, metadata, tokenizer = checkpoint.model, checkpoint.metadata, checkpoint.tokenizer
    if to == "gguf":
        write_gguf(model, path, metadata, tokenizer, "f32" if outtype is None else outtype)
    elif to == "onnx":
        from manyheads.convert.onnx import write_onnx

        write_onnx(model, path, metadata, tokenizer)
    else:
        write_folder(model, path, metadata, tokenizer, native=to == "manyheads")


def other_formats(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the formats that can express a model, as far as its description tells."""
    with suppress(ExportError):
        export_form(checkpoint.model, checkpoint.metadata)
        yield "hf"
    with suppress(ExportError):
        from manyheads.convert.onnx import inputs_of

        inputs_of(checkpoint.spec, None)
        yield "onnx"
    yield "manyheads"
