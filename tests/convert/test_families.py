"""Every family gives the numbers of Hugging Face transformers, and is exported as it came.

The reference models are tiny and random, made by transformers and saved as real folders.
"""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from kinds import choices, decoder, encoder, ngram, pair, random_model, recurrent
from published import PUBLISHED
from safetensors.torch import load_file, save_file
from small_checkpoints import CASES, assert_close, make, make_config, patches, perturbed, random_images
from trivial_losses import mean_of

import manyheads
from manyheads import Checkpoint, Inputs, build, build_meta, read, read_model
from manyheads.convert.families import GGUF, NAMES, get_family
from manyheads.convert.families.gguf import resolve_sizes
from manyheads.convert.keys import ACTIVATIONS as THEIRS
from manyheads.convert.match import candidates, canonical, differences, same_model
from manyheads.convert.weights import Ignored, WeightTable
from manyheads.errors import CheckpointConfigError, ConfigError, ExportError, ManyheadsError, UnknownArchitectureError
from manyheads.parts.feedforward import ACTIVATIONS
from manyheads.spec import SLOTS, to_tree
from manyheads.tasks.batch import IGNORE_INDEX, SpecialTokens
from manyheads.tasks.images import MaeSpec

FIRST_CASES = {case[1]: name for name, case in reversed(CASES.items())}.values()  # the first one of each family


@pytest.fixture(params=CASES, scope="module")
def saved(request, tmp_path_factory):
    """A reference model and the folder that it saved."""
    folder = tmp_path_factory.mktemp("saved") / "theirs"
    torch.manual_seed(1)
    name, config, options = CASES[request.param]
    theirs = perturbed(make(name, config, **options))
    if request.param == "t5-gated-untied":  # a head of its own, as version 1.1 has
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    theirs.save_pretrained(folder)
    return request.param, theirs, folder


def reads_images(theirs):
    return "pixel" in theirs.main_input_name


