"""Going on from a checkpoint: its numbers before the first step, what is new and left out, low ranks, and the same bits through a kill."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from command import run
from peft import PeftModel
from safetensors.torch import load_file, save_file
from small_checkpoints import CASES, make, moved
from small_runs import digests, in_a_process
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

import manyheads
from manyheads.convert.files import FileError
from manyheads.data.source import Corpus, DataSpec
from manyheads.dataset import prepare_run
from manyheads.objective.pairs import vectors
from manyheads.objective.shaping import shaped
from manyheads.spec import SLOTS, SpecError, read_toml, to_toml, to_tree
from manyheads.train.events import Shortened, Started, Stepped
from manyheads.train.look import evaluate
from manyheads.train.loop import train
from manyheads.train.lora import adapters
from manyheads.train.model import first_model
from manyheads.train.run import RunError, made_ready, read_run
from manyheads.train.stream import Stream

# the special tokens of each family, where they stand, and what its tokenizer puts around a text
SPECIAL = {
    "bert": ({"[PAD]": 0, "[CLS]": 51, "[SEP]": 52, "[MASK]": 53, "[UNK]": 54}, "[CLS] $A [SEP]", {}),
    "gpt2": ({"<|endoftext|>": 60}, "$A", {"bos_token_id": 60, "eos_token_id": 60}),
    "llama": ({"<s>": 57, "</s>": 58}, "<s> $A", {"bos_token_id": 57, "eos_token_id": 58, "pad_token_id": None}),
    "t5": ({"<pad>": 0, "</s>": 1}, "$A </s>", {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}),
    "bart": (
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<mask>": 59},
        "<s> $A </s>",
        {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ),
}
WORDS = [f"word{i}" for i in range(3, 51)]


def saved(name, path, **options):
    """A small random model as transformers saves it, with a tokenizer of whole words."""
    torch.manual_seed(1)
    special, frame, config = SPECIAL[name.split("-")[0]]
    found, kind, more = CASES[name]
    moved(make(found, kind, **more | config | options)).save_pretrained(path)
    vocab = {word: int(word[4:]) for word in WORDS} | special
    own = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(special))))
    own.add_special_tokens([AddedToken(token, special=True) for token in special])
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing(single=frame, special_tokens=list(special.items()))
    own.enable_padding(length=20)
    own.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 40}))
    return path


@pytest.fixture
def data(tmp_path):
    """Texts with a label, and pairs: the label is told by the first word, the target is the source turned round."""
    chance = np.random.default_rng(0)
    texts = [" ".join(chance.choice(WORDS, chance.integers(3, 9))) for _ in range(120)]
    lines = {
        "labels.tsv": [f"{text}\t{'early' if int(text.split()[0][4:]) < 25 else 'late'}" for text in texts],
        "pairs.tsv": [f"{text}\t{' '.join(reversed(text.split()))}" for text in texts],
        "texts.txt": texts,
    }
    for name, rows in lines.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    return tmp_path


KINDS = {"classify": ("labels", "labels.tsv"), "seq2seq": ("pairs", "pairs.tsv"), "causal": ("text", "texts.txt"), "masked": ("text", "texts.txt")}  # fmt: skip


def described(start, data, objective, *, train=None, **more):
    kind, file = KINDS[objective]
    usual = {"steps": 6, "tokens": 200, "accumulate": 2, "save_every": 2, "evaluate_every": 3, "evaluate_rows": 20}
    source = {"kind": kind, "path": str(data / file)} | ({"document": "line"} if kind == "text" else {})
    optim = {"rate": 3e-3, "schedule": {"kind": "cosine", "warmup": 2}}
    return {"seed": 5, "start": str(start), "data": source, "objective": {"kind": objective}, "optim": optim, "train": usual | (train or {})} | more  # fmt: skip


CLASSES = {"head": {"kind": "classes", "classes": "data", "dense": True, "dropout": 0.1}}
LORA = {"rank": 2, "scale": 6.0}
CASE = {
    "classify": ("bert-bare", {"model": CLASSES}),
    "masked": ("bert", {}),
    "causal": ("llama", {}),
    "seq2seq": ("t5", {}),
    "classify-lora": ("bert-bare", {"model": CLASSES, "lora": LORA | {"dropout": 0.1}}),
    "causal-lora": ("llama", {"lora": LORA | {"where": ["query", "value", "down"]}}),
}


def case(name, tmp_path, data, **train):
    family, more = CASE[name]
    if not (tmp_path / "start").exists():
        saved(family, tmp_path / "start")
    return described(tmp_path / "start", data, name.split("-")[0], train=train, **more)


# --------------------------------------------------------------------------------------------- the checkpoint's numbers


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "objective"),
    [("bert-classes", "classify"), ("gpt2-classes", "classify"), ("bert", "masked"), ("gpt2", "causal"), ("llama", "causal"), ("t5", "seq2seq"), ("bart", "seq2seq")],
)  # fmt: skip
def test_the_loss_before_any_step_is_the_checkpoints_own(name, objective, data, tmp_path):
    """By transformers, from texts that the folder's own tokenizer framed."""
    folder = saved(name, tmp_path / "start", **({"num_labels": 2} if objective == "classify" else {}))
    tree = described(folder, data, objective)
    ready = made_ready(read_run(tree))
    model, _ = first_model(ready)
    tokenizer, rows = Tokenizer.from_file(str(folder / "tokenizer.json")), ready.corpus.validation[:6]
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    batch = ready.run.objective.batch([ready.unseen[i] for i in range(len(rows))], ready.tokens, np.random.default_rng(0))
    theirs = getattr(transformers, CASES[name][0]).from_pretrained(folder)
    read = batch.source or batch.inputs
    if objective in ("classify", "seq2seq"):
        framed = [tokenizer.encode(row[0]).ids for row in rows]
        assert [ids[ids_ != ready.tokens.pad].tolist() for ids, ids_ in zip(read.tokens, read.tokens, strict=True)] == framed
    padding = torch.zeros_like(read.tokens, dtype=torch.bool) if read.padding is None else read.padding
    given = {"input_ids": read.tokens, "attention_mask": (~padding).long()}
    wanted = batch.wanted
    if objective == "causal":  # where theirs is moved by one
        end = torch.full((len(rows), 1), -100)
        given = {name: torch.cat((value, value[:, -1:]), dim=1) for name, value in given.items()}
        wanted = torch.cat((end, wanted), dim=1)
    if objective == "seq2seq":
        wanted = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokenizer.encode(row[1]).ids) for row in rows], True, -100)
    loss = float(theirs(**given, labels=wanted).loss)
    assert ready.run.objective.score(model.eval(), batch).mean == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("name", "ids"), [("bert", (0, 51, 52, 53, 0)), ("gpt2", (60, 60, 60, -1, 60)), ("llama", (58, 57, 58, -1, 57)), ("t5", (0, 0, 1, -1, 0)), ("bart", (1, 0, 2, 59, 2))])  # fmt: skip
