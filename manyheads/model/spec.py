"""A model as data. It is encoder-only, decoder-only or encoder-decoder, depending on which tables are present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, cast

from pydantic import field_validator, model_validator

import manyheads.parts  # noqa: F401  (registers every kind)
from manyheads.errors import ConfigError, IncompatibleError, MissingKeyError, OutOfRangeError, WrongTypeError
from manyheads.model.init import InitSpec, NormalInitSpec
from manyheads.model.notebook import ShownInNotebook
from manyheads.parts.attention import AttentionSpec, HeadsSpec
from manyheads.parts.core import AdditiveSpec, CoreSpec, DotSpec
from manyheads.parts.embed import EmbedSpec, TokensSpec
from manyheads.parts.feedforward import FeedForwardSpec, MlpSpec
from manyheads.parts.head import HeadSpec, TiedHeadSpec
from manyheads.parts.mask import MaskSpec
from manyheads.parts.norm import LayerNormSpec, NormSpec
from manyheads.parts.position import NoPositionSpec, PositionSpec
from manyheads.parts.recurrent import CellSpec, GruSpec, ReadoutSpec, StateReadoutSpec, check_scores_vectors
from manyheads.parts.residual import PreSpec, ResidualSpec
from manyheads.spec import (
    Spec,
    Tree,
    check_names,
    copy_tree,
    field,
    locate_errors,
    make_immutable,
    merge_trees,
    override,
    parse,
    quote,
)


class CrossSpec(Spec):
    """Cross-attention to the encoder. A field that is not given is the same as in self-attention."""

    attention: AttentionSpec | None = field(None, "the projections; those of self-attention by default")
    core: CoreSpec | None = field(None, "the core; that of self-attention by default")


class LayerSpec(Spec):
    """One layer of a stack."""

    attention: AttentionSpec = field(HeadsSpec(), "the projections to q, k and v, and the output projection")
    core: CoreSpec = field(DotSpec(), "how q, k and v become the attention output")
    position: PositionSpec = field(NoPositionSpec(), "how positions are represented")
    mask: MaskSpec = field(MaskSpec(), "which keys a query may attend to")
    cross: CrossSpec | None = field(None, "cross-attention to the encoder; true for the kinds of self-attention")
    feedforward: FeedForwardSpec = field(MlpSpec(), "the feed-forward network")
    norm: NormSpec = field(LayerNormSpec(), "normalization of the vectors")
    residual: ResidualSpec = field(PreSpec(), "how sublayers are added to the residual stream")

    @field_validator("cross", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return CrossSpec() if value is True else value


class StackSpec(LayerSpec):
    """A stack of layers. The fields of a layer apply to all layers, and `pattern` overrides them for some."""

    layers: int = field(2, "the number of layers; with 0, the output is the embeddings", ge=0, le=1024)
    width: int = field(64, "D, the size of the vectors between layers", ge=1, le=65536)
    embed: EmbedSpec = field(TokensSpec(), "the embedding, whose output the first layer reads")
    final_norm: NormSpec | None = field(
        None, "the norm after the last layer; by default `norm`, if the residual connection needs one"
    )
    layer_groups: int | None = field(
        None, "the number of groups of consecutive layers that share their weights; one per layer by default",
        ge=1, le=1024,
    )  # fmt: skip
    pattern: tuple[Any, ...] = field(
        (), "overrides by layer, repeated cyclically, such as [{mask.window = 8}, {}]", strict=False
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for index, layer in enumerate(self._pattern_layers()):
            with locate_errors(*(("pattern", index) if self.pattern else ())):
                check_layer(layer, self.width)
        with locate_errors("position"):
            self.position.token_width(self.embed.table_width(self.width))
        if len(self.pattern) > max(self.layers, 1):
            raise IncompatibleError(
                f"given {len(self.pattern)} entries for {self.layers} layers, expected at most one per layer",
                ("pattern",),
            )
        if self.layer_groups is not None and (self.layers % self.layer_groups or not self.layers):
            raise IncompatibleError(
                f"given {self.layer_groups}, expected a divisor of {self.layers}", ("layer_groups",)
            )
        layers = self.expanded_layers()
        if any(layer != layers[i - i % self.group_size] for i, layer in enumerate(layers)):
            raise IncompatibleError(
                "layers that share weights must have the same spec; remove pattern or layer_groups", ("pattern",)
            )
        return self

    @field_validator("pattern")
    @classmethod
    def _tables(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        for index, changes in enumerate(value):
            if not isinstance(changes, Mapping):
                raise WrongTypeError(f"given {quote(changes)}, expected a table", (index,))
        return tuple(make_immutable(copy_tree(changes)) for changes in value)

    def _pattern_layers(self) -> list[LayerSpec]:
        """The spec of each entry of the pattern; without a pattern, the one spec of all layers."""
        base = LayerSpec.model_construct(**{name: getattr(self, name) for name in LayerSpec.model_fields})
        if not self.pattern:
            return [base]
        tree, layers = base.model_dump(mode="json"), []
        for index, changes in enumerate(self.pattern):
            with locate_errors("pattern", index):
                layers.append(parse(LayerSpec, with_cross(merge_trees(tree, changes))))
        return layers

    def expanded_layers(self) -> list[LayerSpec]:
        """The spec of every layer."""
        pattern = self._pattern_layers()
        return [pattern[index % len(pattern)] for index in range(self.layers)]

    @property
    def group_size(self) -> int:
        """How many consecutive layers share weights."""
        return 1 if self.layer_groups is None else self.layers // self.layer_groups

    @property
    def max_positions(self) -> int | None:
        """The largest number of tokens that every layer has positions for; None if unlimited."""
        parts = [part for layer in self.expanded_layers() for part in (layer.position, layer.core)]
        return min((part.max_positions for part in parts if part.max_positions is not None), default=None)

    def output_norm(self) -> NormSpec | None:
        """The norm after the last layer: `final_norm`, or `norm` if the residual connection needs one."""
        last = self.expanded_layers()[-1] if self.layers else self
        return self.final_norm or (last.norm if last.residual.final_norm else None)


class DecoderSpec(StackSpec):
    """A stack whose mask is causal unless mask.causal = false."""

    mask: MaskSpec = field(MaskSpec(causal=True), "which keys a query may attend to; causal by default")

    @field_validator("mask", mode="before")
    @classmethod
    def _causal(cls, value: Any) -> Any:
        if isinstance(value, MaskSpec) and "causal" not in value.model_fields_set:
            return value.replace(causal=True)
        return {"causal": True} | value if isinstance(value, dict) else value


def check_stack(stack: StackSpec, *, has_memory: bool) -> None:
    """Checks that cross-attention has an encoder, and that all layers have the positions joined to the embeddings."""
    for layer in stack.expanded_layers():
        if layer.cross and not has_memory:
            raise IncompatibleError(
                "cross-attention needs an encoder, which only the decoder of an encoder-decoder has", ("cross",)
            )
        if layer.position == stack.position:
            continue
        if layer.position.mechanism == "embed":
            raise IncompatibleError(
                f"'{layer.position.kind}' changes the embeddings, which all layers share; set it for the stack",
                ("pattern",),
            )
        if (stack.position.mechanism, layer.position.mechanism) == ("embed", "none"):
            raise IncompatibleError(
                f"'{stack.position.kind}' changes the embeddings, so a layer cannot have position 'none'", ("pattern",)
            )


def check_layer(layer: LayerSpec, width: int) -> None:
    """Checks that the parts of a layer fit together."""
    with locate_errors("attention"):
        layer.attention.head_dim(width)
    if layer.cross and layer.cross.attention:
        with locate_errors("cross", "attention"):
            layer.cross.attention.head_dim(width)
    with locate_errors("position"):
        for part in sorted(layer.position.needs):
            if getattr(layer.core, f"{part}_source") == "none":
                raise IncompatibleError(
                    f"'{layer.position.kind}' needs a {part}, and core '{layer.core.kind}' has no {part}"
                )
        if layer.position.mechanism == "rotate":
            layer.position.build(layer.attention.heads, layer.attention.query_size(width, layer.core))


class RecurrentSpec(Spec):
    """A recurrent encoder and decoder, with or without attention.

    Sutskever et al. 2014 (without attention), Bahdanau et al. 2015 (with attention):
    s_i = cell([e(y_{i−1}), c_i], s_{i−1}) and
    c_i = Σ_j softmax_j(score(s_{i−1}, h_j)) h_j.
    """

    cell: CellSpec = field(GruSpec(), "the cell of encoder and decoder")
    layers: int = field(1, "the number of layers of cells in encoder and decoder", ge=1, le=64)
    width: int = field(64, "the size of a state", ge=1, le=65536)
    embed: EmbedSpec = field(
        TokensSpec(), "the embedding, whose output the first cell reads; embed.size sets its width"
    )
    position: PositionSpec = field(NoPositionSpec(), "how positions are represented, in encoder and decoder")
    source: bool = field(True, "whether there is an encoder; without one, the decoder is a language model")
    bidirectional: bool = field(True, "whether the encoder reads in both directions")
    attention: bool = field(
        True, "whether the decoder attends to all encoder states; otherwise it starts from the last one"
    )
    core: CoreSpec = field(AdditiveSpec(), "the score function of the attention")
    readout: ReadoutSpec = field(StateReadoutSpec(), "how the input of the head is computed")
    dropout: float = field(0.0, "dropout probability between layers and before the head", ge=0, lt=1)

    @property
    def embedding_width(self) -> int:
        return self.embed.table_width(self.width)

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if self.position.mechanism not in ("none", "embed"):
            raise IncompatibleError(
                f"'{self.position.kind}' needs self-attention, and a recurrent network has no self-attention; "
                f"use none, sinusoidal or learned",
                ("position",),
            )
        with locate_errors("core"):
            check_scores_vectors(self.core)
        with locate_errors("position"):
            self.position.token_width(self.embedding_width)
        if self.embed.reads != "tokens" or self.embed.shares_table:
            raise IncompatibleError(f"given '{self.embed.kind}', expected tokens in a recurrent network", ("embed",))
        return self


class NgramSpec(Spec):
    """A neural n-gram model with logits = U tanh(W [e(w_{t−n+2}) … e(w_t)] + b), where U is the tied or untied head.

    Bengio et al. 2003, without the direct connections. Embeddings before the first token are zero.
    """

    order: int = field(3, "n; with 3, a trigram model, two tokens predict the third", ge=2, le=64)
    width: int = field(64, "the size of the embeddings", ge=1, le=65536)
    hidden: int | None = field(None, "the size of the hidden layer; the width by default", ge=1, le=1 << 20)
    dropout: float = field(0.0, "dropout probability before the head", ge=0, lt=1)


BACKBONES = ("encoder", "decoder", "recurrent", "ngram")
MAX_VOCAB = 1 << 22


class ModelSpec(Spec, ShownInNotebook):
    """A model, which is an encoder, a decoder or both, a recurrent network, or an n-gram network, and its head."""

    vocab: int | Literal["tokenizer"] | None = field(
        None, "the vocabulary size; 'tokenizer' takes it from the tokenizer; not needed for images"
    )
    source_vocab: int | None = field(None, "the vocabulary size of the encoder; vocab by default", ge=1, le=MAX_VOCAB)
    encoder: StackSpec | None = field(
        None, "a stack that reads the source of an encoder–decoder, or without a decoder the input"
    )
    decoder: DecoderSpec | None = field(None, "a causal stack; with an encoder it needs cross = true")
    recurrent: RecurrentSpec | None = field(None, "a recurrent network, with or without attention")
    ngram: NgramSpec | None = field(None, "a neural n-gram model")
    head: HeadSpec = field(TiedHeadSpec(), "the head, which computes the output from the last layer")
    init: InitSpec = field(NormalInitSpec(), "how weights are initialized")

    @field_validator("vocab", mode="before")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if value not in (None, "tokenizer") and not (type(value) is int and 1 <= value <= MAX_VOCAB):
            raise OutOfRangeError(
                f"given {quote(value)}, expected a number of tokens from 1 to {MAX_VOCAB}, or 'tokenizer'"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [name for name in BACKBONES if getattr(self, name) is not None]
        if names not in (["encoder"], ["decoder"], ["encoder", "decoder"], ["recurrent"], ["ngram"]):
            tables = " and ".join(names) or "none of them"
            raise IncompatibleError(f"given {tables}, expected [encoder], [decoder], both, [recurrent] or [ngram]")
        for name in ("encoder", "decoder"):
            if stack := getattr(self, name):
                with locate_errors(name):
                    check_stack(stack, has_memory=name == "decoder" and self.encoder is not None)
        self._check_encoder_use()
        if self.source_vocab is not None and not self.has_source:
            raise IncompatibleError(
                f"source_vocab needs a model with a source; this one is {self.architecture}", ("source_vocab",)
            )
        reads_tokens = any(
            backbone.embed.reads == "tokens" for backbone in (self.encoder, self.decoder, self.recurrent) if backbone
        )
        if self.vocab is None and (reads_tokens or self.ngram or self.head.output == "tokens"):
            raise MissingKeyError("vocab is required for a model that reads or predicts tokens", ("vocab",))
        return self

    def _check_encoder_use(self) -> None:
        """Checks that a decoder uses its encoder, and that there is an encoder if it needs one."""
        encoder, decoder = self.encoder, self.decoder
        for name, stack in (("encoder", encoder), ("decoder", decoder if encoder is None else None)):
            if stack is not None and (stack.embed.shares_table or stack.embed.reads == "memory"):
                raise IncompatibleError(
                    f"'{stack.embed.kind}' needs an [encoder] table and is for the decoder", (name, "embed")
                )
        if decoder is None:
            return
        if decoder.embed.reads == "patches" and getattr(decoder.embed, "class_token", False):
            raise IncompatibleError(
                "class_token is for an encoder; a decoder reads one patch at a time",
                ("decoder", "embed", "class_token"),
            )
        if encoder is None:
            return
        unused = decoder.embed.reads != "memory" and not any(layer.cross for layer in decoder.expanded_layers())
        if decoder.layers and unused:
            raise IncompatibleError(
                "no layer of the decoder attends to the encoder; set cross = true", ("decoder", "cross")
            )
        if decoder.embed.shares_table:
            widths = [stack.position.token_width(stack.embed.table_width(stack.width)) for stack in (encoder, decoder)]
            source, target = (self.source_vocab or self.vocab, widths[0]), (self.vocab, widths[1])
            if encoder.embed.reads != "tokens" or source != target:
                raise IncompatibleError(
                    f"given an encoder with '{encoder.embed.kind}' of {source[0]} × {source[1]}, expected a token "
                    f"table of {target[0]} × {target[1]} to share; use 'tokens' for a table of its own",
                    ("decoder", "embed"),
                )

    @property
    def architecture(self) -> str:
        return "-".join(name for name in BACKBONES if getattr(self, name) is not None)

    @property
    def has_source(self) -> bool:
        """Whether the model reads a source and a target, as an encoder–decoder does."""
        has_encoder = self.encoder is not None and self.decoder is not None
        return has_encoder or (self.recurrent is not None and self.recurrent.source)

    @property
    def max_target_positions(self) -> int | None:
        """The maximum number of decoder tokens; None if there is no limit."""
        return self.decoder.max_positions if self.decoder else None

    @property
    def needs_final_length(self) -> bool:
        """Whether the decoder's positions depend on the length after generation, so that rows must share it."""
        layers = self.decoder.expanded_layers() if self.decoder else ()
        return any(layer.position.needs_final_length for layer in layers)


