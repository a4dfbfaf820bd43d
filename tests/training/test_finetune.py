"""Training from a checkpoint: its loss before the first step, new and unused weights, LoRA, and equal bits."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from command import run
from safetensors.torch import load_file, save_file
from small_checkpoints import CASES, make, perturbed
from small_runs import hashes, in_a_process, last_metrics, train_all
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from trivial_losses import mean_of

import manyheads
from manyheads.data.source import Corpus, DataSpec
from manyheads.data.tokenized import write_tokenized
from manyheads.errors import CheckpointError, IncompatibleError, ManyheadsError, OutOfRangeError, RunChangedError
from manyheads.files.read import read_toml
from manyheads.spec import SLOTS, to_toml, to_tree
from manyheads.tasks.auxiliary import loss_with_auxiliary
from manyheads.tasks.retrieval import unit_vectors
from manyheads.training.batches import BatchStream
from manyheads.training.events import Initialized, Step, Truncated
from manyheads.training.loop import train_events, validate
from manyheads.training.lora import lora_layers
from manyheads.training.preparation import initial_model, prepare, prepare_data
from manyheads.training.run import read_run

# the special tokens of each family with their ids, what its tokenizer adds around a text, and fields of its config
SPECIAL = {
    "bert": ({"[PAD]": 0, "[CLS]": 51, "[SEP]": 52, "[MASK]": 53, "[UNK]": 54}, "[CLS] $A [SEP]", {}),
    "gpt2": ({"<|endoftext|>": 60}, "$A", {"bos_token_id": 60, "eos_token_id": 60}),
    "llama": ({"<s>": 57, "</s>": 58}, "<s> $A", {"bos_token_id": 57, "eos_token_id": 58, "pad_token_id": None}),
    "t5": ({"<pad>": 0, "</s>": 1}, "$A </s>", {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}),
    "bart": (
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<mask>": 59},
        "<s> $A </s>",
        {
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
    ),
}
WORDS = [f"word{i}" for i in range(3, 51)]


def saved(name, path, **options):
    """A small random model as transformers saves it, with a tokenizer of whole words."""
    torch.manual_seed(1)
    special, template, config = SPECIAL[name.split("-")[0]]
    model_class, kind, more = CASES[name]
    perturbed(make(model_class, kind, **more | config | options)).save_pretrained(path)
    vocab = {word: int(word[4:]) for word in WORDS} | special
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(special))))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(special.items()))
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 40}))
    return path


@pytest.fixture
def data(tmp_path):
    """Texts with a label that depends on the first word, and pairs whose target is the reversed source."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(120)]
    files = {
        "labels.tsv": [f"{text}\t{'early' if int(text.split()[0][4:]) < 25 else 'late'}" for text in texts],
        "pairs.tsv": [f"{text}\t{' '.join(reversed(text.split()))}" for text in texts],
        "texts.txt": texts,
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    return tmp_path


KINDS = {
    "classify": ("labels", "labels.tsv"),
    "seq2seq": ("pairs", "pairs.tsv"),
    "causal": ("text", "texts.txt"),
    "masked": ("text", "texts.txt"),
}


def described(init_from, data, task, *, train=None, **more):
    kind, file = KINDS[task]
    usual = {"steps": 6, "batch_tokens": 200, "accumulate": 2, "save_every": 2, "eval_every": 3, "eval_rows": 20}
    source = {"kind": kind, "path": str(data / file)} | ({"document": "line"} if kind == "text" else {})
    optim = {"lr": 3e-3, "schedule": {"kind": "cosine", "warmup_steps": 2}}
    tree = {"seed": 5, "data": source, "task": {"kind": task}, "optim": optim, "train": usual | (train or {})} | more
    return tree | ({"init_from": str(init_from)} if init_from else {})


CLASSES = {"head": {"kind": "classes", "classes": "data", "dense": True, "dropout": 0.1}}
LORA = {"rank": 2, "alpha": 6.0}
CASE = {
    "classify": ("bert-bare", {"model": CLASSES}),
    "masked": ("bert", {}),
    "causal": ("llama", {}),
    "seq2seq": ("t5", {}),
    "classify-lora": ("bert-bare", {"model": CLASSES, "lora": LORA | {"dropout": 0.1}}),
    "causal-lora": ("llama", {"lora": LORA | {"target_modules": ["query", "value", "down"]}}),
}


def case(name, tmp_path, data, **train):
    family, more = CASE[name]
    if not (tmp_path / "start").exists():
        saved(family, tmp_path / "start")
    return described(tmp_path / "start", data, name.split("-")[0], train=train, **more)


def prepared(tree):
    return prepare(read_run(tree))


def first_batch(run, count=None):
    """The first training rows, or all of them, as one batch."""
    rows = [run.train_dataset[i] for i in range(len(run.train_dataset) if count is None else count)]
    return run.spec.task.batch(rows, run.special_tokens, np.random.default_rng(0))


def ids_of(checkpoint, texts):
    return [encoding.ids for encoding in checkpoint.encode(texts)]


# ------------------------------------------------------------------------------------------- the loss of the checkpoint


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert-classes", "classify"),
        ("gpt2-classes", "classify"),
        ("bert", "masked"),
        ("gpt2", "causal"),
        ("llama", "causal"),
        ("t5", "seq2seq"),
        ("bart", "seq2seq"),
    ],
)
def test_the_loss_before_the_first_step_is_that_of_transformers(name, task, data, tmp_path):
    """Of the same texts, encoded by the folder's own tokenizer."""
    folder = saved(name, tmp_path / "start", **({"num_labels": 2} if task == "classify" else {}))
    run = prepared(described(folder, data, task))
    model, _ = initial_model(run)
    tokenizer, rows = Tokenizer.from_file(str(folder / "tokenizer.json")), run.corpus.validation[:6]
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    ids = [run.validation_dataset[i] for i in range(len(rows))]
    batch = run.spec.task.batch(ids, run.special_tokens, np.random.default_rng(0))
    theirs = getattr(transformers, CASES[name][0]).from_pretrained(folder)
    read = batch.source or batch.inputs
    if task in ("classify", "seq2seq"):
        unpadded = [row[row != run.special_tokens.pad].tolist() for row in read.tokens]
        assert unpadded == [tokenizer.encode(row[0]).ids for row in rows]
    padding_mask = torch.zeros_like(read.tokens, dtype=torch.bool) if read.padding_mask is None else read.padding_mask
    inputs = {"input_ids": read.tokens, "attention_mask": (~padding_mask).long()}
    labels = batch.targets
    if task == "causal":  # transformers shifts the labels by one
        inputs = {name: torch.cat((value, value[:, -1:]), dim=1) for name, value in inputs.items()}
        labels = torch.cat((torch.full((len(rows), 1), -100), labels), dim=1)
    if task == "seq2seq":
        targets = [torch.tensor(tokenizer.encode(row[1]).ids) for row in rows]
        labels = torch.nn.utils.rnn.pad_sequence(targets, True, -100)
    loss = float(theirs(**inputs, labels=labels).loss)
    assert mean_of(run.spec.task.loss(model.eval(), batch)) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("bert", (0, 51, 52, 53, 0)),
        ("gpt2", (60, 60, 60, -1, 60)),
        ("llama", (58, 57, 58, -1, 57)),
        ("t5", (0, 0, 1, -1, 0)),
        ("bart", (1, 0, 2, 59, 2)),
    ],
)
def test_special_tokens_are_those_of_the_checkpoint(name, ids, data, tmp_path):
    task = {"bert": "masked", "t5": "seq2seq", "bart": "seq2seq"}.get(name, "causal")
    tokens = prepared(described(saved(name, tmp_path / "start"), data, task)).special_tokens
    assert (tokens.pad, tokens.bos, tokens.eos, tokens.mask, tokens.decoder_prompt_ids[0]) == ids
    assert set(SPECIAL[name][0].values()) <= set(tokens.all_ids)


