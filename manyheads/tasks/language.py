"""Tasks on text alone: causal and masked language modeling, span corruption and infilling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator

from manyheads.checkpoint.checkpoint import Checkpoint, check_texts
from manyheads.data.source import Row
from manyheads.data.tokenized import InMemoryDataset
from manyheads.data.tokenizer import SPECIAL_SPELLINGS
from manyheads.errors import (
    CheckpointConfigError,
    IncompatibleError,
    InputError,
    OutOfRangeError,
    TokenizerError,
    UnsupportedError,
    UsageError,
)
from manyheads.generate.config import GenerationConfig
from manyheads.generate.score import windows
from manyheads.metrics import metric
from manyheads.metrics.baselines import Bigram, Unigram
from manyheads.metrics.likelihood import LogLikelihood
from manyheads.model.spec import ModelSpec
from manyheads.parts.inputs import pad_rows
from manyheads.spec import Tree, field, quote
from manyheads.tasks.batch import (
    IGNORE_INDEX,
    Batch,
    Chunk,
    EncodedRow,
    LossSum,
    SpecialTokens,
    pad_targets,
    seq2seq_batch,
    target_loss,
)
from manyheads.tasks.evaluation import WINDOW, EvalResult, Evaluation, evaluate_loss, finite_loss
from manyheads.tasks.prediction import PredictOptions, ids_and_truncation, parse_ids
from manyheads.tasks.suggestion import Lines, Suggestion
from manyheads.tasks.task import PackableTask, TextTask

SENTINEL = re.compile(r"<extra_(id_)?\d+>")


# -------------------------------------------------------------------------------------------------------------- causal


class CausalSpec(PackableTask, kind="causal"):
    """Causal language modeling: −Σ log p(x_t | x_<t), the end of a text included"""

    architectures: ClassVar[tuple[str, ...]] = ("decoder", "recurrent", "ngram")
    is_default: ClassVar[bool] = True
    template: ClassVar[str] = "<s> $A"
    model_can_generate: ClassVar[bool | None] = True  # a bidirectional model would see the next token
    lookahead: ClassVar[int] = 1
    attention_target_fields: ClassVar[tuple[str, ...]] = ("arcs",)
    architecture_reason: ClassVar[str] = "each token is predicted from the tokens before it"

    def num_prefix_tokens(self, special_tokens: SpecialTokens) -> int:
        return 1  # bos, which predicts the first token of a text

    def batch_chunks(self, chunks: Sequence[Chunk], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        rows = [
            np.concatenate(
                ([special_tokens.bos] * chunk.is_start, chunk.text, [special_tokens.eos] * chunk.is_end)
            ).astype(np.int64)
            for chunk in chunks
        ]
        return Batch(pad_rows([ids[:-1] for ids in rows], special_tokens.pad), pad_targets([ids[1:] for ids in rows]))

    def with_truncation(self, checkpoint: Checkpoint, generation: GenerationConfig) -> Checkpoint:
        """Returns a copy that reads the last tokens of a text, so that the continuation follows it and has room."""
        positions, remaining = (
            checkpoint.max_positions,
            checkpoint.text_generator.remaining_positions(generation.max_new_tokens, generation),
        )
        if checkpoint.tokenizer is None or positions is None or remaining is None:
            return checkpoint
        min_length = 1 + checkpoint.tokenizer.num_special_tokens_to_add(is_pair=False)
        return checkpoint.with_truncation(min(positions, max(min_length, remaining)), direction="left")

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Computes −ln p of every token, each predicted once; long texts are read in windows."""
        special_tokens, data, checkpoint = evaluation.special_tokens, evaluation.data, evaluation.checkpoint
        if special_tokens.bos < 0:
            raise UnsupportedError("the tokenizer has no bos token, so a text's first token cannot be predicted")
        texts, train_texts = (text_ids(evaluation, rows) for rows in (data.rows, data.train_rows))
        window = evaluation.max_length or WINDOW
        parts = [text[part] for text in texts for part, _ in windows(len(text), window, stride=window)]
        total = LossSum()
        for index in evaluation.batches([len(ids) for ids in parts], "reading", logits=True):
            rows = [parts[i] for i in index]
            inputs = pad_rows([ids[:-1] for ids in rows], special_tokens.pad).to(checkpoint.device)
            targets = pad_targets([ids[1:] for ids in rows]).to(checkpoint.device)
            batch = Batch(inputs, targets)
            total.add(finite_loss(checkpoint, partial(target_loss, checkpoint.model, batch)))
        lengths = [(len(text), len(text.encode())) for (text,) in data.rows]
        sizes = total.count, sum(chars for chars, _ in lengths), sum(size for _, size in lengths)
        scores = {"model": metric.scores("likelihood", LogLikelihood(total.sum, *sizes))}
        if train_texts:
            unigram = Unigram((text[1:] for text in train_texts), special_tokens.vocab_size)
            bigram = Bigram(train_texts, special_tokens.vocab_size)
            totals = {
                "unigram": sum(unigram.nats(text[1:]).sum() for text in texts),
                "bigram": sum(bigram.nats(text).sum() for text in texts),
            }
            for name, nats in totals.items():
                scores[name] = metric.scores("likelihood", LogLikelihood(float(nats), *sizes))
        notes = []
        if unknown := sum(int((text == special_tokens.unk).sum()) for text in texts):
            notes.append(f"{unknown / sizes[0]:.1%} of the tokens are unknown, which makes them easy to predict")
        if any(len(text) - 1 > window for text in texts):
            notes.append(f"texts were read in windows of {window:,} tokens")
        extra = {"tokens": sizes[0], "bytes": sizes[2]}
        return EvalResult(scores, (*notes, *evaluation.baseline_note), extra=extra)


