"""What can be audited: a folder, a model loaded here, or a live model of transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint import Loaded, load
from manyheads.inspect.audit import Row, check, target_of, texts
from manyheads.model.transformer import Transformer
from manyheads.parts.embed import PatchesSpec
from manyheads.parts.head import MaskedSpec, TiedSpec
from manyheads.parts.record import Attended, record

NOT_TIED = "no weights are claimed to be tied"


def audit(subject: Any) -> list[Row]:
    """Every law of `manyheads.inspect.audit`, for a path, something loaded, one of our models or one of transformers'."""
    if isinstance(subject, str | Path):
        loaded = load(subject, dtype=torch.float32)
        return [*check(Ours(loaded, loaded.folder))]
    if isinstance(subject, Loaded):
        return [*check(Ours(subject))]
    if isinstance(subject, Transformer):
        return [*check(Ours(Loaded(subject)))]
    if hasattr(subject, "config") and hasattr(subject, "forward"):
        with settled(subject):
            return [*check(Theirs(subject))]
    raise ValueError(f"given a {type(subject).__name__}, expected a folder, something loaded, or a model")


def directed(loaded: Loaded) -> bool:
    """Whether no token sees its future."""
    decoder = loaded.spec.decoder
    return decoder is not None and decoder.embed.reads != "memory" and all(layer.mask.causal for layer in decoder.expanded())


