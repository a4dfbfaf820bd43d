"""Hugging Face folders, in and out: config.json, safetensors, and the tokenizer beside them."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from manyheads.convert.config import Config
from manyheads.convert.families import NAMES, NO_TOKENS, Family, family
from manyheads.convert.files import (
    LARGEST_CONFIG,
    LARGEST_TOKENIZER,
    Checkpoint,
    FileError,
    Store,
    check_free,
    inside,
    published,
    read_json,
)
from manyheads.convert.match import differences, fitting, plain
from manyheads.convert.weights import Repeated, Row, Tensors, Unused, check_names, read_weights, write_weights
from manyheads.model.build import Model, outline
from manyheads.model.spec import ModelSpec
from manyheads.spec import Tree

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHARD_BYTES = 50_000_000_000  # as transformers has it
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "tokenizer.model", "source.spm", "target.spm", "generation_config.json", "chat_template.jinja",
    "preprocessor_config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip
STEP = re.compile(r"[0-9]_[A-Za-z]+")  # a folder of one step of sentence-transformers


@dataclass(frozen=True)
class Origin:
    """Where a model came from, so that it can go back as it came."""

    family: Family
    architecture: str
    config: Tree
    settled: Config  # the config as it was understood
    spelling: tuple[tuple[str, str], ...] = ()  # how names differ from those of the table
    unused: Tensors = field(default_factory=dict)  # tensors that no forward reads, as they came
    repeated: frozenset[str] = frozenset()  # tied tensors that the checkpoint held twice
    dtype: torch.dtype | None = None  # in which it was stored
    beside: dict[str, bytes] = field(default_factory=dict)  # the tokenizer and its like, as they came
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of each tensor, where they were not all of one


def read_folder(
    folder: Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False, copy: bool = False
) -> tuple[Model, Origin]:
    """A model with its weights, which are mapped from the file, or copied; everything is checked first."""
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder")
    config = read_json(inside(folder, "config.json"), LARGEST_CONFIG)
    try:
        family(config.get("model_type")).spec_of(config)
    except ValueError as error:
        raise FileError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, KeyError, ArithmeticError) as error:
        raise FileError(f"{folder / 'config.json'} holds a value that cannot be read: {error}") from None
    return assembled(folder, config, Checkpoint(folder, copy=copy), read_beside(folder), dtype=dtype, allow_nonfinite=allow_nonfinite)


def assembled(
    path: Path, config: Tree, weights: Store, beside: dict[str, bytes], *,
    dtype: torch.dtype | None, allow_nonfinite: bool,
) -> tuple[Model, Origin]:  # fmt: skip
    """A model from its config and its weights: names and shapes are checked first, then each weight is read once."""
    try:
        known = family(config.get("model_type"))
        settled, architecture = known.settle(config, set(weights)), known.architecture(config)
        spec = known.spec_of(settled)
        model = outline(spec)
        rows, spelling = spelled(known, spec, architecture, model, weights.shapes())
        stored = {name: dtype for name, dtype in weights.dtypes().items() if name in used(rows)}
        if wrong := [name for name, sort in stored.items() if sort not in FLOATS]:
            sort = str(stored[wrong[0]]).removeprefix("torch.")
            raise FileError(f"{path}: {wrong[0]} is stored as {sort}, and such numbers are no weights without their scale")
        widest = reduce(torch.promote_types, stored.values())  # which holds every number as it is
        dtype = dtype or widest
        mixed = stored if dtype == widest and len(set(stored.values())) > 1 else {}
        finite = weights if allow_nonfinite else Finite(weights, used(rows))
        unused, repeated = read_weights(rows, finite, dict(model.named_parameters()), partial(give, model, dtype))
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None
    return model.eval(), Origin(known, architecture, config, settled, spelling, unused, repeated, widest, beside, mixed)


def give(model: nn.Module, dtype: torch.dtype, name: str, tensor: Tensor) -> None:
    """Gives a model without memory one of its weights."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(tensor.to(dtype).contiguous()))


def used(rows: Iterable[Row]) -> set[str]:
    return {row.theirs for row in rows if not isinstance(row, Unused)}


def spelled(
    known: Family, spec: ModelSpec, architecture: str, model: nn.Module, given: Mapping[str, tuple[int, ...]]
) -> tuple[list[Row], tuple[tuple[str, str], ...]]:
    """The table under the first spelling of its names that fits what is given; errors are those of the usual one."""
    rows, ours = known.rows(spec, architecture), dict(model.named_parameters())
    for spelling in ((), *known.spellings):
        renamed = [respelled(row, spelling) for row in rows]
        assert len({row.theirs for row in renamed}) == len(rows), f"two names are spelled alike by {spelling}"
        try:
            check_names(renamed, ours, given)
        except ValueError as error:
            if spelling == ():
                first = error
            continue
        return renamed, spelling
    raise first


def respelled(row: Row, spelling: tuple[tuple[str, str], ...]) -> Row:
    def rename(name: str) -> str:
        return next((re.sub(usual, other, name) for usual, other in spelling if re.search(usual, name)), name)

    if isinstance(row, Repeated):
        return replace(row, theirs=rename(row.theirs), same_as=rename(row.same_as))
    return replace(row, theirs=rename(row.theirs))


