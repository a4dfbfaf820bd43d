"""A model with what belongs to it: loaded from a folder, asked in texts or ids, and written back out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from manyheads.convert.tokenizer import read_rules, read_tokenizer
from manyheads.generate.sample import Rules, sample
from manyheads.inspect.record import record_states
from manyheads.model.build import Model, usable
from manyheads.model.spec import ModelSpec, TowerSpec
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
    folder: Path | None = None  # of transformers' form, that it was read from

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def device(self) -> torch.device:
        """Where the model is, and where what it is asked goes."""
        return next(self.model.parameters()).device

    @property
    def chat_template(self) -> str | None:
        """How a conversation is written as one text, where the checkpoint says so."""
        return chat_template(self.origin.beside) if self.origin else None

    @property
    def longest(self) -> int | None:
        """The most tokens it has places for in what it reads, a source where there is one; None where there is no such limit."""
        return longest(self.spec.encoder or self.spec.decoder)

    @property
    def longest_written(self) -> int | None:
        """The most tokens it has places for in what it writes; None where there is no such limit."""
        return longest(self.spec.decoder)

    @property
    def paired(self) -> bool:
        """Whether it reads a source beside its target."""
        return self.spec.shape in ("encoder–decoder", "recurrent")

    @torch.no_grad()
    def logits(self, ids: Tensor, target: Tensor | None = None, padding: Tensor | None = None, **more: Tensor) -> Tensor:
        """B×L×V, or what the head gives. Of an encoder–decoder, `ids` are the source's, and padding too; True at padded places."""
        given = self.there(Inputs(ids, padding=padding, **more))  # type: ignore[arg-type]
        if not self.paired:
            if target is not None:
                raise ValueError(f"a target was given beside the ids, but the model is only {self.spec.shape}")
            return self.model(given)
        if target is None:
            raise ValueError(f"this model is {self.spec.shape}: give a source and a target")
        return self.model(self.there(Inputs.of(target)), given)

    def there(self, given: Inputs) -> Inputs:
        """A batch where the model is."""
        moved: dict[str, Any] = {name: value.to(self.device) for name, value in vars(given).items() if isinstance(value, Tensor)}
        return replace(given, **moved)

    @torch.no_grad()
    def hidden(self, ids: Tensor, target: Tensor | None = None, padding: Tensor | None = None, **more: Tensor) -> list[Tensor]:
        """The embeddings and what every layer makes of them, the last one behind the closing norm; of both towers, one after the other."""
        if not isinstance(self.model, Transformer):
            raise ValueError(f"this model is {self.spec.shape}, and only a transformer has layers to look into")
        with record_states(self.model) as states:
            self.logits(ids, target, padding, **more)
        return states

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
        return self.there(Inputs(ids, padding=padding if padding.any() else None))

    @torch.no_grad()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """One vector a text: what the head gives, where that is a vector; otherwise the mean over its tokens, or what the folder says."""
        self.check_reads_texts()
        given = self.encode([texts] if isinstance(texts, str) else texts)
        if not isinstance(self.model, Transformer) or self.spec.shape not in (("encoder", "decoder") if self.pooling else ("encoder",)):
            raise ValueError(
                f"a vector a text is what an encoder gives, or a decoder whose folder says how; this model is {self.spec.shape}"
            )
        if self.spec.head.kind == "vector" and self.pooling is None:
            return self.model(given)
        states, padding = self.model.states(given)
        return (self.pooling or Pooling()).pool(states, padding)

    def generate(
        self, text: str | Sequence[int], *, max_new: int = 64, temperature: float = 0.0, seed: int = 0, start: int | None = None
    ) -> Any:
        """What the model writes after the text, or in answer to it, which begins with `start` or as the checkpoint says; ids for ids."""
        if type(max_new) is not int or not 1 <= max_new <= LARGEST:
            raise ValueError(f"max_new is {quoted(max_new)}, expected a whole number from 1 to {LARGEST:,}")
        if type(temperature) not in (int, float) or not (temperature == 0 or 1e-6 <= temperature <= 1e6):
            raise ValueError(f"temperature is {quoted(temperature)}, expected 0 or a number from 1e-6 to 1e6")
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise ValueError(f"seed is {quoted(seed)}, expected a whole number from 0")
        self.check_reads_texts()
        as_text = isinstance(text, str)
        given = self.encode([text]) if isinstance(text, str) else self.batch(text)
        rules = read_rules(self.origin.config, self.origin.beside) if self.origin else Rules()
        start = rules.start if start is None else start
        prompt, source = given, None
        if self.paired:
            if start is None:
                raise ValueError("nothing says which token begins an answer: give start=..., its id")
            prompt, source = self.batch([start]), given
        if self.longest_written is not None and prompt.length <= self.longest_written:  # where there is no place left, it stops
            max_new = min(max_new, self.longest_written - prompt.length + 1)
        generator = torch.Generator(self.device).manual_seed(seed)
        written = sample(self.model, prompt, source, max_new=max_new, temperature=temperature, rules=rules, generator=generator)
        new = [int(token) for token in written]
        new = new[:-1] if new and new[-1] in rules.stop else new
        return self.tokenizer.decode(new) if as_text else new

    def batch(self, ids: Sequence[int]) -> Inputs:
        """One text of ids."""
        try:
            tokens = torch.tensor([list(ids)])
        except (TypeError, ValueError, RuntimeError):  # nothing to count, rows within rows, a number too large
            raise ValueError(f"given {quoted(ids)}, expected a text or a list of ids, which are whole numbers") from None
        return self.there(Inputs(tokens))

    def check_reads_texts(self) -> None:
        tower = self.spec.encoder or self.spec.decoder
        if tower and tower.embed.reads == "patches":
            raise ValueError("this model reads pictures, not texts: ask it with load(...).logits(patches), batch × patches × pixels")


