"""What pretraining stores: birth places that a model can answer only if it read them, and what a Synthesizer cannot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from statistics import mean, stdev
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from manyheads.labs.chapters.attention import orthonormal
from manyheads.labs.chapters.attention_matrices import lecture_vectors
from manyheads.labs.figures import Bars, Table
from manyheads.labs.finding import Finding, at_least, at_most, equals, is_true, judging, near, reported
from manyheads.labs.fitting import fit
from manyheads.labs.knowledge.experiment import (
    FULL,
    SMALLEST,
    SYNTHESIZER,
    THREE_SEEDS,
    Experiment,
    PeopleRuns,
    accuracy,
    all_replies,
    right,
)
from manyheads.labs.lab import OnProgress, check_choice, lab, no_progress
from manyheads.labs.plain import head_context
from manyheads.metrics.confidence import mcnemar
from manyheads.parts.core import Core, CoreSpec
from manyheads.parts.mask import Mask
from manyheads.parts.position import Positions

SYNTHESIZER_CORRECTION = (
    "A pretrained Synthesizer is above the model that is not pretrained, but not always below the other one: "
    "with more people and steps it was ahead on one seed (200 people, 1,500 steps: 94 % against 77 %)."
)


@lab("knowledge", rows=("I1", "I2", "I3", "I4"), seconds=(50.0, 340.0), smallest=SMALLEST, full=FULL,
     counterexample={"steps": 0},
     row_counterexamples={"I1": {"baseline": "rarest"}, "I2": {"steps_of_none": SMALLEST["steps"]}},
     try_next=("--steps 300", "--people 160"))  # fmt: skip
def birth_places(
    *,
    runs: PeopleRuns = THREE_SEEDS,
    width: Annotated[int, "width of the model"] = 64,
    layers: Annotated[int, "layers of the model"] = 1,
    fine_tuning: Annotated[int, "steps of fine-tuning"] = 40,
    steps_of_none: Annotated[int, "steps of pretraining of the model that should have none"] = 0,
    baseline: Annotated[str, "majority or rarest: the place that the baseline always answers"] = "majority",
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """A model answers where people were born only if it read about them in pretraining.

    Each model is fine-tuned on questions about one half of the people, and asked about the other half, so that the
    right answer is in no question. One model begins with random weights. Another one first reads biographies of all
    people, with gaps that it fills in: prefix <mask> suffix <mask> content. A third one does so with Synthesizer
    attention, softmax(ReLU(XA + b₁) B + b₂) XV, which compares no tokens. The baseline is the most common birth place.
    """
    check_choice("baseline", baseline, ("majority", "rarest"))
    changes: dict[str, Any] = {"width": width, "layers": layers, "fine_tuning_steps": fine_tuning}
    arms = {
        "not pretrained": runs.run(seed, progress, **changes | {"steps": steps_of_none}),
        "pretrained": runs.run(seed, progress, **changes),
        "Synthesizer, pretrained": runs.run(seed, progress, **changes | {"core": SYNTHESIZER}),
    }
    scores = {name: [accuracy(right(each.validation)) for each in arm] for name, arm in arms.items()}
    none, dot, synthesizer = (right(all_replies(arm, held_out=False)) for arm in arms.values())
    means = {name: mean(values) for name, values in scores.items()}
    common = [reply.place == each.people.majority() for each in arms["pretrained"] for reply in each.validation]
    below = accuracy(dot) - accuracy(synthesizer)
    answers, most_common = constant_answers(arms["pretrained"], baseline)
    shown, counted = (constant_accuracy(arms["pretrained"], each) for each in (answers, most_common))
    deviations = {name: stdev(values) for name, values in scores.items()} if runs.seeds > 1 else {}
    rows = [[name, *(f"{value:.1%}" for value in values), f"{shown:.1%}"] for name, values in scores.items()]
    columns = ["model", *(f"seed {each}" for each in range(seed, seed + runs.seeds)), "majority baseline"]
    return Finding(
        (
            *judging(
                "I1",
                equals("what the baseline always answers", ", ".join(answers), ", ".join(most_common)),
                equals("results with the share of that place beside them",
                       sum(row[-1] == f"{counted:.1%}" for row in rows), len(rows)),
            ),
            *judging(
                "I2",
                at_most("not pretrained: accuracy", means["not pretrained"], 0.1),
                is_true("not pretrained: not above the baseline",
                        sum(none) <= sum(common) or mcnemar(none, common) > 0.01),
            ),
            *judging(
                "I3",
                at_least("pretrained: accuracy", means["pretrained"], 0.1),
                at_most("exact McNemar p, pretrained against not", mcnemar(dot, none), 0.01),
            ),
            *judging(
                "I4",
                at_least("Synthesizer above not pretrained by", accuracy(synthesizer) - accuracy(none), 0),
                at_most("exact McNemar p, Synthesizer against not pretrained", mcnemar(synthesizer, none), 0.01),
                at_least("Synthesizer below the other by", below, 0) if below >= 0 else
                reported("Synthesizer below the other by", below),
            ),
            reported("majority baseline", shown),
            reported("exact McNemar p, Synthesizer against the other", mcnemar(synthesizer, dot)),
            *(reported(f"{name}: standard deviation", value) for name, value in deviations.items()),
        ),
        (
            Bars("Accuracy on people of whom no question was seen", "accuracy", means, deviations,
                 {"majority baseline": shown}),
            Table("Accuracy by seed", columns, rows),
        ),
        correction=SYNTHESIZER_CORRECTION if below < 0 else "",
        corrected=("I4",),
    )  # fmt: skip


def constant_answers(arm: Sequence[Experiment], baseline: str) -> tuple[list[str], list[str]]:
    """For each seed, the place that the baseline always answers; and the most common place, counted by hand."""
    places = [[place for _, place in each.people.train] for each in arm]
    rarest = [min(each, key=each.count) for each in places]
    majority = [each.people.majority() for each in arm]
    return majority if baseline == "majority" else rarest, [max(each, key=each.count) for each in places]


def constant_accuracy(arm: Sequence[Experiment], answers: Sequence[str]) -> float:
    """The accuracy of one answer to every question, a place per seed; as a mean over the seeds."""
    return mean(
        accuracy([r.place == answer for r in each.validation]) for each, answer in zip(arm, answers, strict=True)
    )


@lab("knowledge", errata=("E9",), counterexample={"biographies": 4000},
     try_next=("--questions 1000", "--biographies 2000"))  # fmt: skip
def more_biographies(
    *,
    biographies: Annotated[int, "texts of pretraining, in the assignment"] = 2937,
    questions: Annotated[int, "questions of fine-tuning, in the assignment"] = 2000,
) -> Finding:
    """68 % is the share of questions per biography; the biographies are 47 % more.

    An answer in the document explains the success of pretraining by a dataset that is "bigger (68 %)". The assignment
    has 2,937 biographies and 2,000 questions. A share of x and an excess of x are not the same: n = (1 + x) m against
    m = x n.
    """
    share, excess = questions / biographies, biographies / questions - 1
    return Finding(
        (
            near("questions per biography", share, 0.68, 0.005),
            near("biographies beyond the questions", excess, 0.47, 0.005),
            is_true("the excess is not 68 %", abs(excess - 0.68) > 0.005),
        ),
        (Bars("Examples in the assignment", "count", {"pretraining": biographies, "fine-tuning": questions}),),
        correction="The questions are 68 % of the biographies; the biographies are 47 % more than the questions.",
    )


@lab("knowledge", rows=("I5",), seconds=(4.0, 20.0), smallest={"steps": 200, "pairs": 6}, full={"steps": 2000},
     counterexample={"shuffled": False}, try_next=("--pairs 12", "--steps 1000"))  # fmt: skip
def synthesizer_lookup(
    *,
    pairs: Annotated[int, "pairs of a key and a value in a sequence"] = 8,
    shuffled: Annotated[bool, "put the pairs into a random order"] = True,
    steps: Annotated[int, "steps of training"] = 300,
    seed: int = 0,
    progress: OnProgress = no_progress,
) -> Finding:
    """One layer that compares queries with keys looks a value up, and a Synthesizer layer cannot.

    The input is n pairs of a key and a value, in random order, and then a key; the output is its value. The weights of
    a Synthesizer, softmax(ReLU(x_i A + b₁) B + b₂), depend on the token that asks and not on the others, so they
    cannot find where the pair is, and 1/n is right by chance. The layer has one head and no feed-forward network. The
    same is done with the three vectors of `query-key-value` in every order, and the V of their construction.
    """
    scores = {
        name: lookup_accuracy(kind, pairs, shuffled, steps, seed, progress) for name, kind in LOOKUP_CORES.items()
    }
    chance = 1 / pairs
    shares = {name: lecture_share(kind, shuffled=shuffled) for name, kind in LOOKUP_CORES.items()}
    return Finding(
        (
            at_least("query–key–value: accuracy", scores["query–key–value"], 0.99),
            at_most("Synthesizer: accuracy", scores["Synthesizer"], chance + 0.1),
            reported("chance", chance),
            at_least("vectors of the construction, query–key–value: right outputs", shares["query–key–value"], 0.99),
            at_most("the same, Synthesizer; one of three by chance", shares["Synthesizer"], 1 / 3 + 0.1),
        ),
        (Bars("Accuracy of one layer on a shuffled lookup", "accuracy", scores, levels={"chance": chance}),),
    )


LOOKUP_CORES = {"query–key–value": "dot", "Synthesizer": SYNTHESIZER}


def lecture_share(kind: str, *, shuffled: bool, starts: int = 20, steps: int = 400) -> float:
    """The share of c₁ and c₂ that are right over the orders of x₁, x₂ and x₃, for the best of some random starts.

    Each start is a head that learns its scores; the values are V x, with the V of the construction.
    """
    u = orthonormal(4, 4)
    x_ND, orders = lecture_vectors(u), torch.tensor(list(permutations(range(3))) if shuffled else [(0, 1, 2)])
    _, b, c, _ = u
    x_B1LD, is_asked = x_ND[orders][:, None], (orders < 2)[:, None]
    targets = torch.stack((b - c, b, b))[orders][:, None]
    size, length = (4, {}) if kind == "dot" else (16, {"length": 3})
    core = CoreSpec.from_config({"kind": kind} | length).build(starts, size, 4).double()
    query = nn.Parameter(torch.randn(starts, 4, size, dtype=torch.float64))
    optimizer = torch.optim.Adam([query, *core.parameters()], lr=0.1)
    mask, positions = head_context(x_ND, x_ND, False)
    values_B1LD = x_B1LD @ (torch.outer(b, b) - torch.outer(c, c))
    k_BHLD, v_BHLD = (y.expand(-1, starts, -1, -1) for y in (x_B1LD, values_B1LD))
    for _ in range(steps):
        errors = (core(x_B1LD @ query, k_BHLD, v_BHLD, mask=mask, positions=positions) - targets).norm(dim=-1)
        optimizer.zero_grad()
        (errors.square() * is_asked).sum().backward()
        optimizer.step()
    is_right = (errors < 0.1) & is_asked
    return float((is_right.sum(dim=(0, 2)) / is_asked.sum()).max())


class OneLayer(nn.Module):
    """One head between linear maps: the last vector asks, those before it are the keys and values."""

    def __init__(self, kind: str, pairs: int) -> None:
        super().__init__()
        size, length = 4 * pairs, {"length": pairs} if kind == SYNTHESIZER else {}
        self.query, self.key, self.value = (nn.Linear(2 * pairs, size, bias=False) for _ in range(3))
        self.core: Core = CoreSpec.from_config({"kind": kind} | length).build(1, size, size)
        self.output = nn.Linear(size, pairs, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        count = x_BLD.shape[1] - 1
        q_B1K, k_BMK, v_BMK = self.query(x_BLD[:, -1:]), self.key(x_BLD[:, :-1]), self.value(x_BLD[:, :-1])
        positions = Positions(torch.tensor([[count]]), torch.arange(count)[None].expand(len(x_BLD), -1))
        mask = Mask(1, count, x_BLD.device)
        out = self.core(q_B1K[:, None], k_BMK[:, None], v_BMK[:, None], mask=mask, positions=positions)
        logits: Tensor = self.output(out[:, 0, 0])
        return logits


def lookup_accuracy(kind: str, pairs: int, shuffled: bool, steps: int, seed: int, progress: OnProgress) -> float:
    """Trains one layer on the lookup, and measures it on new sequences."""
    rng, one_hot = torch.Generator().manual_seed(seed), torch.eye(pairs)

    def sequences(count: int) -> tuple[Tensor, Tensor]:
        """A vector (key, value) for each pair and then (key, 0), and the value of that key."""
        values = torch.rand(count, pairs, generator=rng).argsort(1)
        keys = torch.rand(count, pairs, generator=rng).argsort(1) if shuffled else torch.arange(pairs).expand(count, -1)
        query = torch.randint(pairs, (count, 1), generator=rng)
        facts = torch.cat((one_hot[keys], one_hot[values.gather(1, keys)]), -1)
        question = torch.cat((one_hot[query], torch.zeros(count, 1, pairs)), -1)
        return torch.cat((facts, question), 1), values.gather(1, query)[:, 0]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = OneLayer(kind, pairs)
    fit(model, lambda step: sequences(128), loss, steps=steps, lr=3e-2, progress=progress, name=kind)
    vectors, targets = sequences(1000)
    with torch.no_grad():
        return float((model(vectors).argmax(-1) == targets).float().mean())
