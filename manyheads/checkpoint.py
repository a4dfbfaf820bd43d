"""A model with what belongs to it: loaded from a folder, asked in texts or ids, and written back out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.fairseq import CHECKPOINT, read_checkpoint, read_words
from manyheads.convert.files import FileError, check_free, inside
from manyheads.convert.folder import FLOATS, Origin, assembled, read_folder, write_folder
from manyheads.convert.gguf_file import chat_template, read_file, write_file
from manyheads.convert.hub import fetched, is_name
from manyheads.convert.pooling import Pooling, read_pooling
from manyheads.convert.tokenizer import read_tokenizer, special_ids
from manyheads.generate.sample import sample
from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.parts.batch import Inputs
from manyheads.spec import LARGEST, SpecError, quoted

FORMATS = ("hf", "gguf", "onnx", "manyheads")


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer where there is one, and where it came from."""

    model: Model
    tokenizer: Any = None  # a tokenizers.Tokenizer
    origin: Origin | None = None
    pooling: Pooling | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def chat_template(self) -> str | None:
        """How a conversation is written as one text, where the checkpoint says so."""
        return chat_template(self.origin.beside) if self.origin else None

    @property
    def longest(self) -> int | None:
        """The most tokens it has places for; None where there is no such limit."""
        towers = [tower for tower in (self.spec.encoder, self.spec.decoder) if tower]
        lengths = [part.longest for tower in towers for layer in tower.expanded() for part in (layer.position, layer.core)]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def paired(self) -> bool:
        """Whether it reads a source beside its target."""
        return self.spec.shape in ("encoder–decoder", "recurrent")

    @torch.no_grad()
    def logits(self, ids: Tensor, target: Tensor | None = None, padding: Tensor | None = None, **more: Tensor) -> Tensor:
        """B×L×V, or what the head gives. Of an encoder–decoder, `ids` are the source's, and padding too; True at padded places."""
        given = Inputs(ids, padding=padding, **more)  # type: ignore[arg-type]
        if not self.paired:
            if target is not None:
                raise ValueError(f"a target was given beside the ids, but the model is only {self.spec.shape}")
            return self.model(given)
        if target is None:
            raise ValueError(f"this model is {self.spec.shape}: give a source and a target")
        return self.model(target, given)

    @torch.no_grad()
    def hidden(self, ids: Tensor, target: Tensor | None = None, padding: Tensor | None = None, **more: Tensor) -> list[Tensor]:
        """The embeddings and what every layer makes of them, the last one behind the closing norm; of both towers, one after the other."""
        towers = [tower for tower in (getattr(self.model, "encoder", None), getattr(self.model, "decoder", None)) if tower is not None]
        found: list[list[Tensor]] = [[] for _ in towers]
        handles = []
        for tower, states in zip(towers, found, strict=True):
            if not hasattr(tower, "layer_specs"):
                raise ValueError("a recurrent network has no layers of attention to look into")
            modules = [tower.embed, *tower.layers]
            handles += [m.register_forward_hook(lambda _, __, out, states=states: states.append(out)) for m in modules]
            handles.append(tower.norm.register_forward_hook(lambda _, __, out, states=states: states.__setitem__(-1, out)))
        try:
            self.logits(ids, target, padding, **more)
        finally:
            for handle in handles:
                handle.remove()
        return [state for states in found for state in states]

    def encode(self, texts: Sequence[str]) -> Inputs:
        """Texts as a batch, padded on the right."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer beside this model: give ids as numbers")
        if wrong := [text for text in texts if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text)]:
            raise ValueError(f"given {quoted(wrong[0])}, expected a text of Unicode characters")
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        if not rows or not all(rows):
            raise ValueError("there is nothing to read: every text needs at least one token")
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        padding = torch.tensor([[False] * len(row) + [True] * (longest - len(row)) for row in rows])
        return Inputs(ids, padding=padding if padding.any() else None)

    @torch.no_grad()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """One vector a text: the mean over its tokens, or what the folder says."""
        self.check_reads_texts()
        given = self.encode([texts] if isinstance(texts, str) else texts)
        if not isinstance(self.model, Transformer) or self.spec.shape != "encoder":
            raise ValueError(f"a vector a text is what an encoder gives; this model is {self.spec.shape}")
        states, padding = self.model.states(given)
        return (self.pooling or Pooling()).pool(states, padding)

    def generate(self, text: str | Sequence[int], *, max_new: int = 64, temperature: float = 0.0, seed: int = 0) -> Any:
        """What the model writes after the text, or in answer to it; ids for ids."""
        if type(max_new) is not int or not 1 <= max_new <= LARGEST:
            raise ValueError(f"max_new is {quoted(max_new)}, expected a whole number from 1 to {LARGEST:,}")
        if type(temperature) not in (int, float) or not (temperature == 0 or 1e-6 <= temperature <= 1e6):
            raise ValueError(f"temperature is {quoted(temperature)}, expected 0 or a number from 1e-6 to 1e6")
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {quoted(seed)}, expected a whole number from 0")
        self.check_reads_texts()
        as_text = isinstance(text, str)
        given = self.encode([text]) if isinstance(text, str) else self.batch(text)
        stop, start = special_ids(self.origin.config if self.origin else {})
        prompt, source = (self.batch([start]), given) if self.paired else (given, None)
        if self.longest is not None and prompt.length < self.longest:  # where there is no place left, it stops
            max_new = min(max_new, self.longest - prompt.length + 1)
        generator = torch.Generator().manual_seed(seed)
        written = sample(self.model, prompt, source, max_new=max_new, temperature=temperature, stop=stop, generator=generator)
        new = [int(token) for token in written]
        new = new[:-1] if new and new[-1] in stop else new
        return self.tokenizer.decode(new) if as_text else new

    def batch(self, ids: Sequence[int]) -> Inputs:
        """One text of ids."""
        try:
            tokens = torch.tensor([list(ids)])
        except (TypeError, ValueError, RuntimeError):  # nothing to count, rows within rows, a number too large
            raise ValueError(f"given {quoted(ids)}, expected a text or a list of ids, which are whole numbers") from None
        return Inputs(tokens)

    def check_reads_texts(self) -> None:
        tower = self.spec.encoder or self.spec.decoder
        if tower and tower.embed.reads == "patches":
            raise ValueError("this model reads pictures, not texts: ask it with load(...).logits(patches), batch × patches × pixels")


def load(path: str | Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False, copy: bool = False) -> Loaded:
    """A model with its tokenizer: a Hugging Face folder, a name on the Hub, a GGUF file, a run, a fairseq folder. Nothing is executed.

    Weights in safetensors are mapped: quick, but their file must stay as it is while the model is used. With `copy` it need not.
    """
    if dtype not in (None, *FLOATS):
        raise ValueError(f"dtype is {quoted(dtype)}, expected {', '.join(map(str, FLOATS))}, or none for what is stored")
    try:
        return read(path_of(path), dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    except OSError as error:
        raise FileError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def path_of(given: str | Path) -> Path:
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError(f"given {quoted(given)}, expected the path of a folder or a file")
    return Path(given)


def read(folder: Path, *, dtype: torch.dtype | None, allow_nonfinite: bool, copy: bool) -> Loaded:
    """What stands at a path, by its form."""
    if not os.path.exists(folder):
        if not is_name(str(folder)):
            raise FileError(f"there is no folder {folder}")
        folder = fetched(str(folder))
    if (latest := folder / "checkpoints" / "latest").is_file():  # of a run
        with latest.open(encoding="utf-8", errors="replace") as file:
            folder = inside(folder / "checkpoints", file.read(100))
    if folder.suffix == ".gguf" and not folder.is_dir():
        model, origin, tokenizer = read_file(folder, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Loaded(model, tokenizer, origin)
    if (folder.suffix == ".pt" and not folder.is_dir()) or folder.joinpath(*CHECKPOINT).is_file():
        path = folder.joinpath(*CHECKPOINT) if folder.is_dir() else folder
        config, weights = read_checkpoint(path)
        model, origin = assembled(path, config, weights, {}, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Loaded(model, None if path is folder else read_words(folder, config), origin)
    model, origin = read_folder(folder, dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    tokenizer = read_tokenizer(folder, origin.beside)
    return Loaded(model, tokenizer, origin, read_pooling(folder))


def export(model: Loaded | Model | str | Path, path: str | Path, to: str = "hf", form: str = "f32") -> None:
    """Writes a folder that transformers opens (`hf`), a file that llama.cpp opens (`gguf`), a folder that onnxruntime runs (`onnx`),
    or one that only `load` reads, whatever the model is (`manyheads`). `form` is how a GGUF file stores matrices: f32, f16 or q8_0.
    """
    if to not in FORMATS:
        raise SpecError(f"given {to!r}, expected one of {', '.join(FORMATS)}")
    path = path_of(path)
    check_free(path)
    if isinstance(model, str | Path):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path_of(model))):
            raise ValueError(f"{path} is within {model}, which is to be written there; name a place outside it")
        model = load(model)
    if not isinstance(model, Loaded | Model):
        raise ValueError(f"given a {type(model).__name__}, expected something loaded, a model of build, or a path")
    own = model if isinstance(model, Loaded) else Loaded(model)
    if to == "gguf":
        write_file(own.model, path, own.origin, own.tokenizer, form)
    elif to == "onnx":
        from manyheads.convert.onnx import write_onnx

        write_onnx(own.model, path, own.origin, own.tokenizer)
    else:
        write_folder(own.model, path, own.origin, own.tokenizer, own=to == "manyheads")
