"""Doing what a checkpoint is for: its head says whether it continues, fills in, classifies, embeds or answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from manyheads.checkpoint import PLACES, Loaded, TextError, batches, check_texts
from manyheads.convert.tokenizer import said_beside
from manyheads.generate.sample import Writing
from manyheads.spec import Tree, quoted

PLAIN = Writing()
SENTINEL = re.compile(r"<extra_(id_)?\d+>")
MASKS = ("[MASK]", "<mask>", "<MASK>")
NUMBERS, SEVERAL, ONE = PROBLEMS = ("regression", "multi_label_classification", "single_label_classification")


def predict(
    loaded: Loaded, text: str, *, max_new: int = 64, temperature: float = 0.0, seed: int = 0, beams: int = 1, penalty: float = 0.6,
    best: int = 5, mask_id: int | None = None,
) -> Tree:  # fmt: skip
    """What the model makes of one text, as plain data; without a tokenizer, of ids written as numbers, `mask_id` where one is missing."""
    writing = Writing(max_new, temperature, seed, beams, penalty)
    ((_, found),) = predict_all(loaded, [text], writing, best=best, mask_id=mask_id)
    return found


def task_of(loaded: Loaded) -> str:
    """What a model is for, by its shape and its head."""
    head = loaded.spec.head
    if loaded.paired:
        return "answer"
    if loaded.model.writes and head.scores_tokens:
        return "infill" if loaded.objective == "infill" and loaded.tokenizer is not None else "continue"
    return "fill" if head.scores_tokens else "classify" if head.kind == "classes" else "embed"


def predict_all(
    loaded: Loaded, texts: Sequence[str], writing: Writing = PLAIN, *, best: int = 5, mask_id: int | None = None
) -> Iterator[tuple[int, Tree]]:
    """What the model makes of each text, with the text's number, as it comes: texts of like length go together."""
    loaded.check_reads_texts()
    if type(best) is not int or best < 1:
        raise ValueError(f"best is {quoted(best)}, expected how many tokens to name, at least 1")
    if mask_id is not None and (type(mask_id) is not int or mask_id < 0):
        raise ValueError(f"mask_id is {quoted(mask_id)}, expected the id of a token, a whole number from 0")
    task = task_of(loaded)
    rows, cut = tokens_of(loaded, texts, task, mask_id)
    if task in ("answer", "continue", "infill"):
        for i, written in loaded.write(rows, writing):
            said = written if loaded.tokenizer is None else loaded.tokenizer.decode(written)
            yield i, {"task": task, "text": texts[i], "written": said} | cut.get(i, {})
        return
    if task == "embed" and loaded.tokenizer is None:
        raise ValueError("a vector a text needs the tokenizer that made its tokens; load(...).hidden(ids) gives every token's")
    mask = mask_of(loaded, mask_id) if task == "fill" else None
    for batch in batches([len(row) for row in rows], PLACES):
        given = loaded.padded([rows[i] for i in batch])
        with torch.no_grad():
            out = loaded.pooled(given) if task == "embed" else loaded.model(given)
        for i, one in zip(batch, out, strict=True):
            if mask is not None:
                yield i, {"task": task, "text": texts[i], "filled": filled(loaded, rows[i], one, best, mask, i)}
            elif task == "classify":
                yield i, {"task": task, "text": texts[i], "classes": classes(loaded, one)} | cut.get(i, {})
            else:
                yield i, {"task": task, "text": texts[i], "vector": one.tolist()} | cut.get(i, {})


def tokens_of(loaded: Loaded, texts: Sequence[str], task: str, mask_id: int | None) -> tuple[list[list[int]], dict[int, Tree]]:
    """The tokens that a model is asked with, of each text; and of those that are too long, how many were read."""
    if loaded.tokenizer is None:
        return numbers(texts), {}
    if task == "infill":
        return infilling(loaded, texts), {}
    if task == "fill" and mask_id is None:
        return masked(loaded, texts), {}
    if loaded.objective == "spans" and loaded.tokenizer.encode_special_tokens:  # what stands for a hidden span is no text
        return with_marks(loaded, texts, [token for token in loaded.tokenizer.get_vocab() if SENTINEL.fullmatch(token)]), {}
    found = loaded.encodings(texts)
    return [one.ids for one in found], {i: {"cut": len(one.ids)} for i, one in enumerate(found) if one.overflowing}


