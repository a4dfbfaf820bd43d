"""Reads and writes Hugging Face folders, and folders of the same layout whose config holds our own description."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from manyheads.convert.config import Config
from manyheads.convert.families import NAMES, UNSET_TOKEN_IDS, Family, get_family
from manyheads.convert.match import expressible, same_model
from manyheads.convert.pooling import POOLING_FILES, write_pooling
from manyheads.convert.weights import Parameters, Rename, Tensors, WeightTable
from manyheads.errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTokenizerError,
    ConfigError,
    NonFiniteError,
    UnknownArchitectureError,
    WeightsError,
)
from manyheads.files.read import MAX_CONFIG_BYTES, decode, parse_json, read_bytes, read_json, safe_join
from manyheads.files.tensors import SafetensorsFolder, TensorStore
from manyheads.files.tokenizer import MAX_TOKENIZER_BYTES, parse_tokenizer
from manyheads.files.write import atomic_output
from manyheads.model.builder import DTYPES, Model, build_meta, init_buffers
from manyheads.model.spec import ModelSpec, read_model
from manyheads.parts.head import NoHeadSpec, VectorSpec
from manyheads.spec import Tree, quote, to_tree

SHARD_BYTES = 50_000_000_000  # as in transformers
CHAT_TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE_LENGTH = 1 << 16
EXTRA_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "source.spm", "target.spm",
    "generation_config.json", CHAT_TEMPLATE, "preprocessor_config.json", *POOLING_FILES,
)  # fmt: skip
MAX_EXTRA_BYTES = {"generation_config.json": MAX_CONFIG_BYTES, "modules.json": MAX_CONFIG_BYTES}  # others are larger
MODULE_FOLDER = re.compile(r"[0-9]_[A-Za-z]+")  # a module of sentence-transformers, such as 1_Pooling


@dataclass(frozen=True)
class StoredWeights:
    """How the weights of a checkpoint are stored, so that an export writes the same tensors."""

    table: WeightTable
    unused: Tensors = field(default_factory=dict)  # tensors that no computation reads
    tied: frozenset[str] = frozenset()  # second names of tied tensors that are stored
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # the dtype of each tensor, if they differ

    def tensors(self, model: Model) -> Tensors:
        """Converts the model's weights to the tensors of the checkpoint."""
        tensors = self.table.write(model.state_dict()) | self.unused
        tensors |= {name: tensors[self.table.tied[name]].clone() for name in self.tied}
        return tensors | {name: in_dtype(tensors[name].detach(), dtype) for name, dtype in self.dtypes.items()}


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts the tensor to its stored dtype, unless that would change a value."""
    stored = tensor.to(dtype)
    return stored if ((stored.to(tensor.dtype) == tensor) | tensor.isnan()).all() else tensor


@dataclass(frozen=True)
class CheckpointMetadata:
    """The family, the config and the stored weights that a model was loaded with, so that an export is unchanged."""

    family: Family | NativeFormat
    architecture: str
    config: Tree
    spec: ModelSpec
    weights: StoredWeights
    dtype: torch.dtype | None = None  # the smallest dtype that represents every stored weight exactly
    extra_files: dict[str, bytes] = field(default_factory=dict)  # the tokenizer and other small files


# ------------------------------------------------------------------------------------------------------- native format


class NativeFormat:
    """The native format, whose config holds the description of any model and whose weights have our names.

    It has the methods of a `Family` that reading and writing a folder need.
    """

    model_type = "manyheads"

    def architecture(self, config: Config) -> str:
        if config.get("architectures") not in (None, [ARCHITECTURE]):
            raise UnknownArchitectureError(f"{self.model_type} has no architecture {quote(config['architectures'])}")
        return ARCHITECTURE

    def spec_of(self, config: Config) -> ModelSpec:
        tree = config.get("model")
        if not isinstance(tree, dict):
            raise CheckpointConfigError(f"model is {quote(tree)}, expected a description")
        return read_model(tree)

    def stored_spec(self, config: Config, names: Collection[str]) -> ModelSpec:
        return self.spec_of(config)

    def config_of(self, spec: ModelSpec, architecture: str) -> Tree:
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **UNSET_TOKEN_IDS,
            "model": to_tree(spec),
        }

    def tables(self, spec: ModelSpec, architecture: str, parameters: Parameters) -> list[WeightTable]:
        return [WeightTable(tuple(Rename(name, (name,)) for name in parameters))]


NATIVE, ARCHITECTURE = NativeFormat(), "Model"


# ------------------------------------------------------------------------------------------------------------- reading


def read_folder(
    folder: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False, copy: bool = False
) -> tuple[Model, CheckpointMetadata]:
    """Reads a model with its weights, which are memory-mapped unless `copy` is set, and checks all files first."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} is not a folder")
    path = safe_join(folder, "config.json")
    config = read_json(path, MAX_CONFIG_BYTES)
    with name_in_errors(path):  # checked before the weights, which may be unreadable if the model is not supported
        format_of(config).spec_of(config)
    weights, extra_files = SafetensorsFolder(folder, copy=copy), read_extra_files(folder)
    with name_in_errors(folder):  # checked here, because it is read only where it is used
        read_tokenizer_config(extra_files)
    return load_model(folder, config, weights, extra_files, dtype=dtype, allow_nonfinite=allow_nonfinite)