def both(ours, theirs, *, padding_mask=None, hidden=False):
    """The logits of both for the same ids; `hidden`: the states of every layer."""
    torch.manual_seed(3)
    ids, target = torch.randint(3, 60, (2, 17)), torch.randint(3, 60, (2, 9))
    options = {"output_hidden_states": hidden}
    if reads_images(theirs):
        images = random_images(theirs.config.image_size, theirs.config.num_channels).to(theirs.dtype)
        out, inputs = theirs(pixel_values=images, **options), (patches(images),)
    else:
        if padding_mask is not None:
            options["attention_mask"] = (~padding_mask).long()
        if ours.has_source:
            out, inputs = theirs(input_ids=ids, decoder_input_ids=target, **options), (ids, target, padding_mask)
        else:
            if padding_mask is not None and ours.spec.architecture == "decoder":
                options["position_ids"] = (options["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            if ours.config["model_type"] == "roberta":  # which otherwise guesses the padding from the ids
                options["position_ids"] = (
                    torch.arange(17)[None] + 2 if padding_mask is None else roberta_positions(padding_mask)
                )
            out, inputs = theirs(input_ids=ids, **options), (ids, None, padding_mask)
    if not hidden:
        return ours.logits(*inputs), logits_of(out)
    if reads_images(theirs):  # their last state is before the final norm
        *before, last = out.hidden_states
        return ours.hidden_states(*inputs), (*before, theirs.base_model.layernorm(last))
    states = out.encoder_hidden_states + out.decoder_hidden_states if ours.has_source else out.hidden_states
    return ours.hidden_states(*inputs), states


def roberta_positions(padding_mask):
    return torch.where(padding_mask, 1, (~padding_mask).cumsum(-1) + 1)


def logits_of(out):
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(getattr(out, name) for name in names if getattr(out, name, None) is not None)


# --------------------------------------------------------------------------------------------------------------- parity


# vit-mae masks patches at random: below
@pytest.mark.parametrize("saved", [name for name in CASES if name != "vit-mae"], indirect=True)
@torch.no_grad()
def test_logits_and_hidden_states_equal_the_references(saved):
    _, theirs, folder = saved
    ours = manyheads.load(folder)
    assert_close(*both(ours, theirs))
    states, their_states = both(ours, theirs, hidden=True)
    assert len(states) == len(their_states)
    for a, b in zip(states, their_states, strict=True):
        assert_close(a, b)


@torch.no_grad()
def test_a_masked_autoencoder_restores_what_the_reference_restores(tmp_path):
    theirs = perturbed(make("ViTMAEForPreTraining", "ViTMAEConfig"))
    theirs.save_pretrained(tmp_path / "mae")
    assert_close(*restored(manyheads.load(tmp_path / "mae"), theirs))


@pytest.mark.parametrize("normalized", [False, True])
@torch.no_grad()
def test_a_masked_autoencoder_has_the_references_loss(normalized, tmp_path):
    """Given the same image and visible patches; one channel, as the reference's decoder orders channels otherwise."""
    theirs = perturbed(make("ViTMAEForPreTraining", "ViTMAEConfig", num_channels=1, norm_pix_loss=normalized))
    theirs.save_pretrained(tmp_path / "mae")
    ours, images = manyheads.load(tmp_path / "mae").model, random_images(channels=1)
    task = MaeSpec(norm_pix_loss=normalized, mask_ratio=theirs.config.mask_ratio)
    batch = task.batch([(item,) for item in patches(images).numpy()], SpecialTokens(), np.random.default_rng(3))
    noise = (batch.targets != IGNORE_INDEX).float()  # the reference shows the patches with the lowest noise
    loss = float(theirs(pixel_values=images, noise=noise).loss)
    assert mean_of(task.loss(ours, batch)) == pytest.approx(loss, abs=1e-5)


def restored(ours, theirs):
    """The output of both for an image of which they see the same patches."""
    images, noise = random_images(), torch.rand(2, 9, generator=torch.Generator().manual_seed(4))
    out = theirs(pixel_values=images, noise=noise)
    keep = noise.argsort(dim=1)[:, : int(9 * (1 - theirs.config.mask_ratio))]
    whole = patches(images)
    visible = whole.gather(1, keep[..., None].expand(-1, -1, whole.shape[-1]))
    return ours.model(whole, Inputs(visible, positions=keep)), out.logits


# references whose rows depend on padding or on their neighbours are compared on the row alone
UNSTEADY = ("marian", "llama-dynamic-beyond", "roberta-classes")


@pytest.mark.parametrize("saved", [name for name in CASES if not name.startswith("vit")], indirect=True)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_and_agrees_with_the_reference(saved, side):
    name, theirs, folder = saved
    ours = manyheads.load(folder)
    padding_mask = torch.zeros(2, 17, dtype=torch.bool)
    padding_mask[1, slice(0, 5) if side == "left" else slice(12, 17)] = True
    torch.manual_seed(3)
    ids, target = torch.randint(3, 60, (2, 17)), torch.randint(3, 60, (2, 9))
    logits = ours.logits(ids, target if ours.has_source else None, padding_mask)
    alone = ours.logits(ids[1:, ~padding_mask[1]], target[1:] if ours.has_source else None)
    whole = ours.has_source or ours.spec.head.kind == "classes"
    assert_close(logits[1:] if whole else logits[1:, ~padding_mask[1]], alone)
    by_position = ours.spec.architecture == "encoder" and side == "left" and ours.config["model_type"] != "roberta"
    pooled = ours.spec.head.kind == "classes"
    if not name.startswith(UNSTEADY) and not by_position and not pooled and not (ours.has_source and side == "left"):
        logits, their_logits = both(ours, theirs, padding_mask=padding_mask)
        assert_close(logits, their_logits, mask=None if ours.has_source else ~padding_mask)


@torch.no_grad()
@pytest.mark.parametrize("name", FIRST_CASES)
def test_half_precision_is_kept(name, tmp_path):
    torch.manual_seed(1)
    model, config, options = CASES[name]
    theirs = perturbed(make(model, config, **options), torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = manyheads.load(tmp_path / "theirs")
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.bfloat16}
    if name != "vit-mae":  # which masks patches at random
        logits, their_logits = both(ours, theirs)
        scale = their_logits.float().abs().max()
        assert_close(logits / scale, their_logits / scale, tolerance=0.04)
    manyheads.export(ours, tmp_path / "back")
    before, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert all(torch.equal(before[key], back[key]) and back[key].dtype is before[key].dtype for key in before)


def test_activations_equal_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 81)
    for theirs, ours in THEIRS.items():
        torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- export


@torch.no_grad()
def test_an_export_is_equal_to_what_was_loaded(saved, tmp_path):
    _, _, folder = saved
    ours = manyheads.load(folder)
    manyheads.export(ours, tmp_path / "back")
    before, back = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(back)
    assert all(torch.equal(before[name], back[name]) and before[name].dtype == back[name].dtype for name in before)
    config, same = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert config == same
    family = ours.metadata.family
    again = family.spec_of(family.config_of(ours.spec, ours.metadata.architecture))
    assert same_model(again, ours.spec)
    assert list(dropouts(to_tree(again))) == list(dropouts(to_tree(ours.spec)))


def dropouts(tree):
    """Every dropout of a description, by its path."""
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from ((f"{name}.{path}", value) for path, value in dropouts(inner))
        elif name == "dropout":
            yield name, inner


@torch.no_grad()
def test_the_reference_opens_an_export_of_the_description_alone(saved, tmp_path):
    """As for a model that was trained here and has no config to return to."""
    name, _, folder = saved
    ours = manyheads.load(folder)
    manyheads.export(Checkpoint(ours.model), tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    again = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "new").eval()
    assert_close(*(restored(ours, again) if name == "vit-mae" else both(ours, again)))


def test_other_names_in_published_checkpoints_are_read_and_kept(tmp_path):
    """Norms called gamma and beta, names without their prefix, buffers that are not needed."""
    torch.manual_seed(1)
    norms = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    for name, replacements, more in (
        ("bert", norms, {}),
        ("gpt2", (("transformer.", ""),), {"h.0.attn.bias": torch.ones(1, 1, 40, 40).tril()}),
    ):
        theirs, folder = perturbed(make(*CASES[name][:2])), tmp_path / name
        theirs.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        for usual, other in replacements:
            stored = {key.replace(usual, other): value for key, value in stored.items()}
        stored |= more
        save_file(stored, folder / "model.safetensors")
        ours = manyheads.load(folder)
        assert_close(*both(ours, theirs))
        manyheads.export(ours, tmp_path / f"{name}-back")
        back = load_file(tmp_path / f"{name}-back" / "model.safetensors")
        assert set(back) == set(stored)
        assert all(torch.equal(back[key], stored[key]) for key in stored)


# buffers and tables that published files hold and no forward reads
UNUSED = {
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


@pytest.mark.parametrize("name", UNUSED)
def test_an_unused_tensor_is_exported_as_it_came(name, tmp_path):
    make(*CASES[name][:2]).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(file) | {UNUSED[name]: torch.arange(6.0)}, file, metadata={"format": "pt"})
    manyheads.export(manyheads.load(tmp_path / "theirs"), tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[UNUSED[name]], torch.arange(6.0))


def test_the_number_of_rotated_coordinates_stays_exact(tmp_path):
    """58 of 100 is a fraction of 0.58, and 100 · 0.58 in floating point is a little less than 58."""
    theirs = perturbed(make("GPTJForCausalLM", "GPTJConfig", n_embd=200, n_head=2, rotary_dim=58, n_layer=1))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = manyheads.load(tmp_path / "theirs")
    assert_close(*both(ours, theirs))
    assert ours.metadata.family.config_of(ours.spec, "GPTJForCausalLM")["rotary_dim"] == 58


@pytest.mark.parametrize("changes", [{"rotary_dim": "8"}, {"n_head": 0}, {"n_embd": 2.5}, {"rotary_dim": 200}])
def test_a_wrong_number_of_rotated_coordinates_is_an_error(changes, tmp_path):
    make("GPTJForCausalLM", "GPTJConfig", n_embd=64, n_head=2, rotary_dim=8, n_layer=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointConfigError):
        manyheads.load(tmp_path)


# ----------------------------------------------------------------------------------------------------------- every table


def test_every_family_has_a_case_and_a_published_config():
    assert {make_config(config, **options).model_type for _, config, options in CASES.values()} == set(NAMES)
    assert {config["model_type"] for config in PUBLISHED.values()} == set(NAMES)


def tables(name):
    """The table of every architecture of a family, for the reference's default config."""
    family, config = get_family(name), transformers.AutoConfig.for_model(name).to_dict()
    for architecture in family.architectures:
        spec = family.spec_of(config | {"architectures": [architecture]})
        yield architecture, family.table(spec, architecture, dict(build_meta(spec).named_parameters()))


NOT_READ = ("crossattention.bias",)  # of a decoder that is not supported


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_the_reference_ignores_are_known(name):
    for architecture, table in tables(name):
        for pattern in getattr(transformers, architecture)._keys_to_ignore_on_load_unexpected or ():
            listed = any(re.search(pattern, theirs) for theirs in table.unused)
            assert listed or pattern in NOT_READ, (architecture, pattern)


@pytest.mark.parametrize("name", [name for name in NAMES if get_family(name).key_mappings])
def test_a_key_mapping_changes_only_the_start_or_the_end_of_a_name(name):
    for key_mapping in get_family(name).key_mappings:
        for _, table in tables(name):
            names = [row.tensor_name for row in table.map_keys(key_mapping).rows]
            assert len(set(names)) == len(names)
            assert names == [row.tensor_name for row in table.map_keys(key_mapping[::-1]).rows], "rules in any order"
            inner = WeightTable(tuple(Ignored(f"before.{name}.after") for name in names))
            assert inner.map_keys(key_mapping) == inner


@cache
def built(spec):
    """The parameters of a model, and those on the meta device."""
    return tuple(dict(model.named_parameters()) for model in (build(spec, seed=1), build_meta(spec)))


@cache
def descriptions():
    """One of every kind of every part, in every shape that takes it; and the models of the cases above."""
    specs = [recurrent(), ngram()]
    for slot in ("attention", "core", "embed", "feedforward", "norm", "position", "residual"):
        for choice in choices(slot):
            for shape in (decoder, encoder, pair):
                try:
                    specs.append(build_meta(shape(**{slot: choice})).spec)
                except ConfigError:  # not every part goes with every shape
                    continue
    for architecture, config, options in CASES.values():
        table = make_config(config, **options).to_dict() | {"architectures": [architecture]}
        specs.append(get_family(table["model_type"]).spec_of(table))
    return list(dict.fromkeys(specs))


def with_one_part_changed(spec):
    """The description with one part of one stack changed, for every kind of every part that can be built so."""
    usual = canonical(spec)
    for slot in ("attention", "core", "embed", "feedforward", "norm", "position", "residual"):
        for choice in choices(slot):
            for stack in [name for name in ("encoder", "decoder") if name in to_tree(spec)]:
                tree = to_tree(spec)
                own = tree[stack].get(slot) or {}
                tree[stack][slot] = own | choice if own.get("kind") == choice["kind"] else choice
                try:
                    other = read_model(tree)
                except ConfigError:
                    continue
                if canonical(other) != usual:
                    yield other


@pytest.mark.parametrize("name", FIRST_CASES)
@torch.no_grad()
def test_a_model_with_one_part_changed_is_refused_or_has_the_references_logits(name, tmp_path):
    """A config that expresses the other part is one with which transformers computes the same."""
    architecture, config, options = CASES[name]
    config = make_config(config, **options).to_dict() | {"architectures": [architecture]}
    family, refused, exported = get_family(config["model_type"]), 0, 0
    for spec in with_one_part_changed(family.spec_of(config)):
        try:
            fits = any(not candidate.differences for candidate in candidates(spec, [config["model_type"]]))
        except ExportError:
            fits = False
        if not fits:
            refused += 1
            continue
        folder, exported = tmp_path / str(exported), exported + 1
        manyheads.export(Checkpoint(random_model(spec, torch.float32)), folder)
        ours = manyheads.load(folder)
        theirs = getattr(transformers, ours.metadata.architecture).from_pretrained(folder).eval()
        assert_close(*(restored(ours, theirs) if name == "vit-mae" else both(ours, theirs)))
    assert refused > 20
    assert exported or name == "t5"  # whose stacks share their parts: a single one cannot differ


@pytest.mark.parametrize("name", [*NAMES, *GGUF])
def test_a_description_is_expressed_exactly_or_refused(name):
    """A config without differences gives the same model, and each parameter is stored and read back unchanged."""
    family, expressed = get_family(name), 0
    for spec in descriptions():
        try:
            resolved = resolve_sizes(spec) if name in GGUF else spec
        except ExportError:
            continue
        for candidate in candidates(resolved, [name]):
            if candidate.differences:
                continue
            expressed += 1
            assert same_model(family.spec_of(candidate.config), spec if name in NAMES else resolved)
            parameters, meta = built(spec)
            table = family.table(spec, candidate.architecture, parameters)
            stored = table.write(parameters)
            shapes = table.shapes(meta)
            assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == shapes
            again = dict(table.read(stored.__getitem__, parameters))
            assert again.keys() == parameters.keys()
            for key, parameter in parameters.items():
                torch.testing.assert_close(again[key], parameter, rtol=0, atol=1e-6)  # 1 + γ is rounded
    assert expressed


# -------------------------------------------------------------------------------------------------------------- configs


def config_error(name, config):
    with pytest.raises(ManyheadsError) as caught:
        get_family(name).spec_of(config)
    assert isinstance(caught.value, CheckpointConfigError | UnknownArchitectureError | ConfigError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_reference_is_known_and_others_are_refused(name):
    family = get_family(name)
    config = transformers.AutoConfig.for_model(name).to_dict()
    assert family.spec_of(config | {"_name_or_path": "x"}) == family.spec_of(config)
    assert "'atention_scale_factor'" in config_error(name, config | {"atention_scale_factor": 2})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_the_reference_reads_it(name):
    config = PUBLISHED[name]
    family = get_family(config["model_type"])
    whole = transformers.AutoConfig.for_model(**config).to_dict()  # with all that it leaves out
    ours, theirs = (family.spec_of(family.resolve(item, ["lm_head.weight"])) for item in (config, whole))
    assert not list(differences(canonical(ours), canonical(theirs)))


def test_a_scaling_may_have_its_former_name():
    """The reference intends to read it, and stops at a missing key."""
    config = PUBLISHED["Phi-3-mini-128k"]
    former = config | {"rope_scaling": config["rope_scaling"] | {"type": "su"}}
    assert get_family("phi3").spec_of(former) == get_family("phi3").spec_of(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_key_has_the_references_default_or_is_required(name):
    family, reference = get_family(name), type(transformers.AutoConfig.for_model(name))
    for architecture, own in family.architectures.items():
        config = transformers.AutoConfig.for_model(name).to_dict() | {"architectures": [architecture]}
        for key in {key for row in (*family.keys, *own.keys) for key in row.keys} & set(config):
            shorter = {theirs: value for theirs, value in config.items() if theirs != key}
            try:
                ours = family.spec_of(shorter)
            except CheckpointConfigError as error:
                if not str(error).endswith(f" {key}"):  # a required key is named
                    raise
                continue
            theirs = family.spec_of(reference.from_dict(shorter).to_dict() | {"architectures": [architecture]})
            assert not list(differences(canonical(ours), canonical(theirs))), key
            assert list(dropouts(to_tree(ours))) == list(dropouts(to_tree(theirs))), key


def test_dropout_is_read_where_it_belongs():
    def spec_of(name, config, stack):
        return getattr(get_family(name).spec_of(config.to_dict()), stack)

    def rates(spec):
        return spec.embed.dropout, spec.core.dropout, spec.feedforward.dropout, spec.residual.dropout

    config = transformers.GPT2Config(embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)
    assert rates(spec_of("gpt2", config, "decoder")) == (0.1, 0.2, 0.0, 0.3)
    config = transformers.BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    assert rates(spec_of("bert", config, "encoder")) == (0.1, 0.2, 0.0, 0.1)
    config = transformers.LlamaConfig(attention_dropout=0.2)
    assert rates(spec_of("llama", config, "decoder")) == (0.0, 0.2, 0.0, 0.0)
    rate = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    config = transformers.MarianConfig(**rate, pad_token_id=1, decoder_start_token_id=1)
    assert rates(spec_of("marian", config, "decoder")) == (0.1, 0.2, 0.3, 0.1)


def test_an_old_config_is_read_by_its_defaults():
    old = {
        "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 40, "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    }  # fmt: skip
    position = get_family("llama").spec_of(old).decoder.position
    assert (position.theta, position.scaling.kind, position.scaling.factor) == (500.0, "linear", 3.0)


def test_a_rope_scaling_is_read_field_by_field():
    """The small models above have too few coordinates for every field to show in their logits."""
    fields = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 10, **fields}
    position = get_family("llama").spec_of(transformers.LlamaConfig(rope_parameters=rope).to_dict()).decoder.position
    scaling = {"kind": "yarn", "length": 10, **fields}
    assert position == SLOTS["position"].from_config({"kind": "rope", "theta": 500.0, "scaling": scaling})


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
CLASSES = {"architectures": ["DistilBertForSequenceClassification"]}
# options that change the computation or have a wrong value, and what the error must name
REFUSED = {
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"activation_function": "selu"}, "'selu'"),
        ({"n_head": 5}, "decoder.attention"),
        ({"n_layer": 10**9}, "decoder.layers"),
        ({"vocab_size": 2**23}, "vocab"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
    "bert": [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_size": "wide"}, "encoder.width"),
    ],
    "llama": [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_parameters": YARN | {"mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 9}, "original_max_position_embeddings": 8},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": ["a"]}}, "['a']"),
    ],
    "mistral": [({"use_sliding_window": False}, "use_sliding_window")],
    "t5": [
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"is_gated_act": True}, "is_gated_act"),
        ({"is_gated_act": 1, "feed_forward_proj": "gated-gelu"}, "is_gated_act"),
    ],
    "distilbert": [
        ({"tie_word_embeddings": False, "architectures": ["DistilBertForMaskedLM"]}, "tie_word_embeddings"),
        ({"id2label": ["a", "b"], **CLASSES}, "id2label"),
        ({"id2label": {"first": "a"}, **CLASSES}, "id2label"),
        ({"id2label": 3, **CLASSES}, "id2label"),
    ],
    "qwen2": [({"layer_types": ["chunked_attention"] * 32}, "layer_types")],
    "albert": [({"inner_group_num": 2}, "inner_group_num")],
    "vit": [({"patch_size": 15}, "patch_size 15")],
    "marian": [({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings")],
}


@pytest.mark.parametrize(("name", "options", "value"), [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_an_option_that_changes_the_computation_is_refused_by_name(name, options, value):
    assert value in config_error(name, transformers.AutoConfig.for_model(name).to_dict() | options)


def test_a_head_that_must_be_tied_may_be_untied_where_there_is_none():
    config = transformers.DistilBertConfig(tie_word_embeddings=False, architectures=["DistilBertModel"]).to_dict()
    assert get_family("distilbert").spec_of(config).head.kind == "none"


def test_what_a_config_leaves_out_is_what_the_reference_takes():
    for name, missing, check in (
        ("t5", "num_decoder_layers", lambda spec, config: spec.decoder.layers == config.num_layers),
        ("mistral", "sliding_window", lambda spec, config: spec.decoder.mask.window == config.sliding_window),
        ("gemma", "hidden_act", lambda spec, config: spec.decoder.feedforward.activation == "gelu-tanh"),
        (
            "gptj",
            "rotary_dim",
            lambda spec, config: spec.decoder.position.fraction == config.rotary_dim / (config.n_embd // config.n_head),
        ),
    ):
        config = transformers.AutoConfig.for_model(name).to_dict()
        del config[missing]
        if name == "t5":
            config["num_layers"] = 5
        theirs = type(transformers.AutoConfig.for_model(name)).from_dict(config)
        assert check(get_family(name).spec_of(config), theirs), name
    config = transformers.AutoConfig.for_model("qwen2").to_dict() | {"sliding_window": 4}
    for key in ("use_sliding_window", "layer_types", "max_window_layers"):
        del config[key]
    assert {layer.mask.window for layer in get_family("qwen2").spec_of(config).decoder.expanded_layers()} == {None}


# ------------------------------------------------------------------------------------------- models that no family has


@pytest.mark.parametrize(
    ("change", "values"),
    {
        "decoder.core=argmax": ("decoder.layers.0.core", "argmax", "dot", "gpt2"),
        "decoder.position=alibi": ("decoder.layers.0.position", "alibi"),
        "decoder.residual=sandwich": ("decoder.layers.0.residual", "sandwich"),
    }.items(),
)
def test_a_model_that_no_family_has_is_refused_with_the_first_part_that_differs(change, values, tmp_path):
    model = build(read("gpt2", "decoder.layers=1", "decoder.width=16", "decoder.attention.heads=2", "vocab=9", change))
    with pytest.raises(ExportError) as caught:
        manyheads.export(model, tmp_path / "out")
    assert caught.value.code == "export.unsupported"
    assert all(value in str(caught.value) for value in values)
    assert not list(tmp_path.iterdir()), "an export that fails leaves nothing"


def test_patches_that_are_not_squares_are_refused(tmp_path):
    stack = {"width": 16, "layers": 1, "attention": {"heads": 2}, "position": {"kind": "learned", "length": 10}}
    embed = {"kind": "patches", "pixels": 30, "class_token": True}
    spec = read_model({"encoder": stack | {"embed": embed}, "head": {"kind": "classes"}})
    with pytest.raises(ExportError) as caught:
        manyheads.export(build(spec), tmp_path / "out")
    assert all(value in str(caught.value) for value in ("encoder.embed.pixels", "30", "27", "vit"))


def test_a_model_without_token_types_is_not_exported_as_one_that_needs_them(tmp_path):
    """A config could say that there are none, but that family's weights always have them."""
    theirs = make("DistilBertForMaskedLM", "DistilBertConfig")
    theirs.save_pretrained(tmp_path / "theirs")
    manyheads.export(Checkpoint(manyheads.load(tmp_path / "theirs").model), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "distilbert"


def stack(**fields):
    return {"width": 16, "layers": 1, "attention": {"heads": 2}} | fields


TEXT = {"vocab": 9, "encoder": stack(position="alibi"), "head": {"kind": "classes"}}
IMAGES = {
    "encoder": stack(embed={"kind": "patches", "pixels": 27}, position={"kind": "learned", "length": 10}, norm="rms"),
    "head": {"kind": "classes", "pool": "mean"},
}


@pytest.mark.parametrize(("model", "images"), [(TEXT, False), (IMAGES, True)])
def test_a_refusal_names_a_family_of_the_same_input_with_such_a_head_and_the_formats_that_work(model, images, tmp_path):
    with pytest.raises(ExportError) as caught:
        manyheads.export(build(read_model(model)), tmp_path / "out")
    architecture = re.search(r"\((\w+)\), the nearest", caught.value.message)[1]
    assert ("Image" in architecture) is images
    assert "Classification" in architecture
    assert "onnx" in caught.value.hint
    assert "manyheads" in caught.value.hint
    with pytest.raises(ExportError) as caught:
        manyheads.export(build(recurrent()), tmp_path / "out")
    assert "onnx" not in caught.value.hint


# ------------------------------------------------------------------------------- models that are equal to one of a family

SCALED = {"kind": "tokens", "scale": True}
LLAMA = {"norm": "rms", "feedforward": {"kind": "gated", "activation": "silu", "hidden": 24}, "position": "rope"}
LLAMA |= {"attention": {"heads": 2, "bias": False, "output_bias": False}}
GPT2 = {"position": {"kind": "learned", "length": 20}, "feedforward": {"activation": "gelu-tanh"}}
LAST = {"kind": "classes", "classes": 3, "pool": "last"}
FOLDED = {
    "tied": ({"decoder": stack(embed=SCALED, **LLAMA)}, "LlamaForCausalLM"),
    "tied after a layer norm": ({"decoder": stack(embed=SCALED, **GPT2)}, "GPT2LMHeadModel"),
    "untied": ({"decoder": stack(embed=SCALED, **LLAMA), "head": "untied"}, "LlamaForCausalLM"),
    "masked": ({"encoder": stack(embed=SCALED, **LLAMA), "head": "tied"}, "EuroBertForMaskedLM"),
    "classes": (
        {"decoder": stack(embed=SCALED, **LLAMA), "head": LAST | {"bias": False}},
        "LlamaForSequenceClassification",
    ),
    "bias": ({"decoder": stack(**GPT2), "head": LAST}, "GPT2ForSequenceClassification"),
    "bias and scale": ({"decoder": stack(embed=SCALED, **GPT2), "head": LAST}, "GPT2ForSequenceClassification"),
}


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_a_scale_of_the_embedding_and_a_bias_of_classes_become_part_of_the_weights(name, tmp_path):
    tree, architecture = FOLDED[name]
    ours = Checkpoint(random_model(read_model({"vocab": 61} | tree)))
    manyheads.export(ours, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(3, 60, (1, 7))
    assert_close(ours.logits(ids), theirs(input_ids=ids).logits)


def test_a_bias_of_more_classes_than_the_width_is_refused(tmp_path):
    model = random_model(read_model({"vocab": 9, "decoder": stack(**GPT2), "head": LAST | {"classes": 20}}))
    with pytest.raises(ExportError) as caught:
        manyheads.export(model, tmp_path / "out")
    assert "head.bias" in str(caught.value)
