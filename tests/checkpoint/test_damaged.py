"""Damaged and hostile checkpoints of every format: each is read, or refused in one short sentence, and never waited for."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import struct

import pytest
import torch
from raising import raises
from small_checkpoints import folder_of
from small_runs import described, train_all
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import manyheads
from manyheads import build
from manyheads.convert.families import get_family
from manyheads.errors import CheckpointTokenizerError, ManyheadsError
from manyheads.files import tokenizer as bounds
from manyheads.files.manifest import verify_manifest
from manyheads.files.tokenizer import parse_tokenizer

FAIRSEQ = {
    "encoder_embed_dim": 8, "decoder_embed_dim": 8, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_embed_dim": 8,
    "decoder_ffn_embed_dim": 8, "share_decoder_input_output_embed": True,
}  # fmt: skip


def fairseq_folder(folder, **options):
    """A folder with a pickle of torch, dictionaries and merges."""
    family = get_family("fairseq")
    model = build(family.spec_of(FAIRSEQ | {"source_tokens": 7, "target_tokens": 6}))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = family.table(model.spec, "TransformerModel", parameters).write(parameters)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "data").mkdir()
    content = {"cfg": {"model": argparse.Namespace(**FAIRSEQ | options)}, "model": weights}
    torch.save(content, folder / "checkpoints" / "checkpoint_best.pt")
    (folder / "data" / "dict.aa.txt").write_text("a 5\nb@@ 5\nab 5\n")
    (folder / "data" / "dict.bb.txt").write_text("x@@ 5\ny 5\n")
    (folder / "data" / "bpe.code").write_text("#version: 0.2\na b</w>\n")
    return folder


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with one checkpoint of each format."""
    folder = tmp_path_factory.mktemp("sound")
    hf = folder_of("gpt2", folder / "hf", tokenizer=False, vocab_size=256, n_layer=1)
    byte_level().save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text('{"split_special_tokens": false}')
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "gguf").mkdir()
    manyheads.export(hf, folder / "gguf" / "model.gguf", to="gguf")
    train_all(described("causal", steps=1, save_every=1, eval_every=1), folder / "run")
    fairseq_folder(folder / "fairseq")
    return folder


def path_of(folder):
    return folder / "model.gguf" if (folder / "model.gguf").exists() else folder


def zeros(path, size=10**7):
    with path.open("wb") as file:
        file.truncate(size)


def damages(path, rng):
    """Functions that damage a file, each in another way."""
    data = path.read_bytes()
    outside = path.parents[2] / "outside"
    outside.write_bytes(data)
    for end in {0, 1, len(data) // 2, len(data) - 1}:
        yield lambda end=end: path.write_bytes(data[:end])
    for _ in range(6):
        changed = bytearray(data)
        for place in rng.choices(range(len(data)), k=rng.choice((1, 1, 20))):
            changed[place] ^= 1 << rng.randrange(8)
        yield lambda changed=changed: path.write_bytes(changed)
    yield lambda: path.write_bytes(data + data)
    yield lambda: zeros(path)
    yield lambda: (path.unlink(), path.mkdir())
    yield lambda: (path.unlink(), os.mkfifo(path))
    for target in ("nowhere", path.name, "/dev/zero", outside):
        yield lambda target=target: (path.unlink(), path.symlink_to(target))


def error_of_use(path):
    """The error of loading a checkpoint and of its tokenizer, if there is one."""
    try:
        checkpoint = manyheads.load(path, copy=True, verify=True)
        if checkpoint.tokenizer is not None:
            checkpoint.decode(checkpoint.encode(["was born"])[0].ids)
    except ManyheadsError as error:
        return error


@pytest.mark.parametrize("kind", ["hf", "run", "gguf", "fairseq"])
def test_a_damaged_file_is_read_or_refused(kind, sound, tmp_path):
    folder, rng, refused = tmp_path / "copy" / kind, random.Random(kind), 0
    shutil.copytree(sound / kind, folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for damage in damages(path, rng):
            damage()
            error = error_of_use(path_of(folder))
            refused += error is not None
            assert error is None or (error.exit_status == 4 and len(str(error)) < 1000), (path, error)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(data)
    assert refused > 10


# ---------------------------------------------------------------------------------------------------- manifests and runs


@pytest.fixture
def run(sound, tmp_path):
    shutil.copytree(sound / "run", tmp_path / "run")
    return tmp_path / "run"


def edit_manifest(run, **files):
    path = next((run / "checkpoints").glob("step-*")) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"files": manifest["files"] | files}))
    return path.parent