def numbers(texts: Sequence[str]) -> list[list[int]]:
    """Texts of ids, for a model without a tokenizer."""
    for place, text in enumerate(texts):
        if not re.fullmatch(r"\s*\d{1,9}(\s+\d{1,9})*\s*", text):
            said = f"give ids as numbers, such as '3 14 15'; given {quoted(text)}"
            raise TextError(f"there is no tokenizer beside this model: {said}", place)
    return [[int(word) for word in text.split()] for text in texts]


def masked(loaded: Loaded, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts in which the mask is no text, even where all other special tokens are."""
    return with_marks(loaded, texts, [mask_of(loaded, None)[0]]) if loaded.tokenizer.encode_special_tokens else loaded.ids(texts)


def with_marks(loaded: Loaded, texts: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    """The tokens of texts in which these special tokens are no text."""
    tokenizer = loaded.tokenizer
    check_texts(texts)
    tokenizer.encode_special_tokens = False
    marks = {name: tokenizer.encode(name, add_special_tokens=False) for name in names}
    tokenizer.encode_special_tokens = True
    between = re.compile(f"({'|'.join(map(re.escape, names))})")
    rows = []
    for place, text in enumerate(texts):
        pieces = [marks[piece] if piece in marks else tokenizer.encode(piece, add_special_tokens=False) for piece in between.split(text)]
        rows.append(tokenizer.post_process(type(pieces[0]).merge(pieces)).ids)
        loaded.check_length(len(rows[-1]), place)
    return rows


def infilling(loaded: Loaded, texts: Sequence[str]) -> list[list[int]]:
    """Texts with one mask in the form that infilling is learned in: prefix <mask> suffix <mask>, behind which the content is written."""
    check_texts(texts)
    assert loaded.origin is not None
    name, mask = mask_of(loaded, None)
    begin, rows = loaded.origin.config["bos_token_id"], []  # which stood before every text, whatever the tokenizer puts there
    for place, text in enumerate(texts):
        parts = [loaded.tokenizer.encode(part, add_special_tokens=False).ids for part in text.split(name)]
        if len(parts) != 2:
            said = f"{name} stands {len(parts) - 1} times in it, and one gap is filled at a time"
            raise TextError(said if len(parts) > 1 else f"there is nothing to fill: write {name} where something is missing", place)
        rows.append([begin, *parts[0], mask, *parts[1], mask])
        loaded.check_length(len(rows[-1]), place)
    return rows


def filled(loaded: Loaded, ids: list[int], logits_LV: torch.Tensor, best: int, mask: tuple[str, int], text: int) -> list[Tree]:
    """For each masked place the most probable tokens."""
    places = [i for i, token in enumerate(ids) if token == mask[1]]
    if not places:
        raise TextError(f"there is nothing to fill: write {mask[0]} where a word is missing", text)
    rows = []
    for place in places:
        chances = torch.softmax(logits_LV[place].float(), dim=-1).topk(min(best, logits_LV.shape[-1]))
        named = [{"token": written(loaded, int(i)), "probability": float(p)} for p, i in zip(*chances, strict=True)]
        rows.append({"place": place, "tokens": named})
    return rows


def written(loaded: Loaded, token: int) -> str:
    if loaded.tokenizer is None:
        return str(token)
    return loaded.tokenizer.decode([token]).strip() or str(loaded.tokenizer.id_to_token(token))  # which decoding leaves out


def mask_of(loaded: Loaded, given: int | None) -> tuple[str, int]:
    """The token that stands for a missing word, as it is written and its id: as given, by the tokenizer's own config, or by its name."""
    if given is not None:
        return written(loaded, given), given
    if loaded.tokenizer is None:
        said = loaded.origin.config.get("mask_token_id") if loaded.origin else None
        if type(said) is not int:
            raise ValueError("nothing says which token is the mask: give mask_id=..., its id")
        return str(said), said
    said = said_beside(loaded.origin.beside).get("mask_token") if loaded.origin else None
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