def test_only_ordinary_tokens_replace_others_at_random(data, tmp_path):
    random = {"task": {"kind": "masked", "mlm_probability": 0.9, "mask_replace_prob": 0.0, "random_replace_prob": 1.0}}
    batch = first_batch(prepared(described(saved("bert", tmp_path / "start"), data, "masked") | random))
    replaced = batch.inputs.tokens[batch.targets >= 0]
    assert set(replaced.tolist()) == {int(word[4:]) for word in WORDS}


def test_a_task_that_masks_needs_a_mask_token(data, tmp_path):
    for name, family in (("infill", "gpt2"), ("masked", "bert")):
        folder = saved(family, tmp_path / name)
        if family == "bert":
            vocab = json.loads((folder / "tokenizer.json").read_text().replace("[MASK]", "[OTHER]"))
            (folder / "tokenizer.json").write_text(json.dumps(vocab))
        with pytest.raises(IncompatibleError) as error:
            prepared(described(folder, data, "masked") | {"task": name})
        assert error.value.path == ("tokenizer",)
        assert name in str(error.value)


@pytest.mark.parametrize("name", ["classify", "masked", "causal", "seq2seq", "other order"])
def test_tokenized_rows_train_to_the_same_losses(name, data, tmp_path):
    """Also if the checkpoint has the classes in another order than that of their names."""
    if name == "other order":
        names = {"id2label": {0: "late", 1: "early"}, "label2id": {"late": 0, "early": 1}}
        tree = described(saved("bert-classes", tmp_path / "start", num_labels=2, **names), data, "classify")
    else:
        tree = case(name, tmp_path, data)
    data = prepare_data(read_run(tree))
    write_tokenized(data.corpus, data.tokenizer, tmp_path / "ids", tokenizer_spec=read_run(tree).tokenizer)
    plain = train_all(tree, tmp_path / "plain")
    same = train_all(tree | {"data": {"kind": "tokenized", "path": str(tmp_path / "ids")}}, tmp_path / "same")
    losses, again = ([event.loss for event in events if isinstance(event, Step)] for events in (plain, same))
    assert losses == again
    assert plain[-1] == same[-1]


