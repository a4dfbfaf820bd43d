"""Reads the answers that a file of `manyheads look --html` holds."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct

MAX_FILE = 20_000_000  # bytes


def answers_of(path):
    """The bytes of each answer by its path, as api.js reads them."""
    (encoded,) = re.findall(r'id="offline-data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)
    data = gzip.decompress(base64.b64decode(encoded))
    (length,) = struct.unpack_from("<I", data)
    start = 4 + length
    index = json.loads(data[4:start])
    return {name: data[start + first : start + first + size] for name, (first, size, _) in index.items()}


def assert_trusted(path):
    """The file is small, and the checks of every attention in it hold."""
    assert path.stat().st_size <= MAX_FILE
    answers = answers_of(path)
    attentions = json.loads(answers["look/run"])["attentions"]
    measures = [json.loads(answer) for name, answer in answers.items() if name.startswith("look/measures?")]
    assert len(measures) == len(attentions) > 0
    for measured in measures:
        trust = measured["trust"]
        assert trust["difference"] < 1e-4
        assert trust["row_sum"] < 1e-5
        assert trust["masked"] == 0
