"""Other people's checkpoints: every family loads with the reference's numbers and goes back out as it came.

The reference is Hugging Face transformers, on tiny random models saved as real folders.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
import transformers
from kinds import choices, decoder, encoder, ngram, pair, recurrent
from published import PUBLISHED
from safetensors.torch import load_file, save_file
from small_checkpoints import CASES, close, make, moved, patches, picture

import manyheads
from manyheads import Inputs, build, read, read_model
from manyheads.checkpoint import Loaded
from manyheads.convert.families import GGUF, NAMES, family
from manyheads.convert.families.gguf import outright
from manyheads.convert.folder import respelled
from manyheads.convert.keys import ACTIVATIONS as THEIRS
from manyheads.convert.keys import Rope
from manyheads.convert.match import differences, fitting, plain
from manyheads.convert.weights import Unused
from manyheads.objective.pooled import PatchesSpec as PatchesObjective
from manyheads.objective.score import NOTHING, Tokens
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.spec import SLOTS, to_tree


@pytest.fixture(params=CASES)
def saved(request, tmp_path):
    """The reference and the folder it saved."""
    torch.manual_seed(1)
    name, config, options = CASES[request.param]
    theirs = moved(make(name, config, **options))
    if request.param == "t5-gated-untied":  # a head of its own, as version 1.1 has
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    theirs.save_pretrained(tmp_path / "theirs")
    return request.param, theirs, tmp_path / "theirs"


def both(ours, theirs, *, padding=None, hidden=False):
    """What ours and theirs say of the same ids; `hidden`: of every layer."""
    torch.manual_seed(3)
    ids, target = torch.randint(3, 60, (2, 17)), torch.randint(3, 60, (2, 9))
    given = {"output_hidden_states": hidden}
    if "pixel" in theirs.main_input_name:
        shown = picture(theirs.config.image_size, theirs.config.num_channels).to(theirs.dtype)
        out = theirs(pixel_values=shown, **given)
        mine = (patches(shown),)
    else:
        if padding is not None:
            given["attention_mask"] = (~padding).long()
        if ours.paired:
            out = theirs(input_ids=ids, decoder_input_ids=target, **given)
            mine = (ids, target, padding)
        else:
            config = ours.origin.config
            if padding is not None and ours.spec.shape == "decoder":
                given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            if config["model_type"] == "roberta":  # which otherwise guesses the padding from the ids
                given["position_ids"] = torch.arange(17)[None] + 2 if padding is None else roberta_positions(padding)
            out = theirs(input_ids=ids, **given)
            mine = (ids, None, padding)
    if not hidden:
        return ours.logits(*mine), logits_of(out)
    if "pixel" in theirs.main_input_name:  # the last one comes without its norm
        *before, last = out.hidden_states
        return ours.hidden(*mine), (*before, theirs.base_model.layernorm(last))
    states = out.hidden_states if not ours.paired else out.encoder_hidden_states + out.decoder_hidden_states
    return ours.hidden(*mine), states


def roberta_positions(padding):
    return torch.where(padding, 1, (~padding).cumsum(-1) + 1)


def logits_of(out):
    return next(getattr(out, name) for name in ("logits", "prediction_logits", "last_hidden_state") if getattr(out, name, None) is not None)


@pytest.mark.parametrize("saved", [name for name in CASES if name != "vit-mae"], indirect=True)  # which hides patches at random: below
@torch.no_grad()
def test_logits_and_hidden_states_are_the_references(saved):
    _, theirs, folder = saved
    ours = manyheads.load(folder)
    close(*both(ours, theirs))
    mine, their = both(ours, theirs, hidden=True)
    assert len(mine) == len(their)
    for a, b in zip(mine, their, strict=True):
        close(a, b)


@torch.no_grad()
def test_a_masked_autoencoder_restores_as_the_reference_does(tmp_path):
    theirs = moved(make("ViTMAEForPreTraining", "ViTMAEConfig"))
    theirs.save_pretrained(tmp_path / "mae")
    close(*restored(manyheads.load(tmp_path / "mae"), theirs))


@pytest.mark.parametrize("normalised", [False, True])
@torch.no_grad()
def test_a_masked_autoencoder_is_trained_on_the_references_loss(normalised, tmp_path):
    """Given the same picture and the same patches shown; grey, as the reference's decoder orders the colours of a pixel otherwise."""
    theirs = moved(make("ViTMAEForPreTraining", "ViTMAEConfig", num_channels=1, norm_pix_loss=normalised))
    theirs.save_pretrained(tmp_path / "mae")
    ours, shown = manyheads.load(tmp_path / "mae").model, picture(colours=1)
    objective = PatchesObjective(normalised=normalised, share=theirs.config.mask_ratio)
    batch = objective.batch([(one,) for one in patches(shown).numpy()], Tokens(), np.random.default_rng(3))
    noise = (batch.wanted != NOTHING).float()  # the lowest are shown
    assert objective.score(ours, batch).mean == pytest.approx(float(theirs(pixel_values=shown, noise=noise).loss), abs=1e-5)