def longest(tower: TowerSpec | None) -> int | None:
    """The most tokens that every layer of a tower has places for."""
    parts = [part for layer in tower.expanded() for part in (layer.position, layer.core)] if tower else []
    return min((part.longest for part in parts if part.longest is not None), default=None)


def load(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", allow_nonfinite: bool = False,
    copy: bool = False,
) -> Loaded:  # fmt: skip
    """A model with its tokenizer: a Hugging Face folder, a name on the Hub, a GGUF file, a run, a fairseq folder. Nothing is executed.

    Weights in safetensors are mapped: quick, but their file must stay as it is while the model is used. With `copy` it need not.
    """
    if dtype not in (None, *FLOATS):
        raise ValueError(f"dtype is {quoted(dtype)}, expected {', '.join(map(str, FLOATS))}, or none for what is stored")
    device = usable(device)
    try:
        loaded = read(path_of(path), dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    except OSError as error:
        raise FileError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    loaded.model.to(device)
    return loaded


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
    return Loaded(model, tokenizer, origin, read_pooling(folder), folder)


def export(model: Loaded | Model | str | Path, path: str | Path, to: str = "hf", form: str | None = None) -> None:
    """Writes a folder that transformers opens (`hf`), a file that llama.cpp opens (`gguf`), a folder that onnxruntime runs (`onnx`),
    or one that only `load` reads, whatever the model is (`manyheads`). `form` is how a GGUF file stores matrices: f32, f16 or q8_0.
    """
    if to not in FORMATS:
        raise SpecError(f"given {to!r}, expected one of {', '.join(FORMATS)}")
    if form is not None and to != "gguf":
        raise SpecError(f"form is {quoted(form)}, and only a GGUF file has one")
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
        write_file(own.model, path, own.origin, own.tokenizer, "f32" if form is None else form)
    elif to == "onnx":
        from manyheads.convert.onnx import write_onnx

        write_onnx(own.model, path, own.origin, own.tokenizer)
    else:
        write_folder(own.model, path, own.origin, own.tokenizer, own=to == "manyheads")
