"""Safetensors files: a header that does not fit its file is refused before any weight is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from manyheads.errors import CheckpointError, CorruptFileError
from manyheads.files.tensors import SafetensorsFile


def header(entries):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start, stop, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


INVALID = {
    "empty": b"",
    "shorter than a length": b"\0" * 7,
    "length beyond the file": struct.pack("<Q", 1 << 60) + b"{}",
    "length beyond the limit": struct.pack("<Q", (100 << 20) + 1) + b" " * 100,
    "no data": header({"a": entry(0, 8)}),
    "too much data": header({"a": entry(0, 8)}) + b"\0" * 9,
    "overlap": header({"a": entry(0, 8), "b": entry(4, 12)}) + b"\0" * 12,
    "gap": header({"a": entry(8, 16)}) + b"\0" * 16,
    "shape of another size": header({"a": entry(0, 8, shape=(3,))}) + b"\0" * 8,
    "negative shape": header({"a": entry(0, 8, shape=(-2,))}) + b"\0" * 8,
    "shape that overflows": header({"a": entry(0, 8, shape=(1 << 62, 4))}) + b"\0" * 8,
    "fraction": header({"a": entry(0, 8.0)}) + b"\0" * 8,
    "unknown dtype": header({"a": entry(0, 8, dtype="F8")}) + b"\0" * 8,
    "dtype that is a list": header({"a": entry(0, 8, dtype=[])}) + b"\0" * 8,
    "missing fields": header({"a": {"dtype": "F32"}}) + b"\0" * 8,
    "entry that is a number": header({"a": 3}) + b"\0" * 8,
    "list": header([1]) + b"\0" * 8,
    "not UTF-8": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "deep": struct.pack("<Q", 9000) + b"[" * 9000,
    "one name twice": header(
        b'{"a": %b, "a": %b}' % tuple(json.dumps(entry(0, 8, kind)).encode() for kind in ("F32", "I32"))
    )
    + b"\0" * 8,
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_header_is_refused(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(INVALID[name])
    with pytest.raises(CorruptFileError) as caught:
        SafetensorsFile(path)
    assert caught.value.code == "checkpoint.corrupt"
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_names_the_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    for entries in ({"wte": entry(0, 8, dtype="F8")}, {"wte": entry(0, 8, shape=(3,))}):
        path.write_bytes(header(entries) + b"\0" * 8)
        with pytest.raises(CorruptFileError, match="'wte'"):
            SafetensorsFile(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_has_the_same_tensors(data, tmp_path_factory):
    """Truncated anywhere, or with any byte of its header changed."""
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.int32)}
    save_file(tensors, path)
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="truncate"):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        index = data.draw(st.integers(0, 8 + int.from_bytes(whole[:8], "little") - 1))
        damaged = whole[:index] + bytes([data.draw(st.integers(0, 255))]) + whole[index + 1 :]
    path.write_bytes(damaged)
    try:
        file = SafetensorsFile(path)
        for name in file:
            file[name]
    except CheckpointError:
        return
    assert len(damaged) == len(whole)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("change", ["truncated", "replaced by a file of the same size"])
def test_a_file_that_changes_after_its_header_was_read_is_refused(tmp_path, copy, change):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(100)}, path)
    file = SafetensorsFile(path, copy=copy)
    if change == "truncated":
        with path.open("r+b") as raw:
            raw.truncate(200)
    else:
        save_file({"a": torch.zeros(100)}, tmp_path / "other")
        (tmp_path / "other").replace(path)
    with pytest.raises(CorruptFileError) as caught:
        file["a"]
    assert str(path) in str(caught.value)


def test_tensors_are_mapped_unless_they_are_copied(tmp_path):
    """A mapped tensor is a view of the file: it costs no memory of its own."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(4), "empty": torch.zeros(0, 3)}, path)
    mapped, copied = SafetensorsFile(path), SafetensorsFile(path, copy=True)
    assert mapped["a"].untyped_storage().data_ptr() == mapped["b"].untyped_storage().data_ptr()
    assert copied["a"].untyped_storage().data_ptr() != copied["b"].untyped_storage().data_ptr()
    for file in (mapped, copied):
        assert torch.equal(file["a"], torch.ones(4))
        assert file["empty"].shape == (0, 3)


def test_a_tensor_that_is_not_aligned_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    text = json.dumps({"a": entry(0, 1, "U8", (1,)), "b": entry(1, 9, "F32", (2,))}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\7" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    for copy in (False, True):
        assert SafetensorsFile(path, copy=copy)["b"].tolist() == [1.5, -2.0]


def test_a_file_of_many_gigabytes_is_read(tmp_path):
    # a sparse file: the offsets are those of a large model, the disk holds one page
    path, first = tmp_path / "model.safetensors", 20 << 30
    front = header({"wte": entry(0, first, "U8", (first,)), "bias": entry(first, first + 8)})
    with path.open("wb") as file:
        file.write(front)
        file.seek(len(front) + first)
        file.write(struct.pack("<2f", 1.0, 2.0))
    for copy in (False, True):
        store = SafetensorsFile(path, copy=copy)
        assert store.shapes == {"wte": (first,), "bias": (2,)}
        assert store["bias"].tolist() == [1.0, 2.0]