def text_ids(evaluation: Evaluation, rows: Sequence[Row]) -> list[NDArray[np.int64]]:
    """Returns texts as ids after the bos token, and before the eos token if the model was trained to predict it."""
    special_tokens = evaluation.special_tokens
    end = [special_tokens.eos] if evaluation.from_run else []
    encoded_rows = InMemoryDataset(rows, evaluation.checkpoint.tokenizer, ("text",))
    return [
        np.concatenate(([special_tokens.bos], ids, end)).astype(np.int64) for (ids,) in encoded_rows.rows if len(ids)
    ]


# -------------------------------------------------------------------------------------------------------------- masked


class MaskingTask(TextTask):
    """A task that replaces tokens by the mask token."""

    def check_tokens(self, special_tokens: SpecialTokens, model: ModelSpec) -> None:
        self.mask_token(special_tokens)

    def mask_token(self, special_tokens: SpecialTokens) -> int:
        if special_tokens.mask < 0:
            raise IncompatibleError(
                f"{self.kind} needs a mask token and this tokenizer has none; use one with <mask> or [MASK]",
                ("tokenizer",),
            )
        return special_tokens.mask


class MaskedSpec(MaskingTask, PackableTask, kind="masked"):
    """Masked language modeling (BERT): −Σ log p(x_t | the other tokens), over a random share of the positions

    Devlin et al. 2018, arXiv 1810.04805. Of the selected tokens, most are replaced by <mask>, some by a random
    token, and some stay. Every token keeps its position.
    """

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    generates_text: ClassVar[bool] = False
    is_default: ClassVar[bool] = True
    template: ClassVar[str] = "<s> $A </s>"
    model_can_generate: ClassVar[bool | None] = False
    num_special_tokens: ClassVar[int] = 2
    attention_target_fields: ClassVar[tuple[str, ...]] = ("arcs",)
    architecture_reason: ClassVar[str] = "a masked token may attend to all others, before and after it"

    mlm_probability: float = field(0.15, "probability that a token is predicted", gt=0, lt=1)
    mask_replace_prob: float = field(0.8, "fraction of predicted tokens that <mask> replaces", ge=0, le=1)
    random_replace_prob: float = field(0.1, "fraction of predicted tokens that a random token replaces", ge=0, le=1)

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            raise OutOfRangeError(
                f"given {self.random_replace_prob:g}, expected at most {1 - self.mask_replace_prob:g}, which is "
                f"1 − mask_replace_prob",
                ("random_replace_prob",),
            )
        return self

    def batch_chunks(self, chunks: Sequence[Chunk], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        mask_token, inputs, targets = self.mask_token(special_tokens), [], []
        for chunk in chunks:
            text, (before, after) = chunk.text, special_tokens.prefix_and_suffix(self.template)
            before, after = before * chunk.is_start, after * chunk.is_end
            is_target = rng.random(len(text)) < self.mlm_probability
            if len(text) and not is_target.any():
                is_target[rng.integers(len(text))] = True  # every text has a target
            draw = rng.random(len(text))
            is_masked = draw < self.mask_replace_prob
            is_random = is_target & ~is_masked & (draw < self.mask_replace_prob + self.random_replace_prob)
            ids = np.where(is_target & is_masked, mask_token, text)
            ids = np.where(
                is_random,
                special_tokens.ordinary_ids[rng.integers(len(special_tokens.ordinary_ids), size=len(text))],
                ids,
            )
            inputs.append(np.concatenate((before, ids, after)).astype(np.int64))
            ignored = ([IGNORE_INDEX] * len(before), [IGNORE_INDEX] * len(after))
            row = np.concatenate((ignored[0], np.where(is_target, text, IGNORE_INDEX), ignored[1]))
            targets.append(row.astype(np.int64))
        return Batch(pad_rows(inputs, special_tokens.pad), pad_targets(targets))

    @classmethod
    def suggest_head(cls, suggestion: Suggestion) -> Lines:
        return [("head", "tied", "predicts the token at each mask by its embedding")]

    def encode(
        self, checkpoint: Checkpoint, texts: Sequence[str], options: PredictOptions
    ) -> tuple[list[list[int]], dict[int, Tree]]:
        name, mask = mask_of(checkpoint, options.mask_token_id)
        tokenizer = checkpoint.tokenizer
        if tokenizer is None or options.mask_token_id is not None or not tokenizer.encode_special_tokens:
            rows, truncation = super().encode(checkpoint, texts, options)
        else:
            rows, truncation = ids_and_truncation(checkpoint.encode_with_special(texts, [name]))
        if rows_without_mask := [i for i, row in enumerate(rows) if mask not in row]:
            location = (
                f" in the {len(rows[rows_without_mask[0]]):,} tokens that are read"
                if rows_without_mask[0] in truncation
                else ""
            )
            raise InputError(f"the text has no {name} to fill{location}", rows_without_mask[0])
        return rows, truncation

    def results(
        self, checkpoint: Checkpoint, rows: Sequence[list[int]], options: PredictOptions
    ) -> Iterator[tuple[int, Tree]]:
        """Yields the most probable tokens for each mask."""
        _, mask = mask_of(checkpoint, options.mask_token_id)
        for i, logits_LV in checkpoint.outputs(rows):
            positions = [k for k, token in enumerate(rows[i]) if token == mask]
            yield i, {"filled": [top_tokens(checkpoint, k, logits_LV[k], options.num_fills) for k in positions]}

    def format_line(self, result: Tree) -> str:
        return " ".join("\t".join(mask["tokens"][0]["token"] for mask in result["filled"]).splitlines())

    def format_result(self, result: Tree) -> list[str]:
        rows = [row for mask in result["filled"] for row in mask["tokens"]]
        return [f"{row['probability']:8.4f}  {row['token']}" for row in rows]

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        result, targets = evaluate_loss(evaluation)
        scores, train_rows = dict(result.scores), evaluation.data.train_rows
        if train_rows:
            encoded_rows = InMemoryDataset(train_rows, evaluation.checkpoint.tokenizer, ("text",)).rows
            unigram = Unigram((ids for (ids,) in encoded_rows), evaluation.special_tokens.vocab_size)
            accuracy = float((targets == unigram.log_probs_V.argmax()).mean())
            scores["unigram"] = {"loss": float(unigram.nats(targets).mean()), "accuracy": accuracy}
        return EvalResult(scores, evaluation.baseline_note, extra=result.extra)


def top_tokens(checkpoint: Checkpoint, position: int, logits_V: torch.Tensor, num_fills: int) -> Tree:
    top = torch.softmax(logits_V.float(), dim=-1).topk(min(num_fills, logits_V.shape[-1]))
    name = partial(checkpoint.text_generator.token_name, strip=True)
    tokens = [{"token": name(int(i)), "probability": float(p)} for p, i in zip(*top, strict=True)]
    return {"position": position, "tokens": tokens}


def mask_of(checkpoint: Checkpoint, token_id: int | None) -> tuple[str, int]:
    """Returns the mask token as text and id: as given, by the tokenizer's config, or by its usual names."""
    if token_id is not None:
        return checkpoint.text_generator.token_name(token_id, strip=True), token_id
    if checkpoint.tokenizer is None:
        value = checkpoint.config.get("mask_token_id")
        if type(value) is not int:
            raise UsageError("the checkpoint has no mask_token_id; pass mask_token_id=ID")
        return str(value), value
    for name in filter(None, (checkpoint.token_names.get("mask"), *SPECIAL_SPELLINGS["mask"])):
        if name.isprintable() and (index := checkpoint.tokenizer.token_to_id(name)) is not None:
            return name, int(index)
    raise UnsupportedError("this tokenizer has no mask token")


# --------------------------------------------------------------------------------------------------------------- spans


class SpansSpec(TextTask, kind="spans"):
    """Span corruption (T5): −Σ log p(y_t | y_<t, x), with x the text with <extra_i> for span i, and y the spans

    Raffel et al. 2020, arXiv 1910.10683, section 3.1.4: a b c d e f → a <0> d e <1> and <0> b c <1> f <2>, where
    each span follows its sentinel and the last sentinel is the end. The number of masked tokens is fixed, their
    positions are random, and no two spans touch. In the published code every text begins with a visible token and
    ends with a span; here a span may be anywhere.
    """

    architectures: ClassVar[tuple[str, ...]] = ("encoder-decoder", "recurrent")
    can_chat: ClassVar[bool] = False
    has_source: ClassVar[bool] = True
    template: ClassVar[str] = "$A </s>"
    num_special_tokens: ClassVar[int] = 1  # without sentinels, which `lengths` counts
    architecture_reason: ClassVar[str] = (
        "the encoder reads the text with its gaps, and the decoder generates the masked spans"
    )

    noise_density: float = field(0.15, "fraction of the tokens that are masked", gt=0, lt=1)
    mean_span_length: float = field(3.0, "mean tokens per masked span", ge=1)
    num_sentinels: int = field(100, "number of <extra_i> tokens, one more than the spans of a text", ge=2, le=1 << 16)

    def additional_special_tokens(self) -> tuple[str, ...]:
        return tuple(f"<extra_{i}>" for i in range(self.num_sentinels))

    def lengths(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the lengths of source and target: visible or masked tokens, one sentinel per span, special tokens."""
        masked, spans = masked_counts(lengths[0], self.noise_density, self.mean_span_length)
        return np.stack((lengths[0] - masked + spans + 1, masked + spans + 2), axis=1)

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        pairs = []
        for text, *_ in rows:
            spans = draw_spans(len(text), self.noise_density, self.mean_span_length, rng)
            if len(spans) >= len(special_tokens.sentinels):
                raise TokenizerError(
                    f"a text of {len(text):,} tokens needs {len(spans) + 1} sentinels for {len(spans)} masked spans; "
                    f"the tokenizer has {len(special_tokens.sentinels)}",
                    hint="raise task.num_sentinels, or truncate texts with train.max_length",
                )
            visible, masked = corrupt(text, spans, special_tokens.sentinels)
            pairs.append((np.array(visible), np.array(masked)))
        return seq2seq_batch(pairs, special_tokens, self.template)

    def encode(
        self, checkpoint: Checkpoint, texts: Sequence[str], options: PredictOptions
    ) -> tuple[list[list[int]], dict[int, Tree]]:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None or not tokenizer.encode_special_tokens:
            return super().encode(checkpoint, texts, options)
        sentinels = [token for token in tokenizer.get_vocab() if SENTINEL.fullmatch(token)]
        return ids_and_truncation(checkpoint.encode_with_special(texts, sentinels))

    @classmethod
    def suggest_task(cls, suggestion: Suggestion) -> Lines:
        spec = cls()
        sentinels = 1 + int(
            masked_counts(np.array(suggestion.max_row_length), spec.noise_density, spec.mean_span_length)[1]
        )
        reason = "one more than the masked spans of the longest text"
        return [("num_sentinels", sentinels, reason)] if sentinels > spec.num_sentinels else []


def masked_counts(lengths: np.ndarray, noise_density: float, mean_span_length: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the masked tokens per text, round(noise_density · length) but at least 1 and not all, and the spans."""
    masked = np.maximum(1, np.minimum(np.rint(noise_density * lengths), lengths - 1))
    spans = np.maximum(1, np.minimum(np.rint(masked / mean_span_length), lengths - masked + 1))
    return np.where(lengths > 0, masked, 0).astype(np.int64), np.where(lengths > 0, spans, 0).astype(np.int64)


def draw_spans(
    length: int, noise_density: float, mean_span_length: float, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Draws the start and stop of each span."""
    if not length:
        return []
    masked, count = (int(count) for count in masked_counts(np.array(length), noise_density, mean_span_length))
    visible = length - masked
    ends = np.sort(rng.choice(masked - 1, count - 1, replace=False)) + 1 if count > 1 else np.empty(0, np.int64)
    before = np.concatenate(([0], ends))  # masked tokens before each span
    sizes = np.diff(np.concatenate((before, [masked])))
    starts = np.sort(rng.choice(visible + 1, count, replace=False)) + before
    return [(int(start), int(start + size)) for start, size in zip(starts, sizes, strict=True)]


def corrupt(
    text: np.ndarray, spans: Sequence[tuple[int, int]], sentinels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns the text with a sentinel per span, and the spans, each after its sentinel, with one more at the end."""
    visible: list[int] = []
    masked: list[int] = []
    last = 0
    for sentinel, (start, stop) in zip(sentinels, spans, strict=False):
        visible += [*text[last:start].tolist(), sentinel]
        masked += [sentinel, *text[start:stop].tolist()]
        last = stop
    return [*visible, *text[last:].tolist()], [*masked, sentinels[len(spans)]]


# -------------------------------------------------------------------------------------------------------------- infill


class InfillSpec(MaskingTask, kind="infill"):
    """Infilling: −Σ log p(x_t | x_<t), with x = prefix <mask> suffix <mask> content

    The causal form of span corruption, as in Stanford's CS224N, assignment 5. A text is truncated to a random length
    from 4 to 7/8 of the block, and the content is a quarter of that on average. Here </s> ends the content, where
    the assignment has padding, and padding is not in the loss.
    """

    architectures: ClassVar[tuple[str, ...]] = ("decoder", "recurrent")
    can_chat: ClassVar[bool] = False
    template: ClassVar[str] = "<s> $A"
    model_can_generate: ClassVar[bool | None] = True
    num_special_tokens: ClassVar[int] = 3
    architecture_reason: ClassVar[str] = "a decoder reads the text with its gap, and generates the content after it"

    block_size: int = field(128, "tokens per block; a text is truncated to at most 7/8 of it", ge=8)

    @property
    def max_text(self) -> int:
        return self.block_size * 7 // 8

    def lengths(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        return np.minimum(super().lengths(lengths), self.max_text + self.num_special_tokens)

    def batch(self, rows: Sequence[EncodedRow], special_tokens: SpecialTokens, rng: np.random.Generator) -> Batch:
        inputs, targets, mask = [], [], self.mask_token(special_tokens)
        for text, *_ in rows:
            short = text[: rng.integers(4, self.max_text + 1)]
            start, stop = draw_gap(len(short), rng)
            row = [*short[:start].tolist(), mask, *short[stop:].tolist(), mask, *short[start:stop].tolist()]
            inputs.append([special_tokens.bos, *row])
            targets.append([*row, special_tokens.eos])
        return Batch(pad_rows(inputs, special_tokens.pad), pad_targets(targets))

    def encode(
        self, checkpoint: Checkpoint, texts: Sequence[str], options: PredictOptions
    ) -> tuple[list[list[int]], dict[int, Tree]]:
        """Encodes texts with one mask each as <s> prefix <mask> suffix <mask>."""
        if checkpoint.tokenizer is None:
            return parse_ids(checkpoint, texts), {}
        check_texts(texts)
        name, mask = mask_of(checkpoint, options.mask_token_id)
        bos, rows, truncation = checkpoint.config.get("bos_token_id"), [], dict[int, Tree]()
        if type(bos) is not int:
            raise CheckpointConfigError(f"bos_token_id is {quote(bos)}, expected a token id")
        for index, text in enumerate(texts):
            parts = [piece.ids for piece in checkpoint.encode_pieces(text.split(name))]
            if len(parts) != 2:
                raise InputError(f"the text has {len(parts) - 1} {name}, expected one: {quote(text)}", index)
            limit = (checkpoint.tokenizer.truncation or {}).get("max_length")
            if limit is not None and len(parts[0]) + len(parts[1]) + 3 > limit:
                parts, truncation[index] = around_gap(parts[0], parts[1], limit - 3), {"truncated_to": limit}
            rows.append([bos, *parts[0], mask, *parts[1], mask])
            checkpoint.check_length(len(rows[-1]), index)
        return rows, truncation


def around_gap(prefix: list[int], suffix: list[int], max_tokens: int) -> list[list[int]]:
    """Returns the tokens nearest to a gap, at most `max_tokens` of them, about as many on both sides."""
    before = min(len(prefix), max(max_tokens // 2, max_tokens - len(suffix)))
    return [prefix[len(prefix) - before :], suffix[: max_tokens - before]]


def draw_gap(length: int, rng: np.random.Generator) -> tuple[int, int]:
    """Draws the start and stop of the gap: its size is uniform from 1 to 2m − 1, with m a quarter of the length."""
    mean = int(length / 4 + rng.random())  # rounded at random, so that the expected value is length / 4
    size = int(rng.integers(1, 2 * mean)) if mean else 0
    start = int(rng.integers(length - size + 1))
    return start, start + size