def restored(ours, theirs):
    """What ours and theirs make of a picture of which they see the same patches."""
    shown, noise = picture(), torch.rand(2, 9, generator=torch.Generator().manual_seed(4))
    out = theirs(pixel_values=shown, noise=noise)
    keep = noise.argsort(dim=1)[:, : int(9 * (1 - theirs.config.mask_ratio))]
    whole = patches(shown)
    visible = whole.gather(1, keep[..., None].expand(-1, -1, whole.shape[-1]))
    return ours.model(whole, Inputs(visible, positions=keep)), out.logits


UNSTEADY = ("marian", "llama-dynamic-beyond", "roberta-classes")  # see below


@pytest.mark.parametrize("saved", [name for name in CASES if not name.startswith("vit")], indirect=True)  # pictures are not padded
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_and_agrees_with_the_reference(saved, side):
    name, theirs, folder = saved
    ours = manyheads.load(folder)
    padding = torch.zeros(2, 17, dtype=torch.bool)
    padding[1, slice(0, 5) if side == "left" else slice(12, 17)] = True
    torch.manual_seed(3)
    ids, target = torch.randint(3, 60, (2, 17)), torch.randint(3, 60, (2, 9))
    found = ours.logits(ids, target if ours.paired else None, padding)
    real = ids[1:, ~padding[1]]
    alone = ours.logits(real, target[1:] if ours.paired else None)
    whole = ours.paired or ours.spec.head.kind == "classes"
    close(found[1:] if whole else found[1:, ~padding[1]], alone)
    # references whose rows depend on padding or on their neighbours are compared on the row alone, which was done above
    counts_places = ours.spec.shape == "encoder" and side == "left" and ours.origin.config["model_type"] != "roberta"
    pools_by_place = ours.spec.head.kind == "classes"
    if not name.startswith(UNSTEADY) and not counts_places and not pools_by_place and not (ours.paired and side == "left"):
        mine, their = both(ours, theirs, padding=padding)
        close(mine, their, real=None if ours.paired else ~padding)


@torch.no_grad()
def test_it_goes_back_as_it_came(saved, tmp_path):
    _, _, folder = saved
    ours = manyheads.load(folder)
    manyheads.export(ours, tmp_path / "back")
    given, back = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(given) == set(back)
    assert all(torch.equal(given[name], back[name]) and given[name].dtype == back[name].dtype for name in given)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "back" / "config.json").read_text())
    known = ours.origin.family
    again = known.spec_of(known.config_of(ours.spec, ours.origin.architecture))
    assert not list(differences(plain(again), plain(ours.spec)))
    assert list(dropouts(to_tree(again))) == list(dropouts(to_tree(ours.spec)))


@torch.no_grad()
def test_the_reference_opens_what_was_written_from_the_description_alone(saved, tmp_path):
    """As for a model trained here: no config to go back to."""
    name, _, folder = saved
    ours = manyheads.load(folder)
    manyheads.export(Loaded(ours.model), tmp_path / "mine")
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    again = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "mine").eval()
    close(*(restored(ours, again) if name == "vit-mae" else both(ours, again)))


@torch.no_grad()
@pytest.mark.parametrize("name", {case[1]: name for name, case in reversed(CASES.items())}.values())  # the first of each family
def test_half_precision_stays_as_it_is(name, tmp_path):
    torch.manual_seed(1)
    model, config, options = CASES[name]
    theirs = moved(make(model, config, **options), torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = manyheads.load(tmp_path / "theirs")
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.bfloat16}
    if name != "vit-mae":  # which hides patches by chance
        mine, their = both(ours, theirs)
        scale = their.float().abs().max()
        close(mine / scale, their / scale, tolerance=0.04)
    manyheads.export(ours, tmp_path / "back")
    given, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert all(torch.equal(given[key], back[key]) and back[key].dtype is given[key].dtype for key in given)


