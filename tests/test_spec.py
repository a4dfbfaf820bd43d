"""Descriptions: strict, refused with one sentence that names the place and the nearest thing that works; equal after a round trip."""

from __future__ import annotations

import copy
import pickle
import tomllib

import kinds
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads import build, outline, presets, read_model, size
from manyheads.model.spec import CrossSpec, LayerSpec, TowerSpec
from manyheads.parts.attend import DotSpec
from manyheads.parts.attention import HeadsSpec
from manyheads.parts.mask import MaskSpec
from manyheads.parts.rope import RopeSpec, YarnScalingSpec
from manyheads.show import TABLES
from manyheads.spec import SLOTS, SpecError, merged, override, to_toml, to_tree

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
    assert read("encoder.position=rope").decoder.position.kind == "rope", "what is said of one tower holds for the other"


@pytest.mark.parametrize("path", ["pairs.tsv", "../data/pairs.tsv.gz", "/data/a-b/pairs.tsv", ".hidden/x", "./x", "owner/name"])
def test_a_path_needs_no_quotes(path):
    assert override({}, [f"data.path={path}"]) == override({}, [f'data.path="{path}"']) == {"data": {"path": path}}


def test_overrides_reach_into_lists():
    base = BASE | {"encoder": BASE["encoder"] | {"layers": 4, "pattern": [{"mask": {"window": 2}}, {}]}}
    assert [layer.mask.window for layer in read("encoder.pattern.1.mask={window=5}", base=base).encoder.expanded()] == [2, 5, 2, 5]


def test_a_pattern_is_expanded_to_an_explicit_list():
    spec = read("encoder.layers=5", 'encoder.pattern=[{position="rope"}, {mask.window=3}, {core.softcap=9.0}]')
    layers = spec.encoder.expanded()
    assert all(type(layer) is LayerSpec for layer in layers)
    assert [layer.position.kind for layer in layers] == ["rope", "none", "none", "rope", "none"]
    assert [layer.mask.window for layer in layers] == [None, 3, None, None, 3]
    assert [layer.core.softcap for layer in layers] == [None, None, 9.0, None, None]


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
        with pytest.raises(SpecError, match="decoder.position: .* works on"):
            kinds.decoder(**chosen)


