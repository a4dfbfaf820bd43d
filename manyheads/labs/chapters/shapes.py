"""Encoder, decoder and encoder–decoder: three shapes of model, made of the same layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from manyheads.errors import IncompatibleError
from manyheads.labs.figures import Heatmap, Table, heatmap
from manyheads.labs.finding import Check, Finding, at_least, at_most, equals, is_true, reported
from manyheads.labs.fitting import add_noise, output_changes
from manyheads.labs.lab import lab
from manyheads.labs.reference import causal_2019
from manyheads.model.builder import build, build_meta
from manyheads.model.recording import RecordedAttention, record
from manyheads.model.spec import read_model
from manyheads.model.transformer import Transformer, as_transformer
from manyheads.presets import read
from manyheads.spec import Tree

VOCAB = 23
STACK: Tree = {
    "layers": 2, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "sinusoidal",
    "feedforward": {"kind": "mlp", "hidden": 32}, "residual": "pre",
}  # fmt: skip
CAUSAL: Tree = {"mask": {"causal": True}}
NORMAL: Tree = {"kind": "normal", "std": 0.3}


def random_model(seed: int, **tables: Any) -> Transformer:
    """A transformer whose weights are all random, the biases too: nothing holds because a bias is 0."""
    model = build(read_model({"vocab": VOCAB, "init": NORMAL} | tables), seed=seed)
    return as_transformer(add_noise(model, 0.1), "a shape")


def encoder_decoder(seed: int, **changes: Any) -> Transformer:
    stack = STACK | changes
    return random_model(seed, encoder=stack, decoder=stack | CAUSAL | {"embed": "shared", "cross": True})


def gpt2_stack(length: int) -> Tree:
    return STACK | {
        "position": {"kind": "learned", "length": length},
        "feedforward": {"kind": "mlp", "hidden": 32, "activation": "gelu-tanh"},
    }


@torch.no_grad()
def difference_from_gpt2(model: Transformer, weights: Mapping[str, Tensor], *inputs: Tensor) -> float:
    """The largest difference between the logits of a model and of GPT-2 as written from its formulas, in float64."""
    weights = {name: weight.double() for name, weight in weights.items()}
    return largest(model.double()(*inputs) - causal_2019(weights, inputs[0], heads=2, layers=2))


def tokens(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, length))


def largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max())


def recorded(model: Transformer, name: str, *inputs: Tensor) -> tuple[RecordedAttention, Tensor]:
    """One attention of a forward pass, and the output of the model."""
    with torch.no_grad(), record(model) as tape:
        output = model(*inputs)
    return tape.calls(name)[0], output


def weights_map(title: str, attention: RecordedAttention, rows: list[str], columns: list[str]) -> Heatmap:
    """The weights of the first head."""
    visible = attention.visible()
    weights = attention.weights(head=0)[0]
    return heatmap(title, weights, rows, columns, visible=None if visible is None else visible[0, 0])


# ----------------------------------------------------------------------------------------------- one code, three shapes


@lab("shapes", rows=("G1",), counterexample={"presets": "bert-base gpt2 rnnsearch"},
     try_next=("--presets 'albert-base-v2 llama-7b t5-small'", "--presets 'bert-base gpt2 rnnsearch'"))  # fmt: skip
def one_code_path(
    *, presets: Annotated[str, "published models, separated by spaces"] = "bert-base gpt2 transformer-base"
) -> Finding:
    """Encoder, decoder and encoder–decoder are one program with different settings.

    BERT is an encoder, GPT-2 a decoder, and the Transformer of 2017 an encoder and a decoder. Each is a stack of
    layers, or two. A layer has self-attention and a feed-forward network; the settings say whether its attention has a
    causal mask, and whether cross-attention is between the two. So one class of layer is enough for all three.
    """
    rows, models, layers, architectures = [], set(), set(), set()
    for name in presets.split():
        spec, model = read(name), build_meta(read(name))
        stacks = [stack for stack in (spec.encoder, spec.decoder) if stack]
        classes = {
            type(layer).__name__ for path, layer in model.named_modules() if path.split(".")[-2:-1] == ["layers"]
        }
        models.add(type(model).__name__)
        layers |= classes
        architectures.add(spec.architecture)
        causal = "/".join("yes" if stack.mask.causal else "no" for stack in stacks)
        cross = "yes" if spec.decoder and spec.decoder.cross else "no"
        rows.append((name, spec.architecture, type(model).__name__, ", ".join(sorted(classes)), causal, cross))
    columns = ("model", "architecture", "class of the model", "class of its layers", "causal mask", "cross-attention")
    return Finding(
        (
            equals("architectures", ", ".join(sorted(architectures)), "decoder, encoder, encoder-decoder"),
            equals("classes of the models", len(models), 1),
            equals("classes of their layers", len(layers), 1),
        ),
        (Table("Three shapes of one program", columns, rows),),
    )


@lab("shapes", rows=("G2",), counterexample={"causal": False}, try_next=("--no-causal", "--length 20"))
def encoder_with_mask(
    *,
    causal: Annotated[bool, "whether the encoder has a causal mask"] = True,
    length: Annotated[int, "tokens of the text"] = 8,
    seed: int = 0,
) -> Finding:
    """A decoder-only model is an encoder with a causal mask.

    An encoder with random weights gets a causal mask, and a decoder-only model gets the same weights. Both read the
    same text: their outputs are equal. Without the mask a token of the encoder also attends to later tokens, and the
    outputs differ. Nothing else distinguishes the two. An encoder with the layers of GPT-2 is also compared with the
    formulas of GPT-2, written apart from this package's layers (`labs/reference.py`).
    """
    encoder, plain, decoder = (
        random_model(seed + i, **{name: STACK | {"mask": {"causal": mask}}, "head": "untied"})
        for i, (name, mask) in enumerate((("encoder", causal), ("encoder", False), ("decoder", True)))
    )
    weights = encoder.state_dict()
    plain.load_state_dict(weights)
    decoder.load_state_dict(as_decoder(weights))
    ids, words = tokens(length), [f"token {i + 1}" for i in range(length)]
    first, expected = recorded(decoder, "decoder.layers.0.attention", ids)
    second, output = recorded(encoder, "encoder.layers.0.attention", ids)
    _, unmasked = recorded(plain, "encoder.layers.0.attention", ids)
    gpt2 = random_model(seed, encoder=gpt2_stack(length) | {"mask": {"causal": causal}}, head="tied")
    return Finding(
        (
            at_most("largest difference of the outputs", largest(output - expected), 1e-5),
            at_least("the same without the mask", largest(unmasked - expected), 1e-2),
            at_most(
                "encoder with the layers of GPT-2: largest difference from its formulas",
                difference_from_gpt2(gpt2, as_decoder(gpt2.state_dict()), ids),
                1e-10,
            ),
        ),
        (
            weights_map("Decoder: the weights of one head", first, words, words),
            weights_map(
                f"Encoder {'with' if causal else 'without'} a causal mask: the same head", second, words, words
            ),
        ),
    )


def as_decoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("encoder.", "decoder."): weight for name, weight in weights.items()}


def without_cross_attention(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a decoder without its cross-attention and the norm of that; the embeddings are the encoder's."""
    same_weights = {
        name.replace(".norms.2.", ".norms.1."): weight
        for name, weight in weights.items()
        if name.startswith(("decoder.", "head.")) and ".cross." not in name and ".norms.1." not in name
    }
    return same_weights | {"decoder.embed.table.weight": weights["encoder.embed.table.weight"]}