def test_every_family_has_a_case():
    families = set()
    for name, config, options in CASES.values():
        families.add(make(name, config, **options).config.model_type)
    assert families == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_key_of_the_reference_is_known_or_refused_by_name(name):
    """A config as the reference writes it is read whole; any key it does not have is refused, with the nearest it has."""
    known = family(name)
    config = transformers.AutoConfig.for_model(name).to_dict()
    spec = known.spec_of(config)
    assert known.spec_of(config | {"_name_or_path": "x"}) == spec
    with pytest.raises(ValueError, match="a key this family does not know, 'atention_scale_factor'"):
        known.spec_of(config | {"atention_scale_factor": 2})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_the_reference_reads_it(name):
    config = PUBLISHED[name]
    known, whole = family(config["model_type"]), transformers.AutoConfig.for_model(**config).to_dict()  # with all that it left out
    mine, theirs = (known.spec_of(known.settle(said, ["lm_head.weight"])) for said in (config, whole))
    assert not list(differences(plain(mine), plain(theirs)))


def test_a_scaling_goes_by_its_former_name():
    """The reference means to read it so, and stops at a key it misses."""
    config = PUBLISHED["Phi-3-mini-128k"]
    former = config | {"rope_scaling": config["rope_scaling"] | {"type": "su"}}
    assert family("phi3").spec_of(former) == family("phi3").spec_of(config)


NOT_OURS = ("crossattention.bias",)  # of a tower that is not read


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_the_reference_passes_over_are_known_and_kept(name):
    known, config = family(name), transformers.AutoConfig.for_model(name).to_dict()
    for architecture in known.tasks:
        rows = known.rows(known.spec_of(config | {"architectures": [architecture]}), architecture)
        unused = [row.theirs for row in rows if isinstance(row, Unused)]
        for pattern in getattr(transformers, architecture)._keys_to_ignore_on_load_unexpected or ():
            assert pattern in NOT_OURS or any(re.search(pattern, theirs) for theirs in unused), (architecture, pattern)


# buffers and tables that published files hold, and no forward reads
LEFT_OVER = {
    "t5": "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    "bart": "model.encoder.version",
    "gpt2": "transformer.h.1.attn.masked_bias",
    "gpt-neox": "gpt_neox.layers.1.attention.rotary_emb.inv_freq",
    "llama": "model.layers.1.self_attn.rotary_emb.inv_freq",
    "phi": "model.layers.1.self_attn.rotary_emb.inv_freq",
    "phi3": "model.layers.1.self_attn.rotary_emb.inv_freq",
    "bert": "bert.embeddings.position_ids",
    "distilbert": "distilbert.embeddings.position_ids",
    "albert": "albert.embeddings.position_ids",
    "roberta": "roberta.embeddings.position_ids",
}


@pytest.mark.parametrize("name", LEFT_OVER)
def test_a_tensor_that_nobody_reads_comes_back_as_it_was(name, tmp_path):
    theirs = make(*CASES[name][:2])
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(file) | {LEFT_OVER[name]: torch.arange(6.0)}, file, metadata={"format": "pt"})
    manyheads.export(manyheads.load(tmp_path / "theirs"), tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[LEFT_OVER[name]], torch.arange(6.0))


def test_every_family_has_a_published_config():
    assert {config["model_type"] for config in PUBLISHED.values()} == set(NAMES)


def dropouts(tree):
    """Every dropout of a description, by its place."""
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from ((f"{name}.{place}", value) for place, value in dropouts(inner))
        elif name == "dropout":
            yield name, inner