def test_special_tokens_are_those_of_the_checkpoint(name, ids, data, tmp_path):
    objective = {"bert": "masked", "t5": "seq2seq", "bart": "seq2seq"}.get(name, "causal")
    tokens = made_ready(read_run(described(saved(name, tmp_path / "start"), data, objective))).tokens
    assert (tokens.pad, tokens.begin, tokens.end, tokens.mask, tokens.opening[0]) == ids
    assert set(SPECIAL[name][0].values()) <= set(tokens.special)


def test_only_ordinary_tokens_are_drawn_by_chance(data, tmp_path):
    swapped = {"objective": {"kind": "masked", "share": 0.9, "hidden": 0.0, "swapped": 1.0}}
    ready = made_ready(read_run(described(saved("bert", tmp_path / "start"), data, "masked") | swapped))
    batch = ready.run.objective.batch([ready.rows[i] for i in range(len(ready.rows))], ready.tokens, np.random.default_rng(0))
    drawn = batch.inputs.tokens[(batch.wanted >= 0)]
    assert set(drawn.tolist()) == {int(word[4:]) for word in WORDS}


def test_what_hides_needs_a_token_for_it(data, tmp_path):
    """Found before anything is learned."""
    for name, family in (("infill", "gpt2"), ("masked", "bert")):
        folder = saved(family, tmp_path / name)
        tree = described(folder, data, "masked") | {"objective": name}
        if family == "bert":
            vocab = json.loads((folder / "tokenizer.json").read_text().replace("[MASK]", "[OTHER]"))
            (folder / "tokenizer.json").write_text(json.dumps(vocab))
        with pytest.raises(SpecError, match=f"tokenizer: no token of it stands for a hidden one, and {name} needs one"):
            made_ready(read_run(tree))