REFUSED = {
    "encoder.widht=3": r"encoder: no field 'widht' here: did you mean 'width'\?",
    "encoder.position.thta=3": r"encoder.position: no field 'thta' here",
    "encoder.position=rop": r"encoder.position: no kind 'rop' of position: did you mean 'rope'\?",
    "encoder.attention.heads=10": "encoder.attention.heads: 10 heads do not divide width 16; nearest that do: 8 or 16 heads",
    "encoder.attention.heads=two": "encoder.attention.heads: given 'two', expected a whole number",
    "encoder.layers=-1": "encoder.layers: given -1, expected at least 0",
    "encoder.layers=2.5": "encoder.layers: given 2.5, expected",
    "encoder.core.dropout=1.5": "encoder.core.dropout: given 1.5, expected less than 1",
    "encoder.core.temperature=inf": "encoder.core.temperature: given inf, expected a finite number",
    "encoder.core.temperature=nan": "encoder.core.temperature: given nan, expected",
    "encoder.core=5": "encoder.core: given 5, expected a kind of core",
    'encoder.position={kind="sinusoidal", join="mix"}': "encoder.position.join: given 'mix', expected 'add', 'concat' or 'multiply'",
    'encoder.position={kind="sinusoidal", join="concat", size=16}': "16 of width 16 for position leaves no room",
    'encoder.position={kind="rope", fraction=0.2}': "encoder.position: rotation works on pairs",
    "encoder.cross=true": "encoder.cross: there is no encoder to attend to",
    "decoder.like=decoder": "decoder.like: given 'decoder', expected the other tower",
    "encoder.mask={prefix=true}": "encoder.mask.prefix: opens a mask that hides nothing",
    "encoder.mask={window=0}": "encoder.mask.window: given 0, expected at least 1",
    "encoder.distinct=3": "encoder.distinct: 2 layers cannot be 3 runs",
    "vocab=0": "vocab: given 0, expected a number of tokens",
    "vocab=many": "vocab: given 'many'",
    "recurrent={}": "given encoder and decoder and recurrent",
    "head=tid": r"head: no kind 'tid' of head: did you mean 'tied'\?",
    "hed=tied": r"no field 'hed' here: did you mean 'head'\?",
    "encoder.core=mine": r"name its file with --parts \(in Python: import it first\): reading a description never executes code",
    "encoder.pattern=[{mask={windw=3}}]": r"encoder.pattern.0.mask: no field 'windw' here: did you mean 'window'\?",
    "encoder.width.deep=3": "encoder.width: holds 16, which has nothing inside to override",
    "encoder.pattern.0.x=3": "encoder.pattern: given",
    "nothing": "an override is path=value",
    "=3": "an override is path=value",
    "encoder..width=3": "an override is path=value",
    "decoder.cross=false": "decoder.cross: nothing in the decoder looks at the encoder",
    "encoder.pattern=[{cross=true}]": "encoder.cross: there is no encoder to attend to",
    'encoder.pattern=[{position="learned"}]': "encoder.pattern: 'learned' is joined to the embedding",
    "encoder.pattern=[{attention={heads=3}}]": "encoder.pattern.0.attention.heads: 3 heads do not divide",
    "encoder.pattern=[{}, {attention={heads=3}}]": "encoder.pattern.1.attention.heads: 3 heads do not divide",
    'encoder={width=16, layers=0, pattern=[{core="dott"}]}': "encoder.pattern.0.core: no kind 'dott'",
    "encoder={width=16, layers=1, pattern=[{attention={heads=2}}, {attention={heads=3}}]}": "encoder.pattern.1.attention.heads: 3 heads do not divide",
    "decoder.cross={attention={heads=3}}": "decoder.cross.attention.heads: 3 heads do not divide",
    'encoder={width=16, attention={heads=2}, layers=2, distinct=1, pattern=[{}, {position="rope"}]}': "layers that share weights must be alike",
    'encoder.position={kind="bucketed", buckets=64, distance=16}': "encoder.position.distance: given 16, expected more than the 16 offsets",
    'encoder.position={kind="rope", scaling={kind="banded", low=5.0}}': "encoder.position.scaling.high: given 4.0, expected more than low = 5.0",
    'encoder.position={kind="rope", scaling={kind="longrope", short=[1.0, 2.0]}}': "2 factors for 4 pairs; give 1 or 4",
    'encoder.position={kind="rope", fraction=0.25, scaling={kind="ntk"}}': "2 turned coordinates do not have",
    "encoder.width=[3": "neither a TOML value nor a bare word",
    "encoder.width=8\nencoder.layers=3": "neither a TOML value nor a bare word",
    f"encoder.width={'9' * 5000}": "neither a TOML value nor a bare word",
    f"encoder.width={'[' * 5000}": "neither a TOML value nor a bare word",
    f"encoder.width={'[' * 60}{']' * 60}": "tables within tables, more than 32 deep",
    'encoder.core={kind=["dot"]}': r"encoder.core: no kind \['dot'\] of core",
    "encoder.core={kind={a=1}}": r"encoder.core: no kind {'a': 1} of core",
    "encoder.core={kind=3}": "encoder.core: no kind 3 of core",
    "encoder.a\x1b[31m\nb=3": r"encoder: no field 'a\\x1b\[31m\\nb' here",
    "encoder.\x1b[31m.b=3": r"encoder: no field '\\x1b\[31m' here",
    f"encoder.position={'x' * 500}": r"xxx … \(502 characters\) of position",
    "encoder.pattern=[3]": "encoder.pattern.0: given 3, expected a table",
    "encoder.pattern=[{}, {}, {}]": "encoder.pattern: 3 differences for 2 layers",
    'encoder={width=16, attention={heads=2}, position="learned", pattern=[{position="none"}]}': "the tower's 'learned' is joined to the embedding",
    'encoder.position={kind="sinusoidal", size=5}': "encoder.position.size: a share of the width is for join = 'concat', given 'add'",
    "encoder.core.temperature=1e-320": "expected at least 1e-30",
    "encoder.core.scale=1e308": "expected at most 1e.12",
    'encoder.position={kind="rope", scaling={kind="yarn", fast=1e308}}': "scaling.fast: given 1e.308, expected at most",
    "encoder.pattern=3": "encoder.pattern: given 3, expected a list",
    "encoder.mask.causal=yes": "encoder.mask.causal: given 'yes', expected true or false",
    "encoder.norm.eps=small": "encoder.norm.eps: given 'small', expected a number",
    "vocab=tokeniser": "vocab: given 'tokeniser', expected a number of tokens from 1 to 4194304, or 'tokenizer'",
    "vocab=true": "vocab: given True, expected a number of tokens",
    'encoder.core={kind="argmax", heads=[]}': r"encoder.core.heads: given \[\], expected at least 1 in the list",
    'encoder.core={kind="argmax", heads=[true]}': "encoder.core.heads.0: given True, expected a whole number",
    'encoder.position={kind="rope", scaling={kind="yarn", fast=1.0, slow=2.0}}': "encoder.position.scaling.fast: given 1.0, expected more than slow = 2.0",
    'encoder.position={kind="rope", scaling={kind="yarn", attention=0.0}}': "scaling.attention: given 0.0, expected at least 1e-30",
    'encoder.position={kind="rope", scaling={kind="longrope", long=[-1.0]}}': "scaling.long.0: given -1.0, expected at least 1e-30",
    'encoder.position={kind="rope", scaling={kind="longrope", attention=-1.0}}': "scaling.attention: given -1.0, expected at least 1e-30",
    'head={kind="masked", scores="classes"}': "head.scores: given 'classes', expected a head that scores every token: tied, free, bilinear",
    'head={kind="masked", scores="masked"}': "head.scores: given 'masked', expected a head that scores every token",
    "encoder={width=16, layers=0, distinct=4, attention={heads=2}}": "encoder.distinct: 0 layers cannot be 4 runs",
    'encoder={width=1, attention={heads=1}, position={kind="sinusoidal", join="concat"}}': "0 of width 1 for position leaves no room",
    'decoder={width=16, cross=true, attention={heads=2}, embed={kind="patches", first=true}}': "decoder.embed.first: a first vector belongs to",
}


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_cannot_be_followed_is_refused_in_one_sentence(assignment):
    with pytest.raises(SpecError, match=REFUSED[assignment]) as caught:
        read(assignment)
    assert "\n" not in str(caught.value)


