"""GGUF files: written by its own library from a reference's weights, read here with the reference's numbers; spoiled ones are named."""

from __future__ import annotations

import struct

import gguf
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import close, make, moved

import manyheads
from manyheads.convert.files import FileError
from manyheads.convert.gguf import LAYER, Gguf, as_halves, as_neighbours

TOKENS = ["<end>", "<begin>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab", "abc", *(f"x{i}" for i in range(30))]


def reference(**options):
    torch.manual_seed(1)
    # blocks of 32 numbers, as the quantised forms have them
    usual = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    return moved(make("LlamaForCausalLM", "LlamaConfig", **usual | options))


def written(theirs, path, form=gguf.GGMLQuantizationType.F32, extra=()):
    """The reference as a GGUF file, by the format's own writer."""
    config, weights = theirs.config, theirs.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    for name, value in extra:
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)

    def add(name, tensor):
        data = tensor.numpy().astype(numpy.float32)
        if form != gguf.GGMLQuantizationType.F32 and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quantize(data, form), raw_dtype=form)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    for i in range(config.num_hidden_layers):
        for own, named in LAYER.items():
            tensor = weights[f"model.layers.{i}.{named}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own)
            add(f"blk.{i}.{own}.weight", tensor if heads is None else as_neighbours(tensor, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IDS = torch.tensor([[5, 9, 7, 3, 11, 2]])


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_references(tmp_path, tied):
    theirs = reference(tie_word_embeddings=tied)
    ours = manyheads.load(written(theirs, tmp_path / "x.gguf"))
    close(ours.logits(IDS), theirs(IDS).logits)
    manyheads.export(ours, tmp_path / "folder")  # and from here to a folder
    close(manyheads.load(tmp_path / "folder").logits(IDS), theirs(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("form", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_is_quantised_is_brought_back(tmp_path, form):
    """As the format's own library brings it back, weight by weight."""
    theirs, kind = reference(), gguf.GGMLQuantizationType[form]
    file = Gguf(written(theirs, tmp_path / "x.gguf", kind))
    weight = theirs.state_dict()["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
    assert torch.equal(file.read("blk.1.ffn_up.weight"), torch.from_numpy(expected))
    assert manyheads.load(tmp_path / "x.gguf").logits(IDS).isfinite().all()


def test_the_tokenizer_is_inside(tmp_path):
    ours = manyheads.load(written(reference(), tmp_path / "x.gguf"))
    ids = ours.tokenizer.encode("abcab <end>x").ids
    assert [TOKENS[i] for i in ids] == ["abc", "ab", "Ġ", "<end>", "x"]
    assert ours.tokenizer.decode(ids, skip_special_tokens=False) == "abcab <end>x"
    assert isinstance(ours.generate("abc", max_new=3), str)


def test_order_of_heads_goes_and_comes():
    weight = torch.randn(24, 5)
    assert torch.equal(as_halves(as_neighbours(weight, 3), 3), weight)
    assert not torch.equal(as_neighbours(weight, 3), weight)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba", "holds a model of 'mamba'"),
        ("llama.rope.scaling.type", "yarn", "scales its rotation by 'yarn'"),
        ("llama.expert_count", 4, "llama.expert_count changes the model"),
    ],
)
def test_what_would_change_the_maths_is_refused(tmp_path, key, value, said):
    path = tmp_path / "x.gguf"
    if key == "general.architecture":
        path.write_bytes(
            written(reference(), tmp_path / "y.gguf").read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
        )
    else:
        written(reference(), path, extra=[(key, value)])
    with pytest.raises(FileError, match=said):
        manyheads.load(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no GGUF file"),
        (b"GGML" + b"\0" * 40, "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "has version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "claims 1,099,511,627,776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "claims 1,099,511,627,776 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 23), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 50), "bytes of text"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77), "a type that is not known: 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 1 << 60, 0, 0), "ends within 'a'"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 8, 999, 0), "a form that is not known: 999"),
    ],
)
def test_headers(tmp_path, data, said):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(FileError, match=said):
        manyheads.load(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return written(reference(), tmp_path_factory.mktemp("sound") / "x.gguf").read_bytes()


@settings(max_examples=40)
@given(data=st.data())
def test_a_spoiled_file_is_named_or_read(data, sound, tmp_path_factory):
    """Cut anywhere or with any byte of its header changed: one sentence, or a model; never anything else."""
    place = data.draw(st.integers(0, min(len(sound), 4000) - 1))
    spoiled = sound[:place] if data.draw(st.booleans()) else sound[:place] + bytes([data.draw(st.integers(0, 255))]) + sound[place + 1 :]
    path = tmp_path_factory.mktemp("spoiled") / "x.gguf"
    path.write_bytes(spoiled)
    said = ""
    try:
        manyheads.load(path)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