def test_a_manifest_names_only_files_of_its_folder(run):
    checkpoint = edit_manifest(run)
    assert verify_manifest(checkpoint) is None
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert verify_manifest(edit_manifest(run, **{"1_Pooling/config.json": {"bytes": 2, "sha256": digest}})) is None
    (run / "outside.json").write_text("{}")
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "link").symlink_to("../../outside.json")
    for name in ("../../outside.json", str(run / "outside.json"), "link", "pipe", "/dev/zero", "", "x" * 100_000):
        verify_manifest(edit_manifest(run, **{name: {"bytes": 2, "sha256": digest}}))
        with raises("checkpoint.hash-mismatch", checkpoint) as caught:
            manyheads.load(run, verify=True)
        assert len(str(caught.value)) < 1000
        edit = json.loads((checkpoint / "manifest.json").read_text())
        del edit["files"][name]
        (checkpoint / "manifest.json").write_text(json.dumps(edit))
    assert verify_manifest(checkpoint) is None


# -------------------------------------------------------------------------------------------------------------- tokenizers


def words(**changes):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return json.loads(tokenizer.to_str())


def template(*single):
    pieces = [{"Sequence": {"id": item, "type_id": 0}} for item in single]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}


LONG = "x" * 1000
THOUSANDFOLD = normalizers.Replace("x", LONG)
CHARSMAP = "AAAAAGFhYWFh" + "YWFh" * 1000  # an index of no bytes, and one long text
EXPANDING = {
    "replacements": words(normalizer=normalizers.Sequence([THOUSANDFOLD] * 4)),
    "empty pattern": words(normalizer=normalizers.Replace(Regex(""), LONG)),
    "prefixes": words(normalizer=normalizers.Sequence([normalizers.Prepend("xx")] * 40)),
    "bytes": words(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 40)),
    "normalizer and pre-tokenizer": words(
        normalizer=normalizers.Sequence([normalizers.ByteLevel()] * 3), pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 3)
    ),
    "precompiled": words() | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "template": words() | {"post_processor": template(*["A"] * 1000)},
    "templates": words() | {"post_processor": {"type": "Sequence", "processors": [template("A", "A")] * 30}},
    "decoder": words(decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 40)),
    "a long token": words() | {"model": {"type": "WordLevel", "vocab": {"a" * 100_000: 0}, "unk_token": "a"}},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPANDING)
def test_a_tokenizer_that_makes_a_long_text_of_a_short_one_is_refused(name):
    with raises("checkpoint.tokenizer") as caught:
        parse_tokenizer(json.dumps(EXPANDING[name]).encode(), "tokenizer.json", CheckpointTokenizerError)
    assert len(str(caught.value)) < 1000


