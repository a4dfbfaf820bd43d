"""Tasks, and the shape of model that suits each."""

from __future__ import annotations

from typing import Annotated, Any

from manyheads.errors import UsageError
from manyheads.labs.figures import Table
from manyheads.labs.finding import Finding, equals
from manyheads.labs.lab import lab
from manyheads.tasks.task import TaskSpec
from manyheads.training.suggest import choose_architecture

# the four tasks of the document, and its answers
ANSWERS = {
    "summarise": ("summarise an article", "encoder-decoder"),
    "classify": ("tell the sentiment of a review", "encoder"),
    "retrieval": ("find useful pages", "encoder"),
    "translate": ("translate", "encoder-decoder"),
}


def suggested(kind: str, architecture: str) -> str:
    task: Any = TaskSpec.kinds[kind]
    try:
        return choose_architecture(task, architecture or None)
    except UsageError:
        return f"{architecture} is refused"


@lab("tasks", rows=("O5",), counterexample={"architecture": "decoder"},
     try_next=("--architecture recurrent", "--architecture decoder"))  # fmt: skip
def task_advisor(*, architecture: Annotated[str, "overrides the suggestion for every task"] = "") -> Finding:
    """A task that reads a text needs an encoder; a task that reads one and writes another needs a decoder too.

    To classify a review or to rank pages, a text is read as a whole and one vector is made of it: an encoder is enough,
    and each token may attend to all others. To summarise or to translate, a new text is written while the whole source
    is attended to: an encoder and a decoder. `manyheads new TASK` suggests these, and --architecture overrides it.
    """
    rows = []
    for kind in TaskSpec.kinds:
        task: Any = TaskSpec.kinds[kind]
        others = ", ".join(task.architectures[1:]) or "none"
        rows.append((kind, suggested(kind, architecture), others, task.architecture_reason))
    overridden = suggested("translate", "recurrent")
    return Finding(
        (
            *(equals(name, suggested(kind, architecture), answer) for kind, (name, answer) in ANSWERS.items()),
            equals("translate, overridden with recurrent", overridden, "recurrent"),
        ),
        (Table("Which architecture suits which task", ("task", "suggested", "also possible", "because"), rows),),
    )
