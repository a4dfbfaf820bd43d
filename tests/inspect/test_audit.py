"""Audits: correct models keep every check, and each planted fault breaks the check that is about it."""

from __future__ import annotations

import json

import kinds
import pytest
import torch
from command import error_of, run
from small_checkpoints import CASES, make, perturbed

import manyheads
from manyheads.errors import CheckpointError, UnsupportedError, UsageError
from manyheads.inspect.audit import CHECKS

TEXT = [name for name in CASES if not name.startswith("vit")]
IMAGES = [name for name in CASES if name.startswith("vit")]
IMAGE_CHECKS = {
    "attention rows sum to one",
    "batch invariance",
    "no dead or duplicate heads",
    "agrees with a reference implementation",
}


def model(name):
    torch.manual_seed(1)
    architecture, config, options = CASES[name]
    return perturbed(make(architecture, config, **options))


def faults(target):
    return {row.check for row in manyheads.audit(target) if row.status == "failed"}


@pytest.mark.parametrize("name", TEXT)
def test_a_folder_that_transformers_saved_keeps_every_invariant(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    rows = {row.check: row for row in manyheads.audit(tmp_path / "saved")}
    assert set(rows) == set(CHECKS)
    assert not [row for row in rows.values() if row.status == "failed"]
    for check in (
        "attention rows sum to one",
        "left padding is ignored",
        "right padding is ignored",
        "batch invariance",
        "agrees with a reference implementation",
    ):
        assert rows[check].status == "passed", rows[check]


@pytest.mark.parametrize("name", IMAGES)
def test_image_models_keep_the_invariants_about_images(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    for audited in (tmp_path / "saved", model(name)):
        rows = {row.check: row for row in manyheads.audit(audited)}
        assert {check for check, row in rows.items() if row.status == "passed"} == IMAGE_CHECKS, rows
        assert all(row.message for row in rows.values() if row.status == "skipped")
        assert set(rows) == set(CHECKS)
        assert {row.status for row in rows.values()} == {"passed", "skipped"}


def test_a_fault_in_an_image_model_is_found():
    audited = model("vit")
    audited.vit.embeddings.register_forward_hook(lambda _, __, out: out * 1.5)
    assert faults(audited) == {"agrees with a reference implementation"}


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "roberta", "mistral-window", "gpt-neox", "phi3"])
def test_a_live_model_keeps_every_invariant_and_is_not_changed(name):
    audited = model(name).train()
    before = {key: value.clone() for key, value in audited.state_dict().items()}
    assert not faults(audited)
    assert audited.training
    assert audited.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[key]) for key, value in audited.state_dict().items())


@pytest.mark.parametrize("as_checkpoint", [False, True])
def test_every_module_of_an_audited_model_keeps_its_mode(as_checkpoint):
    audited = manyheads.build(kinds.decoder()).train()
    audited.decoder.embed.eval()  # as a frozen part is
    before = [module.training for module in audited.modules()]
    assert not faults(manyheads.Checkpoint(audited) if as_checkpoint else audited)
    assert [module.training for module in audited.modules()] == before


def drop_the_causal_mask(audited, patch):
    for module in audited.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    patch.setattr("transformers.models.gpt2.modeling_gpt2.create_causal_mask", lambda *_, **__: None)


def multiply_the_mask_after_the_softmax(audited, patch):
    def wrong(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1)
        seen = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2])
        weights = weights * seen
        return (weights @ value).transpose(1, 2), weights

    patch.setattr("transformers.models.gpt2.modeling_gpt2.eager_attention_forward", wrong)


def shift_positions(audited, patch):
    audited.transformer.wpe.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def untie_the_head(audited, patch):
    audited.lm_head.weight = torch.nn.Parameter(audited.lm_head.weight * 1.5)


def double_a_head(audited, patch):
    weight, bias = audited.transformer.h[1].attn.c_attn.weight, audited.transformer.h[1].attn.c_attn.bias
    with torch.no_grad():
        for part in (0, 32):  # queries and keys
            weight[:, part + 8 : part + 16], bias[part + 8 : part + 16] = (
                weight[:, part : part + 8],
                bias[part : part + 8],
            )


def ignore_the_padding_mask(audited, patch):
    usual = audited.forward
    patch.setattr(audited, "forward", lambda *args, attention_mask=None, **rest: usual(*args, **rest))


def forget_the_cache(audited, patch):
    usual = audited.forward
    patch.setattr(audited, "forward", lambda *args, past_key_values=None, **rest: usual(*args, **rest))


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (drop_the_causal_mask, "no dependence on later tokens"),
        (multiply_the_mask_after_the_softmax, "attention rows sum to one"),
        (shift_positions, "agrees with a reference implementation"),
        (untie_the_head, "tied weights are equal"),
        (double_a_head, "no dead or duplicate heads"),
        (forget_the_cache, "cached decoding equals full forward"),
        (ignore_the_padding_mask, "left padding is ignored"),
    ],
)
def test_a_planted_fault_is_found_by_name(plant, check, monkeypatch):
    audited = model("gpt2")
    assert not faults(audited)
    plant(audited, monkeypatch)
    assert check in faults(audited)


def test_an_encoder_that_ignores_its_padding_mask_is_found_on_both_sides(monkeypatch):
    encoder = model("bert")
    ignore_the_padding_mask(encoder, monkeypatch)
    assert {"left padding is ignored", "right padding is ignored"} <= faults(encoder)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_half_precision_is_no_fault(name, tmp_path):
    model(name).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert not faults(tmp_path / "half")


def test_a_wrong_rope_base_is_found():
    audited = model("llama")
    rotary = audited.model.rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq * torch.tensor([1.0, 0.7, 0.5, 0.35]))
    assert faults(audited) == {"agrees with a reference implementation"}


