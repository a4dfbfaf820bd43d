"""GGUF files: written by its own library and read here, written here and read by llama.cpp, with the reference's numbers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import gguf
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import close, make, moved, rope
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import manyheads
from manyheads.convert.families import family
from manyheads.convert.files import FileError
from manyheads.convert.gguf import Gguf, config_of
from manyheads.convert.vocabulary import read_vocabulary, write_vocabulary

TOKENS = ["<end>", "<begin>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab", "abc", *(f"x{i}" for i in range(30))]


LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def as_neighbours(weight, heads):
    """Rows of each head 0, n, 1, n + 1, …, as this architecture turns them."""
    size = len(weight) // heads
    order = [head * size + i // 2 + (i % 2) * size // 2 for head in range(heads) for i in range(size)]
    return weight[order]


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
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(name, value)

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
    assert torch.equal(file["blk.1.ffn_up.weight"], torch.from_numpy(expected))
    assert manyheads.load(tmp_path / "x.gguf").logits(IDS).isfinite().all()


def test_the_tokenizer_is_inside(tmp_path):
    ours = manyheads.load(written(reference(), tmp_path / "x.gguf"))
    ids = ours.tokenizer.encode("abcab <end>x").ids
    assert [TOKENS[i] for i in ids] == ["abc", "ab", "Ġ", "<end>", "x"]
    assert ours.tokenizer.decode(ids, skip_special_tokens=False) == "abcab <end>x"
    assert isinstance(ours.generate("abc", max_new=3), str)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba", "holds a model of 'mamba'"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type = 'su' changes the rotation"),
        ("llama.expert_count", 4, "expert_count = 4 changes the model"),
        ("llama.attention.value_length", 8, "keys of size 16 and values of 8"),
        ("llama.attention.sliding_window", 8, "a key this family does not know, 'attention.sliding_window'"),
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


# ------------------------------------------------------------------------------------------------------- written here

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONG = {"original_max_position_embeddings": 10, "max_position_embeddings": 40}
BANDED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"head_dim": 16}),
    "llama-biases-tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-banded": ("LlamaForCausalLM", "LlamaConfig", SMALL | rope("llama3", **BANDED)),
    "llama-linear": ("LlamaForCausalLM", "LlamaConfig", SMALL | rope("linear", factor=3.0)),
    "llama-yarn": ("LlamaForCausalLM", "LlamaConfig", SMALL | rope("yarn", factor=4.0, original_max_position_embeddings=10)),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 32}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SMALL | {"head_dim": 32}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL),
    "phi3-longrope": ("Phi3ForCausalLM", "Phi3Config", SMALL | LONG | rope("longrope", factor=4.0, **FACTORS)),
    "phi": ("PhiForCausalLM", "PhiConfig", SMALL | {"hidden_act": "gelu_new"}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE),
    "neox-in-turn": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE | {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64}),
}
PROMPT = [5, 9, 7, 3, 20, 21, 22, 4, 8, 11, 12, 14]
TEXTS = ["abcab x", " a  b", "abc<end>abc", "a12 ab's", "ABC\n\nab", ""]


def by_bytes():
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    return tokenizer


def by_spaces():
    """Pieces with ▁ for spaces and bytes for what is unknown, and a token before every text."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"abcdx▁", "ab", "abc", "▁a", "▁ab", "▁abc"]
    merges = [("a", "b"), ("ab", "c"), ("▁", "a"), ("▁", "ab"), ("▁", "abc")]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return tokenizer


LLAMA_CPP = """
import json, os, sys, urllib.request
import xllamacpp

def ask(path, prompt, texts):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity, params.port = path, 64, 1, False, -1, 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads, params.cache_type_k, params.cache_type_v = 1, xllamacpp.ggml_type.GGML_TYPE_F32, xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    said = server.handle_completions({"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 400})
    tops = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    cut = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        cut.append(json.load(urllib.request.urlopen(request))["tokens"])
    return {"logprobs": {top["id"]: top["logprob"] for top in tops}, "cut": cut}

paths, prompt, texts = json.load(sys.stdin)
print(json.dumps([ask(path, prompt, texts) for path in paths]))
sys.stdout.flush()
os._exit(0)  # without waiting for threads of its own
"""