# ----------------------------------------------------------------------------------------------------- new and unused


def test_new_and_unused_weights_are_named(data, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(case("classify", tmp_path, data)))
    stderr = run("train", path, "--output", tmp_path / "run", "-s", "train.steps=1").stderr
    model, (event,) = initial_model(prepared(read_toml(path)))
    start = manyheads.load(tmp_path / "start").model
    weights = dict(model.named_parameters())
    assert event.missing_keys == ("head.dense.weight", "head.dense.bias", "head.output.weight", "head.output.bias")
    assert set(event.unexpected_keys) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert all(name in stderr for name in (*event.missing_keys, *event.unexpected_keys))
    assert all(torch.equal(weights[name], tensor) for name, tensor in start.named_parameters())
    assert event.loaded == len(dict(start.named_parameters())) == len(weights) - 4


def test_a_head_for_another_number_of_classes_is_new_and_another_shape_elsewhere_is_refused(data, tmp_path):
    folder = saved("bert-classes", tmp_path / "start")  # three classes
    run = prepared(described(folder, data, "classify", model={"head": {"classes": "data"}}))
    _, (event,) = initial_model(run)
    assert event.missing_keys == event.unexpected_keys == ("head.output.weight", "head.output.bias")
    assert run.model_spec.head.classes == 2
    with pytest.raises(IncompatibleError) as error:
        prepared(described(folder, data, "classify"))
    assert error.value.path == ("model", "head", "classes")
    wider = {"head": {"classes": "data"}, "encoder": {"feedforward": {"hidden": 50}}}
    with pytest.raises(IncompatibleError) as error:
        initial_model(prepared(described(folder, data, "classify", model=wider)))
    assert "encoder.layers.0.feedforward.down.weight" in str(error.value)
    assert "32 × 48" in str(error.value)
    assert "32 × 50" in str(error.value)


def test_a_model_that_no_weight_fits_is_refused(data, tmp_path):
    folder = saved("bert", tmp_path / "start")
    whole = {"vocab": "tokenizer", "decoder": {"layers": 1, "width": 8, "attention": {"kind": "heads", "heads": 2}}}
    with pytest.raises(IncompatibleError) as error:
        initial_model(prepared(described(folder, data, "causal", model=whole)))
    assert error.value.path == ("init_from",)


def test_a_loaded_run_truncates_texts_as_in_training(data, tmp_path):
    start = saved("bert-classes", tmp_path / "start", num_labels=2)
    train_all(described(start, data, "classify", train={"steps": 1, "max_length": 9}), tmp_path / "run")
    checkpoint = manyheads.load(tmp_path / "run")
    assert len(ids_of(checkpoint, [" ".join(WORDS[:30])])[0]) == 9
    short = [" ".join(WORDS[:5])]
    assert ids_of(checkpoint, short) == ids_of(manyheads.load(start), short)


def test_a_head_for_as_many_other_classes_is_new(data, tmp_path):
    named = {"id2label": {"0": "late", "1": "early"}, "label2id": {"late": 0, "early": 1}}
    start, head = (
        saved("bert-classes", tmp_path / "start", num_labels=2, **named),
        {"head.output.weight", "head.output.bias"},
    )
    _, (same,) = initial_model(prepared(described(start, data, "classify")))
    assert not head & set(same.missing_keys)
    labels = data / "labels.tsv"
    labels.write_text(labels.read_text().replace("early", "first").replace("late", "last"))
    _, (other,) = initial_model(prepared(described(start, data, "classify")))
    assert head <= set(other.missing_keys)
    assert head <= set(other.unexpected_keys)