def test_a_place_in_a_list_is_a_plain_number():
    base = BASE | {"encoder": BASE["encoder"] | {"pattern": [{}, {}]}}
    for step in ("²", "2", "-1", "x", "9" * 5000):
        with pytest.raises(SpecError, match="is not a place in a list of 2; count from 0"):
            read(f"encoder.pattern.{step}.mask.window=3", base=base)


def test_a_spec_does_not_change_with_what_it_was_read_from():
    pattern = [{"mask": {"window": 2}}]
    spec = read(base=BASE | {"encoder": BASE["encoder"] | {"pattern": pattern}})
    made = TowerSpec(attention=HeadsSpec(heads=2), pattern=tuple(pattern))
    pattern[0]["mask"]["window"] = 7
    assert spec.encoder.expanded()[0].mask.window == 2
    assert made.expanded()[0].mask.window == 2


def test_what_a_spec_holds_does_not_change_either():
    spec = read("encoder.pattern=[{mask.window=2}]")
    with pytest.raises(TypeError, match="a spec is frozen"):
        spec.encoder.pattern[0]["mask"]["window"] = 7
    assert hash(spec) == hash(read("encoder.pattern=[{mask.window=2}]"))
    with pytest.raises(SpecError, match="encoder.pattern: given null, which no file can say"):
        read_model({"vocab": 9, "encoder": {"pattern": [{"mask": {"window": None}}]}})
    for wrong in ({1}, object()):
        with pytest.raises(SpecError, match="which no file can say"):
            read_model({"vocab": 9, "encoder": {"pattern": [{"core": {"heads": wrong}}]}})
    twice = [
        read(text)
        for text in ("encoder.pattern=[{core={temperature=2, dropout=0.1}}]", "encoder.pattern=[{core={dropout=0.1, temperature=2.0}}]")
    ]
    assert twice[0] == twice[1]
    assert len(set(twice)) == 1
    listed = read('encoder.pattern=[{core={kind="argmax", heads=[1]}}]')
    assert listed.encoder.pattern[0]["core"]["heads"] == (1,)
    for spec in (listed, *twice):
        assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec) == read_model(to_tree(spec))
    TowerSpec(pattern=({"position": RopeSpec(scaling=YarnScalingSpec())}, {"cross": CrossSpec(core=DotSpec())}))
    again = TowerSpec(pattern=({"position": RopeSpec(theta=5.0)},))
    assert again.expanded()[0].position.theta == 5.0
    assert TowerSpec.model_validate(to_tree(again)) == again


def test_a_pattern_refines_the_cross_attention_of_its_tower():
    spec = read("encoder.core={kind='additive', size=5}", "decoder.pattern=[{cross.core.dropout=0.1}, {cross.attention.bias=false}]")
    first, second = spec.decoder.expanded()
    assert (first.cross.core.kind, first.cross.core.size, first.cross.core.dropout) == ("additive", 5, 0.1)
    assert (second.cross.attention.heads, second.cross.attention.bias) == (2, False)