def llama_cpp(paths, prompt=PROMPT, texts=()):
    given = json.dumps([[str(path) for path in paths], prompt, list(texts)])
    done = subprocess.run([sys.executable, "-c", LLAMA_CPP], input=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def loaded(theirs, folder, tokenizer=None):
    theirs.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return manyheads.load(folder)


@torch.no_grad()
def test_llama_cpp_gives_the_same_numbers(tmp_path):
    """Every architecture, in float32; where it has a GELU, it reads it from a table of 16 bits."""
    references = {name: moved(make(*case[:2], **case[2])).eval() for name, case in DECODERS.items()}
    for name, theirs in references.items():
        ours = loaded(theirs, tmp_path / name, by_bytes())
        manyheads.export(ours, tmp_path / f"{name}.gguf", to="gguf")
        again = manyheads.load(tmp_path / f"{name}.gguf")
        close(again.logits(torch.tensor([PROMPT])), theirs(torch.tensor([PROMPT])).logits)
        assert again.tokenizer.encode("abcab x").ids == ours.tokenizer.encode("abcab x").ids
    for name, said in zip(references, llama_cpp([tmp_path / f"{name}.gguf" for name in references]), strict=True):
        expected = torch.log_softmax(references[name](torch.tensor([PROMPT])).logits[0, -1], dim=-1)
        found = torch.tensor([said["logprobs"][str(i)] for i in range(len(expected))])
        by_table = {"gemma", "phi", "neox", "neox-in-turn", "gpt2"}  # the approximation by tanh, 16 bits of it
        assert (found - expected).abs().max() < (2e-3 if name in by_table else 1e-5), name


@torch.no_grad()
@pytest.mark.parametrize(("form", "most"), [("f16", 1e-2), ("q8_0", 0.2)])
def test_smaller_forms(tmp_path, form, most):
    theirs = reference()
    ours = loaded(theirs, tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf", form=form)
    again = manyheads.load(tmp_path / "x.gguf").logits(torch.tensor([PROMPT]))[0, -1]
    assert 0 < (again - ours.logits(torch.tensor([PROMPT]))[0, -1]).abs().max() < most
    assert (tmp_path / "x.gguf").stat().st_size < {"f16": 0.6, "q8_0": 0.4}[form] * (tmp_path / "hf" / "model.safetensors").stat().st_size
    found = llama_cpp([tmp_path / "x.gguf"])[0]["logprobs"]
    expected = torch.log_softmax(again, dim=-1)
    assert max(abs(found[str(i)] - float(expected[i])) for i in range(len(expected))) < 0.1  # it rounds what it multiplies, too


@pytest.mark.parametrize("tokenizer", [by_bytes, by_spaces])
def test_llama_cpp_cuts_texts_alike(tmp_path, tokenizer):
    made = tokenizer()
    size = {"vocab_size": max(len(TOKENS), made.get_vocab_size()) + 3, "bos_token_id": 1, "eos_token_id": 0 if tokenizer is by_bytes else 2}
    ours = loaded(reference(**size), tmp_path / "hf", made)
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    expected = [made.encode(text).ids for text in TEXTS]
    assert [again.tokenizer.encode(text).ids for text in TEXTS] == expected
    assert llama_cpp([tmp_path / "x.gguf"], texts=TEXTS)[0]["cut"] == expected
    text = "abc ab"
    assert again.tokenizer.decode(again.tokenizer.encode(text).ids) == made.decode(made.encode(text).ids)


def test_a_chat_template_travels(tmp_path):
    theirs = reference()
    theirs.save_pretrained(tmp_path / "hf")
    by_bytes().save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    manyheads.export(manyheads.load(tmp_path / "hf"), tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    assert again.chat_template == "{{ messages }}"
    manyheads.export(again, tmp_path / "back")  # and from the file to a folder, with the tokenizer
    back = manyheads.load(tmp_path / "back")
    assert (back.chat_template, back.tokenizer.encode("abcab").ids) == ("{{ messages }}", by_bytes().encode("abcab").ids)
    assert back.origin.config["eos_token_id"] == theirs.config.eos_token_id


@pytest.mark.parametrize(
    ("name", "config", "options", "said"),
    [
        (
            "MistralForCausalLM",
            "MistralConfig",
            SMALL | {"sliding_window": 4},
            "mask.window is 4, and gguf-llama, the nearest, has nothing there",
        ),
        ("LlamaForCausalLM", "LlamaConfig", SMALL | rope("dynamic", factor=2.0), "scaling is dynamic"),
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"activation_function": "relu"},
            "activation is relu, and gguf-gpt2, the nearest, has gelu-tanh there",
        ),
        ("BertForMaskedLM", "BertConfig", {}, "a GGUF file holds a decoder; this model is encoder"),
    ],
)
def test_what_no_architecture_has_is_refused(tmp_path, name, config, options, said):
    with pytest.raises(ValueError, match=said):
        manyheads.export(loaded(make(name, config, **options), tmp_path / "hf"), tmp_path / "x.gguf", to="gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_a_tokenizer_that_has_no_name_is_refused(tmp_path):
    odd = by_bytes()
    odd.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="no name for how this tokenizer cuts a text"):
        manyheads.export(loaded(reference(), tmp_path / "hf", odd), tmp_path / "x.gguf", to="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@torch.no_grad()
def test_small_gains_survive_in_half_precision(tmp_path):
    """1 + γ is stored, and in 16 bits a small γ vanishes beside 1."""
    theirs = moved(make("GemmaForCausalLM", "GemmaConfig", **SMALL | {"head_dim": 32})).bfloat16()
    ours = loaded(theirs, tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    for name, tensor in ours.model.named_parameters():
        assert torch.allclose(again.model.get_parameter(name), tensor.float(), atol=1e-6), name


@pytest.mark.parametrize(
    ("change", "said"), [("normalizer", "reads 'Hello world'|reads 'UPPER"), ("suffix", "cannot say how this tokenizer reads")]
)
def test_a_tokenizer_that_would_become_another_is_refused(tmp_path, change, said):
    odd = by_bytes()
    if change == "normalizer":
        odd.normalizer = normalizers.Lowercase()
    else:
        odd.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        odd.post_processor = processors.TemplateProcessing(single=["<begin>", "<begin>", "$A"], special_tokens=[("<begin>", 1)])
    with pytest.raises(ValueError, match=said):
        manyheads.export(loaded(reference(), tmp_path / "hf", odd), tmp_path / "x.gguf", to="gguf")


def test_a_table_beside_another_scaling_is_refused(tmp_path):
    theirs = reference(**rope("llama3", **BANDED))
    manyheads.export(loaded(theirs, tmp_path / "hf", by_bytes()), tmp_path / "x.gguf", to="gguf")
    file = Gguf(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="rope_freqs.weight beside rope.scaling.type = 'linear'"):
        family("gguf-llama").spec_of(config_of(file) | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})


def test_how_long_a_text_may_be_travels(tmp_path):
    ours = loaded(reference(max_position_embeddings=8192), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    manyheads.export(tmp_path / "x.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.rope.scaling.factor", 2.0, "rope.scaling.factor = 2.0 without a type"),
        ("llama.rope.scaling.attn_factor", 2.0, "rope.scaling.attn_factor = 2.0 changes the model"),
        ("llama.attention.key_length", 0, "a head of size 0"),
        ("llama.rope_freqs", 2, "a key that no such file has: llama.rope_freqs"),
        ("llama.model_type", 2, "a key that no such file has: llama.model_type"),
        ("tokenizer.ggml.bos_token_id", 2, None),
    ],
)
def test_keys_that_another_program_reads_in_its_own_way(tmp_path, key, value, said):
    written(reference(), tmp_path / "x.gguf", extra=[(key, value)])
    if said is None:
        assert manyheads.load(tmp_path / "x.gguf").origin.config["bos_token_id"] == value
        return
    with pytest.raises(FileError, match=said):
        manyheads.load(tmp_path / "x.gguf")


def test_tensors_that_lie_over_each_other_are_refused(tmp_path):
    entry = struct.pack("<IQIQ", 1, 8, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + struct.pack("<Q", 1) + b"a" + entry + struct.pack("<Q", 1) + b"b" + entry
    (tmp_path / "x.gguf").write_bytes(header + b"\0" * 200)
    with pytest.raises(FileError, match="'b' begins at byte 0 of the tensors, where none can"):
        manyheads.load(tmp_path / "x.gguf")


def test_numbers_too_large_for_a_form_are_refused(tmp_path):
    ours = loaded(reference(), tmp_path / "hf", by_bytes())
    with torch.no_grad():
        ours.model.decoder.embed.table.weight.mul_(1e7)
    with pytest.raises(ValueError, match="token_embd.weight holds .*, and f16 numbers up to 65504 alone"):
        manyheads.export(ours, tmp_path / "x.gguf", to="gguf", form="f16")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("given", "ends"), [([2, 7], (2, 7)), (5, (5, None)), ("x", (None, None)), (2**40, (None, None)), (-1, (None, None))]
)
def test_one_end_of_a_text_and_one_of_a_turn(tmp_path, given, ends):
    theirs = reference()
    theirs.save_pretrained(tmp_path / "hf")
    by_bytes().save(str(tmp_path / "hf" / "tokenizer.json"))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": given}))
    (tmp_path / "hf" / "generation_config.json").unlink()
    manyheads.export(tmp_path / "hf", tmp_path / "x.gguf", to="gguf")
    file = Gguf(tmp_path / "x.gguf")
    assert tuple(file.said.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")) == ends


def test_heads_of_another_size_are_refused_where_llama_cpp_knows_none(tmp_path):
    ours = manyheads.build(
        manyheads.read("gpt2", "decoder.layers=1", "decoder.width=32", 'decoder.attention={kind="heads",heads=2,size=8}')
    )
    with pytest.raises(ValueError, match="attention"):
        manyheads.export(ours, tmp_path / "x.gguf", to="gguf")


@pytest.mark.parametrize(("tokenizer", "text"), [("spm", "<unk> a"), ("spm", " a b"), ("bytes", "abc<end>")])
def test_special_words_in_a_text_are_read_alike_again(tmp_path, tokenizer, text):
    made = by_spaces() if tokenizer == "spm" else by_bytes()
    ids = {"bos_token_id": 1, "eos_token_id": 2 if tokenizer == "spm" else 0, "vocab_size": max(len(TOKENS), made.get_vocab_size())}
    manyheads.export(loaded(reference(**ids), tmp_path / "hf", made), tmp_path / "x.gguf", to="gguf")
    assert manyheads.load(tmp_path / "x.gguf").tokenizer.encode(text).ids == made.encode(text).ids


# ---------------------------------------------------------------------------------------------- what the header says


def key(name, kind, data):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key("a", 4, b"\0" * 4) * 2, "has the key 'a' twice"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + (struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2,
            "stands there twice",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0)),
            "a type that is not known: 9",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 33, 8, 0) + b"\0" * 99,
            "no blocks of 32",
        ),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, data, said):
    (tmp_path / "x.gguf").write_bytes(data.ljust(64, b"\0") if "twice" not in said else data)
    with pytest.raises(FileError, match=said):
        manyheads.load(tmp_path / "x.gguf")