def test_classes_keep_the_order_of_the_checkpoint(data, tmp_path):
    names = {"id2label": {0: "late", 1: "early"}, "label2id": {"late": 0, "early": 1}}
    folder = saved("bert-classes", tmp_path / "start", num_labels=2, **names)
    assert prepared(described(folder, data, "classify")).labels == ("late", "early")


def test_a_task_whose_head_is_missing_is_refused(data, tmp_path):
    folder = saved("bert-bare", tmp_path / "start")
    for task in ("masked", "classify"):
        with pytest.raises(IncompatibleError) as error:
            prepared(described(folder, data, task))
        assert error.value.path == ("model", "head")
        assert "'none'" in str(error.value)


@pytest.mark.parametrize("name", CASE)
def test_a_run_with_a_checkpoint_is_read_without_it_and_goes_to_a_file_and_back(name, data, tmp_path):
    tree = case(name, tmp_path, data)
    shutil.rmtree(tmp_path / "start")
    (data / KINDS[name.split("-")[0]][1]).unlink()
    spec = read_run(tree)
    assert read_run(json.loads(json.dumps(to_tree(spec)))) == spec


def test_another_vocabulary_is_refused_with_the_first_difference(data, tmp_path):
    """Claim H6."""
    folder = saved("bert", tmp_path / "start")
    tokenizer, path = json.loads((folder / "tokenizer.json").read_text()), tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    own = {"kind": "file", "path": str(path)}
    assert prepared(described(folder, data, "masked", tokenizer=own)).special_tokens.prefix_suffix_ids == (
        (51,),
        (52,),
    )
    vocab = tokenizer["model"]["vocab"]
    vocab["foo"] = vocab.pop("word17")
    path.write_text(json.dumps(tokenizer))
    for other, values in ((own, ("17", "'word17'", "'foo'")), ("words", ("0", "'[PAD]'", "'<pad>'"))):
        with pytest.raises(IncompatibleError) as error:
            prepared(described(folder, data, "masked", tokenizer=other))
        assert error.value.path == ("tokenizer",)
        assert all(value in str(error.value) for value in values)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(IncompatibleError) as error:
        prepared(described(folder, data, "masked"))
    assert error.value.path == ("tokenizer",)


@pytest.mark.parametrize(("name", "positions"), [("causal", 40), ("seq2seq", None), ("masked", 40)])
def test_long_texts_are_truncated_and_counted(name, positions, data, tmp_path):
    """To train.max_length, and in any case to the model's last position."""
    kind, file = KINDS[name]
    long = "\t".join([" ".join(["word5"] * 60)] * (2 if kind == "pairs" else 1))
    (data / file).write_text(f"{long}\n{(data / file).read_text()}")
    folder = saved({"causal": "gpt2", "seq2seq": "t5", "masked": "bert"}[name], tmp_path / "start")
    for max_length in (None, 7):
        run = prepared(described(folder, data, name, train={"max_length": max_length} if max_length else {}))
        limit = max_length or positions
        assert limit is None or first_batch(run).inputs.length == limit
        model, events = initial_model(run)
        truncated = [event.train_rows for event in events if isinstance(event, Truncated)]
        assert bool(truncated) is (limit is not None)
        validate(model, run)
    with pytest.raises(OutOfRangeError) as error:
        prepared(described(folder, data, name, train={"max_length": 1}))
    assert error.value.path == ("train", "max_length")


def test_targets_are_generated_up_to_the_last_position(data, tmp_path):
    run = prepared(described(saved("bart", tmp_path / "start", max_position_embeddings=6), data, "seq2seq"))
    assert run.num_truncated[0]
    assert validate(initial_model(run)[0], run)["exact_match"] == 0


def test_frozen_weights_do_not_change(data, tmp_path):
    tree = case("classify", tmp_path, data) | {"freeze": ["encoder.embed", "encoder.layers.1"]}
    train_all(tree, tmp_path / "run")
    before, after = (dict(manyheads.load(tmp_path / name).model.named_parameters()) for name in ("start", "run"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("encoder.embed.", "encoder.layers.1."))}
    for frozen, value in ((["encoder.embedding"], "'encoder.embed'"), (["encoder", "head"], "freeze")):
        with pytest.raises(IncompatibleError) as error:
            initial_model(prepared(tree | {"freeze": frozen}))
        assert error.value.path == ("freeze",)
        assert value in str(error.value)


