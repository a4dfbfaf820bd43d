"""`manyheads export`: writes a checkpoint in the format of another library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from manyheads.cli import console


@console.app.command()
def export(
    path: console.CheckpointPath,
    target: Annotated[
        Path, console.argument("TARGET", "Folder or file to write; must not exist.", parser=console.output_path)
    ],
    to: Annotated[
        str | None,
        console.option(
            "FORMAT",
            "hf (transformers), gguf (llama.cpp), onnx (onnxruntime) or manyheads (any model, this library only) "
            "[default: gguf if TARGET ends in .gguf, otherwise hf].",
        ),
    ] = None,
    outtype: Annotated[
        str | None, console.option("FORM", "Storage of matrices in a GGUF file: f32, f16 or q8_0 [default: f32].")
    ] = None,
    parts: console.Parts = None,
    as_json: console.AsJson = False,
) -> None:
    """Write a checkpoint in the format of another library.

    Examples: manyheads export ./model ./copy · manyheads export ./model model.gguf --outtype q8_0 ·
    manyheads export ./model ./graph --to onnx
    """
    from manyheads.checkpoint.exporter import export as run

    to = to or ("gguf" if target.suffix == ".gguf" else "hf")
    with console.Progress(f"exporting {path} to {target}"):
        run(path, target, to=to, outtype=outtype)
    if as_json:
        console.print_json({"schema": 1, "path": str(target), "format": to})
    else:
        console.print_note(f"wrote {target}")
