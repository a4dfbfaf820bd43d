"""Products with quantized weights: every kernel gives the numbers of torch, for each vector alone or among others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings

import gguf
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch import nn

from manyheads.kernels import library
from manyheads.kernels.blocks import FORMATS
from manyheads.kernels.linear import quantized_linear, tiled_linear
from manyheads.kernels.weight import QuantizedWeight

VARIANTS = library.kernels().variants


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    monkeypatch.setenv(library.VARIANT, request.param)
    return request.param


def matrix(rows=37, size=96, seed=1):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_gguf_files(name):
    kind, weights = gguf.GGMLQuantizationType[name.upper()], matrix()
    weights[3, 32:64] = 0.0  # a block without a scale
    rows = FORMATS[name].quantize(weights)
    assert rows.numpy().tobytes() == gguf.quantize(weights.numpy(), kind).tobytes()
    expected = torch.from_numpy(gguf.dequantize(rows.numpy(), kind))
    assert torch.equal(FORMATS[name].dequantize(rows), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_all_bytes_that_a_file_may_hold_are_read_alike(name, variant):
    """Scales below the smallest normal number, and q = −128."""
    rows = torch.randint(0, 256, (64, 3 * FORMATS[name].block_bytes), generator=torch.Generator().manual_seed(2))
    blocks = rows.unflatten(1, (3, -1))
    for byte in (1, 3) if name == "q4_1" else (1,):
        blocks[..., byte] &= 0b10110011  # no infinite scale
    rows = rows.to(torch.uint8)
    expected = FORMATS[name].dequantize(rows)
    assert torch.equal(torch.ops.manyheads.dequantize(rows, name), expected)
    x = matrix(2)
    out = torch.ops.manyheads.quantized_linear(x, rows, None, name, False)
    torch.testing.assert_close(out, F.linear(x, expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("int8_activations", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_kernel_is_the_same_product_in_torch(name, int8_activations, variant):
    x, rows, bias = matrix(5, seed=2), FORMATS[name].quantize(matrix()), torch.randn(37)
    x[2] = 0.0
    for b in (bias, None):
        out = torch.ops.manyheads.quantized_linear(x, rows, b, name, int8_activations)
        torch.testing.assert_close(out, quantized_linear(x, rows, b, name, int8_activations), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_float_activations_give_the_product_with_dequantized_weights(name, variant):
    x, rows = matrix(3, seed=2), FORMATS[name].quantize(matrix())
    out = torch.ops.manyheads.quantized_linear(x, rows, None, name, False)
    torch.testing.assert_close(out, F.linear(x, FORMATS[name].dequantize(rows)), rtol=0, atol=1e-4)
    many = tiled_linear(x, rows, None, name)
    torch.testing.assert_close(many, out, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("int8_activations", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_vector_has_the_same_bits_beside_any_others_and_with_any_number_of_threads(
    name, int8_activations, threads, variant
):
    x, rows, before = matrix(9, seed=2), FORMATS[name].quantize(matrix()), torch.get_num_threads()
    alone = [torch.ops.manyheads.quantized_linear(one[None], rows, None, name, int8_activations) for one in x]
    torch.set_num_threads(threads)
    try:
        out = torch.ops.manyheads.quantized_linear(x, rows, None, name, int8_activations)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, torch.cat(alone))


def test_a_quantized_weight_stands_in_for_a_parameter():
    layer, table = nn.Linear(96, 37), nn.Embedding(37, 96)
    weight = QuantizedWeight.quantize(layer.weight, "q8_0", int8_activations=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    table.weight = layer.weight
    plain, x, ids = weight.dequantize(), matrix(11, seed=2), torch.tensor([[3, 0], [36, 3]])
    for inputs in (x, x[None], x[:2][None]):  # many vectors, and few
        torch.testing.assert_close(layer(inputs), F.linear(inputs, plain, layer.bias), rtol=0, atol=1e-4)
    assert torch.equal(table(ids), plain[ids])
    assert torch.equal(layer.weight + 1, plain + 1)
    for part in (layer.weight[torch.tensor([5, 2])], layer.weight[:2], layer.weight.split([30, 7])[1], weight.clone()):
        assert isinstance(part, QuantizedWeight)
    assert torch.equal(layer.weight[torch.tensor([5, 2])].dequantize(), plain[[5, 2]])
    assert torch.equal(layer.weight.split([30, 7])[1].dequantize(), plain[30:])
    assert torch.equal(layer.weight[3], plain[3])
    assert isinstance(layer.state_dict()["weight"], QuantizedWeight)
    assert torch.equal(F.linear(x.double(), layer.weight), F.linear(x.double(), plain.double()))


def test_a_quantized_weight_cannot_be_changed_and_vectors_must_fit():
    weight = QuantizedWeight.quantize(matrix(), "q8_0")
    with raises("model.unsupported"):
        weight.mul_(2)
    for x, bias in ((torch.ones(1, 1, 128), None), (torch.ones(1, 1, 64), None), (torch.ones(1, 1, 96), torch.ones(3))):
        with raises("input.shape"):
            F.linear(x, weight, bias)
    with raises("checkpoint.non-finite"):
        QuantizedWeight.quantize(1e8 * matrix(), "q8_0")


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_not_finite_stay_so_and_tiny_ones_are_zero(name, variant):
    rows = FORMATS[name].quantize(matrix())
    for value in (torch.nan, torch.inf, -torch.inf):
        x = matrix(1, seed=2)
        x[0, 40] = value
        assert not torch.ops.manyheads.quantized_linear(x, rows, None, name, True).isfinite().any()
    tiny = torch.full((1, 96), 1e-38)
    for function in (torch.ops.manyheads.quantized_linear, quantized_linear):
        assert torch.equal(function(tiny, rows, None, name, True), torch.zeros(1, 37))


def test_a_gradient_passes_through_the_product():
    weight, x = QuantizedWeight.quantize(matrix(), "q8_0"), torch.ones(1, 1, 96, requires_grad=True)
    F.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad[0, 0], weight.dequantize().sum(0))


def test_a_variant_that_the_processor_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setenv(library.VARIANT, "abacus")
    with raises("usage.argument", "abacus"):
        library.kernels()


def build_in(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    library.load_library.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = library.load_library(None)
    library.load_library.cache_clear()
    return found, [str(warning.message) for warning in caught]


def test_without_a_compiler_torch_computes_the_products_and_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found, messages = build_in(tmp_path, monkeypatch)
    assert found is None
    assert len(messages) == 1
    assert "compiler" in messages[0]
    assert not list((tmp_path / "manyheads" / "kernels").iterdir())


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", shutil.which("false"))
    found, messages = build_in(tmp_path, monkeypatch)
    assert found is None
    assert len(messages) == 1
    assert not list((tmp_path / "manyheads" / "kernels").iterdir())


def test_kernels_in_a_folder_that_others_can_write_are_not_run(tmp_path, monkeypatch):
    folder = tmp_path / "manyheads" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    found, messages = build_in(tmp_path, monkeypatch)
    assert found is None
    assert str(folder) in messages[0]


def test_two_processes_build_the_kernels_at_once(tmp_path):
    program = "from manyheads.kernels.library import kernels; print(kernels().variants)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=240)[0] for process in both] == [f"{VARIANTS}\n"] * 2
    assert len(list((tmp_path / "manyheads" / "kernels").iterdir())) == 1