def switch_off_cross_attention(model: Transformer, residual: str) -> None:
    """Lets the cross-attention of every layer add 0; in a post-norm layer the norm after it goes too."""
    assert model.decoder is not None
    layers: Any = model.decoder.layers
    with torch.no_grad():
        for layer in layers:
            layer.cross.output.weight.zero_()
            layer.cross.output.bias.zero_()
            if residual == "post":
                layer.residual.norms[1] = nn.Identity()


@lab("shapes", rows=("G3",), counterexample={"removed": False}, try_next=("--no-removed", "--length 30"))
def decoder_without_cross(
    *,
    removed: Annotated[bool, "whether cross-attention is removed"] = True,
    length: Annotated[int, "tokens of the text"] = 8,
    seed: int = 0,
) -> Finding:
    """A decoder-only model is the decoder of an encoder–decoder without its cross-attention.

    The decoder of an encoder–decoder has three sublayers: masked self-attention, cross-attention and a feed-forward
    network. Cross-attention is switched off, which leaves two, and a decoder-only model gets their weights. Its outputs
    are then those of the decoder, wherever the norms are: before each sublayer (pre) or after it (post). A decoder with
    the layers of GPT-2 is also compared with the formulas of GPT-2 (`labs/reference.py`).
    """
    rows, checks = [], list[Check]()
    for residual in ("pre", "post"):
        both = encoder_decoder(seed, residual=residual)
        alone = random_model(seed + 1, decoder=STACK | CAUSAL | {"residual": residual})
        alone.load_state_dict(without_cross_attention(both.state_dict()))
        ids, source = tokens(length), tokens(length + 2)
        with torch.no_grad():
            expected, there = alone(ids), both(ids, source)
            if removed:
                switch_off_cross_attention(both, residual)
            difference = largest(both(ids, source) - expected)
        rows.append((f"{residual}-norm", largest(there - expected), difference))
        checks.append(at_most(f"largest difference, {residual}-norm", difference, 1e-5))
        checks.append(at_least(f"with cross-attention, {residual}-norm", largest(there - expected), 1e-2))
    stack, ids = gpt2_stack(length), tokens(length)
    gpt2 = random_model(seed, encoder=stack, decoder=stack | CAUSAL | {"embed": "shared", "cross": True}, head="tied")
    if removed:
        switch_off_cross_attention(gpt2, "pre")
    difference = difference_from_gpt2(gpt2, without_cross_attention(gpt2.state_dict()), ids, tokens(length))
    checks.append(at_most("decoder with the layers of GPT-2: largest difference from its formulas", difference, 1e-10))
    columns = ("norms", "with cross-attention", "removed" if removed else "not removed")
    return Finding(tuple(checks), (Table("Largest difference between the outputs", columns, rows),))


