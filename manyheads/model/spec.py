"""A model as data: which towers exist is the shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

import manyheads.parts  # noqa: F401  (fills the slots)
from manyheads.model.init import InitSpec, NormalInitSpec
from manyheads.parts import synthesizer  # noqa: F401  (fills the slot)
from manyheads.parts.attend import AdditiveSpec, CoreSpec, DotSpec
from manyheads.parts.attention import AttentionSpec, HeadsSpec
from manyheads.parts.embed import EmbedSpec, TokensSpec
from manyheads.parts.feedforward import FeedForwardSpec, MlpSpec
from manyheads.parts.head import HeadSpec, TiedSpec
from manyheads.parts.mask import MaskSpec
from manyheads.parts.norm import LayerNormSpec, NormSpec
from manyheads.parts.position import NoPositionSpec, PositionSpec
from manyheads.parts.recurrent import CellSpec, GruSpec, ReadoutSpec, StateReadoutSpec
from manyheads.parts.residual import PreSpec, ResidualSpec
from manyheads.spec import Spec, SpecError, Tree, check_names, copied, field, frozen, located, merged, parse, quoted


class CrossSpec(Spec):
    """Attention to the encoder, where it differs from the tower's own."""

    attention: AttentionSpec | None = field(None, "as the tower's, if not given")
    core: CoreSpec | None = field(None, "as the tower's, if not given")


class LayerSpec(Spec):
    """One layer, every choice made."""

    attention: AttentionSpec = field(HeadsSpec(), "how x becomes q, k, v and back")
    core: CoreSpec = field(DotSpec(), "what happens between them")
    position: PositionSpec = field(NoPositionSpec(), "how a token knows where it stands")
    mask: MaskSpec = field(MaskSpec(), "who sees whom")
    cross: CrossSpec | None = field(None, "attention to the encoder; true for one like the tower's own")
    feedforward: FeedForwardSpec = field(MlpSpec(), "what happens to each vector on its own")
    norm: NormSpec = field(LayerNormSpec(), "what keeps vectors at size")
    residual: ResidualSpec = field(PreSpec(), "how the sublayers are joined")

    @field_validator("cross", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: CrossSpec(), False: None}[value] if isinstance(value, bool) else value