def test_the_last_byte_counts(tmp_path, sound):
    (tmp_path / "x.gguf").write_bytes(sound[:-1])
    with pytest.raises(FileError, match="ends within"):
        manyheads.load(tmp_path / "x.gguf")


def test_numbers_have_few_digits_and_ids_come_back(tmp_path):
    ours = loaded(reference(rms_norm_eps=1e-6, pad_token_id=3), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    assert again.spec.decoder.norm.eps == 1e-6
    assert again.origin.config["pad_token_id"] == 3


@pytest.mark.parametrize(("form", "number"), [("f32", 0), ("f16", 1), ("q8_0", 7)])
def test_each_tensor_has_its_form(tmp_path, form, number):
    """Positions as they are, matrices as asked, and those whose rows are no blocks in 16 bits."""
    torch.manual_seed(1)
    ours = loaded(moved(make("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_inner=40)), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf", form=form)
    file = Gguf(tmp_path / "x.gguf")
    sorts = {name: gguf.GGMLQuantizationType(file.entries[name][1]).name.lower() for name in file}
    assert file.said["general.file_type"] == number
    assert sorts["position_embd.weight"] == sorts["output_norm.weight"] == "f32"
    assert sorts["blk.0.ffn_up.weight"] == form
    assert sorts["blk.0.ffn_down.weight"] == ("f16" if form == "q8_0" else form)  # rows of 40


def test_a_head_that_is_stored_twice_is_tied(tmp_path):
    ours = loaded(moved(make("GPTNeoXForCausalLM", "GPTNeoXConfig", **WIDE | {"tie_word_embeddings": True})), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    assert "output.weight" in Gguf(tmp_path / "x.gguf")
    assert manyheads.load(tmp_path / "x.gguf").spec.head.kind == "tied"


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"rms_norm_eps": 1e-2}),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            SMALL | rope("yarn", factor=4.0, original_max_position_embeddings=10, beta_fast=8.0, beta_slow=2.0),
        ),
    ],
)
def test_numbers_that_only_one_key_says_travel(tmp_path, name, config, options):
    theirs = moved(make(name, config, **options)).eval()
    manyheads.export(loaded(theirs, tmp_path / "hf", by_bytes()), tmp_path / "x.gguf", to="gguf")
    close(manyheads.load(tmp_path / "x.gguf").logits(torch.tensor([PROMPT])), theirs(torch.tensor([PROMPT])).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8.0, and heads of this family, with 16, are turned as a whole"),
        ({"rope_factors_long": [1.0] * 8}, "rope_factors_long.weight changes the rotation"),
        ({"expert_used_count": 2}, "expert_used_count = 2 changes the model"),
        ({"attention_bias": True}, None),
    ],
)
def test_what_one_architecture_does_not_have(tmp_path, change, said):
    config = config_of(Gguf(written(reference(), tmp_path / "x.gguf"))) | change
    if said is None:  # biases of q, k and v are one thing, those of the output another
        attention = family("gguf-llama").spec_of(config).decoder.attention
        assert (attention.bias, attention.output_bias) == (True, False)
        return
    with pytest.raises(ValueError, match=said):
        family("gguf-llama").spec_of(config)


