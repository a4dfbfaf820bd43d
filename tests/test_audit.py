"""The linter for models: sound ones pass every law, and each planted fault is found by a row with its name."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from command import run
from small_checkpoints import CASES, make, moved

import manyheads
from manyheads.convert.files import FileError
from manyheads.inspect.audit import LAWS

TEXT = [name for name in CASES if not name.startswith("vit")]
PICTURES = [name for name in CASES if name.startswith("vit")]
SEEN = {"attention rows sum to one", "batch invariance", "no dead or doubled heads", "another implementation"}  # in pictures


def model(name):
    torch.manual_seed(1)
    found, config, options = CASES[name]
    return moved(make(found, config, **options))


def faults(subject):
    return {row.law for row in manyheads.audit(subject) if row.verdict == "fault"}


@pytest.mark.parametrize("name", TEXT)
def test_a_folder_that_the_reference_saved_is_all_green(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    rows = {row.law: row for row in manyheads.audit(tmp_path / "saved")}
    assert set(rows) == set(LAWS)
    assert not [row for row in rows.values() if row.verdict == "fault"]
    for law in ("attention rows sum to one", "padding on the left", "padding on the right", "batch invariance", "another implementation"):
        assert rows[law].verdict == "ok", rows[law]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_keep_the_laws_that_are_theirs(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    for subject in (tmp_path / "saved", model(name)):
        rows = {row.law: row for row in manyheads.audit(subject)}
        assert {law for law, row in rows.items() if row.verdict == "ok"} == SEEN, rows
        assert all(row.said for row in rows.values() if row.verdict == "not checked")
        assert set(rows) == set(LAWS)
        assert {row.verdict for row in rows.values()} == {"ok", "not checked"}


def test_a_fault_in_a_model_of_pictures_is_found():
    subject = model("vit")
    subject.vit.embeddings.register_forward_hook(lambda _, __, out: out * 1.5)
    assert faults(subject) == {"another implementation"}


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "roberta", "mistral-window", "gpt-neox", "phi3"])
def test_a_live_model_is_all_green_and_left_as_it_was(name):
    subject = model(name).train()
    before = {key: value.clone() for key, value in subject.state_dict().items()}
    assert not faults(subject)
    assert subject.training
    assert subject.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[key]) for key, value in subject.state_dict().items())


def drop_the_causal_mask(subject, patch):
    for module in subject.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    patch.setattr("transformers.models.gpt2.modeling_gpt2.create_causal_mask", lambda *_, **__: None)


def multiply_the_mask_after_the_softmax(subject, patch):
    def wrong(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1)
        seen = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2])
        weights = weights * seen
        return (weights @ value).transpose(1, 2), weights

    patch.setattr("transformers.models.gpt2.modeling_gpt2.eager_attention_forward", wrong)


def shift_positions(subject, patch):
    subject.transformer.wpe.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def untie_the_head(subject, patch):
    subject.lm_head.weight = torch.nn.Parameter(subject.lm_head.weight * 1.5)


def double_a_head(subject, patch):
    weight, bias = subject.transformer.h[1].attn.c_attn.weight, subject.transformer.h[1].attn.c_attn.bias
    with torch.no_grad():
        for part in (0, 32):  # queries and keys
            weight[:, part + 8 : part + 16], bias[part + 8 : part + 16] = weight[:, part : part + 8], bias[part : part + 8]


def forget_the_cache(subject, patch):
    usual = subject.forward
    patch.setattr(subject, "forward", lambda *args, past_key_values=None, **rest: usual(*args, **rest))


@pytest.mark.parametrize(
    ("plant", "law"),
    [
        (drop_the_causal_mask, "nobody sees the future"),
        (multiply_the_mask_after_the_softmax, "attention rows sum to one"),
        (shift_positions, "another implementation"),
        (untie_the_head, "tied weights are tied"),
        (double_a_head, "no dead or doubled heads"),
        (forget_the_cache, "cached = full"),
    ],
)
def test_a_planted_fault_is_found_by_name(plant, law, monkeypatch):
    subject = model("gpt2")
    assert not faults(subject)
    plant(subject, monkeypatch)
    assert law in faults(subject)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_half_precision_is_no_fault(name, tmp_path):
    model(name).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert not faults(tmp_path / "half")


def test_a_wrong_rope_base_is_found():
    subject = model("llama")
    rotary = subject.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq * torch.tensor([1.0, 0.7, 0.5, 0.35]))
    assert faults(subject) == {"another implementation"}


def test_an_encoder_that_counts_padding_is_found():
    """Absolute positions that count places: padding on the left moves every word. This is how the reference reads such sources."""
    assert faults(model("marian")) == {"padding on the left"}


def test_a_row_that_depends_on_its_neighbours_is_found(monkeypatch):
    subject = model("gpt2")
    usual = subject.forward

    def mixed(*args, **rest):
        out = usual(*args, **rest)
        out.logits = out.logits + out.logits.mean(dim=0, keepdim=True)
        return out

    monkeypatch.setattr(subject, "forward", mixed)
    assert "batch invariance" in faults(subject)


def test_the_command_prints_a_table_and_tells_by_its_exit_code(tmp_path):
    model("gpt2").save_pretrained(tmp_path / "saved")

    done = run("audit", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "no bar of somebody else's progress"
    assert all(law in done.stdout for law in LAWS)
    faulty = model("gpt2")
    double_a_head(faulty, None)
    faulty.save_pretrained(tmp_path / "saved")
    done = run("audit", tmp_path / "saved", "--json", check=None)
    assert done.returncode == 1
    assert [row["law"] for row in json.loads(done.stdout)["rows"] if row["verdict"] == "fault"] == ["no dead or doubled heads"]
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_head": 5}))
    done = run("audit", tmp_path / "saved", "--json", check=None)
    assert done.returncode == 4
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "5 heads do not divide width 32" in done.stderr
    with pytest.raises(FileError, match="5 heads do not divide width 32"):
        manyheads.audit(tmp_path / "saved")


def row(subject, law):
    return next(found for found in manyheads.audit(subject) if found.law == law)


def test_what_is_nan_is_a_fault():
    own = manyheads.build(manyheads.read("gpt2", "vocab=61", "decoder.layers=1", "decoder.width=32", "decoder.attention.heads=4"))
    with torch.no_grad():
        own.decoder.norm.bias[:] = torch.nan
    for law in ("nobody sees the future", "padding on the right", "batch invariance"):
        found = row(own, law)
        assert (found.verdict, found.figure) == ("fault", None), "which JSON has no word for"
        assert "NaN or infinite" in found.said
    with torch.no_grad():
        own.decoder.layers[0].attention.query.bias[:] = torch.nan
    assert row(own, "attention rows sum to one").verdict == "fault"


@pytest.mark.parametrize("labels", [1, 16])
def test_classes_are_not_taken_for_tokens(labels, tmp_path):
    found, config, options = CASES["bert-classes"]
    subject = moved(make(found, config, **options | {"num_labels": labels}))
    subject.save_pretrained(tmp_path / "saved")
    assert faults(subject) == {"padding on the left"}, "it takes the first place for the first token"
    assert not faults(tmp_path / "saved")


@pytest.mark.parametrize(("name", "verdict"), [("llama-bare", "ok"), ("gpt2-bare", "ok"), ("bert-bare", "not checked")])
def test_a_tower_alone_keeps_its_direction(name, verdict, monkeypatch):
    subject = model(name)
    assert not faults(subject)
    assert row(subject, "nobody sees the future").verdict == row(subject, "cached = full").verdict == verdict
    if name == "gpt2-bare":
        monkeypatch.setattr("transformers.models.gpt2.modeling_gpt2.create_causal_mask", lambda *_, **__: torch.zeros(1, 1, 12, 12))
        assert row(subject, "nobody sees the future").verdict == "fault"


@pytest.mark.parametrize("name", ["gpt2-classes", "llama-classes"])
def test_one_answer_a_text_shows_no_direction(name):
    found = row(model(name), "nobody sees the future")
    assert (found.verdict, found.said) == ("not checked", "one answer a text does not show who sees whom")


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "llama-multi-query-tied"])
def test_one_tensor_is_not_compared_with_itself(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    found = row(tmp_path / "saved", "tied weights are tied")
    tied = name != "llama"
    said = "head and embedding are one tensor by construction" if tied else "no weights are claimed to be tied"
    assert (found.verdict, found.said) == ("not checked", said)
    assert row(model(name), "tied weights are tied").verdict == ("ok" if tied else "not checked")


@pytest.mark.parametrize("part", ["values", "outputs"])
def test_a_head_that_adds_nothing_is_found(part, tmp_path):
    subject = model("llama")
    with torch.no_grad():
        for layer in subject.model.layers:
            if part == "outputs":
                layer.self_attn.o_proj.weight[:, 8:16] = 0
            else:  # of the first key head, which two heads share
                layer.self_attn.v_proj.weight[:8] = 0
    subject.save_pretrained(tmp_path / "saved")
    for given in (subject, tmp_path / "saved"):
        found = row(given, "no dead or doubled heads")
        assert (found.verdict, found.figure) == ("fault", 3 if part == "outputs" else 6)
        assert "add nothing" in found.said


def test_a_decoder_shorter_than_its_encoder_is_read_within_its_places():
    towers = ["encoder.layers=1", "decoder.layers=1", "encoder.position=learned", "encoder.position.length=40"]
    own = manyheads.build(manyheads.read("transformer-base", "vocab=61", *towers, "decoder.position=learned", "decoder.position.length=5"))
    assert not faults(own)


def test_a_folder_of_ours_has_no_other_implementation(tmp_path):
    own = manyheads.build(manyheads.read("gpt2", "vocab=61", "decoder.layers=1", "decoder.width=32", "decoder.attention.heads=4"))
    manyheads.export(own, tmp_path / "own", to="manyheads")
    assert not faults(tmp_path / "own")


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="given a list, expected a folder"):
        manyheads.audit([1])
    assert transformers.__version__
