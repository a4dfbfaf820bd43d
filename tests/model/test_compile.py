"""Compiled models are recorded, edited and trained as others are; in one file, because the compiler takes seconds to import."""

from __future__ import annotations

import warnings

import kinds
import pytest
import torch
from kinds import random_model, tokens
from small_runs import described

import manyheads
from manyheads import record
from manyheads.inspect.edit import ablate, edit
from manyheads.training.preparation import initial_model, prepare
from manyheads.training.run import read_run


def compile_layers(model):
    """Compiles the layers of a decoder; returns a list that has an entry per call of a compiled graph."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(graph)
            return graph.forward(*args)

        return run

    for layer in model.decoder.layers:
        layer.compile(dynamic=True, backend=backend)
    return calls


@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_a_compiled_model_is_recorded_eagerly(kind):
    model, ids = random_model(kinds.decoder(layers=1, core=kind), dtype=torch.float32).eval(), tokens(1, 4)
    with torch.no_grad(), record(model) as plain:
        expected = model(ids)
    calls = compile_layers(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of loading the compiler
        model(ids)  # compiles it without hooks
        assert calls
        calls.clear()
        with record(model) as tape:
            logits = model(ids)
    assert not calls
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert tape.names() == plain.names()
    for name in tape.names():
        torch.testing.assert_close(tape.weights(name), plain.weights(name), rtol=0, atol=1e-5)
    assert list(tape.activations()) == list(plain.activations())


def test_the_compiler_can_trace_a_recording_of_attentions():
    """As in training, where hooks are part of the compiled layers."""
    model, ids = random_model(kinds.decoder(layers=1)), tokens(1, 4)
    with record(model) as plain:
        model(ids)
    for layer in model.decoder.layers:
        layer.compile(dynamic=True, backend="eager")
    with warnings.catch_warnings(), record(model, activations=False) as tape:
        warnings.simplefilter("ignore")  # those of loading the compiler
        warnings.filterwarnings("error", "Dynamo does not know")
        model(ids)
    assert tape.names() == plain.names()
    for name in tape.names():
        torch.testing.assert_close(tape.weights(name), plain.weights(name))


def test_a_compiled_model_is_edited():
    model, ids = random_model(kinds.decoder(layers=1)).eval(), tokens()
    with edit(model, ablate("decoder.layers.0.attention", head=0)):
        expected = model(ids)
    calls = compile_layers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of loading the compiler
        model(ids)
        calls.clear()
        with edit(model, ablate("decoder.layers.0.attention", head=0)):
            torch.testing.assert_close(model(ids), expected)
    assert not calls


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # which loading the compiler raises
@pytest.mark.parametrize("name", ["masked", "causal"])  # the layers of an encoder, and of a decoder
@torch.no_grad()
def test_compiled_layers_give_the_same_logits_and_their_weights_keep_their_names(name):
    run, graphs = prepare(read_run(described(name, compile=True))), []
    compiled, plain = initial_model(run)[0].eval(), manyheads.build(run.model_spec, seed=run.spec.seed).eval()
    assert list(compiled.state_dict()) == list(plain.state_dict())

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ids = torch.randint(0, run.special_tokens.vocab_size, (2, 7))
    with torch.compiler.set_stance(force_backend=backend):
        plain(ids)
        assert not graphs
        logits = compiled(ids)
    assert graphs
    torch.testing.assert_close(logits, plain(ids))