@pytest.mark.parametrize("name", ["classify", "masked", "causal", "seq2seq", "other order"])
def test_prepared_rows_train_to_the_same_losses(name, data, tmp_path):
    """Also where the checkpoint has the classes in another order than their names."""
    if name == "other order":
        names = {"id2label": {0: "late", 1: "early"}, "label2id": {"late": 0, "early": 1}}
        tree = described(saved("bert-classes", tmp_path / "start", num_labels=2, **names), data, "classify")
    else:
        tree = case(name, tmp_path, data)
    prepare_run(read_run(tree), tmp_path / "ids")
    ready = made_ready(read_run(tree | {"data": {"kind": "prepared", "path": str(tmp_path / "ids")}}))
    one, other = (list(train(run, tmp_path / f"run{i}")) for i, run in enumerate((made_ready(read_run(tree)), ready)))
    losses, again = ([event.loss for event in events if isinstance(event, Stepped)] for events in (one, other))
    assert losses == again
    assert one[-1] == other[-1]


# -------------------------------------------------------------------------------------------- what is taken, and what not


def test_what_is_new_and_what_is_left_out_is_named(data, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(case("classify", tmp_path, data)))
    said = " ".join(run("train", path, "--output", tmp_path / "run", "-s", "train.steps=1").stderr.split())
    assert "not in the checkpoint, begun by the seed: head.dense.weight, head.dense.bias, head.output.weight, head.output.bias" in said
    assert "left out: pooler.dense.weight, pooler.dense.bias" in said
    model, (begun,) = first_model(made_ready(read_run(read_toml(path))))
    start = manyheads.load(tmp_path / "start").model
    held = dict(model.named_parameters())
    assert all(torch.equal(held[name], tensor) for name, tensor in start.named_parameters())
    assert begun.taken == len(dict(start.named_parameters())) == len(held) - 4


def test_a_head_for_other_classes_is_new_and_another_shape_elsewhere_is_refused(data, tmp_path):
    folder = saved("bert-classes", tmp_path / "start")  # three classes
    ready = made_ready(read_run(described(folder, data, "classify", model={"head": {"classes": "data"}})))
    _, (begun,) = first_model(ready)
    assert begun.new == ("head.output.weight", "head.output.bias")
    assert begun.left == begun.new
    assert ready.spec.head.classes == 2
    with pytest.raises(SpecError, match='model.head.classes: is 3, and the data has 2 classes; write "data"'):
        made_ready(read_run(described(folder, data, "classify")))
    wider = described(folder, data, "classify", model={"head": {"classes": "data"}, "encoder": {"feedforward": {"hidden": 50}}})
    with pytest.raises(SpecError, match=r"encoder.layers.0.feedforward.down.weight is 32 × 48 in .*start, and 32 × 50 by the description"):
        first_model(made_ready(read_run(wider)))


def test_a_model_that_takes_nothing_is_refused(data, tmp_path):
    folder = saved("bert", tmp_path / "start")
    whole = {"vocab": "tokenizer", "decoder": {"layers": 1, "width": 8, "attention": {"kind": "heads", "heads": 2}}}
    with pytest.raises(SpecError, match=r"start: no weight of .*start has a place in this model"):
        first_model(made_ready(read_run(described(folder, data, "causal", model=whole))))


def test_what_begins_from_a_checkpoint_cuts_texts_as_it_learned_to(data, tmp_path):
    start = saved("bert-classes", tmp_path / "start", num_labels=2)
    list(train(made_ready(read_run(described(start, data, "classify", train={"steps": 1, "longest": 9}))), tmp_path / "run"))
    loaded = manyheads.load(tmp_path / "run")
    assert len(loaded.ids([" ".join(WORDS[:30])])[0]) == 9
    assert loaded.ids([" ".join(WORDS[:5])]) == manyheads.load(start).ids([" ".join(WORDS[:5])])


def test_a_head_for_as_many_other_classes_is_new(data, tmp_path):
    named = {"id2label": {"0": "late", "1": "early"}, "label2id": {"late": 0, "early": 1}}
    start = saved("bert-classes", tmp_path / "start", num_labels=2, **named)
    again = first_model(made_ready(read_run(described(start, data, "classify"))))[1][0]
    assert not [name for name in again.new if name.startswith("head.output")]
    labels = data / "labels.tsv"
    labels.write_text(labels.read_text().replace("early", "first").replace("late", "last"))
    others = first_model(made_ready(read_run(described(start, data, "classify"))))[1][0]
    assert {"head.output.weight", "head.output.bias"} <= set(others.new)
    assert {"head.output.weight", "head.output.bias"} <= set(others.left)


def test_classes_keep_the_order_of_the_checkpoint(data, tmp_path):
    names = {"id2label": {0: "late", 1: "early"}, "label2id": {"late": 0, "early": 1}}
    folder = saved("bert-classes", tmp_path / "start", num_labels=2, **names)
    assert made_ready(read_run(described(folder, data, "classify"))).labels == ("late", "early")