def test_an_encoder_that_counts_padding_is_found():
    """Absolute positions that count padding: left padding moves every token. transformers encodes such sources so."""
    assert faults(model("marian")) == {"left padding is ignored"}


def test_a_row_that_depends_on_its_neighbours_is_found(monkeypatch):
    audited = model("gpt2")
    usual = audited.forward

    def mixed(*args, **rest):
        out = usual(*args, **rest)
        out.logits = out.logits + out.logits.mean(dim=0, keepdim=True)
        return out

    monkeypatch.setattr(audited, "forward", mixed)
    assert "batch invariance" in faults(audited)


def test_the_command_prints_a_table_and_its_exit_status_says_if_a_invariant_is_broken(tmp_path):
    model("gpt2").save_pretrained(tmp_path / "saved")

    done = run("audit", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "not even the progress bars of transformers"
    assert all(check in done.stdout for check in CHECKS)
    faulty = model("gpt2")
    double_a_head(faulty, None)
    faulty.save_pretrained(tmp_path / "saved")
    done = run("audit", tmp_path / "saved", "--json", check=None)
    assert done.returncode == 1
    assert [row["check"] for row in json.loads(done.stdout)["rows"] if row["status"] == "failed"] == [
        "no dead or duplicate heads"
    ]
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_head": 5}))
    error = error_of("audit", tmp_path / "saved", check=4)
    assert error["code"].startswith("checkpoint.")
    assert "5 heads" in error["message"]
    with pytest.raises(CheckpointError, match="5 heads"):
        manyheads.audit(tmp_path / "saved")


def row(target, check):
    return next(result for result in manyheads.audit(target) if result.check == check)


def test_a_nan_is_a_fault():
    own = manyheads.build(
        manyheads.read("gpt2", "vocab=61", "decoder.layers=1", "decoder.width=32", "decoder.attention.heads=4")
    )
    with torch.no_grad():
        own.decoder.norm.bias[:] = torch.nan
    for check in ("no dependence on later tokens", "right padding is ignored", "batch invariance"):
        result = row(own, check)
        assert (result.status, result.value) == ("failed", None), "JSON has no NaN"
        assert "NaN" in result.message
    with torch.no_grad():
        own.decoder.layers[0].attention.query.bias[:] = torch.nan
    assert row(own, "attention rows sum to one").status == "failed"


@pytest.mark.parametrize("labels", [1, 16])
def test_classes_are_not_taken_for_tokens(labels, tmp_path):
    architecture, config, options = CASES["bert-classes"]
    audited = perturbed(make(architecture, config, **options | {"num_labels": labels}))
    audited.save_pretrained(tmp_path / "saved")
    assert faults(audited) == {"left padding is ignored"}, "it pools the first position"
    assert not faults(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "status"), [("llama-bare", "passed"), ("gpt2-bare", "passed"), ("bert-bare", "skipped")]
)
def test_a_stack_alone_keeps_its_direction(name, status, monkeypatch):
    audited = model(name)
    assert not faults(audited)
    assert (
        row(audited, "no dependence on later tokens").status
        == row(audited, "cached decoding equals full forward").status
        == status
    )
    if name == "gpt2-bare":
        monkeypatch.setattr(
            "transformers.models.gpt2.modeling_gpt2.create_causal_mask", lambda *_, **__: torch.zeros(1, 1, 12, 12)
        )
        assert row(audited, "no dependence on later tokens").status == "failed"


@pytest.mark.parametrize("name", ["gpt2-classes", "llama-classes"])
def test_one_output_per_text_does_not_show_causality(name):
    result = row(model(name), "no dependence on later tokens")
    assert (result.status, result.value) == ("skipped", None)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "llama-multi-query-tied"])
def test_one_tensor_is_not_compared_with_itself(name, tmp_path):
    model(name).save_pretrained(tmp_path / "saved")
    result = row(tmp_path / "saved", "tied weights are equal")
    tied = name != "llama"
    assert result.status == "skipped"
    assert row(model(name), "tied weights are equal").status == ("passed" if tied else "skipped")


@pytest.mark.parametrize("part", ["values", "outputs"])
def test_a_head_that_contributes_nothing_is_found(part, tmp_path):
    audited = model("llama")
    with torch.no_grad():
        for layer in audited.model.layers:
            if part == "outputs":
                layer.self_attn.o_proj.weight[:, 8:16] = 0
            else:  # of the first key head, which two heads share
                layer.self_attn.v_proj.weight[:8] = 0
    audited.save_pretrained(tmp_path / "saved")
    for target in (audited, tmp_path / "saved"):
        result = row(target, "no dead or duplicate heads")
        assert (result.status, result.value) == ("failed", 3 if part == "outputs" else 6)


def test_a_decoder_with_fewer_positions_than_its_encoder_is_no_fault():
    stacks = ["encoder.layers=1", "decoder.layers=1", "encoder.position=learned", "encoder.position.length=40"]
    own = manyheads.build(
        manyheads.read("transformer-base", "vocab=61", *stacks, "decoder.position=learned", "decoder.position.length=5")
    )
    assert not faults(own)


def test_a_folder_of_ours_has_no_reference_implementation(tmp_path):
    own = manyheads.build(
        manyheads.read("gpt2", "vocab=61", "decoder.layers=1", "decoder.width=32", "decoder.attention.heads=4")
    )
    manyheads.export(own, tmp_path / "own", to="manyheads")
    assert not faults(tmp_path / "own")


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(UsageError, match="list"):
        manyheads.audit([1])
    with pytest.raises(UnsupportedError):
        manyheads.audit(manyheads.Checkpoint(manyheads.build(manyheads.read("rnnsearch", "vocab=61"))))