class TowerSpec(LayerSpec):
    """A stack of layers: the fields of a layer hold for all of them, `pattern` says where some differ."""

    layers: int = field(2, "how many; 0 is the embeddings alone", ge=0, le=1024)
    width: int = field(64, "D, the size of the vectors between layers", ge=1, le=65536)
    embed: EmbedSpec = field(TokensSpec(), "what the first layer reads")
    final_norm: NormSpec | None = field(None, "after the last layer; as `norm`, if the residual needs one and none is given")
    distinct: int | None = field(
        None, "how many layers have weights of their own, each used for a run of neighbours; all if not given", ge=1, le=1024
    )
    pattern: tuple[Any, ...] = field((), "differences by layer, repeated in turn: [{mask.window = 8}, {}]", strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for index, layer in enumerate(self._kinds()):
            with located(*(("pattern", index) if self.pattern else ())):
                check_layer(layer, self.width)
        with located("position"):
            self.position.token_width(self.embed.table_width(self.width))
        if len(self.pattern) > max(self.layers, 1):
            raise SpecError(f"{len(self.pattern)} differences for {self.layers} layers: the last ones would never be used", ("pattern",))
        if self.distinct is not None and (self.layers % self.distinct or not self.layers):
            raise SpecError(f"{self.layers} layers cannot be {self.distinct} runs of equal length", ("distinct",))
        layers = self.expanded()
        if any(layer != layers[i - i % self.run] for i, layer in enumerate(layers)):
            raise SpecError("layers that share weights must be alike; leave out pattern or distinct", ("pattern",))
        return self

    @field_validator("pattern")
    @classmethod
    def _tables(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        for index, difference in enumerate(value):
            with located(index):
                if not isinstance(difference, Mapping):
                    raise SpecError(f"given {quoted(difference)}, expected a table")
        return tuple(frozen(copied(difference)) for difference in value)

    def _kinds(self) -> list[LayerSpec]:
        """The layer of each entry of the pattern, or the one that all are."""
        shared = {name: getattr(self, name) for name in LayerSpec.model_fields}
        if not self.pattern:
            return [LayerSpec.model_construct(**shared)]
        base, kinds = LayerSpec.model_construct(**shared).model_dump(mode="json"), []
        for index, difference in enumerate(self.pattern):
            with located("pattern", index):
                kinds.append(parse(LayerSpec, with_cross(merged(base, difference))))
        return kinds

    def expanded(self) -> list[LayerSpec]:
        """The explicit list of layers that is built."""
        kinds = self._kinds()
        return [kinds[index % len(kinds)] for index in range(self.layers)]

    @property
    def run(self) -> int:
        """How many neighbouring layers share weights."""
        return 1 if self.distinct is None else self.layers // self.distinct

    @property
    def longest(self) -> int | None:
        """The most tokens that every layer has places for; None where there is no such limit."""
        parts = [part for layer in self.expanded() for part in (layer.position, layer.core)]
        return min((part.longest for part in parts if part.longest is not None), default=None)

    def closing_norm(self) -> NormSpec | None:
        last = self._kinds()[(self.layers - 1) % len(self._kinds())] if self.layers else self
        return self.final_norm or (last.norm if last.residual.final_norm else None)


class DecoderSpec(TowerSpec):
    """A tower that writes: its mask is causal unless it says otherwise."""

    mask: MaskSpec = field(MaskSpec(causal=True), "who sees whom; causal unless mask.causal = false")

    @field_validator("mask", mode="before")
    @classmethod
    def _causal(cls, value: Any) -> Any:
        if isinstance(value, MaskSpec) and "causal" not in value.model_fields_set:
            return value.changed(causal=True)
        return {"causal": True} | value if isinstance(value, dict) else value


def check_tower(tower: TowerSpec, *, alone: bool) -> None:
    """What only the whole tower can say: nobody looks across without a neighbour, and positions join the embedding once."""
    for layer in tower.expanded():
        if layer.cross and alone:
            raise SpecError("there is no encoder to attend to; cross belongs to a decoder beside one", ("cross",))
        if layer.position != tower.position and layer.position.door == "embed":
            raise SpecError(f"'{layer.position.kind}' is joined to the embedding, before any layer; say it for the tower", ("pattern",))
        if layer.position != tower.position and (tower.position.door, layer.position.door) == ("embed", "none"):
            raise SpecError(f"the tower's '{tower.position.kind}' is joined to the embedding; no layer can take it away", ("pattern",))


def check_layer(layer: LayerSpec, width: int) -> None:
    """What the parts of a layer ask of each other."""
    with located("attention"):
        layer.attention.head_size(width)
    if layer.cross and layer.cross.attention:
        with located("cross", "attention"):
            layer.cross.attention.head_size(width)
    with located("position"):
        missing = [part for part in sorted(layer.position.needs) if getattr(layer.core, part) == "none"]
        if missing:
            needs = " and ".join(sorted(layer.position.needs))
            raise SpecError(f"'{layer.position.kind}' works on {needs}, and the core '{layer.core.kind}' has no {missing[0]}")
        if layer.position.door == "rotate":
            layer.position.build(layer.attention.heads, layer.attention.query_size(width, layer.core))


class RecurrentSpec(Spec):
    """A recurrent encoder and decoder, with or without attention between them.

    Sutskever et al. 2014 without, Bahdanau et al. 2015 with attention: s_i = cell([e(y_{i−1}), c_i], s_{i−1}) and
    c_i = Σ_j softmax_j(score(s_{i−1}, h_j)) h_j.
    """

    cell: CellSpec = field(GruSpec(), "one step of the network")
    layers: int = field(1, "of cells, in both", ge=1, le=64)
    width: int = field(64, "the size of a state", ge=1, le=65536)
    embed: EmbedSpec = field(TokensSpec(), "what the first cell reads; embed.size sets its width")
    position: PositionSpec = field(NoPositionSpec(), "joined to the embeddings of both")
    source: bool = field(True, "an encoder reads a source; without it, the decoder is a language model")
    two_way: bool = field(True, "whether the encoder reads in both directions")
    attention: bool = field(True, "whether the decoder looks back at all encoder states, or has only the last one")
    core: CoreSpec = field(AdditiveSpec(), "the score function, where there is attention")
    readout: ReadoutSpec = field(StateReadoutSpec(), "what the head reads")
    dropout: float = field(0.0, "between layers and before the head", ge=0, lt=1)

    @property
    def embedding_width(self) -> int:
        return self.embed.table_width(self.width)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.position.door not in ("none", "embed"):
            raise SpecError(
                f"'{self.position.kind}' acts inside attention between layers; a recurrent network takes none, sinusoidal or learned",
                ("position",),
            )
        if (self.core.query, self.core.key) != ("head", "head"):
            raise SpecError(
                f"'{self.core.kind}' replaces projections that a recurrent network has not; take additive, bilinear, projected or dot",
                ("core",),
            )
        with located("position"):
            self.position.token_width(self.embedding_width)
        if self.embed.reads != "tokens" or self.embed.borrows:
            raise SpecError(f"a recurrent network reads tokens by a table of its own, given '{self.embed.kind}'; take tokens", ("embed",))
        return self


class NgramSpec(Spec):
    """A neural n-gram model: logits = U tanh(W [e(w_{t−n+2}) … e(w_t)] + b), with the tied or free head as U.

    Bengio et al. 2003, without the direct connections. Before the text begins, an embedding is zero.
    """

    order: int = field(3, "n: a trigram model sees two words", ge=2, le=64)
    width: int = field(64, "the size of the embeddings", ge=1, le=65536)
    hidden: int | None = field(None, "the size of the hidden layer; the width if not given", ge=1, le=1 << 20)
    dropout: float = field(0.0, "before the head", ge=0, lt=1)


SHAPES = ("encoder", "decoder", "recurrent", "ngram")
LARGEST_VOCAB = 1 << 22


class ModelSpec(Spec):
    """Any model: towers of layers, the recurrent pair, or the n-gram network, and the head on top."""

    vocab: int | Literal["tokenizer"] | None = field(None, "how many tokens; 'tokenizer' until the data says; none for pictures")
    source_vocab: int | None = field(None, "of the encoder, where it is another", ge=1, le=LARGEST_VOCAB)
    encoder: TowerSpec | None = field(None, "reads the source, or all there is")
    decoder: DecoderSpec | None = field(None, "writes; beside an encoder usually with cross = true")
    recurrent: RecurrentSpec | None = field(None, "the network that transformers replaced")
    ngram: NgramSpec | None = field(None, "the network before that")
    head: HeadSpec = field(TiedSpec(), "what is made of the last layer")
    init: InitSpec = field(NormalInitSpec(), "how the weights begin")

    @field_validator("vocab", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if value not in (None, "tokenizer") and not (type(value) is int and 1 <= value <= LARGEST_VOCAB):
            raise ValueError(f"given {quoted(value)}, expected a number of tokens from 1 to {LARGEST_VOCAB}, or 'tokenizer'")
        return value

    @model_validator(mode="after")
    def _a_shape(self) -> Self:
        given = [name for name in SHAPES if getattr(self, name) is not None]
        if given not in (["encoder"], ["decoder"], ["encoder", "decoder"], ["recurrent"], ["ngram"]):
            raise SpecError(f"a model is an encoder, a decoder, both, recurrent or ngram; given {' and '.join(given) or 'none of them'}")
        for name in ("encoder", "decoder"):
            if tower := getattr(self, name):
                with located(name):
                    check_tower(tower, alone=name == "encoder" or self.encoder is None)
        self._check_sharing()
        if self.source_vocab is not None and not (self.encoder and self.decoder) and not (self.recurrent and self.recurrent.source):
            raise SpecError(f"is for a model that reads a source beside what it writes; this is {self.shape} alone", ("source_vocab",))
        reads_tokens = any(own.embed.reads == "tokens" for own in (self.encoder, self.decoder, self.recurrent) if own)
        if self.vocab is None and (reads_tokens or self.ngram or self.head.scores_tokens):
            raise SpecError("is required where there are tokens: how many there are", ("vocab",))
        return self

    def _check_sharing(self) -> None:
        """What one tower takes from the other must be there, and be of use."""
        encoder, decoder = self.encoder, self.decoder
        if decoder is not None and getattr(decoder.embed, "first", False) and decoder.embed.reads == "patches":
            raise SpecError("a first vector belongs to a tower that reads its picture at once, the encoder", ("decoder", "embed", "first"))
        if decoder is None or encoder is None:
            if decoder is not None and (decoder.embed.borrows or decoder.embed.reads == "memory"):
                raise SpecError(f"'{decoder.embed.kind}' takes from an encoder, and there is none", ("decoder", "embed"))
            return
        if decoder.layers and not any(layer.cross for layer in decoder.expanded()) and decoder.embed.reads != "memory":
            raise SpecError("nothing in the decoder looks at the encoder; set cross = true, or leave the encoder out", ("decoder", "cross"))
        if decoder.embed.borrows:
            with located("decoder", "embed"):
                if encoder.embed.reads != "tokens":
                    raise SpecError("the encoder has no token table to share")
                theirs, ours = (tower.position.token_width(tower.embed.table_width(tower.width)) for tower in (encoder, decoder))
                if theirs != ours:
                    raise SpecError(f"the encoder's table has rows of {theirs}, this tower reads rows of {ours}; 'tokens' has its own")
                if self.source_vocab not in (None, self.vocab):
                    raise SpecError(f"the encoder's table has {self.source_vocab} rows, the vocabulary {self.vocab}; 'tokens' has its own")

    @property
    def shape(self) -> str:
        return "–".join(name for name in SHAPES if getattr(self, name) is not None)


def read_model(tree: Tree) -> ModelSpec:
    """A description as a spec: `like` copied first, so that what is said of one tower holds for the other."""
    if not isinstance(tree, Mapping):
        raise SpecError(f"given a {type(tree).__name__}, expected a table that describes a model, as preset(name) gives")
    tree = copied(tree)
    check_names(ModelSpec, tree)
    for name in SHAPES[:2]:
        own = tree.get(name)
        if isinstance(own, dict):
            with located(name):
                check_names(TowerSpec, own, "like")
        if isinstance(own, dict) and "like" in own:
            other = own["like"]
            if other == name or other not in SHAPES[:2] or not isinstance(tree.get(other), dict):
                raise SpecError(f"given {quoted(other)}, expected the other tower of this model", (name, "like"))
            if "like" in tree[other]:
                raise SpecError("the towers cannot each be like the other", (name, "like"))
            tree[name] = merged(tree[other], {key: value for key, value in own.items() if key != "like"})
    for name in SHAPES[:2]:
        if isinstance(tree.get(name), dict):
            tree[name] = with_cross(tree[name])
    return parse(ModelSpec, tree)


def with_cross(tower: Tree) -> Tree:
    """A tower whose cross-attention, where it changes single fields, changes those of the tower's own attention."""
    if not isinstance(tower.get("cross"), dict):
        return tower
    said = {slot: value for slot, value in tower["cross"].items() if value is not None}
    own = {slot: tower[slot] for slot in said if slot in tower}
    return tower | {"cross": merged(own, said)}