@pytest.mark.parametrize("name", NAMES)
def test_a_key_left_out_means_what_the_reference_means(name):
    """Every key of every task is left out in turn; it is asked for, or it stands for the reference's own default."""
    known, reference = family(name), type(transformers.AutoConfig.for_model(name))
    for architecture, task in known.tasks.items():
        config = transformers.AutoConfig.for_model(name).to_dict() | {"architectures": [architecture]}
        for key in {key for row in (*known.keys, *task.keys) for key in row.keys} & set(config):
            shorter = {theirs: value for theirs, value in config.items() if theirs != key}
            try:
                mine = known.spec_of(shorter)
            except ValueError as error:
                if f"the config lacks {key}" in str(error):
                    continue
                raise
            theirs = known.spec_of(reference.from_dict(shorter).to_dict() | {"architectures": [architecture]})
            assert not list(differences(plain(mine), plain(theirs))), key
            assert list(dropouts(to_tree(mine))) == list(dropouts(to_tree(theirs))), key


def test_activations_are_theirs():
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 81)
    for theirs, ours in THEIRS.items():
        torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "config", "tower"),
    [
        ("gpt2", transformers.GPT2Config, "decoder"),
        ("bert-base", transformers.BertConfig, "encoder"),
        ("llama-7b", transformers.LlamaConfig, "decoder"),
        ("t5-small", transformers.T5Config, "decoder"),
        ("t5-small", transformers.T5Config, "encoder"),
    ],
)
def test_a_preset_is_what_the_reference_has_by_default(preset, config, tower):
    given = config().to_dict()
    ours, theirs = read(preset), family(given["model_type"]).spec_of(given)
    assert not list(differences(plain(ours)[tower], plain(theirs)[tower]))
    for part in ("embed", "core", "residual", "feedforward"):
        assert getattr(getattr(ours, tower), part).dropout == getattr(getattr(theirs, tower), part).dropout


def test_dropout_is_read_where_it_belongs():
    spec = family("gpt2").spec_of(transformers.GPT2Config(embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3).to_dict()).decoder
    assert (spec.embed.dropout, spec.core.dropout, spec.residual.dropout) == (0.1, 0.2, 0.3)
    spec = family("bert").spec_of(transformers.BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2).to_dict()).encoder
    assert (spec.embed.dropout, spec.core.dropout, spec.residual.dropout) == (0.1, 0.2, 0.1)
    assert family("llama").spec_of(transformers.LlamaConfig(attention_dropout=0.2).to_dict()).decoder.core.dropout == 0.2
    config = transformers.MarianConfig(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, pad_token_id=1, decoder_start_token_id=1)
    spec = family("marian").spec_of(config.to_dict()).decoder
    assert (spec.embed.dropout, spec.core.dropout, spec.feedforward.dropout, spec.residual.dropout) == (0.1, 0.2, 0.3, 0.1)


def test_a_config_of_the_first_version_reads_by_its_defaults():
    old = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6, "hidden_act": "silu",
           "rms_norm_eps": 1e-6, "max_position_embeddings": 40, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}  # fmt: skip
    position = family("llama").spec_of(old).decoder.position
    assert (position.theta, position.scaling.kind, position.scaling.factor) == (500.0, "linear", 3.0)


def test_a_rope_scaling_is_read_field_by_field():
    """The small models above have too few pairs for every field to show in their logits."""
    options = {"factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.3}
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "truncate": False, **options}
    position = family("llama").spec_of(transformers.LlamaConfig(rope_parameters=rope).to_dict()).decoder.position
    scaling = {"kind": "yarn", "factor": 4.0, "length": 10, "fast": 2.0, "slow": 0.5, "attention": 1.3, "truncate": False}
    assert position == SLOTS["position"].choose({"kind": "rope", "theta": 500.0, "scaling": scaling})


def test_a_preset_is_what_its_config_says():
    """As published with the weights."""
    config = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}  # fmt: skip
    assert read("llama-3-8b").decoder == family("llama").spec_of(config).decoder