def test_an_objective_whose_head_is_missing_is_refused(data, tmp_path):
    folder = saved("bert-bare", tmp_path / "start")
    for objective, said in (
        ("masked", "asks for tokens, and the head 'none' scores none"),
        ("classify", "asks for a class, and the head 'none'"),
    ):
        with pytest.raises(SpecError, match=f"model.head: {objective} {said}"):
            read_run(described(folder, data, objective))


@pytest.mark.parametrize("name", CASE)
def test_the_resolved_run_is_the_same_run(name, data, tmp_path):
    spec = read_run(case(name, tmp_path, data))
    assert read_run(json.loads(json.dumps(to_tree(spec)))) == spec
    assert to_tree(spec)["model"]["vocab"] == 61


def test_another_vocabulary_is_refused_by_its_first_entry(data, tmp_path):
    """Claim H6."""
    folder = saved("bert", tmp_path / "start")
    written = json.loads((folder / "tokenizer.json").read_text())
    same = tmp_path / "tokenizer.json"
    same.write_text(json.dumps(written))
    own = {"kind": "file", "path": str(same)}
    assert made_ready(read_run(described(folder, data, "masked", tokenizer=own))).tokens.around == ((51,), (52,))
    vocab = written["model"]["vocab"]
    vocab["foo"] = vocab.pop("word17")
    same.write_text(json.dumps(written))
    with pytest.raises(SpecError, match="tokenizer: the vocabulary differs at id 17: 'word17' there, 'foo' here"):
        made_ready(read_run(described(folder, data, "masked", tokenizer=own)))
    with pytest.raises(SpecError, match=r"the vocabulary differs at id 0: '\[PAD\]' there, '<pad>' here"):
        made_ready(read_run(described(folder, data, "masked", tokenizer="words")))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"tokenizer: .*start has no tokenizer to train with"):
        made_ready(read_run(described(folder, data, "masked")))


@pytest.mark.parametrize(("name", "most"), [("causal", 40), ("seq2seq", None), ("masked", 40)])
def test_texts_that_are_too_long_are_cut_counted_and_said(name, most, data, tmp_path):
    """To what the run says, and in any case to what the model has places for."""
    kind, file = KINDS[name]
    long = "\t".join([" ".join(["word5"] * 60)] * (2 if kind == "pairs" else 1))
    (data / file).write_text(f"{long}\n{(data / file).read_text()}")
    family = {"causal": "gpt2", "seq2seq": "t5", "masked": "bert"}[name]
    folder = saved(family, tmp_path / "start")
    for longest in (None, 7):
        ready = made_ready(read_run(described(folder, data, name, train={"longest": longest} if longest else {})))
        batch = ready.run.objective.batch([ready.rows[i] for i in range(len(ready.rows))], ready.tokens, np.random.default_rng(0))
        limit = longest or most
        assert limit is None or batch.inputs.length == limit
        _, events = first_model(ready)
        (cut,) = [event for event in events if isinstance(event, Shortened)] or [Shortened(0, 0, 0)]
        assert bool(cut.rows) is (limit is not None)
        evaluate(first_model(ready)[0], ready)
    with pytest.raises(SpecError, match="train.longest: a text of 1 tokens has no room"):
        made_ready(read_run(described(folder, data, name, train={"longest": 1})))


def test_answers_are_written_to_the_last_place_and_not_beyond(data, tmp_path):
    ready = made_ready(read_run(described(saved("bart", tmp_path / "start", max_position_embeddings=6), data, "seq2seq")))
    assert ready.cut[0]
    assert evaluate(first_model(ready)[0], ready)["exact"] == 0


def test_what_is_frozen_does_not_change(data, tmp_path):
    tree = case("classify", tmp_path, data) | {"freeze": ["encoder.embed", "encoder.layers.1"]}
    list(train(made_ready(read_run(tree)), tmp_path / "run"))
    before, after = (dict(manyheads.load(tmp_path / name).model.named_parameters()) for name in ("start", "run"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("encoder.embed.", "encoder.layers.1."))}
    with pytest.raises(SpecError, match="freeze: no weight stands under 'encoder.embedding': did you mean 'encoder.embed'"):
        first_model(made_ready(read_run(tree | {"freeze": ["encoder.embedding"]})))
    with pytest.raises(SpecError, match="freeze: nothing is left to learn"):
        first_model(made_ready(read_run(tree | {"freeze": ["encoder", "head"]})))


# ------------------------------------------------------------------------------------------------ the same bits, and back


