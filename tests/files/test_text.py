"""Reading lines: numbered, decompressed, in bounded memory; what a line is does not depend on how the file is read."""

from __future__ import annotations

import gzip
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from manyheads.files.text import LineReader, open_decompressed


def test_only_a_byte_order_mark_at_the_start_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n\ufefftwo\n")
    assert list(LineReader(tmp_path / "a.txt", "strict", 100)) == [(1, "one"), (2, "\ufefftwo")]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\0\ufeff", exclude_categories=["Cs"]), max_size=20)))
def test_lines_are_the_same_compressed_or_not_and_whatever_ends_them(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("lines")
    for end in ("\n", "\r\n", "\r"):
        content = "".join(line + end for line in lines).encode()
        for number, data in enumerate((content, gzip.compress(content))):
            path = folder / f"{number}.txt"
            path.write_bytes(data)
            numbered = list(LineReader(path, "strict", 100))
            assert [line for _, line in numbered] == lines
            assert [i for i, _ in numbered] == list(range(1, len(lines) + 1))


def test_invalid_bytes_are_an_error_replaced_or_skipped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntw\xff\nthree\n")
    with raises("data.encoding", path, "line 2 ", "0xff", "byte 6", "the hint"):
        list(LineReader(path, "strict", 100, encoding_hint="the hint"))
    for errors, expected in (("replace", ["one", "tw�", "three"]), ("skip", ["one", "three"])):
        warnings = Counter()
        assert [line for _, line in LineReader(path, errors, 100, warnings)] == expected
        assert warnings.total() == 1


def test_a_line_longer_than_allowed_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "a.txt"
    for length in (11, 100, 10_000):
        path.write_text("é" * 10 + "\n" + "é" * length)
        with raises("data.too-large", path, "line 2 ", "10 characters", "the hint"):
            list(LineReader(path, "strict", 10, length_hint="the hint"))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with raises("data.file", tmp_path / "none"), open_decompressed(tmp_path / "none"):
        pytest.fail("it does not exist")
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with raises("data.file", "broken.gz"):
        list(LineReader(tmp_path / "broken.gz", "strict", 2000))


def test_a_gzip_bomb_is_refused_before_most_of_it_is_decompressed(tmp_path):
    """Also if it is all newlines, of which each is a line."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\n" * (8 << 20)))
    count = 0
    with raises("data.too-large", path):
        for _ in LineReader(path, "strict", 100):
            count += 1
    assert count < 2 << 20


def test_utf_16_with_a_byte_order_mark_is_read_as_utf_8_is(tmp_path):
    lines = ["one", "", "é😀\u2028\u0085", "\ufefflast"]
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        for end in ("\n", "\r\n", "\r"):
            content = mark + end.join(lines).encode(encoding)
            for data in (content, gzip.compress(content)):
                (tmp_path / "a.txt").write_bytes(data)
                assert list(LineReader(tmp_path / "a.txt", "strict", 100)) == list(enumerate(lines, 1))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" + ("x" * 101).encode("utf-16-le"))
    with raises("data.too-large", "line 1 "):
        list(LineReader(tmp_path / "a.txt", "strict", 100))
