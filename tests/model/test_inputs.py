"""Inputs of a model: what it cannot take is an error with a code; padding, positions and document_ids are as documented."""

from __future__ import annotations

from functools import partial

import kinds
import pytest
import torch
from kinds import random_model, tokens
from raising import raises

from manyheads import Inputs, build, read_model, record
from manyheads.parts.core import DotSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions

FALSE = torch.zeros(2, 9, dtype=torch.bool)
LONG = {"kind": "rope", "scaling": {"kind": "longrope"}}
DYNAMIC = {"kind": "rope", "scaling": {"kind": "dynamic"}}


@pytest.mark.parametrize(
    ("fields", "code", "values"),
    [
        ({"tokens": torch.zeros(9, dtype=torch.long)}, "input.shape", ["tokens", "(9,)"]),
        ({"tokens": [[1, 2]]}, "input.shape", ["tokens", "list"]),
        ({"tokens": tokens()[:, :0]}, "input.length", ["tokens", "(2, 0)"]),
        ({"padding_mask": FALSE[:, :5]}, "input.shape", ["padding_mask", "(2, 5)", "(2, 9)"]),
        ({"padding_mask": FALSE.T}, "input.shape", ["padding_mask", "(9, 2)", "(2, 9)"]),
        ({"padding_mask": FALSE.long()}, "input.shape", ["padding_mask", "torch.int64", "torch.bool"]),
        ({"padding_mask": [[False]]}, "input.shape", ["padding_mask", "list", "torch.bool"]),
        ({"positions": torch.zeros(3, 9, dtype=torch.long)}, "input.shape", ["positions", "(3, 9)", "(2, 9)"]),
        ({"positions": FALSE}, "input.shape", ["positions", "torch.bool", "torch.int64"]),
        ({"document_ids": torch.zeros(2, 8, dtype=torch.long)}, "input.shape", ["document_ids", "(2, 8)"]),
        (
            {"document_ids": torch.zeros(2, 9, dtype=torch.complex64)},
            "input.shape",
            ["document_ids", "torch.complex64"],
        ),
        ({"token_type_ids": torch.zeros(2, 8, dtype=torch.long)}, "input.shape", ["token_type_ids", "(2, 8)"]),
        ({"prefix_lengths": torch.zeros(2)}, "input.shape", ["prefix_lengths", "torch.float32"]),
        ({"prefix_lengths": torch.zeros(2, 9, dtype=torch.long)}, "input.shape", ["prefix_lengths", "(2, 9)", "(2,)"]),
        ({"final_length": 3}, "input.length", ["final_length", "3", "9"]),
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error_that_gives_the_field_and_both_shapes(fields, code, values):
    with raises(code, *values):
        Inputs(**({"tokens": tokens()} | fields))


def decoder(**changes):
    return random_model(kinds.decoder(**changes))


def with_head(spec, kind):
    return random_model(spec.replace(head={"kind": kind}))


def patches(batch, length):
    return torch.zeros(batch, length, 3, dtype=torch.float64)


def stepped(model, inputs=None):
    """The state after one step."""
    return model.step(tokens() if inputs is None else inputs, model.start())[1]


def types_for_an_autoencoder(name, what, class_token):
    """Passes zeros as types of the patches of the encoder, or of the mask tokens of the decoder."""
    target, source = (
        Inputs(patches(2, length), **{name: torch.zeros(2, length, dtype=torch.long)} if typed else {})
        for length, typed in ((5, what == "mask tokens"), (3, what == "patches"))
    )
    return autoencoder(class_token=class_token)(target, source)


PACKED = Inputs(tokens(), document_ids=tokens())
PACKED_AT = Inputs(tokens(), document_ids=tokens(), positions=tokens())

# what is run, the code of its error, and what its message must contain
REFUSED = {
    "a source for a decoder": (lambda: decoder()(tokens(), tokens()), "input.invalid", "decoder"),
    "a source for an n-gram model": (
        lambda: random_model(kinds.ngram())(tokens(), tokens()),
        "input.invalid",
        "source",
    ),
    "a source for a recurrent decoder": (
        lambda: random_model(kinds.recurrent(source=False))(tokens(), tokens()),
        "input.invalid",
        "source",
    ),
    "no source for an encoder–decoder": (lambda: random_model(kinds.pair())(tokens()), "input.invalid", "source"),
    "no source for a recurrent pair": (lambda: random_model(kinds.recurrent())(tokens()), "input.invalid", "source"),
    "as many sources as targets": (lambda: random_model(kinds.pair())(tokens(), tokens(3)), "input.shape", "2 targets"),
    "prefix without a prefix mask": (
        lambda: decoder()(Inputs(tokens(), prefix_lengths=torch.tensor([1, 2]))),
        "input.invalid",
        "mask.prefix",
    ),
    "a prefix mask without prefix": (lambda: decoder(mask={"prefix": True})(tokens()), "input.invalid", "prefix"),
    "types without a table": (
        lambda: decoder()(Inputs(tokens(), token_type_ids=tokens())),
        "input.invalid",
        "embed.type_vocab_size",
    ),
    "types for an n-gram model": (
        lambda: random_model(kinds.ngram())(Inputs(tokens(), token_type_ids=tokens())),
        "input.invalid",
        "types",
    ),
    "task types for an n-gram model": (
        lambda: random_model(kinds.ngram())(Inputs(tokens(), task_type_ids=tokens())),
        "input.invalid",
        "types",
    ),
    "types for a recurrent model": (
        lambda: random_model(kinds.recurrent(source=False))(Inputs(tokens(), token_type_ids=tokens())),
        "input.invalid",
        "embed.type_vocab_size",
    ),
    "task types for a recurrent source": (
        lambda: random_model(kinds.recurrent())(tokens(), Inputs(tokens(), task_type_ids=tokens())),
        "input.invalid",
        "embed.task_type_vocab_size",
    ),
    "positions for an n-gram model": (
        lambda: random_model(kinds.ngram())(Inputs(tokens(), positions=tokens())),
        "input.invalid",
        "positions",
    ),
    "document_ids for an n-gram model": (lambda: random_model(kinds.ngram())(PACKED), "input.invalid", "document_ids"),
    "document_ids for a recurrent model": (
        lambda: random_model(kinds.recurrent(source=False))(PACKED),
        "input.invalid",
        "document_ids",
    ),
    "document_ids with angles that depend on the length": (
        lambda: decoder(position=DYNAMIC)(PACKED),
        "input.invalid",
        "final_length",
    ),
    "document_ids of the target alone": (
        lambda: random_model(kinds.pair())(PACKED, tokens()),
        "input.invalid",
        "document_ids",
    ),
    "document_ids at a later step": (
        lambda: (m := decoder()).step(PACKED, stepped(m)),
        "input.invalid",
        "document_ids",
    ),
    "document_ids for a pooled head": (
        lambda: with_head(kinds.encoder(), "classes")(PACKED),
        "input.invalid",
        "document_ids",
    ),
    "given positions of packed documents that stop": (
        lambda: (m := decoder()).step(PACKED, stepped(m, PACKED_AT)),
        "input.invalid",
        "positions",
    ),
    "a token past the vocabulary": (lambda: decoder()(tokens() * 0 + 23), "input.invalid", "23"),
    "a token below 0": (lambda: random_model(kinds.ngram())(tokens() * 0 - 1), "input.invalid", "-1"),
    "a type past the table": (
        lambda: decoder(embed={"type_vocab_size": 2})(Inputs(tokens(), token_type_ids=tokens() * 0 + 5)),
        "input.invalid",
        "type 5",
    ),
    "tokens that are floats": (lambda: decoder()(tokens().float()), "input.shape", "torch.float32"),
    "tokens that are a list": (lambda: decoder()([[1, 2]]), "input.shape", "list"),
    "three axes": (lambda: decoder()(tokens()[..., None]), "input.shape", "(2, 9, 1)"),
    "three axes, n-gram": (lambda: random_model(kinds.ngram())(tokens()[..., None]), "input.shape", "(2, 9, 1)"),
    "three axes, recurrent": (
        lambda: random_model(kinds.recurrent(source=False))(tokens()[..., None]),
        "input.shape",
        "(2, 9, 1)",
    ),
    "no tokens": (lambda: decoder()(tokens()[:, :0]), "input.length", "(2, 0)"),
    "another number of rows than before": (
        lambda: (m := decoder()).step(tokens(3), stepped(m)),
        "input.shape",
        "3",
    ),
    "no state": (lambda: decoder().step(tokens(), None), "input.invalid", "NoneType"),
    "the state of an n-gram model": (
        lambda: decoder().step(tokens(), random_model(kinds.ngram()).start()),
        "input.invalid",
        "NgramState",
    ),
    "the state of a transformer": (
        lambda: random_model(kinds.ngram()).step(tokens(), decoder().start()),
        "input.invalid",
        "TransformerState",
    ),
    "a list as a state": (
        lambda: random_model(kinds.recurrent(source=False)).step(tokens(), []),
        "input.invalid",
        "list",
    ),
    "the state of another decoder": (
        lambda: decoder().step(tokens(), decoder(layers=3).start()),
        "input.invalid",
        "another model",
    ),
    "the state of a decoder for a pair": (
        lambda: random_model(kinds.pair()).step(tokens(), decoder().start()),
        "input.invalid",
        "another model",
    ),
    "the state of another order": (
        lambda: random_model(kinds.ngram()).step(tokens(), random_model(kinds.ngram(order=5)).start()),
        "input.invalid",
        "another model",
    ),
    "rows by a boolean mask": (
        lambda: stepped(decoder()).select(torch.tensor([True, False])),
        "input.shape",
        "integers",
    ),
    "a row that the state has not": (lambda: stepped(decoder()).select(torch.tensor([5])), "input.shape", "row 5"),
    "more tokens than the cache": (
        lambda: (m := decoder()).step(tokens(), m.start(capacity=4)),
        "input.length",
        "capacity of 4",
    ),
    "a capacity of 10⁹": (lambda: decoder().start(capacity=10**9), "input.length", "1000000000"),
    "a capacity of 0": (lambda: decoder().start(capacity=0), "input.length", "0"),
    "a negative capacity": (lambda: random_model(kinds.ngram()).start(capacity=-1), "input.length", "-1"),
    "half a token": (
        lambda: random_model(kinds.recurrent()).start(tokens(), capacity=2.5),
        "input.length",
        "2.5",
    ),
    "another final length than at the start": (
        lambda: (m := decoder()).step(Inputs(tokens(), final_length=30), m.start(capacity=20)),
        "input.length",
        "30",
    ),
    "no capacity where the angles depend on the length": (
        lambda: decoder(position=LONG).start(),
        "model.unsupported",
        "capacity",
    ),
    "generation by an encoder": (lambda: random_model(kinds.encoder()).start(), "model.unsupported", "causal"),
    "generation without a causal mask": (
        lambda: decoder(mask={"causal": False}).start(),
        "model.unsupported",
        "causal",
    ),
    "generation by an autoencoder": (
        lambda: autoencoder(causal=True).start(patches(2, 3)),
        "model.unsupported",
        "causal",
    ),
    "generation by a pooled head": (
        lambda: with_head(kinds.decoder(), "classes").start(),
        "model.unsupported",
        "pooled",
    ),
    "generation by a pooled n-gram head": (
        lambda: with_head(kinds.ngram(), "classes").start(),
        "model.unsupported",
        "pooled",
    ),
    "generation by a pooled recurrent head": (
        lambda: with_head(kinds.recurrent(source=False), "vector").start(),
        "model.unsupported",
        "pooled",
    ),
    "padding for mask tokens": (
        lambda: autoencoder()(Inputs(patches(2, 6), padding_mask=FALSE[:, :6]), patches(2, 3)),
        "input.invalid",
        "padding",
    ),
    **{
        f"{name} for {what}{' with a class token' if class_token else ''}": (
            partial(types_for_an_autoencoder, name, what, class_token),
            "input.invalid",
            "types",
        )
        for name in ("token_type_ids", "task_type_ids")
        for what in ("patches", "mask tokens")
        for class_token in (False, True)
    },
    "padding for mask tokens with a class token": (
        lambda: autoencoder(class_token=True)(Inputs(patches(2, 5), padding_mask=FALSE[:, :5]), patches(2, 3)),
        "input.invalid",
        "padding",
    ),
    "as many images as targets": (lambda: autoencoder()(patches(1, 6), patches(2, 3)), "input.shape", "1 targets"),
    "patches of another dtype": (
        lambda: autoencoder()(torch.zeros(1, 6, 3), torch.zeros(1, 3, 3)),
        "input.shape",
        "torch.float32",
    ),
    "an index past the end": (lambda: pooled_at(20)(tokens()), "input.length", "20"),
    "an index before the start": (lambda: pooled_at(-20)(tokens()), "input.length", "-20"),
    "recording a number": (lambda: record(5).__enter__(), "usage.argument", "int"),
    "initial values beyond the dtype": (
        lambda: build(kinds.decoder().replace(init={"std": 1e6}), dtype=torch.float16),
        "config.out-of-range",
        "torch.float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_cannot_use_is_an_error(name):
    run, code, value = REFUSED[name]
    with raises(code, value):
        run()


def pooled_at(index):
    head = {"kind": "vector", "pool": {"kind": "at", "index": index}}
    return random_model(read_model({"vocab": kinds.VOCAB, "encoder": kinds.stack(), "head": head}))


def test_keys_of_another_batch_size_are_an_error():
    core, x = DotSpec().build(1, 8, 8), torch.randn(3, 1, 5, 8)
    index = torch.arange(5)[None]
    with raises("input.shape", (3, 1, 5, 8), (1, 1, 5, 8)):
        core(x, x[:1], x[:1], mask=Mask(5, 5, x.device), positions=Positions(index, index))


# ----------------------------------------------------------------------------------------------------------- positions


POSITIONS = [
    {"kind": "sinusoidal"},
    {"kind": "learned", "length": 64},
    {"kind": "rope"},
    {"kind": "alibi"},
    {"kind": "clipped", "clip": 3},
]
GIVEN = torch.tensor([[10, 11, 14, 15, 20, 21, 22, 23, 24], [0, 3, 6, 9, 12, 13, 14, 15, 16]])


@pytest.mark.parametrize("position", POSITIONS, ids=kinds.kind_id)
@pytest.mark.parametrize("capacity", [None, 20])
def test_the_next_step_continues_given_positions(position, capacity):
    model, ids = decoder(position=position), tokens()
    full = model(Inputs(ids, positions=GIVEN))
    _, state = model.step(Inputs(ids[:, :5], positions=GIVEN[:, :5]), model.start(capacity=capacity))
    for i in range(5, 9):
        logits, state = model.step(ids[:, i : i + 1], state)
        torch.testing.assert_close(logits[:, 0], full[:, i])


def test_given_positions_continue_after_padding():
    model, ids = decoder(position="rope"), tokens()
    positions = torch.tensor([[10, 11, 12, 0, 0, 13, 14, 15, 16], [0, 5, 6, 7, 8, 9, 10, 11, 12]])
    padding_mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 9], dtype=torch.bool)
    full = model(Inputs(ids, positions=positions, padding_mask=padding_mask))
    state = stepped(model, Inputs(ids[:, :5], positions=positions[:, :5], padding_mask=padding_mask[:, :5]))
    torch.testing.assert_close(model.step(ids[:, 5:], state)[0], full[:, 5:])


def test_a_recurrent_network_continues_given_positions():
    model, ids = random_model(kinds.recurrent(source=False, position="sinusoidal")), tokens()
    full = model(Inputs(ids, positions=GIVEN))
    state = stepped(model, Inputs(ids[:, :5], positions=GIVEN[:, :5]))
    _, state = model.step(Inputs(ids[:, :2], padding_mask=torch.ones(2, 2, dtype=torch.bool)), state)
    torch.testing.assert_close(model.step(ids[:, 5:], state)[0], full[:, 5:])


def test_negative_positions_are_continued():
    model, ids, positions = decoder(position="rope"), tokens(), torch.arange(9)[None] - 4
    state = stepped(model, Inputs(ids[:, :4], positions=positions[:, :4]))
    torch.testing.assert_close(model.step(ids[:, 4:], state)[0], model(Inputs(ids, positions=positions))[:, 4:])


def test_positions_continue_over_a_step_with_padding():
    model, ids = decoder(position={"kind": "learned", "length": 20}), tokens()
    padding_mask = torch.tensor([[True, False, False], [True, False, False]])
    more = Inputs(torch.cat((ids[:, :1], ids[:, 5:7]), dim=1), padding_mask=padding_mask)
    logits, _ = model.step(more, stepped(model, ids[:, :5]))
    torch.testing.assert_close(logits[:, 1:], model(ids)[:, 5:7])


def test_relative_positions_depend_on_offsets_alone():
    model, ids = decoder(position={"kind": "relative", "length": 9}), tokens()
    torch.testing.assert_close(model(Inputs(ids, positions=torch.arange(1000, 1009)[None])), model(ids))
    with raises("input.length", "offset of 9", "ends at 8"):
        model(tokens(length=10))


# ------------------------------------------------------------------------------------------------- padding and document_ids


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_the_segment_number_of_padding_does_not_matter(number):
    """Between documents, and after a packed prompt that is continued: no position moves."""
    model = decoder(position={"kind": "learned", "length": 9})
    first, second = tokens(1, 2), tokens(1, 3, seed=5)
    row, padding_mask = torch.cat((first, tokens(1, 1), second), dim=1), torch.tensor([[0, 0, 1, 0, 0, 0]]).bool()
    out = model(Inputs(row, padding_mask=padding_mask, document_ids=torch.tensor([[0, 0, number, 1, 1, 1]])))
    torch.testing.assert_close(out[:, 3:], model(second))
    prompt = Inputs(row[:, :3], padding_mask=padding_mask[:, :3], document_ids=torch.tensor([[0, 0, number]]))
    more, _ = model.step(Inputs(second, document_ids=torch.zeros(1, 3, dtype=torch.long)), stepped(model, prompt))
    torch.testing.assert_close(more, model(torch.cat((first, second), dim=1))[:, 2:])


def test_the_position_of_padding_does_not_change_angles_that_depend_on_the_length():
    model = decoder(position={"kind": "rope", "scaling": {"kind": "longrope", "length": 4}})
    inputs = Inputs(
        tokens(1, 3), positions=torch.tensor([[0, 1, 900]]), padding_mask=torch.tensor([[False, False, True]])
    )
    torch.testing.assert_close(model(inputs)[:, :2], model(tokens(1, 3)[:, :2]))


def test_padding_takes_no_position_in_a_packed_row():
    model, ids = decoder(position={"kind": "learned", "length": 4}), tokens(1, 10)
    padding_mask = torch.zeros(1, 10, dtype=torch.bool)
    padding_mask[0, 4:] = True
    document_ids = torch.tensor([[0, 0, 1, 1] + [-1] * 6])
    torch.testing.assert_close(
        model(Inputs(ids, padding_mask=padding_mask, document_ids=document_ids))[:, 2:4], model(ids[:, 2:4])
    )


def test_a_segment_number_that_comes_back_is_the_same_document():
    model, ids = decoder(position="sinusoidal"), tokens(1, 4)
    out = model(Inputs(ids, document_ids=torch.tensor([[0, 1, 0, 1]])))
    torch.testing.assert_close(out[:, [0, 2]], model(ids[:, [0, 2]]))
    state = stepped(model, Inputs(ids[:, :3], document_ids=torch.tensor([[0, 1, 0]])))
    torch.testing.assert_close(model.step(Inputs(ids[:, 3:], document_ids=torch.tensor([[1]])), state)[0], out[:, 3:])


def test_the_visible_cells_of_a_recorded_attention_have_the_shape_of_its_rows():
    model = random_model(kinds.encoder())
    with record(model) as attentions:
        model(Inputs(tokens(), padding_mask=torch.tensor([[False] * 9, [False] * 5 + [True] * 4])))
    assert attentions[0].visible().shape == (2, 1, 9, 9)


# ---------------------------------------------------------------------------------------------------------- mask tokens


def autoencoder(causal=False, class_token=False):
    stack = {"layers": 1, "width": 16, "attention": {"heads": 2}, "position": {"kind": "learned", "length": 6}}
    encoder = stack | {"embed": {"kind": "patches", "pixels": 3, "class_token": class_token}}
    decoder = stack | {"embed": {"kind": "mask-tokens", "class_token": class_token}, "mask": {"causal": causal}}
    return random_model(read_model({"encoder": encoder, "decoder": decoder, "head": {"kind": "pixels", "pixels": 3}}))


def test_padded_patches_do_not_replace_real_ones():
    model, target = autoencoder(), patches(2, 6)
    visible = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([[1, 4, 1], [0, 2, 5]])
    padding_mask = torch.tensor([[False, False, True], [False, False, False]])
    both = model(target, Inputs(visible, positions=positions, padding_mask=padding_mask))
    alone = model(target[:1], Inputs(visible[:1, :2], positions=positions[:1, :2]))
    torch.testing.assert_close(both[:1], alone)
    with raises("input.length", "position 6"):
        model(target, Inputs(visible, positions=positions + 1))
    with raises("input.length", "position 5", "4 positions"):
        model(target[:, :4], Inputs(visible, positions=positions))


def test_nan_at_padding_does_not_matter():
    model, target = autoencoder(), patches(1, 6)
    visible = torch.randn(1, 3, 3, dtype=torch.float64)
    with_nan = visible.clone()
    with_nan[0, 2] = torch.nan
    positions, padding_mask = torch.tensor([[1, 4, 0]]), torch.tensor([[False, False, True]])
    outputs = [model(target, Inputs(x, positions=positions, padding_mask=padding_mask)) for x in (visible, with_nan)]
    assert torch.equal(*outputs)