@pytest.mark.parametrize("name", ["classify", "seq2seq", "classify-lora", "causal-lora"])
def test_a_run_that_is_killed_ends_in_the_same_bits(name, data, tmp_path):
    tree = case(name, tmp_path, data)
    assert in_a_process(tree, tmp_path / "whole") == 0
    assert in_a_process(tree, tmp_path / "broken", step=len(name) % 5 + 1) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")
    if "lora" in tree:
        ends = (tmp_path / where / "checkpoints" / "step-00000006" for where in ("broken", "whole"))
        one, other = ({str(p.relative_to(end)): p.read_bytes() for p in end.rglob("*") if p.is_file()} for end in ends)
        assert one == other
        assert set(json.loads(one["manifest.json"])["files"]) == set(one) - {"manifest.json"}, "every file has its hash, the adapter's too"


def changed(path):
    """One number of one weight."""
    tensors = load_file(path)
    tensors[min(tensors)].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["classify", "classify-lora"])
def test_a_run_does_not_go_on_from_a_checkpoint_that_has_changed(name, data, tmp_path):
    list(train(made_ready(read_run(case(name, tmp_path, data))), tmp_path / "run"))
    changed(tmp_path / "start" / "model.safetensors")
    with pytest.raises(RunError, match=r"this run began from .*start, which is not what it was"):
        list(train(made_ready(read_run(case(name, tmp_path, data, steps=8))), tmp_path / "run"))


@pytest.mark.parametrize("name", CASE)
def test_a_run_goes_back_to_the_family_it_came_from(name, data, tmp_path):
    list(train(made_ready(read_run(case(name, tmp_path, data))), tmp_path / "run"))
    loaded = manyheads.load(tmp_path / "run")
    manyheads.export(loaded, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == CASE[name][0].split("-")[0]
    came, goes = (
        [(tmp_path / place / file).read_bytes() for file in ("tokenizer_config.json", "tokenizer.json")] for place in ("start", "out")
    )
    if name.startswith("classify"):  # as it came, but for where texts are cut
        assert json.loads(goes[1])["truncation"]["max_length"] == loaded.longest
        goes[1] = came[1] if json.loads(goes[1]) | {"truncation": None} == json.loads(came[1]) else goes[1]
    assert goes == came
    auto = {"classify": "SequenceClassification", "masked": "MaskedLM", "causal": "CausalLM", "seq2seq": "Seq2SeqLM"}[name.split("-")[0]]
    theirs = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(tmp_path / "out")
    ids = loaded.encode([" ".join(WORDS[:5])]).tokens
    if name == "seq2seq":
        found, expected = theirs(input_ids=ids, decoder_input_ids=ids[:, :3]).logits.detach(), loaded.logits(ids, ids[:, :3])
    else:
        found, expected = theirs(input_ids=ids).logits.detach(), loaded.logits(ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    if name.startswith("classify"):
        assert config["id2label"] == {"0": "early", "1": "late"}
        assert {row["class"] for row in manyheads.predict(loaded, "word4 word30")["classes"]} == {"early", "late"}


def test_one_run_begins_from_another_and_keeps_its_tokens(data, tmp_path):
    """Pretrained here on texts, then trained for classes; the tokenizer is ours, and each objective frames the text its own way."""
    tower = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "rope"}
    first = described("", data, "masked", tokenizer="words", model={"vocab": "tokenizer", "head": "masked", "encoder": tower})
    del first["start"]
    list(train(made_ready(read_run(first)), tmp_path / "first"))
    ready = made_ready(read_run(described(tmp_path / "first", data, "classify", model={"head": {"kind": "classes", "classes": "data"}})))
    events = list(train(ready, tmp_path / "second"))
    assert isinstance(events[0], Started)
    assert all(name.startswith("head.") for name in (*events[0].new, *events[0].left))
    loaded = manyheads.load(tmp_path / "second")
    bare = loaded.tokenizer.encode("word5", add_special_tokens=False).ids
    assert loaded.tokenizer.encode("word5").ids == [1, *bare, 2]
    third = made_ready(read_run(described(tmp_path / "second", data, "classify")))
    assert first_model(third)[1][0].new == ()


def test_a_frame_is_kept_through_two_runs(data, tmp_path):
    """The second begins from the first, which began from a folder of transformers: texts are still framed as there."""
    list(train(made_ready(read_run(case("masked", tmp_path, data))), tmp_path / "first"))
    ready = made_ready(read_run(described(tmp_path / "first", data, "classify", model=CLASSES)))
    assert ready.tokens.around == ((51,), (52,))
    list(train(ready, tmp_path / "second"))
    manyheads.export(tmp_path / "second", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]


def test_learning_goes_on(data, tmp_path):
    tree = case("classify", tmp_path, data, steps=40, evaluate_every=40, save_every=40)
    ready = made_ready(read_run(tree))
    untrained = evaluate(first_model(ready)[0], ready)["loss"]
    *_, looked, _, _ = train(ready, tmp_path / "run")
    assert looked.metrics["loss"] < untrained


# ---------------------------------------------------------------------------------------------------------- low ranks


@pytest.mark.parametrize("name", ["classify-lora", "causal-lora"])
def test_low_ranks_change_nothing_at_first_and_then_only_themselves(name, data, tmp_path):
    tree = case(name, tmp_path, data)
    ready = made_ready(read_run(tree))
    model, _ = first_model(ready)
    plain, (begun,) = first_model(made_ready(read_run({key: value for key, value in tree.items() if key != "lora"})))
    batch = ready.run.objective.batch([ready.rows[i] for i in range(8)], ready.tokens, np.random.default_rng(0))
    assert torch.equal(model.eval()(batch.inputs), plain.eval()(batch.inputs))
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in learned if not name.endswith((".up.weight", ".down.weight"))} == set(begun.new)
    list(train(ready, tmp_path / "run"))
    after, where = dict(manyheads.load(tmp_path / "run").model.named_parameters()), tree["lora"].get("where", ["query", "value"])
    moving = {name for name, tensor in plain.named_parameters() if not torch.equal(tensor, after[name])}
    assert moving == {name for name in after if name in begun.new or name.endswith(tuple(f".{part}.weight" for part in where))}


