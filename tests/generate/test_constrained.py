"""Grammars: a text that ended follows its JSON schema or regular expression, masks are those of brute force, hostile expressions are bounded."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import decoder, pair, random_model
from raising import raises
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import manyheads
from manyheads import Checkpoint
from manyheads.cli.generation import read_schema
from manyheads.errors import GenerationConfigError
from manyheads.generate.config import choose_processor, generation_config, processor_kinds
from manyheads.generate.logits_processor import LogitsProcessorContext
from manyheads.generate.vocabulary import Vocabulary
from manyheads.spec import to_tree

TEXTS = [
    '{"name": "Ada", "age": 36, "ok": true, "tags": ["a", "b"], "next": null}',
    "the cat sat on 3 mats: é, 日本",
] * 20
EXTRA = 7  # logits beyond the tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentence_piece():
    """Pieces with ▁, and bytes for the rest; decoding removes the space at the start of a text."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁a",
        "a",
        "b",
        "▁",
        "{",
        '"',
        "1",
        "▁{",
        ":",
        "],",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def words():
    """Words with ▁, and no way to write another character."""
    vocab = {word: i for i, word in enumerate(["<unk>", "</s>", "▁a", "▁b", "a", "b", "!", "▁", "ab"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentence-piece": sentence_piece(), "words": words()}
METHODS = {
    "greedy": {},
    "sample": {"temperature": 1.5, "top_k": 40},
    "beam": {"num_beams": 3},
    "gnmt-beam": {"decoding": "gnmt-beam"},
    "diverse-beam": {"num_beams": 4, "num_beam_groups": 2},
    "contrastive": {"penalty_alpha": 0.4},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4},
}


def checkpoint_of(name, spec=None, *, eos=True, seed=1):
    tokenizer = TOKENIZERS[name]
    tree = to_tree(spec or decoder()) | {"vocab": tokenizer.get_vocab_size() + EXTRA, "head": {"kind": "untied"}}
    checkpoint = Checkpoint(random_model(manyheads.read_model(tree), seed=seed), tokenizer)
    ends = (1,) if eos else ()
    checkpoint.__dict__["generation_settings"] = manyheads.generate.config.CheckpointSettings(eos_token_id=ends)
    return checkpoint


CHECKPOINTS = {name: checkpoint_of(name) for name in TOKENIZERS}


# --------------------------------------------------------------------------------------------------- JSON and schemas


def follows(value, schema):
    """Whether a value is one of the schema, for the keywords below."""
    if "enum" in schema:
        return any(value == item and type(value) is type(item) for item in schema["enum"])
    if "anyOf" in schema:
        return any(follows(value, item) for item in schema["anyOf"])
    match schema.get("type"), value:
        case None, _:
            return True
        case "null", None:
            return True
        case "boolean", bool():
            return True
        case "integer", int():
            return schema["minimum"] <= value <= schema["maximum"]
        case "string", str():
            fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
            return fits and bool(re.search(schema.get("pattern", ""), value))
        case "array", list():
            return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
                follows(item, schema["items"]) for item in value
            )
        case "object", dict():
            fields = schema["properties"]
            return set(schema["required"]) <= set(value) <= set(fields) and all(
                follows(item, fields[name]) for name, item in value.items()
            )
    return False


def objects(inner):
    fields = st.dictionaries(st.sampled_from(["a", "name", "é", 'x"y', "the cat"]), inner, min_size=1, max_size=3)
    return st.builds(
        lambda properties, count: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:count],
            "additionalProperties": False,
        },
        fields,
        st.integers(0, 3),
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"enum": ["red", 1, None, "blue"]}]),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.just({"type": "string", "pattern": "^[a-f]{1,4}-[0-9]$"}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more}, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda item, other: {"anyOf": [item, other]}, inner, inner),
    ),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["byte-level", "sentence-piece"])