def format_of(config: Config) -> Family | NativeFormat:
    model_type = config.get("model_type")
    return NATIVE if model_type == NATIVE.model_type else get_family(model_type)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Adds the path to errors of a checkpoint that do not contain it."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointConfigError(f"{path}: {error.message}", hint=error.hint) from None
    except CheckpointError as error:
        if str(path) in error.message:
            raise
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from None


def load_model(
    path: Path,
    config: Tree,
    weights: TensorStore,
    extra_files: dict[str, bytes],
    *,
    dtype: torch.dtype | None = None,
    allow_nonfinite: bool = False,
) -> tuple[Model, CheckpointMetadata]:
    """Builds a model from its config and weights. Names, shapes and dtypes are checked before weights are read."""
    with name_in_errors(path):
        family = format_of(config)
        architecture, spec = family.architecture(config), family.stored_spec(config, weights)
        model = build_meta(spec)
        parameters = model.state_dict()  # with buffers, which may be integers
        buffers = dict(model.named_buffers())
        table = matching_table(family.tables(spec, architecture, parameters), parameters, weights)
        dtypes = {name: stored for name, stored in weights.dtypes.items() if name not in table.unused}
        check_dtypes(dtypes, buffers)
        widest = reduce(torch.promote_types, dtypes.values())
        init_buffers(model, dtype or widest)

        def read(name: str) -> Tensor:
            return weights[name] if allow_nonfinite or name in buffers else check_finite_weight(name, weights[name])

        state = {
            name: (tensor.to(dtype or widest) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in table.read(read, parameters)
        }
        model.load_state_dict(state, assign=True)
        tied = frozenset(name for name in table.tied if name in weights)
        for name in tied:
            check_tied(name, table.tied[name], weights)
        unused = {name: weights[name] for name in table.unused if name in weights}
    mixed = dtype in (None, widest) and len(set(dtypes.values())) > 1
    stored = StoredWeights(table, unused, tied, dtypes if mixed else {})
    return model.eval(), CheckpointMetadata(family, architecture, config, spec, stored, widest, extra_files)


def matching_table(tables: Iterable[WeightTable], parameters: Parameters, weights: TensorStore) -> WeightTable:
    """The first table that matches the names of a checkpoint. If none does, the error is that of the first table."""
    errors = []
    for table in tables:
        try:
            weights.check(table.shapes(parameters), {*table.tied, *table.unused})
        except WeightsError as error:
            errors.append(error)
        else:
            return table
    raise errors[0]


def check_dtypes(dtypes: Mapping[str, torch.dtype], buffers: Mapping[str, Tensor]) -> None:
    """Raises unless weights are stored as floating-point numbers, and integer buffers in their own dtype."""
    for name, dtype in dtypes.items():
        expected_dtype = buffers[name].dtype if name in buffers else torch.float32
        if dtype not in DTYPES if expected_dtype.is_floating_point else dtype != expected_dtype:
            expected = "floating-point numbers" if expected_dtype.is_floating_point else expected_dtype
            raise WeightsError(f"{name} is stored as {dtype}, expected {expected}")


def check_finite_weight(name: str, tensor: Tensor) -> Tensor:
    # a finite sum, which is fast, shows that all terms are finite; otherwise each term is checked
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if not tensor.sum(dtype=wide).isfinite() and not tensor.isfinite().all():
        raise NonFiniteError(f"{name} has a NaN or infinite weight")
    return tensor


def check_tied(name: str, other: str, weights: TensorStore) -> None:
    dtype = torch.promote_types(weights.dtypes[name], weights.dtypes[other])
    if not torch.equal(weights[name].to(dtype), weights[other].to(dtype)):
        raise WeightsError(f"{name} should be tied to {other}, but has other values")


def read_extra_files(folder: Path) -> dict[str, bytes]:
    """The small files next to the weights."""
    modules = sorted(path.name for path in folder.iterdir() if MODULE_FOLDER.fullmatch(path.name) and path.is_dir())
    paths = [safe_join(folder, name) for name in EXTRA_FILES]
    paths += [safe_join(safe_join(folder, name), "config.json") for name in modules]
    return {  # a link to nothing is an error, not a missing file
        path.relative_to(folder).as_posix(): read_bytes(path, MAX_EXTRA_BYTES.get(path.name, MAX_TOKENIZER_BYTES))
        for path in paths
        if os.path.lexists(path)
    }


def read_tokenizer(folder: Path, extra_files: Mapping[str, bytes], *, keep_truncation: bool = False) -> Any:
    """The tokenizer of a folder, without padding and by default without truncation; None if there is none.

    Truncation in published files is often unintended. If tokenizer_config.json has split_special_tokens, as ours do,
    names of special tokens in a text are encoded as plain text.
    """
    data = extra_files.get("tokenizer.json")
    if data is None:
        return None
    tokenizer = parse_tokenizer(data, folder / "tokenizer.json", CheckpointTokenizerError)
    tokenizer.no_padding()
    if not keep_truncation:
        tokenizer.no_truncation()
    # tokenizer.json has no field for this setting
    tokenizer.encode_special_tokens = read_tokenizer_config(extra_files).get("split_special_tokens") is True
    return tokenizer


def read_tokenizer_config(extra_files: Mapping[str, bytes]) -> Tree:
    """Reads tokenizer_config.json. The result is empty if the file is missing."""
    name = "tokenizer_config.json"
    return parse_json(extra_files.get(name, b"{}"), Path(name))


def read_chat_template(extra_files: Mapping[str, bytes]) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json; None if there is none."""
    template = read_tokenizer_config(extra_files).get("chat_template")
    if isinstance(template, list):  # several with their names, as of version 4 of transformers
        defaults = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    if CHAT_TEMPLATE in extra_files:
        template = decode(extra_files[CHAT_TEMPLATE], Path(CHAT_TEMPLATE))
    if isinstance(template, str) and len(template) > MAX_TEMPLATE_LENGTH:
        raise CheckpointConfigError(f"the chat template has more than {MAX_TEMPLATE_LENGTH:,} characters")
    return template if isinstance(template, str) else None


# ------------------------------------------------------------------------------------------------------------- writing


def write_folder(
    model: Model,
    folder: Path,
    metadata: CheckpointMetadata | None = None,
    tokenizer: Any = None,
    *,
    native: bool = False,
    shard_bytes: float = SHARD_BYTES,
) -> None:
    """Writes a folder for transformers, or with `native` one in the native format, which supports every model."""
    model, metadata = (model, native_metadata(model, metadata)) if native else export_form(model, metadata)
    with atomic_output(folder) as draft:
        draft.mkdir()
        fill_folder(draft, model, metadata, tokenizer, shard_bytes=shard_bytes)


def fill_folder(
    folder: Path, model: Model, metadata: CheckpointMetadata, tokenizer: Any = None, *, shard_bytes: float = SHARD_BYTES
) -> None:
    write_extra_files(folder, metadata.extra_files, tokenizer)
    config = json.dumps(metadata.config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(f"{config}\n", encoding="utf-8")
    write_shards(metadata.weights.tensors(model), folder, shard_bytes)


def write_extra_files(folder: Path, files: Mapping[str, bytes], tokenizer: Any) -> None:
    """Writes the small files next to the weights unchanged, and a tokenizer that was read from another format."""
    tokenizer_files = {"tokenizer.json": tokenizer.to_str().encode()} if hasattr(tokenizer, "to_str") else {}
    if tokenizer is not None and not tokenizer_files:
        warnings.warn("this tokenizer cannot be written as tokenizer.json and was left out", stacklevel=3)
    for name, data in {**tokenizer_files, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def export_form(model: Model, metadata: CheckpointMetadata | None) -> tuple[Model, CheckpointMetadata]:
    """A model with its metadata for an export: those that were loaded, or the first architecture that can express it.

    The model is another one with the same output if only that can be expressed.
    """
    if metadata is not None and metadata.family.model_type in NAMES and same_model(model.spec, metadata.spec):
        if metadata.dtype == dtype_of(model):
            return model, metadata
        key = "torch_dtype" if "torch_dtype" in metadata.config else "dtype"
        config = metadata.config | {key: dtype_name(model)}
        return model, replace(metadata, config=config, weights=replace(metadata.weights, dtypes={}))
    # the family of the checkpoint from which training started
    first = metadata.config.get("family") if metadata else None
    names = (*([first] if first in NAMES else ()), *NAMES)
    headless_model, pooling_files = without_vector_head(model)
    form, candidate = expressible(headless_model, names)
    form_metadata = new_metadata(form, metadata, *candidate[:3])
    return form, replace(form_metadata, extra_files=form_metadata.extra_files | pooling_files)


def without_vector_head(model: Model) -> tuple[Model, dict[str, bytes]]:
    """A model that gives hidden states, and the files that pool them; the model itself if no file can express that."""
    head, stack = model.spec.head, model.spec.encoder or model.spec.decoder
    if not isinstance(head, VectorSpec) or stack is None or not (files := write_pooling(head, stack.width)):
        return model, {}
    headless_model = build_meta(model.spec.replace(head=NoHeadSpec()))
    headless_model.load_state_dict(model.state_dict(), assign=True)
    return headless_model, files


def native_metadata(model: Model, metadata: CheckpointMetadata | None = None) -> CheckpointMetadata:
    """Metadata for an export to the native format."""
    return new_metadata(model, metadata, NATIVE, ARCHITECTURE, NATIVE.config_of(model.spec, ARCHITECTURE))


MAX_POSITION_KEYS = ("max_position_embeddings", "context_length", "n_positions")
GENERATION_FILES = ("generation_config.json", "chat_template.jinja")
IMAGE_FILES = ("preprocessor_config.json",)


def kept_keys(model: Model) -> tuple[str, ...]:
    """The keys without a field in a description that belong to such a model, which are copied from the old config."""
    return (
        *UNSET_TOKEN_IDS,
        "task",
        *(("decoder_start_token_id",) if model.spec.has_source else ()),
        *(("forced_bos_token_id", "forced_eos_token_id") if model.can_generate else ()),
        *(("id2label", "label2id", "problem_type") if model.spec.head.output == "classes" else ()),
    )


def kept_files(model: Model, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files that belong to such a model: without those of generation, pooling or images if it has none."""
    first, names = model.spec.encoder or model.spec.decoder, set(files)
    if not model.can_generate:
        names -= set(GENERATION_FILES)
    if model.spec.head.output != "states":
        names -= {name for name in names if name in POOLING_FILES or MODULE_FOLDER.match(name)}
    if first and first.embed.reads != "patches":
        names -= set(IMAGE_FILES)
    return {name: data for name, data in files.items() if name in names}


def new_metadata(
    model: Model, metadata: CheckpointMetadata | None, family: Family | NativeFormat, architecture: str, config: Tree
) -> CheckpointMetadata:
    """Metadata with a new config, with those keys of the old config and old small files that belong to the model."""
    old = metadata.config if metadata else {}
    config |= {"dtype": dtype_name(model)} | {key: old[key] for key in kept_keys(model) if key in old}
    max_positions = next((old[key] for key in MAX_POSITION_KEYS if type(old.get(key)) is int), None)
    if max_positions and "max_position_embeddings" in config:
        longer = config | {"max_position_embeddings": max_positions}
        config = longer if family.spec_of(longer) == family.spec_of(config) else config
    tables = family.tables(model.spec, architecture, model.state_dict())
    extra_files = kept_files(model, metadata.extra_files if metadata else {})
    computed_tensors = (
        family.computed_tensors(model.spec, config, tables[0].unused) if isinstance(family, Family) else {}
    )
    return CheckpointMetadata(
        family, architecture, config, model.spec, StoredWeights(tables[0], computed_tensors), extra_files=extra_files
    )


def dtype_of(model: Model) -> torch.dtype:
    return next(model.parameters()).dtype


def dtype_name(model: Model) -> str:
    return str(dtype_of(model)).removeprefix("torch.")


def write_shards(tensors: Tensors, folder: Path, shard_bytes: float) -> None:
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(weight.nbytes for weight in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.detach().contiguous()
    if len(shards) == 1:
        save_tensors(shards[0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_tensors(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / "model.safetensors.index.json").write_text(f"{index}\n", encoding="utf-8")


def save_tensors(tensors: Tensors, path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # for example if the disk is full
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(code[1]), os.strerror(int(code[1])), str(path)) if code else OSError(str(error))) from None
