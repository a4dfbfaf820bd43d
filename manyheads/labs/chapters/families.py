"""Model families that the documents name: their sizes, their positions, and which of them are open."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.checkpoint.exporter import export
from manyheads.checkpoint.loading import load
from manyheads.errors import UnknownPresetError
from manyheads.labs.figures import Bars, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, reported
from manyheads.labs.lab import lab
from manyheads.model.builder import build, build_meta
from manyheads.model.cost import count_parameters
from manyheads.presets import names, read, read_about

# parameters of the published weights, each tensor once
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "distilbert": 66_362_880,
    "albert-base-v2": 11_683_584,
    "pythia-70m": 70_426_624,
    "pythia-410m": 405_334_016,
    "pythia-6.9b": 6_857_302_016,
    "llama-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "gpt-j-6b": 6_050_882_784,
    "phi-2": 2_779_683_840,
    "t5-small": 60_506_624,
    "bart-base": 139_420_416,
}
# round figures of papers: from, to; the last two are sizes of our own
ROUND_PARAMETERS = {
    "transformer-base": (62e6, 66e6),
    "transformer-big": (212e6, 216e6),
    "gpt3-175b": (174e9, 176e9),
    "ernie-2.0-base-en": (109e6, 111e6),
    "rnnsearch": (75e6, 90e6),
    "mae-tiny": (1e5, 1e6),
}
# the position scheme of each family, and the rotated fraction of a head
LEARNED = (
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b", "bert-base", "bert-large"),
    *("roberta-base", "albert-base-v2", "distilbert", "ernie-2.0-base-en"),
)
ROTATED = {
    "llama-7b": 1.0, "llama-2-7b": 1.0, "llama-3-8b": 1.0, "mistral-7b": 1.0, "gpt-j-6b": 0.25, "pythia-70m": 0.25,
    "pythia-410m": 0.25, "pythia-6.9b": 0.25, "phi-2": 0.4,
}  # fmt: skip


@lab("families", rows=("N1",), seconds=(1.5, 1.5), counterexample={"vocab": 50_000},
     try_next=("--vocab 50000", "--vocab 32000"))  # fmt: skip
def published_sizes(*, vocab: Annotated[int, "vocabulary size of every model; 0 for the published one"] = 0) -> Finding:
    """The models of the named families have the published number of parameters, to the last one.

    A model is described by a few numbers: layers, width, heads, vocabulary. They determine the shape of every matrix,
    so the parameters can be counted without any weights. If one part were missing, or had a bias too many, the sum
    would not be the published one. For GPT-2: V·D + T·D + 12 (12D² + 13D) + 2D, with D = 768, is 124,439,808.
    """
    rows, exact, rounded = list[tuple[str, str, int, int]](), 0, 0
    for name in names():
        spec = read(name)
        count = count_parameters(build_meta(spec.replace(vocab=vocab) if vocab and spec.vocab else spec))
        low, high = ROUND_PARAMETERS.get(name, (0.0, 0.0))
        exact += PARAMETERS.get(name) == count
        rounded += low <= count <= high
        rows.append((read_about(name)["title"], spec.architecture, count, PARAMETERS.get(name, round(high))))
    v, t, d = (vocab or 50257), 1024, 768
    formula = v * d + t * d + 12 * (12 * d * d + 13 * d) + 2 * d
    columns = ("model", "architecture", "counted", "published, or at most")
    return Finding(
        (
            equals("models with the published number", exact, len(PARAMETERS)),
            equals("others within the round figure of their paper", rounded, len(ROUND_PARAMETERS)),
            equals("GPT-2 by its formula", formula, PARAMETERS["gpt2"]),
        ),
        (Table("Parameters", columns, rows),),
    )


@lab("families", rows=("N2",), errata=("E1",), counterexample={"gpt2": "sinusoidal"},
     try_next=("--gpt2 sinusoidal", "--gpt2 rope"))  # fmt: skip
def position_schemes(*, gpt2: Annotated[str, "position scheme that GPT-2 is given"] = "learned") -> Finding:
    """Older families learn a vector per position, newer ones rotate queries and keys; GPT-2 and GPT-3 learn theirs too.

    The document says that GPT-2 and GPT-3 use the sinusoids of 2017. They do not: the published weights of GPT-2 have a
    table of 1024 positions of size 768, called wpe, and sinusoids have no weights. Without these 786,432 parameters
    GPT-2 would not have the published number. LLaMA and Mistral rotate whole heads (RoPE); GPT-J, Pythia and Phi a part
    of each.
    """
    rows, right = list[tuple[str, str, str, str]](), 0
    for name in (*LEARNED, *ROTATED):
        spec = read(name, f"decoder.position={gpt2}") if name == "gpt2" and gpt2 != "learned" else read(name)
        stack = spec.encoder or spec.decoder
        assert stack is not None
        fraction = getattr(stack.position, "fraction", None)
        right += (stack.position.kind, fraction) == (("rope", ROTATED[name]) if name in ROTATED else ("learned", None))
        scheme = stack.position.kind + (f", {fraction:.0%} of a head" if fraction else "")
        rows.append((read_about(name)["title"], spec.architecture, scheme, read_about(name)["source"]))
    model = build_meta(read("gpt2", *([f"decoder.position={gpt2}"] if gpt2 != "learned" else [])))
    tables = [tuple(p.shape) for path, p in model.named_parameters() if ".position." in path]
    return Finding(
        (
            equals("models with the scheme of their family", right, len(LEARNED) + len(ROTATED)),
            equals("GPT-2: tables of positions", str(tables), "[(1024, 768)]"),
            equals("GPT-2: parameters", count_parameters(model), PARAMETERS["gpt2"]),
        ),
        (Table("Position schemes", ("model", "architecture", "positions", "source"), rows),),
        correction="GPT-2 and GPT-3 learn their positions, as BERT does; neither uses sinusoids.",
    )


def sizes(name: str) -> tuple[int, int]:
    """The embedding size and the hidden size of a model; of an encoder–decoder, those of its encoder."""
    spec = read(name)
    part: Any = spec.recurrent or spec.encoder or spec.decoder
    return getattr(part.embed, "size", None) or part.width, part.width


@lab("families", rows=("P5",), counterexample={"presets": "albert-base-v2 rnnsearch gpt2"},
     try_next=("--presets 'albert-base-v2 bert-base'", "--presets 'gpt2 llama-7b'"))  # fmt: skip
def embedding_size(*, presets: Annotated[str, "published models, separated by spaces; empty for all"] = "") -> Finding:
    """In most models the embedding size equals the hidden size.

    Then an embedding can be added to the stream of vectors that runs through all layers, and the same table can give
    the logits. Two models here differ. ALBERT has embeddings of 128 and a width of 768, to save parameters of its
    table. The recurrent network of Bahdanau et al. has word vectors of 620 and states of 1000, and a matrix between the
    two.
    """
    preset_names = presets.split() or list(names())
    pairs = {name: sizes(name) for name in preset_names}
    exceptions = [name for name, (embedding, width) in pairs.items() if embedding != width]
    columns = ("model", "embedding size", "hidden size", "equal")
    rows = [(name, *pair, "yes" if pair[0] == pair[1] else "no") for name, pair in pairs.items()]
    equal = len(pairs) - len(exceptions)
    return Finding(
        (
            at_least("share of models with equal sizes", equal / len(pairs), 0.8),
            reported("models", len(pairs)),
            reported("exceptions", ", ".join(exceptions) or "none"),
        ),
        (
            Bars("Embedding and hidden size", "models", {"equal": equal, "different": len(exceptions)}),
            Table("Sizes", columns, rows),
        ),
    )


def has_preset(model: str) -> bool:
    try:
        read(model)
    except UnknownPresetError:
        return False
    return True


def round_trip(seed: int) -> float:
    """The largest difference of the logits of a small GPT-2, exported in its published format and loaded again."""
    small = ("vocab=97", "decoder.layers=2", "decoder.width=32", "decoder.attention.heads=4",
             "decoder.feedforward.hidden=64", "decoder.position.length=16")  # fmt: skip
    model, ids = build(read("gpt2", *small), seed=seed).eval(), torch.randint(0, 97, (2, 9))
    with TemporaryDirectory() as folder, torch.no_grad():
        export(Checkpoint(model), Path(folder) / "gpt2", to="hf")
        return float((load(Path(folder) / "gpt2").model(ids) - model(ids)).abs().max())


@lab("families", rows=("N4",), errata=("E12",), seconds=(1, 1),
     counterexample={"closed": "chatgpt claude gemini gpt-4 gpt2"},
     try_next=("--closed 'gpt-4'", "--closed 'chatgpt claude gemini gpt-4 gpt2'"))  # fmt: skip
def closed_models(
    *,
    closed: Annotated[str, "names of closed models, separated by spaces"] = "chatgpt claude gemini gpt-4",
    seed: int = 0,
) -> Finding:
    """ChatGPT, Claude, Gemini and GPT-4 can only be named: their weights and sizes are not public. GPT-2 is open.

    To build a model its sizes must be known, and to run it its weights. Of closed models neither is public, so there is
    no preset for them and nothing to load. The document lists GPT-2 and GPT-3 as closed too. The weights of GPT-2 are
    public, and files in its format load here. Of GPT-3 the paper gives the sizes, so it can be built and counted, but
    no weights.
    """
    present = [name for name in closed.split() if has_preset(name)]
    models = (*closed.split(), "gpt3-175b", "gpt2")
    answers_by_model = {name: (has_preset(name), name.startswith("gpt2")) for name in models}
    rows = [(name, *("yes" if answer else "no" for answer in answers)) for name, answers in answers_by_model.items()]
    return Finding(
        (
            equals("closed models that can be built here", ", ".join(present) or "none", "none"),
            is_true("GPT-2 can be built", has_preset("gpt2")),
            at_most("GPT-2: difference of the logits after export and load", round_trip(seed), 1e-5),
        ),
        (Table("What is public", ("model", "sizes", "weights"), rows),),
        correction="GPT-2 is open: its weights are public, and they load here. Of GPT-3 the sizes are public.",
    )