@settings(max_examples=5)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_json_that_ended_follows_its_schema(name, method, schema, seed):
    found = CHECKPOINTS[name].generate(
        ["Once", "the cat sat"], json_schema=schema, max_new_tokens=32, seed=seed, details=True, **METHODS[method]
    )
    for result in found:
        if result.finish_reason == "stop":
            assert follows(json.loads(result.text), schema), (result.text, schema)


def test_any_json_is_a_schema_as_a_table_a_text_or_true():
    checkpoint = CHECKPOINTS["byte-level"]
    one, *others = (
        checkpoint.generate("Once", json_schema=schema, temperature=1.0, seed=4, n=8, max_new_tokens=60)
        for schema in (True, {}, "{}", " true ")
    )
    ended = [json.loads(text.text) for text in one if text.finish_reason == "stop"]
    assert len(ended) > 1
    assert all([text.text for text in other] == [text.text for text in one] for other in others)


def test_recursive_schemas_are_followed():
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}}
    tree |= {"required": ["next"], "additionalProperties": False}
    schema = {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}
    texts = CHECKPOINTS["byte-level"].generate("x", json_schema=schema, temperature=2.0, n=8, max_new_tokens=60)
    values = [json.loads(text.text) for text in texts if text.finish_reason == "stop"]
    assert values
    for value in values:
        inner = value
        while inner is not None:
            assert list(inner) == ["next"]
            inner = inner["next"]


# -------------------------------------------------------------------------------------------------- regular expressions

REGEXES = [
    "[ab]{3}!",
    "(foo|bar|é){1,4}",
    r"\d{4}-\d\d-\d\d",
    "a*b?",
    "[^a-z]{2,5}",
    "日本?|猫+",
    "(a|ab)(c|bcd)?",
    "a+|b{2}",
    ".{3}",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["byte-level", "sentence-piece"])
def test_a_text_that_ended_matches_its_regular_expression(name, method):
    ended = 0
    for regex in REGEXES:
        for item in CHECKPOINTS[name].generate(
            ["Once", "a"], regex=regex, max_new_tokens=16, details=True, seed=3, **METHODS[method]
        ):
            if item.finish_reason == "stop":
                assert re.fullmatch(regex, item.text), (regex, item.text)
                ended += 1
    assert ended > len(REGEXES) / 2


def prefixes_of(regex, alphabet, longest):
    """All texts of up to `longest` characters that the regular expression matches, and what they begin with."""
    texts, level = set(), [""]
    for _ in range(longest + 1):
        texts |= {text for text in level if re.fullmatch(regex, text)}
        level = [text + item for text in level for item in alphabet]
    return texts, {text[:i] for text in texts for i in range(len(text) + 1)}


TINY = ["<s>", "</s>", "a", "b", "ab", "ba", "aba", "a", "bb", "c"]


@pytest.mark.parametrize("eos", [(1,), (1, 9), ()])
@pytest.mark.parametrize("regex", ["ab", "(ab)+", "a*b{1,2}", "(a|ba)*", "b(a|bb)?", "a{0,3}", "abab|ba"])
def test_the_mask_is_that_of_brute_force(regex, eos):
    """A token is allowed if a text that matches begins with it, an eos token if the text matches, and no other."""
    spelled = {i: text for i, text in enumerate(TINY) if i > 1}
    vocab = {text if i != 7 else "<0x61>": i for i, text in enumerate(TINY)}  # two tokens have the text "a"
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    prepared = choose_processor({"kind": "regex", "regex": regex}).prepare(Vocabulary(tokenizer))
    texts, possible = prefixes_of(regex, "ab", 9)
    level = [()]
    for _ in range(3):
        for row in level:
            text = "".join(spelled[token] for token in row)
            context = LogitsProcessorContext(torch.tensor([[0, *row]]), len(row), 9, eos)
            allowed = prepared.apply(torch.randn(1, len(TINY) + 2), context)[0].isfinite().nonzero()[:, 0].tolist()
            expected = [i for i, more in spelled.items() if i not in eos and text + more in possible]
            expected += eos if text in texts else ()
            assert allowed == sorted(expected), (text, regex)
        level = [(*row, i) for row in level for i in spelled if i not in eos]
        level = [row for row in level if len("".join(spelled[token] for token in row)) <= 4]
        level = [row for row in level if "".join(spelled[token] for token in row) in possible]