# ------------------------------------------------------------------------------------------------- equal bits, and back


@pytest.mark.parametrize("name", ["classify", "seq2seq", "classify-lora", "causal-lora"])
def test_a_killed_run_ends_in_the_same_bits(name, data, tmp_path):
    tree = case(name, tmp_path, data)
    assert in_a_process(tree, tmp_path / "whole") == 0
    assert in_a_process(tree, tmp_path / "broken", step=len(name) % 5 + 1) == -signal.SIGKILL
    assert in_a_process(tree, tmp_path / "broken") == 0
    assert hashes(tmp_path / "broken") == hashes(tmp_path / "whole")
    if "lora" in tree:
        last = (tmp_path / folder / "checkpoints" / "step-00000006" for folder in ("broken", "whole"))
        one, other = ({str(p.relative_to(end)): p.read_bytes() for p in end.rglob("*") if p.is_file()} for end in last)
        assert one == other
        listed = set(json.loads(one["manifest.json"])["files"])
        assert listed == set(one) - {"manifest.json"}, "every file has its hash, those of the adapter too"


@pytest.mark.parametrize("name", ["classify", "classify-lora"])
def test_a_run_is_not_resumed_if_its_initial_checkpoint_changed(name, data, tmp_path):
    train_all(case(name, tmp_path, data), tmp_path / "run")
    path = tmp_path / "start" / "model.safetensors"
    tensors = load_file(path)
    tensors[min(tensors)].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RunChangedError) as error:
        train_all(case(name, tmp_path, data, steps=8), tmp_path / "run")
    assert [change.field for change in error.value.changes] == ["init_from"]
    assert str(tmp_path / "start") in str(error.value)


@pytest.mark.parametrize("name", CASE)
def test_a_run_is_exported_to_the_family_it_came_from(name, data, tmp_path):
    task = name.split("-")[0]
    train_all(case(name, tmp_path, data), tmp_path / "run")
    checkpoint = manyheads.load(tmp_path / "run")
    manyheads.export(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == CASE[name][0].split("-")[0]
    before, after = (
        [json.loads((tmp_path / folder / file).read_text()) for file in ("tokenizer_config.json", "tokenizer.json")]
        for folder in ("start", "out")
    )
    if task == "classify":  # as it was, but for the truncation
        assert after[1]["truncation"]["max_length"] == checkpoint.max_positions
        after[1]["truncation"] = None
    assert after == before
    heads = {"classify": "SequenceClassification", "masked": "MaskedLM", "causal": "CausalLM", "seq2seq": "Seq2SeqLM"}
    theirs = getattr(transformers, f"AutoModelFor{heads[task]}").from_pretrained(tmp_path / "out")
    ids = torch.tensor(ids_of(checkpoint, [" ".join(WORDS[:5])]))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if task == "seq2seq" else {})
    ours = checkpoint.logits(ids, ids[:, :3]) if task == "seq2seq" else checkpoint.logits(ids)
    torch.testing.assert_close(theirs(**inputs).logits.detach(), ours, atol=1e-5, rtol=0)
    if task == "classify":
        assert config["id2label"] == {"0": "early", "1": "late"}
        classes = manyheads.predict(checkpoint, "word4 word30")["classes"]
        assert {row["class"] for row in classes} == {"early", "late"}


def test_a_run_can_start_from_another_run_and_keeps_its_tokenizer(data, tmp_path):
    """Pretrained on texts, then trained for classes; to a tokenizer of ours, each task adds its own special tokens."""
    stack = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "rope"}
    model = {"vocab": "tokenizer", "head": "masked", "encoder": stack}
    train_all(described(None, data, "masked", tokenizer="words", model=model), tmp_path / "first")
    head = {"head": {"kind": "classes", "classes": "data"}}
    events = train_all(described(tmp_path / "first", data, "classify", model=head), tmp_path / "second")
    assert isinstance(events[1], Initialized)
    assert all(name.startswith("head.") for name in (*events[1].missing_keys, *events[1].unexpected_keys))
    tokenizer = manyheads.load(tmp_path / "second").tokenizer
    ids = tokenizer.encode("word5", add_special_tokens=False).ids
    assert tokenizer.encode("word5").ids == [1, *ids, 2]
    _, (third,) = initial_model(prepared(described(tmp_path / "second", data, "classify")))
    assert third.missing_keys == ()