def read_model(tree: Tree) -> ModelSpec:
    """Converts a table to a ModelSpec. `like = "encoder"` in the decoder first copies the encoder's fields."""
    if not isinstance(tree, Mapping):
        raise WrongTypeError(
            f"given a {type(tree).__name__}, expected a table that describes a model, such as preset(name)"
        )
    tree = copy_tree(tree)
    check_names(ModelSpec, tree)
    tree = resolve_like(tree)
    for name in ("encoder", "decoder"):
        if isinstance(tree.get(name), dict):
            tree[name] = with_cross(tree[name])
    return parse(ModelSpec, tree)


def resolve_like(model: Tree) -> Tree:
    """Returns the tree in which a stack with `like` has its own copy of the other stack's fields."""
    tree = copy_tree(model)
    for name, other in (("encoder", "decoder"), ("decoder", "encoder")):
        stack = tree.get(name)
        if not isinstance(stack, dict):
            continue
        with locate_errors(name):
            check_names(StackSpec, stack, "like")
        if "like" in stack:
            if stack["like"] != other or not isinstance(tree.get(other), dict):
                raise ConfigError(f"given {quote(stack['like'])}, expected the name of the other stack", (name, "like"))
            if "like" in tree[other]:
                raise IncompatibleError("only one stack can be like the other", (name, "like"))
            tree[name] = merge_trees(tree[other], {key: value for key, value in stack.items() if key != "like"})
    return cast(Tree, tree)