# -------------------------------------------------------------------------------------------------------- vocabularies

LETTERS = [
    *"abcdefghijklmnopqrstuvwxyzĠ'0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "<b>",
    "<e>",
    "<own>",
    "ab",
    "abc",
    "12",
    "123",
    "'s",
    "'S",
    "Ġa",
]
KINDS = [3 if word in ("<b>", "<e>") else 4 if word == "<own>" else 1 for word in LETTERS]
MERGES = ["a b", "ab c", "1 2", "12 3", "' s", "' S", "Ġ a"]


def vocabulary(**changes):
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": LETTERS, "token_type": KINDS, "merges": MERGES}
    said |= {"bos_token_id": LETTERS.index("<b>"), "eos_token_id": LETTERS.index("<e>")} | changes
    return read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in said.items()}, "it")


@pytest.mark.parametrize(
    ("changes", "text", "tokens"),
    [
        ({}, "abc a1234's", ["abc", "Ġa", "123", "4", "'s"]),
        ({"pre": "olmo"}, "abc a1234'S", ["abc", "Ġa", "123", "4", "'", "S"]),  # only small letters are cut off together
        ({"pre": "smollm"}, "a1234", ["a", "1", "2", "3", "4"]),
        ({"pre": "qwen2"}, "a1234'S", ["a", "1", "2", "3", "4", "'S"]),
        ({"pre": "llama-bpe"}, "a1234'S", ["<b>", "a", "123", "4", "'S"]),  # which begins its texts
        ({"pre": "llama-bpe", "add_bos_token": False}, "a", ["a"]),
        ({"pre": "llama-bpe", "merges": ["a b"]}, "abc", ["<b>", "abc"]),  # a word that is a token is one
        ({"merges": ["a b"]}, "abc", ["ab", "c"]),
        ({"add_bos_token": True, "add_eos_token": True}, "a", ["<b>", "a", "<e>"]),
        ({}, "a<own>b<e>", ["a", "<own>", "b", "<e>"]),
    ],
)
def test_texts_are_cut_as_their_name_says(changes, text, tokens):
    assert vocabulary(**changes).encode(text).tokens == tokens