# ------------------------------------------------------------------------------------------------------ cross-attention


@lab("shapes", rows=("G4",), counterexample={"sublayer": "attention"}, try_next=("--sublayer attention", "--length 20"))
def keys_from_the_encoder(
    *,
    sublayer: Annotated[str, "cross: cross-attention; attention: the decoder's self-attention"] = "cross",
    length: Annotated[int, "tokens of source and target"] = 6,
    seed: int = 0,
) -> Finding:
    """In cross-attention the queries come from the decoder, the keys and values from the last layer of the encoder.

    An encoder–decoder reads a source and a target. If the target changes, the queries of the decoder's first layer
    change, and its keys and values do not, not by one bit. If the source changes, it is the other way round, and the
    output changes with it. The keys are the output of the last layer of the encoder, times W_K.
    """
    model, target, source = encoder_decoder(seed), tokens(length), tokens(length)
    name = f"decoder.layers.0.{sublayer}"
    base, output = recorded(model, name, target, source)
    rows = {"queries": [0.0, 0.0], "keys": [0.0, 0.0], "values": [0.0, 0.0], "output": [0.0, 0.0]}
    for i, inputs in enumerate(((target, (source + 1) % VOCAB), ((target + 1) % VOCAB, source))):
        other, changed = recorded(model, name, *inputs)
        pairs = zip(("query", "key", "value"), ("queries", "keys", "values"), strict=True)
        for field, row in pairs:
            rows[row][i] = largest(getattr(other, field) - getattr(base, field))
        rows["output"][i] = largest(changed - output)
    with torch.no_grad():
        memory = model.encode(source)
        assert memory is not None
        projection: Any = model.get_submodule(f"{name}.key")
        keys = projection(memory.states)
    return Finding(
        (
            equals("change of keys and values with the target", max(rows["keys"][1], rows["values"][1]), 0.0),
            at_least("change of the queries with the target", rows["queries"][1], 1e-2),
            at_least("change of keys and values with the source", min(rows["keys"][0], rows["values"][0]), 1e-2),
            at_least("change of the output with the source", rows["output"][0], 1e-3),
            at_most("keys against W_K times the encoder's output", largest(keys - base.key), 1e-5),
        ),
        (Table("Largest change in the first layer", ("", "the source changes", "the target changes"),
               [(name, *changes) for name, changes in rows.items()]),),
    )  # fmt: skip


@lab("shapes", rows=("G5", "P12"), counterexample={"sublayer": "attention"},
     try_next=("--source 'il fait beau' --target 'the weather is fine'", "--sublayer attention"))  # fmt: skip
def target_by_source(
    *,
    source: Annotated[str, "words that the encoder reads"] = "conduis prudemment toi",
    target: Annotated[str, "words that the decoder reads"] = "drive safe",
    sublayer: Annotated[str, "cross: cross-attention; attention: the decoder's self-attention"] = "cross",
    seed: int = 0,
) -> Finding:
    """Source and target may have different lengths: cross-attention is a matrix of target × source.

    Every word of the target has a query, and every word of the source a key. The scores of two queries with three keys
    are a matrix of 2 × 3, and each row becomes a distribution over the three words of the source. Only the keys and the
    values must be equally many, and both come from the source.
    """
    sides = {"target": target.split(), "source": source.split()}
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*sides["source"], *sides["target"]]))}
    model = encoder_decoder(seed)
    inputs = [torch.tensor([[vocabulary[word] % VOCAB for word in words]]) for words in sides.values()]
    attention, _ = recorded(model, f"decoder.layers.0.{sublayer}", *inputs)
    weights = attention.weights()[0]
    keys = sides["source" if sublayer == "cross" else "target"]
    expected = f"{len(sides['target'])} × {len(sides['source'])}"
    return Finding(
        (
            equals("shape of the weights", f"{weights.shape[1]} × {weights.shape[2]}", expected),
            at_most("largest distance of a row's sum from 1", largest(weights.sum(-1) - 1), 1e-5),
        ),
        (weights_map("The weights of one head", attention, sides["target"], keys),),
        note="The weights of the model are random, so it does not know which word means which.",
    )