STACKS: dict[str, type[Spec]] = {
    "encoder": StackSpec, "decoder": StackSpec, "recurrent": RecurrentSpec, "ngram": NgramSpec
}  # fmt: skip


def resolve_field(name: str, model: Tree) -> tuple[str, ...]:
    """The fields of a model that a path names: a full path stays, and a short one means every stack that has it."""
    first = name.partition(".")[0]
    if first in ModelSpec.model_fields:
        return (name,)
    stacks = [stack for stack in STACKS if isinstance(model.get(stack), dict) and first in STACKS[stack].model_fields]
    # a stack with `like` takes the other stack's value, unless it has its own
    return tuple(f"{stack}.{name}" for stack in stacks if "like" not in model[stack] or first in model[stack])


def override_model(model: Tree, assignments: Iterable[str]) -> Tree:
    """Returns the tree with overrides, such as `position=none` for every stack or `decoder.position=none` for one.

    They apply in order: `encoder=false` removes a stack and leaves one that was like it as it is, and
    `decoder.like=encoder` copies the fields that the encoder has then.
    """
    for assignment in assignments:
        name, equals, value = str(assignment).partition("=")
        if name.strip() in ("encoder", "decoder") and value.strip() == "false":
            model = resolve_like(model)
        paths = resolve_field(name.strip(), model)
        model = override(model, [f"{path}{equals}{value}" for path in paths] or [assignment])
        if name.strip() in ("encoder.like", "decoder.like"):
            model = resolve_like(model)
    return model


def with_cross(stack: Tree) -> Tree:
    """Fills the fields of self-attention into a cross-attention that overrides only some of them."""
    if not isinstance(stack.get("cross"), dict):
        return stack
    cross = {slot: value for slot, value in stack["cross"].items() if value is not None}
    defaults = {slot: stack[slot] for slot in cross if slot in stack}
    return stack | {"cross": merge_trees(defaults, cross)}
