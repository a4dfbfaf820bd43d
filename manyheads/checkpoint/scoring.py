"""Scores texts with a checkpoint: their tokens after a context, or as the target of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyheads.checkpoint.checkpoint import all_texts, check_texts, checked_ids, is_batch
from manyheads.errors import CheckpointTokenizerError, UnsupportedError, UsageError
from manyheads.files.tokenizer import encode_texts
from manyheads.generate.config import check_integer
from manyheads.generate.generator import start_token
from manyheads.generate.score import TokenRow, check_can_score, score_rows
from manyheads.spec import MAX_COUNT

if TYPE_CHECKING:
    from manyheads.checkpoint.checkpoint import Checkpoint


def score(
    checkpoint: Checkpoint,
    text: Any,
    context: Any,
    source: Any,
    stride: int | None,
    decoder_start_token_id: int | None,
) -> Any:
    """As `Checkpoint.score`."""
    checkpoint.check_reads_text()
    check_can_score(checkpoint.model)
    if checkpoint.has_source != (source is not None):
        needs = "needs a source" if checkpoint.has_source else "has no encoder to read a source"
        raise UsageError(f"this model is {checkpoint.spec.architecture} and {needs}")
    is_list = is_batch(text)
    texts: Sequence[Any] = text if is_list else [text]
    contexts, sources = one_per_text("context", context, len(texts)), one_per_text("source", source, len(texts))
    rows = rows_after(checkpoint, texts, contexts)
    if checkpoint.has_source:
        start = checkpoint.generation_settings.decoder_start_token_id
        if decoder_start_token_id is not None:
            check_integer("decoder_start_token_id", decoder_start_token_id, 0, MAX_COUNT)
            start = decoder_start_token_id
        rows = [
            replace(row, ids=[start_token(start), *row.ids], first=row.first + 1, source=ids)
            for row, ids in zip(rows, checkpoint.to_input_ids(sources), strict=True)
        ]
    scores = score_rows(checkpoint.model, rows, window=checkpoint.context_length, stride=stride)
    name, results = checkpoint.text_generator.token_name, []
    for item, row, logprobs in zip(texts, rows, scores, strict=True):
        results.append(row.to_scored_text(item if isinstance(item, str) else "", logprobs, name))
    return results if is_list else results[0]


def rows_after(checkpoint: Checkpoint, texts: Sequence[Any], contexts: Sequence[Any]) -> list[TokenRow]:
    """The tokens of each text, or row of ids, after its context."""
    pairs = list(zip(texts, contexts, strict=True))
    if not all_texts(texts):
        rows = [(checked_ids(before or (), i), checked_ids(ids, i)) for i, (ids, before) in enumerate(pairs)]
        return [TokenRow(before + ids, len(before)) for before, ids in rows]
    if checkpoint.tokenizer is None:
        raise CheckpointTokenizerError("this checkpoint has no tokenizer; give token ids")
    if not getattr(checkpoint.tokenizer, "encodes_targets", True):
        raise UnsupportedError("this tokenizer encodes sources only; give the token ids of the target")
    pairs = [(text, before or "") for text, before in pairs]
    for column in zip(*pairs, strict=True):
        check_texts(column)
    joined_texts = [before + text for text, before in pairs]
    special_tokenizer, plain_tokenizer = checkpoint.piece_tokenizers
    tokenizer = plain_tokenizer if checkpoint.tokenizer.encode_special_tokens else special_tokenizer
    encodings = encode_texts(tokenizer, joined_texts, CheckpointTokenizerError)
    return [
        TokenRow.from_encoding(encoding, before, text)
        for encoding, (text, before) in zip(encodings, pairs, strict=True)
    ]


def one_per_text(name: str, value: Any, count: int) -> list[Any]:
    """The value for each of `count` texts: one for all, or one each."""
    if not value or not is_batch(value):
        return [value] * count
    if len(value) != count:
        raise UsageError(
            f"there are {len(value):,} values of {name} for {count:,} texts; give one for all, or one each"
        )
    return list(value)
