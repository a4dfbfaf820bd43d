"""Costs from the spec alone: published parameter counts, claim M1, and counts compared with those of a real run."""

from __future__ import annotations

import threading

import kinds
import pytest
import torch
from kinds import choices, first_choices, kind_id
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from manyheads import build, build_meta, presets, read_model, size
from manyheads.labs.chapters.families import PARAMETERS, ROUND_PARAMETERS
from manyheads.model.cache import state_bytes
from manyheads.model.cost import MultiplyAdds
from manyheads.spec import SLOTS, to_tree


def read_preset(name):
    return read_model(presets.preset(name))


def test_every_preset_has_a_published_count():
    assert set(presets.names()) == set(PARAMETERS) | set(ROUND_PARAMETERS)


@pytest.mark.parametrize("name", presets.names())
def test_parameter_counts_are_the_published_ones_and_nothing_is_allocated(name):
    model = build_meta(read_preset(name))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    low, high = ROUND_PARAMETERS.get(name, (PARAMETERS.get(name), PARAMETERS.get(name)))
    assert low <= count <= high


@pytest.mark.parametrize(("m", "n", "heads", "k"), [(1, 1, 1, 1), (3, 7, 2, 5), (40, 2, 4, 3), (13, 31, 3, 6)])
def test_m1_attention_costs_two_m_squared_k_two_m_n_k_and_two_n_squared_k(m, n, heads, k):
    width = heads * k
    stack = {"layers": 1, "width": width, "attention": {"heads": heads}}
    spec = read_model({"vocab": 5, "encoder": stack, "decoder": stack | {"cross": True, "mask": {"causal": True}}})

    def attention(m, n):
        """Multiply–adds of the three attentions without their projections."""
        by_part = size(spec, length=n, source_length=m).multiply_adds_by_part
        projections = {
            "encoder.layers.attention": 4 * m,
            "decoder.layers.attention": 4 * n,
            "decoder.layers.cross": 2 * m + 2 * n,
        }
        return [by_part[part] - tokens * width**2 for part, tokens in projections.items()]

    encoder, decoder, cross = attention(m, n)
    assert (encoder, cross, decoder) == (2 * m * m * width, 2 * m * n * width, 2 * n * n * width)
    twice = attention(2 * m, n)
    assert (twice[0], twice[2], twice[1]) == (4 * encoder, 2 * cross, decoder)


PARTS = [{slot: choice} for slot in ("core", "feedforward", "residual") for choice in first_choices(slot)]
PARTS += [{"attention": choice} for choice in choices("attention")]


@pytest.mark.parametrize("changes", PARTS, ids=lambda changes: kind_id(next(iter(changes.values()))))
def test_counted_multiply_adds_are_those_of_a_run(changes):
    """Counted on the meta device, and by torch in a real run with unfused attention."""
    spec = kinds.pair(**changes)
    model = build(spec).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(kinds.tokens(2, 7), kinds.tokens(2, 11))
    assert 2 * size(spec, batch=2, length=7, source_length=11).multiply_adds == counter.get_total_flops()


@pytest.mark.parametrize(
    "spec",
    [
        kinds.decoder(),
        kinds.decoder(attention={"heads": 4, "kv_heads": 1}),
        kinds.pair(),
        kinds.recurrent(),
        kinds.ngram(),
    ],
)
def test_cache_bytes_are_those_of_a_state(spec):
    model, ids = build(spec).eval(), kinds.tokens(2, 9)
    source = kinds.tokens(2, 9) if spec.encoder or spec.recurrent else None
    _, state = model.step(ids, model.start(source, capacity=9))
    cost = size(spec, batch=2, length=9)
    assert cost.cache_bytes == state_bytes(state) > 0
    assert cost.training_bytes == 4 * cost.weights_bytes + cost.activation_bytes
    assert cost.weights_bytes == 4 * cost.parameters == sum(p.numel() * 4 for p in model.parameters())


STACK = {"layers": 2, "width": 64, "attention": {"heads": 4}}


@pytest.mark.parametrize(
    "spec",
    [
        *(
            {"decoder": STACK | {"core": core, "position": "rope"}}
            for core in kinds.choices("core")
            if core["kind"] in ("dot", "argmax", "merged-qk")
        ),
        *(
            {"decoder": STACK | {"position": position}}
            for position in ("alibi", {"kind": "bucketed", "bidirectional": False}, "learned")
        ),
        {"encoder": STACK, "decoder": STACK | {"cross": True, "residual": {"dropout": 0.1}}},
        {"recurrent": {"width": 32}},
        {"ngram": {}},
    ],
    ids=str,
)
def test_activation_bytes_are_those_that_a_run_saves(spec):
    """What autograd saves in training on a CPU, where rows are not computed in blocks."""
    spec = read_model({"vocab": 300, **spec})
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, ids = build(spec).train(), kinds.tokens(4, 64, vocab=300)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(ids, ids) if spec.encoder or spec.recurrent else model(ids)
    assert loss.isfinite().all()
    measured = sum(count for storage, count in saved.items() if storage not in weights)
    assert size(spec, batch=4, length=64).activation_bytes == pytest.approx(measured, rel=0.02)


def test_an_encoder_has_no_cache():
    assert size(kinds.encoder(), length=5).cache_bytes is None
    assert to_tree(kinds.encoder())["encoder"]["layers"] == 2


def test_a_cache_has_a_key_and_a_value_per_layer_head_and_token():
    spec = kinds.decoder(layers=3, attention={"heads": 4, "kv_heads": 2, "size": 5})
    assert size(spec, batch=2, length=9).cache_bytes == 2 * 3 * 2 * 2 * 9 * 5 * 4


@pytest.mark.parametrize("cell", SLOTS["cell"].kinds)
def test_multiply_adds_of_a_recurrent_encoder_are_its_matrices_once_per_token(cell):
    spec = kinds.recurrent(cell=cell, bidirectional=False)
    encoder = build_meta(spec).encoder.reader
    matrices = sum(parameter.numel() for parameter in encoder.parameters() if parameter.dim() == 2)
    assert size(spec, batch=2, length=3, source_length=5).multiply_adds_by_part["encoder.reader"] == 2 * 5 * matrices


def test_a_prefix_costs_what_the_causal_mask_costs():
    assert (
        size(kinds.decoder(mask={"prefix": True}), length=9).multiply_adds
        == size(kinds.decoder(), length=9).multiply_adds
    )


def test_multiply_adds_are_those_of_this_thread_while_another_is_inside_a_module():
    model, ids = build(kinds.decoder()).eval(), kinds.tokens(1, 5)
    linear = next(module for module in model.decoder.layers[1].modules() if isinstance(module, torch.nn.Linear))
    thread, inside, done = threading.get_ident(), threading.Event(), threading.Event()

    def count(hook=None):
        with torch.no_grad(), MultiplyAdds(model) as counter:
            handle = linear.register_forward_pre_hook(hook) if hook else None
            model(ids)
        if handle:
            handle.remove()
        return counter.by_module

    def wait_inside(*_):
        if threading.get_ident() != thread:
            inside.set()
            done.wait(60)

    def start_other(*_):
        if threading.get_ident() == thread:
            model.decoder.norm.register_forward_pre_hook(wait_inside)
            other.start()
            assert inside.wait(60)

    other = threading.Thread(target=lambda: model.decoder.norm(torch.zeros(1, model.spec.decoder.width)))
    expected = count()
    try:
        assert count(start_other) == expected
    finally:
        done.set()
        other.join()
