"""One interface for auditing models of this package and of transformers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.loading import load
from manyheads.errors import UnsupportedError
from manyheads.model.recording import RecordedAttention, record
from manyheads.model.transformer import as_transformer
from manyheads.parts.attention import Attention

LENGTH = 12  # tokens of a random input
NOT_TIED = "the config ties no weights"

ReferenceLogits = Callable[[Tensor, Tensor | None], Tensor]  # (ids, target) → logits


class RandomInputs:
    """Random inputs of the sizes that a model reads."""

    has_source: bool  # whether it is an encoder–decoder
    vocab: int
    max_positions: int | None  # limit of the input, or of the source if there is one; None if there is no limit
    max_target_positions: int | None
    image_size: tuple[int, ...] | None  # channels, height and width, if it reads images

    def random_ids(self, batch: int = 2, length: int = LENGTH, *, seed: int = 0, is_target: bool = False) -> Tensor:
        """Random images, or random tokens within the number of positions."""
        rng = torch.Generator().manual_seed(seed)
        if self.image_size:
            return torch.randn(batch, *self.image_size, generator=rng)
        limit = self.max_target_positions if is_target else self.max_positions
        return torch.randint(0, self.vocab, (batch, length if limit is None else min(length, limit)), generator=rng)

    def random_target(self, batch: int = 2) -> Tensor | None:
        """A random target for an encoder–decoder of texts; None for other models."""
        if not self.has_source or self.image_size:
            return None
        return self.random_ids(batch, 7, seed=1, is_target=True)

    def random_source(self) -> Tensor | None:
        return self.random_ids(seed=2) if self.has_source else None


class ManyheadsModel(RandomInputs):
    """A model of this package. Its reference implementation is transformers, if installed and able to read `folder`."""

    def __init__(self, checkpoint: Checkpoint, folder: Path | None = None) -> None:
        self.checkpoint, self.model, self.folder = checkpoint, as_transformer(checkpoint.model, "audit"), folder
        spec, decoder = checkpoint.spec, checkpoint.spec.decoder
        self.has_source, self.per_token = spec.has_source, spec.head.per_token
        self.causal = (
            decoder is not None
            and decoder.embed.reads != "memory"
            and all(layer.mask.causal for layer in decoder.expanded_layers())
        )
        self.vocab = min((size for size in (spec.vocab, spec.source_vocab) if isinstance(size, int)), default=0)
        self.max_positions = checkpoint.max_positions
        self.max_target_positions = checkpoint.max_target_positions
        self.image_size = None
        if spec.encoder and spec.encoder.embed.reads == "patches":
            embed: Any = spec.encoder.embed
            self.embed = embed
            side = embed.side * (isqrt(self.max_positions - embed.class_token) if self.max_positions else 3)
            self.image_size = (embed.channels, side, side)

    def logits(self, ids: Tensor, *, padding_mask: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        ids = ids.to(self.checkpoint.device)
        if not self.image_size:
            return self.checkpoint.logits(ids, target, padding_mask)
        patches = self.embed.patchify(ids)
        if not self.checkpoint.has_source:
            return self.checkpoint.logits(patches)
        ratio = self.checkpoint.config.get("mask_ratio")
        ratio = ratio if isinstance(ratio, int | float) else 0.75
        return self.checkpoint.logits(patches[:, : int(patches.shape[1] * (1 - ratio))], patches)

    def record_attentions(self, ids: Tensor, target: Tensor | None) -> Sequence[RecordedAttention]:
        with record(self.model) as tape:
            self.logits(ids, target=target)
        return tape

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        """The weights of every attention of one forward pass, B×H×L×M; empty if the model does not return them."""
        return [attention.weights() for attention in self.record_attentions(ids, target)]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        """The logits of decoding token by token with a cache; None if the model does not generate."""
        if not self.model.can_generate:
            return None
        ids, source = ids.to(self.checkpoint.device), None if source is None else source.to(self.checkpoint.device)
        state, steps = self.model.start(source, capacity=ids.shape[1]), []
        for i in range(ids.shape[1]):
            logits, state = self.model.step(ids[:, i : i + 1], state)
            steps.append(logits)
        return torch.cat(steps, dim=1)

    def count_dead_heads(self, ids: Tensor, target: Tensor | None) -> int:
        """The number of heads whose contribution is zero for every token."""
        return sum(map(self._dead_heads, self.record_attentions(ids, target)))

    def _dead_heads(self, recorded_attention: RecordedAttention) -> int:
        """The number of heads of one attention whose values W_O maps to zero."""
        (weight,) = (
            module.output.weight
            for module in self.model.modules()
            if isinstance(module, Attention) and module.core is recorded_attention.core
        )
        value = recorded_attention.value
        assert value is not None
        heads = weight.shape[1] // value.shape[-1]
        value_BHMK = value.repeat_interleave(heads // value.shape[1], dim=1)
        output_BHMD = torch.einsum("bhmk,dhk->bhmd", value_BHMK, weight.unflatten(1, (heads, -1)))
        return int((output_BHMD == 0).all(dim=3).all(dim=2).all(dim=0).sum())

    def tied(self) -> tuple[Tensor, Tensor] | str:
        """Two weights that should be equal by the config, or the reason why there are none."""
        is_tied = self.checkpoint.spec.head.is_tied
        return "head and embedding are one tensor by construction" if is_tied else NOT_TIED

    def vocabulary_sizes(self) -> tuple[int, int] | None:
        """The sizes of the vocabularies of the tokenizer and of the input that it encodes; None without a tokenizer."""
        tokenizer, spec = self.checkpoint.tokenizer, self.checkpoint.spec
        size = self.vocab if spec.source_vocab is None else spec.source_vocab
        return None if tokenizer is None else (tokenizer.get_vocab_size(with_added_tokens=True), size)

    def reference_implementation(self) -> tuple[str, ReferenceLogits] | None:
        """The name of another library and a function that computes the logits of the same model with it."""
        metadata = self.checkpoint.metadata
        if self.folder is None or metadata is None:
            return None
        try:
            import transformers
        except ImportError:
            return None
        if not hasattr(transformers, metadata.architecture):
            return None
        architecture = getattr(transformers, metadata.architecture)
        with progress_bars_off(transformers.utils.logging):
            other = TransformersModel(architecture.from_pretrained(self.folder, dtype=torch.float32).eval())
        return "transformers", lambda ids, target: other.logits(ids, target=target)


@contextmanager
def progress_bars_off(logging: Any) -> Iterator[None]:
    """Hides the progress bars of transformers."""
    enabled = logging.is_progress_bar_enabled()
    try:
        logging.disable_progress_bar()
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


class TransformersModel(RandomInputs):
    """A model of transformers in memory. Its reference implementation is this package, with the same weights."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.arguments = inspect.signature(model.forward).parameters
        can_generate = bool(model.can_generate()) if hasattr(model, "can_generate") else False
        # a model without a head cannot generate, but its attention modules have is_causal
        self.causal = can_generate or any(getattr(module, "is_causal", False) for module in model.modules())
        self.has_source = bool(getattr(self.config, "is_encoder_decoder", False))
        self.vocab = int(getattr(self.config, "vocab_size", 0))
        self.input_name = getattr(model, "main_input_name", "input_ids")
        if self.input_name not in ("input_ids", "pixel_values"):
            raise UnsupportedError(f"audit supports models of texts and images; this one reads {self.input_name}")
        self.image_size = None
        if self.input_name == "pixel_values":
            self.image_size = (self.config.num_channels, self.config.image_size, self.config.image_size)
        # some models compute positions from the padding tokens among the ids
        self.derives_positions = any(
            hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()
        )
        self.max_positions = self.max_target_positions = self._max_positions()

    @cached_property
    def per_token(self) -> bool:
        return self.logits(self.random_ids(1), target=self.random_target(1)).dim() == 3

    def _max_positions(self) -> int | None:
        """The length of the position table; None without one, as RoPE has no limit."""
        if getattr(self.config, "rope_parameters", None) or not hasattr(self.config, "max_position_embeddings"):
            return None
        length = int(self.config.max_position_embeddings)
        return length - self.config.pad_token_id - 1 if self.derives_positions else length

    def inputs(self, ids: Tensor, target: Tensor | None) -> dict[str, Any]:
        inputs = {self.input_name: ids.to(self.model.device)}
        if target is not None:
            inputs["decoder_input_ids"] = target.to(self.model.device)
        if "noise" in self.arguments:  # determines which patches a masked autoencoder encodes, here the first
            patches = (self.config.image_size // self.config.patch_size) ** 2
            inputs["noise"] = torch.arange(patches, device=self.model.device).expand(len(ids), -1)
        return inputs

    def logits(self, ids: Tensor, *, padding_mask: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        inputs = self.inputs(ids, target)
        if padding_mask is not None:
            padding_mask = padding_mask.to(self.model.device)
            if isinstance(self.config.pad_token_id, int):
                inputs["input_ids"] = inputs["input_ids"].masked_fill(padding_mask, self.config.pad_token_id)
            inputs["attention_mask"] = (~padding_mask).long()
            if "position_ids" in self.arguments and not self.derives_positions:
                inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return output_of(self.model(**inputs))

    def attention(self, ids: Tensor, target: Tensor | None) -> list[Tensor]:
        implementation = self.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            output = self.model(**self.inputs(ids, target), output_attentions=True)
        finally:
            self.model.set_attn_implementation(implementation)
        names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        return [weights for name in names for weights in getattr(output, name, None) or () if weights is not None]

    def stepwise(self, ids: Tensor, source: Tensor | None) -> Tensor | None:
        if not self.causal or not self.per_token:
            return None
        ids, cache, steps = ids.to(self.model.device), None, []
        for i in range(ids.shape[1]):
            token = ids[:, i : i + 1]
            inputs = self.inputs(token, None) if source is None else self.inputs(source, token)
            output = self.model(**inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output_of(output))
        return torch.cat(steps, dim=1)

    @cached_property
    def manyheads_model(self) -> ManyheadsModel | None:
        """A model of this package with the same weights; None if the architecture is not supported."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            try:
                return ManyheadsModel(load(folder, copy=True))
            except ValueError:
                return None

    def count_dead_heads(self, ids: Tensor, target: Tensor | None) -> int | None:
        return self.manyheads_model.count_dead_heads(ids, target) if self.manyheads_model else None

    def tied(self) -> tuple[Tensor, Tensor] | str:
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if not getattr(self.config, "tie_word_embeddings", False) or head is None or table is None:
            return NOT_TIED
        return head.weight, table.weight

    def vocabulary_sizes(self) -> tuple[int, int] | None:
        return None

    def reference_implementation(self) -> tuple[str, ReferenceLogits] | None:
        model = self.manyheads_model
        return None if model is None else ("manyheads", lambda ids, target: model.logits(ids, target=target))


def output_of(output: Any) -> Tensor:
    """The logits or hidden states in the output of a transformers model."""
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(getattr(output, name) for name in names if getattr(output, name, None) is not None)


AuditedModel = ManyheadsModel | TransformersModel