def test_a_ready_mask_leaves_a_decoder_causal_unless_it_says_otherwise():
    assert read_model({"vocab": 9, "decoder": {"mask": MaskSpec(window=3)}}).decoder.mask.causal
    assert not read_model({"vocab": 9, "decoder": {"mask": MaskSpec(window=3, causal=False)}}).decoder.mask.causal
    assert read_model({"vocab": 9, "decoder": {"pattern": [{"mask": MaskSpec(window=3)}, {}]}}).decoder.expanded()[0].mask.causal


def test_the_closing_norm_is_what_the_last_layer_needs():
    assert read("encoder.residual=post").encoder.closing_norm() is None
    assert read("encoder.residual=post", 'encoder.pattern=[{residual="pre"}]').encoder.closing_norm() is not None
    assert read("encoder.residual=pre", 'encoder.pattern=[{residual="post"}]').encoder.closing_norm() is None


def test_a_changed_spec_is_refused_in_one_sentence():
    with pytest.raises(SpecError, match=r"^attention.heads: 2 heads do not divide width 17"):
        read().encoder.changed(width=17)
    with pytest.raises(SpecError, match=r"^vocab: given -1"):
        read().changed(vocab=-1)


def specs():
    """Every kind of every slot, and every table."""
    yield from (part for base in SLOTS.values() for part in base.kinds.values())
    yield from TABLES.values()


def test_every_whole_number_has_an_upper_bound():
    counts = 0
    for spec in specs():
        for name, field in spec.model_fields.items():
            if field.annotation in (int, int | None):
                counts += 1
                with pytest.raises(ValueError, match="expected at most"):
                    spec.model_validate({name: 10**19})
    assert counts > 30


def test_every_misspelt_field_of_every_part_is_named_with_the_right_one():
    for slot, base in SLOTS.items():
        for kind, part in base.kinds.items():
            for name in part.model_fields:
                with pytest.raises(ValueError, match=f"did you mean '{name}'") as caught:
                    base.choose({"kind": kind, name + "x": 1})
                assert f"'{name}x'" in str(caught.value), (slot, kind)


def test_every_part_says_what_it_computes_and_every_field_what_it_means():
    for base in SLOTS.values():
        assert base.formula()
        assert base.default_kind in ({*base.kinds} if base.slot not in ("data", "objective", "shaping") else {""}), (
            "of these somebody must choose"
        )
        for part in base.kinds.values():
            assert part.formula()
            for name, field in part.model_fields.items():
                assert field.description, (part, name)


ALONE = {
    '{vocab = 9, decoder = {embed = "shared"}}': "decoder.embed: 'shared' takes from an encoder, and there is none",
    "{decoder = {}}": "vocab: is required where there are tokens",
    "{vocab = 9, decoder = {cross = true}}": "decoder.cross: there is no encoder to attend to",
    '{vocab = 9, encoder = {like = "decoder"}, decoder = {like = "encoder"}}': "the towers cannot each be like the other",
    '{vocab = 9, recurrent = {position = "rope"}}': "recurrent.position: 'rope' acts inside attention",
    '{vocab = 9, recurrent = {core = "fused"}}': "recurrent.core: 'fused' replaces projections",
    '{vocab = 9, source_vocab = 5, encoder = {}, decoder = {cross = true, embed = "shared"}}': "the encoder's table has 5 rows, the vocabulary 9",
    '{vocab = 9, encoder = {width = 32}, decoder = {cross = true, embed = "shared"}}': "rows of 32, this tower reads rows of 64",
    '{encoder = {embed = "patches"}, head = "free"}': "vocab: is required where there are tokens",
    "{vocab = 9, ngram = {width = 8, hidden = 4}}": "^head: h·e needs one size",
    '{vocab = 9, recurrent = {width = 1, position = {kind = "sinusoidal", join = "concat"}}}': "recurrent.position.size: 0 of width 1",
    '{vocab = 9, recurrent = {embed = "patches"}}': "recurrent.embed: a recurrent network reads tokens by a table of its own, given 'patches'",
    '{vocab = 9, recurrent = {embed = "shared"}}': "recurrent.embed: a recurrent network reads tokens",
    "{vocab = 9, source_vocab = 5, decoder = {}}": "source_vocab: is for a model that reads a source beside what it writes; this is decoder alone",
    "{vocab = 9, source_vocab = 5, recurrent = {source = false}}": "source_vocab: is for a model that reads a source",
    '{vocab = 9, encoder = {}, decoder = {cross = {attention = {kind = "chunked", heads = 5}}, width = 50, attention = {heads = 5}}}': "decoder.cross.attention.heads: 5 heads do not divide width 64",
    '{vocab = 9, recurrent = {core = "dot"}}': "recurrent.core: a dot product needs queries and keys of one size, given 64 and 128",
    '{vocab = 9, encoder = {embed = "patches"}, decoder = {cross = true, embed = "shared"}}': "the encoder has no token table to share",
}


