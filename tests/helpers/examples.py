"""The examples of README.md and docs/: their blocks, the files that they name, and how each block is run on little data."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path

import typer
from command import FORKS, run

from manyheads import read_model
from manyheads.cli import console, demo
from manyheads.errors import UnknownKindError
from manyheads.spec import merge_trees, to_toml
from manyheads.training.run import read_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
# the last value of an option counts, so these replace what the example gives
FEWER_ROWS = ("-s", "data.count=200", "-s", "data.validation_count=20")
FEWER = {
    "train": ("-s", "train.steps=3", "-s", "train.eval_rows=4"),
    "compare": ("-s", "train.steps=2", "-s", "train.eval_rows=4", "--seeds", "1", "--jobs", "1"),
    "new": ("--minutes", "0.001"),
    "predict": ("--max-new-tokens", "3"),
    "chat": ("--max-new-tokens", "3"),
    "evaluate": ("--max-rows", "4"),
}


CHAT_TEMPLATE = """{% for message in messages %}<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}<|start|>assistant
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it starts at."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """A block whose first line is a comment with a file name is that file."""
        match = re.match(r"# ([\w-]+\.(toml|py))\b", self.text)
        return match[1] if match else None


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [Block(match[1], match[2], text[: match.start()].count("\n") + 1) for match in FENCE.finditer(text)]


def run_page(page, folder):
    """Runs every block of a page, in order; an `output` block is compared with what the block before it printed."""
    output = ""
    for block in blocks_of(page):
        try:
            if block.language == "sh":
                output = "".join(run_line(line, folder) for line in lines_of(block.text))
            elif block.language == "python":
                output = run_python(block, folder)
            elif block.language == "toml":
                check_toml(block, folder)
            elif block.language == "output":
                check_output(block.text, output)
            else:
                assert block.language in ("text", "json"), f"no example is written in {block.language}"
        except AssertionError as error:
            raise AssertionError(f"{page.name}, line {block.line}: {error}") from None


# ------------------------------------------------------------------------------------------------------ shell commands


def lines_of(text):
    """Each command on a line of its own, without comments."""
    return [line for line in text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]


def run_line(line, folder):
    """Runs a command; what installs, or runs the suite itself, is checked by name."""
    words = shlex.split(line, comments=True)
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets), f"the Makefile has no target {arguments}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"\[([\w,]+)\]", line)
        assert all(name in extras for group in named for name in group.split(",")), f"no extra of {named}"
    elif program == "pytest":
        assert (ROOT / arguments[0]).exists(), f"there is no {arguments[0]}"
    elif program == "manyheads":
        return run_manyheads(arguments, folder)
    else:
        assert program == "source", f"no example runs {program}"
    return ""


def run_manyheads(arguments, folder):
    target = None
    if ">" in arguments:
        target = folder / arguments[arguments.index(">") + 1]
        arguments = arguments[: arguments.index(">")]
    arguments = [existing_step(argument, folder) for argument in arguments]
    is_page = arguments[0] == "look" and not {"--html", "--png", "--terminal"} & {*arguments}  # served until Ctrl-C
    if arguments[0] == "demo" or "onnx" in arguments or is_page:  # a minute each, and tested elsewhere
        check_arguments(arguments, folder)
        return ""
    fewer = (*FEWER.get(arguments[0], ()), *(FEWER_ROWS if reads_generated(arguments, folder) else ()))
    done = run(*arguments, *fewer, cwd=folder, check=None, timeout=240)
    failed = done.returncode not in (0, 1) if arguments[0] == "audit" else done.returncode
    assert not failed, f"manyheads {shlex.join(arguments)}: {done.returncode}\n{done.stderr}"
    if target is not None:
        target.write_text(done.stdout)
    return done.stdout + done.stderr


def check_arguments(arguments, folder):
    """Parses the arguments of a command, which checks that its checkpoint exists, and does not run it."""
    console.load_commands(arguments[0])
    group = typer.main.get_command(console.app)
    try:
        with contextlib.chdir(folder), group.make_context("manyheads", [*arguments]) as context:
            name, command, rest = group.resolve_command(context, [*arguments])
            command.make_context(name, rest, parent=context)
    except Exception as error:
        raise AssertionError(f"manyheads {shlex.join(arguments)}: {console.as_error(error)}") from None


def reads_generated(arguments, folder):
    """Whether the command takes a run file whose data is made by a program, thousands of rows in seconds."""
    files = [folder / argument for argument in arguments if argument.endswith(".toml") and arguments[0] != "new"]
    trees = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    return any(tree.get("data", {}).get("kind") in ("dates", "sequence") for tree in trees)


def existing_step(argument, folder):
    """A checkpoint that the short run has saved, in the place of one that a longer run would have."""
    path = Path(argument)
    saved = sorted((folder / path.parent).glob("step-*")) if re.fullmatch(r"step-\d{8}", path.name) else []
    return str(path.with_name(saved[0].name)) if saved else argument


# --------------------------------------------------------------------------------------------------- files and Python


def check_toml(block, folder):
    """Writes a file, or takes a fragment as a change to the demo's run; both must be valid."""
    tree = tomllib.loads(block.text)
    if block.file_name:
        (folder / block.file_name).write_text(block.text, encoding="utf-8")
    if block.file_name is None:
        read_run(merge_trees(demo.RUN, tree))
    elif "data" in tree:
        with contextlib.suppress(UnknownKindError) if list(folder.glob("*.py")) else contextlib.nullcontext():
            read_run(tree)  # a kind of the page's own parts is known to the commands that name their file
    else:
        read_model({name: value for name, value in tree.items() if name != "about"})


