"""Doing what a checkpoint is for: its head says whether it continues, fills in, classifies, embeds or answers."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from manyheads.checkpoint import Loaded
from manyheads.spec import Tree, quoted

MASKS = ("[MASK]", "<mask>", "<MASK>")


def predict(loaded: Loaded, text: str, *, max_new: int = 64, temperature: float = 0.0, best: int = 5) -> Tree:
    """What the model makes of one text, as plain data; without a tokenizer, of ids written as numbers."""
    loaded.check_reads_texts()
    if type(best) is not int or best < 1:
        raise ValueError(f"best is {quoted(best)}, expected how many tokens to name, at least 1")
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
        return {"task": "fill", "text": text, "filled": filled(loaded, batch.tokens[0], out[0], best)}
    if head.kind == "classes":
        return {"task": "classify", "text": text, "classes": classes(loaded, out[0])}
    if loaded.tokenizer is None:
        raise ValueError("a vector a text needs the tokenizer that made its tokens; load(...).hidden(ids) gives every token's")
    return {"task": "embed", "text": text, "vector": loaded.embed(text)[0].tolist()}


def filled(loaded: Loaded, ids: torch.Tensor, logits_LV: torch.Tensor, best: int) -> list[Tree]:
    """For each masked place the most probable tokens."""
    mask = mask_id(loaded)
    places = [i for i, token in enumerate(ids.tolist()) if token == mask]
    if not places:
        raise ValueError(f"there is nothing to fill: write {mask_token(loaded)} where a word is missing")
    rows = []
    for place in places:
        chances = torch.softmax(logits_LV[place].float(), dim=-1).topk(min(best, logits_LV.shape[-1]))
        named = [{"token": written(loaded, int(i)), "probability": float(p)} for p, i in zip(*chances, strict=True)]
        rows.append({"place": place, "tokens": named})
    return rows


def written(loaded: Loaded, token: int) -> str:
    return str(token) if loaded.tokenizer is None else loaded.tokenizer.decode([token]).strip()


def mask_token(loaded: Loaded) -> str:
    """The token that stands for a missing word, as the tokenizer's own config calls it, or by its usual name."""
    said: Any = {}
    if loaded.origin and (data := loaded.origin.beside.get("tokenizer_config.json")):
        try:
            said = json.loads(data).get("mask_token")
        except (ValueError, AttributeError, RecursionError):
            said = None
    name = said.get("content") if isinstance(said, dict) else said
    known = [name] if isinstance(name, str) and name.isprintable() else []
    for candidate in (*known, *MASKS):
        if loaded.tokenizer is not None and loaded.tokenizer.token_to_id(candidate) is not None:
            return candidate
    return str(MASK_WITHOUT_NAME)


MASK_WITHOUT_NAME = 0  # without a tokenizer nobody says which id is the mask


def mask_id(loaded: Loaded) -> int:
    return MASK_WITHOUT_NAME if loaded.tokenizer is None else int(loaded.tokenizer.token_to_id(mask_token(loaded)) or 0)


def classes(loaded: Loaded, logits: torch.Tensor) -> list[Tree]:
    """Every class with its probability, the likeliest first."""
    said = (loaded.origin.config.get("id2label") if loaded.origin else None) or {}
    names = {int(key): name for key, name in said.items()}
    chances = torch.softmax(logits.float(), dim=-1)
    order = chances.argsort(descending=True).tolist()
    return [{"class": str(names.get(i, i)), "probability": float(chances[i])} for i in order]