def test_special_tokens_around_a_text_are_kept_through_two_runs(data, tmp_path):
    """The second starts from the first, which started from a folder of transformers."""
    train_all(case("masked", tmp_path, data), tmp_path / "first")
    run = prepared(described(tmp_path / "first", data, "classify", model=CLASSES))
    assert run.special_tokens.prefix_suffix_ids == ((51,), (52,))
    list(train_events(run, tmp_path / "second"))
    manyheads.export(tmp_path / "second", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]


def test_training_lowers_the_loss_of_the_checkpoint(data, tmp_path):
    run = prepared(case("classify", tmp_path, data, steps=40, eval_every=40, save_every=40))
    untrained = validate(initial_model(run)[0], run)["loss"]
    assert last_metrics(train_events(run, tmp_path / "run"))["loss"] < untrained


def test_an_event_says_what_was_loaded_and_steps_are_counted_from_1(data, tmp_path):
    events = train_all(case("seq2seq", tmp_path, data), tmp_path / "run")
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3, 4, 5, 6]
    assert events[1] == Initialized(0, events[1].loaded, (), ())


# ----------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("name", ["classify-lora", "causal-lora"])
def test_lora_changes_nothing_at_first_and_then_only_its_target_modules(name, data, tmp_path):
    tree = case(name, tmp_path, data)
    run = prepared(tree)
    model, _ = initial_model(run)
    plain, (event,) = initial_model(prepared({key: value for key, value in tree.items() if key != "lora"}))
    batch = first_batch(run, 8)
    assert torch.equal(model.eval()(batch.inputs), plain.eval()(batch.inputs))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not name.endswith((".lora_A.weight", ".lora_B.weight"))} == set(
        event.missing_keys
    )
    list(train_events(run, tmp_path / "run"))
    after = dict(manyheads.load(tmp_path / "run").model.named_parameters())
    changed = {name for name, tensor in plain.named_parameters() if not torch.equal(tensor, after[name])}
    targets = tuple(f".{module}.weight" for module in run.spec.lora.target_modules)
    assert changed == {name for name in after if name in event.missing_keys or name.endswith(targets)}


@pytest.mark.parametrize("name", ["classify-lora", "causal-lora"])
def test_peft_opens_the_adapter_and_gives_our_logits(name, data, tmp_path):
    from peft import PeftModel  # seconds, which every worker would spend on collecting this file

    train_all(case(name, tmp_path, data), tmp_path / "run")
    head = "CausalLM" if name == "causal-lora" else "SequenceClassification"
    transformers.utils.logging.set_verbosity_error()  # a new head is intended here
    base = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path / "start")
    transformers.utils.logging.set_verbosity_warning()
    theirs = PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoints" / "step-00000006" / "adapter").eval()
    checkpoint = manyheads.load(tmp_path / "run")
    ids = torch.tensor(ids_of(checkpoint, [" ".join(WORDS[3:9])]))
    torch.testing.assert_close(theirs(input_ids=ids).logits.detach(), checkpoint.logits(ids), atol=1e-5, rtol=0)
    with theirs.disable_adapter():
        assert not torch.allclose(theirs(input_ids=ids).logits, checkpoint.logits(ids), atol=1e-3)


def test_an_adapter_that_peft_cannot_open_has_a_note_and_our_names(data, tmp_path):
    """GPT-2 stores query, key and value as one transposed matrix; no family has a mean-pooled head."""
    events = train_all(described(saved("gpt2", tmp_path / "start"), data, "causal", lora=LORA), tmp_path / "run")
    assert "decoder.layers.0.attention.query" in events[1].notes[0]
    path = tmp_path / "run" / "checkpoints" / "step-00000006" / "adapter" / "adapter_model.safetensors"
    assert "base_model.model.decoder.layers.0.attention.query.lora_A.weight" in load_file(path)
    mean = {"head": {"kind": "classes", "classes": "data", "pool": "mean"}}
    tree = described(saved("bert-bare", tmp_path / "other"), data, "classify", lora=LORA, model=mean)
    _, (event,) = initial_model(prepared(tree))
    assert "PEFT" in event.notes[0]
    assert "head" in event.notes[0]