def test_steps_of_published_tokenizers_are_read():
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace(Regex(" {2,}"), "▁")]
    for tree in (
        words(normalizer=normalizers.Sequence([normalizers.NFKC(), *spaces]), decoder=decoders.Replace("▁", " ")),
        words(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
        words(post_processor=processors.TemplateProcessing("a $A a", "a $A a a $B a", [("a", 0)])),
    ):
        assert parse_tokenizer(json.dumps(tree).encode(), "tokenizer.json").encode("a").ids


FAILING = {
    "unknown token": words() | {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    "backtracking": words(pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+$"), "isolated")),
    "backtracking normalizer": words(normalizer=normalizers.Replace(Regex("(a+)+$"), "")),
    "no such sequence": words() | {"post_processor": template("B")},
    "pieces of no length": words() | {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("name", FAILING)
def test_a_tokenizer_that_fails_or_panics_has_an_error(name, sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(FAILING[name]))
    checkpoint = manyheads.load(tmp_path / "hf")
    with raises("checkpoint.tokenizer") as caught:
        manyheads.predict(checkpoint, "a" * 50 + "!")
    assert caught.value.exit_status == 4


def test_a_decoder_that_panics_has_an_error(sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    slow = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(a+)+$"), "")])
    vocab = {"type": "WordLevel", "vocab": {"aaaaaa": 0, "!": 1}, "unk_token": "!"}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(words(decoder=slow) | {"model": vocab}))
    checkpoint = manyheads.load(tmp_path / "hf")
    with raises("checkpoint.tokenizer"):
        checkpoint.decode([0] * 10 + [1])


def test_a_tokenizer_that_takes_too_long_is_left_behind(sound, tmp_path, monkeypatch):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    # for each character some 2^20 steps, fewer than the library's own limit
    slow = words(pre_tokenizer=pre_tokenizers.Split(Regex("(?:a|a){0,18}[^a!]"), "isolated"))
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(slow))
    checkpoint = manyheads.load(tmp_path / "hf")
    monkeypatch.setattr(bounds, "SECONDS", 0.01)
    with raises("checkpoint.tokenizer"):
        checkpoint.encode(["a" * 60 + "!"])


# ----------------------------------------------------------------------------------------------------------- counts, names


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": list(range(2000))},
        {"forced_eos_token_id": [1] * 2000},
        {"bad_words_ids": [[i] for i in range(20_000)]},
        {"bad_words_ids": [[1] * 20_000]},
    ],
    ids=["eos", "forced", "words", "one word"],
)
def test_the_number_of_tokens_in_generation_settings_is_bounded(settings, sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "generation_config.json"
    path.write_text(json.dumps(settings))
    with raises("checkpoint.config", tmp_path / "hf", next(iter(settings))):
        manyheads.load(tmp_path / "hf")
    path.write_text(f'{{"bad_words_ids": [{"[1]," * 10**6}[1]]}}')
    with raises("checkpoint.corrupt", path):
        manyheads.load(tmp_path / "hf")


def test_a_long_chat_template_is_refused(sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    text = "x" * (1 << 16)
    (tmp_path / "hf" / "chat_template.jinja").write_text(text)
    checkpoint = manyheads.load(tmp_path / "hf")
    assert checkpoint.chat_template == text
    (tmp_path / "hf" / "chat_template.jinja").write_text(text + "x")
    with raises("checkpoint.config"):
        manyheads.load(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": text + "x"}))
    with raises("checkpoint.config"):
        manyheads.load(tmp_path / "hf")
    checkpoint.metadata.extra_files["chat_template.jinja"] = text.encode()
    manyheads.export(checkpoint, tmp_path / "whole.gguf", to="gguf")
    assert manyheads.load(tmp_path / "whole.gguf").chat_template == text
    data = (tmp_path / "whole.gguf").read_bytes()
    length, longer = struct.pack("<Q", len(text)), struct.pack("<Q", len(text) + 32)
    (tmp_path / "long.gguf").write_bytes(data.replace(length + b"x", longer + b"x" * 33))
    with raises("checkpoint.config", "long.gguf"):
        manyheads.load(tmp_path / "long.gguf")


NAME = "n" * 100_000


def edit_json(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()) if path.exists() else {})))


def edit_header(path, change):
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])


def renamed(header):
    name = next(name for name in header if name != "__metadata__")
    return {NAME if item == name else item: entry for item, entry in header.items()}


def odd_dtype(header):
    return renamed(header) | {NAME: {"dtype": NAME, "shape": [2] * 1000, "data_offsets": [0, 8]}}


