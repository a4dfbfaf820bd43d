"""From a spec to a model with weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from manyheads.model.init import initialise
from manyheads.model.ngram import Ngram
from manyheads.model.recurrent import Recurrent
from manyheads.model.spec import ModelSpec
from manyheads.model.transformer import Transformer
from manyheads.spec import SpecError

Model = Transformer | Recurrent | Ngram


@contextmanager
def countable() -> Iterator[None]:
    """Turns torch's complaint about a size past 2⁶³ into a sentence."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise SpecError(
            "one tensor of this model would hold more numbers than can be counted; make the model, batch or length smaller"
        ) from None


def outline(spec: ModelSpec) -> Model:
    """The model without memory: every shape is there, no number is."""
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"given a {type(spec).__name__}, expected a ModelSpec, as read and read_model make")
    if spec.vocab == "tokenizer":
        raise SpecError("is 'tokenizer': the number of tokens is known only with the data; give a number to build without", ("vocab",))
    vocab = spec.vocab or 0
    kind = Recurrent if spec.recurrent else Ngram if spec.ngram else Transformer
    with countable(), torch.device("meta"):
        return kind(spec, vocab)


def build(spec: ModelSpec, *, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """The model with its first weights: the same spec and seed give the same bits."""
    model = outline(spec).to(dtype).to_empty(device=device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with torch.no_grad():
            initialise(model, spec.init)
    return model