def test_a_text_ends_when_nothing_can_follow_even_without_an_eos_token():
    for method in METHODS.values():
        one = checkpoint_of("byte-level", eos=False).generate("x", regex="(ab|ba){2}", details=True, **method)
        assert (one.finish_reason, bool(re.fullmatch("(ab|ba){2}", one.text))) == ("stop", True)
        whole = checkpoint_of("byte-level", eos=False).generate(
            "x", regex="a+", max_new_tokens=6, details=True, **method
        )
        assert whole.finish_reason == "length"
        assert re.fullmatch("a+", whole.text)


@pytest.mark.parametrize("setting", [{"regex": ""}, {"json_schema": False}, {"json_schema": "false"}], ids=str)
def test_an_expression_that_constrains_nothing_is_refused(setting):
    with raises("generate.config", next(iter(setting))):
        generation_config(**setting)
    assert not generation_config(regex=None, json_schema=None).processors


@pytest.mark.parametrize("minimum", [{"min_new_tokens": 4}, {"min_length": 5}], ids=str)
@pytest.mark.parametrize("ending", [{"regex": "[ab]!!"}, {"regex": "([ab]!)+", "stop": "!"}], ids=str)
def test_a_text_that_ends_before_its_minimum_has_a_note(ending, minimum):
    checkpoint = CHECKPOINTS["words"]
    with pytest.warns(UserWarning, match="minimum of 4"):
        one = checkpoint.generate([2], details=True, **ending, **minimum)
    assert (one.finish_reason, len(one.token_ids) < 4) == ("stop", True)
    assert checkpoint.generate([2], details=True, min_new_tokens=2, **ending).note is None


@pytest.mark.parametrize("method", [{"num_beams": 4}, {"decoding": "gnmt-beam"}, METHODS["diverse-beam"]], ids=str)
def test_a_search_that_finds_fewer_texts_than_asked_for_says_so(method):
    with pytest.warns(UserWarning, match="[12] of 3"):
        found = [item.text for item in CHECKPOINTS["words"].generate([2], regex="!!", n=3, **method)]
    result = manyheads.predict(CHECKPOINTS["words"], "a", regex="!!", n=3, **method)
    assert [sequence["generated"] for sequence in result["sequences"]] == found
    assert (set(found), f"{len(found)} of 3" in result["note"]) == ({"!!"}, True)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_is_complete_at_max_new_tokens_is_finished(method):
    one = CHECKPOINTS["words"].generate([2], regex="[ab]!!", max_new_tokens=3, details=True, **METHODS[method])
    assert (len(one.token_ids), one.finish_reason) == (3, "stop")


def test_a_text_that_max_new_tokens_ends_says_so():
    one = CHECKPOINTS["byte-level"].generate(
        "x", json_schema={"type": "array", "minItems": 99}, max_new_tokens=5, details=True
    )
    assert one.finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(one.text)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_gives_what_each_text_gives_alone(method):
    checkpoint, prompts = CHECKPOINTS["byte-level"], ["Once upon a time", "a", "the cat sat"]
    same = {"regex": "(a|bc|é){2,9}!", "max_new_tokens": 12, "seed": 5, **METHODS[method]}
    assert checkpoint.generate(prompts, **same) == [checkpoint.generate(prompt, **same) for prompt in prompts]


def test_a_stream_is_the_text():
    checkpoint, same = CHECKPOINTS["byte-level"], {"json_schema": {"enum": ["é日", "cat"]}, "max_new_tokens": 20}
    assert "".join(checkpoint.stream("x", **same)) == checkpoint.generate("x", **same)