class Finite(Mapping[str, Tensor]):
    """Tensors of which those that are used hold numbers, and nothing else."""

    def __init__(self, held: Mapping[str, Tensor], used: Collection[str]) -> None:
        self.held, self.used = held, used

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.held[name]
        # a sum is quick to take, and finite only if its terms are; where it is not, they are looked at
        wide = torch.promote_types(tensor.dtype, torch.float32)
        if name in self.used and not tensor.sum(dtype=wide).isfinite() and not tensor.isfinite().all():
            raise FileError(f"{name} holds numbers that are not finite")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def read_beside(folder: Path) -> dict[str, bytes]:
    """The small files that travel with the weights."""
    found = {}
    steps = sorted(path.name for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir())
    for path in (*(inside(folder, name) for name in BESIDE), *(inside(inside(folder, step), "config.json") for step in steps)):
        if path.exists():
            if not path.is_file():
                raise FileError(f"{path} is not a plain file")
            if path.stat().st_size > LARGEST_TOKENIZER:
                raise FileError(f"{path} has {path.stat().st_size:,} bytes, expected at most {LARGEST_TOKENIZER:,}")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


# -------------------------------------------------------------------------------------------------------------- out


def write_folder(
    model: Model, folder: Path, origin: Origin | None = None, tokenizer: Any = None, *, own: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a folder that transformers opens; or, `own`, one that says the model as it is described here, whatever it is."""
    check_free(folder)
    origin = described(model, origin) if own else origin_of(model, origin)
    with published(folder) as draft:
        draft.mkdir()
        fill_folder(draft, model, origin, tokenizer, shard_bytes=shard_bytes)


def fill_folder(folder: Path, model: Model, origin: Origin, tokenizer: Any = None, *, shard_bytes: int = SHARD_BYTES) -> None:
    rows = [respelled(row, origin.spelling) for row in origin.family.rows(model.spec, origin.architecture)]
    tensors = write_weights(rows, dict(model.named_parameters()), origin.unused, origin.repeated)
    tensors |= {name: as_stored(tensors[name].detach(), dtype) for name, dtype in origin.dtypes.items() if name in tensors}
    write_beside(folder, origin, tokenizer)
    (folder / "config.json").write_text(json.dumps(origin.config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_shards(tensors, folder, shard_bytes)


def write_beside(folder: Path, origin: Origin | None, tokenizer: Any) -> None:
    """The small files that travel with the weights: as they came, and a tokenizer that came in another form."""
    own = {"tokenizer.json": tokenizer.to_str().encode()} if hasattr(tokenizer, "to_str") else {}
    if tokenizer is not None and not own:
        warnings.warn("the tokenizer of this model has no form that other folders know, and is left out", stacklevel=3)
    for name, data in (own | (origin.beside if origin else {})).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the form it came in, unless it has learned numbers that this form cannot hold."""
    back = tensor.to(dtype)
    return back if ((back.to(tensor.dtype) == tensor) | tensor.isnan()).all() else tensor


def origin_of(model: Model, origin: Origin | None) -> Origin:
    """Where the model goes: back to the family it came from, if it still says the same, or to the first that can say it."""
    if origin is not None and origin.family.model_type in NAMES:
        came_as = plain(origin.family.spec_of(origin.settled))
        if not list(differences(plain(model.spec), came_as)):
            if origin.dtype == dtype_of(model):
                return origin
            key = "torch_dtype" if "torch_dtype" in origin.config else "dtype"
            return replace(origin, config=origin.config | {key: named_dtype(model)}, dtypes={})
    first = origin.config.get("family") if origin else None  # what a run began from
    return renewed(model, origin, *fitting(model.spec, (*([first] if first in NAMES else ()), *NAMES)))


def described(model: Model, origin: Origin | None = None) -> Origin:
    """The form that every model has: its own description."""
    own = family("manyheads")
    (architecture,) = own.tasks
    return renewed(model, origin, own, architecture, own.config_of(model.spec, architecture))


# what a description does not say, and a config may
CARRIED = (
    *NO_TOKENS, "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "id2label", "label2id", "problem_type", "objective",
)  # fmt: skip
CONTEXT = ("max_position_embeddings", "context_length", "n_positions")


def renewed(model: Model, origin: Origin | None, known: Family, architecture: str, config: Tree) -> Origin:
    """A new config, with what the old one said beyond the description, and the files that came beside it."""
    came = origin.config if origin else {}
    config |= {"dtype": named_dtype(model)} | {key: came[key] for key in CARRIED if key in came}
    longest = next((came[key] for key in CONTEXT if type(came.get(key)) is int), None)
    if longest and "max_position_embeddings" in config:
        longer = config | {"max_position_embeddings": longest}
        config = longer if known.spec_of(longer) == known.spec_of(config) else config
    return Origin(known, architecture, config, config, beside=origin.beside if origin else {})


def dtype_of(model: Model) -> torch.dtype:
    return next(model.parameters()).dtype


def named_dtype(model: Model) -> str:
    return str(dtype_of(model)).removeprefix("torch.")


def write_shards(tensors: Tensors, folder: Path, most: int) -> None:
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(map(size_of, shards[-1].values())) + size_of(tensor) > most:
            shards.append({})
        shards[-1][name] = tensor.detach().contiguous()
    if len(shards) == 1:
        save(shards[0], folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(map(size_of, tensors.values()))}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save(tensors: Tensors, path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for one
        said = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(said[1]), os.strerror(int(said[1])), str(path)) if said else OSError(str(error))) from None


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