# ---------------------------------------------------------------------------------------------------------------- sizes


@lab("shapes", rows=("G6",), counterexample={"head": "tied"},
     try_next=("--encoder-width 64 --decoder-width 8", "--head tied"))  # fmt: skip
def sizes_that_differ(
    *,
    encoder_width: Annotated[int, "width of the encoder"] = 24,
    decoder_width: Annotated[int, "width of the decoder"] = 16,
    embedding: Annotated[int, "size of the embeddings"] = 10,
    head: Annotated[str, "bilinear: hᵀ W e; tied: hᵀ e"] = "bilinear",
    seed: int = 0,
) -> Finding:
    """Embeddings, encoder and decoder may have different sizes, if a matrix is between them.

    W_K and W_V of cross-attention map the width of the encoder to that of a head, and W_Q maps the width of the decoder
    to it, so the two widths are free. A matrix of E × D maps embeddings of size E to the width D, as in ALBERT: V·E +
    E·D parameters in place of V·D. Where no matrix is between two sizes they must be equal: logits hᵀe need E = D.
    """
    stack: Tree = {"attention": {"heads": 2}, "embed": {"size": embedding}, "layers": 1}
    encoder, decoder = stack | {"width": encoder_width}, stack | CAUSAL | {"width": decoder_width, "cross": True}
    code, shapes, reached = "", list[tuple[str, str]](), False
    try:
        model = random_model(seed, encoder=encoder, decoder=decoder, head=head)
        model(tokens(4), tokens(6)).sum().backward()
        reached = all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        shapes = [(name, " × ".join(map(str, p.shape))) for name, p in model.named_parameters() if p.dim() == 2]
    except IncompatibleError as error:
        shapes = [("error", str(error))]
    try:
        random_model(seed, encoder=encoder, decoder=decoder | {"width": embedding + 2}, head="tied")
    except IncompatibleError as error:
        code = error.code
    albert = build_meta(read("albert-base-v2")).get_submodule("encoder.embed")
    factors = sum(p.numel() for name, p in albert.named_parameters() if name.startswith(("table", "project")))
    return Finding(
        (
            is_true("a gradient reaches every parameter", reached),
            equals("error for hᵀe with E ≠ D", code, "config.incompatible"),
            equals("ALBERT: parameters for V·E + E·D + D", factors, 30000 * 128 + 128 * 768 + 768),
            reported("ALBERT: they would be V·D", 30000 * 768),
        ),
        (Table("Matrices of the model", ("matrix", "shape"), shapes),),
    )


@lab("shapes", rows=("G7",), counterexample={"causal": True}, try_next=("--causal", "--length 12"))
def pooling(
    *,
    causal: Annotated[bool, "whether the model has a causal mask"] = False,
    length: Annotated[int, "tokens of the text"] = 8,
    seed: int = 0,
) -> Finding:
    """A prediction about a text can be made from any output vector of an encoder: first, last, another, or their mean.

    A classifier needs one vector per text. In an encoder every output vector depends on every token, so any of them
    will do; the mean of all is common too. With a causal mask the first vector depends on the first token alone, so a
    decoder must classify from the last one, or from the mean.
    """
    ids = tokens(length)
    kinds: dict[str, Any] = {"first": "first", "last": "last", "mean": "mean", "third": {"kind": "at", "index": 2}}
    checks, rows = list[Check](), list[list[float]]()
    for name, pool in kinds.items():
        head = {"kind": "classes", "classes": 3, "pool": pool}
        model = random_model(seed, encoder=STACK | {"mask": {"causal": causal}}, head=head)
        with torch.no_grad():
            states, _ = model.last_hidden_state(ids)
            vector = {"first": states[:, 0], "last": states[:, -1], "third": states[:, 2]}.get(name, states.mean(1))
            output: Any = model.head.output
            difference = largest(model(ids) - output(vector))
        rows.append(output_changes(model, ids, vocab=VOCAB).tolist())
        checks.append(at_most(f"{name}: logits against U·vector + b", difference, 1e-5))
        checks.append(at_least(f"{name}: smallest change with a token", min(rows[-1]), 1e-4))
    words = [f"token {i + 1}" for i in range(length)]
    title = "How much the logits change with each token"
    return Finding(tuple(checks), (Heatmap(title, rows, list(kinds), words, "vector", "changed token"),))
