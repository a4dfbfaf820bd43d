"""Reading small files: bounded in size and depth, and never outside their folder."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest

from manyheads.convert.fairseq.safe_pickle import read_pickle
from manyheads.convert.gguf.container import GgufFile
from manyheads.convert.hf import read_tokenizer_config
from manyheads.convert.pooling import parse_modules
from manyheads.errors import CheckpointError, CorruptFileError, UnsafeFileError
from manyheads.files.read import (
    explain_read_errors,
    read_bytes,
    read_json,
    read_json_or_empty,
    read_text,
    safe_join,
    sha256,
)
from manyheads.files.tensors import SafetensorsFile
from manyheads.generate.checkpoint_settings import read_checkpoint_settings


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        '{"a": 1, "a": 2}',
        '{"a": [{"b": 1, "b": 1}]}',
        r'{"a": "\ud800"}',
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": ' + "[" * 60 + "]" * 60 + "}",
        "[" * 100_000,
    ],
)
def test_json_that_is_not_one_plain_table_is_refused(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CorruptFileError) as caught:
        read_json(path, 1 << 20)
    assert caught.value.code == "checkpoint.corrupt"
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_null_character_and_a_surrogate_pair_are_characters(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(r'{"\u0000": "a\u0000b", "c": "\ud83d\ude42"}')
    assert read_json(path, 100) == {"\0": "a\0b", "c": "🙂"}


def test_bytes_that_are_not_utf_8_are_refused_with_their_position(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b'{"a": "\xff"}')
    for read in (read_json, read_text):
        with pytest.raises(CorruptFileError, match=r"byte 7 is 0xff"):
            read(path, 100)


def test_a_file_is_read_up_to_its_bound_and_not_beyond(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(CorruptFileError) as caught:
        read_bytes(path, 4)
    assert "4 bytes" in str(caught.value)


@pytest.mark.parametrize("read", [partial(read_bytes, max_bytes=4), sha256, SafetensorsFile, GgufFile, read_pickle])
def test_only_a_regular_file_is_opened(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    for path, code in (("/dev/zero", errno.EINVAL), (tmp_path / "pipe", errno.EINVAL), (tmp_path, errno.EISDIR)):
        with pytest.raises(OSError, match=str(path)) as caught:
            read(Path(path))
        assert caught.value.errno == code


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_what_is_not_a_regular_file_is_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="folder"):
            read_bytes(tmp_path, 4)
    assert len(os.listdir("/proc/self/fd")) == before


def test_our_own_json_is_empty_if_it_is_missing_or_broken(tmp_path):
    path = tmp_path / "lock.json"
    for text, table in ((None, {}), ("{", {}), ("[1]", {}), ('{"a": 1, "a": 2}', {}), ('{"a": 1}', {"a": 1})):
        if text is not None:
            path.write_text(text)
        assert read_json_or_empty(path) == table
    path.unlink()
    os.mkfifo(path)
    assert read_json_or_empty(path) == {}


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "x\0y", "x\ud800", "x\ny"])
def test_a_name_that_is_not_that_of_a_file_in_the_folder_is_refused(name, tmp_path):
    with pytest.raises(UnsafeFileError) as caught:
        safe_join(tmp_path, name)
    assert caught.value.code == "checkpoint.unsafe"


def test_links_may_lead_within_the_folder_and_pipes_are_not_opened(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("")
    (folder / "file").write_text("")
    (folder / "within").symlink_to("file")
    (folder / "out").symlink_to("../outside")
    (folder / "parent").symlink_to("..")
    os.mkfifo(folder / "pipe")
    assert safe_join(folder, "within").is_file()
    for name in ("out", "parent", "pipe"):
        with pytest.raises(UnsafeFileError, match=name):
            safe_join(folder, name)


@pytest.mark.parametrize(("error", "code"), [(FileNotFoundError(2, "gone", "x"), "checkpoint.not-found"),
                                             (PermissionError(13, "denied", "x"), "checkpoint.invalid")])  # fmt: skip
def test_errors_of_the_disk_become_errors_of_the_checkpoint(error, code, tmp_path):
    with pytest.raises(CheckpointError) as caught, explain_read_errors(tmp_path):
        raise error
    assert caught.value.code == code
    assert "cannot read x: " in str(caught.value)


def test_a_link_to_itself_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError) as caught, explain_read_errors(tmp_path):
        json.loads(read_text(safe_join(tmp_path, "config.json"), 100))
    assert "config.json" in str(caught.value)


def test_a_duplicate_key_is_refused_in_every_json_file_of_other_people():
    twice = b'{"a": 1, "a": 2}'
    for read in (
        lambda: read_tokenizer_config({"tokenizer_config.json": twice}),
        lambda: read_checkpoint_settings({}, {"generation_config.json": twice}),
        lambda: parse_modules({"modules.json": b'[{"type": "Transformer", "type": "Transformer"}]'}),
    ):
        with pytest.raises(CheckpointError):
            read()
