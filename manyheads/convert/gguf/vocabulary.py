"""Converts tokenizers to and from GGUF metadata: tokens, types, merges or scores, and a pre-tokenizer name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.errors import CheckpointTokenizerError, ExportError
from manyheads.spec import Tree, quote

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
MAX_PIECE_LENGTH = 256  # characters; merges of longer pieces are not computed
MAX_MERGES = 1 << 22  # ten times as many as the largest published vocabularies have

# name of a pre-tokenizer in a file → its steps, which are regular expressions; None is byte-level with GPT-2's
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = "digits"
PRE_TOKENIZERS: dict[str, tuple[str | None, ...]] = {
    "gpt-2": (None,), "smollm": (DIGITS, None), "llama-bpe": (WORDS % "{1,3}",), "qwen2": (WORDS % "",),
}  # fmt: skip
ALIASES = {
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "jais": "gpt-2",
    "starcoder": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
ADD_BOS = ("llama-bpe",)  # these add bos to every text unless add_bos_token is false


# ------------------------------------------------------------------------------------------------------------- reading


def read_vocabulary(metadata: Mapping[str, Any], path: object) -> Any:
    """The tokenizer of a file; None if it is missing or of an unknown kind."""
    from tokenizers import AddedToken, Tokenizer, models

    from manyheads.files.tokenizer import check_tokens, explain_tokenizer_errors

    tokens, types = get(metadata, "tokens", list), get(metadata, "token_type", list) or []
    if not tokens:
        return None
    tokens = [str(token) for token in tokens]
    model, pre = get(metadata, "model", str), get(metadata, "pre", str) or ""
    pre = ALIASES.get(pre, pre)
    add_bos = model == "llama" or pre in ADD_BOS
    with explain_tokenizer_errors(f"{path} has a tokenizer that cannot be read", CheckpointTokenizerError):
        check_tokens(tokens)
        if model == "gpt2" and pre in PRE_TOKENIZERS:
            merges = (str(merge).partition(" ") for merge in get(metadata, "merges", list) or [])
            pairs = [(left, right) for left, _, right in merges if right]
            ids = {token: i for i, token in enumerate(tokens)}
            tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=add_bos))
            pre_tokenize_bytes(tokenizer, PRE_TOKENIZERS[pre])
        elif model == "llama":
            tokenizer = Tokenizer(bpe_by_scores(tokens, get(metadata, "scores", list) or [], types))
            replace_spaces(tokenizer, prefix=get(metadata, "add_space_prefix", bool) is not False)
        else:
            name = quote(f"{model}, {pre}")
            warnings.warn(f"{path} has a tokenizer of the unknown kind {name}; use token ids", stacklevel=2)
            return None
        for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
            added_tokens = [token for token, token_type in zip(tokens, types, strict=False) if token_type == kind]
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added_tokens])
    add_bos_token = get(metadata, "add_bos_token", bool)
    eos = get(metadata, "add_eos_token", bool) is True
    add_special_tokens(tokenizer, tokens, metadata, bos=add_bos if add_bos_token is None else add_bos_token, eos=eos)
    return tokenizer


def get(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, kind) else None


def bpe_by_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> Any:
    """A BPE model whose merges are ordered by the scores of the pieces, as in SentencePiece."""
    from tokenizers import models

    ids = {token: i for i, token in enumerate(tokens)}
    plain = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    merges = []
    for token in plain:
        if len(token) > MAX_PIECE_LENGTH:
            continue
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in plain and token[i:] in plain]
        merges += [(-scores[ids[token]], ids[left], ids[right], left, right) for left, right in halves]
        if len(merges) > MAX_MERGES:
            raise ValueError(f"its pieces merge in more than {MAX_MERGES:,} ways")
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    return models.BPE(ids, [merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)


def pre_tokenize_bytes(tokenizer: Any, steps: Sequence[str | None]) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    chain: list[Any] = []
    for step in steps:
        if step is None:
            chain.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        elif step == DIGITS:
            chain.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            chain += [pre_tokenizers.Split(Regex(step), "isolated"), byte_level]
    tokenizer.pre_tokenizer = chain[0] if len(chain) == 1 else pre_tokenizers.Sequence(chain)
    tokenizer.decoder = decoders.ByteLevel()


def replace_spaces(tokenizer: Any, *, prefix: bool) -> None:
    """Replaces spaces by SentencePiece's ▁. `prefix` adds one before every text."""
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def add_special_tokens(
    tokenizer: Any, tokens: Sequence[str], metadata: Mapping[str, Any], *, bos: bool, eos: bool
) -> None:
    """Adds bos before and eos after every text, as far as requested."""
    from tokenizers import processors

    ids = {name: get(metadata, f"{name}_token_id", int) for name, add in (("bos", bos), ("eos", eos)) if add}
    added = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    if wrong := [token for token in added.values() if "$" in token or ":" in token or not token]:
        raise CheckpointTokenizerError(f"the token {quote(wrong[0])} cannot be added to a text")
    if added:
        single = [token for token in (added.get("bos"), "$A", added.get("eos")) if token is not None]
        special = [(token, ids[name]) for name, token in added.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


# ------------------------------------------------------------------------------------------------------------- writing


def write_vocabulary(tokenizer: Any, vocab_size: int, config: Mapping[str, Any]) -> Tree:
    """The GGUF metadata of a tokenizer. Raises an error if a file cannot express it."""
    if not hasattr(tokenizer, "to_str"):
        return {"tokenizer.ggml.model": "none"}
    tree = json.loads(tokenizer.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise ExportError(f"a GGUF file needs a BPE tokenizer, and the model's is {quote(model['type'])}")
    names = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    if max(names, default=0) >= vocab_size:
        raise ExportError(
            f"the tokenizer has {max(names) + 1:,} tokens, but the model has a vocabulary of {vocab_size:,}"
        )
    added = {entry["id"]: entry for entry in tree["added_tokens"]}
    tokens = [names.get(i, f"[UNUSED{i}]") for i in range(vocab_size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    types = [token_type(names.get(i), added.get(i), model) for i in range(vocab_size)]
    empty = tokenizer.encode("").ids
    values: Tree = {
        "tokens": tokens,
        "token_type": types,
        "add_bos_token": empty[:1] == [config.get("bos_token_id")],
        "add_eos_token": empty[-1:] == [config.get("eos_token_id")],
    }
    if model["byte_fallback"]:
        pairs = reversed([*enumerate(merge.partition(" ") for merge in merges)])
        ranks = {left + right: rank for rank, (left, _, right) in pairs}
        prefix = "Prepend" in json.dumps(tree["normalizer"]) or '"always"' in json.dumps(tree["pre_tokenizer"])
        values |= {"model": "llama", "pre": "default", "add_space_prefix": prefix}
        values["scores"] = [-float(ranks.get(token, len(merges) + i)) for i, token in enumerate(tokens)]
    else:
        values |= {"model": "gpt2", "pre": pre_tokenizer_name(tree), "merges": merges}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    ids = {f"tokenizer.ggml.{key[:3]}_token_id": config.get(key) for key in ("bos_token_id", "eos_token_id")}
    check_same(tokenizer, read_vocabulary(metadata | ids, "it"))
    return metadata


# texts for which tokenizers often differ
PROBES = (
    "", " ", "Hello world", "  two  spaces ", "UPPER lower", "it's we'LL", "123 4567.89", "naïve café", "“…” – €",
    "line\nbreak\n\n\ttab", "日本語 中文", "Привет мир", "🙂👍🏽", "<s>a</s>", "a_b-c/d\\e", "x" * 40,
)  # fmt: skip


def check_same(tokenizer: Any, again: Any) -> None:
    """Raises an error if the tokenizer that is read back from the metadata encodes a text differently.

    Whether names of special tokens in a text are read as plain text is not stored: llama.cpp asks its caller.
    """
    again.encode_special_tokens = tokenizer.encode_special_tokens
    for text in PROBES:
        if tokenizer.encode(text).ids != again.encode(text).ids:
            raise ExportError(f"a GGUF file cannot express how this tokenizer encodes {quote(text)}")


def token_type(token: str | None, added: Tree | None, model: Tree) -> int:
    if token is None:
        return UNUSED
    if token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if model["byte_fallback"] and len(token) == 6 and token.startswith("<0x") else NORMAL


def pre_tokenizer_name(tree: Tree) -> str:
    """The name of a pre-tokenizer. Without merges every byte is a token, wherever a text is split."""
    steps: list[str | None] = []
    whole = tree["pre_tokenizer"] or {}
    for step in whole.get("pretokenizers", [whole]):
        if step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
            steps += [None] if step["use_regex"] or not tree["model"]["merges"] else []
        elif step.get("type") == "Digits" and step["individual_digits"]:
            steps.append(DIGITS)
        elif step.get("type") == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]:
            steps.append(step["pattern"]["Regex"])
        else:
            steps.append(f"{step.get('type')}")
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        if tuple(steps) == pre_tokenizer:
            return name
    raise ExportError(f"a GGUF file has no name for this pre-tokenizer: {quote(json.dumps(whole))}")
