"""What the tab Look shows of a run: its attentions, thumbnails, matrices in tiles, one cell, and the next tokens."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil
from threading import Lock
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.checkpoint.checkpoint import Checkpoint
from manyheads.errors import UnsupportedError, UsageError
from manyheads.inspect.attribution import ScoreTerms, score_terms
from manyheads.inspect.edit import ablate, check_head, edit
from manyheads.inspect.measure import PATTERNS, has_qk_matrix, mean_measures, measure_heads, rollout
from manyheads.inspect.thumbnail import THUMBNAIL, Pool, pool_weights, to_shades
from manyheads.model.recording import RecordedAttention, Tape
from manyheads.parts.core import InnerProduct, repeat_kv
from manyheads.spec import Tree, quote
from manyheads.studio.forward import Head, Text, last_states, outputs
from manyheads.studio.weights import block_of, row_scores

THUMBNAIL_ROWS = 1024  # queries that a thumbnail is made of
THUMBNAIL_BLOCK = 176  # of them computed at once
TILE = 256
MAX_ROLLOUT = 2048  # tokens
MAX_BANDS = 12  # rows of tiles, and other tensors, kept per run
EFFECT_POSITIONS = 128  # positions at which the effect of a head is measured
TOP = 200  # tokens listed for a position
TEMPERATURES = [round(0.1 + 0.05 * i, 2) for i in range(59)]  # 0.1 to 3.0
BLOCK = 1 << 22  # weights computed at once


@dataclass(frozen=True)
class AttentionInfo:
    """One attention of a run, and the sequences of its queries and keys."""

    name: str
    stack: str
    layer: int
    kind: Literal["self", "cross", "alignment"]
    heads: int
    queries: str
    keys: str
    rows: int
    columns: int
    causal: bool

    @property
    def pixel(self) -> tuple[int, int]:
        """The rows and columns that a pixel of its thumbnails stands for."""
        return ceil(self.rows / THUMBNAIL), ceil(self.columns / THUMBNAIL)

    @property
    def thumbnail(self) -> tuple[int, int]:
        """Height and width of its thumbnails."""
        return ceil(self.rows / self.pixel[0]), ceil(self.columns / self.pixel[1])


class ForwardPass:
    """One recorded forward pass, and what was computed from it."""

    def __init__(self, checkpoint: Checkpoint, texts: dict[str, Text], tape: Tape, states: Tensor, off: Sequence[Head]):
        self.checkpoint, self.texts, self.tape, self.states, self.off = checkpoint, texts, tape, states, tuple(off)
        self.infos = {name: self._info(name) for name in tape.names()}
        self._bands: OrderedDict[Any, Tensor] = OrderedDict()
        self.lock = Lock()  # of the bands

    def _info(self, name: str) -> AttentionInfo:
        calls = self.tape.calls(name)
        match = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(attention|cross)", name)
        pair = "source" in self.texts
        stack, layer, part = (match[1], int(match[2]), match[3]) if match else ("decoder", 0, "alignment")
        kind: Any = {"attention": "self"}.get(part, part)
        decoder, encoder = ("target", "source") if pair else ("text", "text")
        queries = encoder if stack == "encoder" else decoder
        return AttentionInfo(
            name, stack, layer, kind, calls[0].query.shape[1], queries,
            queries if kind == "self" else encoder,
            sum(call.query.shape[2] for call in calls),
            max(call.key.shape[2] for call in calls),
            calls[0].mask.causal,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors that it holds."""
        tensors = [
            tensor
            for call in self.tape
            for tensor in (call.query, call.key, call.value, call.output, call.bias)
            if tensor is not None
        ]
        unique = {tensor.data_ptr(): tensor for tensor in (*tensors, self.states, *list(self._bands.values()))}
        return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())

    def info(self, name: str) -> AttentionInfo:
        self.tape.calls(name)  # raises for an unknown name
        return self.infos[name]

    def labels(self, side: str, count: int) -> list[str]:
        """The names of queries or keys, with that of a class token that the model adds."""
        tokens = self.texts[side].tokens
        return ["[CLS]"] * (count - len(tokens)) + tokens

    def to_tree(self) -> Tree:
        attentions = [vars(info) | {"thumbnail": info.thumbnail} for info in self.infos.values()]
        return {
            "texts": {name: text.to_tree() for name, text in self.texts.items()},
            "attentions": attentions,
            "generates": self.checkpoint.spec.head.output == "tokens" and self.checkpoint.spec.head.per_token,
            "off": [list(head) for head in self.off],
        }

    # -------------------------------------------------------------------------------------------------------- matrices

    @torch.no_grad()
    def rows(self, name: str, head: str, rows: slice) -> Tensor:
        """Rows of a matrix, N×M in float32: of one head by its number, of their mean or max, or of the rollout."""
        if head == "rollout":
            return self._rollout(name)[rows]
        info = self.info(name)
        if head in ("mean", "max"):
            weights = self.tape.weights(name, rows=rows)[0].float()
            return weights.mean(dim=0) if head == "mean" else weights.amax(dim=0)
        if head in ("all-mean", "all-max"):
            return self._over_layers(info, head, rows)
        number, (call, *others) = head_number(info, head), self.tape.calls(name)
        if others or not call.core.heads_are_alike:
            return self.tape.weights(name, number, rows)[0].float()
        _, _, weights = block_of(call, slice(*rows.indices(info.rows)), number)
        return F.pad(weights[0].float(), (0, info.columns - weights.shape[-1]))

    def _over_layers(self, info: AttentionInfo, head: str, rows: slice) -> Tensor:
        names = [other.name for other in self.infos.values() if (other.stack, other.kind) == (info.stack, info.kind)]
        result: Tensor | None = None
        for name in names:
            layer = self.rows(name, head.removeprefix("all-"), rows)
            if result is not None:
                layer = result + layer if head == "all-mean" else torch.maximum(result, layer)
            result = layer
        assert result is not None
        return result / len(names) if head == "all-mean" else result

    def _rollout(self, name: str) -> Tensor:
        info = self.info(name)
        if info.kind != "self" or info.rows > MAX_ROLLOUT:
            raise UnsupportedError(f"rollout is for self-attention of up to {MAX_ROLLOUT:,} tokens")
        return self._cached(("rollout", info.stack), lambda: rollout(self.tape, info.stack)[0]).float()

    def _cached(self, key: tuple[Any, ...], compute: Callable[[], Tensor]) -> Tensor:
        """A tensor that is computed once, and kept until others are used more recently."""
        if key not in self._bands:
            self._bands[key] = compute()
            while len(self._bands) > MAX_BANDS:
                self._bands.popitem(last=False)
        self._bands.move_to_end(key)
        return self._bands[key]

    @torch.no_grad()
    def tile(self, name: str, head: str, level: int, row: int, column: int, pool: Pool) -> Tensor:
        """256×256 numbers, fewer at the borders: each the largest or mean weight of 2ˡ × 2ˡ cells."""
        info, step = self.info(name), 1 << level
        first = row * TILE * step
        if first >= info.rows or column * TILE * step >= info.columns:
            raise UsageError(f"there is no tile {row}, {column} at level {level}")
        rows = slice(first, min(info.rows, first + TILE * step))
        band = self._cached((name, head, level, row, pool), lambda: self._band(info, head, rows, step, pool))
        return band[:, column * TILE : (column + 1) * TILE]

    def _band(self, info: AttentionInfo, head: str, rows: slice, step: int, pool: Pool) -> Tensor:
        """The tiles of one height side by side; a softmax needs whole rows."""
        heads = 1 if head.isdecimal() else info.heads
        block = max(step, BLOCK // (info.columns * heads) // step * step)
        parts = []
        for start in range(rows.start, rows.stop, block):
            weights = self.rows(info.name, head, slice(start, min(rows.stop, start + block)))
            parts.append(weights if step == 1 else pool_weights(weights[None], step, step, pool)[0])
        return torch.cat(parts)

    @torch.no_grad()
    def thumbnails(self, name: str) -> bytes:
        """All heads of an attention as uint8, H×height×width: 255·√ of the largest weight in each pixel.

        Of a long text, a row of pixels is made of the first of its queries, so that the grid paints at once.
        """
        info = self.info(name)
        width = info.thumbnail[1]
        rows = [
            F.pad(pool_weights(block, *info.pixel), (0, width))[..., :width] for block in self.thumbnail_weights(name)
        ]
        return to_shades(torch.cat(rows, dim=1).float(), 255).cpu().numpy().tobytes()

    def thumbnail_weights(self, name: str) -> Iterator[Tensor]:
        """The rows of thumbnails in blocks, H×N×M, without the columns that a causal mask hides from all."""
        info, (call, *others) = self.info(name), self.tape.calls(name)
        step = info.pixel[0]
        if info.rows > THUMBNAIL_ROWS:
            used = THUMBNAIL_ROWS // THUMBNAIL
            spans = [slice(start, min(info.rows, start + used)) for start in range(0, info.rows, step)]
        else:
            size = max(1, min(THUMBNAIL_BLOCK, BLOCK // (info.columns * info.heads)) // step) * step
            spans = [slice(start, min(info.rows, start + size)) for start in range(0, info.rows, size)]
        for rows in spans:
            yield self.tape.weights(name, rows=rows)[0] if others else block_of(call, rows)[2]

    # -------------------------------------------------------------------------------------------------------- measures

    @torch.no_grad()
    def measures(self, name: str) -> Tree:
        """Measures and badges of every head of an attention, and what its weights can be trusted for."""
        info, calls = self.info(name), self.tape.calls(name)
        text = self.texts[info.keys]
        ids = torch.tensor([text.ids], device=calls[0].query.device) if len(text.ids) == info.columns else None
        measured = mean_measures([measure_heads(call, ids if info.kind == "self" else None) for call in calls])
        heads = [measured.to_dict(head) for head in range(info.heads)]
        return {
            "heads": [measures | {"badges": badges(measures, info)} for measures in heads],
            "trust": self.trust(name),
        }

    @torch.no_grad()
    def trust(self, name: str) -> Tree:
        """Of one attention: how far rows are from a sum of 1, the largest masked weight, recorded − recomputed."""
        checks = [call.check() for call in self.tape.calls(name)]
        return {key: max(check[key] for check in checks) for key in checks[0]} | {"causal": self.info(name).causal}

    # ------------------------------------------------------------------------------------------------------------ cell

    @torch.no_grad()
    def cell(self, name: str, head: int, row: int, column: int) -> Tree:
        """Why a weight is what it is: q, k, their product, the score, the mask, and the denominator of its row."""
        info = self.info(name)
        check_head(name, head, info.heads)
        if not (0 <= row < info.rows and 0 <= column < info.columns):
            raise UsageError(f"there is no cell {row}, {column} among {info.rows:,} × {info.columns:,}")
        call, local = self._call_of(name, row)
        scores = row_scores(call, head, local)
        weights = call.weights(head, local)[0].float()
        dense = call.mask.submask(slice(local, local + 1), slice(None)).dense
        visible = torch.ones_like(scores, dtype=torch.bool) if dense is None else dense[0, 0, 0].expand_as(scores)
        tree: Tree = {
            "weight": float(weights[column]),
            "row_sum": float(weights.sum()),
            "rank": int((weights > weights[column]).sum()) + 1,
            "score": float(scores[column]),
            "masked": not bool(visible[column]),
            "visible": int(visible.sum()),
            "core": type(call.core).__name__,
        }
        if bool(visible.any()):
            highest = scores[visible].max()
            exponentials = (scores - highest).exp().masked_fill(~visible, 0)
            if torch.allclose(exponentials / exponentials.sum(), weights, atol=1e-3):  # else it is no softmax
                tree |= {"highest": float(highest), "denominator": float(exponentials.sum())}
        if isinstance(call.core, InnerProduct):
            query = call.core.query_transform(call.query[:, :, local : local + 1])[0, head, 0].float()
            key = repeat_kv(call.key, call.query)[0, head, column].float()
            dot = float(query @ key)
            tree |= {"query": round_values(query), "key": round_values(key), "dot": dot, "scale": call.core.scale}
            tree["bias"] = float(scores[column]) - dot * call.core.scale if call.bias is not None else 0.0
        return tree | {"terms": self._terms(info, call, head, row, column)}

    def _call_of(self, name: str, row: int) -> tuple[RecordedAttention, int]:
        for call in self.tape.calls(name):
            if row < call.query.shape[2]:
                return call, row
            row -= call.query.shape[2]
        raise UsageError("there is no such row")

    def _terms(self, info: AttentionInfo, call: RecordedAttention, head: int, row: int, column: int) -> Tree | None:
        """The terms of words and positions, for the first layer of the first stack."""
        first = info.layer == 0 and info.kind == "self" and info.stack == next(iter(self.infos.values())).stack
        if not first or not has_qk_matrix(call.core) or self.off:
            return None
        ids = self.texts[info.queries].ids

        def of_row() -> Tensor:
            terms = score_terms(self.checkpoint.model, ids, head, slice(row, row + 1))
            return torch.cat([getattr(terms, field.name) for field in fields(terms)])

        try:
            values = self._cached(("terms", head, row), of_row)[:, column].tolist()
        except UnsupportedError:
            return None
        return dict(zip((field.name for field in fields(ScoreTerms)), values, strict=True))

    # --------------------------------------------------------------------------------------------------------- outputs

    def next_tokens(self, position: int) -> Tree:
        """The most probable next tokens with their logits, and ln Σ exp(logit / T) over all tokens for each T."""
        head, length = self.checkpoint.spec.head, self.states.shape[1]
        if head.output not in ("tokens", "classes"):
            raise UnsupportedError("this model predicts neither tokens nor classes")
        if head.per_token and not 0 <= position < length:
            raise UsageError(f"there is no position {position} among {length:,}")
        logits = outputs(self.checkpoint, self.states, [position])[0]
        top = logits.topk(min(TOP, len(logits)))
        sums = torch.stack([(logits / temperature).logsumexp(dim=0) for temperature in TEMPERATURES])
        names = [self._output_name(token) for token in top.indices.tolist()]
        return {
            "position": position if head.per_token else None,
            "tokens": [list(token) for token in zip(top.indices.tolist(), names, top.values.tolist(), strict=True)],
            "temperatures": TEMPERATURES,
            "log_sums": sums.tolist(),
            "vocab": len(logits),
        }

    def _output_name(self, number: int) -> str:
        if self.checkpoint.spec.head.output == "classes":
            return self.checkpoint.id2label.get(number, str(number))
        return self.checkpoint.text_generator.token_name(number)

    @cached_property
    def _effect_positions(self) -> list[int]:
        length = self.states.shape[1]
        count = min(length, EFFECT_POSITIONS)
        return [(i + 1) * length // count - 1 for i in range(count)]

    @cached_property
    def _effect_outputs(self) -> Tensor:
        return self._for_effect(self.states)

    def _for_effect(self, states: Tensor) -> Tensor:
        result = outputs(self.checkpoint, states, self._effect_positions)
        return result.log_softmax(dim=-1) if self.checkpoint.spec.head.output in ("tokens", "classes") else result

    @torch.no_grad()
    def effect(self, name: str, head: int) -> Tree:
        """How much the output changes without a head: KL(p ‖ p without it) in nats, or 1 − cosine of vectors."""
        check_head(name, head, self.info(name).heads)
        off = (*self.off, (name, head))
        with edit(self.checkpoint.model, *(ablate(attention, head=number) for attention, number in off)):
            without = self._for_effect(last_states(self.checkpoint, self.texts))
        base = self._effect_outputs
        if self.checkpoint.spec.head.output in ("tokens", "classes"):
            change, measure = (base.exp() * (base - without)).sum(dim=-1).clamp(min=0), "kl"
        else:
            change, measure = 1 - F.cosine_similarity(base, without, dim=-1), "cosine"
        return {
            "mean": float(change.mean()), "max": float(change.max()), "last": float(change[-1]),
            "measure": measure, "positions": len(change),
        }  # fmt: skip


def head_number(info: AttentionInfo, head: str) -> int:
    if not head.isdecimal() or int(head) >= info.heads:
        raise UsageError(f"{info.name} has no head {quote(head)}, expected 0 to {info.heads - 1}, mean or max")
    return int(head)


def badges(measures: dict[str, float], info: AttentionInfo) -> list[str]:
    """The patterns of a head: those whose mean mass reaches the threshold of their detector."""
    if info.kind != "self":
        return []
    return [name for name, pattern in PATTERNS.items() if measures[name] >= pattern.threshold]


def round_values(vector: Tensor) -> list[float]:
    return [round(value, 5) for value in vector.tolist()]