def test_a_step_reads_one_token_of_each_sequence():
    """Not the text so far again: a long text costs as many steps as it has tokens."""
    from manyheads.generate.grammar import GrammarState

    counts, after = [], GrammarState.after
    GrammarState.after = lambda self, token: counts.append(token) or after(self, token)
    try:
        for settings_, width in (({}, 1), ({"num_beams": 3}, 6)):
            counts.clear()
            CHECKPOINTS["byte-level"].generate("x", regex="[a-z]{40}", max_new_tokens=40, **settings_)
            assert len(counts) <= 40 * width
    finally:
        GrammarState.after = after


def test_special_tokens_of_other_settings_are_not_part_of_the_text():
    """BART and mBART force a first token that has no text."""
    checkpoint = CHECKPOINTS["byte-level"]
    one = checkpoint.generate("x", regex="[ab]{2}", forced_prefix_ids=[0], details=True)
    assert one.token_ids[0] == 0
    assert re.fullmatch("[ab]{2}", one.text)
    source = checkpoint_of("byte-level", pair())
    text = source.generate("x", regex="[ab]{2}", decoder_start_token_id=0, forced_bos_token_id=[0], num_beams=2)
    assert re.fullmatch("[ab]{2}", text)


def test_a_space_that_decoding_removes_is_not_generated_first():
    checkpoint = CHECKPOINTS["words"]
    for seed in range(8):
        one = checkpoint.generate("a", regex=" ?a( b)*!", temperature=3.0, seed=seed, max_new_tokens=30, details=True)
        assert one.finish_reason == "length" or re.fullmatch("a( b)*!", one.text)
    with raises("generate.config"):
        checkpoint.generate("a", regex=" a")


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", METHODS)
def test_settings_that_allow_no_token_are_an_error(method):
    """A grammar that the vocabulary cannot write, and without one too many forbidden tokens."""
    checkpoint, other = CHECKPOINTS["words"], METHODS[method]
    with raises("generate.config"):
        checkpoint.generate("a", regex="z+", **other)
    with raises("generate.config"):
        checkpoint.generate("a", suppress_tokens=list(range(checkpoint.spec.vocab)), **other)


def test_a_beam_that_cannot_go_on_leaves_the_search_to_the_others():
    """After "a", only a token that the vocabulary lacks could follow."""
    for other in ({"num_beams": 4}, {"decoding": "gnmt-beam"}, {"num_beams": 4, "renormalize_logits": True}):
        assert CHECKPOINTS["words"].generate("a", regex="az|b!", **other) == "b!"


