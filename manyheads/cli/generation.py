"""The options of `predict`, `chat` and `evaluate` for generation, and the settings that they set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from manyheads.cli import console
from manyheads.errors import FileAccessError, GenerationConfigError, UsageError

MaxNewTokens = Annotated[
    int | None, console.integer_option("Maximum tokens to generate [default: the checkpoint's, or 64; 512 in a chat].")
]
Temperature = Annotated[
    float | None, console.option("T", "Sampling temperature; 0 is greedy [default: the checkpoint's].")
]
TopK = Annotated[int | None, console.integer_option("Sample from the K most probable tokens.", metavar="K")]
TopP = Annotated[float | None, console.option("P", "Sample from the most probable tokens that sum to P.")]
RepetitionPenalty = Annotated[
    float | None, console.option("THETA", "Above 1, makes tokens of the text so far less probable.")
]
Stop = Annotated[
    list[str] | None, console.option("TEXT", r"End at this text; may be repeated. \n is a line break, \t a tab.")
]
OtherSettings = Annotated[
    list[str] | None,
    console.option(
        "NAME=VALUE",
        "Any other setting of 'manyheads show decoding' and 'manyheads show logits_processor', such as min_p=0.1.",
        "--set",
        "-s",
    ),
]
Seed = Annotated[int | None, console.integer_option("Random seed for sampling [default: 0].")]
System = Annotated[str | None, console.option("TEXT", "The system prompt, which says how to answer.", "--system")]
LengthPenalty = Annotated[
    float | None, console.option("ALPHA", "α of beam search: log p / length^α. Higher gives longer texts.")
]
Decoding = Annotated[
    str | None,
    console.option("KIND", "Decoding method, one of 'manyheads show decoding', or a table, {kind = ..., ...}."),
]

# the options that are settings of generation of the same name
NAMES = (
    "max_new_tokens", "num_beams", "length_penalty", "temperature", "top_k", "top_p", "repetition_penalty",
    "json_schema", "regex", "stop", "n", "logprobs", "seed",
)  # fmt: skip


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of generation among the options of a command; wrong ones raise, before a model is loaded."""
    from manyheads.generate.config import generation_config
    from manyheads.spec import override

    settings = {name: options[name] for name in NAMES if options.get(name) not in (None, ())}
    if "stop" in settings:
        settings["stop"] = [unescape(text) for text in settings["stop"]]
    if "json_schema" in settings:
        settings["json_schema"] = read_schema(settings["json_schema"])
    if (decoding := options.get("decoding")) is not None and not decoding.strip():
        raise UsageError("--decoding is empty", hint="name one of 'manyheads show decoding'")
    assignments = [] if decoding is None else [f"decoding={decoding}"]
    settings |= override({}, [*assignments, *(options.get("other_settings") or ())])
    generation_config(**settings)
    return settings


def unescape(text: str) -> str:
    """The text with its line breaks, tabs and backslashes, which a shell passes as two characters each."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], "\\"), text)


def read_schema(value: str) -> str:
    """The JSON text of --json-schema, or of the file that it names."""
    from manyheads.files.read import decode, read_bytes
    from manyheads.generate.grammar import MAX_BYTES

    if value.lstrip()[:1] in ("", "{", "[", '"') or value.strip() in ("true", "false"):
        return value
    path = Path(value)
    console.check_exists(path)
    try:
        return decode(read_bytes(path, MAX_BYTES, error=GenerationConfigError), path, error=GenerationConfigError)
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror or error}") from None
