"""Sequence to sequence: a target text for a source text. Translation, summarisation and copying are subclasses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.data.order import sample_indices
from manyheads.errors import CheckpointTokenizerError, NonFiniteOutputError
from manyheads.files.tokenizer import encode_texts
from manyheads.generate.config import GenerationConfig
from manyheads.generate.decoding import GenerationBatch, run_to_end
from manyheads.metrics import metric
from manyheads.metrics.baselines import lead
from manyheads.metrics.text import count_without_words, sacrebleu_signatures
from manyheads.model.builder import Model
from manyheads.parts.inputs import Inputs
from manyheads.spec import MAX_COUNT, Tree, field, to_tree
from manyheads.tasks.batch import Batch, EncodedRow, Loss, SpecialTokens, seq2seq_batch, target_loss
from manyheads.tasks.evaluation import EvalResult, Evaluation
from manyheads.tasks.suggestion import Lines, Suggestion
from manyheads.tasks.task import TaskSpec

LEAD = 12  # words of the source that the lead baseline copies
BLEU_ORDER = 4  # the longest n-gram that BLEU counts


ROUGE = ("rouge1", "rouge2", "rougeL")


class Seq2SeqSpec(TaskSpec, kind="seq2seq"):
    """Sequence to sequence: −Σ log p(y_t | y_<t, x), the end of a target included

    With label smoothing ε, 1 − ε of the weight is on y_t and ε is spread over all tokens, as in Szegedy et al. 2016,
    arXiv 1512.00567.
    """

    fields: ClassVar[tuple[str, ...]] = ("source", "target")
    architectures: ClassVar[tuple[str, ...]] = ("encoder-decoder", "recurrent")
    has_source: ClassVar[bool] = True
    is_default: ClassVar[bool] = True
    eval_outputs: ClassVar[str] = "rows"
    template: ClassVar[str] = "$A </s>"
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "exact_match")
    attention_target_fields: ClassVar[tuple[str, ...]] = ("alignment",)
    primary: ClassVar[tuple[str, ...]] = ()  # the metrics to show first; if empty, the lengths of the texts decide
    summary_metrics: ClassVar[tuple[str, ...]] = ROUGE  # primary metrics if targets are much shorter than sources
    architecture_reason: ClassVar[str] = (
        "the whole source is read before the first token is generated, and every token attends to all of it"
    )
    file_kind: ClassVar[str | None] = "pairs"
    default_data: ClassVar[Tree | None] = {"kind": "dates"}

    label_smoothing: float = field(0.0, "ε of label smoothing", ge=0, lt=1)

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        return seq2seq_batch([(source, target) for source, target in rows], special_tokens, self.template)

    def loss(self, model: Model, batch: Batch) -> Loss:
        return target_loss(model, batch, self.label_smoothing)

    @property
    def all_validation_metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.validation_metrics, *metric.metric_names("text"))))

    def generation_metrics(
        self,
        checkpoint: Checkpoint,
        groups: Iterable[Sequence[EncodedRow]],
        special_tokens: SpecialTokens,
        *,
        extra_metric: str | None,
    ) -> dict[str, float]:
        """Computes exact match of ids, where a target with an unknown token never matches; and `extra_metric`."""
        try:
            pairs = [pair for rows in groups for pair in self.generate_targets(checkpoint, rows, special_tokens)]
        except NonFiniteOutputError:  # the loss is NaN too, and the training loop handles both
            return dict.fromkeys(("exact_match", *([extra_metric] if extra_metric in metric.METRICS else [])), math.nan)
        exact = [output == target and special_tokens.unk not in target for output, target in pairs]
        scores = {"exact_match": sum(exact) / max(1, len(exact))}
        if extra_metric is not None and extra_metric not in self.validation_metrics:
            outputs, targets = ([checkpoint.decode(ids) for ids in side] for side in zip(*pairs, strict=True))
            scores[extra_metric] = metric.METRICS[extra_metric].function(outputs, targets)
        return scores

    def generate_targets(
        self, checkpoint: Checkpoint, rows: Sequence[EncodedRow], special_tokens: SpecialTokens
    ) -> list[tuple[list[int], list[int]]]:
        """Decodes greedily up to the length of the targets, and returns generated and target ids."""
        batch = self.batch(rows, special_tokens, np.random.default_rng(0)).to(checkpoint.device)
        prompt = torch.tensor([special_tokens.decoder_prompt_ids] * len(rows), device=checkpoint.device)
        limit = checkpoint.max_target_positions
        limit = MAX_COUNT if limit is None else limit - prompt.shape[1] + 1
        longest = max(len(target) for _, target in rows)
        config = GenerationConfig(max_new_tokens=min(longest + 2, limit), eos_token_id=(special_tokens.eos,))
        prompts = GenerationBatch(checkpoint.model, Inputs(prompt), batch.source, config, ())
        outputs = [hypotheses[0].token_ids for hypotheses in run_to_end(config.decoding.generate(prompts))]
        return [(config.without_eos(ids), target.tolist()) for ids, (_, target) in zip(outputs, rows, strict=True)]

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Scores generated texts against the targets, next to the copied source and its first words."""
        signatures = sacrebleu_signatures()  # raises now, before minutes are spent, if sacrebleu is missing
        data, checkpoint = evaluation.data, evaluation.checkpoint
        sources, targets = [row[0] for row in data.rows], [row[1] for row in data.rows]
        outputs = [""] * len(sources)
        rows, notes = evaluation.encode(sources)
        config = evaluation.options.generation(
            checkpoint.generation_settings, default_max_new_tokens=max_target_tokens(evaluation)
        )
        note_counts = Counter[str]()
        for done, (i, (best, *_)) in enumerate(checkpoint.text_generator.generate_texts(rows, config), 1):
            outputs[i] = best.text
            note_counts.update([best.note] if best.note else [])
            evaluation.progress("generating", done, len(sources))
        notes += tuple(f"{count:,} of {len(rows):,} outputs: {note}" for note, count in note_counts.items())
        systems = {"model": outputs, "copy": sources, f"lead-{LEAD}": [lead(source, LEAD) for source in sources]}
        if all(
            source.split() == first_words.split()
            for source, first_words in zip(sources, systems[f"lead-{LEAD}"], strict=True)
        ):
            del systems[f"lead-{LEAD}"]  # no source is longer
        scores = {name: metric.scores("text", texts, targets) for name, texts in systems.items()}
        if count := count_without_words(targets):
            notes += (f"{count:,} of {len(targets):,} targets have no a–z or 0–9, so their ROUGE is 0",)
        if not scores["model"]["bleu"] and max(len(text.split()) for text in targets) < BLEU_ORDER:
            notes += (f"no target has {BLEU_ORDER} words, so BLEU, which counts {BLEU_ORDER}-grams, is 0",)
        return EvalResult(
            scores,
            notes,
            primary=self.primary_metrics(sources, targets),
            signatures=signatures,
            outputs=tuple(
                {"text": source, "reference": target, "prediction": output}
                for source, target, output in zip(sources, targets, outputs, strict=True)
            ),
            extra={"generation": {"max_new_tokens": config.max_new_tokens, "decoding": to_tree(config.decoding)}},
        )

    def primary_metrics(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[str, ...]:
        """Returns exact match for targets of one or two words, ROUGE for much shorter targets, else BLEU and chrF."""
        source, target = (mean_words(texts) for texts in (sources, targets))
        if self.primary or target <= 2:
            return self.primary or ("exact_match",)
        return self.summary_metrics if target < source / 2 else ("bleu", "chrf")

    @classmethod
    def suggest_task(cls, suggestion: Suggestion) -> Lines:
        line = ("label_smoothing", 0.1, "label smoothing, against overconfidence")
        return [] if suggestion.data.closed_vocabulary else [line]


class TranslateSpec(Seq2SeqSpec, kind="translate"):
    """Translation: −Σ log p(y_t | y_<t, x), evaluated by BLEU and chrF"""

    is_default: ClassVar[bool] = False
    summary_metrics: ClassVar[tuple[str, ...]] = ("bleu", "chrf")


class SummariseSpec(Seq2SeqSpec, kind="summarise"):
    """Summarisation: −Σ log p(y_t | y_<t, x) for a short y and a long x, evaluated by ROUGE"""

    is_default: ClassVar[bool] = False
    default_data: ClassVar[Tree | None] = {"kind": "stdlib", "subset": "summary"}
    longer_column_first: ClassVar[bool] = True
    primary: ClassVar[tuple[str, ...]] = ROUGE


class CopySpec(Seq2SeqSpec, kind="copy"):
    """Copying: −Σ log p(x_t | x_<t, x), evaluated by exact match"""

    is_default: ClassVar[bool] = False
    takes_file: ClassVar[bool] = False
    default_data: ClassVar[Tree | None] = {"kind": "sequence", "function": "copy"}
    primary: ClassVar[tuple[str, ...]] = ("exact_match",)


def mean_words(texts: Sequence[str]) -> float:
    return sum(len(text.split()) for text in texts) / len(texts)


def max_target_tokens(evaluation: Evaluation) -> int:
    """Returns twice the length of the longest of some training targets, so that endless generation is noticed."""
    rows = evaluation.data.train_rows
    targets = [rows[i][1] for i in sample_indices(len(rows), 1000).tolist()]
    encodings = encode_texts(evaluation.checkpoint.tokenizer, targets, CheckpointTokenizerError)
    return 8 + 2 * max(len(encoding.ids) for encoding in encodings) if targets else 256