def run_python(block, folder):
    """Writes a file of parts, or executes the block in a process of its own; returns what it prints."""
    if block.file_name:
        (folder / block.file_name).write_text(block.text, encoding="utf-8")
        return ""
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as output:
        process = FORKS.Process(target=execute, args=(block.text, str(folder), output.name))
        process.start()
        process.join(120)
        text = Path(output.name).read_text(encoding="utf-8")
        assert process.exitcode == 0, text
    return text


def execute(code, folder, output):
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["example.py"]
    sys.stdout = sys.stderr = open(output, "w", encoding="utf-8")  # noqa: SIM115
    try:
        exec(compile(code, "example.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()


def check_output(expected, actual):
    """Every line as it is printed; `…` stands for any text, and alone on a line for any number of lines."""
    pattern = "".join(
        r"(.*\n)*?" if line.strip() == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n"
        for line in expected.splitlines()
    )
    text = actual if actual.endswith("\n") else f"{actual}\n"
    assert re.search(f"(^|\n){pattern}", text), f"expected\n{expected}\nand got\n{actual}"


# ------------------------------------------------------------------------------------------- what a user has already


def write_fixtures(folder):
    """The files and checkpoints that the examples take as given, all of them tiny."""
    rng = random.Random(0)
    words = [
        "a",
        "the",
        "film",
        "was",
        "very",
        "good",
        "bad",
        "long",
        "short",
        "and",
        "we",
        "saw",
        "it",
        "again",
        "with",
        "friends",
    ]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(4, 9)))

    def write_rows(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    pairs = [text() for _ in range(200)]
    (folder / "pairs.tsv").write_text("".join(f"{pair}\t{pair.upper()}\n" for pair in pairs))
    (folder / "aligned.tsv").write_text("".join(f"{pair}\t{pair.upper()}\t0-0 1-1\n" for pair in pairs))
    (folder / "german.txt").write_text("\n".join(pairs[:3]) + "\n")
    (folder / "notes.txt").write_text("\n\n".join(pairs) + "\n")
    write_rows("reviews.jsonl", [{"text": pair, "label": rng.choice(["positive", "negative"])} for pair in pairs])
    write_rows("packages.jsonl", [{"text": pair, "label": rng.choice(["web", "games"])} for pair in pairs])
    write_rows("docs.jsonl", [{"id": f"d{i}", "text": pair} for i, pair in enumerate(pairs[:50])])
    write_rows("queries.jsonl", [{"query": pair, "document": pair.upper()} for pair in pairs[:50]])
    write_rows("by-id.jsonl", [{"query": pair, "doc_id": f"d{i}"} for i, pair in enumerate(pairs[:20])])
    trees = ("1\tword1\t_\t_\t_\t_\t2\tnsubj\t_\t_", "2\tword2\t_\t_\t_\t_\t0\troot\t_\t_")
    (folder / "trees.conllu").write_text("\n".join(trees) + "\n")
    (folder / "dates.toml").write_text(to_toml(demo.RUN))
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    tags = [" ".join("VERB" if word in ("was", "saw") else "OTHER" for word in pair.split()) for pair in pairs]
    (folder / "tags.tsv").write_text("".join(f"{pair}\t{other}\n" for pair, other in zip(pairs, tags, strict=True)))


def write_checkpoints(folder):
    """Random Hugging Face folders with a tokenizer, a GGUF file, and a run of the demo."""
    from small_checkpoints import folder_of
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from manyheads import export

    tokenizer = Tokenizer(models.BPE())  # as GGUF files hold them
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    folder_of("llama", make(folder / "model"), tokenizer=False, vocab_size=259)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    shutil.copytree(folder / "model", folder / "instruct")
    (folder / "instruct" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = json.loads((folder / "instruct" / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "instruct" / "config.json").write_text(json.dumps(config))
    folder_of("bert", make(folder / "bert"))
    folder_of("bert-bare", make(folder / "encoder"))
    shutil.copytree(folder / "model", folder / "HuggingFaceTB" / "SmolLM2-135M")
    export(folder / "model", folder / "model.gguf", to="gguf")
    shutil.copy(folder / "model.gguf", folder / "SmolLM2-135M-Instruct.Q4_1.gguf")


def make(path):
    path.mkdir(parents=True)
    return path
