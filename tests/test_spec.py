"""Descriptions: strict, refused with one sentence that names the place and the nearest thing that works; equal after a round trip."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from manyheads import build, build_meta, presets, read_model, size
from manyheads.cli.show import tables
from manyheads.errors import ConfigError, ManyheadsError
from manyheads.model.spec import CrossSpec, LayerSpec, StackSpec, override_model
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.core import DotSpec
from manyheads.parts.mask import MaskSpec
from manyheads.parts.rope import RopeSpec, YarnScalingSpec
from manyheads.spec import SLOTS, merge_trees, override, to_toml, to_tree

BASE = {
    "vocab": 9,
    "encoder": {"width": 16, "attention": {"heads": 2}},
    "decoder": {"like": "encoder", "cross": True, "mask": {"causal": True}},
}


def read(*overrides, base=BASE):
    return read_model(override(base, overrides))


def test_a_bare_kind_is_shorthand_for_a_table():
    assert read("encoder.position=rope") == read('encoder.position={kind="rope"}')


def test_a_table_without_a_kind_is_the_slots_default():
    assert read("encoder.core={dropout=0.1}").encoder.core.kind == "dot"


def test_overrides_reach_into_shorthand_and_likeness():
    spec = read("encoder.position=rope", "decoder.position.theta=1e6")
    assert spec.encoder.position.theta == 10000.0
    assert spec.decoder.position.theta == 1e6
    assert read("encoder.position=rope").decoder.position.kind == "rope", (
        "what is said of one stack holds for the other"
    )


@pytest.mark.parametrize(
    "path", ["pairs.tsv", "../data/pairs.tsv.gz", "/data/a-b/pairs.tsv", ".hidden/x", "./x", "owner/name"]
)
def test_a_path_needs_no_quotes(path):
    assert override({}, [f"data.path={path}"]) == override({}, [f'data.path="{path}"']) == {"data": {"path": path}}


def test_a_space_of_a_value_is_not_lost():
    assert override({}, ['text=" is"']) == {"text": " is"}
    assert override({}, ["width = 3", "kind = rope"]) == {"width": 3, "kind": "rope"}
    for assignment in ("text= is", "text=is ", "text=is\n"):
        with raises("config.syntax", "quotes"):
            override({}, [assignment])


def test_overrides_reach_into_lists():
    base = BASE | {"encoder": BASE["encoder"] | {"layers": 4, "pattern": [{"mask": {"window": 2}}, {}]}}
    assert [
        layer.mask.window for layer in read("encoder.pattern.1.mask={window=5}", base=base).encoder.expanded_layers()
    ] == [
        2,
        5,
        2,
        5,
    ]


def test_a_pattern_is_expanded_to_an_explicit_list():
    spec = read("encoder.layers=5", 'encoder.pattern=[{position="rope"}, {mask.window=3}, {core.softcap=9.0}]')
    layers = spec.encoder.expanded_layers()
    assert all(type(layer) is LayerSpec for layer in layers)
    assert [layer.position.kind for layer in layers] == ["rope", "none", "none", "rope", "none"]
    assert [layer.mask.window for layer in layers] == [None, 3, None, None, 3]
    assert [layer.core.softcap for layer in layers] == [None, None, 9.0, None, None]


def test_false_leaves_out_an_optional_field_and_is_an_error_elsewhere():
    spec = read('encoder.final_norm="rms"', "encoder.final_norm=false", "decoder.attention.kv_heads=false")
    assert spec.encoder.final_norm is spec.decoder.attention.kv_heads is None
    liked = read("encoder.mask.window=3", "decoder.mask.window=false")
    assert (liked.encoder.mask.window, liked.decoder.mask.window) == (3, None), "also what a stack like another has"
    for assignment in ("encoder.layers=false", "encoder.norm=false"):
        with raises("config.wrong-type"):
            read(assignment)


def test_a_stack_is_removed_and_copied_by_an_override():
    model = override_model(BASE, ["encoder=false", "decoder.cross=false"])
    assert read_model(model).architecture == "decoder"
    assert read_model(model).decoder.width == 16, "what was like the encoder stays as it was"
    copied = read_model(override_model(BASE, ["decoder.like=encoder", "encoder.norm=rms"]))
    assert (copied.encoder.norm.kind, copied.decoder.norm.kind) == ("rms", "layer")


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_comes_back_from_its_resolved_form(name):
    spec = read_model(presets.preset(name))
    resolved = to_tree(spec)
    assert read_model(resolved) == spec
    assert read_model(tomllib.loads(to_toml(resolved))) == spec
    assert to_tree(read_model(resolved)) == resolved


@given(data=st.data())
def test_any_choice_of_parts_comes_back_from_its_resolved_form(data):
    slots = ("attention", "core", "position", "feedforward", "norm", "residual")
    chosen = {slot: data.draw(st.sampled_from(kinds.choices(slot)), label=slot) for slot in slots}
    if kinds.fits(chosen["position"], chosen["core"]):
        spec = kinds.decoder(**chosen)
        assert read_model(tomllib.loads(to_toml(to_tree(spec)))) == spec
    else:
        with raises("config.incompatible", "decoder.position"):
            kinds.decoder(**chosen)


INVALID = {
    "encoder.widht=3": ("unknown-key", "encoder"),
    "encoder.position.thta=3": ("unknown-key", "encoder.position"),
    "encoder.position=rop": ("unknown-kind", "encoder.position"),
    "encoder.attention.heads=10": ("incompatible", "encoder.attention.heads"),
    "encoder.attention.heads=two": ("wrong-type", "encoder.attention.heads"),
    "encoder.layers=-1": ("out-of-range", "encoder.layers"),
    "encoder.layers=2.5": ("wrong-type", "encoder.layers"),
    "encoder.core.dropout=1.5": ("out-of-range", "encoder.core.dropout"),
    "encoder.core.temperature=inf": ("wrong-type", "encoder.core.temperature"),
    "encoder.core.temperature=nan": ("wrong-type", "encoder.core.temperature"),
    "encoder.core=5": ("wrong-type", "encoder.core"),
    'encoder.position={kind="sinusoidal", join="mix"}': ("invalid", "encoder.position.join"),
    'encoder.position={kind="sinusoidal", join="concat", size=16}': ("incompatible", "encoder.position.size"),
    'encoder.position={kind="rope", fraction=0.2}': ("incompatible", "encoder.position"),
    "encoder.cross=true": ("incompatible", "encoder.cross"),
    "decoder.like=decoder": ("invalid", "decoder.like"),
    "encoder.mask={prefix=true}": ("incompatible", "encoder.mask.prefix"),
    "encoder.mask={window=0}": ("out-of-range", "encoder.mask.window"),
    "encoder.layer_groups=3": ("incompatible", "encoder.layer_groups"),
    "vocab=0": ("out-of-range", "vocab"),
    "vocab=many": ("out-of-range", "vocab"),
    "recurrent={}": ("incompatible", ""),
    "head=tid": ("unknown-kind", "head"),
    "hed=tied": ("unknown-key", ""),
    "encoder.core=mine": ("unknown-kind", "encoder.core"),
    "encoder.pattern=[{mask={windw=3}}]": ("unknown-key", "encoder.pattern.0.mask"),
    "encoder.width.deep=3": ("invalid", "encoder.width"),
    "encoder.pattern.0.x=3": ("wrong-type", "encoder.pattern"),
    "nothing": ("syntax", ""),
    "=3": ("syntax", ""),
    "encoder..width=3": ("syntax", ""),
    "decoder.cross=false": ("incompatible", "decoder.cross"),
    "encoder.pattern=[{cross=true}]": ("incompatible", "encoder.cross"),
    'encoder.pattern=[{position="learned"}]': ("incompatible", "encoder.pattern"),
    "encoder.pattern=[{attention={heads=3}}]": ("incompatible", "encoder.pattern.0.attention.heads"),
    "encoder.pattern=[{}, {attention={heads=3}}]": ("incompatible", "encoder.pattern.1.attention.heads"),
    'encoder={width=16, layers=0, pattern=[{core="dott"}]}': ("unknown-kind", "encoder.pattern.0.core"),
    "encoder={width=16, layers=1, pattern=[{attention={heads=2}}, {attention={heads=3}}]}": (
        "incompatible",
        "encoder.pattern.1.attention.heads",
    ),
    "decoder.cross={attention={heads=3}}": ("incompatible", "decoder.cross.attention.heads"),
    'encoder={width=16, attention={heads=2}, layers=2, layer_groups=1, pattern=[{}, {position="rope"}]}': (
        "incompatible",
        "encoder.pattern",
    ),
    'encoder.position={kind="bucketed", buckets=64, max_distance=16}': (
        "incompatible",
        "encoder.position.max_distance",
    ),
    'encoder.position={kind="rope", scaling={kind="banded", low_freq_factor=5.0}}': (
        "incompatible",
        "encoder.position.scaling.high_freq_factor",
    ),
    'encoder.position={kind="rope", scaling={kind="longrope", short_factor=[1.0, 2.0]}}': (
        "incompatible",
        "encoder.position.scaling.short_factor",
    ),
    'encoder.position={kind="rope", fraction=0.25, scaling={kind="ntk"}}': ("incompatible", "encoder.position.scaling"),
    "encoder.width=[3": ("syntax", ""),
    "encoder.width=8\nencoder.layers=3": ("syntax", ""),
    f"encoder.width={'9' * 5000}": ("syntax", ""),
    f"encoder.width={'[' * 5000}": ("syntax", ""),
    f"encoder.width={'[' * 60}{']' * 60}": ("invalid", ""),
    'encoder.core={kind=["dot"]}': ("unknown-kind", "encoder.core"),
    "encoder.core={kind={a=1}}": ("unknown-kind", "encoder.core"),
    "encoder.core={kind=3}": ("unknown-kind", "encoder.core"),
    "encoder.a\x1b[31m\nb=3": ("unknown-key", "encoder"),
    "encoder.\x1b[31m.b=3": ("unknown-key", "encoder"),
    f"encoder.position={'x' * 500}": ("unknown-kind", "encoder.position"),
    "encoder.pattern=[3]": ("wrong-type", "encoder.pattern.0"),
    "encoder.pattern=[{}, {}, {}]": ("incompatible", "encoder.pattern"),
    'encoder={width=16, attention={heads=2}, position="learned", pattern=[{position="none"}]}': (
        "incompatible",
        "encoder.pattern",
    ),
    'encoder.position={kind="sinusoidal", size=5}': ("incompatible", "encoder.position.size"),
    "encoder.core.temperature=1e-320": ("out-of-range", "encoder.core.temperature"),
    "encoder.core.scale=1e308": ("out-of-range", "encoder.core.scale"),
    'encoder.position={kind="rope", scaling={kind="yarn", beta_fast=1e308}}': (
        "out-of-range",
        "encoder.position.scaling.beta_fast",
    ),
    "encoder.pattern=3": ("wrong-type", "encoder.pattern"),
    "encoder.mask.causal=yes": ("wrong-type", "encoder.mask.causal"),
    "encoder.norm.eps=small": ("wrong-type", "encoder.norm.eps"),
    "vocab=tokenise": ("out-of-range", "vocab"),
    "vocab=true": ("out-of-range", "vocab"),
    'encoder.core={kind="argmax", heads=[]}': ("out-of-range", "encoder.core.heads"),
    'encoder.core={kind="argmax", heads=[true]}': ("wrong-type", "encoder.core.heads.0"),
    'encoder.position={kind="rope", scaling={kind="yarn", beta_fast=1.0, beta_slow=2.0}}': (
        "incompatible",
        "encoder.position.scaling.beta_fast",
    ),
    'encoder.position={kind="rope", scaling={kind="yarn", attention_factor=0.0}}': (
        "out-of-range",
        "encoder.position.scaling.attention_factor",
    ),
    'encoder.position={kind="rope", scaling={kind="longrope", long_factor=[-1.0]}}': (
        "out-of-range",
        "encoder.position.scaling.long_factor.0",
    ),
    'encoder.position={kind="rope", scaling={kind="longrope", attention_factor=-1.0}}': (
        "out-of-range",
        "encoder.position.scaling.attention_factor",
    ),
    'head={kind="masked", scores="classes"}': ("incompatible", "head.scores"),
    'head={kind="masked", scores="masked"}': ("incompatible", "head.scores"),
    "encoder={width=16, layers=0, layer_groups=4, attention={heads=2}}": ("incompatible", "encoder.layer_groups"),
    'encoder={width=1, attention={heads=1}, position={kind="sinusoidal", join="concat"}}': (
        "incompatible",
        "encoder.position.size",
    ),
    'decoder={width=16, cross=true, attention={heads=2}, embed={kind="patches", class_token=true}}': (
        "incompatible",
        "decoder.embed.class_token",
    ),
}


@pytest.mark.parametrize("assignment", INVALID)
def test_an_error_has_a_code_the_path_of_the_field_and_one_line(assignment):
    with pytest.raises(ConfigError) as caught:
        read(assignment)
    code, path = INVALID[assignment]
    assert (caught.value.code, ".".join(map(str, caught.value.path))) == (f"config.{code}", path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_place_in_a_list_is_a_plain_number():
    base = BASE | {"encoder": BASE["encoder"] | {"pattern": [{}, {}]}}
    for step in ("²", "2", "-1", "x", "9" * 5000):
        with raises("config.out-of-range", "list of 2"):
            read(f"encoder.pattern.{step}.mask.window=3", base=base)


def test_a_spec_does_not_change_with_what_it_was_read_from():
    pattern = [{"mask": {"window": 2}}]
    spec = read(base=BASE | {"encoder": BASE["encoder"] | {"pattern": pattern}})
    made = StackSpec(attention=HeadsSpec(heads=2), pattern=tuple(pattern))
    pattern[0]["mask"]["window"] = 7
    assert spec.encoder.expanded_layers()[0].mask.window == 2
    assert made.expanded_layers()[0].mask.window == 2


def test_what_a_spec_holds_does_not_change_either():
    spec = read("encoder.pattern=[{mask.window=2}]")
    with pytest.raises(TypeError):
        spec.encoder.pattern[0]["mask"]["window"] = 7
    assert hash(spec) == hash(read("encoder.pattern=[{mask.window=2}]"))
    with raises("config.wrong-type", "encoder.pattern"):
        read_model({"vocab": 9, "encoder": {"pattern": [{"mask": {"window": None}}]}})
    for wrong in ({1}, object()):
        with raises("config.wrong-type", "encoder.pattern"):
            read_model({"vocab": 9, "encoder": {"pattern": [{"core": {"heads": wrong}}]}})
    twice = [
        read(text)
        for text in (
            "encoder.pattern=[{core={temperature=2, dropout=0.1}}]",
            "encoder.pattern=[{core={dropout=0.1, temperature=2.0}}]",
        )
    ]
    assert twice[0] == twice[1]
    assert len(set(twice)) == 1
    listed = read('encoder.pattern=[{core={kind="argmax", heads=[1]}}]')
    assert listed.encoder.pattern[0]["core"]["heads"] == (1,)
    for spec in (listed, *twice):
        assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec) == read_model(to_tree(spec))
    StackSpec(pattern=({"position": RopeSpec(scaling=YarnScalingSpec())}, {"cross": CrossSpec(core=DotSpec())}))
    again = StackSpec(pattern=({"position": RopeSpec(theta=5.0)},))
    assert again.expanded_layers()[0].position.theta == 5.0
    assert StackSpec.model_validate(to_tree(again)) == again


def test_a_pattern_refines_the_cross_attention_of_its_stack():
    spec = read(
        "encoder.core={kind='additive', size=5}",
        "decoder.pattern=[{cross.core.dropout=0.1}, {cross.attention.bias=false}]",
    )
    first, second = spec.decoder.expanded_layers()
    assert (first.cross.core.kind, first.cross.core.size, first.cross.core.dropout) == ("additive", 5, 0.1)
    assert (second.cross.attention.heads, second.cross.attention.bias) == (2, False)


def test_a_ready_mask_leaves_a_decoder_causal_unless_it_says_otherwise():
    assert read_model({"vocab": 9, "decoder": {"mask": MaskSpec(window=3)}}).decoder.mask.causal
    assert not read_model({"vocab": 9, "decoder": {"mask": MaskSpec(window=3, causal=False)}}).decoder.mask.causal
    assert (
        read_model({"vocab": 9, "decoder": {"pattern": [{"mask": MaskSpec(window=3)}, {}]}})
        .decoder.expanded_layers()[0]
        .mask.causal
    )


def test_the_closing_norm_is_what_the_last_layer_needs():
    assert read("encoder.residual=post").encoder.output_norm() is None
    assert read("encoder.residual=post", 'encoder.pattern=[{residual="pre"}]').encoder.output_norm() is not None
    assert read("encoder.residual=pre", 'encoder.pattern=[{residual="post"}]').encoder.output_norm() is None


def test_a_changed_spec_is_refused_in_one_sentence():
    with raises("config.incompatible", "attention.heads", 17):
        read().encoder.replace(width=17)
    with raises("config.out-of-range", "vocab", -1):
        read().replace(vocab=-1)


def specs():
    """Every kind of every slot, and every table."""
    yield from (part for base in SLOTS.values() for part in base.kinds.values())
    yield from tables().values()


def test_every_whole_number_has_an_upper_bound():
    counts = 0
    for spec in specs():
        for name, field in spec.model_fields.items():
            if field.annotation in (int, int | None):
                counts += 1
                with pytest.raises(ValueError):
                    spec.model_validate({name: 10**19})
    assert counts > 30


def test_every_misspelt_field_of_every_part_is_named_with_the_right_one():
    for slot, base in SLOTS.items():
        for kind, part in base.kinds.items():
            for name in part.model_fields:
                with pytest.raises(ValueError) as caught:
                    base.from_config({"kind": kind, name + "x": 1})
                assert {f"'{name}x'", f"'{name}'"} <= set(re.findall(r"'\w+'", str(caught.value))), (slot, kind)


def test_every_part_says_what_it_computes_and_every_field_what_it_means():
    for base in SLOTS.values():
        assert base.summary()
        assert base.default_kind in (
            {*base.kinds} if base.slot not in ("data", "task", "auxiliary_loss", "logits_processor") else {""}
        ), "of these somebody must choose"
        for part in base.kinds.values():
            assert part.summary()
            for name, field in part.model_fields.items():
                assert field.description, (part, name)


INVALID_MODELS = {
    '{vocab = 9, decoder = {embed = "shared"}}': ("incompatible", "decoder.embed"),
    "{decoder = {}}": ("missing-key", "vocab"),
    "{vocab = 9, decoder = {cross = true}}": ("incompatible", "decoder.cross"),
    '{vocab = 9, encoder = {like = "decoder"}, decoder = {like = "encoder"}}': ("incompatible", "encoder.like"),
    '{vocab = 9, recurrent = {position = "rope"}}': ("incompatible", "recurrent.position"),
    '{vocab = 9, recurrent = {core = "merged-qk"}}': ("incompatible", "recurrent.core"),
    '{vocab = 9, source_vocab = 5, encoder = {}, decoder = {cross = true, embed = "shared"}}': (
        "incompatible",
        "decoder.embed",
    ),
    '{vocab = 9, encoder = {width = 32}, decoder = {cross = true, embed = "shared"}}': (
        "incompatible",
        "decoder.embed",
    ),
    '{encoder = {embed = "patches"}, head = "untied"}': ("missing-key", "vocab"),
    "{vocab = 9, ngram = {width = 8, hidden = 4}}": ("incompatible", "head"),
    '{vocab = 9, recurrent = {width = 1, position = {kind = "sinusoidal", join = "concat"}}}': (
        "incompatible",
        "recurrent.position.size",
    ),
    '{vocab = 9, recurrent = {embed = "patches"}}': ("incompatible", "recurrent.embed"),
    '{vocab = 9, recurrent = {embed = "shared"}}': ("incompatible", "recurrent.embed"),
    "{vocab = 9, source_vocab = 5, decoder = {}}": ("incompatible", "source_vocab"),
    "{vocab = 9, source_vocab = 5, recurrent = {source = false}}": ("incompatible", "source_vocab"),
    '{vocab = 9, encoder = {}, decoder = {cross = {attention = {kind = "narrow", heads = 5}}, width = 50, attention = {heads = 5}}}': (
        "incompatible",
        "decoder.cross.attention.heads",
    ),
    '{vocab = 9, recurrent = {core = "dot"}}': ("incompatible", "recurrent.core"),
    '{vocab = 9, encoder = {embed = "patches"}, decoder = {cross = true, embed = "shared"}}': (
        "incompatible",
        "decoder.embed",
    ),
}


@pytest.mark.parametrize("text", INVALID_MODELS)
def test_what_cannot_be_a_model_is_an_error(text):
    with pytest.raises(ConfigError) as caught:
        build_meta(read_model(tomllib.loads(f"model = {text}")["model"]))
    code, path = INVALID_MODELS[text]
    assert (caught.value.code, ".".join(map(str, caught.value.path))) == (f"config.{code}", path)


def test_a_decoder_is_causal_unless_it_says_otherwise():
    assert read().decoder.mask.causal
    assert read(
        "encoder.mask={window=3}", base={**BASE, "decoder": {"like": "encoder", "cross": True}}
    ).decoder.mask.causal
    assert not read("decoder.mask.causal=false").decoder.mask.causal
    assert not read().encoder.mask.causal
    assert read("decoder.pattern=[{mask.window=3}, {}]").decoder.expanded_layers()[0].mask.causal


def test_cross_attention_changes_single_fields_of_the_stacks_own():
    spec = read("encoder.attention={heads=4, bias=false}", "decoder.cross={attention={heads=2}}")
    assert (spec.decoder.cross.attention.heads, spec.decoder.cross.attention.bias) == (2, False)
    assert read("decoder.cross.core=argmax").decoder.cross.core.kind == "argmax"
    assert read("decoder.cross.core=argmax").decoder.core.kind == "dot"


def test_a_kind_can_be_taken_only_once():
    from manyheads.parts.norm import NormSpec

    with raises("usage.parts-file", "norm", "layer"):

        class Again(NormSpec, kind="layer"):
            pass


def test_the_vocabulary_may_wait_for_the_data_but_a_build_may_not():
    spec = read("vocab=tokenizer")
    with raises("config.invalid", "vocab"):
        build_meta(spec)
    with raises("config.wrong-type", "dict"):
        build_meta({})


def test_a_kind_defined_again_by_the_same_code_replaces_itself():
    from manyheads.parts.norm import NoNormSpec

    assert SLOTS["norm"].kinds["none"] is NoNormSpec
    try:
        type(NoNormSpec)(
            "NoNormSpec",
            (SLOTS["norm"],),
            {"__module__": NoNormSpec.__module__, "__qualname__": "NoNormSpec"},
            kind="none",
        )
        assert SLOTS["norm"].kinds["none"] is not NoNormSpec
    finally:
        SLOTS["norm"].kinds["none"] = NoNormSpec


def test_what_is_no_description_is_refused():
    with raises("config.syntax"):
        presets.read("gpt2", ["decoder.layers=2"])
    with raises("config.wrong-type"):
        presets.read({"vocab": 3})
    for wrong in (None, 3, "gpt", [1]):
        with raises("config.wrong-type"):
            read_model(wrong)
    with raises("config.wrong-type", 3):
        read_model({"vocab": 5, "ngram": {3: 4}})
    for wrong in ("a\0/b.toml", "\ud800/b.toml"):
        with raises("config.file"):
            presets.read(wrong)
    with raises("config.wrong-type", "str"):
        size("gpt2")
    for wrong, said in (({"seed": 1.9}, "seed is 1.9"), ({"seed": True}, "seed is True"), ({"dtype": torch.int32}, "dtype is torch.int32"),
                        ({"device": "nope"}, "device is 'nope'"), ({"device": "meta"}, "meta")):  # fmt: skip
        with pytest.raises(ManyheadsError, match=said):
            build(read(), **wrong)
    for wrong in (3, None, "gtp2"):
        with raises("config.unknown-preset"):
            presets.preset(wrong)
    for wrong in ({"batch": 0}, {"length": -1}, {"source_length": 0}, {"length": 10**20}, {"length": "9"}):
        with raises("usage.argument", next(iter(wrong))):
            size(read(), **wrong)


def test_specs_are_frozen():
    spec = read()
    with pytest.raises(ValueError):
        spec.encoder.width = 3


def test_a_table_with_a_kind_replaces_and_one_without_refines():
    below = {"position": {"kind": "learned", "length": 9}}
    assert merge_trees(below, {"position": {"kind": "rope"}}) == {"position": {"kind": "rope"}}
    assert merge_trees(below, {"position": {"offset": 2}}) == {
        "position": {"kind": "learned", "length": 9, "offset": 2}
    }
