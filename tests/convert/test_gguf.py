"""GGUF files: written by the format's own library and read here, and written here and opened by llama.cpp."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import gguf
import numpy
import pytest
import torch
from command import run, run_json
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from small_checkpoints import assert_close, make, perturbed, rope
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import manyheads
from manyheads.convert.families import get_family
from manyheads.convert.gguf.container import GgufFile, config_of
from manyheads.convert.gguf.vocabulary import add_special_tokens, pre_tokenizer_name, read_vocabulary, write_vocabulary
from manyheads.errors import CheckpointConfigError, CheckpointError, CheckpointTokenizerError, ExportError, UsageError
from manyheads.kernels.weight import QuantizedWeight

TOKENS = ["<end>", "<begin>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab", "abc", *(f"x{i}" for i in range(30))]


LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def interleave(weight, heads):
    """Rows 0, n, 1, n + 1, … of each head, the order in which this architecture rotates them."""
    size = len(weight) // heads
    order = [head * size + i // 2 + (i % 2) * size // 2 for head in range(heads) for i in range(size)]
    return weight[order]


def reference(**options):
    torch.manual_seed(1)
    # rows of whole blocks of 32, as quantization needs them
    usual = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return perturbed(make("LlamaForCausalLM", "LlamaConfig", **usual | options))


def write_reference(theirs, path, outtype=gguf.GGMLQuantizationType.F32, extra=()):
    """Writes the reference with the format's own library."""
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
        if outtype != gguf.GGMLQuantizationType.F32 and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quantize(data, outtype), raw_dtype=outtype)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    for i in range(config.num_hidden_layers):
        for own, theirs_name in LAYER.items():
            tensor = weights[f"model.layers.{i}.{theirs_name}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own)
            add(f"blk.{i}.{own}.weight", tensor if heads is None else interleave(tensor, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IDS = torch.tensor([[5, 9, 7, 3, 11, 2]])


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_the_references(tmp_path, tied):
    theirs = reference(tie_word_embeddings=tied)
    ours = manyheads.load(write_reference(theirs, tmp_path / "x.gguf"))
    assert_close(ours.logits(IDS), theirs(IDS).logits)
    manyheads.export(ours, tmp_path / "folder")  # and from here to a folder
    assert_close(manyheads.load(tmp_path / "folder").logits(IDS), theirs(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("outtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_are_dequantized(tmp_path, outtype):
    """As the format's own library does it."""
    theirs, kind = reference(), gguf.GGMLQuantizationType[outtype]
    file = GgufFile(write_reference(theirs, tmp_path / "x.gguf", kind))
    weight = theirs.state_dict()["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
    assert torch.equal(file["blk.1.ffn_up.weight"], torch.from_numpy(expected))
    assert manyheads.load(tmp_path / "x.gguf").logits(IDS).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_the_blocks_of_a_file_can_be_used_as_they_are(tmp_path, kind):
    path = write_reference(reference(), tmp_path / "x.gguf", gguf.GGMLQuantizationType[kind.upper()])
    plain, ours = manyheads.load(path), manyheads.load(path, weights="stored")
    expected = dict(plain.model.named_parameters())
    kept = {name: weight for name, weight in ours.model.named_parameters() if isinstance(weight, QuantizedWeight)}
    assert {f"decoder.layers.0.attention.{name}.weight" for name in ("query", "key", "value")} <= set(kept)
    for name, weight in ours.model.named_parameters():  # queries and keys are in another order in the file
        assert torch.equal(weight.dequantize() if name in kept else weight, expected[name]), name
    rows = kept["decoder.layers.0.attention.value.weight"].rows
    assert rows.numpy().tobytes() == bytes(GgufFile(path).read_raw("blk.0.attn_v.weight"))
    long = IDS.repeat(1, 9 // IDS.shape[1] + 1)  # so long that activations are not rounded
    assert_close(ours.logits(long), plain.logits(long))


def test_a_file_has_its_tokenizer(tmp_path):
    ours = manyheads.load(write_reference(reference(), tmp_path / "x.gguf"))
    ids = ours.tokenizer.encode("abcab <end>x").ids
    assert [TOKENS[i] for i in ids] == ["abc", "ab", "Ġ", "<end>", "x"]
    assert ours.tokenizer.decode(ids, skip_special_tokens=False) == "abcab <end>x"
    assert isinstance(ours.generate("abc", max_new_tokens=3), str)


def test_a_file_is_used_as_its_folder_is(tmp_path):
    loaded(reference(), tmp_path / "hf", by_bytes())
    file, texts = tmp_path / "x.gguf", tmp_path / "texts"
    manyheads.export(tmp_path / "hf", file, to="gguf")
    texts.write_text("abc ab\nx23 abc\n")
    predicted = [
        run("predict", path, "--file", texts, "--max-new-tokens", 5).stdout for path in (tmp_path / "hf", file)
    ]
    assert predicted[0] == predicted[1] != ""
    scores = [run_json("evaluate", path, "--data", texts)["metrics"] for path in (tmp_path / "hf", file)]
    assert scores[0] == scores[1]
    assert not [row for row in manyheads.audit(file) if row.status == "failed"]


def load_fails(path, code, *values):
    with raises(f"checkpoint.{code}", path, *values):
        manyheads.load(path)


@pytest.mark.parametrize(
    ("key", "value", "code", "named"),
    [
        ("general.architecture", "mamba", "architecture", "'mamba'"),
        ("llama.rope.scaling.type", "su", "config", "rope.scaling.type"),
        ("llama.expert_count", 4, "config", "expert_count"),
        ("llama.attention.value_length", 8, "config", "8"),
        ("llama.attention.sliding_window", 8, "config", "attention.sliding_window"),
        ("llama.rope.scaling.factor", 2.0, "config", "rope.scaling.factor"),
        ("llama.rope.scaling.attn_factor", 2.0, "config", "rope.scaling.attn_factor"),
        ("llama.attention.key_length", 0, "config", "0"),
        ("llama.rope_freqs", 2, "config", "llama.rope_freqs"),
        ("llama.model_type", 2, "config", "llama.model_type"),
    ],
)
def test_a_key_that_changes_the_computation_is_refused(tmp_path, key, value, code, named):
    path = tmp_path / "x.gguf"
    if key == "general.architecture":
        path.write_bytes(
            write_reference(reference(), tmp_path / "y.gguf")
            .read_bytes()
            .replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
        )
    else:
        write_reference(reference(), path, extra=[(key, value)])
    load_fails(path, code, named)


def key(name, kind, data):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data


def tensor(name, size, kind, start=0):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, size, kind, start)


def header(version=3, tensors=0, keys=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


HEADERS = {
    "empty": (b"", "corrupt"),
    "another format": (b"GGML" + b"\0" * 40, "corrupt"),
    "version 1": (header(1), "corrupt"),
    "version 9": (header(9), "corrupt"),
    "too many tensors": (header(tensors=1 << 40), "corrupt"),
    "too many keys": (header(keys=1 << 40), "corrupt"),
    "name beyond the end": (header(keys=1) + struct.pack("<Q", 1 << 23), "corrupt"),
    "name beyond the limit": (header(keys=1) + struct.pack("<Q", 1 << 50), "corrupt"),
    "unknown type": (header(keys=1) + key("a", 77, b""), "corrupt"),
    "list in a list": (header(keys=1) + key("a", 9, struct.pack("<IQIQ", 9, 1, 4, 0)), "corrupt"),
    "one key twice": (header(keys=2) + key("a", 4, b"\0" * 4) * 2, "corrupt"),
    "one tensor twice": (header(tensors=2) + tensor("a", 8, 0) * 2, "corrupt"),
    "tensor beyond the end": (header(tensors=1) + tensor("a", 1 << 60, 0), "corrupt"),
    "overlap": (header(tensors=2) + tensor("a", 8, 0) + tensor("b", 8, 0) + b"\0" * 200, "corrupt"),
    "no rows": (header(tensors=1) + tensor("a", 0, 0), "corrupt"),
    "more rows than torch counts": (header(tensors=1) + tensor("a", (1 << 64) - 1, 0), "corrupt"),
    "rows of nothing": (
        header(tensors=1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 0, 1 << 63, 0, 0),
        "corrupt",
    ),
    "part of a block": (header(tensors=1) + tensor("a", 33, 8) + b"\0" * 99, "corrupt"),
    "unknown quantization": (header(tensors=1) + tensor("a", 8, 999), "weights"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_invalid_header_is_refused(tmp_path, name):
    data, code = HEADERS[name]
    (tmp_path / "x.gguf").write_bytes(data)
    load_fails(tmp_path / "x.gguf", code)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_reference(reference(), tmp_path_factory.mktemp("sound") / "x.gguf").read_bytes()


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_read(data, sound, tmp_path_factory):
    """Truncated anywhere, or with any byte of its header changed."""
    index = data.draw(st.integers(0, min(len(sound), 4000) - 1))
    truncated, byte = data.draw(st.booleans()), bytes([data.draw(st.integers(0, 255))])
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(sound[:index] if truncated else sound[:index] + byte + sound[index + 1 :])
    try:
        manyheads.load(path)
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_the_last_byte_is_needed(tmp_path, sound):
    (tmp_path / "x.gguf").write_bytes(sound[:-1])
    load_fails(tmp_path / "x.gguf", "corrupt")


# ------------------------------------------------------------------------------------------------------------ exporting

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
    "llama-yarn": (
        "LlamaForCausalLM",
        "LlamaConfig",
        SMALL | rope("yarn", factor=4.0, original_max_position_embeddings=10),
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 32}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SMALL | {"head_dim": 32}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL),
    "phi3-longrope": ("Phi3ForCausalLM", "Phi3Config", SMALL | LONG | rope("longrope", factor=4.0, **FACTORS)),
    "phi": ("PhiForCausalLM", "PhiConfig", SMALL | {"hidden_act": "gelu_new"}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE),
    "neox-in-turn": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        WIDE | {"use_parallel_residual": False, "tie_word_embeddings": True},
    ),
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
        models.BPE(
            {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
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
    out = server.handle_completions({"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 400})
    tops = out["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    ids = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        ids.append(json.load(urllib.request.urlopen(request))["tokens"])
    return {"logprobs": {top["id"]: top["logprob"] for top in tops}, "ids": ids}

paths, prompt, texts = json.load(sys.stdin)
print(json.dumps([ask(path, prompt, texts) for path in paths]))
sys.stdout.flush()
os._exit(0)  # without waiting for threads of its own
"""


def llama_cpp(paths, prompt=PROMPT, texts=()):
    request = json.dumps([[str(path) for path in paths], prompt, list(texts)])
    done = subprocess.run([sys.executable, "-c", LLAMA_CPP], input=request, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def loaded(theirs, folder, tokenizer=None):
    theirs.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return manyheads.load(folder)


@torch.no_grad()
def test_llama_cpp_gives_the_same_numbers(tmp_path):
    """Every architecture, in float32; llama.cpp reads a GELU from a table of 16-bit values."""
    references = {name: perturbed(make(*case[:2], **case[2])).eval() for name, case in DECODERS.items()}
    for name, theirs in references.items():
        ours = loaded(theirs, tmp_path / name, by_bytes())
        manyheads.export(ours, tmp_path / f"{name}.gguf", to="gguf")
        again = manyheads.load(tmp_path / f"{name}.gguf")
        assert_close(again.logits(torch.tensor([PROMPT])), theirs(torch.tensor([PROMPT])).logits)
        assert again.tokenizer.encode("abcab x").ids == ours.tokenizer.encode("abcab x").ids
    for name, out in zip(references, llama_cpp([tmp_path / f"{name}.gguf" for name in references]), strict=True):
        expected = torch.log_softmax(references[name](torch.tensor([PROMPT])).logits[0, -1], dim=-1)
        logprobs = torch.tensor([out["logprobs"][str(i)] for i in range(len(expected))])
        by_table = {"gemma", "phi", "neox", "neox-in-turn", "gpt2"}
        assert (logprobs - expected).abs().max() < (2e-3 if name in by_table else 1e-5), name


@torch.no_grad()
@pytest.mark.parametrize(("outtype", "tolerance"), [("f16", 1e-2), ("q8_0", 0.2)])
def test_half_and_quantized_files_are_smaller_and_give_nearly_the_same_logits(tmp_path, outtype, tolerance):
    theirs = reference()
    ours = loaded(theirs, tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf", outtype=outtype)
    again = manyheads.load(tmp_path / "x.gguf").logits(torch.tensor([PROMPT]))[0, -1]
    assert 0 < (again - ours.logits(torch.tensor([PROMPT]))[0, -1]).abs().max() < tolerance
    assert (tmp_path / "x.gguf").stat().st_size < {"f16": 0.6, "q8_0": 0.4}[outtype] * (
        tmp_path / "hf" / "model.safetensors"
    ).stat().st_size
    logprobs = llama_cpp([tmp_path / "x.gguf"])[0]["logprobs"]
    expected = torch.log_softmax(again, dim=-1)
    assert (
        max(abs(logprobs[str(i)] - float(expected[i])) for i in range(len(expected))) < 0.1
    )  # it rounds what it multiplies, too


@pytest.mark.parametrize("tokenizer", [by_bytes, by_spaces])
def test_llama_cpp_tokenizes_texts_alike(tmp_path, tokenizer):
    own = tokenizer()
    size = {
        "vocab_size": max(len(TOKENS), own.get_vocab_size()) + 3,
        "bos_token_id": 1,
        "eos_token_id": 0 if tokenizer is by_bytes else 2,
    }
    ours = loaded(reference(**size), tmp_path / "hf", own)
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    expected = [own.encode(text).ids for text in TEXTS]
    assert [again.tokenizer.encode(text).ids for text in TEXTS] == expected
    assert llama_cpp([tmp_path / "x.gguf"], texts=TEXTS)[0]["ids"] == expected
    text = "abc ab"
    assert again.tokenizer.decode(again.tokenizer.encode(text).ids) == own.decode(own.encode(text).ids)


def test_a_chat_template_is_kept(tmp_path):
    theirs = reference()
    theirs.save_pretrained(tmp_path / "hf")
    by_bytes().save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    manyheads.export(manyheads.load(tmp_path / "hf"), tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    assert again.chat_template == "{{ messages }}"
    manyheads.export(again, tmp_path / "back")  # and from the file to a folder, with the tokenizer
    back = manyheads.load(tmp_path / "back")
    assert (back.chat_template, back.tokenizer.encode("abcab").ids) == (
        "{{ messages }}",
        by_bytes().encode("abcab").ids,
    )
    assert back.metadata.config["eos_token_id"] == theirs.config.eos_token_id


def export_fails(checkpoint, path, *values, **options):
    """An export to GGUF is refused with these values in the message, and leaves nothing."""
    with pytest.raises(ExportError) as caught:
        manyheads.export(checkpoint, path, to="gguf", **options)
    assert all(value in str(caught.value) for value in values), caught.value
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "config", "options", "values"),
    [
        (
            "MistralForCausalLM",
            "MistralConfig",
            SMALL | {"sliding_window": 4},
            ("mask.window is 4", "in llama"),
        ),
        ("LlamaForCausalLM", "LlamaConfig", SMALL | rope("dynamic", factor=2.0), ("scaling is dynamic",)),
        ("GPT2LMHeadModel", "GPT2Config", {"activation_function": "relu"}, ("relu", "gelu-tanh", "in gpt2")),
        ("BertForMaskedLM", "BertConfig", {}, ("encoder",)),
    ],
)
def test_a_model_that_no_architecture_has_is_refused(tmp_path, name, config, options, values):
    export_fails(loaded(make(name, config, **options), tmp_path / "hf"), tmp_path / "x.gguf", *values)


@pytest.mark.parametrize(
    "attention", ['{kind="heads",heads=2,size=8}', '{kind="wide",heads=2}', '{kind="narrow",heads=2}']
)
def test_attention_that_llama_cpp_does_not_have_is_refused(tmp_path, attention):
    spec = manyheads.read("gpt2", "decoder.layers=1", "decoder.width=32", f"decoder.attention={attention}", "vocab=9")
    export_fails(manyheads.build(spec), tmp_path / "x.gguf", "attention")


@pytest.mark.parametrize("change", ["pre-tokenizer", "normalizer", "special tokens"])
def test_a_tokenizer_that_would_become_another_is_refused(tmp_path, change):
    other = by_bytes()
    if change == "pre-tokenizer":
        other.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "normalizer":
        other.normalizer = normalizers.Lowercase()
    else:
        twice = ["<begin>", "<begin>", "$A"]
        other.post_processor = processors.TemplateProcessing(single=twice, special_tokens=[("<begin>", 1)])
    export_fails(loaded(reference(), tmp_path / "hf", other), tmp_path / "x.gguf", "tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@torch.no_grad()
def test_small_norm_weights_are_not_lost_in_half_precision(tmp_path):
    """1 + γ is stored, and in 16 bits a small γ is rounded away."""
    theirs = perturbed(make("GemmaForCausalLM", "GemmaConfig", **SMALL | {"head_dim": 32})).bfloat16()
    ours = loaded(theirs, tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    for name, tensor in ours.model.named_parameters():
        assert torch.allclose(again.model.get_parameter(name), tensor.float(), atol=1e-6), name


def test_rope_factors_together_with_another_scaling_are_refused(tmp_path):
    theirs = reference(**rope("llama3", **BANDED))
    manyheads.export(loaded(theirs, tmp_path / "hf", by_bytes()), tmp_path / "x.gguf", to="gguf")
    config = config_of(GgufFile(tmp_path / "x.gguf")) | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    with pytest.raises(CheckpointConfigError, match=r"rope_freqs\.weight"):
        get_family("gguf-llama").spec_of(config)


def test_the_context_length_is_kept(tmp_path):
    ours = loaded(reference(max_position_embeddings=8192), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    manyheads.export(tmp_path / "x.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 8192


def test_values_too_large_for_a_form_are_refused(tmp_path):
    ours = loaded(reference(), tmp_path / "hf", by_bytes())
    with torch.no_grad():
        ours.model.decoder.embed.table.weight.mul_(1e7)
    export_fails(ours, tmp_path / "x.gguf", "token_embd.weight", "f16", "65504", outtype="f16")


def test_an_unknown_form_is_refused(tmp_path):
    with pytest.raises(UsageError) as caught:
        manyheads.export(loaded(reference(), tmp_path / "hf"), tmp_path / "x.gguf", to="gguf", outtype="q2_k")
    assert all(value in str(caught.value) for value in ("q2_k", "f32", "f16", "q8_0"))


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"eos_token_id": [2, 7]}, (2, 7)),
        ({"eos_token_id": [2, 0]}, (2, 0)),
        ({"eos_token_id": 5}, (5, None)),
        ({"eos_token_id": 2**40}, (None, None)),
        ({"eos_token_id": -1}, (None, None)),
        ({"eos_token_id": 2, "eot_token_id": 0}, (2, 0)),
        ({"eos_token_id": [2, 7], "eot_token_id": 0}, (2, 0)),
    ],
)
def test_of_several_end_tokens_one_ends_the_text_and_one_the_turn(tmp_path, changes, ends):
    theirs = reference()
    theirs.save_pretrained(tmp_path / "hf")
    by_bytes().save(str(tmp_path / "hf" / "tokenizer.json"))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (tmp_path / "hf" / "generation_config.json").unlink()
    manyheads.export(tmp_path / "hf", tmp_path / "x.gguf", to="gguf")
    file = GgufFile(tmp_path / "x.gguf")
    assert tuple(file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")) == ends


@pytest.mark.parametrize(("tokenizer", "text"), [("spm", "<unk> a"), ("spm", " a b"), ("bytes", "abc<end>")])
def test_special_tokens_in_a_text_are_encoded_alike(tmp_path, tokenizer, text):
    own = by_spaces() if tokenizer == "spm" else by_bytes()
    ids = {
        "bos_token_id": 1,
        "eos_token_id": 2 if tokenizer == "spm" else 0,
        "vocab_size": max(len(TOKENS), own.get_vocab_size()),
    }
    manyheads.export(loaded(reference(**ids), tmp_path / "hf", own), tmp_path / "x.gguf", to="gguf")
    assert manyheads.load(tmp_path / "x.gguf").tokenizer.encode(text).ids == own.encode(text).ids


# ----------------------------------------------------------------------------------------------------------- what a file holds


def test_numbers_have_few_digits_and_special_tokens_are_kept(tmp_path):
    ids = {"bos_token_id": 5, "eos_token_id": 4, "pad_token_id": 3}
    ours = loaded(reference(rms_norm_eps=1e-6, **ids), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    again = manyheads.load(tmp_path / "x.gguf")
    assert again.spec.decoder.norm.eps == 1e-6
    assert {key: again.config[key] for key in ids} == ids


@pytest.mark.parametrize(("outtype", "number"), [("f32", 0), ("f16", 1), ("q8_0", 7)])
def test_each_tensor_has_its_form(tmp_path, outtype, number):
    """Positions in float32, matrices in the form, and those whose rows are not whole blocks in float16."""
    torch.manual_seed(1)
    ours = loaded(perturbed(make("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_inner=40)), tmp_path / "hf", by_bytes())
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf", outtype=outtype)
    file = GgufFile(tmp_path / "x.gguf")
    kinds = {name: gguf.GGMLQuantizationType(file.entries[name][0]).name.lower() for name in file}
    assert file.metadata["general.file_type"] == number
    assert kinds["position_embd.weight"] == kinds["output_norm.weight"] == "f32"
    assert kinds["blk.0.ffn_up.weight"] == outtype
    assert kinds["blk.0.ffn_down.weight"] == ("f16" if outtype == "q8_0" else outtype)  # rows of 40


def test_a_head_that_is_stored_twice_is_tied(tmp_path):
    ours = loaded(
        perturbed(make("GPTNeoXForCausalLM", "GPTNeoXConfig", **WIDE | {"tie_word_embeddings": True})),
        tmp_path / "hf",
        by_bytes(),
    )
    manyheads.export(ours, tmp_path / "x.gguf", to="gguf")
    assert "output.weight" in GgufFile(tmp_path / "x.gguf")
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
def test_fields_with_a_key_of_their_own_are_kept(tmp_path, name, config, options):
    theirs = perturbed(make(name, config, **options)).eval()
    manyheads.export(loaded(theirs, tmp_path / "hf", by_bytes()), tmp_path / "x.gguf", to="gguf")
    assert_close(
        manyheads.load(tmp_path / "x.gguf").logits(torch.tensor([PROMPT])), theirs(torch.tensor([PROMPT])).logits
    )


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope_factors_long": [1.0] * 8}, "rope_factors_long.weight"),
        ({"expert_used_count": 2}, "expert_used_count"),
    ],
)
def test_an_option_that_an_architecture_does_not_have_is_refused(tmp_path, change, value):
    config = config_of(GgufFile(write_reference(reference(), tmp_path / "x.gguf"))) | change
    with pytest.raises(CheckpointConfigError) as caught:
        get_family("gguf-llama").spec_of(config)
    assert value in str(caught.value)


def test_biases_of_q_k_and_v_are_separate_from_that_of_the_output(tmp_path):
    config = config_of(GgufFile(write_reference(reference(), tmp_path / "x.gguf"))) | {"attention_bias": True}
    attention = get_family("gguf-llama").spec_of(config).decoder.attention
    assert (attention.bias, attention.output_bias) == (True, False)


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
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": LETTERS, "token_type": KINDS, "merges": MERGES}
    values |= {"bos_token_id": LETTERS.index("<b>"), "eos_token_id": LETTERS.index("<e>")} | changes
    return read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in values.items()}, "it")


@pytest.mark.parametrize(
    ("changes", "text", "tokens"),
    [
        ({}, "abc a1234's", ["abc", "Ġa", "123", "4", "'s"]),
        (
            {"pre": "olmo"},
            "abc a1234'S",
            ["abc", "Ġa", "123", "4", "'", "S"],
        ),  # only lower-case contractions are one token
        ({"pre": "smollm"}, "a1234", ["a", "1", "2", "3", "4"]),
        ({"pre": "qwen2"}, "a1234'S", ["a", "1", "2", "3", "4", "'S"]),
        ({"pre": "llama-bpe"}, "a1234'S", ["<b>", "a", "123", "4", "'S"]),  # which adds a token before a text
        ({"pre": "llama-bpe", "add_bos_token": False}, "a", ["a"]),
        ({"pre": "llama-bpe", "merges": ["a b"]}, "abc", ["<b>", "abc"]),  # a word in the vocabulary is one token
        ({"merges": ["a b"]}, "abc", ["ab", "c"]),
        ({"add_bos_token": True, "add_eos_token": True}, "a", ["<b>", "a", "<e>"]),
        ({}, "a<own>b<e>", ["a", "<own>", "b", "<e>"]),
    ],
)
def test_a_pre_tokenizer_is_chosen_by_its_name(changes, text, tokens):
    assert vocabulary(**changes).encode(text).tokens == tokens


def test_an_added_token_that_is_not_special_is_decoded():
    tokenizer = vocabulary()
    assert tokenizer.decode(tokenizer.encode("a<own>b<e>").ids) == "a<own>b"


def pieces(**changes):
    words = ["<unk>", "<s>", "</s>", *"abc▁", "ab", "bc", "abc"]
    values = {
        "model": "llama",
        "tokens": words,
        "token_type": [2, 3, 3, *[1] * 7],
        "scores": [0.0] * 7 + [-2.0, -1.0, -3.0],
        "bos_token_id": 1,
    }
    return read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}, "it")


def test_pieces_merge_by_their_scores():
    assert pieces(add_bos_token=False).encode("abc").tokens == ["▁", "abc"]
    assert pieces(add_bos_token=False, scores=[0.0] * 7 + [-2.0, -1.0, -9.0]).encode("ab").tokens == ["▁", "ab"]
    split = ["<unk>", "<s>", "</s>", *"abc▁", "ab", "bc", "x"]
    assert pieces(add_bos_token=False, tokens=split).encode("abc").tokens == ["▁", "a", "bc"], "bc has the better score"
    assert pieces(add_bos_token=False, add_space_prefix=False).encode("ab").tokens == ["ab"]
    assert pieces().encode("a").tokens == ["<s>", "▁", "a"], (
        "it adds a token before a text, unless the file says otherwise"
    )


@pytest.mark.parametrize("token", ["$A", "a:b", ""])
def test_a_token_that_cannot_be_added_to_texts_is_refused(token):
    with pytest.raises(CheckpointTokenizerError) as caught:
        pieces(tokens=["<unk>", token, "</s>", *"abc▁", "ab", "bc", "abc"])
    assert caught.value.code == "checkpoint.tokenizer"


def test_tokenizers_of_another_kind_and_of_too_many_tokens_are_refused():
    with pytest.raises(ExportError, match="WordLevel"):
        write_vocabulary(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), 61, {})
    with pytest.raises(ExportError, match="61 .* 60"):
        write_vocabulary(by_bytes(), 60, {})


def test_the_first_token_of_a_vocabulary_can_begin_every_text():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    metadata = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 9}
    add_special_tokens(tokenizer, ["<s>", "a"], metadata, bos=True, eos=True)
    assert tokenizer.encode("a").tokens == ["<s>", "a"]  # and there is no token 9


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)], "smollm"),
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)], None),
        ([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)], None),
    ],
)
def test_a_pre_tokenizer_has_its_name_or_none(steps, name):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tree = json.loads(tokenizer.to_str())
    if name is None:
        with pytest.raises(ExportError):
            pre_tokenizer_name(tree)
    else:
        assert pre_tokenizer_name(tree) == name