class Ours:
    """A model of ours; its reference is transformers, where that is installed and the folder is known."""

    def __init__(self, loaded: Loaded, folder: Path | None = None) -> None:
        if not isinstance(loaded.model, Transformer):
            raise ValueError("only transformers are audited")
        self.loaded, self.model, self.folder = loaded, loaded.model.eval(), folder
        spec = loaded.spec
        self.shape, self.causal = spec.shape, directed(loaded)
        self.vocab = min((count for count in (spec.vocab, spec.source_vocab) if isinstance(count, int)), default=0)  # known on both sides
        self.longest, self.longest_written, self.a_token = loaded.longest, loaded.longest_written, spec.head.a_token
        self.picture: tuple[int, ...] | None = None
        embed = spec.encoder.embed if spec.encoder else None
        if isinstance(embed, PatchesSpec):
            across = embed.side * (isqrt(self.longest - embed.first) if self.longest else 3)
            self.picture, self.cut = (embed.channels, across, across), embed.cut
            ratio = loaded.origin.config.get("mask_ratio") if loaded.origin else None
            self.hidden = ratio if isinstance(ratio, int | float) else 0.75  # the share that a masked autoencoder is not shown

    def logits(self, ids: Tensor, *, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        ids = ids.to(self.loaded.device)
        if self.picture:
            patches = self.cut(ids)
            shown = patches[:, : int(patches.shape[1] * (1 - self.hidden))]
            return self.loaded.logits(shown, patches) if self.loaded.paired else self.loaded.logits(patches)
        return self.loaded.logits(ids, target, padding)

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        with record(self.model) as seen:
            self.logits(ids, target=target)
        return [attended.weights() for attended in seen]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        if not self.model.writes:
            return None
        ids, source = ids.to(self.loaded.device), None if source is None else source.to(self.loaded.device)
        state, steps = self.model.start(source, capacity=ids.shape[1]), []
        for i in range(ids.shape[1]):
            logits, state = self.model.step(ids[:, i : i + 1], state)
            steps.append(logits)
        return torch.cat(steps, dim=1)

    def silent(self, ids: Tensor, target: Tensor | None) -> int:
        with record(self.model) as seen:
            self.logits(ids, target=target)
        return sum(map(self._silent, seen))

    def _silent(self, attended: Attended) -> int:
        """The heads of one attention whose values, times their columns of W_O, are nothing."""
        attention: Any = self.model.get_submodule(attended.name)
        weight = attention.output.weight
        heads = weight.shape[1] // attended.value.shape[-1]
        value_BHMK = attended.value.repeat_interleave(heads // attended.value.shape[1], dim=1)
        added_BHMD = torch.einsum("bhmk,dhk->bhmd", value_BHMK, weight.unflatten(1, (heads, -1)))
        return int((added_BHMD == 0).all(dim=3).all(dim=2).all(dim=0).sum())

    def tied(self) -> tuple[Tensor, Tensor] | str:
        head = self.loaded.spec.head
        tied = isinstance(head.scores if isinstance(head, MaskedSpec) else head, TiedSpec)
        return "head and embedding are one tensor by construction" if tied else NOT_TIED

    def tokens(self) -> int | None:
        return None if self.loaded.tokenizer is None else self.loaded.tokenizer.get_vocab_size(with_added_tokens=True)

    def elsewhere(self) -> tuple[str, Callable[[Tensor, Tensor | None], Tensor]] | None:
        try:
            import transformers
        except ImportError:
            return None
        if self.folder is None or self.loaded.origin is None or not hasattr(transformers, self.loaded.origin.architecture):
            return None
        bars, shown = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
        try:
            bars.disable_progress_bar()  # type: ignore[no-untyped-call]
            other = Theirs(getattr(transformers, self.loaded.origin.architecture).from_pretrained(self.folder, dtype=torch.float32).eval())
        finally:
            if shown:
                bars.enable_progress_bar()  # type: ignore[no-untyped-call]
        return "transformers", lambda ids, target: other.logits(ids, target=target)


class Theirs:
    """A live model of transformers; its reference is ours, with its own weights."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.accepts = inspect.signature(model.forward).parameters
        paired = bool(getattr(self.config, "is_encoder_decoder", False))
        writes = bool(model.can_generate()) if hasattr(model, "can_generate") else False
        self.causal = writes or any(getattr(module, "is_causal", False) for module in model.modules())  # a tower alone writes nothing
        self.shape = "encoder–decoder" if paired else "decoder" if self.causal else "encoder"
        self.vocab = int(getattr(self.config, "vocab_size", 0))
        self.reads = getattr(model, "main_input_name", "input_ids")
        if self.reads not in ("input_ids", "pixel_values"):
            raise ValueError(f"only models of texts and pictures are audited, and this one reads {self.reads}")
        self.picture = None if self.reads == "input_ids" else (self.config.num_channels, *2 * [self.config.image_size])
        # some count positions by looking for the padding token among the ids
        self.counts_itself = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
        self.longest = self.longest_written = self._longest()

    @cached_property
    def a_token(self) -> bool:
        return self.logits(texts(self, 1), target=target_of(self, 1)).dim() == 3

    def _longest(self) -> int | None:
        """The length of a table of positions, where it has one: a rotation goes on for ever."""
        if getattr(self.config, "rope_parameters", None) or not hasattr(self.config, "max_position_embeddings"):
            return None
        length = int(self.config.max_position_embeddings)
        return length - self.config.pad_token_id - 1 if self.counts_itself else length

    def given(self, ids: Tensor, target: Tensor | None) -> dict[str, Any]:
        given = {self.reads: ids.to(self.model.device)} | ({} if target is None else {"decoder_input_ids": target.to(self.model.device)})
        if "noise" in self.accepts:  # which patches a masked autoencoder is shown: always the first
            given["noise"] = torch.arange((self.config.image_size // self.config.patch_size) ** 2, device=self.model.device).expand(
                len(ids), -1
            )
        return given

    def logits(self, ids: Tensor, *, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        given = self.given(ids, target)
        if padding is not None:
            padding = padding.to(self.model.device)
            if isinstance(self.config.pad_token_id, int):
                given["input_ids"] = given["input_ids"].masked_fill(padding, self.config.pad_token_id)
            given["attention_mask"] = (~padding).long()
            if "position_ids" in self.accepts and not self.counts_itself:
                given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return answer(self.model(**given))

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        usual = self.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            out = self.model(**self.given(ids, target), output_attentions=True)
        finally:
            self.model.set_attn_implementation(usual)
        names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        return [weights for name in names for weights in getattr(out, name, None) or () if weights is not None]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        if not self.causal or not self.a_token:
            return None
        ids, source = ids.to(self.model.device), None if source is None else source.to(self.model.device)
        past, steps = None, []
        for i in range(ids.shape[1]):
            given: dict[str, Any] = {"past_key_values": past, "use_cache": True}
            given |= {"input_ids": ids[:, i : i + 1]} if source is None else {"input_ids": source, "decoder_input_ids": ids[:, i : i + 1]}
            out = self.model(**given)
            past = out.past_key_values
            steps.append(answer(out))
        return torch.cat(steps, dim=1)

    @cached_property
    def ours(self) -> Ours:
        """The same weights in a model of ours."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return Ours(load(folder, copy=True))

    def silent(self, ids: Tensor, target: Tensor | None) -> int | None:
        try:
            return self.ours.silent(ids, target)
        except ValueError:  # of a family that is not known here
            return None

    def tied(self) -> tuple[Tensor, Tensor] | str:
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if not getattr(self.config, "tie_word_embeddings", False) or head is None or table is None:
            return NOT_TIED
        return head.weight, table.weight

    def tokens(self) -> int | None:
        return None

    def elsewhere(self) -> tuple[str, Callable[[Tensor, Tensor | None], Tensor]] | None:
        try:
            ours = self.ours
        except ValueError:  # of a family that is not known here
            return None
        return "manyheads", lambda ids, target: ours.logits(ids, target=target)


def answer(out: Any) -> Tensor:
    """What a model of transformers says, under the first of its names."""
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


@contextmanager
def settled(model: Any) -> Iterator[None]:
    """A model in evaluation, and afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
