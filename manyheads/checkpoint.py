"""A model with what belongs to it: loaded from a folder, asked in texts or ids, and written back out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.files import check_free
from manyheads.convert.folder import FLOATS, Origin, write_folder
from manyheads.convert.gguf_file import chat_template, write_file
from manyheads.convert.opened import opened
from manyheads.convert.pooling import Pooling
from manyheads.convert.tokenizer import read_rules
from manyheads.generate.sample import Rules, Writing, sample
from manyheads.generate.search import search
from manyheads.inspect.record import record_states
from manyheads.model.build import Model, usable
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.parts.batch import Inputs
from manyheads.spec import SpecError, quoted

PLACES = 2048  # in a batch that is asked, with its padding, a place for each beam
FORMATS = ("hf", "gguf", "onnx", "manyheads")


class TextError(ValueError):
    """A text that cannot be read, and which of those given it is."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


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
        tower = self.spec.encoder or self.spec.decoder
        return tower.longest if tower else None

    @property
    def longest_written(self) -> int | None:
        """The most tokens it has places for in what it writes; None where there is no such limit."""
        return self.spec.decoder.longest if self.spec.decoder else None

    @property
    def paired(self) -> bool:
        """Whether it reads a source beside its target."""
        return self.spec.shape == "encoder–decoder" or (self.spec.recurrent is not None and self.spec.recurrent.source)

    @property
    def objective(self) -> str | None:
        """What it was trained for, where a run says so."""
        return self.origin.config.get("objective") if self.origin else None

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
        return given.to(self.device)

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
        return self.padded(self.ids(texts))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text as its tokens; of a run, no more of them than it read of a text in training."""
        return [encoding.ids for encoding in self.encodings(texts)]

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The same as the tokenizer gives them; what was cut off is `overflowing`."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer beside this model: give ids as numbers")
        check_texts(texts)
        found: list[Any] = self.tokenizer.encode_batch(list(texts))
        for place, encoding in enumerate(found):
            self.check_length(len(encoding.ids), place)
        return found

    def check_length(self, count: int, place: int = 0) -> None:
        if not count:
            raise TextError("there is nothing to read: every text needs at least one token", place)
        if self.longest is not None and count > self.longest:
            raise TextError(f"the text has {count:,} tokens, and the model has places for {self.longest:,}: it is too long", place)

    def padded(self, rows: Sequence[Sequence[int]], *, left: bool = False) -> Inputs:
        """Rows side by side, filled up on the right or on the left."""
        longest = max(map(len, rows), default=0)
        fill = [[True] * (longest - len(row)) for row in rows]
        ids = [[*map(int, gap), *row] if left else [*row, *map(int, gap)] for gap, row in zip(fill, rows, strict=True)]
        padding = [[*gap, *[False] * len(row)] if left else [*[False] * len(row), *gap] for gap, row in zip(fill, rows, strict=True)]
        return self.there(Inputs(torch.tensor(ids), padding=torch.tensor(padding) if any(fill) else None))

    @torch.no_grad()
    def embed(self, texts: str | Sequence[str]) -> Tensor:
        """One vector a text: what the head gives, where that is a vector; otherwise the mean over its tokens, or what the folder says."""
        self.check_reads_texts()
        return self.pooled(self.encode([texts] if isinstance(texts, str) else texts))

    def pooled(self, given: Inputs) -> Tensor:
        if not isinstance(self.model, Transformer) or self.spec.shape not in (("encoder", "decoder") if self.pooling else ("encoder",)):
            raise ValueError(
                f"a vector a text is what an encoder gives, or a decoder whose folder says how; this model is {self.spec.shape}"
            )
        return self.model.vectors(given, self.pooling.pool if self.pooling else None)

    def generate(
        self, text: str | Sequence[int] | Sequence[str], *, max_new: int = 64, temperature: float = 0.0, seed: int = 0,
        start: int | None = None, beams: int = 1, penalty: float = 0.6,
    ) -> Any:  # fmt: skip
        """What the model writes after a text, or in answer to it, which begins with `start` or as the checkpoint says.

        A text for a text, ids for ids, a list for a list of texts, each as if it were asked alone. One beam takes the likeliest token
        each time, or draws one with a temperature; more look for the likeliest text, with `penalty` the α of `search`.
        """
        writing = Writing(max_new, temperature, seed, beams, penalty, start)
        self.check_reads_texts()
        if isinstance(text, str):
            return self.generate([text], **vars(writing))[0]
        if isinstance(text, Sequence) and text and all(isinstance(one, str) for one in text):
            answers = dict(self.write(self.ids(text), writing))  # type: ignore[arg-type]
            return [self.tokenizer.decode(answers[i]) for i in range(len(text))]
        ((_, written),) = self.write(self.batch(text).tokens.tolist(), writing)  # type: ignore[arg-type]
        return written

    def write(self, rows: Sequence[list[int]], writing: Writing) -> Iterator[tuple[int, list[int]]]:
        """What the model writes for each row of ids, with the row's number, as it comes: rows of like length go together."""
        rules = read_rules(self.origin.config, self.origin.beside) if self.origin else Rules()
        start = rules.start if writing.start is None else writing.start
        if self.paired and start is None:
            raise ValueError("nothing says which token begins an answer: give start=..., its id")
        begin = self.batch([start]).tokens if self.paired else None  # type: ignore[list-item]
        alike: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            alike.setdefault(self.room(len(row), writing.max_new), []).append(i)
        for (max_new, _), group in alike.items():
            for batch in batches([len(rows[i]) for i in group], PLACES // writing.beams):
                chosen = [group[i] for i in batch]
                given = self.padded([rows[i] for i in chosen], left=not self.paired)
                chance = [chance_of(writing.seed, rows[i], self.device) for i in chosen]
                prompt, source = (given, None) if begin is None else (Inputs(begin.expand(len(chosen), -1)), given)
                found = written(self.model, prompt, source, rules=rules, writing=replace(writing, max_new=max_new), chance=chance)
                yield from zip(chosen, found, strict=True)

    def room(self, length: int, max_new: int) -> tuple[int, int]:
        """How many tokens may follow so many, up to where there is no place left; and what else must be alike in a batch."""
        length = 1 if self.paired else length
        if self.longest_written is not None and length <= self.longest_written:
            max_new = min(max_new, self.longest_written - length + 1)
        tower = self.spec.decoder
        by_span = tower is not None and any(layer.position.asks_span for layer in tower.expanded())
        return max_new, length if by_span else 0

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


def check_texts(texts: Sequence[str]) -> None:
    for place, text in enumerate(texts):
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            raise TextError(f"given {quoted(text)}, expected a text of Unicode characters", place)


def written(
    model: Model, prompt: Inputs, source: Inputs | None, *, rules: Rules, writing: Writing, chance: Sequence[torch.Generator]
) -> list[list[int]]:
    """What follows each text of one batch, without the token that ends it."""
    if writing.beams > 1:
        found = search(model, prompt, source, beams=writing.beams, penalty=writing.penalty, max_new=writing.max_new, rules=rules)
    else:
        tokens = sample(model, prompt, source, max_new=writing.max_new, temperature=writing.temperature, rules=rules, generator=chance)
        found = torch.stack(list(tokens), dim=1).tolist()
    ends = [next((i for i, token in enumerate(row) if token in rules.stop), len(row)) for row in found]
    return [row[:end] for row, end in zip(found, ends, strict=True)]


def chance_of(seed: int, ids: Sequence[int], device: torch.device) -> torch.Generator:
    """The chance of one text: a function of the seed and the text, whoever else is asked beside it."""
    drawn = hashlib.blake2b(f"{seed} {ids}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(drawn, "little") >> 1)


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Which rows share a batch: those of like length, the longest first, so many places at most with the padding, or one row."""
    order, begin = sorted(range(len(lengths)), key=lambda i: -lengths[i]), 0
    while begin < len(order):
        end = begin + max(1, most // max(1, lengths[order[begin]]))
        yield order[begin:end]
        begin = end


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
    found = opened(path_of(path), dtype=dtype, allow_nonfinite=allow_nonfinite, copy=copy)
    found.model.to(device)
    return Loaded(found.model, found.tokenizer, found.origin, found.pooling, found.folder)


def path_of(given: str | Path) -> Path:
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError(f"given {quoted(given)}, expected the path of a folder or a file")
    return Path(given)


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