@pytest.mark.parametrize("name", ["classify-lora", "causal-lora"])
def test_peft_opens_the_adapter_and_gives_our_logits(name, data, tmp_path):
    list(train(made_ready(read_run(case(name, tmp_path, data))), tmp_path / "run"))
    auto = transformers.AutoModelForCausalLM if name == "causal-lora" else transformers.AutoModelForSequenceClassification
    logger = transformers.utils.logging
    logger.set_verbosity_error()  # a new head is what is wanted here
    base = auto.from_pretrained(tmp_path / "start")
    logger.set_verbosity_warning()
    (adapter,) = (tmp_path / "run" / "checkpoints").glob("step-00000006/adapter")
    theirs = PeftModel.from_pretrained(base, adapter).eval()
    loaded = manyheads.load(tmp_path / "run")
    ids = loaded.encode([" ".join(WORDS[3:9])]).tokens
    torch.testing.assert_close(theirs(input_ids=ids).logits.detach(), loaded.logits(ids), atol=1e-5, rtol=0)
    with theirs.disable_adapter():
        assert not torch.allclose(theirs(input_ids=ids).logits, loaded.logits(ids), atol=1e-3)


def test_where_transformers_has_no_such_matrix_the_adapter_says_so(data, tmp_path):
    folder = saved("gpt2", tmp_path / "start")
    ready = made_ready(read_run(described(folder, data, "causal", lora=LORA)))
    events = list(train(ready, tmp_path / "run"))
    assert (
        "adapter/ has our names, so peft cannot open it: transformers holds decoder.layers.0.attention.query turned round or in one"
        in events[0].notes[0]
    )
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-00000006/adapter/adapter_model.safetensors")
    assert "base_model.model.decoder.layers.0.attention.query.lora_A.weight" in load_file(path)
    mean = {"head": {"kind": "classes", "classes": "data", "pool": "mean"}}
    tree = described(saved("bert-bare", tmp_path / "other"), data, "classify", lora=LORA, model=mean)
    _, (begun,) = first_model(made_ready(read_run(tree)))
    assert "adapter/ has our names, so peft cannot open it: no family can say this model: head" in begun.notes[0]


