"""Writing files: complete under their final name, or not at all, and never over what exists."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from raising import raises

from manyheads.errors import OutOfDiskError, OutputError, OutputExistsError
from manyheads.files.manifest import verify_manifest
from manyheads.files.write import (
    append_atomic,
    atomic_output,
    check_absent,
    check_new_file,
    explain_write_errors,
    write_atomic,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_half(target, error):
    with atomic_output(target) as draft:
        draft.write_text("half")
        raise error


def test_a_draft_that_fails_leaves_nothing_not_even_new_folders(tmp_path):
    target = tmp_path / "a" / "b" / "out"
    for number, kind in ((errno.ENOSPC, OutOfDiskError), (errno.EDQUOT, OutOfDiskError), (errno.EACCES, OutputError)):
        with pytest.raises(kind) as caught:
            write_half(target, OSError(number, "message of the disk"))
        assert str(target) in str(caught.value)
        assert caught.value.exit_status == (5 if kind is OutOfDiskError else 2)
        assert not names(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_half(target, KeyboardInterrupt())
    assert not names(tmp_path)


def test_the_first_of_two_writers_wins(tmp_path):
    target = tmp_path / "new" / "out"

    def write(text, before_end=lambda: None):
        with atomic_output(target) as draft:
            draft.write_text(text)
            before_end()

    with pytest.raises(OutputExistsError):
        write("1", lambda: write("2"))
    assert target.read_text() == "2"
    assert names(target.parent) == ["out"]


def test_a_path_that_exists_or_cannot_exist_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    check_absent(tmp_path / "new")
    for name, code in (
        ("file", "usage.output-exists"),
        ("dangling", "usage.output-exists"),
        ("file/x", "usage.output"),
        ("a" * 256, "usage.output"),
        ("x\0y", "usage.output"),
    ):
        with pytest.raises(OutputError if code == "usage.output" else OutputExistsError) as caught:
            check_absent(tmp_path / name)
        assert caught.value.code == code


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    check_new_file(tmp_path / "new")
    check_new_file(tmp_path / "file", force=True)
    for name, code in (
        ("file", "usage.output-exists"),
        ("dangling", "usage.output-exists"),
        ("file/x", "usage.output"),
        ("nowhere/x", "usage.output"),
        (".", "usage.output"),
    ):
        with raises(code):
            check_new_file(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    for path in ("new", "file"):
        with raises("usage.output", tmp_path):
            check_new_file(tmp_path / path, force=True)


def test_a_small_file_is_replaced_or_stays_as_it_was(tmp_path):
    path = tmp_path / "x"
    write_atomic(path, "1")
    write_atomic(path, "2")
    assert path.read_text() == "2"
    (tmp_path / ".x.draft").mkdir()  # where the draft would be
    with pytest.raises(OutputError), explain_write_errors(tmp_path):
        write_atomic(path, "3")
    assert path.read_text() == "2"


def test_a_text_replaces_a_file_only_if_asked_to(tmp_path):
    path = tmp_path / "x"
    write_text(path, "é")
    with pytest.raises(OutputExistsError):
        write_text(path, "2")
    assert path.read_bytes() == "é".encode()
    write_text(path, "3", overwrite=True)
    assert path.read_text() == "3"
    assert names(tmp_path) == ["x"]
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            write_text(path / "y", "4", overwrite=overwrite)
    assert path.read_text() == "3"


def test_a_line_is_appended_completely_or_not_at_all(tmp_path):
    path = tmp_path / "log"
    with pytest.raises(FileNotFoundError):
        append_atomic(path, b"1\n", create=False)
    append_atomic(path, b"1\n", create=True)
    append_atomic(path, b"2\n", create=False)
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom manyheads.files.write import append_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (6, 6))\n"
        "try: append_atomic(Path(sys.argv[1]), b'12345678', create=False)\nexcept OSError: pass\nelse: assert False"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert path.read_bytes() == b"1\n2\n"


def test_a_manifest_that_cannot_be_read_is_a_fault(tmp_path):
    assert "manifest.json" in verify_manifest(tmp_path)
    for text in ("{", "[]", '{"files": 3}', '{"files": {}}', '{"files": {"model.safetensors": 1}}'):
        (tmp_path / "manifest.json").write_text(text)
        assert "manifest.json" in verify_manifest(tmp_path)
