"""ONNX export as one graph for all batch sizes and lengths."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.convert.config import write_config
from manyheads.convert.families.vit import ImageSize
from manyheads.convert.hf import CheckpointMetadata, kept_files, write_extra_files
from manyheads.errors import ExportError, ManyheadsError, needs_extra
from manyheads.files.write import atomic_output
from manyheads.model.builder import Model
from manyheads.model.spec import ModelSpec, StackSpec
from manyheads.parts.embed import PatchesSpec
from manyheads.parts.inputs import Inputs


def write_onnx(model: Model, folder: Path, metadata: CheckpointMetadata | None = None, tokenizer: Any = None) -> None:
    """Writes model.onnx and the tokenizer. Weights over 1.5 GB are in a second file, as ONNX files are at most 2 GB."""
    with needs_extra("ONNX export needs onnx and onnxscript", "onnx"), quiet():
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    graph = OnnxModel(float32_copy(model), image_shape(model.spec, metadata))
    with atomic_output(folder) as draft:
        draft.mkdir()
        files = kept_files(model, metadata.extra_files) if metadata else {}
        write_extra_files(draft, files, tokenizer)
        with quiet():
            program = export_graph(graph)
            program.model.metadata_props.update(class_names(model, metadata))
            program.save(draft / "model.onnx")


def class_names(model: Model, metadata: CheckpointMetadata | None) -> dict[str, str]:
    """The names of the classes, as the property id2label of the graph."""
    names = metadata.config.get("id2label") if metadata and model.spec.head.output == "classes" else None
    return {"id2label": json.dumps(names, ensure_ascii=False)} if names else {}


def float32_copy(model: Model) -> Model:
    """A copy of the model in float32 and evaluation mode, which shares the weights if they are in float32."""
    tensors = [*model.parameters(), *model.buffers()]
    share = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    copy = deepcopy(model, {id(tensor): tensor for tensor in tensors} if share else None)
    return copy.to("cpu", torch.float32).eval()


# -------------------------------------------------------------------------------------------------- inputs and outputs


@dataclass(frozen=True)
class Input:
    """An input of the graph. Each of its sizes is a number, or the name of a dynamic size."""

    sizes: tuple[int | str, ...]
    dtype: torch.dtype = torch.int64

    def example(self) -> Tensor:
        """Zeros for tracing the graph. Dynamic sizes are at least 2, because tracing takes 0 and 1 for constants."""
        example_sizes = {"batch": 2, "length": 3, "target_length": 4, "visible_length": 2}
        return torch.zeros(
            [example_sizes[size] if isinstance(size, str) else size for size in self.sizes], dtype=self.dtype
        )

    def dynamic(self) -> dict[int, str]:
        return {i: size for i, size in enumerate(self.sizes) if isinstance(size, str)}


PER_TOKEN = Input(("batch", "length"))
ImageShape = tuple[int, int, int]  # channels, height and width


def image_shape(spec: ModelSpec, metadata: CheckpointMetadata | None) -> ImageShape | None:
    """The shape of input images; None if the model was not read from a checkpoint or reads no images."""
    if metadata is None or spec.encoder is None or spec.encoder.embed.reads != "patches":
        return None
    image = write_config([ImageSize()], spec)
    return image["num_channels"], image["image_size"], image["image_size"]


def first_inputs(stack: StackSpec, image: ImageShape | None) -> dict[str, Input]:
    """The inputs of the stack that reads first."""
    if stack.embed.reads == "patches":
        if image is None:
            return {"patches": Input(("batch", "length", stack.embed.patch_pixels() or 1), torch.float32)}
        return {"pixel_values": Input(("batch", *image), torch.float32)}
    inputs = {"input_ids": PER_TOKEN, "attention_mask": PER_TOKEN}
    for name, field in (("token_type_ids", "type_vocab_size"), ("task_type_ids", "task_type_vocab_size")):
        if getattr(stack.embed, field, 0) > 1:
            inputs[name] = PER_TOKEN
    if any(layer.mask.prefix for layer in stack.expanded_layers()):
        inputs["prefix_lengths"] = Input(("batch",))
    return inputs


def inputs_of(spec: ModelSpec, image: ImageShape | None) -> dict[str, Input]:
    """All inputs of a model, by the names that ONNX files usually have."""
    if spec.recurrent:
        raise ExportError("ONNX export does not support recurrent networks")
    first = spec.encoder or spec.decoder
    if first is None:
        return {"input_ids": PER_TOKEN, "attention_mask": PER_TOKEN}
    inputs = first_inputs(first, image)
    if spec.encoder is None or spec.decoder is None:
        return inputs
    target = spec.decoder.embed.reads
    if target == "memory":
        return inputs | {"visible_patches": Input(("batch", "visible_length"))}
    if target != "tokens" or any(layer.mask.prefix for layer in spec.decoder.expanded_layers()):
        raise ExportError("ONNX export of an encoder–decoder needs a decoder that reads tokens and has no prefix mask")
    return inputs | {"decoder_input_ids": Input(("batch", "target_length"))}


class OnnxModel(nn.Module):
    """A model whose arguments are tensors, in the order of `inputs`. The attention mask is 0 at padding, else 1."""

    def __init__(self, model: Model, image: ImageShape | None) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs_of(model.spec, image)
        kind = model.spec.head.kind
        self.output = {"none": "last_hidden_state", "vector": "sentence_embedding"}.get(kind, "logits")

    def forward(self, *tensors: Tensor) -> Tensor:
        inputs = dict(zip(self.inputs, tensors, strict=True))
        source = self.source(inputs)
        if "visible_patches" in inputs:  # the model reads only the shape of the target
            positions = inputs["visible_patches"]
            visible = source.tokens.gather(1, positions[..., None].expand(-1, -1, source.tokens.shape[-1]))
            return self.model(source.tokens, Inputs(visible, positions=positions))
        return self.model(inputs["decoder_input_ids"], source) if "decoder_input_ids" in inputs else self.model(source)

    def source(self, inputs: dict[str, Tensor]) -> Inputs:
        if "pixel_values" in inputs:
            encoder = self.model.spec.encoder
            assert encoder is not None
            assert isinstance(encoder.embed, PatchesSpec)
            return Inputs(encoder.embed.patchify(inputs["pixel_values"]))
        if "patches" in inputs:
            return Inputs(inputs["patches"])
        return Inputs(
            inputs["input_ids"],
            padding_mask=inputs["attention_mask"] == 0,
            token_type_ids=inputs.get("token_type_ids"),
            task_type_ids=inputs.get("task_type_ids"),
            prefix_lengths=inputs.get("prefix_lengths"),
        )


# ------------------------------------------------------------------------------------------------------------ the graph


def export_graph(model: OnnxModel) -> torch.onnx.ONNXProgram:
    """Exports the graph of a model, with names for its inputs and dynamic sizes."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    examples = tuple(onnx_input.example() for onnx_input in model.inputs.values())
    names = tuple(onnx_input.dynamic() for onnx_input in model.inputs.values())
    dynamic = tuple(dict.fromkeys(sizes, torch.export.Dim.DYNAMIC) for sizes in names)
    try:
        with torch.no_grad():
            traced = torch.export.export(model, examples, dynamic_shapes=(dynamic,))
        program = torch.onnx.export(
            traced,
            dynamo=True,
            verbose=False,
            input_names=list(model.inputs),
            output_names=[model.output],
            dynamic_shapes=(names,),
        )
    except ManyheadsError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        size = constant_size(model, examples, names)
        every = f" for every {size.replace('_', ' ')}" if size else ""
        raise ExportError(f"this model cannot be traced as one graph{every}: {reason}") from error
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # the metadata contains paths of this computer
    return program


def constant_size(model: OnnxModel, examples: tuple[Tensor, ...], names: tuple[dict[int, str], ...]) -> str | None:
    """The dynamic size that a model must have as a constant in order to be traced; None if it is not a single one."""
    for size in dict.fromkeys(name for sizes in names for name in sizes.values()):
        others = tuple(
            dict.fromkeys((i for i, name in sizes.items() if name != size), torch.export.Dim.DYNAMIC) for sizes in names
        )
        with suppress(Exception), torch.no_grad():
            torch.export.export(model, examples, dynamic_shapes=(others,))
            return f"{size} size" if size == "batch" else size
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Hides torch's warnings about optional packages and deprecations."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(before)