def test_what_is_added_and_not_special_stays_in_a_text():
    tokenizer = vocabulary()
    assert tokenizer.decode(tokenizer.encode("a<own>b<e>").ids) == "a<own>b"


def pieces(**changes):
    words = ["<unk>", "<s>", "</s>", *"abc▁", "ab", "bc", "abc"]
    said = {
        "model": "llama",
        "tokens": words,
        "token_type": [2, 3, 3, *[1] * 7],
        "scores": [0.0] * 7 + [-2.0, -1.0, -3.0],
        "bos_token_id": 1,
    }
    return read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in (said | changes).items()}, "it")


def test_pieces_join_by_their_scores():
    assert pieces(add_bos_token=False).encode("abc").tokens == ["▁", "abc"]
    assert pieces(add_bos_token=False, scores=[0.0] * 7 + [-2.0, -1.0, -9.0]).encode("ab").tokens == ["▁", "ab"]
    split = ["<unk>", "<s>", "</s>", *"abc▁", "ab", "bc", "x"]
    assert pieces(add_bos_token=False, tokens=split).encode("abc").tokens == ["▁", "a", "bc"], "bc has the better score"
    assert pieces(add_bos_token=False, add_space_prefix=False).encode("ab").tokens == ["ab"]
    assert pieces().encode("a").tokens == ["<s>", "▁", "a"], "which begins its texts unless it says otherwise"


@pytest.mark.parametrize("token", ["$A", "a:b", ""])
def test_a_token_that_a_frame_cannot_name_is_refused(token):
    with pytest.raises(FileError, match="cannot begin or end a text"):
        pieces(tokens=["<unk>", token, "</s>", *"abc▁", "ab", "bc", "abc"])


def test_words_without_merges_and_too_many_are_refused(tmp_path):
    whole = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="tokenizers that merge pairs; this one is of the sort 'WordLevel'"):
        write_vocabulary(whole, 61, {})
    with pytest.raises(ValueError, match="the tokenizer has 61 tokens, and the model 60"):
        write_vocabulary(by_bytes(), 60, {})
