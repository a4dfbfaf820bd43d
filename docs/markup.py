"""Markdown of the generated pages: tables, escaped text, and docstrings as paragraphs and lists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

NOTE = "<!-- Generated from the code by docs/generate.py; edit the code instead. -->"


def page(title: str, introduction: str, *blocks: str) -> str:
    return "\n\n".join((NOTE, f"# {title}", introduction, *(block for block in blocks if block))) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """One line, in which a bar or an angle bracket is text."""
    pieces = re.split(r"(`[^`]*`)", " ".join(str(value).split()))
    return "".join(escape_code(piece) if piece.startswith("`") else escape_text(piece) for piece in pieces)


def prose(text: str) -> str:
    """Paragraphs in which an angle bracket is text; an indented block, such as a formula, is left as it is."""
    return "\n\n".join(one if one.startswith(" ") else cell(one).replace("\\|", "|") for one in text.split("\n\n"))


def escape_text(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")


def escape_code(text: str) -> str:
    """Code in a table; one with a bar is HTML, because Markdown parsers disagree on a bar in backticks."""
    inner = text.strip("`").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{inner}</code>" if "|" in text else text


def code(value: Any) -> str:
    return f"`{value}`" if str(value) else ""


def paragraphs(text: str) -> str:
    """A docstring as Markdown: paragraphs on one line each; lists, and lines such as `name: meaning`, as lists."""
    blocks = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(as_list(block) or " ".join(block.split()) for block in blocks)


def as_list(block: str) -> str:
    if block.startswith("- "):
        return block
    items = re.split(r"\n(?=[a-z_, ]+: )", block)
    is_list = len(items) > 1 and all(re.match(r"[a-z_, ]+: ", item) for item in items)
    return "\n".join(f"- {' '.join(item.split())}" for item in items) if is_list else ""