def test_lora_needs_a_checkpoint_and_modules_that_exist(data, tmp_path):
    tree = case("causal-lora", tmp_path, data)
    with pytest.raises(ManyheadsError) as error:
        initial_model(prepared(tree | {"lora": {"target_modules": ["q_proj"]}}))
    assert error.value.path == ("lora", "target_modules")
    assert "'q_proj'" in str(error.value)
    alone = {key: value for key, value in tree.items() if key != "init_from"}
    with pytest.raises(IncompatibleError) as error:
        read_run(alone | {"model": {"vocab": "tokenizer", "decoder": {"layers": 1}}})
    assert error.value.path == ("lora",)
    assert "init_from" in str(error.value)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_lora_drops_the_given_share_of_its_inputs(rate, data, tmp_path):
    """Before A, only in training; what is left is scaled by 1 / (1 − p)."""
    lora = {"rank": 2, "alpha": 6.0, "dropout": rate}
    model, _ = initial_model(prepared(described(saved("llama", tmp_path / "start"), data, "causal", lora=lora)))
    layers = list(lora_layers(model).values())
    assert layers
    for layer in layers:
        inputs = []
        layer.lora_A.register_forward_hook(lambda _, args, output, inputs=inputs: inputs.append(args[0]))
        x = torch.ones(2, 2000, layer.lora_A.in_features)
        torch.manual_seed(0)
        layer.train()(x)
        layer.eval()(x)
        dropped, whole = inputs
        assert torch.equal(whole, x)
        assert float((dropped == 0).float().mean()) == pytest.approx(rate, abs=0.01)
        assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / (1 - rate)))