def test_low_ranks_need_a_start_and_maps_that_are_there(data, tmp_path):
    tree = case("causal-lora", tmp_path, data)
    with pytest.raises(SpecError, match="lora.where: no linear map of this model is called 'q_proj'"):
        first_model(made_ready(read_run(tree | {"lora": {"where": ["q_proj"]}})))
    alone = {key: value for key, value in tree.items() if key != "start"} | {"model": {"vocab": "tokenizer", "decoder": {"layers": 1}}}
    with pytest.raises(SpecError, match="lora: is a change of low rank to trained weights: say with start"):
        read_run(alone)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_low_ranks_drop_the_share_of_x_that_is_said(rate, data, tmp_path):
    """Before A, in training alone, and what is left counts 1 / (1 − p) times."""
    more = {"lora": {"rank": 2, "scale": 6.0, "dropout": rate}}
    model, _ = first_model(made_ready(read_run(described(saved("llama", tmp_path / "start"), data, "causal", **more))))
    found = list(adapters(model).values())
    assert found
    for one in found:
        seen = []
        one.down.register_forward_hook(lambda _, given, out, seen=seen: seen.append(given[0]))
        x = torch.ones(2, 2000, one.down.in_features)
        torch.manual_seed(0)
        one.train()(x)
        one.eval()(x)
        dropped, whole = seen
        assert torch.equal(whole, x)
        assert float((dropped == 0).float().mean()) == pytest.approx(rate, abs=0.01)
        assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / (1 - rate)))


