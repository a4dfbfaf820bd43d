"""Doing what a checkpoint is for: its head says whether it continues, fills in, classifies, embeds or answers."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from manyheads.checkpoint import Loaded
from manyheads.spec import Tree, quoted

MASKS = ("[MASK]", "<mask>", "<MASK>")
NUMBERS, SEVERAL, ONE = PROBLEMS = ("regression", "multi_label_classification", "single_label_classification")


def predict(loaded: Loaded, text: str, *, max_new: int = 64, temperature: float = 0.0, best: int = 5, mask_id: int | None = None) -> Tree:
    """What the model makes of one text, as plain data; without a tokenizer, of ids written as numbers, `mask_id` where one is missing."""
    loaded.check_reads_texts()
    if type(best) is not int or best < 1:
        raise ValueError(f"best is {quoted(best)}, expected how many tokens to name, at least 1")
    if mask_id is not None and (type(mask_id) is not int or mask_id < 0):
        raise ValueError(f"mask_id is {quoted(mask_id)}, expected the id of a token, a whole number from 0")
    given: Any = text
    if loaded.tokenizer is None:
        if not re.fullmatch(r"\s*\d{1,9}(\s+\d{1,9})*\s*", text):
            raise ValueError(f"there is no tokenizer beside this model: give ids as numbers, such as '3 14 15'; given {quoted(text)}")
        given = [int(word) for word in text.split()]
    head = loaded.spec.head
    if loaded.paired or (loaded.spec.shape == "decoder" and head.a_token and head.scores_tokens):
        written = loaded.generate(given, max_new=max_new, temperature=temperature)
        return {"task": "answer" if loaded.paired else "continue", "text": text, "written": written}
    batch = loaded.encode([text]) if isinstance(given, str) else loaded.batch(given)
    with torch.no_grad():
        out = loaded.model(batch)
    if head.scores_tokens:
        return {"task": "fill", "text": text, "filled": filled(loaded, batch.tokens[0], out[0], best, mask_id)}
    if head.kind == "classes":
        return {"task": "classify", "text": text, "classes": classes(loaded, out[0])}
    if loaded.tokenizer is None:
        raise ValueError("a vector a text needs the tokenizer that made its tokens; load(...).hidden(ids) gives every token's")
    return {"task": "embed", "text": text, "vector": loaded.embed(text)[0].tolist()}


def filled(loaded: Loaded, ids: torch.Tensor, logits_LV: torch.Tensor, best: int, mask: int | None) -> list[Tree]:
    """For each masked place the most probable tokens."""
    name, mask = mask_of(loaded) if mask is None else (written(loaded, mask), mask)
    places = [i for i, token in enumerate(ids.tolist()) if token == mask]
    if not places:
        raise ValueError(f"there is nothing to fill: write {name} where a word is missing")
    rows = []
    for place in places:
        chances = torch.softmax(logits_LV[place].float(), dim=-1).topk(min(best, logits_LV.shape[-1]))
        named = [{"token": written(loaded, int(i)), "probability": float(p)} for p, i in zip(*chances, strict=True)]
        rows.append({"place": place, "tokens": named})
    return rows


def written(loaded: Loaded, token: int) -> str:
    return str(token) if loaded.tokenizer is None else loaded.tokenizer.decode([token]).strip()


def mask_of(loaded: Loaded) -> tuple[str, int]:
    """The token that stands for a missing word, as it is written and its id: by the tokenizer's own config, or by its usual name."""
    if loaded.tokenizer is None:
        said = loaded.origin.config.get("mask_token_id") if loaded.origin else None
        if type(said) is not int:
            raise ValueError("nothing says which token is the mask: give mask_id=..., its id")
        return str(said), said
    said = None
    if loaded.origin and (data := loaded.origin.beside.get("tokenizer_config.json")):
        try:
            said = json.loads(data).get("mask_token")
        except (ValueError, AttributeError, RecursionError):
            said = None
    name = said.get("content") if isinstance(said, dict) else said
    known = [name] if isinstance(name, str) and name.isprintable() else []
    for candidate in (*known, *MASKS):
        if (found := loaded.tokenizer.token_to_id(candidate)) is not None:
            return candidate, int(found)
    raise ValueError("this tokenizer has no mask token")


def classes(loaded: Loaded, logits: torch.Tensor) -> list[Tree]:
    """Every class, the first with most: its probability, or its score where the model was trained to give numbers."""
    config = loaded.origin.config if loaded.origin else {}
    names = {int(key): name for key, name in (config.get("id2label") or {}).items()}
    kind = config.get("problem_type") or (NUMBERS if len(logits) == 1 else ONE)
    if kind not in PROBLEMS:
        raise ValueError(f"problem_type is {quoted(kind)}, expected {', '.join(PROBLEMS)}")
    logits = logits.float()
    said = {NUMBERS: logits, SEVERAL: logits.sigmoid(), ONE: logits.softmax(dim=-1)}[kind]
    order = said.argsort(descending=True).tolist()
    return [{"class": str(names.get(i, i)), "score" if kind == NUMBERS else "probability": float(said[i])} for i in order]