WRONG = {
    "open": {"regex": "("},
    "escape": {"regex": "a\\"},
    "lookahead": {"regex": "a(?=b)"},
    "backreference": {"regex": r"(a)\1"},
    "number": {"regex": 3},
    "surrogate": {"regex": "\ud800"},
    "long": {"regex": "a" * 70_000},
    "nested": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "no-json": {"json_schema": "{"},
    "list": {"json_schema": "[1]"},
    "type": {"json_schema": {"type": "text"}},
    "keyword": {"json_schema": {"type": "string", "format": "no such format"}},
    "not-json": {"json_schema": {"enum": [{1, 2}]}},
    "nan": {"json_schema": {"maximum": float("nan"), "type": "number"}},
    "deep": {"json_schema": '{"items":' * 4000 + "{}" + "}" * 4000},
    "large": {"json_schema": json.dumps({"enum": ["x" * 1000] * 10_000})},
    "large-table": {"json_schema": {"enum": ["x" * 1000] * 10_000}},
    "remote": {"json_schema": {"$ref": "https://example.com/schema.json"}},
    "file": {"json_schema": {"$ref": "file:///etc/passwd"}},
    "guidance": {"json_schema": {"x-guidance": 3}},
    "both": {"json_schema": True, "regex": "a"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_is_a_wrong_setting(name):
    with raises("generate.config"):
        generation_config(**WRONG[name])


HOSTILE = [
    {"regex": "(a+)+$"},
    {"regex": "(x+x+)+y"},
    {"regex": "(a{1000}){1000}"},
    {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    {"regex": "(.{1,50}[a-f].{1,60}){30}"},
    {"regex": "(.*a.*){200}"},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json_schema": {"type": "array", "minItems": 10**9}},
    {"json_schema": {"type": "integer", "multipleOf": 999_999_937}},
    {"json_schema": {"type": "string", "minLength": 10**6, "pattern": "(a{1000}){1000}"}},
    {"json_schema": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(800)]}},
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda item: str(item)[:40])
def test_hostile_expressions_generate_or_are_refused(hostile):
    """Each needs exponential time, or unbounded memory, in a plain implementation."""
    try:
        CHECKPOINTS["byte-level"].generate("x", max_new_tokens=12, temperature=1.0, **hostile)
    except GenerationConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017  (either is right)


@pytest.mark.parametrize(
    ("decoder_", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (None, "none"),
    ],
    ids=str,
)
def test_a_tokenizer_whose_tokens_are_not_joined_is_refused_by_name(decoder_, name):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if decoder_ is not None:
        tokenizer.decoder = decoder_
    tree = to_tree(decoder()) | {"vocab": 2}
    with raises("model.unsupported", name):
        Checkpoint(random_model(manyheads.read_model(tree)), tokenizer).generate("a", regex="a")


def test_a_checkpoint_without_a_tokenizer_is_refused():
    with raises("model.unsupported", "tokenizer"):
        Checkpoint(random_model(decoder())).generate([1, 2], regex="a")


def test_no_checkpoint_can_run_an_expression():
    from manyheads.generate.checkpoint_settings import read_checkpoint_settings

    names = {name for kind in processor_kinds().values() if kind.is_grammar for name in kind.model_fields}
    assert names == {"json_schema", "regex"}
    for name in names:
        data = json.dumps({name: "a"}).encode()
        assert not read_checkpoint_settings({name: "a"}, {}).settings
        with raises("generate.config", name):
            generation_config(read_checkpoint_settings({}, {"generation_config.json": data}))


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    generation_config(temperature=1.0)
    for item in ({"regex": "a"}, {"json_schema": True}):
        with raises("usage.missing-extra") as caught:
            generation_config(**item)
        assert caught.value.hint == "pip install 'manyheads[constrain]'"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_text_of_tokens_is_their_bytes_joined(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    vocabulary = Vocabulary(tokenizer).tokens
    joined = b"".join(vocabulary.tokens[token] for token in ids if token not in vocabulary.has_no_text)
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return
    text = text.removeprefix(" ") if vocabulary.strips_space else text
    assert tokenizer.decode(ids) == text


def test_the_command_line_reads_a_schema_from_a_file_or_as_text(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    assert read_schema(str(file)) == '{"type": "null"}'
    for text in ('{"type": "null"}', " {}", "true"):
        assert read_schema(text) == text
    with raises("usage.path-not-found"):
        read_schema(str(tmp_path / "none.json"))
    with raises("file.access"):
        read_schema(str(tmp_path))
    file.write_bytes(b"{" + b" " * 100_000 + b"}")
    with raises("generate.config"):
        read_schema(str(file))
    file.write_bytes(b'{"a": "\xff"}')
    with raises("generate.config"):
        read_schema(str(file))


def test_the_error_of_a_grammar_has_no_lines_of_the_grammar_itself():
    """Its place counts lines that the user did not write."""
    from manyheads.generate.grammar import check_grammar, lark

    for grammar in (lark("/(/"), lark('%json {"type": "nothing"}')):
        with pytest.raises(GenerationConfigError) as caught:
            check_grammar("regex", grammar)
        assert "at 2(" not in caught.value.message
        assert "llguidance" not in caught.value.message
        assert len(caught.value.message) > len("regex cannot be compiled: ")
