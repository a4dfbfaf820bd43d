"""Texts that must follow a JSON schema or match a regular expression."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any, ClassVar

from manyheads.errors import GenerationConfigError, UnsupportedError
from manyheads.generate.grammar import MAX_BYTES, GrammarProcessor, check_grammar, lark
from manyheads.generate.logits_processor import LogitsProcessor, LogitsProcessorSpec
from manyheads.generate.vocabulary import Vocabulary, import_llguidance
from manyheads.spec import field, quote

SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # those of json.dumps


class ConstrainedSpec(LogitsProcessorSpec):
    """−∞ for every token after which no text of the grammar is possible."""

    order: ClassVar[int] = 95  # after those that force tokens
    is_grammar: ClassVar[bool] = True

    @abstractmethod
    def grammar(self) -> str:
        """The grammar in llguidance's form of Lark; raises if the setting is too large or has a wrong type."""

    def check(self) -> None:
        check_grammar(self.name, self.grammar())

    def prepare(self, vocabulary: Vocabulary) -> LogitsProcessor:
        if vocabulary.tokenizer is None:
            raise UnsupportedError(f"{self.name} needs a tokenizer, and this checkpoint has none")
        constraint = GrammarProcessor(self.name, self.grammar(), vocabulary)
        return LogitsProcessor(constraint.apply, constraint.is_complete)


class JsonSchemaSpec(ConstrainedSpec, kind="json-schema"):
    """−∞ for every token after which no JSON of this schema is possible; eos only after a whole value

    White space is that of Python's json.dumps, ", " and ": ". A keyword that is not supported is an error. Computed by
    llguidance.
    """

    json_schema: bool | str | dict[str, Any] | None = field(
        None, "a JSON schema as a table or as JSON; true is any JSON"
    )

    def grammar(self) -> str:
        schema = self.tree()
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise GenerationConfigError(f"json_schema: x-guidance is {quote(options)}, expected a table")
        return lark(f"%json {json.dumps(schema | {'x-guidance': SEPARATORS | options})}")

    def tree(self) -> dict[str, Any]:
        text: Any = self.json_schema
        try:
            if not isinstance(text, str):
                text = json.dumps(text, allow_nan=False)
            check_size("json_schema", text)
            tree = json.loads(text)
        except (RecursionError, TypeError, ValueError) as error:
            if isinstance(error, GenerationConfigError):
                raise
            raise GenerationConfigError(f"json_schema is not JSON: {error}") from None
        if tree is not True and not isinstance(tree, dict):
            raise GenerationConfigError(f"json_schema is {quote(tree)}, expected a JSON object, or true for any JSON")
        return {} if tree is True else tree


class RegexSpec(ConstrainedSpec, kind="regex"):
    """−∞ for every token after which the regular expression cannot match the whole text; eos only where it does

    The syntax is that of Rust's regex, without look-around and backreferences. Computed by llguidance.
    """

    regex: str | None = field(None, "a regular expression that matches the whole text")

    def grammar(self) -> str:
        if not self.regex:
            raise GenerationConfigError("regex is empty, so it matches only the empty text")
        check_size("regex", self.regex)
        if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
            raise GenerationConfigError("regex ends with a backslash that escapes nothing")
        return lark(f"/{import_llguidance().regex_to_lark(self.regex, '')}/")


def check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GenerationConfigError(f"{name} has an unpaired surrogate, which is not valid Unicode") from None
    if size > MAX_BYTES:
        raise GenerationConfigError(f"{name} has {size:,} bytes, expected at most {MAX_BYTES:,}")