DISTIL_CLASSES = {"architectures": ["DistilBertForSequenceClassification"]}
REFUSED = {
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True changes the model"),
        ({"activation_function": "selu"}, "no activation 'selu'"),
        ({"n_head": 5}, "5 heads do not divide width 768"),
        ({"n_layer": 10**9}, "decoder.layers: given 1000000000, expected at most 1024"),
        ({"vocab_size": 2**23}, "vocab: given 8388608"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "no architecture 'GPT2DoubleHeadsModel' of gpt2"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False changes the model"),
    ],
    "bert": [
        ({"is_decoder": True}, "is_decoder = True changes the model"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' changes the model"),
        ({"hidden_size": "wide"}, "encoder.width: given 'wide'"),
    ],
    "llama": [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no rotation scaling 'spiral'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0}},
            "a key that is not supported: mscale",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rotation scaling 'linear' lacks factor"),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9},
                "original_max_position_embeddings": 8,
            },
            "original_max_position_embeddings is said twice in the config, and not the same",
        ),
        ({"rope_parameters": 3}, "rope_parameters in the config is 3, expected a table"),
        ({"hidden_act": ["silu"]}, "hidden_act in the config is .*, which cannot be read"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 changes the model"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and this family turns every coordinate"),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, "both rope_parameters and rope_scaling, and they differ"),
        ({"rope_parameters": {"rope_type": ["a"]}}, "no rotation scaling"),
    ],
    "mistral": [({"use_sliding_window": False}, "a key this family does not know, 'use_sliding_window'")],
    "t5": [
        ({"is_encoder_decoder": False}, "is_encoder_decoder = False changes the model"),
        ({"is_gated_act": True}, "is_gated_act in the config is True, and feed_forward_proj is 'relu'"),
        ({"is_gated_act": 1, "feed_forward_proj": "gated-gelu"}, "is_gated_act in the config is 1, and feed_forward_proj is 'gated-gelu'"),
    ],
    "distilbert": [
        ({"tie_word_embeddings": False, "architectures": ["DistilBertForMaskedLM"]}, "tie_word_embeddings = False changes the model"),
        ({"id2label": ["a", "b"], **DISTIL_CLASSES}, r"id2label in the config is \['a', 'b'\], expected a table of names by their numbers"),
        ({"id2label": {"first": "a"}, **DISTIL_CLASSES}, "id2label in the config is .*, expected a table of names by their numbers"),
        ({"id2label": 3, **DISTIL_CLASSES}, "id2label in the config is 3"),
    ],
    "qwen2": [({"layer_types": ["chunked_attention"] * 32}, "layer_types in the config is")],
    "albert": [({"inner_group_num": 2}, "inner_group_num = 2 changes the model")],
    "vit": [({"patch_size": 15}, "a picture of side 224 cannot be cut into patches of side 15")],
    "marian": [({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False changes the model")],
}


@pytest.mark.parametrize(("name", "options", "said"), [(name, *case) for name, cases in REFUSED.items() for case in cases])
def test_what_would_change_the_maths_is_refused_by_name(name, options, said):
    config = transformers.AutoConfig.for_model(name).to_dict() | options
    with pytest.raises(ValueError, match=said):
        family(name).spec_of(config)


def test_a_head_that_need_not_be_tied_is_read_where_there_is_none():
    config = transformers.DistilBertConfig(tie_word_embeddings=False, architectures=["DistilBertModel"]).to_dict()
    family("distilbert").spec_of(config)


UNSAID = {
    "decoder.core=argmax": "decoder.layers.0.core is argmax, and gpt2, the nearest, has dot there",
    "decoder.position=alibi": "decoder.layers.0.position is alibi, and",
    "decoder.residual=sandwich": "residual is sandwich",
}


def test_a_fault_of_ours_is_not_taken_for_what_cannot_be_said(monkeypatch):
    def broken(self, look):
        raise TypeError("a fault of ours")

    monkeypatch.setattr(Rope, "write", broken)
    with pytest.raises(TypeError, match="a fault of ours"):
        fitting(read("gpt2", "decoder.core=argmax"))


def descriptions():
    """One of every kind of every part, in every shape that takes it."""
    yield from (recurrent(), ngram())
    for slot in ("attention", "core", "embed", "feedforward", "norm", "position", "residual"):
        for choice in choices(slot):
            for shape in (decoder, encoder, pair):
                with suppress(ValueError):
                    yield shape(**{slot: choice})


@pytest.mark.parametrize("name", [*NAMES, *GGUF])
def test_every_description_is_said_or_refused(name):
    """Whatever a description is made of, a family writes a config for it or raises the error that is meant for it."""
    known = family(name)
    for spec in descriptions():
        for architecture in known.tasks:
            with suppress(ValueError):
                known.spec_of(known.config_of(outright(spec) if name in GGUF else spec, architecture))


def test_how_many_coordinates_are_turned_stays_exact(tmp_path):
    """2 · 29 of 100 is 0.58 of them, and 100 · 0.58 is a little less than 58."""
    theirs = moved(make("GPTJForCausalLM", "GPTJConfig", n_embd=200, n_head=2, rotary_dim=58, n_layer=1))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = manyheads.load(tmp_path / "theirs")
    close(*both(ours, theirs))
    assert ours.origin.family.config_of(ours.spec, "GPTJForCausalLM")["rotary_dim"] == 58


@pytest.mark.parametrize("change", UNSAID)
def test_what_no_family_can_say_is_refused_with_the_part_that_does_not_fit(change, tmp_path):
    model = build(read("gpt2", "decoder.layers=1", "decoder.width=16", "decoder.attention.heads=2", "vocab=9", change))
    with pytest.raises(ValueError, match=UNSAID[change]):
        manyheads.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir()), "nothing is left of an export that cannot be"


def test_patches_that_are_no_squares_are_said_to_fit_nowhere(tmp_path):
    tower = {"width": 16, "layers": 1, "attention": {"heads": 2}, "position": {"kind": "learned", "length": 10}}
    spec = read_model({"encoder": tower | {"embed": {"kind": "patches", "pixels": 30, "first": True}}, "head": {"kind": "classes"}})
    with pytest.raises(ValueError, match="no family can say this model: encoder.embed.pixels is 30, and vit, the nearest, has 27 there"):
        manyheads.export(build(spec), tmp_path / "out")


def test_other_spellings_of_published_checkpoints_are_read_and_given_back(tmp_path):
    """Norms called gamma and beta, names without their prefix, buffers that nobody needs."""
    torch.manual_seed(1)
    for name, rename, more in (
        ("bert", lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"), {}),
        ("gpt2", lambda key: key.removeprefix("transformer."), {"h.0.attn.bias": torch.ones(1, 1, 40, 40).tril()}),
    ):
        theirs, folder = moved(make(*CASES[name][:2])), tmp_path / name
        theirs.save_pretrained(folder)
        stored = {rename(key): value for key, value in load_file(folder / "model.safetensors").items()} | more
        save_file(stored, folder / "model.safetensors")
        ours = manyheads.load(folder)
        close(*both(ours, theirs))
        manyheads.export(ours, tmp_path / f"{name}-back")
        back = load_file(tmp_path / f"{name}-back" / "model.safetensors")
        assert set(back) == set(stored)
        assert all(torch.equal(back[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", [name for name in NAMES if family(name).spellings])
def test_a_spelling_is_a_rule_on_how_names_begin_or_end(name):
    known, config = family(name), transformers.AutoConfig.for_model(name).to_dict()
    for spelling in known.spellings:
        for architecture in known.tasks:
            rows = known.rows(known.spec_of(config | {"architectures": [architecture]}), architecture)
            once = [respelled(row, spelling).theirs for row in rows]
            assert len(set(once)) == len(once), "names stay distinct"
            assert once == [respelled(row, spelling[::-1]).theirs for row in rows], "the order of the rules does not matter"
            for row in rows:  # what is inside a name is not touched
                inside = f"before.{row.theirs}.after"
                assert respelled(Unused(inside), spelling).theirs == inside


def test_what_a_config_leaves_out_is_what_the_reference_takes():
    """Defaults are theirs: compared by reading the same shortened config on both sides."""
    for name, dropped, check in (
        ("t5", "num_decoder_layers", lambda spec, config: spec.decoder.layers == config.num_layers),
        ("mistral", "sliding_window", lambda spec, config: spec.decoder.mask.window == config.sliding_window),
        ("gemma", "hidden_act", lambda spec, config: spec.decoder.feedforward.activation == "gelu-tanh"),
        ("gptj", "rotary_dim", lambda spec, config: spec.decoder.position.fraction == config.rotary_dim / (config.n_embd // config.n_head)),
    ):
        config = transformers.AutoConfig.for_model(name).to_dict()
        del config[dropped]
        if name == "t5":
            config["num_layers"] = 5
        theirs = type(transformers.AutoConfig.for_model(name)).from_dict(config)
        assert check(family(name).spec_of(config), theirs), name
    config = transformers.AutoConfig.for_model("qwen2").to_dict() | {"sliding_window": 4}
    for key in ("use_sliding_window", "layer_types", "max_window_layers"):
        del config[key]
    assert {layer.mask.window for layer in family("qwen2").spec_of(config).decoder.expanded()} == {None}
