"""Masks: which tokens a token may read, and how one knows that nothing leaks."""

from __future__ import annotations

import re
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.inspect.notebook import attention_table
from manyheads.labs.figures import heatmap
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging, near
from manyheads.labs.fitting import output_changes, small_model
from manyheads.labs.lab import check_choice, lab
from manyheads.labs.plain import attention_weights
from manyheads.model.builder import build
from manyheads.model.recording import record
from manyheads.model.spec import read_model
from manyheads.parts.core import DotSpec, check_rows, inverse_root
from manyheads.parts.inputs import Inputs
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions

QUICK_FOX = ("the", "quick", "brown")
PRINTED = [[0.91, 0.04, 0.05], [0.03, 0.74, 0.23], [0.01, 0.41, 0.58]]  # weights without a mask, in the document
RENORMALIZED = [[1, 0, 0], [0.039, 0.961, 0], [0.01, 0.41, 0.58]]


def lower_triangle(length: int) -> Tensor:
    return torch.ones(length, length).tril().bool()


@lab("masks", rows=("B1", "B2", "P12"), counterexample={"when": "after"},
     try_next=("--masked-score -3", "--masked-score -100"))  # fmt: skip
def mask_before_softmax(
    *,
    when: Annotated[str, "before or after the softmax: when the mask is applied"] = "before",
    masked_score: Annotated[float, "what is added to the score of a later token, in place of −∞"] = -10_000.0,
) -> Finding:
    """A mask is added to the scores before the softmax; multiplying by 0 and 1 after it is wrong.

    A score of −∞ gets the weight e^−∞ = 0, and the softmax divides by the sum of the others: each row still sums to 1.
    Multiplied afterwards, the weights of the masked tokens are missing: in the document's matrix, the rows of "the" and
    "quick" sum to 0.91 and 0.77, so their outputs are no longer means: the earlier the word, the shorter its output.
    A number does what −∞ does if e to its power is rounded to 0: with −3 a later token keeps a weight.
    """
    check_choice("when", when, ("before", "after"))
    printed, visible = torch.tensor(PRINTED, dtype=torch.float64), lower_triangle(3)
    multiplied = printed * visible
    bias = torch.where(visible, 0.0, masked_score).double()
    masked = attention_weights(printed.log(), torch.eye(3, dtype=torch.float64), bias_LM=bias)
    weights = masked if when == "before" else multiplied
    sums = [round(float(total), 10) for total in multiplied.sum(-1)]
    maps = {"No mask": printed, "Multiplied after the softmax": multiplied, "Added before the softmax": masked}
    return Finding(
        (
            *judging(
                "B1",
                at_most("largest difference between a row sum and 1", (weights.sum(-1) - 1).abs().max(), 1e-6),
                equals("largest weight of a later token", float(weights[~visible].max()), 0),
            ),
            *judging(
                "B2 P12",
                at_most("largest difference from the rows [1, 0, 0], [.039, .961, 0], [.01, .41, .58]",
                        (weights - torch.tensor(RENORMALIZED)).abs().max(), 5e-4),
                equals("row sums if multiplied after the softmax", str(sums), "[0.91, 0.77, 1.0]"),
                is_true("check_rows finds the rows that were multiplied", is_refused(multiplied)),
                is_true("and accepts those of the package", not is_refused(masked)),
            ),
        ),
        tuple(
            heatmap(title, values, QUICK_FOX, QUICK_FOX, visible=visible | (title == "No mask"))
            for title, values in maps.items()
        ),
    )  # fmt: skip


def is_refused(weights: Tensor) -> bool:
    try:
        check_rows(weights)
    except InputError:
        return True
    return False


# ------------------------------------------------------------------------------------------------------- causality


@torch.no_grad()
def randomize(model: Any) -> Any:
    """Weights that are larger than those at the start of training, so that attention is not uniform; in float64."""
    for parameter in model.double().parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 * inverse_root(parameter.shape[1]))
    return model.eval()


def two_stacks(causal: bool) -> Any:
    """A small encoder–decoder."""
    stack = {"layers": 2, "width": 16, "attention": {"heads": 2}, "position": "sinusoidal"}
    decoder = {"like": "encoder", "cross": True, "mask": {"causal": causal}}
    spec = read_model({"vocab": 16, "encoder": stack, "decoder": decoder})
    return randomize(build(spec))


