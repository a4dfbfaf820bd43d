"""Tokenizers as GGUF files hold them: tokens, their kinds, merges or scores, and a name for how a text is cut; both ways."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.convert.files import FileError
from manyheads.spec import Tree, quoted

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
LONGEST_PIECE = 256  # characters of a piece that is joined from others

# how a text is cut before it is merged, by the name a file gives it: patterns for each step, None for the one that all share
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = "digits"
CUTS: dict[str, tuple[str | None, ...]] = {
    "gpt-2": (None,), "smollm": (DIGITS, None), "llama-bpe": (WORDS % "{1,3}",), "qwen2": (WORDS % "",),
}  # fmt: skip
SAME_CUT = {
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "jais": "gpt-2",
    "starcoder": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
BEGINS = ("llama-bpe",)  # cuts whose texts begin with a token of their own, unless the file says otherwise


# --------------------------------------------------------------------------------------------------------------- in


def read_vocabulary(values: Mapping[str, Any], path: object) -> Any:
    """The tokenizer that a file holds, where it is of a sort that is known; None otherwise."""
    from tokenizers import AddedToken, Tokenizer

    tokens, kinds = said(values, "tokens", list), said(values, "token_type", list) or []
    if not tokens:
        return None
    tokens = [str(token) for token in tokens]
    pre = said(values, "pre", str) or ""
    pre = SAME_CUT.get(pre, pre)
    try:
        if said(values, "model", str) == "gpt2" and pre in CUTS:
            tokenizer, begins = Tokenizer(by_merges(tokens, said(values, "merges", list) or [], whole=pre in BEGINS)), pre in BEGINS
            cut_by_bytes(tokenizer, CUTS[pre])
        elif said(values, "model", str) == "llama":
            scores = said(values, "scores", list) or []
            tokenizer, begins = Tokenizer(by_scores(tokens, scores, kinds)), True
            cut_by_spaces(tokenizer, first=said(values, "add_space_prefix", bool) is not False)
        else:
            sort = f"{said(values, 'model', str)}, {said(values, 'pre', str)}"
            warnings.warn(f"{path} has a tokenizer of a sort that is not known ({sort}): ids are read and written instead", stacklevel=2)
            return None
    except Exception as error:
        raise FileError(f"{path} has a tokenizer that cannot be read: {error}") from None
    for kind, special in ((CONTROL, True), (UNKNOWN, True), (OWN, False)):
        added = [token for token, found in zip(tokens, kinds, strict=False) if found == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    asked = said(values, "add_bos_token", bool)
    frame(tokenizer, tokens, values, bos=begins if asked is None else asked, eos=said(values, "add_eos_token", bool) is True)
    return tokenizer


def said(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, kind) else None


def by_merges(tokens: Sequence[str], merges: Sequence[Any], *, whole: bool) -> Any:
    from tokenizers import models

    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges) if right]
    return models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=whole)


def by_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> Any:
    """Pieces that join in the order of their scores, as merges in that order."""
    from tokenizers import models

    places = {token: i for i, token in enumerate(tokens)}
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, OWN, UNUSED)}
    merges = []
    for token in plain:
        if len(token) > LONGEST_PIECE:
            continue
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in plain and token[i:] in plain]
        merges += [(-scores[places[token]], places[left], places[right], left, right) for left, right in halves]
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    return models.BPE(places, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)


def cut_by_bytes(tokenizer: Any, steps: Sequence[str | None]) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    made: list[Any] = []
    for step in steps:
        if step is None:
            made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        elif step == DIGITS:
            made.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            made += [pre_tokenizers.Split(Regex(step), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = made[0] if len(made) == 1 else pre_tokenizers.Sequence(made)
    tokenizer.decoder = decoders.ByteLevel()


def cut_by_spaces(tokenizer: Any, *, first: bool) -> None:
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if first else spaces
    strip = [decoders.Strip(" ", 1, 0)] if first else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def frame(tokenizer: Any, tokens: Sequence[str], values: Mapping[str, Any], *, bos: bool, eos: bool) -> None:
    """What stands before and after every text."""
    from tokenizers import processors

    ids = {name: said(values, f"{name}_token_id", int) for name, wanted in (("bos", bos), ("eos", eos)) if wanted}
    known = {name: i for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    if wrong := [tokens[i] for i in known.values() if "$" in tokens[i] or ":" in tokens[i] or not tokens[i]]:
        raise FileError(f"the token {quoted(wrong[0])} cannot begin or end a text")
    if known:
        parts = [*([tokens[known["bos"]]] if "bos" in known else []), "$A", *([tokens[known["eos"]]] if "eos" in known else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=[(tokens[i], i) for i in known.values()])


# -------------------------------------------------------------------------------------------------------------- out


def write_vocabulary(tokenizer: Any, vocab: int, config: Mapping[str, Any]) -> Tree:
    """What a file says of a tokenizer; refused where it has no words for how this one works."""
    if not hasattr(tokenizer, "to_str"):
        return {"tokenizer.ggml.model": "none"}
    tree = json.loads(tokenizer.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise ValueError(f"a GGUF file has tokenizers that merge pairs; this one is of the sort {quoted(model['type'])}")
    tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    if max(tokens, default=0) >= vocab:
        raise ValueError(f"the tokenizer has {max(tokens) + 1:,} tokens, and the model {vocab:,}")
    added = {entry["id"]: entry for entry in tree["added_tokens"]}
    words = [tokens.get(i, f"[UNUSED{i}]") for i in range(vocab)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    kinds = [kind_of(i, tokens.get(i), added.get(i), model) for i in range(vocab)]
    said: Tree = {"tokens": words, "token_type": kinds} | framed(tokenizer, config)
    if model["byte_fallback"]:
        ranks = {left + right: rank for rank, (left, _, right) in reversed([*enumerate(merge.partition(" ") for merge in merges)])}
        first = json.dumps(tree["normalizer"]).find("Prepend") >= 0 or json.dumps(tree["pre_tokenizer"]).find('"always"') >= 0
        said |= {"model": "llama", "pre": "default", "add_space_prefix": first}
        said["scores"] = [-float(ranks.get(word, len(merges) + i)) for i, word in enumerate(words)]
    else:
        said |= {"model": "gpt2", "pre": name_of(tree), "merges": merges}
    values = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    check_alike(tokenizer, read_vocabulary(values | {f"tokenizer.ggml.{key[:3]}_token_id": config.get(key) for key in ENDS}, "it"))
    return values


ENDS = ("bos_token_id", "eos_token_id")
# a word of each kind that tokenizers treat in ways of their own
PROBES = (
    "", " ", "Hello world", "  two  spaces ", "UPPER lower", "it's we'LL", "123 4567.89", "naïve café", "“…” – €", "line\nbreak\n\n\ttab",
    "日本語 中文", "Привет мир", "🙂👍🏽", "<s>a</s>", "a_b-c/d\\e", "x" * 40,
)  # fmt: skip


def check_alike(tokenizer: Any, again: Any) -> None:
    """Refuses a tokenizer that a file would hold as another one."""
    for text in PROBES:
        if tokenizer.encode(text).ids != again.encode(text).ids:
            raise ValueError(f"a GGUF file cannot say how this tokenizer reads {quoted(text)}")


def kind_of(i: int, token: str | None, added: Tree | None, model: Tree) -> int:
    if token is None:
        return UNUSED
    if token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else OWN
    return BYTE if model["byte_fallback"] and len(token) == 6 and token.startswith("<0x") else NORMAL


def framed(tokenizer: Any, config: Mapping[str, Any]) -> Tree:
    """Whether a text gets a token before it and one after it."""
    ids = tokenizer.encode("").ids
    return {"add_bos_token": ids[:1] == [config.get("bos_token_id")], "add_eos_token": ids[-1:] == [config.get("eos_token_id")]}


def name_of(tree: Tree) -> str:
    """The name of the way a text is cut."""
    found: list[str | None] = []
    cut = tree["pre_tokenizer"] or {}
    for step in cut.get("pretokenizers", [cut]):
        if step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            found += [None] if step["use_regex"] else []
        elif step.get("type") == "Digits" and step["individual_digits"]:
            found.append(DIGITS)
        elif step.get("type") == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        else:
            found.append(f"{step.get('type')}")
    for name, steps in CUTS.items():
        if tuple(found) == steps:
            return name
    raise ValueError(f"a GGUF file has no name for how this tokenizer cuts a text: {quoted(json.dumps(cut))}")
