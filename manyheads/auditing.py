"""What can be audited: a folder, a model loaded here, or a live model of transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint import Loaded, load
from manyheads.inspect.audit import Row, check
from manyheads.inspect.record import record
from manyheads.model.transformer import Transformer


def audit(subject: Any) -> list[Row]:
    """Every law of `manyheads.inspect.audit`, for a path, something loaded, one of our models or one of transformers'."""
    if isinstance(subject, str | Path):
        try:
            return [*check(Ours(load(subject, dtype=torch.float32), Path(subject)))]
        except ValueError as error:
            return [Row("the folder loads", "fault", None, str(error))]
    if isinstance(subject, Loaded):
        return [*check(Ours(subject))]
    if isinstance(subject, Transformer):
        return [*check(Ours(Loaded(subject)))]
    if hasattr(subject, "config") and hasattr(subject, "forward"):
        with settled(subject):
            return [*check(Theirs(subject))]
    raise ValueError(f"given a {type(subject).__name__}, expected a folder, something loaded, or a model")


class Ours:
    """A model of ours; its reference is transformers, where that is installed and the folder is known."""

    def __init__(self, loaded: Loaded, folder: Path | None = None) -> None:
        if not isinstance(loaded.model, Transformer):
            raise ValueError("only transformers are audited")
        self.loaded, self.model, self.folder = loaded, loaded.model.eval(), folder
        spec = loaded.spec
        if not isinstance(spec.vocab, int):
            raise ValueError("only models of text are audited")
        self.shape, self.vocab, self.causal = spec.shape, spec.vocab, self.model.writes
        towers = [tower for tower in (spec.encoder, spec.decoder) if tower]
        lengths = [part.longest for tower in towers for layer in tower.expanded() for part in (layer.position, layer.core)]
        self.longest = min((length for length in lengths if length is not None), default=None)

    def logits(self, ids: Tensor, *, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        return self.loaded.logits(ids, target, padding)

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        with record(self.model) as seen:
            self.logits(ids, target=target)
        return [attended.weights() for attended in seen]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        if not self.model.writes:
            return None
        state, steps = self.model.start(source, capacity=ids.shape[1]), []
        for i in range(ids.shape[1]):
            logits, state = self.model.step(ids[:, i : i + 1], state)
            steps.append(logits)
        return torch.cat(steps, dim=1)

    def tied(self) -> tuple[Tensor, Tensor] | None:
        if self.loaded.spec.head.kind != "tied" or self.model.table is None:
            return None
        return self.model.table, self.model.table  # a head borrows the table: it cannot come untied

    def tokens(self) -> int | None:
        return None if self.loaded.tokenizer is None else self.loaded.tokenizer.get_vocab_size(with_added_tokens=True)

    def elsewhere(self) -> tuple[str, Callable[[Tensor, Tensor | None], Tensor]] | None:
        try:
            import transformers
        except ImportError:
            return None
        if self.folder is None or self.loaded.origin is None:
            return None
        theirs = getattr(transformers, self.loaded.origin.architecture).from_pretrained(self.folder, dtype=torch.float32).eval()
        other = Theirs(theirs)
        return "transformers", lambda ids, target: other.logits(ids, target=target)


class Theirs:
    """A live model of transformers; its reference is ours, with its own weights."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.accepts = inspect.signature(model.forward).parameters
        paired = bool(getattr(self.config, "is_encoder_decoder", False))
        writes = bool(model.can_generate()) if hasattr(model, "can_generate") else False
        self.shape = "encoder–decoder" if paired else "decoder" if writes else "encoder"
        self.vocab, self.causal = int(self.config.vocab_size), writes
        # some count positions by looking for the padding token among the ids
        self.counts_itself = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
        self.longest = self._longest()

    def _longest(self) -> int | None:
        """The length of a table of positions, where it has one: a rotation goes on for ever."""
        if getattr(self.config, "rope_parameters", None) or not hasattr(self.config, "max_position_embeddings"):
            return None
        length = int(self.config.max_position_embeddings)
        return length - self.config.pad_token_id - 1 if self.counts_itself else length

    def logits(self, ids: Tensor, *, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        given: dict[str, Any] = {"input_ids": ids}
        if padding is not None:
            if isinstance(self.config.pad_token_id, int):
                given["input_ids"] = ids.masked_fill(padding, self.config.pad_token_id)
            given["attention_mask"] = (~padding).long()
            if "position_ids" in self.accepts and not self.counts_itself:
                given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        if target is not None:
            given["decoder_input_ids"] = target
        out = self.model(**given)
        names = ("logits", "prediction_logits", "last_hidden_state")
        return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        usual = self.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            given = {"input_ids": ids} | ({} if target is None else {"decoder_input_ids": target})
            out = self.model(**given, output_attentions=True)
        finally:
            self.model.set_attn_implementation(usual)
        names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        return [weights for name in names for weights in getattr(out, name, None) or () if weights is not None]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        if not self.causal:
            return None
        past, steps = None, []
        for i in range(ids.shape[1]):
            given: dict[str, Any] = {"past_key_values": past, "use_cache": True}
            given |= {"input_ids": ids[:, i : i + 1]} if source is None else {"input_ids": source, "decoder_input_ids": ids[:, i : i + 1]}
            out = self.model(**given)
            past = out.past_key_values
            steps.append(out.logits)
        return torch.cat(steps, dim=1)

    def tied(self) -> tuple[Tensor, Tensor] | None:
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if not getattr(self.config, "tie_word_embeddings", False) or head is None or table is None:
            return None
        return head.weight, table.weight

    def tokens(self) -> int | None:
        return None

    def elsewhere(self) -> tuple[str, Callable[[Tensor, Tensor | None], Tensor]] | None:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            ours = load(folder)
        return "manyheads", ours.logits


@contextmanager
def settled(model: Any) -> Iterator[None]:
    """A model in evaluation, and afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