LONG_NAMES = {
    "key": lambda hf: edit_json(hf / "config.json", lambda config: config | {NAME: 1}),
    "value": lambda hf: edit_json(hf / "config.json", lambda config: config | {"activation_function": NAME}),
    "model_type": lambda hf: edit_json(hf / "config.json", lambda config: config | {"model_type": NAME}),
    "architecture": lambda hf: edit_json(hf / "config.json", lambda config: config | {"architectures": [NAME]}),
    "two keys": lambda hf: (hf / "config.json").write_text(f'{{"{NAME}": 1, "{NAME}": 1}}'),
    "label": lambda hf: edit_json(hf / "config.json", lambda config: config | {"n_embd": {NAME: NAME}}),
    "tensor": lambda hf: edit_header(hf / "model.safetensors", renamed),
    "dtype": lambda hf: edit_header(hf / "model.safetensors", odd_dtype),
    "index": lambda hf: edit_json(hf / "model.safetensors.index.json", lambda _: {"weight_map": {"a": NAME}}),
    "index key": lambda hf: edit_json(hf / "model.safetensors.index.json", lambda _: {"weight_map": {NAME: "model.safetensors"}}),
    "token": lambda hf: edit_json(hf / "tokenizer.json", lambda tree: tree | {"added_tokens": [{"content": NAME}]}),
    "merge": lambda hf: edit_json(hf / "tokenizer.json", lambda tree: tree | {"model": tree["model"] | {"merges": [["a", NAME[:999]]]}}),
    "step": lambda hf: edit_json(hf / "tokenizer.json", lambda tree: tree | {"normalizer": {"type": NAME}}),
    "setting": lambda hf: edit_json(hf / "generation_config.json", lambda _: {"eos_token_id": [NAME[:400]] * 2000}),
    "modules": lambda hf: edit_json(hf / "generation_config.json", lambda _: [{"type": NAME}]),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_long_name_is_shortened_in_messages(name, sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    LONG_NAMES[name](tmp_path / "hf")
    with pytest.raises(ManyheadsError) as caught:
        manyheads.load(tmp_path / "hf")
    assert caught.value.exit_status == 4
    assert 0 < len(str(caught.value)) < 1000


def test_a_long_name_in_a_gguf_file_or_a_pickle_is_shortened_in_messages(sound, tmp_path):
    data = (sound / "gguf" / "model.gguf").read_bytes()
    old, new = (struct.pack("<Q", len(name)) + name for name in (b"token_embd.weight", b"n" * 100_000))
    for text in (data.replace(old, new), data.replace(struct.pack("<Q", 4) + b"gpt2", new, 1)):
        (tmp_path / "x.gguf").write_bytes(text)
        with pytest.raises(ManyheadsError) as caught:
            manyheads.load(tmp_path / "x.gguf")
        assert (caught.value.exit_status, len(str(caught.value)) < 1000) == (4, True)
    for options in ({NAME: 1}, {"activation_fn": NAME}, {"adaptive_softmax_cutoff": [NAME]}):
        with pytest.raises(ManyheadsError) as caught:
            manyheads.load(fairseq_folder(tmp_path / f"fairseq-{next(iter(options))[:9]}", **options))
        assert (caught.value.exit_status, len(str(caught.value)) < 1000) == (4, True)


# ----------------------------------------------------------------------------------------------------------------- tensors


def add_unused(folder, shape, dtype, size):
    """Adds a tensor of older versions of transformers, which no computation reads."""
    path, name = folder / "model.safetensors", "transformer.h.0.attn.masked_bias"

    def add(header):
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        return header | {name: {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}}

    edit_header(path, add)
    path.write_bytes(path.read_bytes() + b"\1" * size)


@pytest.mark.parametrize("dtype", ["F32", "F4", "C64"])
@pytest.mark.parametrize(
    "shape", [[0, 1 << 62], [0, 1 << 80], [1 << 62], [0] * 100, [1] * 100, [0, -1], [0, 1.5]], ids=str
)
def test_a_tensor_that_nobody_reads_may_not_have_any_shape(shape, dtype, sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    add_unused(tmp_path / "hf", shape, dtype, 0)
    with raises("checkpoint.corrupt", tmp_path / "hf") as caught:
        manyheads.load(tmp_path / "hf")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("shape", "dtype", "size"), [([3], "F8_E5M2", 3), ([], "BOOL", 1), ([0, 9], "U64", 0)])
def test_a_tensor_that_nobody_reads_may_have_any_dtype(shape, dtype, size, sound, tmp_path):
    shutil.copytree(sound / "hf", tmp_path / "hf")
    add_unused(tmp_path / "hf", shape, dtype, size)
    manyheads.export(tmp_path / "hf", tmp_path / "again")
    (unused,) = manyheads.load(tmp_path / "again").metadata.weights.unused.values()
    assert (list(unused.shape), unused.nbytes) == (shape, size)
