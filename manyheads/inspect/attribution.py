"""Attribution: which layers, heads, words and positions a logit or an attention score comes from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import UnsupportedError, UsageError
from manyheads.inspect.measure import qk_matrix
from manyheads.model.recording import RecordedAttention, Tape, in_this_thread, record
from manyheads.model.stack import Stack
from manyheads.model.transformer import Transformer, as_transformer
from manyheads.parts.attention import Attention
from manyheads.parts.core import block_arguments, repeat_kv
from manyheads.parts.embed import as_token_embedding
from manyheads.parts.inputs import Inputs
from manyheads.parts.norm import frozen_norm

TOLERANCE = 1e-3  # relative, between a sum of parts in float32 and the whole


def token_predictor(model: nn.Module) -> tuple[Transformer, str]:
    """The model, if it is a transformer that predicts tokens, and the name of its last stack."""
    transformer = as_transformer(model, "this")
    if transformer.spec.head.output != "tokens":
        raise UnsupportedError("this needs a transformer that predicts tokens")
    return transformer, ("encoder" if transformer.decoder is None else "decoder")


def unembed(model: Transformer, states: Tensor) -> Tensor:
    """The logits of hidden states after the final norm."""
    logits: Tensor = model.head(states, table=model.table, padding_mask=None)
    return logits


@torch.no_grad()
def logit_lens(model: nn.Module, tape: Tape) -> dict[str, Tensor]:
    """The logits, B×L×V, that the final norm and the head give for the embeddings and for the output of every layer.

    nostalgebraist 2020. Those of the last layer are the model's own.
    """
    transformer, name = token_predictor(model)
    stack = transformer.last
    activations = tape.activations()
    names = [f"{name}.embed", *(f"{name}.layers.{i}" for i in range(stack.spec.layers))]
    return {layer: unembed(transformer, stack.norm(activations[layer])) for layer in names}


@dataclass(frozen=True)
class Attribution:
    """The terms of one logit: by the embedding, each head, each feed-forward network, and biases. They sum to it."""

    terms: dict[str, float]
    logit: float


@torch.no_grad()
def direct_logit_attribution(model: nn.Module, tape: Tape, position: int, token: int, row: int = 0) -> Attribution:
    """What each part of the residual stream adds directly to one logit, with the scale of the final norm held fixed.

    It needs a residual stream that is the sum of what the layers add (pre-norm or parallel). Heads are named as
    decoder.layers.3.attention.5.
    """
    transformer, name = token_predictor(model)
    stack = transformer.last
    activations, parts = tape.activations(), dict[str, Tensor]()
    parts[f"{name}.embed"] = activations[f"{name}.embed"][row, position]
    bias = torch.zeros_like(parts[f"{name}.embed"])
    for i in range(stack.spec.layers):
        layer = f"{name}.layers.{i}"
        for part in ("attention", "cross"):
            if f"{layer}.{part}" in activations:
                attention: Attention = getattr(stack.layer(i), part)
                for head, added in enumerate(head_outputs(attention, tape, f"{layer}.{part}")[row, :, position]):
                    parts[f"{layer}.{part}.{head}"] = added
                bias = bias if attention.output.bias is None else bias + attention.output.bias
        if f"{layer}.feedforward" in activations:
            parts[f"{layer}.feedforward"] = activations[f"{layer}.feedforward"][row, position]
    last = f"{name}.layers.{stack.spec.layers - 1}" if stack.spec.layers else f"{name}.embed"
    x = activations[last][row, position]
    total = torch.stack(list(parts.values())).sum(dim=0) + bias
    if not torch.allclose(total, x, rtol=TOLERANCE, atol=TOLERANCE * float(x.abs().max())):
        raise UnsupportedError(
            "the residual stream of this model is not the sum of what its layers add; "
            "direct logit attribution needs a pre-norm or parallel residual connection"
        )
    linear, offset = frozen_norm(stack.norm, x)

    def logits(vectors: Tensor) -> Tensor:
        return unembed(transformer, vectors)[..., token]

    zero = torch.zeros_like(x)
    base = float(logits(zero[None])[0])  # the bias of the head
    contributions = logits(torch.stack([linear(part) for part in (*parts.values(), bias)])) - base
    terms = dict(zip((*parts, "biases"), contributions.tolist(), strict=True))
    terms["biases"] += float(logits((zero + offset)[None])[0])
    return Attribution(terms, float(logits(stack.norm(x)[None])[0]))


def head_outputs(attention: Attention, tape: Tape, name: str) -> Tensor:
    """What each head adds to the residual stream, B×H×L×D, without the bias of the output projection."""
    outputs = [call.output for call in tape.calls(name)]
    if any(output is None for output in outputs):
        raise UsageError("the outputs of heads were not recorded", hint="record(model, activations=True)")
    heads_BHLK = torch.cat([output for output in outputs if output is not None], dim=2)
    weight = attention.output.weight.unflatten(1, (heads_BHLK.shape[1], -1))
    return torch.einsum("bhlk,dhk->bhld", heads_BHLK, weight)


def input_gradients(model: nn.Module, ids: Sequence[int], position: int, token: int) -> Tensor:
    """∂ logit / ∂ embedding of every input token, L×D; its product with the embedding is gradient × input."""
    stack = token_predictor(model)[0].last
    embeddings: list[Tensor] = []

    def replace_with_leaf(module: nn.Module, args: object, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    handle = stack.embed.register_forward_hook(in_this_thread(replace_with_leaf))
    try:
        with torch.enable_grad():
            logits = model(torch.tensor([list(ids)], device=next(model.parameters()).device))
    finally:
        handle.remove()
    return torch.autograd.grad(logits[0, position, token], embeddings)[0][0]


# -------------------------------------------------------------------------------------------- the terms of a score


@dataclass(frozen=True)
class ScoreTerms:
    """The scores of a head of the first layer, N×L, as terms of words (w) and positions (p) of query and key."""

    word_word: Tensor
    word_position: Tensor
    position_word: Tensor
    position_position: Tensor
    bias: Tensor  # of the projections and of the position scheme

    @property
    def total(self) -> Tensor:
        return self.word_word + self.word_position + self.position_word + self.position_position + self.bias


@torch.no_grad()
def score_terms(model: nn.Module, ids: Sequence[int], head: int, rows: slice = slice(None)) -> ScoreTerms:
    """Decomposes the scores of a head of the first layer by x = w + p: what q·k owes to words and to positions.

    w is the embedding without its position and p the rest. Norms before the attention act with their scale held fixed,
    so that the terms sum to the scores. `ids` are those of the encoder, if there is one. Only these rows are computed.
    """
    transformer = as_transformer(model, "a sum of the terms of a score")
    stack = transformer.stacks[0]
    embed, layer = as_token_embedding(stack.embed), stack.layer(0)
    matrix = qk_matrix(layer.attention, head)
    first = run_first_attention(transformer, stack, ids)
    word, x = first.word, first.joined
    if word.shape != x.shape:  # positions are concatenated after the words
        word = F.pad(word, (0, x.shape[-1] - word.shape[-1]))
    parts = [frozen_norm(embed.norm, x)[0](part) for part in (word, x - word)]
    if isinstance(embed.project, nn.Linear):
        parts = [part @ embed.project.weight.mT for part in parts]
    if not torch.equal(first.normed, first.embedded):
        layer_norm = frozen_norm(layer.residual.norms[0], first.embedded)[0]
        parts = [layer_norm(part) for part in parts]
    ww, wp, pw, pp = (left[rows] @ matrix @ right.mT for left in parts for right in parts)
    return ScoreTerms(ww, wp, pw, pp, bias=head_scores(first.call, head, rows) - (ww + wp + pw + pp))


@dataclass(frozen=True)
class FirstAttention:
    """What goes into the first attention of a stack: embeddings of one row of ids, L×D, and the recorded call."""

    word: Tensor  # before the position
    joined: Tensor  # with the position
    embedded: Tensor  # after the norm and the projection of the embedding
    normed: Tensor  # that the attention reads
    call: RecordedAttention


class FirstAttentionDone(Exception):  # noqa: N818 - a signal
    """Ends a forward pass whose other layers are not needed."""


def run_first_attention(model: Transformer, stack: Stack, ids: Sequence[int]) -> FirstAttention:
    activations: dict[str, Tensor] = {}
    embed, attention = as_token_embedding(stack.embed), stack.layer(0).attention

    def keep_joined(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        activations["word"], activations["joined"] = args[0][0], output[0]

    def keep_embedded(_: nn.Module, args: object, output: Tensor) -> None:
        activations["embedded"] = output[0]

    def keep_normed(_: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        activations["normed"] = args[0][0]
        raise FirstAttentionDone

    hooks = {embed.position: keep_joined, embed: keep_embedded, attention: keep_normed}
    with ExitStack() as on_exit, record(stack, attention.core) as tape:
        on_exit.enter_context(torch.compiler.set_stance("force_eager"))
        for module, hook in hooks.items():
            on_exit.callback(module.register_forward_hook(in_this_thread(hook)).remove)
        on_exit.enter_context(suppress(FirstAttentionDone))
        stack(Inputs.of(torch.tensor([list(ids)], device=next(model.parameters()).device)), table=model.table)
    return FirstAttention(**activations, call=tape[0])


def head_scores(call: RecordedAttention, head: int, rows: slice) -> Tensor:
    """The scores of one head, N×M, with the bias and before the mask, of a core whose heads are alike."""
    heads = slice(head, head + 1)
    query, key = call.query[:, heads, rows], repeat_kv(call.key, call.query)[:, heads]
    bias = call.bias if call.bias is None or call.bias.shape[1] == 1 else call.bias[:, heads]
    block = block_arguments(rows, slice(None), k=key, positions=call.positions, bias=bias)
    scores = call.core.scores(query, key, block["positions"])
    return (scores if bias is None else scores + block["bias"])[0, 0]