@pytest.mark.parametrize("text", ALONE)
def test_what_cannot_be_a_model_is_refused(text):
    with pytest.raises(SpecError, match=ALONE[text]):
        outline(read_model(tomllib.loads(f"model = {text}")["model"]))


def test_a_decoder_is_causal_unless_it_says_otherwise():
    assert read().decoder.mask.causal
    assert read("encoder.mask={window=3}", base={**BASE, "decoder": {"like": "encoder", "cross": True}}).decoder.mask.causal
    assert not read("decoder.mask.causal=false").decoder.mask.causal
    assert not read().encoder.mask.causal
    assert read("decoder.pattern=[{mask.window=3}, {}]").decoder.expanded()[0].mask.causal


def test_cross_attention_changes_single_fields_of_the_towers_own():
    spec = read("encoder.attention={heads=4, bias=false}", "decoder.cross={attention={heads=2}}")
    assert (spec.decoder.cross.attention.heads, spec.decoder.cross.attention.bias) == (2, False)
    assert read("decoder.cross.core=argmax").decoder.cross.core.kind == "argmax"
    assert read("decoder.cross.core=argmax").decoder.core.kind == "dot"


def test_a_kind_can_be_taken_only_once():
    from manyheads.parts.norm import NormSpec

    with pytest.raises(SpecError, match="the slot 'norm' already has a kind 'layer'"):

        class Again(NormSpec, kind="layer"):
            pass


def test_the_vocabulary_may_wait_for_the_data_but_a_build_may_not():
    spec = read("vocab=tokenizer")
    with pytest.raises(SpecError, match="vocab: is 'tokenizer': the number of tokens is known only with the data"):
        outline(spec)
    with pytest.raises(SpecError, match="given a dict, expected a ModelSpec"):
        outline({})


def test_a_kind_defined_again_by_the_same_code_replaces_itself():
    from manyheads.parts.norm import NoNormSpec

    assert SLOTS["norm"].kinds["none"] is NoNormSpec
    try:
        type(NoNormSpec)("NoNormSpec", (SLOTS["norm"],), {"__module__": NoNormSpec.__module__, "__qualname__": "NoNormSpec"}, kind="none")
        assert SLOTS["norm"].kinds["none"] is not NoNormSpec
    finally:
        SLOTS["norm"].kinds["none"] = NoNormSpec


def test_what_is_no_description_is_refused():
    with pytest.raises(SpecError, match="an override is a text such as"):
        presets.read("gpt2", ["decoder.layers=2"])
    with pytest.raises(SpecError, match="read_model reads a description"):
        presets.read({"vocab": 3})
    for wrong in (None, 3, "gpt", [1]):
        with pytest.raises(SpecError, match="expected a table that describes a model"):
            read_model(wrong)
    with pytest.raises(SpecError, match="stands where the name of a field should"):
        read_model({"vocab": 5, "ngram": {3: 4}})
    for wrong in ("a\0/b.toml", "\ud800/b.toml"):
        with pytest.raises(SpecError, match="no file can have that name"):
            presets.read(wrong)
    with pytest.raises(SpecError, match="given a str, expected a ModelSpec"):
        size("gpt2")
    for wrong, said in (({"seed": 1.9}, "seed is 1.9"), ({"seed": True}, "seed is True"), ({"dtype": torch.int32}, "dtype is torch.int32"),
                        ({"device": "nope"}, "device is 'nope'"), ({"device": "meta"}, "there is no meta here")):  # fmt: skip
        with pytest.raises(SpecError, match=said):
            build(read(), **wrong)
    for wrong in (3, None, "gtp2"):
        with pytest.raises(SpecError, match="no preset"):
            presets.preset(wrong)
    for wrong in ({"batch": 0}, {"length": -1}, {"source_length": 0}, {"length": 10**20}, {"length": "9"}):
        with pytest.raises(SpecError, match=f"{next(iter(wrong))} is .*, expected a whole number from 1 to"):
            size(read(), **wrong)


def test_specs_are_frozen():
    spec = read()
    with pytest.raises(ValueError, match="frozen"):
        spec.encoder.width = 3


def test_a_table_with_a_kind_replaces_and_one_without_refines():
    below = {"position": {"kind": "learned", "length": 9}}
    assert merged(below, {"position": {"kind": "rope"}}) == {"position": {"kind": "rope"}}
    assert merged(below, {"position": {"offset": 2}}) == {"position": {"kind": "learned", "length": 9, "offset": 2}}
