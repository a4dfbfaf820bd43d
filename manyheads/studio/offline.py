"""Writes the page as one file that works from disk without a network: its scripts, and the answers of the server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from urllib.parse import urlencode

import numpy as np

from manyheads.files.read import read_text
from manyheads.spec import Tree
from manyheads.studio.app import WEB
from manyheads.studio.look import RunRequest, describe_all, run_text
from manyheads.studio.session import Session, Sessions
from manyheads.studio.views import TILE, AttentionInfo, ForwardPass

MAX_FILE = 20_000_000  # bytes
MAX_DATA = MAX_FILE * 7 // 10  # compressed; base64 makes it 4/3 as large, and the scripts follow
MAX_CELLS = 1024  # cells of the head shown first that are explained
MAX_NEXT = 64  # positions with next tokens
WHOLE = 1 << 20  # weights up to which the page reads a matrix whole, as in source.js
MAX_SOURCE = 1 << 20  # bytes of one script

Report = Callable[[str, int, int], None]


@dataclass
class Answers:
    """Answers by their paths, as long as they fit into the file."""

    data: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    size: int = 0  # compressed, at most
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, path: str, answer: Tree | bytes, dtype: str = "") -> bool:
        """Whether there was room for it; if not, it is counted."""
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        size = len(zlib.compress(data, 1)) + len(path)
        if self.size + size > MAX_DATA:
            self.left_out[kind] = self.left_out.get(kind, 0) + 1
            return False
        self.size += size
        self.data[path] = (data, dtype)
        return True

    def to_bytes(self) -> bytes:
        """An index of (start, size, dtype) by path as JSON, after its length, and then the answers."""
        index, start = {}, 0
        for path, (data, dtype) in self.data.items():
            index[path] = [start, len(data), dtype]
            start += len(data)
        head = json.dumps(index).encode()
        parts = [struct.pack("<I", len(head)), head, *(data for data, _ in self.data.values())]
        return gzip.compress(b"".join(parts), mtime=0)


def path_of(answer: str, **parameters: object) -> str:
    """The path of a request, as the page asks for it."""
    return f"look/{answer}?{urlencode(parameters)}"


def offline_page(sessions: Sessions, *, target: str | None = None, report: Report = lambda *_: None) -> tuple[str, str]:
    """The page for the text of the sessions, and a sentence about what it leaves out."""
    session, shown = Session(), sessions.shown[0]
    text = sessions.text or describe_all(sessions)["checkpoints"][0]["examples"][0]
    tree = run_text(sessions, session, RunRequest(session="", text=text, target=target))
    forward_pass, key, answers = session[tree["run"]], tree["run"], Answers()
    answers.add("run", "look/run", tree)
    answers.add("hash", path_of("hash", checkpoint=0), {"sha256": shown.hash})
    add_heads(answers, forward_pass, key, report)
    add_matrices(answers, forward_pass, key, report)
    add_outputs(answers, forward_pass, key)
    note = left_out_note(answers)
    info = describe_all(sessions) | {"left_out": note, "text": text}
    answers.data["look/info"] = (json.dumps(info | {"checkpoints": info["checkpoints"][:1]}).encode(), "")
    return render(answers), note


def add_heads(answers: Answers, forward_pass: ForwardPass, key: str, report: Report) -> None:
    """Thumbnails, measures and effects of all heads."""
    total, done = sum(info.heads for info in forward_pass.infos.values()), 0
    for name, info in forward_pass.infos.items():
        answers.add("thumbnails", path_of("thumbnails", run=key, name=name), forward_pass.thumbnails(name))
        answers.add("measures", path_of("measures", run=key, name=name), forward_pass.measures(name))
        for head in range(info.heads):
            answers.add("effects", path_of("effect", run=key, name=name, head=head), forward_pass.effect(name, head))
            done += 1
            report("head", done, total)


def add_matrices(answers: Answers, forward_pass: ForwardPass, key: str, report: Report) -> None:
    """Matrices of all heads, of their means and of the rollout, from the last layer to the first."""
    infos = list(reversed(forward_pass.infos.values()))
    views = [(info, str(head)) for info in infos for head in range(info.heads)]
    aggregates = ["mean", "max", "all-mean", "all-max"]
    views += [(info, name) for info in infos for name in (*aggregates, *(["rollout"] if info.kind == "self" else []))]
    full = False  # the first that does not fit ends it, so that the largest are not left out one by one
    for number, (info, head) in enumerate(views):
        report("matrix", number + 1, len(views))
        for level, row, column in tiles(info):
            tile = path_of("tile", run=key, name=info.name, head=head, row=row, column=column, level=level)
            if full:
                answers.left_out["tiles"] = answers.left_out.get("tiles", 0) + 1
                continue
            weights = forward_pass.tile(info.name, head, level, row, column, "max").cpu().numpy().astype(np.float16)
            full = not answers.add("tiles", tile, weights.tobytes(), "float16")


def tiles(info: AttentionInfo) -> Iterator[tuple[int, int, int]]:
    """Level, row and column of the tiles of a matrix, the coarsest first; of a small one, only those of level 0."""
    is_whole = info.rows * info.columns <= WHOLE
    coarsest = 0 if is_whole else max(0, ceil(np.log2(max(info.rows, info.columns) / TILE)))
    for level in range(coarsest, -1, -1):
        step = TILE << level
        for row in range(ceil(info.rows / step)):
            for column in range(ceil(info.columns / step)):
                yield level, row, column


def add_outputs(answers: Answers, forward_pass: ForwardPass, key: str) -> None:
    """Next tokens at the last positions, and the cells of one head, the first of the last attention."""
    if forward_pass.checkpoint.spec.head.output in ("tokens", "classes"):
        length = forward_pass.states.shape[1]
        for position in range(max(0, length - MAX_NEXT), length):
            answers.add("positions", path_of("next", run=key, position=position), forward_pass.next_tokens(position))
        if length > MAX_NEXT:
            answers.left_out["positions"] = answers.left_out.get("positions", 0) + length - MAX_NEXT
    *_, info = forward_pass.infos.values()
    explained = info.rows * info.columns <= MAX_CELLS
    for row in range(info.rows if explained else 0):
        for column in range(info.columns):
            cell = path_of("cell", run=key, name=info.name, head=0, row=row, column=column)
            answers.add("cells", cell, forward_pass.cell(info.name, 0, row, column))


def left_out_note(answers: Answers) -> str:
    """What this file does not hold."""
    names = {"tiles": "parts of matrices", "positions": "positions with next tokens", "cells": "explained cells"}
    missing = [f"{count:,} {names.get(kind, kind)}" for kind, count in answers.left_out.items()]
    rest = f"; it leaves out {', '.join(missing)}, for its size" if missing else ""
    return (
        "A file without a server: the tab Look of one text, with weights rounded to 3 digits and the cells of the last "
        f"attention's head 0 explained{rest}. “manyheads look” shows other texts and tabs, and switches heads off."
    )


# ---------------------------------------------------------------------------------------------------------------- HTML

IMPORT = re.compile(r'^import (?:\{(?P<names>[^}]*)\}|\* as (?P<whole>\w+)) from "\./(?P<file>[\w.]+)";$', re.M)
EXPORT = re.compile(r"^export (?P<what>(?:async )?function|const|class) (?P<name>\w+)", re.M)


def bundle() -> str:
    """The modules of the page as one script: a module becomes a function that returns its exports."""
    parts: dict[str, str] = {}

    def visit(file: str) -> None:
        if file in parts:
            return
        source = read_text(WEB / file, MAX_SOURCE)
        for match in IMPORT.finditer(source):
            visit(match["file"])
        exports = ", ".join(match["name"] for match in EXPORT.finditer(source))
        body = EXPORT.sub(r"\g<what> \g<name>", IMPORT.sub(as_constant, source))
        function = "async () =>" if file == "main.js" else "() =>"  # only the first module waits
        parts[file] = f"const {identifier(file)} = ({function} {{\n{body}\nreturn {{ {exports} }};\n}})();\n"

    visit("main.js")
    return f'"use strict";\n{"".join(parts.values())}'


def as_constant(match: re.Match[str]) -> str:
    module = identifier(match["file"])
    if match["whole"]:
        return f"const {match['whole']} = {module};"
    return f"const {{{match['names'].replace(' as ', ': ')}}} = {module};"


def identifier(file: str) -> str:
    return f"module_{file.removesuffix('.js')}"


def render(answers: Answers) -> str:
    """The HTML file, which may run only its own script and style, and load nothing."""
    script, style = bundle(), read_text(WEB / "style.css", MAX_SOURCE)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = base64.b64encode(answers.to_bytes()).decode()
    page = read_text(WEB / "index.html", MAX_SOURCE)
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    page = page.replace('<script type="module" src="main.js"></script>\n', "")
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    inline = f'<script type="application/octet-stream" id="offline-data">{data}</script>\n<script>{script}</script>\n'
    return page.replace("</body>", f"{inline}</body>")


def digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
