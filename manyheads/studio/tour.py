"""The guided tour: worked examples as steps, each with a state of the page, tables, and facts of the open model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import ManyheadsError, UsageError
from manyheads.model.recording import Tape
from manyheads.spec import Tree, quote
from manyheads.studio import forward
from manyheads.studio.model import CHECKPOINT
from manyheads.studio.session import MAX_BYTES, Sessions
from manyheads.studio.tour_tables import (
    ORDER,
    PREFER,
    alignment_tables,
    big_tables,
    cross_tables,
    mask_tables,
    order_tables,
    pointer_tables,
    relation_tables,
)

BIG_TEXT, DOG, SECOND_BIG = "the big dog and the big cat", 2, 5  # words, from 0
RUN_TEXTS = ("I run a small business", "I went for a run")
ROUNDING = 1e-4  # of the largest value: below it, two vectors of a model are equal


@dataclass(frozen=True)
class Fact:
    """A sentence with numbers; `holds` is None for one that only describes the open model."""

    text: str
    holds: bool | None = None


def no_state(checkpoint: Checkpoint) -> dict[str, str]:
    return {}


def no_facts(checkpoint: Checkpoint) -> list[Fact]:
    return []


@dataclass(frozen=True)
class Step:
    """One example: tables that need no model, and a state and facts of the open model.

    The open model reads `texts`. If it cannot, only the tables are shown; a step without tables is skipped.
    """

    key: str
    title: str
    text: str  # true for every model
    texts: tuple[str, ...] = ()
    guide: str = ""  # after the text, what to see in the open model, if it can show the step
    needs_transformer: bool = False
    needs_single_stack: bool = False  # of a transformer: an encoder or a decoder, not both
    state: Callable[[Checkpoint], dict[str, str]] = no_state
    tables: Callable[[], list[Tree]] | None = None
    facts: Callable[[Checkpoint], list[Fact]] = no_facts

    def to_tree(self, checkpoint: Checkpoint) -> Tree:
        reason = refusal(self, checkpoint)
        return {
            "key": self.key,
            "title": self.title,
            "text": self.text if reason else f"{self.text} {self.guide}".strip(),
            "refusal": reason,
            "skipped": reason is not None and self.tables is None,
            "state": {} if reason else self.state(checkpoint),
        }

    def numbers(self, checkpoint: Checkpoint) -> Tree:
        facts = [] if refusal(self, checkpoint) else self.facts(checkpoint)
        return {"tables": self.tables() if self.tables else [], "facts": [asdict(fact) for fact in facts]}


def router(sessions: Sessions) -> APIRouter:
    """The addresses below /api/tour; the tour shows the first checkpoint."""
    routes = APIRouter(prefix="/tour")

    @routes.get("/steps")
    def steps(session: Annotated[str, Query(max_length=64)]) -> Tree:
        _ = sessions[session]
        return {"steps": [step.to_tree(sessions.checkpoints[0]) for step in STEPS]}

    @routes.get("/numbers")
    def numbers(session: Annotated[str, Query(max_length=64)], step: Annotated[str, Query(max_length=64)]) -> Tree:
        _ = sessions[session]
        matching_steps = [candidate for candidate in STEPS if candidate.key == step]
        if not matching_steps:
            raise UsageError(f"no step {quote(step)}")
        with sessions.lock:
            return matching_steps[0].numbers(sessions.checkpoints[0])

    return routes


def refusal(step: Step, checkpoint: Checkpoint) -> str | None:
    """Why the open model cannot show a step."""
    reads_one_text = step.needs_single_stack or step.texts
    if reads_one_text and checkpoint.has_source:
        return "the open model reads a source and a target, and this step needs one text"
    if reads_one_text and forward.reads_images(checkpoint):
        return "the open model reads images"
    if (step.needs_transformer or step.needs_single_stack) and not checkpoint.model.stacks:
        return "the open model is no transformer"
    if step.texts and checkpoint.tokenizer is None:
        return "the open checkpoint has no tokenizer"
    return next(filter(None, (text_refusal(checkpoint, text) for text in step.texts)), None)


def text_refusal(checkpoint: Checkpoint, text: str) -> str | None:
    """Why a tokenizer cannot read a text word by word."""
    try:
        read = forward.encode_text(checkpoint, text)
    except ManyheadsError as error:
        return error.message
    unknown = getattr(checkpoint.tokenizer.model, "unk_token", None)
    if unknown is not None and checkpoint.tokenizer.token_to_id(unknown) in read.ids:
        return f"its tokenizer does not know every word of {quote(text)}"
    if len(word_tokens(read)) != len(text.split()):
        return f"its tokenizer does not split {quote(text)} at the spaces"
    return None


# ------------------------------------------------------------------------------------------------------ the open model


def word_tokens(text: forward.Text) -> list[list[int]]:
    """The positions of the tokens of each word, without special tokens."""
    groups: dict[int, list[int]] = {}
    for index, (word, special) in enumerate(zip(text.words, text.special, strict=True)):
        if not special:
            groups.setdefault(word, []).append(index)
    return list(groups.values())


def run_text(checkpoint: Checkpoint, text: str) -> tuple[forward.Text, Tape, Tensor]:
    texts = forward.read(checkpoint, forward.ForwardRequest(text))
    tape, states = forward.forward(checkpoint, texts, (), MAX_BYTES)
    return texts["text"], tape, states[0].float()


def cell_state(checkpoint: Checkpoint, text: str, query: int, key: int, layer: int = 0) -> dict[str, str]:
    """The state of the tab Look at the cell of two words in one layer."""
    groups = word_tokens(forward.encode_text(checkpoint, text))
    stack = "decoder" if checkpoint.spec.decoder is not None else "encoder"
    cell = {"row": str(groups[query][-1]), "column": str(groups[key][-1])}
    return {"tab": "look", "text": text, "attention": f"{stack}.layers.{layer}.attention", "head": "0"} | cell


def comparison_state(first: str, second: str) -> dict[str, str]:
    return {"tab": "look", "text": first, "compare": "text", "text2": second}


def strongest(tape: Tape, query: int, key: int) -> tuple[float, str]:
    """The largest weight of any head from one token to another, and where it is."""
    candidates = []
    for name in tape.names():
        weights = tape.weights(name)[0, :, query, key]
        candidates.append((float(weights.max()), f"{name}, head {int(weights.argmax())}"))
    return max(candidates)


def order_facts(checkpoint: Checkpoint) -> list[Fact]:
    """Compares the vectors of the same word in two texts that have the same words in another order."""
    (first, _, a), (second, _, b) = (run_text(checkpoint, text) for text in ORDER)
    partner = (0, 4, 2, 3, 1)  # the word of the second text for each of the first
    pairs = zip(word_tokens(first), (word_tokens(second)[i] for i in partner), strict=True)
    rows = [(i, j) for left, right in pairs for i, j in zip(left, right, strict=True)]
    if [first.ids[i] for i, _ in rows] != [second.ids[j] for _, j in rows]:
        return [Fact("This tokenizer gives a word other tokens at another place.")]
    difference = float((a[[i for i, _ in rows]] - b[[j for _, j in rows]]).abs().max())
    is_blind = difference <= ROUNDING * float(a.abs().max())
    stack = checkpoint.spec.decoder or checkpoint.spec.encoder
    assert stack is not None
    sees = [f"positions ({stack.position.kind})"] if stack.position.mechanism != "none" else []
    sees += ["a mask that depends on the order"] if stack.mask.causal or stack.mask.window else []
    reason = f"It has {' and '.join(sees)}" if sees else "It has neither positions nor a mask"
    verdict = "it cannot tell the two texts apart" if is_blind else "it can tell them apart"
    return [
        Fact(f"The last vectors of the same words differ by at most {difference:.2g}: {verdict}."),
        Fact(f"{reason}.", is_blind is not bool(sees)),
    ]


def big_facts(checkpoint: Checkpoint) -> list[Fact]:
    text, tape, _ = run_text(checkpoint, BIG_TEXT)
    groups = word_tokens(text)
    query, first, second = groups[DOG][-1], groups[1][-1], groups[SECOND_BIG][-1]
    attention = tape[0]
    weights = attention.weights()[0, :, query]
    to_first, to_second = weights[:, first].tolist(), weights[:, second].tolist()
    pairs = list(enumerate(zip(to_first, to_second, strict=True)))
    facts = [Fact(f"Head {head} of layer 0: {a:.4f} and {b:.4f}.") for head, (a, b) in pairs[:4]]
    visible = attention.visible()
    if visible is not None and not visible[0, 0, query, second]:
        return [
            *facts,
            Fact("The mask hides the second “big” from “dog”: exactly 0.", to_second == [0.0] * len(to_second)),
        ]
    alike = float((weights[:, first] - weights[:, second]).abs().max()) <= ROUNDING
    return [*facts, Fact("The weights are equal." if alike else "The weights differ: this model has positions.")]


def run_facts(checkpoint: Checkpoint) -> list[Fact]:
    facts = []
    for text in RUN_TEXTS:
        words, (read, tape, _) = text.split(), run_text(checkpoint, text)
        groups, at = word_tokens(read), text.split().index("run")
        weight, where = strongest(tape, groups[at][-1], groups[at - 1][-1])
        facts.append(Fact(f"“{text}”: the largest weight from “run” to “{words[at - 1]}” is {weight:.3f} ({where})."))
    return facts


def prefer_facts(checkpoint: Checkpoint) -> list[Fact]:
    read, tape, _ = run_text(checkpoint, PREFER)
    groups, words, visible = word_tokens(read), PREFER.split(), tape[0].visible()
    facts = []
    for query, key in ((1, 4), (4, 1)):
        row, column = groups[query][-1], groups[key][-1]
        weight, where = strongest(tape, row, column)
        is_hidden = visible is not None and not visible[0, 0, row, column]
        reason = "0: the mask hides it" if is_hidden else f"{weight:.3f} ({where})"
        facts.append(Fact(f"The largest weight from “{words[query]}” to “{words[key]}” is {reason}."))
    return facts


def cross_state(checkpoint: Checkpoint) -> dict[str, str]:
    has_cross = checkpoint.has_source and checkpoint.model.stacks
    if not has_cross or forward.reads_images(checkpoint):
        return {}
    return {"tab": "look", "attention": f"decoder.layers.{checkpoint.spec.decoder.layers - 1}.cross"}  # type: ignore[union-attr]


def cross_facts(checkpoint: Checkpoint) -> list[Fact]:
    if cross_state(checkpoint):
        return [Fact("The open model has cross-attention: its matrix of the text above is shown below.")]
    return [Fact("The open model has no cross-attention to show; the table is computed from random vectors.")]


# --------------------------------------------------------------------------------------------------------------- steps


def fixed(**state: str) -> Callable[[Checkpoint], dict[str, str]]:
    return lambda checkpoint: state


STEPS: Sequence[Step] = (
    Step(
        "order",
        "Does the model see the order of words?",
        "Both texts have the same five words; only “man” and “dog” change places. Without positions and a mask, "
        "attention gives each word the same row again, in another order.",
        ORDER,
        guide="Compare the two matrices below.",
        state=fixed(**comparison_state(*ORDER)),
        tables=order_tables,
        facts=order_facts,
    ),
    Step(
        "big",
        "Two equal words",
        "“big” stands before and after “dog”. Without positions both are the same vector, so “dog” must give them the "
        "same weight; a causal mask hides the later one, and its weight is exactly 0.",
        (BIG_TEXT,),
        state=lambda checkpoint: cell_state(checkpoint, BIG_TEXT, DOG, SECOND_BIG),
        tables=big_tables,
        facts=big_facts,
    ),
    Step(
        "mask",
        "Why a mask comes before the softmax",
        "Three weights that the mask should hide are set to 0 in two ways. After the softmax, rows no longer sum to 1; "
        "before it, the softmax shares the whole weight among the keys that are left.",
        tables=mask_tables,
    ),
    Step(
        "run",
        "One word, two meanings",
        "“run” is a verb in one text and a noun in the other, and the word before it tells which.",
        RUN_TEXTS,
        guide="Look for a head that attends from “run” to the word before it in both.",
        state=lambda checkpoint: cell_state(checkpoint, RUN_TEXTS[0], 1, 0) | comparison_state(*RUN_TEXTS),
        facts=run_facts,
    ),
    Step(
        "cross",
        "Source and target of different lengths",
        "“drive safe” is the translation of “conduis prudemment toi”. Cross-attention has a row for each target word "
        "and a column for each source word, so the matrix is not square, and each row sums to 1.",
        state=cross_state,
        tables=cross_tables,
        facts=cross_facts,
    ),
    Step(
        "alignment",
        "Attention as an alignment of words",
        "Turkish puts the verb last: “kediler fareleri kovalar” is “cats mice chase”. The highest weight of each row "
        "gives the order of the source words: 0, 2, 1.",
        tables=alignment_tables,
    ),
    Step(
        "relation",
        "A head as a grammatical relation",
        "In “I prefer the morning flight” the direct object of “prefer” is “flight”. A head that finds it would have "
        "weight 1 there; the tables show such targets.",
        (PREFER,),
        guide="The numbers show how close a head of the open model comes.",
        state=lambda checkpoint: cell_state(checkpoint, PREFER, 4, 1),
        tables=relation_tables,
        facts=prefer_facts,
    ),
    Step(
        "pointers",
        "How far argmax heads see",
        "A head that takes only its highest weight is a pointer. With k such heads and the residual stream, each layer "
        "multiplies what an output can see by k + 1, so n layers see at most (k + 1)ⁿ tokens.",
        guide="The tab measures the open model.",
        needs_single_stack=True,
        state=fixed(tab="field"),
        tables=pointer_tables,
    ),
    Step(
        "probe",
        "Where does the model know positions?",
        "A linear classifier tries to read the position of a token from each layer. The embeddings tell it only if "
        "positions are added there; a causal mask alone lets later layers count.",
        needs_single_stack=True,
        state=fixed(tab="probe", probe="position"),
    ),
    Step(
        "walk",
        "From the Transformer of 2017 to the open model",
        "A model becomes another one by swapping one part at a time.",
        guide="Press “Next” in the tab Model to see what each step changes in the drawing and in the parameters.",
        needs_transformer=True,
        state=fixed(tab="model", model="transformer-base", to=f"{CHECKPOINT}0", walk="0"),
    ),
)  # fmt: skip
