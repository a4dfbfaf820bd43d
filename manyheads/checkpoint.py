"""A model with what belongs to it: loaded from a folder, asked in texts or ids, and written back out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.convert.fairseq import CHECKPOINT, read_checkpoint, read_words
from manyheads.convert.files import FileError
from manyheads.convert.folder import Origin, assembled, read_folder, read_gguf, write_folder
from manyheads.convert.gguf import tokenizer_of
from manyheads.convert.pooling import Pooling, read_pooling
from manyheads.convert.tokenizer import read_tokenizer, special_ids
from manyheads.generate.sample import sample
from manyheads.model.build import Model
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.parts.batch import Inputs
from manyheads.spec import SpecError

FORMATS = ("hf", "onnx")


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
    def paired(self) -> bool:
        """Whether it reads a source beside its target."""
        return self.spec.shape in ("encoder–decoder", "recurrent")

    @torch.no_grad()
    def logits(self, ids: Tensor, target: Tensor | None = None, padding: Tensor | None = None, **more: Tensor) -> Tensor:
        """B×L×V, or what the head gives. Of an encoder–decoder, `ids` are the source's, and padding too; True at padded places."""
        given = Inputs(ids, padding=padding, **more)  # type: ignore[arg-type]
        if not self.paired:
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
        given = self.encode([texts] if isinstance(texts, str) else texts)
        if not isinstance(self.model, Transformer) or self.spec.shape != "encoder":
            raise ValueError(f"a vector a text is what an encoder gives; this model is {self.spec.shape}")
        states, padding = self.model.states(given)
        return (self.pooling or Pooling()).pool(states, padding)

    def generate(self, text: str | Sequence[int], *, max_new: int = 64, temperature: float = 0.0, seed: int = 0) -> Any:
        """What the model writes after the text, or in answer to it; ids for ids."""
        if not 0 <= temperature <= 1e6 or 0 < temperature < 1e-6 or max_new < 1:
            raise ValueError(f"given {max_new} tokens at temperature {temperature}, expected at least 1, and 0 or a number from 1e-6")
        as_text = isinstance(text, str)
        given = self.encode([text]) if isinstance(text, str) else Inputs(torch.tensor([list(text)]))
        stop, start = special_ids(self.origin.config if self.origin else {})
        prompt, source = (Inputs(torch.tensor([[start]])), given) if self.paired else (given, None)
        generator = torch.Generator().manual_seed(seed)
        written = sample(self.model, prompt, source, max_new=max_new, temperature=temperature, stop=stop, generator=generator)
        new = [int(token) for token in written]
        new = new[:-1] if new and new[-1] in stop else new
        return self.tokenizer.decode(new) if as_text else new


def load(path: str | Path, *, dtype: torch.dtype | None = None, allow_nonfinite: bool = False) -> Loaded:
    """A Hugging Face folder, a GGUF file or a fairseq folder as a model with its tokenizer. Nothing in it is executed."""
    folder = Path(path)
    if not folder.exists():
        raise FileError(f"there is no folder {folder}")
    if folder.suffix == ".gguf":
        model, origin, file = read_gguf(folder, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Loaded(model, tokenizer_of(file), origin)
    if folder.suffix == ".pt" or folder.joinpath(*CHECKPOINT).is_file():
        path = folder if folder.suffix == ".pt" else folder.joinpath(*CHECKPOINT)
        config, weights = read_checkpoint(path)
        model, origin = assembled(path, config, weights, {}, dtype=dtype, allow_nonfinite=allow_nonfinite)
        return Loaded(model, None if path is folder else read_words(folder, config), origin)
    model, origin = read_folder(folder, dtype=dtype, allow_nonfinite=allow_nonfinite)
    tokenizer = read_tokenizer(folder, origin.beside)
    return Loaded(model, tokenizer, origin, read_pooling(folder))


def export(loaded: Loaded | Model, folder: str | Path, to: str = "hf") -> None:
    """Writes a folder that transformers (`hf`) or onnxruntime (`onnx`) opens with the same logits."""
    if to not in FORMATS:
        raise SpecError(f"given {to!r}, expected one of {', '.join(FORMATS)}")
    own = loaded if isinstance(loaded, Loaded) else Loaded(loaded)
    if to == "hf":
        write_folder(own.model, Path(folder), own.origin)
    else:
        from manyheads.convert.onnx import write_onnx

        write_onnx(own.model, Path(folder), own.origin, own.tokenizer)