@pytest.mark.parametrize("kind", SLOTS["optim"].kinds)
def test_lora_trains_with_every_optimizer(kind, data, tmp_path):
    """Even if only matrices are trained, so that nothing is left for the AdamW inside Muon."""
    run = prepared(case("causal-lora", tmp_path, data) | {"optim": {"kind": kind, "lr": 1e-2}})
    model, _ = initial_model(run)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = run.spec.optim.build(model).param_groups
    assert sorted(names[weight] for group in groups for weight in group["params"]) == sorted(names.values())
    list(train_events(run, tmp_path / "run"))
    before, after = (dict(manyheads.load(tmp_path / name).model.named_parameters()) for name in ("start", "run"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


# ---------------------------------------------------------------------------------------------------- vectors of texts


def pooling(folder, *modes, normalize=False):
    """The files by which sentence-transformers defines the pooling."""
    names = ["Transformer", "Pooling", *["Normalize"] * normalize]
    steps = [
        {"idx": i, "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{mode}": mode in modes for mode in ("mean_tokens", "cls_token", "lasttoken", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | flags))


def without_special_tokens(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))


FOLDERS = {
    "plain": lambda folder: None,
    "first token": lambda folder: pooling(folder, "cls_token"),
    "last token": lambda folder: pooling(folder, "lasttoken", normalize=True),
    "mean": lambda folder: pooling(folder, "mean_tokens", normalize=True),
    "no special tokens": without_special_tokens,
    "first token, no special tokens": lambda folder: [pooling(folder, "cls_token"), without_special_tokens(folder)],
}


def retrieval(data, **more):
    source = {"kind": "queries", "path": str(data / "pairs.tsv")}
    train = {"steps": 2, "batch_tokens": 200, "eval_rows": 8}
    return {"seed": 5, "data": source, "task": "retrieval", "optim": {"lr": 1e-2}, "train": train} | more


@torch.no_grad()
def assert_trains_what_embed_gives(run, checkpoint):
    texts = [row[0] for row in run.corpus.train[:5]]
    batch = first_batch(run, 5)
    embedded = torch.nn.functional.normalize(checkpoint.embed(texts), dim=-1)
    torch.testing.assert_close(unit_vectors(checkpoint.model, batch.inputs, batch.pool), embedded, atol=1e-6, rtol=0)
    assert batch.inputs.tokens.shape[1] == max(map(len, ids_of(checkpoint, texts)))


@pytest.mark.parametrize("more", [{}, {"lora": LORA}], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_retrieval_trains_the_vectors_that_embed_gives(kind, more, data, tmp_path):
    """Those of the initial checkpoint, of the run, and of another run that starts from it."""
    FOLDERS[kind](saved("bert-bare", tmp_path / "start"))
    for name in ("start", "first"):
        run = prepared(retrieval(data, init_from=str(tmp_path / name), **more))
        assert_trains_what_embed_gives(run, manyheads.load(tmp_path / name))
        if name == "start":
            list(train_events(run, tmp_path / "first"))
            assert_trains_what_embed_gives(run, manyheads.load(tmp_path / "first"))


@pytest.mark.parametrize(
    "head",
    ["none", "vector", {"kind": "vector", "pool": "mean", "normalize": True}, {"kind": "vector", "pool": "last"}],
)
def test_retrieval_without_a_checkpoint_trains_the_vectors_that_embed_gives(head, data, tmp_path):
    stack = {"layers": 1, "width": 16, "attention": {"kind": "heads", "heads": 2}, "position": "rope"}
    run = prepared(retrieval(data, model={"vocab": "tokenizer", "encoder": stack, "head": head}))
    list(train_events(run, tmp_path / "run"))
    assert_trains_what_embed_gives(run, manyheads.load(tmp_path / "run"))


def test_retrieval_refuses_a_pooling_that_it_cannot_express(data, tmp_path):
    folder = saved("bert-bare", tmp_path / "start")
    pooling(folder, "max_tokens")
    with pytest.raises(CheckpointError) as error:
        prepared(retrieval(data, init_from=str(folder)))
    assert "pooling_mode_max_tokens" in str(error.value)
    prepared(described(folder, data, "classify", model=CLASSES))  # which needs no pooling of the checkpoint's
    shutil.rmtree(folder / "1_Pooling")
    pooling(folder, "cls_token")
    with pytest.raises(IncompatibleError) as error:
        prepared(retrieval(data, init_from=str(folder), model={"head": {"kind": "vector", "pool": "mean"}}))
    assert error.value.path == ("model", "head")


# ----------------------------------------------------------------------------------------------------- guided attention


class LinkedSpec(DataSpec, kind="test-linked"):
    """Texts of different words; the head of each word is the one opposite, and the target is the text reversed"""

    def load(self):
        def row(i):
            words = np.random.default_rng(i).choice(WORDS, 3 + i % 6, replace=False).tolist()
            last = len(words) - 1
            heads = tuple(last - j if last != 2 * j else -1 for j in range(len(words)))
            links = " ".join(f"{j}-{last - j}" for j in range(len(words)))
            return " ".join(words), "odd" if i % 2 else "even", heads, " ".join(words), " ".join(reversed(words)), links

        rows, fields = [row(i) for i in range(60)], ("text", "label", "arcs", "source", "target", "alignment")
        return Corpus(fields, rows[10:], rows[:10], [], "words and their opposites")


@pytest.mark.parametrize("max_length", [None, 6])
@pytest.mark.parametrize(
    ("model", "template", "task"),
    [
        *(("bart", template, "seq2seq") for template in SPECIAL),
        *(("bert", template, "masked") for template in SPECIAL),
        *(("gpt2", template, "causal") for template in SPECIAL),
        *(("bert-classes", template, "classify") for template in SPECIAL),
    ],
)
def test_links_connect_the_right_words_whatever_special_tokens_a_text_has(model, template, task, max_length, tmp_path):
    """And of a truncated text, only those of the words that are left."""
    folder = saved(model, tmp_path / "start", **({"num_labels": 2} if task == "classify" else {}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before, after = SPECIAL[template][1].split("$A")
    special = next(iter(SPECIAL[model.split("-")[0]][0].items()))
    single = " ".join([*(special[0] for _ in before.split()), "$A", *(special[0] for _ in after.split())])
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[special])
    tokenizer.save(str(folder / "tokenizer.json"))
    by = "alignment" if task == "seq2seq" else "arcs"
    tree = described(folder, tmp_path, task, train={"max_length": max_length} if max_length else {})
    run = prepared(tree | {"data": {"kind": "test-linked"}, "auxiliary_losses": [{"kind": "guided", "by": by}]})
    stream = BatchStream(run)
    batch = stream.next()
    (links,) = batch.attention_targets.values()
    tokens = batch.inputs.tokens
    tokens = torch.where(batch.targets >= 0, batch.targets, tokens) if task == "masked" else tokens
    queries, keys = (batch.targets, batch.source.tokens) if by == "alignment" else (tokens, tokens)
    for text, number in enumerate(stream.row_indices):
        words = [int(word[4:]) for word in run.corpus.train[number][0].split()]
        pairs = {(word, word) for word in words} if by == "alignment" else set(zip(words, reversed(words), strict=True))
        expected = {pair for pair in pairs if pair[0] in queries[text] and pair[1] in keys[text]}
        found = [(int(queries[text, i]), int(keys[text, j])) for row, i, j in links.tolist() if row == text]
        assert sorted(found) == sorted(expected), (words, queries[text], keys[text])
    assert len(links)
    model = initial_model(run)[0].eval()
    term = loss_with_auxiliary(run.spec.task, run.spec.auxiliary_losses, model, batch).auxiliary_losses["guided"]
    visible = [(row, i) for row, i, j in links.tolist() if task != "causal" or j <= i]
    assert term.count == len(visible) * sum(
        layer.heads for layer in run.spec.auxiliary_losses[0].select_layers(run.model_spec)
    )
    assert torch.isfinite(term.sum)