@pytest.mark.parametrize("kind", SLOTS["optim"].kinds)
def test_low_ranks_learn_by_every_optimiser(kind, data, tmp_path):
    """Though nothing but matrices may be left to learn."""
    ready = made_ready(read_run(case("causal-lora", tmp_path, data) | {"optim": {"kind": kind, "rate": 1e-2}}))
    model, _ = first_model(ready)
    changer = ready.run.optim.build(model)
    held = [id(weight) for group in changer.param_groups for weight in group["params"]]
    learned = {id(weight) for weight in model.parameters() if weight.requires_grad}
    assert len(held) == len(set(held))
    assert set(held) == learned
    list(train(ready, tmp_path / "run"))
    before, after = (dict(manyheads.load(tmp_path / name).model.named_parameters()) for name in ("start", "run"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_steps_are_counted_alike(data, tmp_path):
    events = list(train(made_ready(read_run(case("seq2seq", tmp_path, data))), tmp_path / "run"))
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4, 5, 6]
    assert events[0] == Started(0, events[0].taken, (), ())


# ------------------------------------------------------------------------------------------------------ vectors of texts


def pooling(folder, *modes, unit=False):
    """The files by which sentence-transformers says how one vector is made of many."""
    names = ["Transformer", "Pooling", *["Normalize"] * unit]
    steps = [{"idx": i, "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    said = {f"pooling_mode_{mode}": mode in modes for mode in ("mean_tokens", "cls_token", "lasttoken", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | said))


def unframed(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))


BEGINNINGS = {
    "a folder": lambda folder: None,
    "its first token": lambda folder: pooling(folder, "cls_token"),
    "its last token": lambda folder: pooling(folder, "lasttoken", unit=True),
    "its mean": lambda folder: pooling(folder, "mean_tokens", unit=True),
    "a tokenizer that adds nothing": unframed,
    "both": lambda folder: [pooling(folder, "cls_token"), unframed(folder)],
}


def asking(data, **more):
    """A contrastive run over the pairs."""
    source = {"kind": "queries", "path": str(data / "pairs.tsv")}
    train = {"steps": 2, "tokens": 200, "evaluate_rows": 8}
    return {"seed": 5, "data": source, "objective": "contrastive", "optim": {"rate": 1e-2}, "train": train} | more


@torch.no_grad()
def trained_and_given(ready, loaded):
    """What contrastive training compares, and what is given to those who load the model."""
    texts = [row[0] for row in ready.corpus.train[:5]]
    batch = ready.run.objective.batch([ready.rows[i] for i in range(5)], ready.tokens, np.random.default_rng(0))
    given = torch.nn.functional.normalize(loaded.embed(texts), dim=-1)
    torch.testing.assert_close(vectors(loaded.model, batch.inputs, batch.pool), given, atol=1e-6, rtol=0)
    assert batch.inputs.tokens.shape[1] == max(map(len, loaded.ids(texts)))


@pytest.mark.parametrize("more", [{}, {"lora": LORA}], ids=["whole", "lora"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_contrastive_learns_the_vectors_that_embed_gives(beginning, more, data, tmp_path):
    """Of the checkpoint a run begins from, of the run, and of another that begins from this."""
    BEGINNINGS[beginning](saved("bert-bare", tmp_path / "start"))
    for start in ("start", "first"):
        ready = made_ready(read_run(asking(data, start=str(tmp_path / start), **more)))
        trained_and_given(ready, manyheads.load(tmp_path / start))
        if start == "start":
            list(train(ready, tmp_path / "first"))
            trained_and_given(ready, manyheads.load(tmp_path / "first"))


@pytest.mark.parametrize("head", ["none", "vector", {"kind": "vector", "pool": "mean", "unit": True}, {"kind": "vector", "pool": "last"}])
def test_contrastive_from_nothing_learns_the_vectors_that_embed_gives(head, data, tmp_path):
    tower = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "rope"}
    ready = made_ready(read_run(asking(data, model={"vocab": "tokenizer", "encoder": tower, "head": head})))
    list(train(ready, tmp_path / "run"))
    trained_and_given(ready, manyheads.load(tmp_path / "run"))


def test_contrastive_refuses_a_checkpoint_whose_vectors_it_cannot_make(data, tmp_path):
    folder = saved("bert-bare", tmp_path / "start")
    pooling(folder, "max_tokens")
    with pytest.raises(FileError, match="pools by pooling_mode_max_tokens, expected one of"):
        made_ready(read_run(asking(data, start=str(folder))))
    made_ready(read_run(described(folder, data, "classify", model=CLASSES)))  # which needs no such vector
    shutil.rmtree(folder / "1_Pooling")
    pooling(folder, "cls_token")
    with pytest.raises(SpecError, match="model.head: the files of the checkpoint say how a text becomes one vector"):
        made_ready(read_run(asking(data, start=str(folder), model={"head": {"kind": "vector", "pool": "mean"}})))


# ------------------------------------------------------------------------------------------------------ guided attention


class LinkedSpec(DataSpec, kind="test-linked"):
    """Texts of different words, each of which has the one opposite as its head; their targets are turned round"""

    def load(self):
        def row(i):
            words = np.random.default_rng(i).choice(WORDS, 3 + i % 6, replace=False).tolist()
            last = len(words) - 1
            heads = tuple(last - j if last != 2 * j else -1 for j in range(len(words)))
            said = " ".join(f"{j}-{last - j}" for j in range(len(words)))
            return " ".join(words), "odd" if i % 2 else "even", heads, " ".join(words), " ".join(reversed(words)), said

        rows = [row(i) for i in range(60)]
        return Corpus(("text", "label", "arcs", "source", "target", "alignment"), rows[10:], rows[:10], [], "words and their opposites")


@pytest.mark.parametrize("longest", [None, 6])
@pytest.mark.parametrize(
    ("model", "frame", "objective"),
    [
        *(("bart", frame, "seq2seq") for frame in SPECIAL),
        *(("bert", frame, "masked") for frame in SPECIAL),
        *(("gpt2", frame, "causal") for frame in SPECIAL),
        *(("bert-classes", frame, "classify") for frame in SPECIAL),
    ],
)
def test_a_word_is_guided_to_the_word_meant_whatever_frames_a_text(model, frame, objective, longest, tmp_path):
    """And of a text that is cut, only what is left."""
    folder = saved(model, tmp_path / "start", **({"num_labels": 2} if objective == "classify" else {}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before, behind = SPECIAL[frame][1].split("$A")
    first = next(iter(SPECIAL[model.split("-")[0]][0].items()))
    around = " ".join([*(first[0] for _ in before.split()), "$A", *(first[0] for _ in behind.split())])
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=[first])
    tokenizer.save(str(folder / "tokenizer.json"))
    by = "alignment" if objective == "seq2seq" else "arcs"
    tree = described(folder, tmp_path, objective, train={"longest": longest} if longest else {})
    ready = made_ready(read_run(tree | {"data": {"kind": "test-linked"}, "shaping": [{"kind": "guided", "by": by}]}))
    stream = Stream(ready)
    batch = stream.next()
    (links,) = batch.links.values()
    asked = torch.where(batch.wanted >= 0, batch.wanted, batch.inputs.tokens) if objective == "masked" else batch.inputs.tokens
    looking, seen = (batch.wanted, batch.source.tokens) if by == "alignment" else (asked, asked)
    for text, number in enumerate(stream.rows):
        words = [int(word[4:]) for word in ready.corpus.train[number][0].split()]
        pairs = {(word, word) for word in words} if by == "alignment" else set(zip(words, reversed(words), strict=True))
        left = {pair for pair in pairs if pair[0] in looking[text] and pair[1] in seen[text]}
        found = [(int(looking[text, i]), int(seen[text, j])) for row, i, j in links.tolist() if row == text]
        assert sorted(found) == sorted(left), (words, looking[text], seen[text])
    assert len(links)
    score = shaped(ready.run.objective, ready.run.shaping, first_model(ready)[0].eval(), batch).terms["guided"]
    places = ready.run.shaping[0].places(ready.spec)
    visible = [(row, i) for row, i, j in links.tolist() if objective != "causal" or j <= i]
    assert score.count == len(visible) * sum(place.heads for place in places)
    assert torch.isfinite(score.total)