def gradients(model: Any, ids: Tensor) -> Tensor:
    """The norm of the gradient of output i with respect to the vector of token j, L×L."""
    embedded: list[Tensor] = []
    hook = model.decoder.embed.register_forward_hook(lambda module, args, out: embedded.append(out))
    outputs = model(ids)[0].square().sum(-1)
    hook.remove()
    rows = [torch.autograd.grad(out, embedded[0], retain_graph=True)[0][0].norm(dim=-1) for out in outputs]
    return torch.stack(rows)


@lab("masks", rows=("B3", "B7"), counterexample={"mask": "none"},
     try_next=("--position none", "--position rope --length 12"))  # fmt: skip
def causality(
    *,
    mask: Annotated[str, "causal or none; none plants a leak"] = "causal",
    position: Annotated[str, "how positions are represented, such as rope"] = "sinusoidal",
    length: Annotated[int, "number of tokens"] = 8,
) -> Finding:
    """In a causal decoder no output depends on a later token.

    The model is a black box here: replace token j and see which outputs change. None before j may change, and the
    gradient of output i with respect to token j must be 0 for j > i; a leak shows as a cell above the diagonal. In an
    encoder–decoder the same holds for the decoder's own tokens, while every output may depend on the whole source.
    """
    check_choice("mask", mask, ("causal", "none"))
    causal, later = mask == "causal", ~lower_triangle(length)
    model = randomize(small_model(position={"kind": position}, mask={"causal": causal}))
    ids, source = torch.randint(0, 16, (2, 1, length))
    change, gradient = output_changes(model, ids, vocab=16), gradients(model, ids)
    pair = two_stacks(causal)
    within = output_changes(pair, ids, source, vocab=16)
    across = output_changes(lambda changed: pair(ids, changed), source, vocab=16)
    smallest = min(float(matrix[~later].min()) for matrix in (change, gradient, within))
    return Finding(
        (
            *judging(
                "B3",
                at_most("largest change of an output before the replaced token", change[later].max(), 1e-10),
                at_most("largest gradient of an output with respect to a later token", gradient[later].max(), 1e-10),
            ),
            at_least("smallest change or gradient from the token itself or an earlier one", smallest, 1e-8),
            *judging(
                "B7",
                at_most("encoder–decoder: largest change of an output before the token", within[later].max(), 1e-10),
                at_least("encoder–decoder: smallest change by a token of the source", across.min(), 1e-8),
            ),
        ),
        (
            heatmap("Change of output i when token j is replaced", change, row_axis="output i", column_axis="token j",
                    visible=change > 0),
            heatmap("Encoder–decoder: change of output i when token j of the source is replaced", across,
                    row_axis="output i", column_axis="source token j"),
        ),
        note="A hatched cell did not change at all.",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- padding


@lab("masks", rows=("B4", "B5"), counterexample={"masked": False}, row_counterexamples={"B5": {"num_visible": 1}},
     try_next=("--pads 100", "--position rope"))  # fmt: skip
def padding(
    *,
    pads: Annotated[int, "number of padding tokens"] = 3,
    position: Annotated[str, "how positions are represented, such as rope"] = "sinusoidal",
    masked: Annotated[bool, "whether the model is told which tokens are padding"] = True,
    num_visible: Annotated[int, "keys that the row with no key sees after all, 0 to 4"] = 0,
) -> Finding:
    """Padding changes nothing: a padded text gives the outputs of the text alone, on whichever side the padding is.

    Texts of a batch are filled up to one length with tokens that mean nothing. Their keys are masked, so their weight
    is exactly 0, and positions count only the real tokens. A row that sees no key at all has no distribution: 0/0 would
    be NaN and spoil the whole batch, so its output is defined as 0, with a gradient of 0.
    """
    model = randomize(small_model("encoder", position={"kind": position}))
    ids, fill = torch.randint(1, 16, (1, 6)), torch.zeros(1, pads, dtype=torch.long)
    (_, alone), differences, on_pads = first_layer(model, ids), [], 0.0
    for left in (False, True):
        row = torch.cat((fill, ids) if left else (ids, fill), dim=1)
        is_pad = torch.zeros_like(row, dtype=torch.bool)
        is_pad[:, slice(0, pads) if left else slice(6, None)] = True
        weights, out = first_layer(model, Inputs(row, padding_mask=is_pad) if masked else row)
        differences.append((out[~is_pad[0]] - alone).abs().max())
        on_pads = max(on_pads, float(weights[..., is_pad[0]].max()))
    output, gradient = fully_masked(num_visible)
    return Finding(
        (
            *judging(
                "B4",
                at_most("largest change of an output, padded on the right", differences[0], 1e-5),
                at_most("largest change of an output, padded on the left", differences[1], 1e-5),
                equals("largest weight of a padded key", on_pads, 0),
            ),
            *judging(
                "B5",
                equals("largest output of a row that sees no key", output, 0),
                equals("largest gradient of that row", gradient, 0),
            ),
        ),
        (heatmap("Weights of a head, padded on the left", weights[0], visible=~is_pad.expand_as(weights[0])),),
    )  # fmt: skip


def fully_masked(num_visible: int) -> tuple[float, float]:
    """The largest output and gradient of attention if all keys but `seen` are padding; NaN if there is one."""
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    mask = Mask(4, 4, q.device, padding_BM=torch.arange(4)[None] >= num_visible)
    index = torch.arange(4)[None]
    out = DotSpec().build(1, 8, 8)(q, k, v, mask=mask, positions=Positions(index, index))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    return float(out.abs().max().detach()), float(torch.stack(grads).abs().max())  # which keep a NaN


# ---------------------------------------------------------------------------------------------------- a later word


@torch.no_grad()
def first_layer(model: Any, inputs: Inputs | Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the first layer, H×L×L, and the outputs of the model, L×V, for one text."""
    with record(model) as tape:
        outputs = model(inputs)
    return tape[0].weights()[0], outputs[0]


BIG_DOG = ("a", "big", "dog", "chased", "another", "big", "dog")
FIRST_BIG, DOG, LATER_BIG = 1, 2, 5


@lab("masks", rows=("P3", "B6", "P12"), counterexample={"mask": "none"}, row_counterexamples={"B6": {"hatched": False}},
     try_next=("--seed 1", "--seed 2"))  # fmt: skip
def an_earlier_word(
    *,
    mask: Annotated[str, "causal or none"] = "causal",
    hatched: Annotated[bool, "whether the page is given the mask"] = True,
) -> Finding:
    """Under a causal mask an earlier word cannot see a later one: "dog" does not see the "big" that follows it.

    Without positions and without a mask, both "big" have the same vector, so "dog" gives them the same weight and
    cannot know which of them is its own. A causal mask hides the later one: its weight is exactly 0, and "dog" does not
    change if it is replaced. So order comes in through the mask alone. A masked cell is not a small weight, and is
    drawn hatched.
    """
    check_choice("mask", mask, ("causal", "none"))
    words = sorted(set(BIG_DOG))
    ids = torch.tensor([[words.index(word) for word in BIG_DOG]])
    other = ids.clone()
    other[0, LATER_BIG] = words.index("a")
    models = {causal: small_model(layers=1, vocab=len(words), mask={"causal": causal}) for causal in (False, True)}
    randomize(models[True])
    models[False].double().load_state_dict(models[True].state_dict())
    weights, outputs = first_layer(models[mask == "causal"], ids)
    free, visible = first_layer(models[False], ids)[0], lower_triangle(len(BIG_DOG))
    page = attention_table(weights[0], BIG_DOG, BIG_DOG, mask_LM=visible if hatched else None)
    change = (first_layer(models[mask == "causal"], other)[1] - outputs)[DOG].abs().max()
    return Finding(
        (
            *judging(
                "P3 P12",
                equals('largest weight from "dog" to the later "big"', float(weights[:, DOG, LATER_BIG].max()), 0),
                equals('change of "dog" when the later "big" is replaced', float(change), 0),
                near('without a mask: weight of the later "big", divided by that of the first',
                     float((free[:, DOG, LATER_BIG] / free[:, DOG, FIRST_BIG]).mean()), 1, 1e-5),
            ),
            *judging("B6", equals("hatched cells of a page", len(re.findall(r'class="[^"]*\bhidden\b', page)),
                                  int((~visible).sum()))),
        ),
        (
            heatmap("No mask", free[0], BIG_DOG, BIG_DOG),
            heatmap("Causal mask", weights[0], BIG_DOG, BIG_DOG, visible=visible),
        ),
    )  # fmt: skip
